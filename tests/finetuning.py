"""Small tables to fine-tune on, in the language of the fixture `books`, and runs of `d2l-bert finetune`."""

import csv
import json
import random

from d2l_bert.__main__ import main
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.data import load_data
from d2l_bert.training.finetuning.run import CLASSES


NAMES = ["anna", "boris", "clara", "daniel"]
THINGS = ["apple", "basket", "candle", "drum"]
PLACES = ["garden", "kitchen", "harbour", "library"]

# A rate and a length with which the model of the fixture `trained` learns the tables below.
FAST = ["--learning_rate=3e-3", "--num_train_epochs=6", "--hidden_dropout_prob=0", "--attention_probs_dropout_prob=0"]


def rows_of(count, seed, classes=2):
    """Sentences, each with the number of its hero as its label."""
    rng = random.Random(seed)
    for number in range(count):
        hero = rng.randrange(classes)
        thing, place = rng.choice(THINGS), rng.choice(PLACES)
        text = f"Then {NAMES[hero].title()} sold the {thing} in the {place}, {number} of {seed}."
        yield {"text": text, "label": NAMES[hero]}


def write_csv(path, rows, names=None):
    rows = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names or list(rows[0]), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_splits(folder, classes=2, sizes=(160, 40, 40)):
    """Files train.csv, validation.csv and test.csv in a folder; returns their options."""
    folder.mkdir(parents=True, exist_ok=True)
    options = []
    for number, (split, size) in enumerate(zip(("train", "validation", "test"), sizes, strict=True)):
        path = write_csv(folder / f"{split}.csv", rows_of(size, number, classes))
        options.append(f"--{split}_file={path}")
    return options


def finetune(model, output, *options):
    assert main(["finetune", str(model), f"--output_dir={output}", *map(str, options)]) == 0
    return json.loads((output / "metrics.json").read_text())


def load(path, task, **options):
    """The kind and the rows of a run on a file, without validation rows."""
    config = FinetuneConfig(model="m", task=task, train_file=str(path), validation_share=0.0, **options)
    config.check()
    kind = CLASSES[config.kind](config)
    return kind, load_data(config, kind)
