"""`make release`: makes a model again, says whether the bytes are the same, records it; refuses other texts."""

import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from benchmarks import release
from d2l_bert import D2lBertForPreTraining
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


@pytest.fixture
def given(books, tmp_path):
    """The folders of the texts BOOKS (`train` and `valid`) and TABLES (a file train.csv)."""
    shutil.copytree(books, tmp_path / "books" / "train")
    (tmp_path / "books" / "valid").mkdir()
    shutil.move(tmp_path / "books" / "train" / "book-00.txt", tmp_path / "books" / "valid")
    (tmp_path / "tables").mkdir()
    rows = [f"in the {place} number {number},{place}" for number in range(12) for place in ("garden", "tower")]
    (tmp_path / "tables" / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    return {"BOOKS": tmp_path / "books", "TABLES": tmp_path / "tables"}


@pytest.fixture
def root(given, tmp_path):
    """A folder like model_cards/ with a release that is not recorded yet."""
    root, entries = tmp_path / "model_cards", []
    (root / NAME).mkdir(parents=True)
    (root / NAME / "release.toml").write_text(RECIPE)
    for name, belows in {"BOOKS": ("train", "valid"), "TABLES": (".",)}.items():
        entries.append(f'[{name}]\nwhat = "{name.lower()} of the tests"\nsource = "the tests"\n[{name}.fingerprints]')
        prints = {below: short_hash(file_source(given[name] / below).identity[0]) for below in belows}
        entries += [f'"{below}" = "{found}"' for below, found in prints.items()]
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


# ---------------------------------------------------------------------------------------------------------------------
# From the recipe to the verdict


def make(root, given, folder, **options):
    return release.release(NAME, given, folder, root=root, **options)


@pytest.mark.slow
def test_a_model_is_recorded_made_again_to_the_byte_and_published(root, given, tmp_path, in_process, capsys):
    place, first, again = root / NAME, tmp_path / "build" / NAME, tmp_path / "again"
    assert make(root, given, first, record=True) == 0
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

    # In another folder: the same bytes. The same command once more trains and measures nothing.
    for _ in range(2):
        assert make(root, {"BOOKS": given["BOOKS"]}, again) == 0
        said = capsys.readouterr().out
        assert f"{NAME}: the same bytes as recorded\n" in said
        assert re.search(r"MLM loss on valid: recorded (\S+ nats), here \1, within 0.566 nats", said)
    assert [words[0] for words in in_process] == 2 * ["pretrain", "evaluate"]

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
    folder, recipe = tmp_path / "made", root / NAME / "release.toml"
    for task, words in (("places", "there is no model of .*; make it first"), ("animals", "give one of places")):
        with pytest.raises(UserError, match=words):
            make(root, given, folder, task=task)
    make(root, {"BOOKS": given["BOOKS"]}, folder)
    for _ in range(2):  # nothing is lost or done again
        make(root, {"BOOKS": given["BOOKS"]}, folder)
        make(root, {"TABLES": given["TABLES"]}, folder, task="places", record=True)
    assert [words[words.index("--from_scratch") + 1] for words in in_process[2:]] == ["false", "true"]
    metrics = read_json(folder / "metrics.json")
    for ending, words in zip(("", ":from_scratch"), in_process[2:], strict=True):
        tuned = read_json(Path(words[words.index("--output_dir") + 1]) / "metrics.json")
        values = [seed["test"]["accuracy"] for seed in tuned["seeds"]]
        assert metrics[f"finetune/places/test_accuracy{ending}"] == pytest.approx(statistics.fmean(values))
        assert metrics[f"finetune/places/test_accuracy{ending}:sd"] == pytest.approx(statistics.stdev(values))
    assert "| places: test accuracy | " in (root / NAME / "README.md").read_text()
    recipe.write_text(recipe.read_text().replace("num_seeds = 2", "num_seeds = 3"))
    make(root, {"TABLES": given["TABLES"]}, folder, task="places")
    assert read_json(folder / "metrics.json")["finetune/places/seeds"] == 3, "other options are other trainings"


@pytest.mark.slow
def test_weights_in_the_repository_are_rounded_and_its_figures_are_theirs(root, given, tmp_path, in_process):
    place, folder, recipe = root / NAME, tmp_path / "made", root / NAME / "release.toml"
    assert make(root, given, folder) == 0
    exact, before = load_file(folder / "model.safetensors"), read_json(folder / "release.json")
    recipe.write_text(recipe.read_text().replace("seed = 3", "seed = 3\nships_weights = true"))
    assert make(root, given, folder, overwrite=True, record=True) == 0
    record, metrics = read_json(place / "release.json"), read_json(place / "metrics.json")
    assert record["float32_sha256"] == before["weights_sha256"] != record["weights_sha256"]
    shipped = load_file(place / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in shipped.values())
    assert all((tensor == exact[name].bfloat16()).all() for name, tensor in shipped.items())
    model = D2lBertForPreTraining.from_pretrained(place)
    assert model.dtype == torch.float32 and len(AutoTokenizer.from_pretrained(place)) == model.config.vocab_size
    options = [
        "--corpus",
        given["BOOKS"] / "train",
        "--held_out",
        "--pppl_sentences=0",
        "--output",
        tmp_path / "f.json",
    ]
    assert main(["evaluate", *map(str, [place, *options])]) == 0
    (found,) = read_json(tmp_path / "f.json")["models"]
    assert metrics["eval_mlm_loss"] == pytest.approx(found["text"]["mlm_loss"], abs=1e-5)
    # Nothing of the code stands there, and nothing asks for it.
    AutoModelForMaskedLM.from_pretrained(place, trust_remote_code=True)
    assert make(root, given, tmp_path / "again") == 0
