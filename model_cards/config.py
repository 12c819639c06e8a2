"""`PublishConfig`: the options of `d2l-bert publish`; the licences that the Hub knows."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from d2l_bert.messages import UserError
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
    dry_run: bool = option(
        False, "check everything and list the files to send, with sizes, but send nothing", HUB, common=True
    )

    def contradictions(self, given: set[str]) -> Iterator[str]:
        """As in `Options`."""
        if self.public and self.create_pr:
            yield (
                "a pull request (create_pr) makes no repository public; leave public out, or publish without create_pr"
            )


# ---------------------------------------------------------------------------------------------------------------------

# The list in the Hub's answer to an unknown licence (POST /api/validate-yaml). The Hub's OpenAPI description has the
# same list, and https://huggingface.co/docs/hub/repositories-licenses an older one.
LICENSES = """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openmdw-1.0 openmdw-1.1 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr
    deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4
    grok2-community gemma unknown other
""".split()


def check_license(identifier: str) -> None:
    """Raise `UserError` if the Hub does not have this licence identifier."""
    if identifier in LICENSES:
        return
    similar = difflib.get_close_matches(identifier.lower().replace(" ", "-"), LICENSES, n=1)
    advised = similar[0] if similar else "one of https://huggingface.co/docs/hub/repositories-licenses"
    raise UserError(f"license {identifier!r} is not one that the Hub knows; write {advised}")
