"""The options of publishing."""

import re
from dataclasses import dataclass

from d2l_bert.errors import UserError
from d2l_bert.options import HUB, check_texts, option


@dataclass(kw_only=True)
class PublishConfig:
    """
    How a model folder is sent to the Hub. Every field is an option of `d2l-bert publish`.

    Raises:
        UserError: from `check`, for a text that is empty, or a branch that git does not allow.
    """

    public: bool = option(
        False,
        "let everybody see the repository with all its commits, once all is sent; a new one is private without it",
        HUB,
    )
    license: str | None = option(
        None, "licence of the model (a Hub identifier), if its card has none or another", HUB, metavar="ID"
    )
    revision: str | None = option(
        None, "branch to send it to, made if need be, or to propose it to; main without it", HUB, metavar="BRANCH"
    )
    create_pr: bool = option(False, "propose it as a pull request; not together with public", HUB)
    commit_message: str | None = option(None, "summary of the commit", HUB, metavar="TEXT")
    collection: str | None = option(
        None, "collection to put the model into: its slug, or its title under the same owner", HUB, metavar="TITLE"
    )
    changed_code: bool = option(False, "the folder's code differs from the installed package's, and is meant to", HUB)
    dry_run: bool = option(False, "check everything and list what would be sent, with sizes; nothing is", HUB)

    def check(self) -> None:
        """Refuse what the Hub would refuse, before anything is read or sent."""
        check_texts(self)
        if self.revision is not None and NO_BRANCH.search(self.revision):
            raise UserError(
                f"revision {self.revision!r}: git allows no branch of this name; take letters, digits, '-' and '_'"
            )


# The names that `git check-ref-format --branch` refuses, and @, which git reads as HEAD.
NO_BRANCH = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^[-/]|/\Z|(^|/)\.|\.\Z|\.lock(/|\Z)|^@\Z|^HEAD\Z")
