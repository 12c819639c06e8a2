"""The package: its version, its public names, what it imports, and its parts as they are drawn in CONTRIBUTING.md."""

import ast
import importlib.metadata
import itertools
import re
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import d2l_bert
from d2l_bert.__main__ import main


ROOT = Path(__file__).parents[1]


def test_the_version_is_that_of_the_installed_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    version = importlib.metadata.version("d2l-bert")
    assert capsys.readouterr().out.split() == ["d2l-bert", version] and d2l_bert.__version__ == version


def test_every_public_name_is_listed_and_can_be_had():
    assert {"pretrain", "RECIPES", "D2lBertModel"} <= set(d2l_bert.__all__) <= set(dir(d2l_bert))
    assert all(getattr(d2l_bert, name) is not None for name in d2l_bert.__all__)


def test_every_package_that_the_code_imports_is_declared(found):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = project["dependencies"] + extras["finetune"] + extras["onnx"] + extras["demo"]
    declared = {re.match(r"[\w.-]+", line)[0].lower().replace("-", "_") for line in declared}
    names = {"yaml": "pyyaml", "sklearn": "scikit_learn"}
    imported = {name.partition(".")[0] for name in itertools.chain.from_iterable(found.values())}
    foreign = {names.get(name, name) for name in imported - sys.stdlib_module_names - {"d2l_bert"}}
    assert foreign - declared == set()


# ---------------------------------------------------------------------------------------------------------------------
# The packages and arrows drawn in CONTRIBUTING.md agree with the code: each file's package, each import


FOLDERS = {
    "d2l_bert.": "src/d2l_bert",
    "d2l_bert.inference.": "src/d2l_bert/inference",
    **{f"d2l_bert.{n}.": n for n in ("modeling", "tokenization", "training", "model_cards")},
    **{f"d2l_bert.training.{n}.": f"training/{n}" for n in ("data", "evaluation", "finetuning")},
}
DRAWING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## The layout")[2].partition("\n## ")[0]


def modules():
    """The path of every module of the package, by the module's name."""
    found = {}
    for prefix, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.stem != "__init__" or prefix == "d2l_bert.":
                found[prefix + path.stem] = path
    return found


def imports_of(name, path):
    """The modules that a file imports, at its top or inside a function; and `a.b` for `from a import b`."""
    package = name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found - {name}


def package_of(name, helpers):
    parts = name.split(".")
    if len(parts) >= 3:
        return parts[-2]
    return "helpers" if parts[1] in helpers else "command line"


@pytest.fixture(scope="module")
def found():
    """For each module of the package, what it imports."""
    return {name: imports_of(name, path) for name, path in modules().items()}


@pytest.fixture(scope="module")
def ours(found):
    """For each module of the package, the modules of the package that it imports."""
    return {name: imported & found.keys() for name, imported in found.items()}


def test_every_module_says_in_its_first_line_what_is_in_it():
    lines = [path.read_text(encoding="utf-8").partition("\n")[0] for path in modules().values()]
    assert all(re.match(r'"""\S.{20,}', line) for line in lines)
    assert len(set(lines)) == len(lines)


def test_imports_follow_the_arrows_of_the_drawing(ours):
    """And every arrow of the drawing is used by an import."""
    rows = re.findall(r"^    ([a-z_ ]+?) +-> (.+)$", DRAWING, re.MULTILINE)
    arrows = {package: set(re.split(", ", others)) - {"nothing", "messages.py only"} for package, others in rows}
    # The modules of `src/d2l_bert` that the text calls helpers.
    helpers = set(re.findall(r"`(\w+)\.py`", DRAWING.partition("The helpers are ")[2].partition(";")[0]))
    used = set()
    for name, imported in ours.items():
        package = package_of(name, helpers)
        others = {other: package_of(other, helpers) for other in imported}
        against = {other for other, its in others.items() if its != package and its not in arrows[package]}
        if package == "helpers":
            against |= imported - {"d2l_bert.messages"}
        assert not against, f"{name} imports {sorted(against)}"
        used |= {(package, its) for its in others.values()}
    for package, others in arrows.items():
        for other in others:
            assert (package, other) in used


def test_no_files_import_each_other(ours):
    TopologicalSorter(ours).prepare()  # raises CycleError, which names the files
