"""Folders of runs, as they are recorded: the keys of all files, in order; and what old fine-tuned models predict.

If a change is meant to write other keys, record them:

    python tests/test_recorded_folders.py
"""

import contextlib
import csv
import dataclasses
import json
import string
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import SIZES, SMALL, write_books
from finetuning import ROWS, WORDS, file_options, finetune
from runs import run
from text_sources import write_table

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.modeling import modeling_d2l_bert
from d2l_bert.modeling.conversion import save_model
from d2l_bert.tokenization.rules import Rules
from d2l_bert.tokenization.wordpiece import SPECIAL_TOKENS, make_tokenizer, save_tokenizer
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.finetuning.config import FinetuneConfig


RECORD = Path(__file__).with_name("recorded_folders.json")

# Entries of run_config.json whose keys are the fields of a dataclass, and those that follow from the machine.
OPTIONS = {"run": PretrainConfig, "finetune": FinetuneConfig}
OF_THE_MACHINE = ("machine", "versions")


def keys_in(content, path=""):
    """The keys of JSON, also of what is nested, in their order; of a list those of its first entry."""
    if isinstance(content, list):
        return keys_in(content[0], f"{path}[]") if content else []
    if not isinstance(content, dict):
        return []
    keys = []
    for name, value in content.items():
        keys.append(f"{path}{name}")
        if not path and name not in (*OPTIONS, *OF_THE_MACHINE):
            keys += keys_in(value, f"{name}/")
    return keys


def keys_of_files(folder):
    """The keys of each JSON file in a folder, and the columns of each table, by the file's name."""
    found = {}
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_text())
        if path.name not in ("tokenizer.json", "tokenizer_config.json"):  # written by Transformers
            found[path.relative_to(folder).as_posix()] = keys_in(content)
        for name in OPTIONS.keys() & content.keys():
            assert list(content[name]) == [field.name for field in dataclasses.fields(OPTIONS[name])]
    for path in folder.glob("*.csv"):
        with path.open(newline="") as file:
            found[path.name] = next(csv.reader(file))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Runs


PIECES = [*SPECIAL_TOKENS, *string.ascii_lowercase, *string.digits, *",.?"]
PIECES += [f"##{sign}" for sign in string.ascii_lowercase + string.digits]
PIECES += [*WORDS["who"], *WORDS["where"], *WORDS["what"], *"walked the then sold there was nobody".split()]


def small_model(folder, kind, config):
    """Write a model with weights that follow from their names' order, and the tokenizer of `PIECES`."""
    folder.mkdir(parents=True)
    model = kind(config)
    with torch.no_grad():
        for number, (_, weights) in enumerate(sorted(model.named_parameters()), 1):
            weights.copy_(torch.arange(weights.numel()).mul(number).sin().view_as(weights))
    save_model(model, folder)
    save_tokenizer(make_tokenizer(PIECES, Rules()), folder)
    return model


def finetuned(task, folder):
    """The folder of a fine-tuning of one step."""
    config = D2lBertConfig(**{**SIZES, "vocab_size": len(PIECES), "max_position_embeddings": 64})
    small_model(folder / "base", D2lBertForPreTraining, config)
    rows = file_options(folder, train=ROWS[task](20, 0), validation=ROWS[task](6, 1), test=ROWS[task](4, 2))
    with contextlib.chdir(folder):
        finetune("base", Path("out"), f"--task={task}", "--max_steps=1", "--max_seq_length=48", *rows)
    return folder / "out"


def pretrained(books, folder):
    """The folder of a pretraining of two steps."""
    run(books, folder, *SMALL, "--max_steps=2", "--save_words=9", "--mixed_precision=no", "--license=mit")
    return folder


def predictions(task, folder, recorded):
    """
    What the model of a recorded folder predicts.

    Args:
        recorded: the contents of the folder's config.json and run_config.json, by their names.
    """
    config = D2lBertConfig.from_dict(recorded["config.json"])
    small_model(folder / "model", getattr(modeling_d2l_bert, config.architectures[0]), config)
    for name, content in recorded.items():
        (folder / "model" / name).write_text(json.dumps(content))
    rows = write_table(folder / "rows.jsonl", ROWS[task](5, 7))
    assert main(["predict", str(folder / "model"), str(rows), f"--output={folder / 'out.jsonl'}"]) == 0
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------------------------
# The checks


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORD.read_text())


def test_a_pretraining_writes_the_recorded_keys_in_their_order(recorded, books, tmp_path):
    assert keys_of_files(pretrained(books, tmp_path)) == recorded["pretrain"]


# One class of `Run` and of records has all tasks, so that the quick tests need one.
@pytest.mark.parametrize(
    "task", [task if task == "text-classification" else pytest.param(task, marks=pytest.mark.slow) for task in ROWS]
)
def test_a_fine_tuning_writes_the_recorded_keys_in_their_order(task, recorded, tmp_path):
    assert keys_of_files(finetuned(task, tmp_path)) == recorded["finetune"][task]["keys"]


@pytest.mark.parametrize("task", ROWS)
def test_a_recorded_fine_tuned_model_predicts_what_it_did(task, recorded, tmp_path):
    expected = recorded["finetune"][task]["predictions"]
    found = predictions(task, tmp_path, recorded["finetune"][task]["files"])
    assert [list(row) for row in found] == [list(row) for row in expected]
    for row, of_record in zip(found, expected, strict=True):
        for name, value in of_record.items():
            assert row[name] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), name


def in_lines(content, levels):
    """JSON with a line for each entry of the outer levels: what is in an entry of the last one stands on its line."""
    is_list_of_words = isinstance(content, list) and all(isinstance(entry, str) for entry in content)
    if levels == 0 or is_list_of_words:
        return json.dumps(content)
    if isinstance(content, list):
        entries = [in_lines(entry, levels - 1) for entry in content]
        return "[\n" + ",\n".join(entries) + "\n]"
    entries = [f"{json.dumps(name)}: {in_lines(entry, levels - 1)}" for name, entry in content.items()]
    return "{\n" + ",\n".join(entries) + "\n}"


def write_record() -> None:
    """Write `recorded_folders.json` anew."""
    record = {"finetune": {}}
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        record["pretrain"] = keys_of_files(pretrained(write_books(place / "books"), place / "pretrained"))
        for task in ROWS:
            (place / task).mkdir()
            folder = finetuned(task, place / task)
            files = {name: json.loads((folder / name).read_text()) for name in ("config.json", "run_config.json")}
            record["finetune"][task] = {
                "keys": keys_of_files(folder),
                "files": files,
                "predictions": predictions(task, place / f"{task} again", files),
            }
    RECORD.write_text(in_lines(record, levels=4) + "\n")


if __name__ == "__main__":
    write_record()
    print(f"recorded {RECORD}")
