"""Sends a finished model folder to the Hub: checks it, sends its files in one commit, tags the commit."""

import contextlib
import hashlib
import logging
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelInfo,
    constants,
    errors,
    utils,
)

from d2l_bert import folders
from d2l_bert.messages import UserError, explained
from d2l_bert.model_cards import card as cards
from d2l_bert.model_cards.checks import WRITTEN, check_folder, published_files
from d2l_bert.model_cards.config import PublishConfig


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
        A message for the user: the page's address and the revision; on a dry run, the files to send.

    Raises:
        UserError: the folder fails a check, or the options contradict each other: then nothing was sent. Or the Hub
            cannot be reached, or refuses a request: then the same call can be repeated, and completes the upload.
    """
    config.check()
    check_repo_id(repo_id)
    check_folder(folder, config.changed_code, config.license)
    files = outgoing(folder, config.license)
    if not config.dry_run:
        return send(folder, repo_id, config, tag_of(files))
    sizes = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in files.items()}
    stays = sorted({path.name for path in folder.iterdir()} - {name.partition("/")[0] for name in files})
    lines = [
        *(f"  {size:>13,} bytes  {name}" for name, size in sizes.items()),
        f"  {sum(sizes.values()):>13,} bytes in {len(sizes)} files would be sent; nothing was",
        f"stays here: {', '.join(stays) or 'nothing'}",
    ]
    return "\n".join(lines)


def check_repo_id(repo_id: str) -> None:
    """Raise `UserError` if the Hub does not allow the name of the repository."""
    with explained(f"{repo_id!r} cannot be a repository", "", ValueError):
        utils.validate_repo_id(repo_id)


# ---------------------------------------------------------------------------------------------------------------------
# Sending


def outgoing(folder: Path, license: str | None) -> dict[str, Path | bytes]:
    """
    The files to send by their names in the repository: those of the folder as they are, and the content of the card.

    Args:
        license: replaces the licence in the card.
    """
    card = cards.read_card(folder, license).content.encode()
    return dict(sorted({**published_files(folder), cards.CARD_FILE: card}.items()))


def tag_of(files: dict[str, Path | bytes]) -> str:
    """The tag of the commit with these files: `model-` and 12 digits of a hash of their names and contents."""
    hashes = {
        name: folders.content_hash(file) if isinstance(file, Path) else hashlib.sha256(file).hexdigest()
        for name, file in files.items()
    }
    return f"model-{folders.short_hash(hashes)[:12]}"


def send(folder: Path, repo_id: str, config: PublishConfig, tag: str | None = None) -> str:
    """
    Create the repository if it does not exist, send the files in one commit, and tag the commit.

    Each request can be repeated: files that are already in the repository are not sent again. The repository becomes
    public in the last request.

    Args:
        folder: a folder that was checked.
        tag: the tag of the commit; a pull request has none.

    Returns:
        The page's address and the revision.

    Raises:
        UserError: the Hub cannot be reached, or refuses a request.
    """
    api = HfApi(library_name="d2l-bert", library_version=version("d2l-bert"))
    files, revision = outgoing(folder, config.license), config.revision if config.create_pr else tag or config.revision
    with hub_errors(repo_id):
        repository = make_repository(api, repo_id, config.public)
        repo_id = repository.id
        if config.revision and not config.create_pr:
            api.create_branch(repo_id, branch=config.revision, exist_ok=True)
        files[cards.CARD_FILE] = addressed(files[cards.CARD_FILE].decode(), repo_id, revision).encode()
        add = [CommitOperationAdd(name, str(file) if isinstance(file, Path) else file) for name, file in files.items()]
        there = {file.rfilename for file in api.model_info(repo_id, revision=config.revision).siblings or []}
        # Files of an earlier commit of this package would stand beside weights that they do not belong to.
        old = [name for name in there - files.keys() if any(fnmatchcase(name, each) for each in WRITTEN)]
        commit = api.create_commit(
            repo_id,
            [*add, *(CommitOperationDelete(name) for name in old)],
            commit_message=config.commit_message or f"Model and card, by d2l-bert {version('d2l-bert')}",
            revision=config.revision,
            create_pr=config.create_pr,
        )
        if config.create_pr:
            return f"proposed to {repo_id}: {commit.pr_url}"
        if tag:
            api.create_tag(repo_id, tag=tag, revision=commit.oid, exist_ok=True)
        if repository.private and config.public:  # last: if a request above fails, the repository stays private
            api.update_repo_settings(repo_id, private=False)
    kind = "private" if repository.private and not config.public else "public"
    return f"published: {api.endpoint}/{repo_id} ({kind}), revision {revision or 'main'}; its card says how to load it"


def addressed(content: str, repo_id: str, revision: str | None) -> str:
    """
    A card whose examples load the model from a repository; its metadata name the repository.

    The name in the metadata (`model-index`) is that of the examples; a card without one is left as it is. The name is
    replaced after `from_pretrained(`, `model=` and `pipeline("task", `, and nowhere else. Where the code of the
    repository is run, the revision follows, so that it is the code of this commit.

    Args:
        revision: the tag or branch to name in the examples; None for none.
    """
    card = ModelCard(content)
    if card.data.model_name is None:
        return content
    pin = f', revision="{revision}"' if revision else ""

    def loading(call):
        start, code = call.groups(default="")
        return f'{start}"{repo_id}"{pin if code else ""}{code}'

    starts, name = r"(from_pretrained\(|model=|pipeline\(\"[\w-]+\", )", re.escape(cards.quoted(card.data.model_name))
    card.text = re.sub(rf'{starts}{name}(?:, revision="[^"]*")?(, trust_remote_code=True)?', loading, card.text)
    card.data.model_name = repo_id
    return card.content


def make_repository(api: HfApi, repo_id: str, public: bool) -> ModelInfo:
    """
    Create a private repository, unless it exists; returns what the Hub knows of it, `owner/name` as `id`.

    Args:
        repo_id: `owner/name`, or `name` for a repository of the token's account.
        public: whether it will be made public: a warning then says that everybody will see its earlier commits.
    """
    api.whoami()  # without a token, this says so at once
    there = api.model_info(api.create_repo(repo_id, private=True, exist_ok=True).repo_id)
    if public and there.private and len(there.siblings or []) > 1:  # a new repository has one file, .gitattributes
        logger.warning(
            f"{there.id} is private: it is made public when the model is there, and then everybody can see the "
            f"earlier commits"
        )
    return there


@contextlib.contextmanager
def hub_errors(repo_id: str, again: str = AGAIN) -> Iterator[None]:
    """
    Raise errors of the Hub, the network or the Hub's client as `UserError`, in one line with the way out.

    Args:
        again: the way out for errors after which the same request may succeed.
    """
    verbosity = utils.logging.get_verbosity()
    utils.logging.set_verbosity_error()  # the client's warnings about repeated requests show signed addresses
    try:
        yield
    except (OSError, errors.HTTPError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and error.__cause__ is None:
            raise
        # A failed upload is a RuntimeError whose cause is the reason.
        error = error.__cause__ if isinstance(error, RuntimeError) else error
        said = " ".join((getattr(error, "server_message", None) or str(error) or type(error).__name__).split())
        status = getattr(getattr(error, "response", None), "status_code", None)
        said = f"{status}: {said}" if status else said
        why = f"{constants.ENDPOINT} cannot be reached, or failed ({said}); {again}"
        if isinstance(error, errors.LocalTokenNotFoundError) or status in (401, 403):
            why = f"no token, or not the right one ({said}); log in with `hf auth login`, or set HF_TOKEN"
        elif isinstance(error, ValueError) or (status and status < 500 and status not in (408, 412, 429)):
            why = f"{constants.ENDPOINT} refuses, or is no Hub ({said})"
        raise UserError(f"{repo_id}: {why}") from None
    finally:
        utils.logging.set_verbosity(verbosity)
