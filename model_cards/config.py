"""The options of `d2l-bert publish`."""

from dataclasses import dataclass

from d2l_bert.errors import UserError
from d2l_bert.options import HUB, Options, option


@dataclass(kw_only=True)
class PublishConfig(Options):
    """
    How a model folder is sent to the Hub. Every field is an option of `d2l-bert publish`.

    Raises:
        UserError: from `check`, if an option is an empty text, or two contradict each other.
    """

    public: bool = option(
        False,
        "make the repository public, with all its commits, after sending; without this a new repository is private",
        HUB,
        common=True,
    )
    license: str | None = option(
        None,
        "licence of the model (a Hub identifier); replaces the licence in the card",
        HUB,
        metavar="ID",
        common=True,
    )
    revision: str | None = option(
        None,
        "branch to send the model to, created if it does not exist; default: main",
        HUB,
        metavar="BRANCH",
        common=True,
    )
    create_pr: bool = option(False, "send the model as a pull request; not together with public", HUB, common=True)
    commit_message: str | None = option(None, "message of the commit", HUB, metavar="TEXT", common=True)
    collection: str | None = option(
        None,
        "collection to add the model to: a slug, or the title of a collection of the same owner",
        HUB,
        metavar="TITLE",
        common=True,
    )
    changed_code: bool = option(
        False, "publish the folder's code although it differs from the installed package's", HUB, common=True
    )
    dry_run: bool = option(
        False, "check everything and list the files to send, with sizes, but send nothing", HUB, common=True
    )

    def check(self) -> None:
        """Check the options before anything is read or sent."""
        super().check()
        if self.public and self.create_pr:
            raise UserError(
                "a pull request (create_pr) makes no repository public; leave public out, or publish without create_pr"
            )
