"""The documentation as a site: it builds without a warning, so no link between its pages leads to nothing."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """Sphinx warns of a link to a page, a file or a heading that is not there."""
    pytest.importorskip("sphinx", reason="sphinx is not installed")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", tmp_path / "site"]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = {page.name for page in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "search.html", "api.html", "3-pretraining.html"} <= pages
