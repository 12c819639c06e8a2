"""`d2l-bert evaluate` in two processes gives the figures of one."""

import json
import os
import subprocess
import sys

import pytest
from conftest import write_books
from judged_models import save_models, write_pairs

from d2l_bert.cli import main


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(trained, books, tmp_path_factory):
    return save_models(trained, books, tmp_path_factory.mktemp("judged"))


@pytest.fixture(scope="module")
def other_books(tmp_path_factory):
    """A text that no model was trained on."""
    return write_books(tmp_path_factory.mktemp("other") / "others", count=3, seed=5)


@pytest.fixture
def evaluate(tmp_path):
    """Run the command; returns the content of its JSON file."""

    def run(*arguments):
        output = tmp_path / f"figures-{len(list(tmp_path.glob('figures-*.json')))}.json"
        assert main(["evaluate", *map(str, arguments), f"--output={output}"]) == 0
        return json.loads(output.read_text())

    return run


@pytest.mark.slow
def test_two_processes_give_the_figures_of_one(models, other_books, evaluate, tmp_path):
    pairs = write_pairs(tmp_path / "pairs")
    folders = [str(models[name]) for name in ("ours", "bert", "roberta")]
    options = [f"--corpus={other_books}", "--pppl_sentences=9", f"--blimp={pairs}", "--batch_tokens=300"]
    alone = evaluate(*folders, *options)
    output = tmp_path / "two.json"
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "2",
        "-m",
        "d2l_bert",
        "evaluate",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command += [*folders, *options, f"--output={output}"]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("MLM loss") == 1  # the main process prints, no other
    both = json.loads(output.read_text())
    for one, two in zip(alone["models"], both["models"], strict=True):
        assert two["blimp"] == one["blimp"]
        assert two["text"].keys() == one["text"].keys()
        for name, value in one["text"].items():
            assert two["text"][name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name
