"""What `d2l-bert finetune` makes of right rows: columns, labels, held-out rows; features and predictions."""

import itertools
import json
import re
from collections import Counter

import datasets
import numpy as np
import pytest
from finetuning import ROWS, answer_rows, choice_rows, load, saved, squad_json, swag_rows, tag_rows
from sklearn.dummy import DummyClassifier, DummyRegressor
from text_sources import write_table
from transformers import AutoTokenizer

from d2l_bert.messages import UserError
from d2l_bert.training.finetuning import account, text_classification
from d2l_bert.training.finetuning.rows import read_file, write_predictions


def read(split):
    return [(row.texts, row.label) for row in split.rows]


def labels_of(split):
    return [label for _, label in read(split)]


ANSWERED = answer_rows(3, 0)


def labelled(*labels):
    return [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]


def load_rows(file, rows, task, **options):
    """Write rows to a file and read them: the task and the splits of a run on it."""
    return load(write_table(file, rows), task, **options)


def names_of_labels(*names):
    """The features of a dataset whose labels are numbers of these names."""
    return datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})


@pytest.fixture(scope="module")
def tokenizer(trained):
    return AutoTokenizer.from_pretrained(trained)


# ---------------------------------------------------------------------------------------------------------------------
# Labels


@pytest.mark.parametrize(
    "labels, classes",
    [
        ([10, 2, 1], ["1", "2", "10"]),
        (["no", "yes", "maybe"], ["maybe", "no", "yes"]),
        ([True, False], ["False", "True"]),
        ([0, "1", 1, "0"], ["0", "1"]),  # numbers and strings
    ],
)
def test_classes_are_in_the_order_of_their_numbers_or_names(labels, classes, tmp_path):
    rows = labelled(*labels, *labels)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    write_table(tmp_path / "rows.jsonl", rows)
    for name in ("rows.jsonl", "rows.json"):
        task, splits = load(tmp_path / name, "text-classification")
        assert task.classes == classes
        assert labels_of(splits["train"]) == [str(label) for label in labels * 2]


def test_whole_floats_are_the_classes_that_pandas_had_before_a_cell_was_empty(tmp_path):
    labels = [5.0, "1.0", 3, "4.", -1.0, 5]
    task, splits = load_rows(tmp_path / "rows.jsonl", labelled(*labels), "text-classification")
    assert labels_of(splits["train"]) == ["5", "1", "3", "4", "-1", "5"]
    task, splits = load_rows(tmp_path / "rows.jsonl", labelled([1.0], [2]), "multi_label_classification")
    assert labels_of(splits["train"]) == [["1"], ["2"]]


def chosen(label, names, place):
    """Rows in which the choice of a place and the first one are right, and their texts and labels."""
    first = "0" if isinstance(label, str) else 0
    rows = [{"context": "a", "choices": list(names), "label": one} for one in (label, first)]
    texts = ("a", *names)
    return "multiple-choice", "jsonl", rows, [(texts, place), (texts, 0)]


def copa_row(label):
    return {"premise": "p", "choice1": f"c{label}", "choice2": "d", "question": "cause", "label": label}


ENDINGS = {f"ending{number}": number for number in (10, *range(10))}
TEXTS_OF_ENDINGS = ("a", *map(str, range(11)))


def texts_and_answer(row):
    """What is read of a row of a question with one answer."""
    (text,) = row["answers"]["text"]
    (start,) = row["answers"]["answer_start"]
    return (row["question"], row["context"]), [(text, start)]


# The second question is impossible, although an answer stands beside it.
FIRST, SECOND, THIRD = ANSWERED
SQUAD = [{**FIRST, "is_impossible": False}, {**SECOND, "is_impossible": True}, {**THIRD, "is_impossible": False}]
SQUAD_READ = [texts_and_answer(FIRST), (texts_and_answer(SECOND)[0], None), texts_and_answer(THIRD)]


@pytest.mark.parametrize(
    "task, kind, rows, expected",
    [
        # Spellings that look alike are one class.
        (
            "text-classification",
            "jsonl",
            labelled("gr\u00fcn", "gru\u0308n", "blau"),
            [(("text 0",), "gr\u00fcn"), (("text 1",), "gr\u00fcn"), (("text 2",), "blau")],
        ),
        # The right choice by its number or its letter; pandas writes 1.0.
        *(chosen("2", "231", 2), chosen("A", "bAc", 0), chosen("C", "bcd", 2), chosen("1.0", "ab", 1)),
        chosen(2, "201", 2),
        # COPA's columns are found, and numbered columns in the order of their numbers.
        (
            "multiple-choice",
            "csv",
            [copa_row(0), copa_row(1)],
            [(("p", "cause", "c0", "d"), 0), (("p", "cause", "c1", "d"), 1)],
        ),
        (
            "multiple-choice",
            "csv",
            [{"sent1": "a", **ENDINGS, "label": 0}, {"sent1": "a", **ENDINGS, "label": 10}],
            [(TEXTS_OF_ENDINGS, 0), (TEXTS_OF_ENDINGS, 10)],
        ),
        ("question-answering", "jsonl", SQUAD, SQUAD_READ),
    ],
)
def test_texts_and_labels_of_rows(task, kind, rows, expected, tmp_path):
    task, splits = load_rows(tmp_path / f"rows.{kind}", rows, task)
    assert read(splits["train"]) == expected
    assert task.has_unanswerable == (None in labels_of(splits["train"]))


def test_minus_one_is_a_class_where_classes_have_no_names(tmp_path):
    dataset = saved(tmp_path / "set", train=labelled(-1, 0, 1, 1), test=labelled(-1, -1))
    task, splits = load(None, "text-classification", dataset=dataset)
    assert task.classes == ["-1", "0", "1"]
    assert labels_of(splits["train"]) == ["-1", "0", "1", "1"]
    assert not splits["test"].is_labelled


def test_minus_one_says_that_there_is_no_label_where_the_task_names_the_classes(tmp_path):
    dataset = saved(tmp_path / "set", train=labelled(-1, 0, 1, 1))
    task, splits = load(None, "sst2", dataset=dataset, text_column="text")
    assert task.classes == ["negative", "positive"]
    assert len(splits["train"].rows) == 3


def test_minus_one_says_that_there_is_no_label_where_the_dataset_names_the_classes(tmp_path):
    dataset = saved(tmp_path / "set", names_of_labels("no", "yes"), train=labelled(-1, 0, 1, 1))
    _, splits = load(None, "text-classification", dataset=dataset)
    assert labels_of(splits["train"]) == ["no", "yes", "yes"]


@pytest.mark.parametrize("names", [("0", "1"), ("1", "0"), ("0", "positive")])
def test_a_dataset_whose_classes_are_called_by_numbers_has_the_classes_of_a_named_task(names, tmp_path):
    rows = labelled(0, 1, 1)
    dataset = saved(tmp_path / "set", names_of_labels(*names), train=rows)
    task, splits = load(None, "sst2", dataset=dataset, text_column="text")
    assert task.classes == ["negative", "positive"]
    called = {"0": "negative", "1": "positive"}
    assert labels_of(splits["train"]) == [called.get(names[row["label"]], names[row["label"]]) for row in rows]


def test_a_number_that_a_named_task_has_no_class_for_is_refused(tmp_path):
    dataset = saved(tmp_path / "set", names_of_labels("0", "1", "2"), train=labelled(0, 1, 2))
    with pytest.raises(UserError, match="'2' beside labels of task sst2"):
        load(None, "sst2", dataset=dataset, text_column="text")


def classes_in(folder, names, numbers):
    """What is read of a saved dataset whose classes have these names."""
    dataset = saved(folder, names_of_labels(*names), train=labelled(*numbers))
    task, splits = load(None, "text-classification", dataset=dataset)
    return task.classes, labels_of(splits["train"])


@pytest.mark.parametrize("names", [["\u00fc", "u\u0308", "b"], ["\u00fc", "\u00fc ", "b"]])
def test_classes_of_a_dataset_that_are_equal_when_read_are_one_class(names, tmp_path):
    classes, labels = classes_in(tmp_path / "set", names, [0, 1, 2, 0])
    assert classes == ["\u00fc", "b"]
    assert labels == ["\u00fc", "\u00fc", "b", "\u00fc"]
    with pytest.raises(UserError, match="every row has the label"):
        classes_in(tmp_path / "two", names[:2], [0, 1, 0, 1])


@pytest.mark.parametrize("name", ["pos\ud800", " "])
def test_a_class_whose_name_cannot_be_written_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="set, split train: column 'label' (has the label|holds)"):
        classes_in(tmp_path / "set", ["no", name], [0, 1, 0, 1])


def test_half_characters_in_cells_of_json_are_replaced(tmp_path):
    rows = [{"tokens": '["a\\ud800", "b"]', "tags": '["x\\udc00", "y"]'}]
    task, splits = load_rows(tmp_path / "rows.csv", rows, "token-classification")
    assert read(splits["train"]) == [(("a\ufffd", "b"), ["x\ufffd", "y"])]
    assert task.classes == ["x\ufffd", "y"]


def test_words_that_pandas_reads_as_empty_are_classes_in_a_folder_of_csv(tmp_path):
    write_table(tmp_path / "train.csv", labelled("None", "NA", "null", "yes", "None"))
    task, splits = load(None, "text-classification", dataset=str(tmp_path))
    assert sorted(task.classes) == ["NA", "None", "null", "yes"]
    assert len(splits["train"].rows) == 5


def test_each_of_several_label_columns_is_a_label_also_without_a_one(tmp_path):
    rows = [{"text": f"t{n}", "toxic": n % 2, "insult": n % 3 % 2, "threat": 0} for n in range(6)]
    test_file = str(write_table(tmp_path / "test.csv", [rows[0]]))
    columns = ["toxic", "insult", "threat"]
    task, splits = load_rows(tmp_path / "rows.csv", rows, "multilabel", test_file=test_file, label_column=columns)
    assert task.settings["id2label"] == {0: "toxic", 1: "insult", 2: "threat"}
    assert splits["test"].is_labelled
    assert task.targets(splits["train"])[1].tolist() == [1, 1, 0]
    write_table(tmp_path / "test.csv", [{**rows[0], "toxic": -1}])  # a row that is not scored, as in Jigsaw's file
    with pytest.raises(UserError, match="line 2: column 'toxic' holds '-1'; write 0 or 1, or take the row out"):
        load_rows(tmp_path / "rows.csv", rows, "multilabel", test_file=test_file, label_column=columns)


def test_several_labels_of_a_row_take_a_byte_each_and_are_bounded(tmp_path, tokenizer, monkeypatch):
    rows = [{"text": f"t{n}", "label": [str(n), str(n % 3)]} for n in range(8)]
    task, splits = load_rows(tmp_path / "rows.jsonl", rows, "multilabel")
    features = task.features(splits["train"], tokenizer, 32)
    labels = [inputs["labels"] for inputs in features.inputs]
    for number, of_row in enumerate(labels):
        assert of_row.nbytes == 8
        assert of_row.base is labels[0].base
        assert np.flatnonzero(of_row).tolist() == sorted({number, number % 3})
    assert len(labels) == 8
    monkeypatch.setattr(text_classification, "MOST_YES_AND_NO", 63)
    too_many = "train_file rows.jsonl: 8 rows with a yes or no for each of 8 labels are more"
    with pytest.raises(UserError, match=too_many):
        task.features(splits["train"], tokenizer, 32)


def perfectly_predicted(task, split):
    """What is predicted by outputs that are positive for the labels of a row alone."""
    return task.predictions(split, 2 * task.targets(split) - 1)


def write_as_labels(file, split, predicted):
    """Write a table of predictions in which the column of labels holds the predicted ones."""
    split.columns.remove("label")
    write_predictions(file, split, {"label": predicted["prediction"]})


def test_labels_with_the_separator_are_read_back_from_the_table_of_predictions(tmp_path):
    rows = [{"text": "one", "label": ["a, b", "c"]}, {"text": "two", "label": ["c"]}]
    task, splits = load_rows(tmp_path / "rows.jsonl", rows, "multilabel")
    write_as_labels(tmp_path / "predictions.csv", splits["train"], perfectly_predicted(task, splits["train"]))
    _, again = load(tmp_path / "predictions.csv", "multilabel")
    assert labels_of(again["train"]) == [row["label"] for row in rows]


@pytest.mark.parametrize(
    "names, separator",
    [("ab", ","), (["New York", "Rome"], "; "), (["[a", "b]"], ","), (["a|", "b"], "||")],
)
def test_predicted_labels_are_lists_and_are_read_back_from_csv(names, separator, tmp_path):
    one, other = names
    labels = [[], [one], [other], [one, other]]
    task, splits = load_rows(tmp_path / "rows.jsonl", labelled(*labels), "multilabel", label_separator=separator)
    predicted = perfectly_predicted(task, splits["train"])
    assert predicted["prediction"] == labels
    write_as_labels(tmp_path / "out.csv", splits["train"], task.in_csv(predicted))
    _, again = load(tmp_path / "out.csv", "multilabel", label_separator=separator)
    assert labels_of(again["train"]) == labels


def dummy(train, test, strategy):
    """What scikit-learn's dummy classifier of this strategy predicts for the rows of a split."""
    texts = np.zeros((len(train.rows), 1))
    labels = [row.label for row in train.rows]
    return DummyClassifier(strategy=strategy).fit(texts, labels).predict(np.zeros((len(test.rows), 1)))


def load_train_and_test(folder, task, train, test):
    """The task and the splits of files whose rows have these labels."""
    test_file = str(write_table(folder / "test.csv", labelled(*test)))
    return load_rows(folder / "train.csv", labelled(*train), task, test_file=test_file)


def test_a_baseline_of_classes_has_seen_the_training_labels_alone(tmp_path):
    """Train has nine hams in ten, test one; scikit-learn's dummy as judge."""
    train = ["ham"] * 9 + ["spam"]
    test = ["spam"] * 9 + ["ham"]
    task, splits = load_train_and_test(tmp_path, "text-classification", train, test)
    _, found = task.baseline(splits["train"], splits["test"])
    expected = np.mean(dummy(splits["train"], splits["test"], "most_frequent") == np.array(test))
    assert found["accuracy"] == expected == 0.1


def test_a_baseline_of_numbers_has_seen_the_training_labels_alone(tmp_path):
    train = [1.0, 2.0, 6.0]
    test = [30.0, 50.0]
    task, splits = load_train_and_test(tmp_path, "regression", train, test)
    _, found = task.baseline(splits["train"], splits["test"])
    judge = DummyRegressor(strategy="mean").fit(np.zeros((3, 1)), train)
    guess = judge.predict(np.zeros((2, 1)))
    assert found["mse"] == pytest.approx(np.mean((guess - test) ** 2))


@pytest.mark.parametrize("kind", ["multilabel", "token-classification"])
def test_other_labels_of_the_test_rows_do_not_change_what_knows_nothing_predicts(kind, tmp_path, monkeypatch):
    guesses = []
    for name in "ab":
        rows = tag_rows(4, 0)
        if kind == "multilabel":
            rows = labelled(["a"], ["a", "b"], ["c"])
        wrong = [{**row, list(row)[-1]: ["O"] * len(row["tokens"]) if "tokens" in row else [name]} for row in rows]
        options = {"test_file": str(write_table(tmp_path / "test.jsonl", wrong))}
        task, splits = load(write_table(tmp_path / "train.jsonl", rows), kind, **options)
        with monkeypatch.context() as patched:
            patched.setattr(task, "metrics", lambda split, said: guesses.append(np.array(said, dtype=object)))
            task.baseline(splits["train"], splits["test"])
    assert all(list(one) == list(other) for one, other in zip(*guesses, strict=True))


def test_lists_as_json_in_cells_of_csv_are_those_of_json_lines(tmp_path):
    rows = tag_rows(6, 0)
    _, splits = load(write_table(tmp_path / "rows.jsonl", rows), "token-classification")
    write_predictions(tmp_path / "rows.csv", splits["train"], {})
    _, again = load(tmp_path / "rows.csv", "token-classification")
    assert read(again["train"]) == read(splits["train"]) == [(tuple(r["tokens"]), r["ner_tags"]) for r in rows]


def test_labels_of_choices_from_one_on_are_read_and_predicted_as_such(tmp_path):
    """As WinoGrande has them."""
    rows = [{"sentence": f"{n} _", "option1": "a", "option2": f"b{n}", "answer": str(n % 2 + 1)} for n in range(4)]
    options = {"context_column": "sentence", "label_column": ["answer"]}
    task, splits = load_rows(tmp_path / "rows.csv", rows, "multiple-choice", **options)
    assert labels_of(splits["train"]) == [0, 1, 0, 1]
    predicted = task.predictions(splits["train"], np.eye(2)[[0, 1, 1, 0]])
    assert predicted["prediction"] == [1, 2, 2, 1]
    assert predicted["predicted_choice"] == ["a", "b1", "b2", "a"]


def test_numbers_far_from_zero_keep_their_digits(tmp_path):
    numbers = np.random.default_rng(0).normal(1e6, 5, 40)
    task, splits = load_rows(tmp_path / "rows.jsonl", labelled(*numbers), "regression")
    of_a_perfect_model = task.targets(splits["train"])[:, None].astype(np.float32)
    outputs = task.rescaled(of_a_perfect_model)
    found = task.metrics(splits["train"], outputs)
    assert found["pearson"] == pytest.approx(1, abs=1e-9)
    assert found["mae"] < 1e-5
    predicted = task.predictions(splits["train"], outputs)["prediction"]
    assert predicted == pytest.approx(numbers, abs=1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Splits


def test_a_split_that_chooses_is_not_the_test_split_too(tmp_path):
    folder = saved(tmp_path / "data", train=labelled(*"abab"), test=labelled(*"ab"))
    _, splits = load(None, "text-classification", dataset=folder, validation_split="test", validation_share=None)
    assert list(splits) == ["train", "validation"]


def test_held_out_rows_are_drawn_by_the_seed(tmp_path):
    write_table(tmp_path / "rows.jsonl", labelled(*range(100)))

    def held_out(seed):
        _, splits = load(tmp_path / "rows.jsonl", "regression", validation_share=0.2, seed=seed)
        return splits["validation"].rows

    one = held_out(42)
    assert held_out(42) == one != held_out(7)
    assert len(one) == 20


@pytest.mark.parametrize("task", ["text-classification", "multilabel", "token-classification"])
def test_rows_are_held_out_by_class_and_no_class_loses_all_of_its_rows(task, tmp_path):
    rows = labelled(*["common"] * 100, *["rare"] * 3, "one", "another")
    if task == "multilabel":
        for row in rows:
            row["label"] = ["common"] if row["label"] == "common" else ["common", row["label"]]
    if task == "token-classification":
        rows = [{"tokens": row["text"].split(), "tags": ["common", row["label"]]} for row in rows]
    for seed in range(5):
        options = {"validation_share": 0.1, "seed": seed}
        _, splits = load_rows(tmp_path / "rows.jsonl", rows, task, **options)
        labels = labels_of(splits["validation"])
        held_out = Counter(label if isinstance(label, str) else label[-1] for label in labels)
        assert held_out == {"common": 10, "rare": 1}


def test_a_small_share_of_many_classes_is_held_out_as_it_was_asked_for(tmp_path):
    names = [str(number % 100) for number in range(300)]
    _, splits = load_rows(tmp_path / "rows.jsonl", labelled(*names), "text-classification", validation_share=0.1)
    held_out = labels_of(splits["validation"])
    assert len(held_out) == 30
    assert max(Counter(held_out).values()) == 1


# ---------------------------------------------------------------------------------------------------------------------
# CoNLL's files

COMMENTS = """# sent_id = 1\tO
#\ttext = Ada left
Ada _ B-PER
left _ O
# _ O

# id 7f3a-0001
# _ domain=en
Bo _ B-PER
# _ B-PER
"""


def load_conll(folder, content):
    (folder / "rows.conll").write_text(content)
    return load(folder / "rows.conll", "token-classification")


def test_comments_in_a_conll_file_are_left_out_and_counted(tmp_path, shown, capsys):
    task, splits = load_conll(tmp_path, COMMENTS)
    assert read(splits["train"]) == [
        (("Ada", "left", "#"), ["B-PER", "O", "O"]),
        (("Bo", "#"), ["B-PER", "B-PER"]),
    ]
    assert [row.place for row in splits["train"].rows] == ["line 3", "line 9"]
    assert "4 lines are left out as comments, first line 1: # sent_id = 1" in capsys.readouterr().err
    assert task.scheme == "BIO"


@pytest.mark.parametrize(
    "tags, scheme",
    [
        ("B-X I-X O", "BIO"),
        ("I-X O", "BIO"),
        ("S-X B-X E-X O", "BIOES"),
        ("B I E S", "BIOES"),
        ("U-X B-X I-X L-X O", "BILOU"),
        ("U L", None),
        ("B-X NOUN", None),
        ("NOUN VERB", None),
    ],
)
def test_the_scheme_of_tags_is_found_and_said(tags, scheme, tmp_path):
    rows = [{"tokens": tags.split(), "tags": tags.split()}]
    task, splits = load_rows(tmp_path / "rows.jsonl", rows, "token-classification")
    assert task.scheme == scheme
    assert (task.main_metric == "f1") == (scheme is not None)
    assert (scheme or "accuracy over words") in account.lines_about_rows(task, splits)[1]


@pytest.mark.parametrize(
    "lines, words, columns",
    [
        # GermEval's four fields, with a comment and a word that is a number; tabs or spaces; numbers from 0 on.
        (["# web", "1\tIn\tO\tO", "2\t1990\tB\tO"], ["In", "1990"], {"field 3": ["O", "B"], "tags": ["O", "O"]}),
        (["0 In O", "1 York B"], ["In", "York"], {"tags": ["O", "B"]}),
        # CoNLL-U Plus and .cupt: two words in one, a word that is not in the text, a space in a word.
        (["1-2\tzum\t_", "1\tzu\tA", "2\tdem\tB", "2.1\tx\t_", "3\tNew York\tA"], ["zu", "dem", "New York"], {}),
        # Without tags, as `predict` may read it.
        (["# text = a b", "1 a", "2 b"], ["a", "b"], {}),
    ],
)
def test_the_number_of_a_word_in_conll_is_not_the_word(lines, words, columns, tmp_path):
    (tmp_path / "rows.cupt").write_text("\n".join([*lines, "", *lines]))
    rows = read_file(str(tmp_path / "rows.cupt"), "").rows
    assert [row.cells["tokens"] for row in rows] == [words, words]
    for row in rows:
        assert row.cells.items() >= columns.items()


def test_words_that_are_numbers_stay_words(tmp_path):
    _, splits = load_conll(tmp_path, "7 O\n\n1 O\n2 O\n4 B-X\n")
    assert [row.texts for row in splits["train"].rows] == [("7",), ("1", "2", "4")]


def test_hashtags_with_a_tag_of_their_own_are_words(tmp_path, shown, capsys):
    text = "# draft\n#harvest HT\nAnna NNP\nleft VB\n#weir HT\n#end document\n\n#end document\n"
    task, splits = load_conll(tmp_path, text)
    assert read(splits["train"]) == [(("#harvest", "Anna", "left", "#weir"), ["HT", "NNP", "VB", "HT"])]
    assert "3 lines are left out as comments" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# What is shown of rows


def said_of(task, splits):
    return "\n".join(account.lines_about_rows(task, splits))


@pytest.mark.parametrize("task", ROWS)
def test_what_was_read_is_shown_in_few_lines(task, tmp_path, tokenizer):
    rows = [*ROWS[task](30, 0), *ROWS[task](30, 0)]
    column = next(name for name in ("text", "context", "tokens") if name in rows[0])
    for number, row in enumerate(rows):
        row["a column that no option names"] = number
    # Long texts, of which the beginning is shown.
    rows[0][column] = rows[0][column] * 50 if column == "tokens" else rows[0][column] + " and more" * 50
    if column == "tokens":
        rows[0]["ner_tags"] = rows[0]["ner_tags"] * 50
    task, splits = load_rows(tmp_path / "rows.jsonl", rows, task, validation_share=0.1)
    lines = account.lines_about_rows(task, splits)
    for name, split in splits.items():
        lines.append(account.line_of_split(task, name, split, task.features(split, tokenizer, 32), 32))
    assert len(lines) <= 8 and max(map(len, lines)) <= 120
    assert lines[0].endswith("; not read: 'a column that no option names'") or "not read: 'id'" in lines[0]
    assert "line " in lines[2] and "is read as: " in lines[2] and "..." in lines[2]
    assert any(re.match(r"\d+ rows with texts and label of an earlier one", line) for line in lines)
    account.write_account(tmp_path, task, splits)
    written = (tmp_path / account.ACCOUNT_FILE).read_text()
    assert lines[0] in written and "validation: " in written


@pytest.mark.parametrize(
    "task, rows, expected",
    [
        (
            "text-classification",
            [
                {"text": "a\x1b\u200b\nb", "text_pair": "c", "label": "x"},
                {"text": "b", "text_pair": "d", "label": "y"},
            ],
            ["columns: 'text' | 'text_pair' -> 'label'", r"line 1 is read as: a\x1b\u200b\nb | c -> x"],
        ),
        (
            "token-classification",
            [{"tokens": ["Ada", "left"], "tags": ["B-PER", "O"]}],
            ["2 tags in 'tags' (BIO: figures of entities): 'B-PER' 1, 'O' 1", "is read as: Ada/B-PER left/O"],
        ),
        ("regression", labelled(3, 4.5, 3), ["numbers in 'label': 3 to 4.5, mean 3.5, 2 different", "text 0 -> 3"]),
        (
            "question-answering",
            [{"question": "who?", "context": "Ada left.", "answers": {"text": ["Ada"], "answer_start": [0]}}]
            + [{"question": "where?", "context": "Ada left.", "answers": {"text": [], "answer_start": []}}],
            ["1 rows have one, 1 have none", "who? | Ada left. -> Ada"],
        ),
        ("multiple-choice", [{"context": "a", "choices": ["b", "c"], "label": "B"}], ["a | b / c -> c", "0 on"]),
        (
            "multi_label_classification",
            labelled("a,b", "b", ""),
            ["2 classes in 'label': 'b' 2, 'a' 1", "text 0 -> a, b"],
        ),
    ],
)
def test_a_row_is_shown_as_the_model_will_read_it(task, rows, expected, tmp_path):
    said = said_of(*load_rows(tmp_path / "rows.jsonl", rows, task))
    for words in expected:
        assert words in said


def test_the_rarest_of_many_classes_are_shown_and_all_are_written(tmp_path):
    labels = [f"class {number}" for number in range(20) for _ in range(number + 2)]
    task, splits = load_rows(tmp_path / "rows.jsonl", labelled(*labels), "text-classification")
    line = account.lines_about_rows(task, splits)[1]
    assert line.startswith("20 classes in 'label': 'class 19' 21, 'class 18' 20, ") and line.endswith("'class 0' 2")
    assert "..." in line and len(line) <= 120
    assert all(
        f"'class {number}': {number + 2}" in "\n".join(account.whole_account(task, splits)) for number in range(20)
    )


def test_classes_that_look_alike_are_named(tmp_path):
    labels = ["good", "bad", "Good", "good\u200b", "bad", "very bad", "verybad", "other"] * 2
    said = said_of(*load_rows(tmp_path / "rows.jsonl", labelled(*labels), "text-classification"))
    assert r"alone: 'Good', 'good', 'good\u200b' | 'very bad', 'verybad'" in said
    said = said_of(*load_rows(tmp_path / "rows.jsonl", labelled("good", "bad", "godo") * 2, "text-classification"))
    assert "alone" not in said


def test_equal_texts_with_different_labels_are_counted_also_among_rows_held_out(tmp_path):
    rows = [{"text": text, "label": label} for text, label in ("ax", "ay", "bx", "bx", "bx", "cy", "dx", "ey")]
    said = said_of(*load_rows(tmp_path / "rows.jsonl", rows, "text-classification", validation_share=0.4))
    assert "2 rows with texts and label of an earlier one; 1 text with several labels" in said


@pytest.mark.parametrize(
    "damage, said",
    [("für".encode().decode("cp1252"), "encoding"), ("a<br />b", "tags"), (r"a.\nB", "escapes"), ("für b", "")],
)
def test_damage_in_the_texts_of_rows_is_said_once(damage, said, tmp_path):
    rows = [{"text": f"word {number} {damage}", "label": "xy"[number % 2]} for number in range(8)]
    task, splits = load_rows(tmp_path / "rows.jsonl", rows, "text-classification")
    lines = [line for line in account.lines_about_rows(task, splits) if line.startswith("texts: ")]
    assert len(lines) == bool(said)
    assert all(said in line for line in lines)


@pytest.mark.parametrize(
    "labels, separator, said",
    [
        (["farm", "market", "farm#market", "river", "river#farm"], ",", "give --label_separator '#'"),
        (["farm", "market", "farm | market"], ",", "give --label_separator '|'"),
        (["farm", "market", "river"], ",", "(--label_separator)"),
        (["farm", "market", "farm,market"], ",", ""),
        (["farm", "market", "farm#market"], "#", ""),
        ([["farm"], ["market"], ["river"]], ",", ""),
    ],
)
def test_labels_that_another_sign_joins_are_told(labels, separator, said, tmp_path):
    task = "multi_label_classification"
    found = said_of(*load_rows(tmp_path / "rows.jsonl", labelled(*labels), task, label_separator=separator))
    assert said in found and bool(said) == ("no cell of 'label' has ','" in found)


# ---------------------------------------------------------------------------------------------------------------------
# Features and predictions of token classification, question answering and multiple choice


def made(file, rows, task, tokenizer, length, **options):
    """Write rows to a file and read them: the task, the training rows, and their features."""
    task, splits = load_rows(file, rows, task, **options)
    return task, splits["train"], task.features(splits["train"], tokenizer, length)


def test_squads_nested_json_is_the_flat_form(tmp_path):
    rows = answer_rows(20, 0, unanswerable=0.5)
    expected = []
    for row in rows:
        answers = list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True))
        expected.append((row["id"], (row["question"], row["context"]), answers or None))
    for name, content in (("nested", squad_json(rows)), ("list", rows), ("data", {"data": rows})):
        with_half_a_character = json.dumps(content).replace('"id"', r'"half": "\ud83d", "id"')
        (tmp_path / f"{name}.json").write_text(with_half_a_character)
    write_table(tmp_path / "flat.jsonl", rows)
    write_table(tmp_path / "flat.csv", [{**row, "answers": json.dumps(row["answers"])} for row in rows])
    for row in rows:  # as pandas writes whole numbers beside missing ones
        row["answers"]["answer_start"] = list(map(float, row["answers"]["answer_start"]))
    write_table(tmp_path / "floats.jsonl", rows)
    for name in ("nested.json", "list.json", "data.json", "flat.jsonl", "flat.csv", "floats.jsonl"):
        task, splits = load(tmp_path / name, "question-answering")
        assert task.settings["num_labels"] == 2
        found = [(row.cells["id"], row.texts, row.label) for row in splits["train"].rows]
        assert found == expected
        for row in splits["train"].rows:
            assert row.cells.get("half", "\ufffd") == "\ufffd"


# ---------------------------------------------------------------------------------------------------------------------
# Tags


def test_the_first_piece_of_a_word_has_the_label_and_every_word_is_in_one_window(tmp_path, tokenizer):
    long_tags = list(itertools.chain.from_iterable(row["ner_tags"] for row in tag_rows(9, 1)))
    # A word of several pieces, also where a window ends.
    long_row = {"tokens": ["gardenwalkers"] * len(long_tags), "ner_tags": long_tags}
    rows = [*tag_rows(5, 0), long_row]
    expected = [row["ner_tags"] for row in rows]
    task, split, features = made(tmp_path / "rows.jsonl", rows, "tags", tokenizer, 33)

    numbers = [window.row for window in features.windows]
    assert numbers.count(5) > 2
    assert "1 (16.7%) are longer than 33 tokens" in features.note
    found = [[] for _ in rows]
    for number, row in zip(numbers, features.inputs, strict=True):
        assert len(row["input_ids"]) == len(row["labels"]) <= 33
        tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
        assert tokens[0] == "[CLS]"
        assert tokens[-1] == "[SEP]"
        if number == 5:
            assert -100 in row["labels"][1:-1]
        for token, label in zip(tokens, row["labels"], strict=True):
            begins_a_word = token not in ("[CLS]", "[SEP]") and not token.startswith("##")
            assert (label != -100) == begins_a_word
            if label != -100:
                found[number].append(task.classes[label])
    assert found == expected

    assert "unseen" not in features.note
    rows[0] = {"tokens": ["\u200e", "Ada", "\xad"], "ner_tags": ["O", "B-PER", "I-PER"]}
    _, _, with_unseen = made(tmp_path / "unseen.jsonl", rows, "tags", tokenizer, 33)
    assert "cut into windows; 2 words of unseen signs alone" in with_unseen.note

    # Scores that say the labels give the labels back; padded by -100 as Trainer does.
    logits = np.full((len(features.inputs), 40, len(task.classes)), -100.0)
    says_class = np.eye(len(task.classes))
    for scores, row in zip(logits, features.inputs, strict=True):
        scores[: len(row["labels"])] = says_class[np.maximum(row["labels"], 0)]
    tags = task.by_row(split, features.windows, logits)
    assert task.predictions(split, tags)["prediction"] == expected
    assert task.metrics(split, tags)["f1"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# Answers


@pytest.fixture
def long_answers(tmp_path, tokenizer):
    """Rows whose contexts are of several windows of 32 tokens."""
    rows = answer_rows(30, 3, unanswerable=0.2)
    for number, row in enumerate(rows):
        before = "".join(f"{answer_rows(1, seed)[0]['context']} " for seed in range(number % 4))
        row["context"] = f"{before}{row['context']} {before}"
        # Two words, of which a window may have one.
        answers = row["answers"]
        answers["text"] = [f"the {text}" for text in answers["text"]]
        answers["answer_start"] = [len(before) + start - len("the ") for start in answers["answer_start"]]
    options = {"doc_stride": 8, "max_answer_length": 5}
    return made(tmp_path / "rows.jsonl", rows, "answers", tokenizer, 32, **options)


def test_the_windows_of_a_context_overlap_and_carry_the_answer(long_answers, tokenizer):
    _, split, features = long_answers
    assert len(features.inputs) > 45
    assert "are longer than 32 tokens" in features.note
    all_windows = list(zip(features.windows, features.inputs, strict=True))
    with_answer = set()
    for number, row in enumerate(split.rows):
        _, context = row.texts
        mine = [(window, inputs) for window, inputs in all_windows if window.row == number]
        seen = [list(map(tuple, window.places.tolist())) for window, _ in mine]
        pieces = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        assert set(itertools.chain(*seen)) == set(pieces)  # each token is in a window
        for one, other in itertools.pairwise(seen):
            assert one[-8:] == other[:8]  # the stride
        for window, inputs in mine:
            positions = window.positions.tolist()
            places = window.places
            start, end = inputs["labels"]
            assert len(inputs["input_ids"]) <= 32
            assert (start == 0) == (end == 0)
            if start != 0:
                with_answer.add(number)
                first = places[positions.index(start), 0]
                last = places[positions.index(end), 1]
                assert context[first:last] == row.label[0][0]
            elif row.label:  # [CLS]: the answer is not in this window as a whole
                answer, begin = row.label[0]
                end_of_answer = begin + len(answer)
                assert not places[0, 0] <= begin < end_of_answer <= places[-1, 1]
    assert with_answer == {number for number, row in enumerate(split.rows) if row.label}


def test_answers_that_no_window_has_whole_are_counted(tmp_path, tokenizer):
    answer = "walked " * 50 + "home"
    answers = {"text": [answer], "answer_start": [0]}
    rows = [*answer_rows(9, 0), {"question": "who?", "context": f"{answer} again", "answers": answers}]
    _, _, features = made(tmp_path / "rows.jsonl", rows, "answers", tokenizer, 32, doc_stride=8)
    assert "1 answers are in no window as a whole" in features.note


def all_spans(scores, window):
    """By trying all spans of up to 5 tokens: score, probability and first character of each, of [CLS] first."""
    scores = scores[[0, *window.positions]].astype(float)
    shares = np.exp(scores) / np.exp(scores).sum(0)
    count = len(scores)
    yield scores[0].sum(), shares[0].prod(), None
    for first in range(1, count):
        for last in range(first, min(first + 5, count)):
            score = scores[first, 0] + scores[last, 1]
            share = shares[first, 0] * shares[last, 1]
            yield score, share, int(window.places[first - 1, 0])


def test_the_best_span_is_that_of_trying_all_spans(long_answers):
    task, split, features = long_answers
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(len(features.inputs), 40, 2)).astype(np.float32)
    nothing = [[] for _ in split.rows]
    spans = [[] for _ in split.rows]
    for window, of_window in zip(features.windows, scores, strict=True):
        of_cls, *others = all_spans(of_window, window)
        nothing[window.row].append(of_cls)
        spans[window.row] += others
    found = task.by_row(split, features.windows, scores)
    assert len(found) == len(split.rows)
    for number, span in enumerate(found):
        expected = max([min(nothing[number]), *spans[number]])
        assert (span.score, span.probability, span.begin) == pytest.approx(expected, abs=1e-5)


def test_the_threshold_decides_whether_there_is_no_answer(tmp_path, tokenizer):
    rows = [*answer_rows(3, 0), *answer_rows(2, 1, unanswerable=1.0)]
    scores = np.zeros((len(rows), 64, 2), dtype=np.float32)
    for threshold, says_nothing in ((0.0, True), (4.0, False), (-2.0, True)):
        options = {"null_score_diff_threshold": threshold}
        task, split, features = made(tmp_path / "rows.jsonl", rows, "answers", tokenizer, 64, **options)
        scores[:, 0, 0] = 4  # no answer
        scores[:, features.windows[0].positions[0], 0] = 1  # the best span
        spans = task.by_row(split, features.windows, scores)
        assert all((span.text == "") == says_nothing for span in spans)
    # Without such questions in the training rows, there is always an answer.
    task, split, features = made(tmp_path / "other.jsonl", rows[:3], "answers", tokenizer, 64)
    assert all(span.text for span in task.by_row(split, features.windows, scores[:3]))


# ---------------------------------------------------------------------------------------------------------------------
# Multiple choice


def test_swags_columns_and_the_general_ones_give_the_same_pairs(tmp_path, tokenizer):
    rows = choice_rows(8, 0)
    general = [{**row, "question": "then"} for row in rows]
    letters = [{**row, "label": "ABC"[row["label"]]} for row in general]
    named = []  # as CommonsenseQA and ARC name the choices
    for row in rows:
        choices = {"text": row["choices"], "label": ["1", "2", "3"]}
        answer = str(row["label"] + 1)
        named.append({"question": "then", "context": row["context"], "choices": choices, "answerKey": answer})
    for content in (general, swag_rows(rows), letters, named):
        task, _, features = made(tmp_path / "rows.jsonl", content, "multiple_choice", tokenizer, 48)
        for row, inputs in zip(rows, features.inputs, strict=True):
            expected = [tokenizer(row["context"], f"then {choice}")["input_ids"] for choice in row["choices"]]
            assert inputs["labels"] == row["label"]
            assert inputs["input_ids"] == expected
    batch = task.collator(tokenizer)(features.inputs)
    assert batch["input_ids"].shape[:2] == (8, 3)
    assert batch["labels"].tolist() == [row["label"] for row in rows]
    padding = batch["input_ids"][batch["attention_mask"] == 0]
    assert (padding == tokenizer.pad_token_id).all()
