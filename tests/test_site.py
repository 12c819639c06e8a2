"""The documentation as a site: it builds without a warning, and no link between its pages leads to nothing."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest


ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_every_link_inside_holds(tmp_path):
    pytest.importorskip("sphinx", reason="sphinx is not installed")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "search.html", "api.html", "3-pretraining.html"} <= {page.name for page in pages}
    for page in pages:
        html = page.read_text()
        for link in re.findall(r'(?:href|src)="(?!https?:|mailto:|data:)([^"#?]+)', html):
            assert (page.parent / unquote(link)).exists(), (page, link)
        for anchor in re.findall(r'href="#([^"]+)"', html):
            assert f'id="{unquote(anchor)}"' in html or f'name="{unquote(anchor)}"' in html, (page, anchor)
