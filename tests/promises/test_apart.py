"""These tests stand apart: no import of an internal module, and not more code than a person can read."""

import ast
from pathlib import Path


INTERNAL = "d2l_bert" + "."
FILES = sorted(Path(__file__).parent.glob("*.py"))


def test_no_file_here_imports_an_internal_module():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in names:
                assert not name.startswith(INTERNAL), f"{file.name}: imports {name}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(INTERNAL):
                raise AssertionError(f"{file.name}: names {node.value}")


def test_they_have_at_most_2500_statements():
    count = sum(isinstance(node, ast.stmt) for file in FILES for node in ast.walk(ast.parse(file.read_text())))
    assert count <= 2500
