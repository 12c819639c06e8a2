"""`d2l-bert predict`: new rows as the run and pipelines predict them; `finetune` in two processes as in one."""

import csv
import io
import json
import sys

import pyarrow.parquet as pq
import pytest
from finetuning import ROWS, assert_same_predictions, choice_rows, file_options, finetune, read_csv, rows_of
from promises.driving import end, start
from text_sources import write_table
from transformers import pipeline

from d2l_bert.__main__ import main
from d2l_bert.training.finetuning import output
from d2l_bert.training.finetuning.splits import Split
from d2l_bert.training.finetuning.tasks import Row


def predict(model, file, output, *options):
    assert main(["predict", str(model), str(file), f"--output={output}", *options]) == 0
    return output


def counted_from_1(count, seed):
    return [{**row, "label": row["label"] + 1} for row in choice_rows(count, seed)]


@pytest.mark.parametrize("task", ROWS)
def test_a_finished_model_predicts_what_its_run_predicted(task, trained, tmp_path, fails):
    rows_of_task = counted_from_1 if task == "multiple-choice" else ROWS[task]
    rows = rows_of_task(19, 1)
    options = [
        *file_options(tmp_path, train=rows_of_task(40, 0), test=rows),
        f"--task={task}",
        "--max_seq_length=32",
        "--max_steps=12",
        "--learning_rate=3e-3",
        "--validation_share=0",
    ]
    finetune(trained, tmp_path / "tuned", *options)
    by_run = read_csv(tmp_path / "tuned" / "predictions.csv")
    made = read_csv(predict(tmp_path / "tuned", tmp_path / "test.jsonl", tmp_path / "again.csv"))
    assert_same_predictions(made, by_run, task)

    # Rows without labels have the same predictions; JSONL and Parquet keep lists and numbers.
    label = next(name for name in rows[0] if name in ("label", "ner_tags", "answers"))
    for row in rows:
        del row[label]
    unlabelled = write_table(tmp_path / "unlabelled.jsonl", rows)
    lines = predict(tmp_path / "tuned", unlabelled, tmp_path / "new.jsonl").read_text().splitlines()
    found = list(map(json.loads, lines))
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    table = pq.read_table(predict(tmp_path / "tuned", unlabelled, tmp_path / "new.parquet")).to_pylist()
    assert table == found
    for row, other in zip(found, made, strict=True):
        shown = json.dumps(row["prediction"]) if isinstance(row["prediction"], list) else str(row["prediction"])
        assert shown == other["prediction"] or task == "regression"
    if task == "multiple-choice":
        four = [{**row, "choices": [*row["choices"], "a fourth"]} for row in rows]
        words = [tmp_path / "tuned", write_table(tmp_path / "four.jsonl", four), f"--output={tmp_path / 'four.csv'}"]
        assert "line 1: 4 choices" in fails("predict", *words)


@pytest.fixture(scope="module")
def classifier(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    options = ["--task=text-classification", "--max_steps=12", "--learning_rate=3e-3", "--validation_share=0"]
    finetune(trained, folder / "tuned", *options, *file_options(folder, train=rows_of(40, 0)))
    return folder / "tuned"


def test_texts_in_lines_and_from_a_pipe_are_predicted_as_by_the_pipeline(classifier, tmp_path, monkeypatch):
    texts = [row["text"] for row in rows_of(9, 5)]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n\n")
    lines = read_csv(predict(classifier, tmp_path / "texts.txt", tmp_path / "lines.csv"))
    expected = pipeline("text-classification", model=str(classifier), top_k=None)(texts)
    assert [row["text"] for row in lines] == texts
    for row, answers in zip(lines, expected, strict=True):
        assert row["prediction"] == answers[0]["label"]
        for answer in answers:
            assert float(row[f"probability of {answer['label']}"]) == pytest.approx(answer["score"], abs=1e-5)
    # A second column is no second text, as the training rows had none.
    as_json = "".join(json.dumps({"text": text, "text_pair": text[::-1]}) + "\n" for text in texts)
    for number, said in enumerate(("\n".join(texts), as_json)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said.encode())))
        predict(classifier, "-", tmp_path / f"{number}.csv")
        assert [{name: row[name] for name in lines[0]} for row in read_csv(tmp_path / f"{number}.csv")] == lines
    again = predict(classifier, predict(classifier, tmp_path / "1.csv", tmp_path / "2.csv"), tmp_path / "3.csv")
    assert {name.count(" (predicted)") for name in read_csv(again)[0]} == {0, 1, 2}


def test_excel_opens_the_csv_and_columns_of_other_names_are_found(classifier, tmp_path, fails):
    for more, words in ((" ; ", ["letters.csv"]), ("", ["no column 'text'", "--text_column"])):
        content = f"no;Brief\n1;Then Ännchen sold the apple{more}\n"
        (tmp_path / "letters.csv").write_text(content, encoding="utf-8-sig")
        line = fails("predict", classifier, tmp_path / "letters.csv", "--output", tmp_path / "out.csv")
        assert all(word in line for word in words) and not (tmp_path / "out.csv").exists()
    out = predict(classifier, tmp_path / "letters.csv", tmp_path / "out.csv", "--text_column=Brief", "--excel")
    assert out.read_bytes().startswith(b"\xef\xbb\xbf")
    (row,) = csv.DictReader(io.StringIO(out.read_bytes().decode("utf-8-sig")), delimiter=";")
    assert row["Brief"] == "Then Ännchen sold the apple" and row["prediction"] in ("anna", "boris")
    assert 0 < float(row["probability"].replace(",", ".")) <= 1 and "." not in row["probability"]
    (tmp_path / "empty.txt").write_text("\n")
    assert "has no rows" in fails("predict", classifier, tmp_path / "empty.txt", f"--output={tmp_path / 'no.csv'}")


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        *(("=HYPERLINK(1)", "'=HYPERLINK(1)"), ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"), ("@SUM(1)", "'@SUM(1)")),
        *(("+1+cmd", "'+1+cmd"), ("-2+3", "'-2+3"), ("\t=1", "'\t=1"), ("\r=1", "'\r=1"), ("\n=1", "'\n=1")),
        *((" =1", "' =1"), ("\uff1d1", "'\uff1d1"), ("- she said", "'- she said"), ("a=b", "a=b"), ("", "")),
        *(("-5", "-5"), ("+3,5", "+3,5"), ("-1.000,5", "-1.000,5"), ("-1e-3", "-1e-3"), ("-5 %", "-5 %")),
        *((-0.5, "-0,5"), (-3, "-3"), (["=1"], '["=1"]')),
    ],
)
def test_no_cell_is_a_formula_for_excel_but_numbers_stay_numbers(tmp_path, cell, expected):
    column = cell if isinstance(cell, str) else "a"
    split = Split(label="rows", name="rows", rows=[Row("row 1", {column: cell})], fingerprint="")
    for is_for_excel in (False, True):
        output.write_table(tmp_path / "out.csv", split, {"prediction": [cell]}, is_for_excel)
        with (tmp_path / "out.csv").open(encoding="utf-8-sig", newline="") as file:
            header, row = csv.reader(file, delimiter=";" if is_for_excel else ",")
        as_it_is = json.dumps(cell) if isinstance(cell, list) else str(cell)
        assert row == [expected if is_for_excel else as_it_is] * 2
        assert header[0] == (row[0] if column == cell else "a")


def test_labels_in_several_columns_are_not_read(trained, tmp_path):
    rows = [
        {"text": row["text"], "anna": int(row["label"] == "anna"), "sold": n % 2}
        for n, row in enumerate(rows_of(20, 0))
    ]
    train = write_table(tmp_path / "train.csv", rows)
    options = ["--task=multi_label_classification", "--max_steps=4", "--validation_share=0"]
    finetune(trained, tmp_path / "tuned", *options, f"--train_file={train}", "--label_column", "anna", "sold")
    made = []
    for number, kept in enumerate((["text"], ["text", "anna"], ["text", "anna", "sold"])):
        some = [{name: row[name] if name == "text" else "?" for name in kept} for row in rows]
        file = write_table(tmp_path / f"new-{number}.csv", some)
        made.append(
            [row["prediction"] for row in read_csv(predict(tmp_path / "tuned", file, tmp_path / f"{number}.csv"))]
        )
    assert made[0] == made[1] == made[2]


# ---------------------------------------------------------------------------------------------------------------------
# `finetune` in two processes agrees with one


@pytest.mark.slow
@pytest.mark.parametrize("task", ROWS)
def test_two_processes_train_and_measure_what_one_does(task, trained, tmp_path):
    """Rows that two processes cannot share evenly; interpreters of their own, which order sets differently."""
    options = [trained, f"--task={task}", "--num_train_epochs=3", "--max_seq_length=32", "--learning_rate=1e-4"]
    options += ["--hidden_dropout_prob=0", "--attention_probs_dropout_prob=0", "--per_device_eval_batch_size=4"]
    rows = ROWS[task]
    options += file_options(tmp_path, train=rows(45, 0), validation=rows(13, 1), test=rows(19, 2))
    assert main(["finetune", *map(str, options), f"--output_dir={tmp_path / '1'}"]) == 0
    said = tmp_path / "said.txt"
    ranks = start(["finetune", *options, "--output_dir", tmp_path / "2"], processes=2, said=said)
    assert end(ranks, 300) == [0, 0], said.read_text()
    ends = [file.read_text().count("predictions for the test rows") for file in (said, tmp_path / "said.txt.1")]
    assert ends == [1, 0]
    one, two = (read_csv(tmp_path / name / "predictions.csv") for name in "12")
    assert len(one) == 19
    assert_same_predictions(one, two, task, abs=1e-5)
    first, second = (json.loads((tmp_path / name / "metrics.json").read_text())["seeds"][0] for name in "12")
    assert (second["steps"], second["best_step"]) == (first["steps"], first["best_step"])
    for split in ("validation", "test"):
        assert second[split]["loss"] == pytest.approx(first[split]["loss"], rel=1e-5)
        assert second[split] == pytest.approx(first[split], rel=1e-3, abs=2e-2)  # correlations of near equal numbers
    logs = [json.loads(next((tmp_path / name).glob("attempts/*/result.json")).read_text())["log"] for name in "12"]
    for row, other in zip(*logs, strict=True):
        names = row.keys() & {"loss", "eval_loss", "step"}
        assert {name: row[name] for name in names} == pytest.approx({name: other[name] for name in names}, rel=1e-4)
