"""How `d2l-bert finetune` reads cells and labels of files, and what it says about them."""

from finetuning import load
from small_tasks import tag_rows, write_rows

from d2l_bert.training.finetuning.folder import write_table


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
