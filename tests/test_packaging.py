"""Every kind of installation adds only `d2l_bert` to site-packages, and works from the repository's root."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
LEAVE_OUT = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "d2l-bert-*")
WAYS = {
    "wheel": ["."],
    "editable": ["--editable", "."],
    "strict editable": ["--config-settings", "editable_mode=strict", "--editable", "."],
}


@pytest.fixture(scope="module", params=WAYS)
def installed(request, tmp_path_factory):
    """A new environment that uses this environment's dependencies, with the package installed in one of the `WAYS`.

    Returns its Python, the names that the installation added to site-packages, and the copy of the repository used.
    """
    root = tmp_path_factory.mktemp("checkout") / "repository"
    shutil.copytree(ROOT, root, ignore=LEAVE_OUT)
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    site_packages = Path(sysconfig.get_path("purelib", vars=paths))
    before = set(site_packages.iterdir())
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    install += ["--no-deps", "--no-index", "--no-build-isolation", *WAYS[request.param]]
    # The .pth file makes this environment's packages, such as build tools, importable, but not its editable install.
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(install, check=True, cwd=root)
    left = {path.name for path in set(site_packages.iterdir()) - before} - {"borrowed.pth", "__pycache__"}
    return folder / "bin" / "python", left, root


def run(command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120, **options)


def test_every_installation_adds_d2l_bert_alone_and_runs_from_the_repositorys_root(installed):
    python, left, root = installed
    assert left and all(name.startswith(("d2l_bert", "__editable__")) for name in left)
    commands = {  # and a word that each command prints
        ("-c", "import d2l_bert, d2l_bert.modeling as m; print(d2l_bert.__file__, m.__file__)"): "__init__.py",
        ("-m", "d2l_bert", "--help"): "pretrain",
        ("-m", "accelerate.commands.launch", "--cpu", "-m", "d2l_bert", "--help"): "pretrain",
        ("-m", "pytest", "--collect-only", "-q", "tests/test_masking.py"): "test_masking.py",
    }
    for command, printed in commands.items():
        process = run([python, *command], cwd=root)
        assert process.returncode == 0 and printed in process.stdout, (command, process.stdout + process.stderr)


def test_a_wheel_works_without_the_repository(installed, tmp_path):
    python, left, _ = installed
    if any("editable" in name for name in left):
        pytest.skip("an editable install needs the repository")
    code = """
import pathlib, d2l_bert
from d2l_bert import RECIPES, pretrain, model_cards
assert "site-packages" in d2l_bert.__file__
assert (pathlib.Path(d2l_bert.model_cards.__file__).parent / "TEMPLATE.md").exists()
"""
    process = run([python, "-c", code.replace(", model_cards", "\nimport d2l_bert.model_cards")], cwd=tmp_path)
    assert process.returncode == 0, process.stderr
