"""Sends a finished model folder to the Hub: checks it, sends its files in one commit, tags the commit."""

import contextlib
import json
import logging
import re
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, constants
from huggingface_hub.errors import (
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from d2l_bert.errors import UserError
from d2l_bert.model_cards.card import CARD_FILE, METRICS_FILE, RUN_FILE, auto_class
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.model_cards.folder_rules import check_folder
from d2l_bert.model_cards.metadata import read_metadata
from d2l_bert.model_cards.outgoing import is_written, listing, outgoing, read_object, with_repository_in_card
from d2l_bert.progress import counted
from d2l_bert.tokenization.sources import PYTHON_DOCS


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
    if config.public and config.create_pr:
        raise UserError(
            "a pull request (create_pr) makes no repository public; leave public out, or publish without create_pr"
        )
    check_folder(folder, config.changed_code, config.license)
    files, tag = outgoing(folder, config)
    name = folder.resolve().name
    if config.dry_run:
        if config.public:
            warn_on_dry_run(repo_id)
        text = listing(folder, with_repository_in_card(files, name, repo_id, tag or config.revision))
        return "\n".join(filter(None, (text, quotes_of_text(files))))
    return send(files, tag, name, repo_id, config)


def quotes_of_text(files: dict[str, Path | bytes]) -> str:
    """What to say if card and metrics.json quote sentences of the text that the model was evaluated on; or ""."""
    quoted = len(read_object(files, METRICS_FILE).get("predictions", []))
    corpus = read_object(files, RUN_FILE).get("data", {}).get("corpus_name")
    if not quoted or corpus in (None, PYTHON_DOCS):
        return ""
    return (
        f"{CARD_FILE} and {METRICS_FILE} quote {counted(quoted, 'sentence')} of the held-out text (`predictions`): "
        f"take them out if that text may not be shown"
    )


def check_repo_id(repo_id: str) -> None:
    """Raise `UserError` if the Hub does not allow the name of the repository."""
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise UserError(f"{repo_id!r} cannot be a repository: {error}") from None


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
        check_datasets(api, files)
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
                *(CommitOperationDelete(path) for path in left_over(info, files)),
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
    if config.create_pr:
        return f"proposed to {repo_id}: {commit.pr_url}"
    page = f"{api.endpoint}/{repo_id} ({'private' if is_private else 'public'})"
    return f"published: {page}\n{loading_lines(repo_id, tag or config.revision, read_object(files, 'config.json'))}"


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


def warn_on_dry_run(repo_id: str) -> None:
    """As `warn_of_earlier_commits`; if the Hub cannot be asked, warn that the repository may be private."""
    api = HfApi()
    try:
        with hub_errors(repo_id):
            warn_of_earlier_commits(api, full_repo_id(api, repo_id))
    except UserError:
        logger.warning(
            f"the Hub could not be asked: if {repo_id} exists and is private, everybody will see the earlier commits"
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


def check_datasets(api: HfApi, files: dict[str, Path | bytes]) -> None:
    """Raise `UserError` if the card names a data set that the Hub lacks. Those that the run loaded are not checked."""
    named = read_metadata(files[CARD_FILE].decode()).get("datasets") or []
    loaded = read_object(files, RUN_FILE).get("data", {}).get("hub_datasets", [])
    for name in [named] if isinstance(named, str) else named:
        try:
            if name not in loaded:
                api.dataset_info(name)
        except RepositoryNotFoundError:
            raise UserError(
                f"{CARD_FILE}: datasets names {name}, which the Hub does not know; give its id there, or take it out"
            ) from None


def find_collection(api: HfApi, repo_id: str, config: PublishConfig) -> str:
    """The slug of the collection in the options; a title without a collection creates one."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+-[0-9a-f]{24}", config.collection):
        return api.get_collection(config.collection).slug
    owner = repo_id.partition("/")[0]
    return api.create_collection(config.collection, namespace=owner, private=not config.public, exists_ok=True).slug


def left_over(info: ModelInfo, files: dict[str, Path | bytes]) -> list[str]:
    """Files in the repository whose names this package writes (`is_written`) and which `files` does not have."""
    there = [file.rfilename for file in info.siblings or []]
    return [path for path in there if path not in files and is_written(path)]


@contextlib.contextmanager
def hub_errors(repo_id: str, again: str = AGAIN) -> Iterator[None]:
    """
    Raise errors of the Hub, the network or the Hub's client as `UserError`, in one line with the mend.

    Args:
        again: the mend for errors after which the same request may succeed.
    """
    try:
        with retries_said_once():
            yield
    except (OSError, HTTPError, RuntimeError, KeyError, UnicodeEncodeError, json.JSONDecodeError) as error:
        # A failed upload is a RuntimeError whose cause may be any exception, as upload threads share a connection.
        is_upload = isinstance(error, RuntimeError) and "Error while uploading" in str(error)
        reason = (error.__cause__ if is_upload else None) or error
        line = explanation(reason, again)
        if line is None and is_upload:
            line = f"the connection broke during an upload ({reason}); {again}"
        if line is None:
            raise
        raise UserError(f"{repo_id}: {line}") from None


@contextlib.contextmanager
def retries_said_once() -> Iterator[None]:
    """Replace the client's log messages about repeated requests, which show internal addresses, by one line."""
    was_said = threading.Event()

    def pass_on(record):
        if "thrown while requesting" not in record.getMessage() and "Retrying in" not in record.getMessage():
            return True
        if not was_said.is_set():
            was_said.set()
            logger.warning(f"{constants.ENDPOINT} does not answer as it should; trying again for up to half a minute")
        return False

    client = logging.getLogger("huggingface_hub.utils._http")
    client.addFilter(pass_on)
    try:
        yield
    finally:
        client.removeFilter(pass_on)


def explanation(error: BaseException, again: str) -> str | None:
    """The reason and the mend for an error of the Hub's client; None for any other error."""
    said = " ".join((getattr(error, "server_message", None) or str(error) or type(error).__name__).split())
    status = getattr(getattr(error, "response", None), "status_code", None)
    log_in = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
    if isinstance(error, LocalTokenNotFoundError):
        return f"no token for the Hub here; {log_in}"
    if isinstance(error, UnicodeEncodeError):
        return f"the token has characters that no token has; {log_in}"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so no request is sent; unset HF_HUB_OFFLINE to publish"
    if isinstance(error, RevisionNotFoundError):
        return f"the Hub has no such revision ({said}); a pull request needs an existing branch"
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return f"the Hub does not accept the token ({said}); {log_in}"
    if status == 403:
        return f"the token may not write there ({said}); give a repository of your own, or {log_in}"
    if status in (408, 412, 429):
        return f"the Hub asks to try again ({status}: {said}); {again}"
    if status is not None and status >= 500:
        return f"the Hub failed ({status}: {said}); {again}"
    if status is not None:
        return f"the Hub refuses ({status}: {said})"
    if isinstance(error, (KeyError, json.JSONDecodeError)):
        return f"{constants.ENDPOINT} does not answer like the Hub ({said}); check HF_ENDPOINT"
    if isinstance(error, (HTTPError, ConnectionError, TimeoutError)):
        return f"{constants.ENDPOINT} cannot be reached ({said}); {again}"
    return None
