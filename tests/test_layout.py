"""The rooms and arrows drawn in CONTRIBUTING.md agree with the code: each file's room, each import's direction."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
FOLDERS = {
    "d2l_bert.": "src/d2l_bert",
    **{f"d2l_bert.{n}.": n for n in ("modeling", "tokenization", "training", "model_cards")},
    **{f"d2l_bert.training.{n}.": f"training/{n}" for n in ("evaluation", "finetuning", "vectors")},
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


def room_of(name, leaves):
    parts = name.split(".")
    if len(parts) >= 3:
        return parts[-2]
    return "leaves" if parts[1] in leaves else "front door"


def drawn_rooms():
    """For each room in the drawing, the names of its files without `.py`."""
    rooms, room = {}, None
    for line in DRAWING.splitlines():
        if heading := re.match(r"\*\*(?:`(?:\w+/)?(\w+)/`|the (leaves|front door))", line):
            room = heading[1] or heading[2]
            rooms[room] = set()
        elif row := re.match(r"- `(\w+)\.py`: \S", line):
            assert row[1] not in rooms[room], f"{row[1]}.py is drawn twice"
            rooms[room].add(row[1])
    return rooms


def drawn_arrows():
    """For each room in the drawing, the rooms that it may import."""
    rows = re.findall(r"^    ([a-z_ ]+?) +-> (.+)$", DRAWING, re.MULTILINE)
    return {room: set(re.split(", ", others)) - {"nothing", "errors.py only"} for room, others in rows}


@pytest.fixture(scope="module")
def found():
    """For each module, the modules of this package that it imports."""
    known = modules()
    return {name: imports_of(name, path, known) for name, path in known.items()}


def test_every_file_is_drawn_in_its_room(found):
    leaves = drawn_rooms()["leaves"]
    there = {}
    for name in found:
        there.setdefault(room_of(name, leaves), set()).add(name.rpartition(".")[2])
    assert there == drawn_rooms()


def test_imports_follow_the_arrows_of_the_drawing(found):
    arrows, leaves = drawn_arrows(), drawn_rooms()["leaves"]
    assert arrows.keys() == drawn_rooms().keys()
    for name, imported in found.items():
        room = room_of(name, leaves)
        others = {other: room_of(other, leaves) for other in imported}
        against = {other for other, its in others.items() if its != room and its not in arrows[room]}
        if room == "leaves":
            against |= imported - {"d2l_bert.errors"}
        assert not against, f"{name} imports {sorted(against)}"


def test_every_arrow_of_the_drawing_is_used_by_an_import(found):
    leaves = drawn_rooms()["leaves"]
    used = {(room_of(name, leaves), room_of(other, leaves)) for name, imported in found.items() for other in imported}
    assert {(room, other) for room, others in drawn_arrows().items() for other in others} <= used


def test_no_files_import_each_other(found):
    TopologicalSorter(found).prepare()  # raises CycleError, which names the files
