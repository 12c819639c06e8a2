"""What `d2l-bert finetune` makes of right rows: columns, labels, held-out rows; features and predictions."""

import itertools
import json
from collections import Counter

import datasets
import numpy as np
import pytest
from finetuning import answer_rows, choice_rows, load, saved, squad_json, swag_rows, tag_rows
from sklearn.dummy import DummyClassifier, DummyRegressor
from text_sources import write_table
from transformers import AutoTokenizer

from d2l_bert.messages import UserError
from d2l_bert.training.finetuning import scoring, text_classification
from d2l_bert.training.finetuning.rows import write_predictions


def read(split):
    return [(row.texts, row.label) for row in split.rows]


def labels_of(split):
    return [label for _, label in read(split)]


ANSWERED = answer_rows(3, 0)


def labelled(*labels):
    return [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]


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
    for path in (write_table(tmp_path / "rows.jsonl", rows), tmp_path / "rows.json"):
        task, splits = load(path, "text-classification")
        assert (task.classes, labels_of(splits["train"])) == (classes, [str(label) for label in labels * 2])


def chosen(label, names, place):
    """Rows in which the choice of a place and the first one are right, and their texts and labels."""
    labels = (label, "0" if isinstance(label, str) else 0)
    rows = [{"context": "a", "choices": list(names), "label": one} for one in labels]
    return "multiple-choice", "jsonl", rows, [(("a", *names), place), (("a", *names), 0)]


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
            [{"premise": "p", "choice1": f"c{n}", "choice2": "d", "question": "cause", "label": n} for n in (0, 1)],
            [(("p", "cause", f"c{n}", "d"), n) for n in (0, 1)],
        ),
        (
            "multiple-choice",
            "csv",
            [{"sent1": "a", **{f"ending{n}": n for n in (10, *range(10))}, "label": 10 * n} for n in (0, 1)],
            [(("a", *map(str, range(11))), 10 * n) for n in (0, 1)],
        ),
        # SQuAD's impossible questions have no answer.
        (
            "question-answering",
            "jsonl",
            [{**row, "is_impossible": n == 1} for n, row in enumerate(ANSWERED)],
            [
                (
                    (row["question"], row["context"]),
                    [(row["answers"]["text"][0], row["answers"]["answer_start"][0])][n == 1 :] or None,
                )
                for n, row in enumerate(ANSWERED)
            ],
        ),
    ],
)
def test_texts_and_labels_of_rows(task, kind, rows, expected, tmp_path):
    task, splits = load(write_table(tmp_path / f"rows.{kind}", rows), task)
    assert read(splits["train"]) == expected and task.has_unanswerable == (None in labels_of(splits["train"]))


def test_minus_one_is_a_class_unless_it_says_that_there_is_no_label(tmp_path):
    options = {"dataset": saved(tmp_path / "a", train=labelled(-1, 0, 1, 1), test=labelled(-1, -1))}
    task, splits = load(None, "text-classification", **options)
    assert task.classes == ["-1", "0", "1"] and labels_of(splits["train"]) == ["-1", "0", "1", "1"]
    assert not splits["test"].is_labelled
    options = {"dataset": saved(tmp_path / "b", train=labelled(-1, 0, 1, 1))}
    task, splits = load(None, "sst2", **options, text_column="text")
    assert task.classes == ["negative", "positive"] and len(splits["train"].rows) == 3
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    options = {"dataset": saved(tmp_path / "c", kinds, train=labelled(-1, 0, 1, 1))}
    _, splits = load(None, "text-classification", **options)
    assert labels_of(splits["train"]) == ["no", "yes", "yes"]


def classes_in(folder, names, numbers):
    """What is read of a saved dataset whose classes have these names."""
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    options = {"dataset": saved(folder, kinds, train=labelled(*numbers))}
    task, splits = load(None, "text-classification", **options)
    return task.classes, labels_of(splits["train"])


@pytest.mark.parametrize("names", [["\u00fc", "u\u0308", "b"], ["\u00fc", "\u00fc ", "b"]])
def test_classes_of_a_dataset_that_are_equal_when_read_are_one_class(names, tmp_path):
    assert classes_in(tmp_path / "set", names, [0, 1, 2, 0]) == (["\u00fc", "b"], ["\u00fc", "\u00fc", "b", "\u00fc"])
    with pytest.raises(UserError, match="every row has the label"):
        classes_in(tmp_path / "two", names[:2], [0, 1, 0, 1])


@pytest.mark.parametrize("name", ["pos\ud800", " "])
def test_a_class_whose_name_cannot_be_written_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="set, split train: column 'label' (has the label|holds)"):
        classes_in(tmp_path / "set", ["no", name], [0, 1, 0, 1])


def test_half_characters_in_cells_of_json_are_replaced(tmp_path):
    rows = [{"tokens": '["a\\ud800", "b"]', "tags": '["x\\udc00", "y"]'}]
    task, splits = load(write_table(tmp_path / "rows.csv", rows), "token-classification")
    assert read(splits["train"]) == [(("a\ufffd", "b"), ["x\ufffd", "y"])] and task.classes == ["x\ufffd", "y"]


def test_words_that_pandas_reads_as_empty_are_classes_in_a_folder_of_csv(tmp_path):
    write_table(tmp_path / "train.csv", labelled("None", "NA", "null", "yes", "None"))
    task, splits = load(None, "text-classification", dataset=str(tmp_path))
    assert sorted(task.classes) == ["NA", "None", "null", "yes"] and len(splits["train"].rows) == 5


def test_each_of_several_label_columns_is_a_label_also_without_a_one(tmp_path):
    rows = [{"text": f"t{n}", "toxic": n % 2, "insult": n % 3 % 2, "threat": 0} for n in range(6)]
    options = {"test_file": str(write_table(tmp_path / "test.csv", [rows[0]])), "label_column": [*rows[0]][1:]}
    task, splits = load(write_table(tmp_path / "rows.csv", rows), "multilabel", **options)
    assert task.settings["id2label"] == {0: "toxic", 1: "insult", 2: "threat"} and splits["test"].is_labelled
    assert task.targets(splits["train"])[1].tolist() == [1, 1, 0]


def test_several_labels_of_a_row_take_a_byte_each_and_are_bounded(tmp_path, tokenizer, monkeypatch):
    rows = [{"text": f"t{n}", "label": [str(n), str(n % 3)]} for n in range(8)]
    task, splits = load(write_table(tmp_path / "rows.jsonl", rows), "multilabel")
    features = task.features(splits["train"], tokenizer, 32)
    labels = [inputs["labels"] for inputs in features.inputs]
    assert all(of_row.nbytes == 8 and of_row.base is labels[0].base for of_row in labels)
    assert [np.flatnonzero(of_row).tolist() for of_row in labels] == [sorted({n, n % 3}) for n in range(8)]
    monkeypatch.setattr(text_classification, "MOST_YES_AND_NO", 63)
    with pytest.raises(
        UserError, match="train_file rows.jsonl: 8 rows with a yes or no for each of 8 labels are more"
    ):
        task.features(splits["train"], tokenizer, 32)


def test_labels_with_the_separator_are_read_back_from_the_table_of_predictions(tmp_path):
    rows = [{"text": "one", "label": ["a, b", "c"]}, {"text": "two", "label": ["c"]}]
    task, splits = load(write_table(tmp_path / "rows.jsonl", rows), "multilabel")
    outputs = 2 * task.targets(splits["train"]) - 1
    predicted = {"label": task.predictions(splits["train"], outputs)["prediction"]}
    splits["train"].columns.remove("label")
    write_predictions(tmp_path / "predictions.csv", splits["train"], predicted)
    _, again = load(tmp_path / "predictions.csv", "multilabel")
    assert labels_of(again["train"]) == [row["label"] for row in rows]


@pytest.mark.parametrize(
    "names, separator",
    [("ab", ","), (["New York", "Rome"], "; "), (["[a", "b]"], ","), (["a|", "b"], "||")],
)
def test_predicted_labels_are_lists_and_are_read_back_from_csv(names, separator, tmp_path):
    rows = [{"text": str(n), "label": found} for n, found in enumerate(([], [names[0]], [names[1]], list(names)))]
    task, splits = load(write_table(tmp_path / "rows.jsonl", rows), "multilabel", label_separator=separator)
    predicted = task.predictions(splits["train"], 2 * task.targets(splits["train"]) - 1)
    assert predicted["prediction"] == [row["label"] for row in rows]
    splits["train"].columns.remove("label")
    write_predictions(tmp_path / "out.csv", splits["train"], {"label": task.in_csv(predicted)["prediction"]})
    _, again = load(tmp_path / "out.csv", "multilabel", label_separator=separator)
    assert labels_of(again["train"]) == [row["label"] for row in rows]


def dummy(train, test, strategy):
    """What scikit-learn's dummy classifier of this strategy predicts for the rows of a split."""
    texts = np.zeros((len(train.rows), 1))
    labels = [row.label for row in train.rows]
    return DummyClassifier(strategy=strategy).fit(texts, labels).predict(np.zeros((len(test.rows), 1)))


def test_what_knows_nothing_has_seen_the_training_labels_alone(tmp_path):
    """Train has nine hams in ten, test one; scikit-learn's dummies as judges."""
    train = ["ham"] * 9 + ["spam"]
    test = ["spam"] * 9 + ["ham"]
    options = {"test_file": str(write_table(tmp_path / "test.csv", labelled(*test)))}
    task, splits = load(write_table(tmp_path / "train.csv", labelled(*train)), "text-classification", **options)
    _, found = task.baseline(splits["train"], splits["test"])
    expected = np.mean(dummy(splits["train"], splits["test"], "most_frequent") == np.array(test))
    assert found["accuracy"] == expected == 0.1
    numbers = [1.0, 2.0, 6.0]
    others = [30.0, 50.0]
    options = {"test_file": str(write_table(tmp_path / "test.csv", labelled(*others)))}
    task, splits = load(write_table(tmp_path / "train.csv", labelled(*numbers)), "regression", **options)
    guess = DummyRegressor(strategy="mean").fit(np.zeros((3, 1)), numbers).predict(np.zeros((2, 1)))
    _, found = task.baseline(splits["train"], splits["test"])
    assert found["mse"] == pytest.approx(np.mean((guess - others) ** 2))


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
        where = scoring
        which = "tag_metrics" if kind == "token-classification" else "multilabel_metrics"
        with monkeypatch.context() as patched:
            patched.setattr(where, which, lambda true, said, *more: guesses.append(np.array(said, dtype=object)))
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
    task, splits = load(write_table(tmp_path / "rows.csv", rows), "multiple-choice", **options)
    assert labels_of(splits["train"]) == [0, 1, 0, 1]
    predicted = task.predictions(splits["train"], np.eye(2)[[0, 1, 1, 0]])
    assert predicted["prediction"] == [1, 2, 2, 1] and predicted["predicted_choice"] == ["a", "b1", "b2", "a"]


def test_numbers_far_from_zero_keep_their_digits(tmp_path):
    numbers = np.random.default_rng(0).normal(1e6, 5, 40)
    task, splits = load(write_table(tmp_path / "rows.jsonl", labelled(*numbers)), "regression")
    outputs = task.targets(splits["train"])[:, None].astype(np.float32)  # as a perfect model gives them
    found = task.metrics(splits["train"], task.rescaled(outputs))
    assert found["pearson"] == pytest.approx(1, abs=1e-9) and found["mae"] < 1e-5
    predicted = task.predictions(splits["train"], task.rescaled(outputs))["prediction"]
    assert predicted == pytest.approx(numbers, abs=1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Splits


def test_a_split_that_chooses_is_not_the_test_split_too(tmp_path):
    folder = saved(tmp_path / "data", train=labelled(*"abab"), test=labelled(*"ab"))
    _, splits = load(None, "text-classification", dataset=folder, validation_split="test", validation_share=None)
    assert list(splits) == ["train", "validation"]


def test_held_out_rows_are_drawn_by_the_seed(tmp_path):
    path = write_table(tmp_path / "rows.jsonl", labelled(*range(100)))
    one, again, other = (
        load(path, "regression", validation_share=0.2, seed=seed)[1]["validation"].rows for seed in (42, 42, 7)
    )
    assert one == again != other and len(one) == 20


@pytest.mark.parametrize("task", ["text-classification", "multilabel", "token-classification"])
def test_rows_are_held_out_by_class_and_no_class_loses_all_of_its_rows(task, tmp_path):
    counts = {"common": 100, "rare": 3, "one": 1, "another": 1}
    rows = labelled(*itertools.chain(*([name] * count for name, count in counts.items())))
    if task == "multilabel":
        rows = [{**row, "label": ["common", row["label"]][row["label"] == "common" :]} for row in rows]
    if task == "token-classification":
        rows = [{"tokens": row["text"].split(), "tags": ["common", row["label"]]} for row in rows]
    for seed in range(5):
        options = {"validation_share": 0.1, "seed": seed}
        _, splits = load(write_table(tmp_path / "rows.jsonl", rows), task, **options)
        labels = labels_of(splits["validation"])
        held_out = Counter(label if isinstance(label, str) else label[-1] for label in labels)
        assert held_out == {"common": 10, "rare": 1}


def test_a_small_share_of_many_classes_is_held_out_as_it_was_asked_for(tmp_path):
    path = write_table(tmp_path / "rows.jsonl", labelled(*(str(number % 100) for number in range(300))))
    _, splits = load(path, "text-classification", validation_share=0.1)
    assert len(splits["validation"].rows) == 30 and max(Counter(labels_of(splits["validation"])).values()) == 1


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


def test_comments_in_a_conll_file_are_left_out_and_counted(tmp_path, shown, capsys):
    (tmp_path / "rows.conll").write_text(COMMENTS)
    task, splits = load(tmp_path / "rows.conll", "token-classification")
    assert read(splits["train"]) == [
        (("Ada", "left", "#"), ["B-PER", "O", "O"]),
        (("Bo", "#"), ["B-PER", "B-PER"]),
    ]
    assert [row.place for row in splits["train"].rows] == ["line 3", "line 9"]
    said = capsys.readouterr().err
    assert "4 lines" in said and "BIO" in said


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
def test_the_scheme_of_tags_is_found_and_said(tags, scheme, tmp_path, shown, capsys):
    rows = [{"tokens": tags.split(), "tags": tags.split()}]
    task, _ = load(write_table(tmp_path / "rows.jsonl", rows), "token-classification")
    assert task.scheme == scheme and (task.main_metric == "f1") == (scheme is not None)
    assert (scheme or "accuracy over words") in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Features and predictions of token classification, question answering and multiple choice


@pytest.fixture(scope="module")
def tokenizer(trained):
    return AutoTokenizer.from_pretrained(trained)


def made(path, task, tokenizer, length, **options):
    """The task, the training rows, and their features."""
    task, splits = load(path, task, **options)
    return task, splits["train"], task.features(splits["train"], tokenizer, length)


def test_squads_nested_json_is_the_flat_form(tmp_path):
    rows = answer_rows(20, 0, unanswerable=0.5)
    labels = [list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)) or None for row in rows]
    for name, content in (("nested", squad_json(rows)), ("list", rows), ("data", {"data": rows})):
        # with half of a character
        (tmp_path / f"{name}.json").write_text(json.dumps(content).replace('"id"', r'"half": "\ud83d", "id"'))
    write_table(tmp_path / "flat.jsonl", rows)
    write_table(tmp_path / "flat.csv", [{**row, "answers": json.dumps(row["answers"])} for row in rows])
    for row in rows:  # as pandas writes whole numbers beside missing ones
        row["answers"]["answer_start"] = list(map(float, row["answers"]["answer_start"]))
    write_table(tmp_path / "floats.jsonl", rows)
    for name in ("nested.json", "list.json", "data.json", "flat.jsonl", "flat.csv", "floats.jsonl"):
        task, splits = load(tmp_path / name, "question-answering")
        assert task.settings["num_labels"] == 2 and [
            (row.cells["id"], row.cells.get("half", "\ufffd"), *row[2:]) for row in splits["train"].rows
        ] == [
            (row["id"], "\ufffd", (row["question"], row["context"]), label)
            for row, label in zip(rows, labels, strict=True)
        ]


# ---------------------------------------------------------------------------------------------------------------------
# Tags


def test_the_first_piece_of_a_word_has_the_label_and_every_word_is_in_one_window(tmp_path, tokenizer):
    tags = [tag for row in tag_rows(9, 1) for tag in row["ner_tags"]]
    # A word of several pieces, also where a window ends.
    rows = [*tag_rows(5, 0), {"tokens": ["gardenwalkers"] * len(tags), "ner_tags": tags}]
    task, split, features = made(write_table(tmp_path / "rows.jsonl", rows), "tags", tokenizer, 33)
    numbers = [window.row for window in features.windows]
    assert numbers.count(5) > 2 and "1 (16.7%) are longer than 33 tokens" in features.note
    found = [[] for _ in rows]
    for number, row in zip(numbers, features.inputs, strict=True):
        assert len(row["input_ids"]) == len(row["labels"]) <= 33
        tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
        assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and (number < 5 or -100 in row["labels"][1:-1])
        for token, label in zip(tokens, row["labels"], strict=True):
            # The tokens that begin no word have no label, all others have one.
            assert (label == -100) == (token in ("[CLS]", "[SEP]") or token.startswith("##"))
            if label != -100:
                found[number].append(task.classes[label])
    assert found == [row["ner_tags"] for row in rows]
    # Scores that say the labels give the labels back; padded by -100 as Trainer does.
    logits = np.full((len(features.inputs), 40, len(task.classes)), -100.0)
    for scores, row in zip(logits, features.inputs, strict=True):
        scores[: len(row["labels"])] = np.eye(len(task.classes))[np.maximum(row["labels"], 0)]
    tags = task.row_outputs(split, features.windows, logits)
    assert task.predictions(split, tags)["prediction"] == [row["ner_tags"] for row in rows]
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
        row["answers"]["text"] = [f"the {text}" for text in row["answers"]["text"]]
        row["answers"]["answer_start"] = [start + len(before) - 4 for start in row["answers"]["answer_start"]]
    return made(
        write_table(tmp_path / "rows.jsonl", rows), "answers", tokenizer, 32, doc_stride=8, max_answer_length=5
    )


def test_the_windows_of_a_context_overlap_and_carry_the_answer(long_answers, tokenizer):
    _, split, features = long_answers
    assert len(features.inputs) > 45 and "are longer than 32 tokens" in features.note
    with_answer = set()
    for number, (_, _, (_, context), gold) in enumerate(split.rows):
        all_windows = zip(features.windows, features.inputs, strict=True)
        mine = [(window, inputs) for window, inputs in all_windows if window.row == number]
        pieces = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        seen = [list(map(tuple, window.places.tolist())) for window, _ in mine]
        assert set(itertools.chain(*seen)) == set(pieces)  # each token is in a window
        for one, other in itertools.pairwise(seen):
            assert one[-8:] == other[:8]  # the stride
        for (_, positions, places), inputs in mine:
            start, end = inputs["labels"]
            assert len(inputs["input_ids"]) <= 32 and (start == 0) == (end == 0)
            if start != 0:
                with_answer.add(number)
                first, last = (positions.tolist().index(place) for place in (start, end))
                assert context[places[first, 0] : places[last, 1]] == gold[0][0]
            elif gold:  # [CLS]: the answer is not in this window as a whole
                assert not places[0, 0] <= gold[0][1] < gold[0][1] + len(gold[0][0]) <= places[-1, 1]
    assert with_answer == {number for number, row in enumerate(split.rows) if row.label}


def test_answers_that_no_window_has_whole_are_counted(tmp_path, tokenizer):
    answers = {"text": ["walked " * 50 + "home"], "answer_start": [0]}
    rows = [*answer_rows(9, 0), {"question": "who?", "context": f"{answers['text'][0]} again", "answers": answers}]
    _, _, features = made(write_table(tmp_path / "rows.jsonl", rows), "answers", tokenizer, 32, doc_stride=8)
    assert "1 answers are in no window as a whole" in features.note


def test_the_best_span_is_that_of_trying_all_spans(long_answers):
    task, split, features = long_answers
    scores = np.random.default_rng(0).normal(size=(len(features.inputs), 40, 2)).astype(np.float32)
    spans = [[] for _ in split.rows]
    for window, of_window in zip(features.windows, scores, strict=True):
        of_window = of_window[[0, *window.positions]].astype(float)
        shares = np.exp(of_window) / np.exp(of_window).sum(0)
        count = len(of_window)
        for one, other in [(0, 0), *((a, b) for a in range(1, count) for b in range(a, min(a + 5, count)))]:
            begin = int(window.places[one - 1, 0]) if one else None
            score = of_window[one, 0] + of_window[other, 1]
            share = shares[one, 0] * shares[other, 1]
            spans[window.row].append((score, share, begin))
    for span, of_row in zip(task.row_outputs(split, features.windows, scores), spans, strict=True):
        nothing = min(span for span in of_row if span[2] is None)
        expected = max([nothing, *(span for span in of_row if span[2] is not None)])
        assert (span.score, span.probability, span.begin) == pytest.approx(expected, abs=1e-5)


def test_the_threshold_decides_whether_there_is_no_answer(tmp_path, tokenizer):
    rows = [*answer_rows(3, 0), *answer_rows(2, 1, unanswerable=1.0)]
    path = write_table(tmp_path / "rows.jsonl", rows)
    scores = np.zeros((len(rows), 64, 2), dtype=np.float32)
    for threshold, says_nothing in ((0.0, True), (4.0, False), (-2.0, True)):
        task, split, features = made(path, "answers", tokenizer, 64, null_score_diff_threshold=threshold)
        scores[:, 0, 0] = 4  # no answer
        scores[:, features.windows[0].positions[0], 0] = 1  # the best span
        spans = task.row_outputs(split, features.windows, scores)
        assert all((span.text == "") == says_nothing for span in spans)
    # Without such questions in the training rows, there is always an answer.
    task, split, features = made(write_table(tmp_path / "other.jsonl", rows[:3]), "answers", tokenizer, 64)
    assert all(span.text for span in task.row_outputs(split, features.windows, scores[:3]))


# ---------------------------------------------------------------------------------------------------------------------
# Multiple choice


def test_swags_columns_and_the_general_ones_give_the_same_pairs(tmp_path, tokenizer):
    rows = choice_rows(8, 0)
    general = [{**row, "question": "then"} for row in rows]
    named = [  # the choices as CommonsenseQA and ARC name them
        {
            "question": "then",
            "context": row["context"],
            "choices": {"text": row["choices"], "label": ["1", "2", "3"]},
            "answerKey": str(row["label"] + 1),
        }
        for row in rows
    ]
    letters = [{**row, "label": "ABC"[row["label"]]} for row in general]
    for content in (general, swag_rows(rows), letters, named):
        task, _, features = made(write_table(tmp_path / "rows.jsonl", content), "multiple_choice", tokenizer, 48)
        for row, inputs in zip(rows, features.inputs, strict=True):
            assert inputs["labels"] == row["label"]
            assert inputs["input_ids"] == [
                tokenizer(row["context"], f"then {choice}")["input_ids"] for choice in row["choices"]
            ]
    batch = task.collator(tokenizer)(features.inputs)
    assert batch["input_ids"].shape[:2] == (8, 3) and batch["labels"].tolist() == [row["label"] for row in rows]
    assert (batch["input_ids"][batch["attention_mask"] == 0] == tokenizer.pad_token_id).all()
