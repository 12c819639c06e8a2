"""The packages and arrows drawn in CONTRIBUTING.md agree with the code: each file's package, each import."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
FOLDERS = {
    "d2l_bert.": "src/d2l_bert",
    "d2l_bert.inference.": "src/d2l_bert/inference",
    **{f"d2l_bert.{n}.": n for n in ("modeling", "tokenization", "training", "model_cards")},
    **{f"d2l_bert.training.{n}.": f"training/{n}" for n in ("data", "evaluation", "finetuning")},
}
DRAWING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## The layout")[2].partition("\n## ")[0]

pytestmark = pytest.mark.skipif(not (ROOT / "modeling").is_dir(), reason="the repository's folders are not here")


def modules():
    """The path of every module of the package, by the module's name."""
    return {
        prefix + path.stem: path
        for prefix, folder in FOLDERS.items()
        for path in sorted((ROOT / folder).glob("*.py"))
        if path.stem != "__init__" or prefix == "d2l_bert."
    }


def imports_of(name, path, known):
    """The modules of this package that a file imports, at its top or inside a function."""
    package = name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module
            found |= {base} if base in known else {f"{base}.{alias.name}" for alias in node.names} | {base}
    return {module for module in found if module in known} - {name}


def package_of(name, helpers):
    parts = name.split(".")
    if len(parts) >= 3:
        return parts[-2]
    return "helpers" if parts[1] in helpers else "command line"


@pytest.fixture(scope="module")
def found():
    """For each module, the modules of this package that it imports."""
    known = modules()
    return {name: imports_of(name, path, known) for name, path in known.items()}


def test_every_module_says_in_its_first_line_what_is_in_it():
    lines = [path.read_text(encoding="utf-8").partition("\n")[0] for path in modules().values()]
    assert all(re.match(r'"""\S.{20,}', line) for line in lines) and len(set(lines)) == len(lines)


def test_imports_follow_the_arrows_of_the_drawing(found):
    """And every arrow of the drawing is used by an import."""
    rows = re.findall(r"^    ([a-z_ ]+?) +-> (.+)$", DRAWING, re.MULTILINE)
    arrows = {package: set(re.split(", ", others)) - {"nothing", "messages.py only"} for package, others in rows}
    # The modules of `src/d2l_bert` that the text calls helpers.
    helpers = set(re.findall(r"`(\w+)\.py`", DRAWING.partition("The helpers are ")[2].partition(";")[0]))
    used = set()
    for name, imported in found.items():
        package = package_of(name, helpers)
        others = {other: package_of(other, helpers) for other in imported}
        against = {other for other, its in others.items() if its != package and its not in arrows[package]}
        if package == "helpers":
            against |= imported - {"d2l_bert.messages"}
        assert not against, f"{name} imports {sorted(against)}"
        used |= {(package, its) for its in others.values()}
    assert {(package, other) for package, others in arrows.items() for other in others} <= used


def test_no_files_import_each_other(found):
    TopologicalSorter(found).prepare()  # raises CycleError, which names the files
