"""How `d2l-bert finetune` reads cells and labels of files, and what it says about them."""

import shutil

import numpy as np
import pytest
from finetuning import load
from small_tasks import tag_rows, write_rows

from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.data import load_data
from d2l_bert.training.finetuning.folder import write_table
from d2l_bert.training.finetuning.metrics import class_metrics
from d2l_bert.training.finetuning.run import CLASSES


def test_lists_as_json_in_cells_of_csv_are_those_of_json_lines(tmp_path):
    rows = tag_rows(6, 0)
    _, data = load(write_rows(tmp_path / "rows.jsonl", rows), "tags")
    write_table(tmp_path / "rows.csv", data.train.columns, {})
    kind, again = load(tmp_path / "rows.csv", "tags")
    assert [row.label for row in again.train.rows] == [row["ner_tags"] for row in rows]
    assert kind.texts(again.train) == [tuple(row["tokens"]) for row in rows]
    write_table(tmp_path / "labels.csv", {"text": ["one", "two"], "label": [["a", "b"], ["b"]]}, {})
    kind, data = load(tmp_path / "labels.csv", "multilabel")
    assert kind.classes == ["a", "b"] and kind.targets(data.train).tolist() == [[1, 1], [0, 1]]


def test_labels_of_choices_are_numbers_or_letters(tmp_path):
    def targets(*rows):
        path = write_rows(
            tmp_path / "rows.jsonl", [{"context": "a", "choices": each, "label": label} for each, label in rows]
        )
        kind, data = load(path, "multiple_choice")
        return kind.targets(data.train).tolist()

    assert targets((["2", "3", "1"], "2"), (["7", "8", "9"], "0")) == [2, 0]
    assert targets((["b", "A", "c"], "A"), (["b", "c", "d"], "C")) == [0, 2]
    assert targets((["a", "b"], "1.0"), (["c", "d"], "0.0")) == [1, 0]
    assert targets((["2", "0", "1"], 2), (["2", "0", "1"], 0)) == [2, 0]


@pytest.mark.filterwarnings("error")
def test_one_class_alone_has_no_correlation_and_no_warning():
    assert class_metrics(np.array([1, 1]), np.array([1, 1]), 2)["matthews_correlation"] == 0
    assert class_metrics(np.array([1, 1, 0]), np.array([1, 1, 0]), 2)["matthews_correlation"] == 1


def test_an_empty_training_file_cannot_be_left_out(trained, tmp_path, fails):
    (tmp_path / "rows.csv").write_text("")
    command = ["finetune", trained, "--task=classification", f"--train_file={tmp_path / 'rows.csv'}"]
    assert fails(*command).startswith("d2l-bert finetune: error: train_file rows.csv: ")


def test_a_damaged_tokenizer_is_said_once(trained, tmp_path, fails):
    base = shutil.copytree(trained, tmp_path / "base")
    (base / "tokenizer.json").write_text("{")
    write_rows(tmp_path / "rows.jsonl", [{"text": "a", "label": "b"}])
    line = fails("finetune", base, "--task=classification", f"--train_file={tmp_path / 'rows.jsonl'}")
    assert str(base) in line and line.count("cannot be loaded") == 1


def test_columns_of_whole_numbers_as_floats_are_0_and_1(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"text": "a", "x": 1.0, "y": "0.0"}, {"text": "b", "x": 0.0, "y": "1.0"}])
    kind, data = load(tmp_path / "rows.jsonl", "multilabel", label_column=["x", "y"])
    assert kind.targets(data.train).tolist() == [[1, 0], [0, 1]]


def test_held_out_rows_are_named_after_their_file(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"text": f"text {n}", "label": n % 2} for n in range(20)])
    config = FinetuneConfig(model="m", task="classification", train_file=str(tmp_path / "rows.jsonl"))
    assert load_data(config, CLASSES[config.kind](config)).validation.name == "rows.jsonl (held out)"
