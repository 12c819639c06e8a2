"""Publishes on the Hub: a model folder, which is checked and sent in one commit with a tag; all models of a run."""

import contextlib
import hashlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    constants,
    errors,
    utils,
)

from d2l_bert import folders
from d2l_bert.messages import UserError, explained, report
from d2l_bert.model_cards import card as cards
from d2l_bert.model_cards import checks
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.model_cards.markdown import quoted


AGAIN = "what has arrived is kept: when that is put right, the same command completes the upload"


@dataclass(frozen=True)
class PublishResult:
    """
    What was sent to the Hub, or is to be sent.

    Args:
        files: the size of each file in bytes, by its name in the repository.
        url: of the model's page, or of the pull request; None after a dry run.
        revision: the tag, or the branch without one; None for a pull request and after a dry run.
        is_private: whether the repository is private; None after a dry run.
        report: what the command prints.
    """

    files: dict[str, int]
    url: str | None
    revision: str | None
    is_private: bool | None
    report: str


def publish(folder: Path, repo_id: str, config: PublishConfig) -> PublishResult:
    """
    Send a model folder to the Hub.

    Args:
        folder: the output of `pretrain`, or any folder with a d2l-bert model and its tokenizer. If the folder has no
            card, a card is written.
        repo_id: `owner/name`, or `name` for a repository of the token's account.

    A dry run reports the files to send, by logging.

    Raises:
        UserError: the folder fails a check, or the options contradict each other: then nothing was sent. Or the Hub
            cannot be reached, or refuses a request: then the same call can be repeated, and completes the upload.
    """
    config.check()
    check_repo_id(repo_id)
    checks.refuse_links(folder)  # before any file is read
    architecture, model_class = checks.check_code(folder)
    checks.check_tokenizer(folder, architecture)
    checks.check_weights(folder, architecture, model_class)
    files = outgoing(folder, config.license)
    # A dry run reports the files before the card is checked: the card may lack nothing but a licence, and then the
    # report is what the user wants to see.
    if config.dry_run:
        report_files(folder, files)
    checks.check_card(folder, config.license)
    if config.dry_run:
        return PublishResult(sizes_of(files), None, None, None, "complete; nothing was sent")
    return send(files, repo_id, config, tag_of(files))


def check_repo_id(repo_id: str) -> None:
    """Raise `UserError` if the Hub does not allow the name of the repository."""
    with explained(f"{repo_id!r} cannot be a repository", "", ValueError):
        utils.validate_repo_id(repo_id)


def report_files(folder: Path, files: dict[str, Path | bytes]) -> None:
    """Report the files to send, with sizes, and what else is in the folder."""
    sizes = sizes_of(files)
    lines = [f"  {size:>13,} bytes  {name}" for name, size in sizes.items()]
    lines.append(f"  {sum(sizes.values()):>13,} bytes in all")
    sent = {name.partition("/")[0] for name in files}
    stays = sorted({path.name for path in folder.iterdir()} - sent)
    lines.append(f"stays here: {', '.join(stays) or 'nothing'}")
    report.info("\n".join(lines))


def sizes_of(files: dict[str, Path | bytes]) -> dict[str, int]:
    """The size of each file in bytes."""
    sizes = {}
    for name, file in files.items():
        sizes[name] = len(file) if isinstance(file, bytes) else file.stat().st_size
    return sizes


# ---------------------------------------------------------------------------------------------------------------------
# Sending


def outgoing(folder: Path, license: str | None) -> dict[str, Path | bytes]:
    """
    The files to send by their names in the repository: those of the folder as they are, and the content of the card.

    Args:
        license: replaces the licence in the card.
    """
    return {**checks.published_files(folder), cards.CARD_FILE: cards.read_card(folder, license).content.encode()}


def tag_of(files: dict[str, Path | bytes]) -> str:
    """The tag of the commit with these files: `model-` and 12 digits of a hash of their names and contents."""
    hashes = {}
    for name, file in files.items():
        hashes[name] = hashlib.sha256(file).hexdigest() if isinstance(file, bytes) else folders.content_hash(file)
    return f"model-{folders.short_hash(hashes)[:12]}"


def send(files: dict[str, Path | bytes], repo_id: str, config: PublishConfig, tag: str | None = None) -> PublishResult:
    """
    Create the repository if it does not exist, send the files in one commit, and tag the commit.

    Each request can be repeated: files that are already in the repository are not sent again. The repository becomes
    public in the last request.

    Args:
        files: from `outgoing`, of a folder that was checked.
        tag: the tag of the commit; None for none. A pull request gets none.

    Raises:
        UserError: the Hub cannot be reached, or refuses a request.
    """
    api = HfApi(library_name="d2l-bert", library_version=version("d2l-bert"))
    # What the card's examples and the message name: the tag, if there is one. A pull request has none.
    revision = config.revision if config.create_pr else (tag or config.revision)
    with hub_errors(repo_id):
        repository = api.model_info(api.create_repo(repo_id, private=True, exist_ok=True).repo_id)
        repo_id = repository.id
        if config.revision and not config.create_pr:
            api.create_branch(repo_id, branch=config.revision, exist_ok=True)
        card = addressed(files[cards.CARD_FILE].decode(), repo_id, revision)
        commit = api.create_commit(
            repo_id,
            operations(api, repo_id, config.revision, {**files, cards.CARD_FILE: card.encode()}),
            commit_message=config.commit_message or f"Model and card, by d2l-bert {version('d2l-bert')}",
            revision=config.revision,
            create_pr=config.create_pr,
        )
        if config.create_pr:
            said = f"proposed to {repo_id}: {commit.pr_url}"
            return PublishResult(sizes_of(files), commit.pr_url, None, repository.private, said)
        if tag:
            api.create_tag(repo_id, tag=tag, revision=commit.oid, exist_ok=True)
        if repository.private and config.public:  # last: if a request above fails, the repository stays private
            api.update_repo_settings(repo_id, private=False)
    is_private = repository.private and not config.public
    url = f"{api.endpoint}/{repo_id}"
    revision = revision or "main"
    kind = "private" if is_private else "public"
    said = f"published: {url} ({kind}), revision {revision}; its card says how to load it"
    return PublishResult(sizes_of(files), url, revision, is_private, said)


def operations(api: HfApi, repo_id: str, revision: str | None, files: dict[str, Path | bytes]) -> list:
    """
    The operations of a commit: it adds the files, and deletes those of an earlier commit of this package.

    The earlier ones would stand beside weights that they do not belong to.
    """
    found = []
    for name, file in files.items():
        found.append(CommitOperationAdd(name, file if isinstance(file, bytes) else str(file)))
    on_hub = {file.rfilename for file in api.model_info(repo_id, revision=revision).siblings or []}
    for name in on_hub - files.keys():
        if any(fnmatchcase(name, pattern) for pattern in checks.WRITTEN):
            found.append(CommitOperationDelete(name))
    return found


def addressed(content: str, repo_id: str, revision: str | None) -> str:
    """
    A card whose examples load the model from a repository; its metadata name the repository.

        before    pipeline("fill-mask", model="my-bert", trust_remote_code=True)
        after     pipeline("fill-mask", model="me/my-bert", revision="model-0123456789ab", trust_remote_code=True)

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

    def with_address(loading):
        start, trust = loading.groups()
        return f'{start}"{repo_id}"{pin}{trust}' if trust else f'{start}"{repo_id}"'

    start = r"(from_pretrained\(|model=|pipeline\(\"[\w-]+\", )"
    name = re.escape(quoted(card.data.model_name))
    earlier_pin = r'(?:, revision="[^"]*")?'
    trust = r"(, trust_remote_code=True)?"
    card.text = re.sub(f"{start}{name}{earlier_pin}{trust}", with_address, card.text)
    card.data.model_name = repo_id
    return card.content


@contextlib.contextmanager
def hub_errors(repo_id: str, again: str = AGAIN) -> Iterator[None]:
    """
    Raise errors of the Hub, the network or the Hub's client as `UserError`, in one line with the way out.

    Args:
        again: the way out, unless a token is missing or wrong.
    """
    try:
        yield
    except (OSError, errors.HTTPError, ValueError, RuntimeError) as error:
        # A failed upload is a RuntimeError whose cause is the reason.
        reason = error.__cause__ if isinstance(error, RuntimeError) else error
        if reason is None:
            raise
        status = getattr(getattr(reason, "response", None), "status_code", "")
        said = getattr(reason, "server_message", None) or str(reason) or type(reason).__name__
        if isinstance(reason, errors.LocalTokenNotFoundError) or status in (401, 403):
            again = "log in with `hf auth login`, or set HF_TOKEN: no token, or not the right one"
        said = " ".join(f"{status} {said}".split())
        raise UserError(f"{repo_id}: {constants.ENDPOINT} refuses, or cannot be reached ({said}); {again}") from None


# ---------------------------------------------------------------------------------------------------------------------
# At the end of a run


def check_push(repo_id: str, license: str | None, dry_run: bool) -> None:
    """
    Check at the start of a run that the model can be published at the end: name, licence, token, right to write.

    To check the right to write, the repository is created now, except on a dry run. The repository is private until
    `publish_run` has sent the finished model.

    Args:
        license: the licence for the model's card.

    Raises:
        UserError: the model could not be published.
    """
    check_repo_id(repo_id)
    if license is None:
        raise UserError("push_to_hub: a model of this text needs a licence; give --license, such as apache-2.0")
    with hub_errors(repo_id, again="try again when it can, or leave push_to_hub out"):
        HfApi().whoami()
        if not dry_run:
            HfApi().create_repo(repo_id, private=True, exist_ok=True)


def publish_run(folder: Path, repo_id: str, license: str, public: bool) -> str:
    """
    Publish what a run leaves: each model that it has saved by words seen on the branch of its name, then the model.

    Args:
        folder: the run's folder.
        license: of all models: the run may have had none yet when it saved the first.
        public: whether the repository becomes public.

    Returns:
        What `publish` reports of the model.

    Raises:
        UserError: a model cannot be sent; the folder is complete all the same.
    """
    command = ["d2l-bert", "publish", str(folder), repo_id]
    if public:
        command.append("--public")
    with explained(f"the model is complete in {folder}, and {shlex.join(command)} sends it", "", UserError):
        for saved in sorted(folder.glob("chck_*")):
            publish(saved, repo_id, PublishConfig(revision=saved.name, license=license))
        return publish(folder, repo_id, PublishConfig(public=public)).report
