"""What an install brings: the version, the public names, and every package that the code imports."""

import ast
import importlib.metadata
import re
import sys
import tomllib
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


def test_every_package_that_the_code_imports_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = project["dependencies"] + extras["finetune"] + extras["onnx"] + extras["demo"]
    declared = {re.match(r"[\w.-]+", line)[0].lower().replace("-", "_") for line in declared}
    names = {"yaml": "pyyaml", "sklearn": "scikit_learn"}
    imported = set()
    for folder in ("src/d2l_bert", "modeling", "tokenization", "training", "model_cards"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    imported.add(node.module.partition(".")[0])
    foreign = {names.get(name, name) for name in imported - sys.stdlib_module_names - {"d2l_bert"}}
    assert foreign - declared == set()
