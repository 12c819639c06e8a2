"""`d2l-bert predict`: new rows as the run and pipelines predict them; `finetune` in two processes as in one."""

import csv
import io
import json
import random
import shutil
import sys

import pyarrow.parquet as pq
import pytest
from conftest import SMALL
from finetuning import ROWS, assert_same_predictions, choice_rows, file_options, finetune, read_csv, rows_of
from promises.driving import end, start
from text_sources import write_table
from transformers import AutoTokenizer, BertConfig, BertModel, pipeline

from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.tokenization import long_texts
from d2l_bert.training.finetuning import cells
from d2l_bert.training.finetuning.config import PredictConfig
from d2l_bert.training.finetuning.features import truncated
from d2l_bert.training.finetuning.predict import COLUMN_OPTIONS, restored_task
from d2l_bert.training.finetuning.rows import Row, Split, check_writable, write_predictions


def predict(model, file, output, *options):
    assert main(["predict", str(model), str(file), f"--output={output}", *options]) == 0
    return output


def predicted(model, file, output, *options):
    """The rows of the table of predictions that is written for a file."""
    return read_csv(predict(model, file, output, *options))


def split_of(rows):
    """Rows of some cells, as they are read of a file."""
    numbered = [Row(f"line {number}", cells) for number, cells in enumerate(rows, 1)]
    return Split(title="FILE rows", name="rows", rows=numbered, fingerprint="")


def counted_from_1(count, seed):
    return [{**row, "label": row["label"] + 1} for row in choice_rows(count, seed)]


@pytest.mark.slow
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
    made = predicted(tmp_path / "tuned", tmp_path / "test.jsonl", tmp_path / "again.csv")
    assert_same_predictions(made, by_run, task)

    # Rows without labels have the same predictions; JSONL and Parquet keep lists and numbers.
    label = next(name for name in rows[0] if name in ("label", "ner_tags", "answers"))
    for row in rows:
        del row[label]
    unlabelled = write_table(tmp_path / "unlabelled.jsonl", rows)
    lines = predict(tmp_path / "tuned", unlabelled, tmp_path / "new.jsonl").read_text().splitlines()
    found = list(map(json.loads, lines))
    for row, given in zip(found, rows, strict=True):
        assert row.items() >= given.items()
    table = pq.read_table(predict(tmp_path / "tuned", unlabelled, tmp_path / "new.parquet")).to_pylist()
    assert table == found
    for row, other in zip(found, made, strict=True):
        prediction = row["prediction"]
        if task == "multi_label_classification":  # lists, but in CSV as the training rows have them there
            assert isinstance(prediction, list)
            shown = ",".join(prediction)
        elif isinstance(prediction, list):
            shown = json.dumps(prediction)
        else:
            shown = str(prediction)
        assert shown == other["prediction"] or task == "regression"
    if task == "multiple-choice":
        four = [{**row, "choices": [*row["choices"], "a fourth"]} for row in rows]
        file = write_table(tmp_path / "four.jsonl", four)
        assert "line 1: 4 choices" in fails("predict", tmp_path / "tuned", file, f"--output={tmp_path / 'four.csv'}")


@pytest.fixture(scope="module")
def classifier(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    options = ["--task=text-classification", "--max_steps=12", "--learning_rate=3e-3", "--validation_share=0"]
    finetune(trained, folder / "tuned", *options, *file_options(folder, train=rows_of(40, 0)))
    return folder / "tuned"


@pytest.mark.slow
def test_texts_in_lines_and_from_a_pipe_are_predicted_as_by_the_pipeline(classifier, tmp_path, monkeypatch):
    texts = [row["text"] for row in rows_of(9, 5)]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n\n")
    lines = predicted(classifier, tmp_path / "texts.txt", tmp_path / "lines.csv")
    expected = pipeline("text-classification", model=str(classifier), top_k=None)(texts)
    assert [row["text"] for row in lines] == texts
    for row, answers in zip(lines, expected, strict=True):
        assert row["prediction"] == answers[0]["label"]
        for answer in answers:
            assert float(row[f"probability of {answer['label']}"]) == pytest.approx(answer["score"], abs=1e-5)
    # A second column is no second text, as the training rows had none.
    as_json = [json.dumps({"text": text, "text_pair": text[::-1]}) for text in texts]
    for number, said in enumerate((texts, as_json)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(said).encode())))
        found = predicted(classifier, "-", tmp_path / f"{number}.csv")
        for row, expected_row in zip(found, lines, strict=True):
            assert row.items() >= expected_row.items()
    predict(classifier, tmp_path / "1.csv", tmp_path / "2.csv")
    again = predicted(classifier, tmp_path / "2.csv", tmp_path / "3.csv")
    assert {name.count(" (predicted)") for name in again[0]} == {0, 1, 2}


def test_excel_opens_the_csv_and_columns_of_other_names_are_found(classifier, tmp_path, fails):
    for more, words in ((" ; ", ["letters.csv"]), ("", ["no column 'text'", "--text_column"])):
        content = f"no;Brief\n1;Then Ännchen sold the apple{more}\n"
        (tmp_path / "letters.csv").write_text(content, encoding="utf-8-sig")
        line = fails("predict", classifier, tmp_path / "letters.csv", "--output", tmp_path / "out.csv")
        assert all(word in line for word in words)
        assert not (tmp_path / "out.csv").exists()
    out = predict(classifier, tmp_path / "letters.csv", tmp_path / "out.csv", "--text_column=Brief", "--excel")
    assert out.read_bytes().startswith(b"\xef\xbb\xbf")
    (row,) = csv.DictReader(io.StringIO(out.read_bytes().decode("utf-8-sig")), delimiter=";")
    assert row["Brief"] == "Then Ännchen sold the apple" and row["prediction"] in ("anna", "boris")
    assert 0 < float(row["probability"].replace(",", ".")) <= 1
    assert "." not in row["probability"]
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
    for is_for_excel in (False, True):
        write_predictions(tmp_path / "out.csv", split_of([{column: cell}]), {"prediction": [cell]}, is_for_excel)
        with (tmp_path / "out.csv").open(encoding="utf-8-sig", newline="") as file:
            header, row = csv.reader(file, delimiter=";" if is_for_excel else ",")
        as_it_is = json.dumps(cell) if isinstance(cell, list) else str(cell)
        assert row == [expected if is_for_excel else as_it_is] * 2
        assert header[0] == (row[0] if column == cell else "a")


@pytest.mark.slow
def test_labels_in_several_columns_are_not_read(trained, tmp_path):
    rows = list(rows_of(20, 0))
    for number, row in enumerate(rows):
        row["anna"] = int(row.pop("label") == "anna")
        row["sold"] = number % 2
    train = write_table(tmp_path / "train.csv", rows)
    options = ["--task=multi_label_classification", "--max_steps=4", "--validation_share=0"]
    finetune(trained, tmp_path / "tuned", *options, f"--train_file={train}", "--label_column", "anna", "sold")
    made = []
    for others in ({}, {"anna": "?"}, {"anna": "?", "sold": "?"}):
        file = write_table(tmp_path / "new.csv", [{"text": row["text"], **others} for row in rows])
        found = predicted(tmp_path / "tuned", file, tmp_path / f"{len(made)}.csv")
        made.append([row["prediction"] for row in found])
    assert made[0] == made[1] == made[2]


# ---------------------------------------------------------------------------------------------------------------------
# What is refused before anything is computed, and what a stranger's folder, a long line or an empty cell do


COLUMNS = {
    "text-classification": {"text_column": ["text"], "label_column": ["label"]},
    "multi_label_classification": {"text_column": ["text"], "text_pair_column": ["b"], "label_column": ["label"]},
    "regression": {"text_column": ["text"], "label_column": ["label"]},
    "token-classification": {"text_column": ["tokens"], "label_column": ["tags"]},
    "question-answering": {"question_column": ["q"], "context_column": ["c"], "label_column": ["answers"]},
    "multiple-choice": {"context_column": ["c"], "choices_column": ["choices"], "label_column": ["label"]},
}
LEARNT = {"classes": ["a", "b"], "mean": 0.5, "deviation": 2.0, "default": "a", "scheme": "BIO"}
LEARNT |= {"has_unanswerable": False, "count": 2, "begin": 0}


def record_of(task):
    return {"finetune": {"task": task}, "learnt": {**LEARNT, "columns": COLUMNS[task]}, "max_seq_length": 32}


@pytest.mark.parametrize("option", COLUMN_OPTIONS)
@pytest.mark.parametrize("task", COLUMNS)
def test_a_column_that_the_model_was_not_trained_with_is_refused(task, option):
    config = PredictConfig(output="a.csv", **{option: ["x"] if option == "choices_column" else "x"})
    if option in COLUMNS[task]:
        assert restored_task("m", record_of(task), config).columns[option] == ["x"]
    else:
        with pytest.raises(UserError, match=f"{option}.*without such a column"):
            restored_task("m", record_of(task), config)


@pytest.mark.parametrize("option", ["text_pair_column", "question_column", "separator"])
def test_an_option_without_effect_is_refused_by_the_command(option, classifier, tmp_path, fails):
    file = write_table(tmp_path / "rows.jsonl", rows_of(3, 0))
    value = ";" if option == "separator" else "nosuch"
    line = fails("predict", classifier, file, f"--output={tmp_path / 'out.csv'}", f"--{option}={value}")
    assert option in line and "leave" in line and not (tmp_path / "out.csv").exists()


@pytest.mark.slow
def test_a_table_that_is_read_as_lines_is_refused_by_its_header(classifier, tmp_path, fails, monkeypatch):
    table = 'id;"Text";label\n1;Then Anna sold the apple;anna\n'
    (tmp_path / "rows.txt").write_text(table)
    places = [("predict", tmp_path / "rows.txt", "out.csv"), ("predict", "-", "out.csv"), ("embed", "-", "out.npy")]
    for command, file, name in places:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(table.encode())))
        line = fails(command, classifier, file, f"--output={tmp_path / name}")
        assert "names of columns" in line and ".csv" in line and not (tmp_path / name).exists()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "Then Anna"}\n')))
    assert ".jsonl" in fails("embed", classifier, "-", f"--output={tmp_path / 'out.npy'}")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_row_with_an_empty_text_is_kept_without_a_prediction(kind, classifier, tmp_path, capsys):
    rows = [{"no": n, "text": row["text"]} for n, row in enumerate(rows_of(6, 3))]
    file = write_table(tmp_path / "whole.csv", rows)
    whole = predicted(classifier, file, tmp_path / "whole-out.csv")
    rows[2]["text"] = ""
    rows[5]["text"] = " "
    file = write_table(tmp_path / "rows.csv", rows)
    capsys.readouterr()
    out = predict(classifier, file, tmp_path / f"out.{kind}")
    said = capsys.readouterr()
    assert "predictions for 4 rows; 2 rows without a text" in said.out
    assert said.err.splitlines()[-2] == "columns: 'text'; not read: 'no'" and len(said.err.splitlines()) == 2
    assert f" is read as: {rows[0]['text']}" in said.err.splitlines()[-1]
    if kind == "csv":
        found = read_csv(out)
    elif kind == "jsonl":
        found = list(map(json.loads, out.read_text().splitlines()))
    else:
        found = pq.read_table(out).to_pylist()
    assert [row["no"] for row in found] == list("012345")
    for number, (row, other) in enumerate(zip(found, whole, strict=True)):
        empty = {"csv": ""}.get(kind)
        assert row["prediction"] == (empty if number in (2, 5) else other["prediction"])
        assert (row["probability"] == empty) == (number in (2, 5))


def test_a_file_of_empty_texts_is_refused(classifier, tmp_path, fails):
    (tmp_path / "rows.csv").write_text('id,text\n1,\n2," "\n')
    assert "no row has a text" in fails("predict", classifier, tmp_path / "rows.csv", f"--output={tmp_path / 'o.csv'}")


@pytest.mark.parametrize("value", [["a"], 2**70, {}], ids=repr)
def test_a_table_that_cannot_be_written_is_refused_before_anything_is_predicted(
    value, classifier, tmp_path, fails, monkeypatch
):
    monkeypatch.setattr("d2l_bert.training.finetuning.predict.outputs_of", pytest.fail)
    rows = [{"text": "Then Anna sold it.", "x": {} if value == {} else 1}, {"text": "Then Boris.", "x": value}]
    file = write_table(tmp_path / "rows.jsonl", rows)
    line = fails("predict", classifier, file, f"--output={tmp_path / 'out.parquet'}")
    assert ".jsonl" in line and not (tmp_path / "out.parquet").exists()


def test_rows_with_keys_of_their_own_make_no_table_of_empty_cells(tmp_path):
    split = split_of([{"text": "a", f"key {n}": n} for n in range(4000)])
    for suffix in (".csv", ".parquet"):
        with pytest.raises(UserError, match="4,001 columns, of which a row has 2"):
            check_writable(suffix, split)
    check_writable(".jsonl", split)
    write_predictions(tmp_path / "out.jsonl", split, {"prediction": ["b"] * 4000})
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(lines[7]) == {"text": "a", "key 7": 7, "prediction": "b"}


def test_objects_with_names_of_their_own_make_no_parquet_file(tmp_path):
    split = split_of([{"text": "a", "x": [{f"key {n}": {"a": n}}]} for n in range(2050)])
    with pytest.raises(UserError, match="more than 4,096 names in objects"):
        check_writable(".parquet", split)
    check_writable(".csv", split)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_numbers_that_json_has_no_form_for_are_null(kind, tmp_path):
    odd = {"a": [1.5, float("nan")], "b": {"c": float("-inf")}}
    write_predictions(tmp_path / f"out.{kind}", split_of([odd]), {})
    if kind == "csv":
        (row,) = read_csv(tmp_path / "out.csv")
        found = {name: json.loads(cell) for name, cell in row.items()}
    else:
        found = json.loads((tmp_path / "out.jsonl").read_text())
    assert found == {"a": [1.5, None], "b": {"c": None}}


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "\uff1d1", "-"]
CELLS = [*FORMULAS, "-5", "+3.5e-7", "-0,5", "-1.000,5", "-5 %", "a=b", ""]


def test_cells_that_spreadsheets_compute_get_an_apostrophe(classifier, tmp_path):
    rows = [{"=x": cell, "text": "Then Anna sold it."} for cell in CELLS]
    file = write_table(tmp_path / "rows.csv", rows)
    expected = [f"'{cell}" if cell in FORMULAS else cell for cell in CELLS]
    out = predict(classifier, file, tmp_path / "excel.csv", "--excel")
    table = io.StringIO(out.read_bytes().decode("utf-8-sig"), newline="")
    assert [row[0] for row in csv.reader(table, delimiter=";")] == ["'=x", *expected]
    assert [row["=x"] for row in predicted(classifier, file, tmp_path / "plain.csv")] == CELLS


@pytest.mark.slow
def test_the_tokens_that_are_read_of_a_long_text_are_those_of_the_whole(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained)
    plain = long_texts.without_limits(tokenizer.backend_tokenizer)
    rng = random.Random(0)
    for alphabet in ("ab. ", "é a\u0301,", "中文 .", " \t", ".", "x", "[MASK] "):
        for _ in range(20):
            most = rng.choice([8, 13, 32])
            length = rng.randrange(2000)
            text = "".join(rng.choice([alphabet, *alphabet]) for _ in range(length))
            begun = long_texts.beginning_of(text, most, plain)
            assert text.startswith(begun)
            ids = plain.encode(begun).ids
            of_whole = plain.encode(text).ids
            assert ids[:most] == of_whole[:most]
            assert begun == text or len(ids) > most
    assert len(long_texts.beginning_of("." * 4_000_000, 512, plain)) < 1000


@pytest.mark.parametrize("direction", ["right", "left"])
def test_of_long_words_no_more_is_tokenized_than_a_fixed_number_of_characters(direction, trained, monkeypatch):
    monkeypatch.setattr(long_texts, "MOST_CHARACTERS", 1 << 12)
    tokenizer = AutoTokenizer.from_pretrained(trained, truncation_side=direction)
    plain = long_texts.without_limits(tokenizer.backend_tokenizer)
    lengths = []

    class Counting:
        """The tokenizer, which notes how long the texts are that it gets."""

        truncation_side = direction
        backend_tokenizer = plain

        def __call__(self, *columns, **options):
            for column in columns:
                lengths.extend(map(len, column))
            return tokenizer(*columns, **options)

    most = long_texts.MOST_CHARACTERS
    for text in ("a" * (most + 9), "e\u0301" * most, " " * (2 * most)):
        for columns in ([[text]], [[text], ["short"]], [[text], [text]]):
            assert truncated(Counting(), columns, 16).note.startswith("1 ")
        assert len(long_texts.beginning_of(text, 16, plain)) == most
    assert max(lengths) == most


@pytest.mark.parametrize("task", ["question-answering", "token-classification"])
def test_what_is_read_in_windows_is_refused_beyond_the_length_of_a_book(task, trained, tmp_path, fails, monkeypatch):
    monkeypatch.setattr(cells, "LONGEST_READ_WHOLE", 50)
    (row,) = ROWS[task](1, 0)
    if task == "question-answering":
        row["context"] = row["context"] + " And so on." * 9
    else:
        row["tokens"] = row["tokens"][:1] * 60
        row["ner_tags"] = row["ner_tags"][:1] * 60
    files = file_options(tmp_path, train=[row] * 4)
    line = fails("finetune", trained, f"--task={task}", *files, f"--output_dir={tmp_path / 'out'}")
    assert "line 1" in line and "characters" in line and "divide" in line


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["right", "left"])
def test_long_texts_and_pairs_have_the_inputs_of_the_whole(direction, trained):
    tokenizer = AutoTokenizer.from_pretrained(trained, truncation_side=direction)
    texts = ["Then Anna sold it. " * 12, "." * 200, "short", "a. " * 70, "The apple, the pear and the drum " * 86]
    all_columns = [[texts]]
    if direction == "right":
        all_columns += [[texts, texts[::-1]], [texts, ["b! " * 25] * 5], [["c. " * 90], ["." * 180]]]
    for columns in all_columns:
        for most in (8, 9, 10):
            features = truncated(tokenizer, columns, most)
            batch = tokenizer(*columns, truncation=True, max_length=most)
            assert [row["input_ids"] for row in features.inputs] == batch["input_ids"]
            assert features.note


WRONG_RECORDS = [
    {"learnt": 5},
    {"learnt": {"columns": []}},
    {"learnt": {"columns": {"text_column": "text"}}},
    {"learnt": {"columns": {"text_column": ["a", "b"]}}},
    {"learnt": {"columns": {}}},
    {"learnt": {"classes": []}},
    {"learnt": {"classes": [1, 2]}},
    {"learnt": {"classes": ["a", "b", "c"]}},
    {"learnt": {"classes": None}},
    {"finetune": []},
    {"finetune": {"task": ["regression"]}},
    {"finetune": {"task": "no such"}},
    {"finetune": {"task": None}},
    {"finetune": {"label_separator": 5}},
    {"finetune": {"max_answer_length": "x"}},
    {"max_seq_length": "x"},
    {"max_seq_length": -1},
    {"max_seq_length": 10**9},
    {"max_seq_length": None},
]


@pytest.mark.parametrize("change", WRONG_RECORDS, ids=json.dumps)
def test_a_record_that_is_not_of_this_model_is_refused_in_one_line(change, classifier, tmp_path, fails):
    folder = shutil.copytree(classifier, tmp_path / "tuned")
    record = json.loads((folder / "run_config.json").read_text())
    for name, value in change.items():
        record[name] = {**record[name], **value} if isinstance(value, dict) else value
    (folder / "run_config.json").write_text(json.dumps(record))
    file = write_table(tmp_path / "rows.csv", rows_of(2, 0))
    assert "run_config.json" in fails("predict", folder, file, f"--output={tmp_path / 'out.csv'}")
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("names", [["same", "same"], ["one\ud800", "two"]], ids=ascii)
def test_classes_that_cannot_be_told_apart_or_written_are_refused(names, classifier, tmp_path, fails):
    folder = shutil.copytree(classifier, tmp_path / "tuned")
    record, config = (json.loads((folder / name).read_text()) for name in ("run_config.json", "config.json"))
    record["learnt"]["classes"] = names
    (folder / "run_config.json").write_text(json.dumps(record))
    (folder / "config.json").write_text(json.dumps({**config, "id2label": dict(enumerate(names))}))
    file = write_table(tmp_path / "rows.csv", rows_of(2, 0))
    assert "learnt.classes has" in fails("predict", folder, file, f"--output={tmp_path / 'out.csv'}")


def test_a_tag_of_words_without_pieces_is_one_of_the_tags():
    record = record_of("token-classification")
    learnt = {**record["learnt"], "default": "no such tag"}
    with pytest.raises(UserError, match="learnt.default is no class"):
        restored_task("m", {**record, "learnt": learnt}, PredictConfig(output="a.csv"))


@pytest.mark.parametrize("task", COLUMNS)
def test_a_record_without_a_part_that_its_task_needs_is_refused(task):
    config = PredictConfig(output="a.csv")
    record = record_of(task)
    of_tomorrow = {**record, "finetune": {"task": task, "option_of_tomorrow": 1}}
    assert restored_task("m", of_tomorrow, config).columns
    for name in ("columns", *restored_task("m", record, config).needed_to_predict):
        damaged = record_of(task)
        del damaged["learnt"][name]
        with pytest.raises(UserError, match="run_config.json"):
            restored_task("m", damaged, config)
    record["learnt"]["columns"] = {"label_column": ["a"]}
    with pytest.raises(UserError, match="run_config.json"):
        restored_task("m", record, config)


@pytest.mark.slow
def test_a_length_that_is_no_multiple_of_8_is_learnt_and_predicted(trained, tmp_path):
    """Rows of 44 tokens, for a model of 44 positions."""
    tokenizer = AutoTokenizer.from_pretrained(trained)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = BertConfig(vocab_size=len(tokenizer), **sizes, max_position_embeddings=44)
    BertModel(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [{"text": row["text"] * 9, "label": row["label"]} for row in rows_of(12, 0)]
    files = file_options(tmp_path, train=rows, test=rows)
    finetune(tmp_path / "base", tmp_path / "out", "--task=classification", *files, "--max_steps=1")
    assert json.loads((tmp_path / "out" / "run_config.json").read_text())["max_seq_length"] == 44
    assert len(predicted(tmp_path / "out", tmp_path / "test.jsonl", tmp_path / "made.csv")) == 12


# ---------------------------------------------------------------------------------------------------------------------
# `finetune` in two processes agrees with one


@pytest.fixture(scope="module")
def from_random_weights(books, tmp_path_factory):
    """
    A model whose [CLS] sees the whole text from the start.

    After a short run from bigrams it sees little but its neighbours: choices are then equally likely up to rounding.
    """
    folder = tmp_path_factory.mktemp("from-random-weights") / "model"
    options = ["--attention_init=normal", "--hidden_act=relu", "--max_steps=40", "--mixed_precision=no"]
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={folder}", *SMALL, *options, "--license=mit"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("task", ROWS)
def test_two_processes_train_and_measure_what_one_does(task, from_random_weights, tmp_path):
    """Rows that two processes cannot share evenly; interpreters of their own, which order sets differently."""
    model = from_random_weights
    options = [model, f"--task={task}", "--num_train_epochs=3", "--max_seq_length=32", "--learning_rate=1e-4"]
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


def test_a_column_of_bytes_is_left_out_of_a_file_of_text_and_said(tmp_path, caplog):
    split = split_of(
        [
            {"text": "a", "raw": None, "deep": []},
            {"text": "b", "raw": b"\xff", "deep": [{"bytes": b"a"}]},
        ]
    )
    for name, said in (("out.csv", 2), ("out.jsonl", 2), ("out.parquet", 0)):
        caplog.clear()
        write_predictions(tmp_path / name, split, {"prediction": ["x", "y"]})
        assert sum("bytes" in record.message for record in caplog.records) == said
    expected = [{"text": "a", "prediction": "x"}, {"text": "b", "prediction": "y"}]
    assert read_csv(tmp_path / "out.csv") == expected
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == expected
    assert pq.read_table(tmp_path / "out.parquet").num_columns == 4
