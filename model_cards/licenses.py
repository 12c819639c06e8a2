"""The licences that the Hub knows, to check one before a run; the Hub itself checks the rest of a card."""

import difflib
import re

from d2l_bert.errors import UserError


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
    if identifier not in LICENSES:
        words = re.findall(r"[a-z0-9.+]+", identifier.lower())
        plain = "-".join(word for word in words if word not in ("the", "license", "licence", "version"))
        near = difflib.get_close_matches(plain, LICENSES, n=1)
        page = "one of https://huggingface.co/docs/hub/repositories-licenses"
        raise UserError(f"license {identifier!r} is not one that the Hub knows; write {near[0] if near else page}")
