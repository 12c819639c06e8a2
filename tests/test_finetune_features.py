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


@pytest.mark.parametrize("task, rows", [("answers", answer_rows(40, 0)), ("tags", tag_rows(40, 0))])
def test_rows_that_are_held_out_have_features_of_their_own(task, rows, tmp_path, tokenizer):
    task, splits = load(write_rows(tmp_path / "rows.jsonl", rows), task, validation_share=0.5)
    for split in splits.values():
        task.features(split, tokenizer, 64)
        assert [window[0] for window in split.windows] == list(range(len(split.examples)))
        assert len(split.features) == len(split.windows)


def test_squads_nested_json_is_the_flat_form(tmp_path):
    rows = answer_rows(20, 0, unanswerable=0.5)
    floats = [{**row, "answers": {**row["answers"]}} for row in rows]
    for row in floats:  # as pandas writes whole numbers beside missing ones
        row["answers"]["answer_start"] = list(map(float, row["answers"]["answer_start"]))
    write_rows(tmp_path / "floats.jsonl", floats)
    for name, content in (("nested", squad_json(rows)), ("list", rows), ("data", {"data": rows})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    write_csv(tmp_path / "flat.csv", [{**row, "answers": json.dumps(row["answers"])} for row in rows])
    _, flat = load(write_rows(tmp_path / "flat.jsonl", rows), "question-answering")
    labels = [list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)) for row in rows]
    assert flat["train"].examples == [
        ((row["question"], row["context"]), label) for row, label in zip(rows, labels, strict=True)
    ]
    for name in ("nested.json", "list.json", "data.json", "flat.csv", "floats.jsonl"):
        _, splits = load(tmp_path / name, "question-answering")
        assert splits["train"].examples == flat["train"].examples
        assert [cells["id"] for cells in splits["train"].cells] == [row["id"] for row in rows]


# ---------------------------------------------------------------------------------------------------------------------
# Tags


def test_the_first_piece_of_a_word_has_the_label_and_every_word_is_in_one_window(tmp_path, tokenizer):
    long = {"tokens": [row for rows in tag_rows(9, 1) for row in rows["tokens"]]}
    long["ner_tags"] = [tag for rows in tag_rows(9, 1) for tag in rows["ner_tags"]]
    rows = [*tag_rows(5, 0), long]
    rows[0]["tokens"][0] = "Xylophonists"  # a word of several pieces
    task, split = made(write_rows(tmp_path / "rows.jsonl", rows), "tags", tokenizer, 32)
    sources = [source for source, *_ in split.windows]
    assert sources.count(5) > 2 and "1 (16.7%) are longer than 32 tokens" in split.note
    found = [[] for _ in rows]
    for source, row in zip(sources, split.features, strict=True):
        assert len(row["input_ids"]) == len(row["labels"]) <= 32
        tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
        assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]"
        for token, label in zip(tokens, row["labels"], strict=True):
            # The tokens that begin no word have no label, all others have one.
            assert (label == -100) == (token in ("[CLS]", "[SEP]") or token.startswith("##"))
            if label != -100:
                found[source].append(task.classes[label])
    assert found == [row["ner_tags"] for row in rows]
    # Scores that say the labels give the labels back; padded by -100 as Trainer does.
    logits = np.full((len(split.features), 40, len(task.classes)), -100.0)
    for number, row in enumerate(split.features):
        for place, label in enumerate(row["labels"]):
            logits[number, place] = np.arange(len(task.classes)) == max(label, 0)
    assert task.predictions(split, logits)["prediction"] == [row["ner_tags"] for row in rows]
    assert task.metrics(split, logits)["f1"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# Answers


@pytest.fixture
def long_answers(tmp_path, tokenizer):
    """Rows whose contexts are of several windows of 32 tokens."""
    rows = answer_rows(30, 3, unanswerable=0.2)
    for number, row in enumerate(rows):
        before = " ".join(answer_rows(1, seed)[0]["context"] for seed in range(number % 4))
        row["context"] = f"{before} {row['context']} {before}" if before else row["context"]
        row["answers"]["answer_start"] = [
            start + len(before) + bool(before) for start in row["answers"]["answer_start"]
        ]
    return made(write_rows(tmp_path / "rows.jsonl", rows), "answers", tokenizer, 32, doc_stride=8, max_answer_length=5)


def test_the_windows_of_a_context_overlap_and_carry_the_answer(long_answers, tokenizer):
    _, split = long_answers
    assert len(split.features) > 45 and "contexts are longer than 32 tokens" in split.note
    with_answer = set()
    for number, ((_, context), gold) in enumerate(split.examples):
        mine = [feature for feature in zip(split.windows, split.features, strict=True) if feature[0].source == number]
        pieces = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        seen = [list(zip(window.begins, window.ends, strict=True)) for window, _ in mine]
        assert set(itertools.chain(*seen)) == set(pieces)  # each token is in a window
        for one, other in itertools.pairwise(seen):
            assert one[-8:] == other[:8]  # the stride
        for window, arguments in mine:
            assert len(arguments["input_ids"]) <= 32
            start, end = arguments["start_positions"], arguments["end_positions"]
            if start == 0:  # [CLS]: the answer is not in this window as a whole
                assert end == 0
                assert not gold or not (
                    window.begins[0] <= gold[0][1] < gold[0][1] + len(gold[0][0]) <= window.ends[-1]
                )
                continue
            with_answer.add(number)
            said = context[window.begins[start - window.first] : window.ends[end - window.first]]
            assert said == gold[0][0]
    assert with_answer == {number for number, example in enumerate(split.examples) if example.label}


def test_the_best_span_is_that_of_trying_all_spans(long_answers):
    task, split = long_answers
    rng = np.random.default_rng(0)
    starts, ends = rng.normal(size=(2, len(split.features), 40)).astype(np.float32)
    said = task.spans(split, (starts, ends))
    for row, span in enumerate(said):
        spans = []
        for number, window in enumerate(split.windows):
            if window.source != row:
                continue
            count = len(window.begins)
            tokens = [0, *range(window.first, window.first + count)]
            places = [(0, 0), *((a + 1, b + 1) for a in range(count) for b in range(a, min(a + 5, count)))]
            shares = [np.exp(side[number, tokens].astype(float)) for side in (starts, ends)]
            shares = [side / side.sum() for side in shares]
            for one, other in places:
                score = float(starts[number, tokens[one]]) + float(ends[number, tokens[other]])
                begin = None if one == 0 else int(window.begins[one - 1])
                spans.append((score, shares[0][one] * shares[1][other], begin))
        nothing = min(span for span in spans if span[2] is None)
        expected = max([nothing, *(span for span in spans if span[2] is not None)])
        assert (span.score, span.probability, span.begin) == pytest.approx(expected, abs=1e-5)


def test_the_threshold_decides_whether_there_is_no_answer(tmp_path, tokenizer):
    rows = [*answer_rows(3, 0), *answer_rows(2, 1, unanswerable=1.0)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    starts, ends = np.zeros((2, len(rows), 64), dtype=np.float32)
    for threshold, says_nothing in ((0.0, True), (4.0, False), (-2.0, True)):
        task, split = made(path, "answers", tokenizer, 64, null_score_diff_threshold=threshold)
        starts[:, 0], starts[:, split.windows[0].first] = 4, 1  # no answer: 4; the best span: 1
        assert all((text == "") == says_nothing for text in task.predictions(split, (starts, ends))["prediction"])
    # Without such questions in the training rows, there is always an answer.
    task, split = made(write_rows(tmp_path / "other.jsonl", rows[:3]), "answers", tokenizer, 64)
    assert all(task.predictions(split, (starts[:3], ends[:3]))["prediction"])


# ---------------------------------------------------------------------------------------------------------------------
# Multiple choice


def test_swags_columns_and_the_general_ones_give_the_same_pairs(tmp_path, tokenizer):
    rows = choice_rows(8, 0)
    general = [{**row, "question": "then"} for row in rows]
    files = {"swag.jsonl": swag_rows(rows), "general.jsonl": general}
    letters = [{**row, "label": "ABC"[row["label"]]} for row in general]
    files["letters.jsonl"] = letters
    files["named.jsonl"] = [  # the choices as CommonsenseQA and ARC name them
        {
            "question": "then",
            "context": row["context"],
            "choices": {"text": row["choices"], "label": ["1", "2", "3"]},
            "answerKey": str(row["label"] + 1),
        }
        for row in rows
    ]
    found = []
    for name, content in files.items():
        task, split = made(write_rows(tmp_path / name, content), "multiple_choice", tokenizer, 48)
        found.append(split.features)
    assert all(features == found[0] for features in found)
    for row, features in zip(rows, found[0], strict=True):
        assert features["labels"] == row["label"]
        for choice, ids in zip(row["choices"], features["input_ids"], strict=True):
            assert ids == tokenizer(row["context"], f"then {choice}")["input_ids"]
    batch = task.collator(tokenizer)(found[0])
    assert batch["input_ids"].shape[:2] == (8, 3) and batch["labels"].tolist() == [row["label"] for row in rows]
    pads = batch["attention_mask"] == 0
    assert (batch["input_ids"][pads] == tokenizer.pad_token_id).all()
