"""Sends a finished model folder to the Hub: checks it, sends its files in one commit, tags the commit."""

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils import validate_repo_id

from d2l_bert.messages import UserError, explained
from d2l_bert.model_cards.card import auto_class
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.model_cards.folder_rules import check_folder
from d2l_bert.model_cards.outgoing import is_written, listing, outgoing, read, with_repository_in_card


logger = logging.getLogger(__name__)


AGAIN = "files that have arrived are kept: run the same command again to complete the upload"


def publish(folder: Path, repo_id: str, config: PublishConfig) -> str:
    """
    Send a model folder to the Hub.

    Args:
        folder: the output of `pretrain`, or any folder with a d2l-bert model and its tokenizer. If the folder has no
            card, a card is written.
        repo_id: `owner/name`, or `name` for a repository of the token's account.

    Returns:
        A message for the user: the page's address and how to load the model; on a dry run, the files to send.

    Raises:
        UserError: the folder fails a check, or the options contradict each other: then nothing was sent. Or the Hub
            cannot be reached, or refuses a request: then the same call can be repeated, and completes the upload.
    """
    config.check()
    check_repo_id(repo_id)
    check_folder(folder, config.changed_code, config.license)
    files, tag = outgoing(folder, config)
    name = folder.resolve().name
    if config.dry_run:
        return listing(folder, with_repository_in_card(files, name, repo_id, tag or config.revision))
    return send(files, tag, name, repo_id, config)


def check_repo_id(repo_id: str) -> None:
    """Raise `UserError` if the Hub does not allow the name of the repository."""
    with explained(f"{repo_id!r} cannot be a repository", "", ValueError):
        validate_repo_id(repo_id)


# ---------------------------------------------------------------------------------------------------------------------
# Sending


def send(files: dict[str, Path | bytes], tag: str | None, name: str, repo_id: str, config: PublishConfig) -> str:
    """
    Create the repository if it does not exist, send the files in one commit, and tag the commit.

    Each request can be repeated: files that are already in the repository are not sent again. The repository becomes
    public in the last request.

    Args:
        files, tag: what `outgoing` returned.
        name: the name of the folder.

    Returns:
        The page's address and how to load the model.

    Raises:
        UserError: the Hub cannot be reached, or refuses a request.
    """
    api = HfApi(library_name="d2l-bert", library_version=version("d2l-bert"))
    with hub_errors(repo_id):
        repo_id = full_repo_id(api, repo_id)
        if config.public:
            warn_of_earlier_commits(api, repo_id)
        api.create_repo(repo_id, private=True, exist_ok=True)
        info = api.model_info(repo_id)
        collection = config.collection and find_collection(api, repo_id, config)
        if config.revision and not config.create_pr:
            api.create_branch(repo_id, branch=config.revision, exist_ok=True)
        if config.revision:
            info = api.model_info(repo_id, revision=config.revision)
        commit = api.create_commit(
            repo_id,
            [
                *(
                    CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
                    for path, content in with_repository_in_card(files, name, repo_id, tag or config.revision).items()
                ),
                *(  # files that an earlier commit of this package has, and this one has not
                    CommitOperationDelete(file.rfilename)
                    for file in info.siblings or []
                    if file.rfilename not in files and is_written(file.rfilename)
                ),
            ],
            commit_message=config.commit_message or f"Model and card, by d2l-bert {version('d2l-bert')}",
            revision=config.revision,
            create_pr=config.create_pr,
        )
        if tag:
            api.create_tag(repo_id, tag=tag, revision=commit.oid, exist_ok=True)
        if collection:
            api.add_collection_item(collection, repo_id, "model", exists_ok=True)
        is_private = info.private
        if is_private and config.public:  # last: if a request above fails, the repository stays private
            api.update_repo_settings(repo_id, private=False)
            is_private = False
        space = config.space and send_space(api, full_repo_id(api, config.space), repo_id, is_private)
    if config.create_pr:
        return f"proposed to {repo_id}: {commit.pr_url}"
    page = f"{api.endpoint}/{repo_id} ({'private' if is_private else 'public'})"
    saved = json.loads(read(files["config.json"]))
    to_try = f"\nto try it: {space}" if space else ""
    return f"published: {page}{to_try}\n{loading_lines(repo_id, tag or config.revision, saved)}"


# A Space of the Hub with the page of `d2l-bert demo`.
SPACE = {
    "README.md": "---\ntitle: {name}\nsdk: gradio\napp_file: app.py\nmodels:\n- {model}\n---\n",
    "requirements.txt": "d2l-bert[demo]=={version}\n",
    "app.py": 'from d2l_bert.demo import make_demo\n\n\nmake_demo(["{model}"]).launch()\n',
}


def send_space(api: HfApi, space: str, model: str, private: bool) -> str:
    """
    Create or replace the Space `owner/name` that shows a model of the Hub; returns its address.

    The Space installs this version of d2l-bert from PyPI. It needs a token of its own to load a private model.
    """
    values = {"name": space.partition("/")[2], "model": model, "version": version("d2l-bert")}
    api.create_repo(space, repo_type="space", space_sdk="gradio", private=private, exist_ok=True)
    operations = [CommitOperationAdd(file, text.format(**values).encode()) for file, text in SPACE.items()]
    api.create_commit(space, operations, repo_type="space", commit_message=f"The page of d2l-bert demo for {model}")
    return f"{api.endpoint}/spaces/{space}"


def full_repo_id(api: HfApi, repo_id: str) -> str:
    """`owner/name` for a name, with the token's account as owner. Asks the Hub in any case, which checks the token."""
    account = api.whoami()["name"]
    return repo_id if "/" in repo_id else f"{account}/{repo_id}"


def warn_of_earlier_commits(api: HfApi, repo_id: str) -> None:
    """
    Log a warning if the repository exists and is private: publishing will show all its commits to everybody.

    Args:
        repo_id: `owner/name`.
    """
    with contextlib.suppress(RepositoryNotFoundError):
        if api.model_info(repo_id).private:
            logger.warning(
                f"{repo_id} is private: it is made public when the model is there, and then everybody can see the "
                f"earlier commits"
            )


def loading_lines(repo_id: str, revision: str | None, config: dict) -> str:
    """Three lines of Python that load this revision of the model without the package d2l_bert."""
    loader = auto_class(config)
    there = f'"{repo_id}"' + (f', revision="{revision}"' if revision else "")
    code = ", trust_remote_code=True" if "auto_map" in config else ""
    return f"""\
  from transformers import {loader}, AutoTokenizer
  model = {loader}.from_pretrained({there}{code})
  tokenizer = AutoTokenizer.from_pretrained({there}{code})"""


def find_collection(api: HfApi, repo_id: str, config: PublishConfig) -> str:
    """The slug of the collection in the options; a title without a collection creates one."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+-[0-9a-f]{24}", config.collection):
        return api.get_collection(config.collection).slug
    owner = repo_id.partition("/")[0]
    return api.create_collection(config.collection, namespace=owner, private=not config.public, exists_ok=True).slug


@contextlib.contextmanager
def hub_errors(repo_id: str, again: str = AGAIN) -> Iterator[None]:
    """
    Raise errors of the Hub, the network or the Hub's client as `UserError`, in one line with the way out.

    Args:
        again: the way out for errors after which the same request may succeed.
    """
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()  # the client's warnings about repeated requests show signed addresses
    try:
        yield
    except (OSError, HTTPError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and error.__cause__ is None:
            raise
        # A failed upload is a RuntimeError whose cause is the reason.
        error = error.__cause__ if isinstance(error, RuntimeError) else error
        said = " ".join((getattr(error, "server_message", None) or str(error) or type(error).__name__).split())
        status = getattr(getattr(error, "response", None), "status_code", None)
        said = f"{status}: {said}" if status else said
        why = f"{constants.ENDPOINT} cannot be reached, or failed ({said}); {again}"
        if isinstance(error, LocalTokenNotFoundError) or status in (401, 403):
            why = f"no token, or not the right one ({said}); log in with `hf auth login`, or set HF_TOKEN"
        elif isinstance(error, ValueError) or (status and status < 500 and status not in (408, 412, 429)):
            why = f"{constants.ENDPOINT} refuses, or is no Hub ({said})"
        raise UserError(f"{repo_id}: {why}") from None
    finally:
        hub_logging.set_verbosity(verbosity)
