"""Tags, answers and multiple choice of `d2l-bert finetune`: features and predictions."""

import csv
import itertools
import json

import numpy as np
import pytest
from finetuning import load
from small_tasks import answer_rows, choice_rows, squad_json, swag_rows, tag_rows, write_rows
from transformers import AutoTokenizer

from d2l_bert.training.finetuning.tables import read_file


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer(trained):
    return AutoTokenizer.from_pretrained(trained)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_a_whole_number_as_a_float_is_the_place_of_an_answer(tmp_path):
    rows = answer_rows(20, 0, unanswerable=0.5)
    write_rows(tmp_path / "whole.jsonl", rows)
    for row in rows:
        row["answers"]["answer_start"] = list(map(float, row["answers"]["answer_start"]))
    write_rows(tmp_path / "floats.jsonl", rows)
    whole, floats = (load(tmp_path / name, "answers")[1] for name in ("whole.jsonl", "floats.jsonl"))
    assert [row.label for row in floats.train.rows] == [row.label for row in whole.train.rows]


def test_squads_nested_json_is_the_flat_form(tmp_path):
    rows = answer_rows(20, 0, unanswerable=0.5)
    flat = read_file(str(write_rows(tmp_path / "flat.jsonl", rows)), "train_file")
    (tmp_path / "nested.json").write_text(json.dumps(squad_json(rows)))
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "data.json").write_text(json.dumps({"data": rows}))
    nested = read_file(str(tmp_path / "nested.json"), "train_file")
    for name in ("id", "context", "question"):
        assert nested.columns[name] == flat.columns[name]
    assert nested.place(3) == "train_file nested.json, row 4"
    for name in ("list.json", "data.json"):
        assert read_file(str(tmp_path / name), "train_file").columns == flat.columns
    answers = [load(tmp_path / name, "answers") for name in ("flat.jsonl", "nested.json")]
    of_flat, of_nested = ([row.label for row in data.train.rows] for _, data in answers)
    assert (
        of_flat
        == of_nested
        == [list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)) for row in rows]
    )
    with (tmp_path / "flat.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({**row, "answers": json.dumps(row["answers"])} for row in rows)
    _, data = load(tmp_path / "flat.csv", "answers")
    assert [row.label for row in data.train.rows] == of_flat


# ---------------------------------------------------------------------------------------------------------------------
# Tags


def test_the_first_piece_of_a_word_has_the_label_and_every_word_is_in_one_window(tmp_path, tokenizer):
    long = {"tokens": [row for rows in tag_rows(9, 1) for row in rows["tokens"]]}
    long["ner_tags"] = [tag for rows in tag_rows(9, 1) for tag in rows["ner_tags"]]
    rows = [*tag_rows(5, 0), long]
    rows[0]["tokens"][0] = "Xylophonists"  # a word of several pieces
    kind, data = load(write_rows(tmp_path / "rows.jsonl", rows), "tags")
    features = kind.features(data.train, tokenizer, 32)
    assert features.sources.count(5) > 2 and "1 (16.7%) are longer than 32 tokens" in features.note
    found = [[] for _ in rows]
    for source, row in zip(features.sources, features.rows, strict=True):
        assert len(row["input_ids"]) == len(row["labels"]) <= 32
        tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
        assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]"
        for token, label in zip(tokens, row["labels"], strict=True):
            # The tokens that begin no word have no label, all others have one.
            assert (label == -100) == (token in ("[CLS]", "[SEP]") or token.startswith("##"))
            if label != -100:
                found[source].append(kind.classes[label])
    assert found == [row["ner_tags"] for row in rows]
    # Scores that say the labels give the labels back; padded by -100 as Trainer does.
    logits = np.full((len(features.rows), 40, len(kind.classes)), -100.0)
    for number, row in enumerate(features.rows):
        for place, label in enumerate(row["labels"]):
            logits[number, place] = np.arange(len(kind.classes)) == max(label, 0)
    assert kind.predicted_tags(data.train, features, logits) == [row["ner_tags"] for row in rows]
    assert kind.metrics(data.train, features, logits)["f1"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# Answers


@pytest.fixture
def long_answers(tmp_path):
    """Rows whose contexts are of several windows of 32 tokens."""
    rows = answer_rows(30, 3, unanswerable=0.2)
    for number, row in enumerate(rows):
        before = " ".join(answer_rows(1, seed)[0]["context"] for seed in range(number % 4))
        row["context"] = f"{before} {row['context']} {before}" if before else row["context"]
        row["answers"]["answer_start"] = [
            start + len(before) + bool(before) for start in row["answers"]["answer_start"]
        ]
    return load(write_rows(tmp_path / "rows.jsonl", rows), "answers", doc_stride=8)


def test_the_windows_of_a_context_overlap_and_carry_the_answer(long_answers, tokenizer):
    kind, data = long_answers
    features = kind.features(data.train, tokenizer, 32)
    assert len(features.rows) > 45 and "contexts are longer than 32 tokens" in features.note
    with_answer = set()
    for row in range(len(data.train)):
        (_, context), gold = data.train.rows[row].texts, data.train.rows[row].label
        mine = [number for number, source in enumerate(features.sources) if source == row]
        pieces = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        seen = [list(zip(features.details[n].begins, features.details[n].ends, strict=True)) for n in mine]
        assert set(itertools.chain(*seen)) == set(pieces)  # each token is in a window
        for one, other in itertools.pairwise(seen):
            assert one[-8:] == other[:8]  # the stride
        for number in mine:
            arguments, window = features.rows[number], features.details[number]
            assert len(arguments["input_ids"]) <= 32
            start, end = arguments["start_positions"], arguments["end_positions"]
            if start == 0:  # [CLS]: the answer is not in this window as a whole
                assert end == 0
                assert not gold or not (
                    window.begins[0] <= gold[0][1] < gold[0][1] + len(gold[0][0]) <= window.ends[-1]
                )
                continue
            with_answer.add(row)
            said = context[window.begins[start - window.first] : window.ends[end - window.first]]
            assert said == gold[0][0]
    assert with_answer == {row for row in range(len(data.train)) if data.train.rows[row].label}


def test_the_best_span_is_that_of_trying_all_spans(long_answers, tokenizer):
    kind, data = long_answers
    kind.config.max_answer_length, kind.config.n_best_size = 5, 4
    features = kind.features(data.train, tokenizer, 32)
    rng = np.random.default_rng(0)
    starts, ends = rng.normal(size=(2, len(features.rows), 40)).astype(np.float32)
    said = kind.best_spans(data.train, features, (starts, ends))
    for row in range(len(data.train)):
        spans, nothing = {}, []
        for number, source in enumerate(features.sources):
            if source != row:
                continue
            window = features.details[number]
            nothing.append(float(starts[number, 0]) + float(ends[number, 0]))
            for one in range(len(window.begins)):
                for other in range(one, min(one + 5, len(window.begins))):
                    place = int(window.begins[one]), int(window.ends[other])
                    score = float(starts[number, window.first + one]) + float(ends[number, window.first + other])
                    spans[place] = max(score, spans.get(place, -np.inf))
        best = sorted(spans.items(), key=lambda span: -span[1])
        expected = [(min(nothing), None)] + [(score, place[0]) for place, score in best]
        expected.sort(key=lambda span: -span[0])
        assert [span.score for span in said[row]] == pytest.approx([score for score, _ in expected[:4]], abs=1e-5)
        assert [span.begin for span in said[row]] == [begin for _, begin in expected[:4]]


def test_the_threshold_decides_whether_there_is_no_answer(tmp_path, tokenizer):
    rows = [*answer_rows(3, 0), *answer_rows(2, 1, unanswerable=1.0)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    for threshold, says_nothing in ((0.0, True), (4.0, False), (-2.0, True)):
        kind, data = load(path, "answers", null_score_diff_threshold=threshold)
        features = kind.features(data.train, tokenizer, 64)
        starts, ends = np.zeros((2, len(rows), 64), dtype=np.float32)
        starts[:, 0], starts[:, features.details[0].first] = 4, 1  # no answer: 4; the best span: 1
        texts = kind.predicted_texts(data.train, features, (starts, ends))
        assert all((text == "") == says_nothing for text in texts)
    # Without such questions in the training rows, there is always an answer.
    kind, data = load(write_rows(tmp_path / "other.jsonl", rows[:3]), "answers")
    features = kind.features(data.train, tokenizer, 64)
    assert all(kind.predicted_texts(data.train, features, (starts[:3], ends[:3])))


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
    made = []
    for name, content in files.items():
        kind, data = load(write_rows(tmp_path / name, content), "multiple_choice")
        made.append(kind.features(data.train, tokenizer, 48).rows)
    assert all(found == made[0] for found in made)
    for row, features in zip(rows, made[0], strict=True):
        assert features["labels"] == row["label"]
        for choice, ids in zip(row["choices"], features["input_ids"], strict=True):
            assert ids == tokenizer(row["context"], f"then {choice}")["input_ids"]
    batch = kind.collator(tokenizer)(made[0])
    assert batch["input_ids"].shape[:2] == (8, 3) and batch["labels"].tolist() == [row["label"] for row in rows]
    pads = batch["attention_mask"] == 0
    assert (batch["input_ids"][pads] == tokenizer.pad_token_id).all()
