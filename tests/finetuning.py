"""Small tables to fine-tune on, in the language of the fixture `books`, and runs of `d2l-bert finetune`."""

import csv
import json
import random

import datasets
import pytest
from promises.driving import PEOPLE, PLACES, THINGS
from text_sources import write_table

from d2l_bert.__main__ import main


WORDS = {"who": PEOPLE, "where": PLACES, "what": THINGS}


def tag_rows(count, seed):
    """Sentences with BIO tags: a person, a place of one or two words, and a thing."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        who, where, what = (rng.choice(words) for words in WORDS.values())
        place = [where]
        tags_of_place = ["B-LOC"]
        if rng.randrange(2) == 0:
            place = ["old", where]
            tags_of_place = ["B-LOC", "I-LOC"]
        tokens = [who, "walked", "to", "the", *place, "with", "a", what]
        tags = ["B-PER", "O", "O", "O", *tags_of_place, "O", "O", "B-OBJ"]
        rows.append({"tokens": tokens, "ner_tags": tags})
    return rows


def answer_rows(count, seed, unanswerable=0.0):
    """Questions who, where and what about a sentence; some ask for what the sentence does not say."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        asked = rng.choice(list(WORDS))
        is_said = rng.random() >= unanswerable
        said = {}
        for kind in rng.sample(list(WORDS), 3):
            if is_said or kind != asked:
                said[kind] = rng.choice(WORDS[kind])
        things = ", ".join(f"the {word}" for word in said.values())
        context = f"then {things} and nobody"
        found = [said[asked]] if is_said else []
        answers = {"text": found, "answer_start": [context.index(word) for word in found]}
        rows.append({"id": str(number), "context": context, "question": f"{asked} was there?", "answers": answers})
    return rows


def choice_rows(count, seed):
    """A question who, where or what, with a person, a place and a thing to choose from."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        asked = rng.choice(list(WORDS))
        kinds = rng.sample(list(WORDS), 3)
        choices = [f"the {rng.choice(WORDS[kind])}" for kind in kinds]
        rows.append({"context": f"{asked} was there?", "choices": choices, "label": kinds.index(asked)})
    return rows


def swag_rows(rows):
    """The rows of `choice_rows` with SWAG's columns."""
    found = []
    for row in rows:
        endings = {f"ending{number}": choice for number, choice in enumerate(row["choices"])}
        found.append({"sent1": row["context"], "sent2": "then", **endings, "label": row["label"]})
    return found


def squad_json(rows):
    """The rows of `answer_rows` in SQuAD's nested form."""
    paragraphs = []
    for row in rows:
        question = {"id": row["id"], "question": row["question"]}
        answers = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
        question["answers"] = [{"text": text, "answer_start": start} for text, start in answers]
        question["is_impossible"] = not question["answers"]
        paragraphs.append({"context": row["context"], "qas": [question]})
    return {"version": "v2.0", "data": [{"title": "books", "paragraphs": paragraphs}]}


# A rate and a length with which the model of the fixture `trained` learns the tables below.
FAST = ["--learning_rate=3e-3", "--num_train_epochs=6", "--hidden_dropout_prob=0", "--attention_probs_dropout_prob=0"]


def rows_of(count, seed, classes=2):
    """Sentences, each with the number of its hero as its label."""
    rng = random.Random(seed)
    for number in range(count):
        hero = rng.randrange(classes)
        thing = rng.choice(THINGS)
        place = rng.choice(PLACES)
        text = f"Then {PEOPLE[hero].title()} sold the {thing} in the {place}, {number} of {seed}."
        yield {"text": text, "label": PEOPLE[hero]}


# By task, a function of a count and a seed that makes rows.
ROWS = {
    "text-classification": lambda *given: list(rows_of(*given)),
    "multi_label_classification": lambda *given: [{**row, "label": row["label"][:1]} for row in rows_of(*given)],
    "regression": lambda *given: [{**row, "label": len(row["text"])} for row in rows_of(*given)],
    "token-classification": tag_rows,
    "question-answering": lambda count, seed: answer_rows(count, seed, unanswerable=0.3),
    "multiple-choice": choice_rows,
}


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def file_options(folder, **splits):
    """Write the rows of each split to a file of JSON Lines; returns the options."""
    return [f"--{split}_file={write_table(folder / f'{split}.jsonl', rows)}" for split, rows in splits.items()]


def write_splits(folder, sizes=(160, 40, 40)):
    """Files train.csv, validation.csv and test.csv in a folder; returns their options."""
    options = []
    for seed, split in enumerate(("train", "validation", "test")):
        file = write_table(folder / f"{split}.csv", rows_of(sizes[seed], seed))
        options.append(f"--{split}_file={file}")
    return options


def assert_same_predictions(one, other, task, abs=2e-6):
    """Two tables of predictions are the same, with numbers up to rounding."""
    assert [row.keys() for row in one] == [row.keys() for row in other]
    for name in one[0]:
        values = [row[name] for row in one]
        others = [row[name] for row in other]
        if "probability" in name or (task, name) == ("regression", "prediction"):
            values = list(map(float, values))
            others = pytest.approx(list(map(float, others)), rel=1e-5, abs=abs)
        assert values == others


def saved(folder, features=None, **splits):
    """A dataset on the disk, with the rows of each split."""
    made = {name: datasets.Dataset.from_list(list(rows), features) for name, rows in splits.items()}
    datasets.DatasetDict(made).save_to_disk(folder)
    return str(folder)


def finetune(model, output, *options):
    assert main(["finetune", str(model), f"--output_dir={output}", *map(str, options)]) == 0
    return json.loads((output / "metrics.json").read_text())


def load(path, task, **options):
    """The task and the splits of a run on a file, by default without validation rows."""
    from d2l_bert.training.finetuning.all_tasks import CLASSES
    from d2l_bert.training.finetuning.config import FinetuneConfig
    from d2l_bert.training.finetuning.splits import load_splits

    given = {"train_file": str(path)} if path else {}
    config = FinetuneConfig(**{"model": "m", "task": task, "validation_share": 0.0, **given, **options})
    config.check()
    made = CLASSES[config.task_type](config)
    return made, load_splits(config, made)
