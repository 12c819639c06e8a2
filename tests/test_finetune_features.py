"""Features and predictions of token classification, question answering and multiple choice."""

import itertools
import json

import numpy as np
import pytest
from finetuning import load, write_csv
from small_tasks import answer_rows, choice_rows, squad_json, swag_rows, tag_rows, write_rows
from transformers import AutoTokenizer


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer(trained):
    return AutoTokenizer.from_pretrained(trained)


def made(path, task, tokenizer, length, **options):
    """The task, and the training rows with their features."""
    task, splits = load(path, task, **options)
    task.features(splits["train"], tokenizer, length)
    return task, splits["train"]


def test_squads_nested_json_is_the_flat_form(tmp_path):
    rows = answer_rows(20, 0, unanswerable=0.5)
    labels = [list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)) for row in rows]
    for name, content in (("nested", squad_json(rows)), ("list", rows), ("data", {"data": rows})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    write_rows(tmp_path / "flat.jsonl", rows)
    write_csv(tmp_path / "flat.csv", [{**row, "answers": json.dumps(row["answers"])} for row in rows])
    for row in rows:  # as pandas writes whole numbers beside missing ones
        row["answers"]["answer_start"] = list(map(float, row["answers"]["answer_start"]))
    write_rows(tmp_path / "floats.jsonl", rows)
    for name in ("nested.json", "list.json", "data.json", "flat.jsonl", "flat.csv", "floats.jsonl"):
        _, splits = load(tmp_path / name, "question-answering")
        assert [(row.cells["id"], row.texts, row.label) for row in splits["train"].rows] == [
            (row["id"], (row["question"], row["context"]), label) for row, label in zip(rows, labels, strict=True)
        ]


# ---------------------------------------------------------------------------------------------------------------------
# Tags


def test_the_first_piece_of_a_word_has_the_label_and_every_word_is_in_one_window(tmp_path, tokenizer):
    tags = [tag for row in tag_rows(9, 1) for tag in row["ner_tags"]]
    # A word of several pieces, also where a window ends.
    rows = [*tag_rows(5, 0), {"tokens": ["gardenwalkers"] * len(tags), "ner_tags": tags}]
    task, split = made(write_rows(tmp_path / "rows.jsonl", rows), "tags", tokenizer, 33)
    sources = [source for source, *_ in split.windows]
    assert sources.count(5) > 2 and "1 (16.7%) are longer than 33 tokens" in split.note
    found = [[] for _ in rows]
    for source, row in zip(sources, split.features, strict=True):
        assert len(row["input_ids"]) == len(row["labels"]) <= 33
        tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
        assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and (source < 5 or -100 in row["labels"][1:-1])
        for token, label in zip(tokens, row["labels"], strict=True):
            # The tokens that begin no word have no label, all others have one.
            assert (label == -100) == (token in ("[CLS]", "[SEP]") or token.startswith("##"))
            if label != -100:
                found[source].append(task.classes[label])
    assert found == [row["ner_tags"] for row in rows]
    # Scores that say the labels give the labels back; padded by -100 as Trainer does.
    logits = np.full((len(split.features), 40, len(task.classes)), -100.0)
    for scores, row in zip(logits, split.features, strict=True):
        scores[: len(row["labels"])] = np.eye(len(task.classes))[np.maximum(row["labels"], 0)]
    assert task.predictions(split, logits)["prediction"] == [row["ner_tags"] for row in rows]
    assert task.metrics(split, logits)["f1"] == 1


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
    return made(write_rows(tmp_path / "rows.jsonl", rows), "answers", tokenizer, 32, doc_stride=8, max_answer_length=5)


def test_the_windows_of_a_context_overlap_and_carry_the_answer(long_answers, tokenizer):
    _, split = long_answers
    assert len(split.features) > 45 and "contexts are longer than 32 tokens" in split.note
    with_answer = set()
    for number, (_, _, (_, context), gold) in enumerate(split.rows):
        mine = [feature for feature in zip(split.windows, split.features, strict=True) if feature[0].source == number]
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


def test_the_best_span_is_that_of_trying_all_spans(long_answers):
    task, split = long_answers
    scores = np.random.default_rng(0).normal(size=(len(split.features), 40, 2)).astype(np.float32)
    spans = [[] for _ in split.rows]
    for window, of_window in zip(split.windows, scores, strict=True):
        of_window = of_window[[0, *window.positions]].astype(float)
        shares, count = np.exp(of_window) / np.exp(of_window).sum(0), len(of_window)
        for one, other in [(0, 0), *((a, b) for a in range(1, count) for b in range(a, min(a + 5, count)))]:
            begin = int(window.places[one - 1, 0]) if one else None
            score, share = of_window[one, 0] + of_window[other, 1], shares[one, 0] * shares[other, 1]
            spans[window.source].append((score, share, begin))
    for span, of_row in zip(task.spans(split, scores), spans, strict=True):
        nothing = min(span for span in of_row if span[2] is None)
        expected = max([nothing, *(span for span in of_row if span[2] is not None)])
        assert (span.score, span.probability, span.begin) == pytest.approx(expected, abs=1e-5)


def test_the_threshold_decides_whether_there_is_no_answer(tmp_path, tokenizer):
    rows = [*answer_rows(3, 0), *answer_rows(2, 1, unanswerable=1.0)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    scores = np.zeros((len(rows), 64, 2), dtype=np.float32)
    for threshold, says_nothing in ((0.0, True), (4.0, False), (-2.0, True)):
        task, split = made(path, "answers", tokenizer, 64, null_score_diff_threshold=threshold)
        scores[:, 0, 0], scores[:, split.windows[0].positions[0], 0] = 4, 1  # no answer: 4; the best span: 1
        assert all((text == "") == says_nothing for text in task.predictions(split, scores)["prediction"])
    # Without such questions in the training rows, there is always an answer.
    task, split = made(write_rows(tmp_path / "other.jsonl", rows[:3]), "answers", tokenizer, 64)
    assert all(task.predictions(split, scores[:3])["prediction"])


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
        task, split = made(write_rows(tmp_path / "rows.jsonl", content), "multiple_choice", tokenizer, 48)
        for row, features in zip(rows, split.features, strict=True):
            assert features["labels"] == row["label"]
            assert features["input_ids"] == [
                tokenizer(row["context"], f"then {choice}")["input_ids"] for choice in row["choices"]
            ]
    batch = task.collator(tokenizer)(split.features)
    assert batch["input_ids"].shape[:2] == (8, 3) and batch["labels"].tolist() == [row["label"] for row in rows]
    assert (batch["input_ids"][batch["attention_mask"] == 0] == tokenizer.pad_token_id).all()
