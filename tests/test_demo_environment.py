"""`make demo` installs only what running needs, and its corpus does not depend on packages that only tests need."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import SMALL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from d2l_bert.tokenization.python_docs import required_distributions


ROOT = Path(__file__).parent.parent
PACKAGES = ("modeling", "tokenization", "training", "model_cards")
pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").is_file(), reason="it needs the repository")

# A hash of the files that `python_docs` reads. Its corpus depends on them alone; parsing them takes a minute.
READ = """
import hashlib, itertools
from pydoc_data import topics
from d2l_bert.tokenization import python_docs
digest = hashlib.sha256(repr(sorted(topics.topics.items())).encode())
for name, file in itertools.chain(python_docs._standard_library(), python_docs._dependencies()):
    digest.update(repr((name, file.read_bytes())).encode())
print(digest.hexdigest())
"""


def recipe(target, tmp_path):
    """The commands that `make` would run for a target in a fresh clone."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    return subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True).stdout


def test_make_demo_installs_the_package_alone_and_make_test_what_the_tests_need_too(tmp_path):
    assert re.findall(r"--editable (\S+)", recipe("demo", tmp_path)) == ["."]
    assert re.findall(r"--editable (\S+)", recipe("test", tmp_path)) == [".", "'.[dev]'"]


def test_every_package_that_the_demo_reads_is_pinned():
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {canonicalize_name(name): version for name, version in pins}
    read = {canonicalize_name(found.metadata["Name"]) for found in required_distributions("d2l-bert")}
    assert read <= pinned.keys()


@pytest.fixture(scope="module")
def demos_python(tmp_path_factory):
    """The Python of an environment with the package and its requirements, but without the tests' own requirements."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for found in required_distributions("d2l-bert"):
        for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
    ours, metadata = importlib.metadata.distribution("d2l-bert"), site / "d2l_bert-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(ours.read_text("METADATA") or ours.read_text("PKG-INFO"))
    shutil.copytree(ROOT / "src" / "d2l_bert", site / "d2l_bert")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, site / "d2l_bert" / package)
    return str(folder / "bin" / "python")


def output(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_package_trains_without_the_packages_of_the_tests(demos_python, books, tmp_path):
    needs = [Requirement(line) for line in importlib.metadata.requires("d2l-bert")]
    extras = {
        need.name.replace("-", "_")
        for need in needs
        if need.marker and not need.marker.evaluate({"extra": ""}) and need.name not in ("d2l-bert", "pre-commit")
    } - {"setuptools"}  # a requirement of torch, too
    here = {name for name in extras if importlib.util.find_spec(name)}
    assert {"pytest", "hypothesis", "peft", "onnx", "tensorboard"} <= here
    look = f"import importlib.util as u; print([n for n in {sorted(extras)} if u.find_spec(n)])"
    assert output(demos_python, "-c", look) == "[]"
    out = f"--output_dir={tmp_path / 'out'}"
    said = output(demos_python, "-m", "d2l_bert", "pretrain", f"--corpus={books}", out, "--max_steps=3", *SMALL)
    assert "What it learnt" in said


@pytest.mark.slow
def test_the_demos_corpus_does_not_depend_on_the_packages_of_the_tests(demos_python):
    with_tests, without = output(sys.executable, "-c", READ), output(demos_python, "-c", READ)
    assert with_tests == without
