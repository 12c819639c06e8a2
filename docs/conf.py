"""Settings of Sphinx for `make site`, which builds the documentation in build/site. The sources are those of the
repository, in their places, so that a link between two files holds there and on the site.
"""

import contextlib
import importlib.metadata
import io
import shutil
from pathlib import Path

from d2l_bert.__main__ import main
from d2l_bert.commands import COMMANDS


project, author, release = "d2l-bert", "the authors of d2l-bert", importlib.metadata.version("d2l-bert")
copyright = author  # Sphinx's name for the line at the foot of a page

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "benchmarks/LOG.md", "model_cards/*/README.md"]
exclude_patterns = ["docs/pypi.md", "docs/notebooks/[0-9]*.md"]  # a notebook's .md has the same text as its .ipynb
nb_execution_mode = "off"  # `make notebooks` runs them, and keeps what they print
myst_heading_anchors = 3
autodoc_member_order, autodoc_typehints = "bysource", "none"
default_role = "code"  # of `names` in docstrings
html_theme, html_title = "furo", "d2l-bert"
html_static_path, html_css_files = ["site.css"], ["site.css"]

# The sidebar: a toctree below the front page, which is the README.
WAYS = ("my-own-text", "a-language", "logs-and-tables", "going-on", "comparing-objectives", "on-a-mac")
GUIDES = (
    "data",
    "training",
    "distributed",
    "loading",
    "evaluate",
    "finetune",
    "embed",
    "sentence-vectors",
    "publishing",
    "serving",
    "questions",
)
SIDEBAR = {
    "Ways": [*(f"docs/ways/{page}" for page in WAYS), "docs/domains"],
    "Guides": [f"docs/{page}" for page in GUIDES],
    "The book": ["docs/d2l", "docs/notebooks/README", "docs/notebooks/[0-9]*"],
    "Reference": ["docs/commands", "docs/api"],
    "Released models": ["model_cards/*/README"],
    "Measured": ["docs/quality", "docs/performance", "docs/alternatives"],
    "Project": ["CHANGELOG", "CONTRIBUTING", "SECURITY", "benchmarks/LOG"],
}


def add_sidebar(app, name, content):
    """Add the toctrees to the README, and the texts of `--help_all` to the page of the commands."""
    if name == root_doc:
        for caption, pages in SIDEBAR.items():
            entries = "\n".join(pages)
            content[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n{entries}\n```\n"
    if name == "docs/commands":
        content[0] += "".join(f"\n## {command}\n\n```text\n{help_of(command)}```\n" for command in COMMANDS)


def help_of(command):
    """What `d2l-bert COMMAND --help_all` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main([command, "--help_all"])
    return printed.getvalue()


def add_index(app, error):
    """Copy the front page to index.html, the name that web servers look for."""
    if error is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app):
    app.connect("source-read", add_sidebar)
    app.connect("build-finished", add_index)
