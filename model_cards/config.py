"""The options of `d2l-bert publish`."""

import re
from dataclasses import dataclass

from d2l_bert.errors import UserError
from d2l_bert.options import HUB, check_strings, option


@dataclass(kw_only=True)
class PublishConfig:
    """
    How a model folder is sent to the Hub. Every field is an option of `d2l-bert publish`.

    Raises:
        UserError: from `check`, if an option is an empty text, or git does not allow the name of the branch.
    """

    public: bool = option(
        False,
        "make the repository public, with all its commits, after sending; without this a new repository is private",
        HUB,
    )
    license: str | None = option(
        None, "licence of the model (a Hub identifier); replaces the licence in the card", HUB, metavar="ID"
    )
    revision: str | None = option(
        None, "branch to send the model to, created if it does not exist; default: main", HUB, metavar="BRANCH"
    )
    create_pr: bool = option(False, "send the model as a pull request; not together with public", HUB)
    commit_message: str | None = option(None, "message of the commit", HUB, metavar="TEXT")
    collection: str | None = option(
        None,
        "collection to add the model to: a slug, or the title of a collection of the same owner",
        HUB,
        metavar="TITLE",
    )
    changed_code: bool = option(
        False, "publish the folder's code although it differs from the installed package's", HUB
    )
    dry_run: bool = option(False, "check everything and list the files to send, with sizes, but send nothing", HUB)

    def check(self) -> None:
        """Check the options before anything is read or sent."""
        check_strings(self)
        if self.revision is not None and NO_BRANCH.search(self.revision):
            raise UserError(
                f"revision {self.revision!r}: git allows no branch of this name; take letters, digits, '-' and '_'"
            )


# Matches names that `git check-ref-format --branch` refuses, and HEAD and @, which git reads as the current commit.
NO_BRANCH = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^[-/]|/\Z|(^|/)\.|\.\Z|\.lock(/|\Z)|^@\Z|^HEAD\Z")
