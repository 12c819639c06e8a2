"""`make release`: makes a model again, says whether the bytes are the same, records it; refuses other texts."""

import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import release
from d2l_bert.__main__ import main
from d2l_bert.folders import read_json, short_hash, write_json
from d2l_bert.messages import UserError
from d2l_bert.tokenization.sources import file_source


RECIPE = """
about = "A model of the tests."
device = "cpu"
threads = 1
seed = 3

[deviations]
source = "two models of seeds 4 and 5"
eval_mlm_loss = 0.1
"eval/valid/mlm_loss" = 0.1

[pretrain]
corpus = ["$BOOKS/train"]
license = "mit"
length_schedule = "none"
max_steps = 6
eval_steps = 6
mixed_precision = "no"
torch_compile = "false"
micro_batch_size = 8
num_hidden_layers = 1
hidden_size = 32
num_attention_heads = 2
intermediate_size = 64
max_position_embeddings = 64
vocab_size = 400
max_seq_length = 48
global_batch_size = 8

[evaluate.books]
corpus = ["$BOOKS/valid"]
pppl_sentences = 0

[finetune.places]
task = "classification"
train_file = "$TABLES/train.csv"
test_file = "$TABLES/train.csv"
num_seeds = 2
max_steps = 2
"""

NAME = "d2l-bert-small-books"


@pytest.fixture(scope="module")
def given(books, tmp_path_factory):
    """The folders of the texts BOOKS (`train` and `valid`) and TABLES (a file train.csv)."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "books" / "valid").mkdir(parents=True)
    shutil.copytree(books, folder / "books" / "train")
    shutil.move(folder / "books" / "train" / "book-00.txt", folder / "books" / "valid")
    (folder / "tables").mkdir()
    rows = [f"in the {place} number {number},{place}" for number in range(12) for place in ("garden", "tower")]
    (folder / "tables" / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    return {"BOOKS": folder / "books", "TABLES": folder / "tables"}


@pytest.fixture
def root(given, tmp_path):
    """A folder like model_cards/ with a release that is not recorded yet."""
    root = tmp_path / "model_cards"
    (root / NAME).mkdir(parents=True)
    (root / NAME / "release.toml").write_text(RECIPE)
    prints = {
        name: {below: short_hash(file_source(folder / below).identity[0]) for below in belows}
        for (name, folder), belows in zip(given.items(), (("train", "valid"), (".",)), strict=True)
    }
    entries = [
        f'[{name}]\nwhat = "{name.lower()} of the tests"\nsource = "the tests"\n[{name}.fingerprints]\n'
        + "".join(f'"{below}" = "{found}"\n' for below, found in found_below.items())
        for name, found_below in prints.items()
    ]
    (root / "texts.toml").write_text("\n".join(entries))
    return root


@pytest.fixture
def in_process(monkeypatch, one_thread):
    """Run the commands of a release in this process; returns the list of their words, which fills meanwhile."""
    commands = []

    def run(recipe, *words):
        words = [str(word) for word in words]
        commands.append(words)
        if code := main(words):
            sys.exit(code)

    monkeypatch.setattr(release, "run", run)
    return commands


def changed(root, old, new):
    path = root / NAME / "release.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


# ---------------------------------------------------------------------------------------------------------------------
# From the recipe to the verdict


def make(root, given, folder, **options):
    return release.release(NAME, given, folder, root=root, **options)


@pytest.mark.slow
def test_a_model_is_recorded_made_again_to_the_byte_and_published(root, given, tmp_path, in_process, capsys):
    place, first, again = root / NAME, tmp_path / "build" / NAME, tmp_path / "again"
    assert make(root, given, first, record=True) == 0
    assert [words[0] for words in in_process] == ["pretrain", "evaluate"]
    assert {path.name for path in place.iterdir()} == {
        *("README.md", "config.json", "metrics.json", "release.json", "release.toml", "run_config.json"),
        "training_curves.png",
    }
    record, card = read_json(place / "release.json"), (place / "README.md").read_text()
    git = ["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip()  # nothing outside of a checkout
    assert (record["commit"] or "") == head
    assert record["weights_sha256"] in card and "## Make it again" in card and "## Reproduce it" not in card
    assert "A model of the tests." in card and "two models of seeds 4 and 5" in (place / "release.json").read_text()
    assert f"make release MODEL={NAME} BOOKS=DIR\n" in card and "| MLM loss on valid |" in card
    assert not any(str(tmp_path) in path.read_text() for path in place.glob("*.[jm]*"))
    capsys.readouterr()

    # In another folder: the same bytes.
    del in_process[:]
    assert make(root, {"BOOKS": given["BOOKS"]}, again) == 0
    said = capsys.readouterr()
    assert f"{NAME}: the same bytes as recorded\n" in said.out
    assert re.search(r"MLM loss on valid: recorded (\S+ nats), here \1, within 0.566 nats", said.out)
    assert [words[0] for words in in_process] == ["pretrain", "evaluate"]

    # The same command again trains and measures nothing.
    assert make(root, {"BOOKS": given["BOOKS"]}, again) == 0
    said = capsys.readouterr()
    assert "the same bytes" in said.out and len(in_process) == 2

    # The card of the folder is that of the record, and the folder can be published.
    assert (first / "README.md").read_text() == card
    assert main(["publish", str(first), f"me/{NAME}", "--dry_run"]) == 0
    assert "release.json" in capsys.readouterr().out
    write_json(first / "release.json", {**record, "weights_sha256": "0" * 64})
    assert main(["publish", str(first), f"me/{NAME}", "--dry_run"]) == 2
    assert "make the release again" in capsys.readouterr().err

    # Another run in the folder makes the record invalid.
    options = [f"--corpus={given['BOOKS']}", "--max_steps=1", "--vocab_size=300", "--license=mit"]
    assert main(["pretrain", f"--output_dir={again}", "--overwrite_output_dir", *options]) == 0
    assert not (again / "release.json").exists() and "Make it again" not in (again / "README.md").read_text()


@pytest.mark.slow
def test_a_task_is_fine_tuned_beside_the_same_architecture_from_scratch(root, given, tmp_path, in_process):
    folder = tmp_path / "made"
    with pytest.raises(UserError, match="there is no model of .*; make it first, without TASK"):
        make(root, given, folder, task="places")
    with pytest.raises(UserError, match="animals: no task of .*; give one of places"):
        make(root, given, folder, task="animals")
    make(root, {"BOOKS": given["BOOKS"]}, folder)
    make(root, {"TABLES": given["TABLES"]}, folder, task="places", record=True)
    assert [words[words.index("--from_scratch") + 1] for words in in_process[2:]] == ["false", "true"]
    metrics = read_json(folder / "metrics.json")
    tuned = [next(Path(word) for word in words if "made-places-" in word) for words in in_process[2:]]
    for ending, place in zip(("", ":from_scratch"), tuned, strict=True):
        tuned = read_json(place / "metrics.json")
        values = [seed["test"]["accuracy"] for seed in tuned["seeds"]]
        assert metrics[f"finetune/places/test_accuracy{ending}"] == pytest.approx(statistics.fmean(values))
        assert metrics[f"finetune/places/test_accuracy{ending}:sd"] == pytest.approx(statistics.stdev(values))
    assert "| places: test accuracy | " in (root / NAME / "README.md").read_text()
    make(root, {"BOOKS": given["BOOKS"]}, folder)
    make(root, {"TABLES": given["TABLES"]}, folder, task="places")
    assert read_json(folder / "metrics.json") == metrics and len(in_process) == 4, "nothing is lost or done again"
    changed(root, "num_seeds = 2", "num_seeds = 3")
    make(root, {"TABLES": given["TABLES"]}, folder, task="places")
    assert read_json(folder / "metrics.json")["finetune/places/seeds"] == 3, "other options are other trainings"
