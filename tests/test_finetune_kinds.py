"""Tags, answers and multiple choice of `d2l-bert finetune`: features, predictions, and tasks that a model learns."""

import csv
import itertools
import json

import datasets
import numpy as np
import pytest
import torch
import transformers
from finetuning import load
from small_tasks import answer_rows, choice_rows, make_base, squad_json, swag_rows, tag_rows, write_rows
from transformers import AutoTokenizer, pipeline
from transformers.pipelines import SUPPORTED_TASKS

from d2l_bert.cli import main
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.data import load_data
from d2l_bert.training.finetuning.kind import Features
from d2l_bert.training.finetuning.run import CLASSES
from d2l_bert.training.finetuning.tables import read_dataset, read_file


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer(trained):
    return AutoTokenizer.from_pretrained(trained)


# ---------------------------------------------------------------------------------------------------------------------
# Files


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


def test_tags_in_all_their_files_are_the_same(tmp_path):
    rows = tag_rows(12, 0)
    text = "\n\n".join("\n".join(f"{w} X {t}" for w, t in zip(*row.values(), strict=True)) for row in rows)
    (tmp_path / "rows.conll").write_text(f"-DOCSTART- X O\n\n{text}\n")
    write_rows(tmp_path / "rows.jsonl", rows)
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["words", "tags"])
        writer.writerows([" ".join(row["tokens"]), " ".join(row["ner_tags"])] for row in rows)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    for name in ("rows.conll", "rows.jsonl", "rows.csv", "rows.parquet"):
        kind, data = load(tmp_path / name, "tags")
        assert kind.texts(data.train) == [tuple(row["tokens"]) for row in rows]
        assert [row.label for row in data.train.rows] == [row["ner_tags"] for row in rows]
    table = read_file(str(tmp_path / "rows.conll"), "train_file")
    assert table.place(1) == "train_file rows.conll, row 2"


def test_a_dataset_gives_the_names_of_its_tags_and_loses_empty_rows(tmp_path):
    names = ["O", "B-PER", "I-PER", "B-LOC"]
    features = datasets.Features(
        tokens=datasets.List(datasets.Value("string")), ner_tags=datasets.List(datasets.ClassLabel(names=names))
    )
    rows = {"tokens": [["Ada", "left"], [], ["It", "left"]], "ner_tags": [[1, 0], [], [0, 0]]}
    train = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": train, "test": train, "more": train}).save_to_disk(tmp_path / "saved")
    splits = read_dataset(str(tmp_path / "saved"), {"train", "validation"})
    assert len(splits.pop("train")) == 3 and splits == {"test": None, "more": None}  # the splits that are not wanted
    config = FinetuneConfig(model="m", task="tags", dataset=str(tmp_path / "saved"), validation_share=0.0)
    kind = CLASSES[config.kind](config)
    data = load_data(config, kind)
    assert kind.classes == ["O", "B-PER"]  # in the order of the dataset, those that the training rows have
    assert [row.label for row in data.train.rows] == [["B-PER", "O"], ["O", "O"]]


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


def test_a_word_without_pieces_gets_the_tag_of_no_entity(tmp_path, tokenizer):
    rows = [{"tokens": ["anna", "\u0000\u0007", "left"], "ner_tags": ["B-PER", "O", "O"]}, *tag_rows(2, 0)]
    kind, data = load(write_rows(tmp_path / "rows.jsonl", rows), "tags")
    features = kind.features(data.train, tokenizer, 32)
    assert features.details[0][1].tolist() == [0, 2]
    logits = np.zeros((len(features.rows), 32, len(kind.classes)))
    logits[..., kind.number_of["B-PER"]] = 1
    assert kind.predicted_tags(data.train, features, logits)[0] == ["B-PER", "O", "B-PER"]


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


def test_a_long_question_is_truncated_and_counted(tmp_path, tokenizer):
    rows = answer_rows(3, 0)
    rows[1]["question"] = "who " * 50 + "was there?"
    kind, data = load(write_rows(tmp_path / "rows.jsonl", rows), "answers")
    features = kind.features(data.train, tokenizer, 32)
    assert "1 questions are truncated to 14 tokens" in features.note
    assert max(len(row["input_ids"]) for row in features.rows) <= 32
    assert {features.sources[n] for n, row in enumerate(features.rows) if row["start_positions"] > 0} == {0, 1, 2}


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


def test_truncated_rows_of_choices_are_counted(tmp_path, tokenizer):
    rows = choice_rows(4, 0)
    rows[2]["choices"][1] = "the drum " * 40
    kind, data = load(write_rows(tmp_path / "rows.jsonl", rows), "multiple_choice")
    features = kind.features(data.train, tokenizer, 48)
    assert features.note.startswith("1 are truncated to")
    assert max(len(ids) for row in features.rows for ids in row["input_ids"]) == 48


def test_predicted_choices_and_accuracy(tmp_path):
    rows = choice_rows(3, 0)
    kind, data = load(write_rows(tmp_path / "rows.jsonl", rows), "multiple_choice")
    logits = np.zeros((3, 3))
    for number, row in enumerate(rows):
        logits[number, row["label"] if number < 2 else (row["label"] + 1) % 3] = np.log(2)
    assert kind.metrics(data.train, Features([]), logits) == {"accuracy": pytest.approx(2 / 3)}
    columns = kind.predicted_columns(data.train, Features([]), logits)
    assert columns["predicted_choice"][:2] == [row["choices"][row["label"]] for row in rows[:2]]
    assert columns[f"probability of {rows[0]['label']}"][0] == pytest.approx(0.5)


# ---------------------------------------------------------------------------------------------------------------------
# From rows to a finished folder


def run(tmp_path, base, task, rows, *options, test_rows=None):
    """Fine-tune on rows; returns the output folder, its metrics and its predictions."""
    splits = {"train": rows(500, 0), "validation": rows(60, 1), "test": test_rows or rows(60, 2)}
    files = [f"--{split}_file={write_rows(tmp_path / f'{split}.jsonl', made)}" for split, made in splits.items()]
    output = tmp_path / "out"
    assert main(["finetune", str(base), f"--task={task}", f"--output_dir={output}", *files, *options]) == 0
    with (output / "predictions.csv").open(newline="") as file:
        return output, json.loads((output / "metrics.json").read_text()), list(csv.DictReader(file))


LEARN = ["--learning_rate=2e-3", "--num_train_epochs=8", "--license=mit"]
LEARN += ["--hidden_dropout_prob=0", "--attention_probs_dropout_prob=0"]


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer):
    torch.manual_seed(0)
    return make_base(tmp_path_factory.mktemp("base"), tokenizer)


@pytest.mark.slow
def test_tags_are_learnt_and_served_by_the_pipeline(tmp_path, base):
    output, metrics, predictions = run(tmp_path, base, "tags", tag_rows, *LEARN, "--max_seq_length=48")
    assert metrics["test_f1"] >= 0.95 and metrics["test_strict_f1"] >= 0.95
    right = [json.loads(row["prediction"]) == json.loads(row["ner_tags"]) for row in predictions]
    assert sum(right) >= 0.9 * 60
    predict = pipeline("token-classification", model=str(output), aggregation_strategy="first")
    found = [
        (entity["entity_group"], entity["word"]) for entity in predict("anna walked to the old tower with a drum")
    ]
    assert found == [("PER", "anna"), ("LOC", "old tower"), ("OBJ", "drum")]
    assert (output / "f1_by_entity.png").exists()


@pytest.mark.slow
def test_answers_are_learnt_over_windows_with_questions_that_have_none(tmp_path, base):
    def rows(count, seed):
        return answer_rows(count, seed, unanswerable=0.2)

    options = [*LEARN, "--max_seq_length=24", "--doc_stride=8", "--num_train_epochs=16"]
    output, metrics, predictions = run(tmp_path, base, "answers", rows, *options)
    assert metrics["test_f1"] >= 0.95 and metrics["test_exact_match"] >= 0.95
    exact = [(json.loads(row["answers"])["text"] or [""])[0] == row["prediction"] for row in predictions]
    assert sum(exact) / 60 == pytest.approx(metrics["test_exact_match"])
    assert "question-answering" not in SUPPORTED_TASKS  # if it comes back, the folder should be tried with it
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(output)
    assert type(model).__name__ == "D2lBertForQuestionAnswering"
    assert (
        run_card_code(
            output, 'question, context = "where was there?", "then the anna, the tower, the drum and nobody"'
        )
        == "tower"
    )
    question = 'question, context = "where was there?", "then the anna, the drum and nobody"'
    assert run_card_code(output, question) == "no answer"


@pytest.mark.slow
def test_choices_are_learnt(tmp_path, base):
    unlabelled = [{name: value for name, value in row.items() if name != "label"} for row in choice_rows(60, 2)]
    output, metrics, predictions = run(tmp_path, base, "multiple_choice", choice_rows, *LEARN, test_rows=unlabelled)
    assert metrics["validation_accuracy"] >= 0.95 and "test_accuracy" not in metrics
    right = [
        int(row["prediction"]) == true["label"] for row, true in zip(predictions, choice_rows(60, 2), strict=True)
    ]
    assert sum(right) >= 0.95 * 60
    assert "multiple-choice" not in SUPPORTED_TASKS
    model = transformers.AutoModelForMultipleChoice.from_pretrained(output)
    assert type(model).__name__ == "D2lBertForMultipleChoice"
    data = 'context, choices = "where was there?", ["the anna", "the tower", "the drum"]'
    assert run_card_code(output, data) == "the tower"


def run_card_code(output, data):
    """Run the first code of a card, in the folder beside the model, with other data; returns what it prints."""
    import contextlib
    import io
    import re

    code = (output / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    code = re.sub(r"^(question|context), .*$", data, code, flags=re.MULTILINE)
    printed = io.StringIO()
    with contextlib.chdir(output.parent), contextlib.redirect_stdout(printed):
        exec(code, {})
    return printed.getvalue().strip()


@pytest.mark.parametrize("task", ["tags", "answers", "multiple_choice"])
def test_a_short_run_leaves_a_folder_that_can_be_published(task, trained, tmp_path, capsys):
    rows = {"tags": tag_rows, "answers": lambda n, s: answer_rows(n, s, 0.3), "multiple_choice": choice_rows}[task]
    options = ["--max_steps=2", "--max_seq_length=48", "--license=mit", "--per_device_train_batch_size=8"]
    output, metrics, predictions = run(tmp_path, trained, task, lambda n, s: rows(min(n, 24), s), *options)
    assert len(predictions) == 24 and all("prediction" in row for row in predictions)
    for picture in metrics["pictures"]:
        assert (output / picture).stat().st_size > 5000
    capsys.readouterr()
    assert main(["publish", str(output), "me/x", "--dry_run"]) == 0
    assert "stays here: predictions.csv" in capsys.readouterr().out
