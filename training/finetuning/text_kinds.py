"""Kinds of tasks about one text or two: one class of several, or a number (d2l, section 16.6); what they share."""

import math
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from transformers import DataCollatorWithPadding

from d2l_bert.errors import UserError
from d2l_bert.training.finetuning import metrics
from d2l_bert.training.finetuning.kind import Features, Kind, check_text_column
from d2l_bert.training.finetuning.pictures import draw_confusion, draw_scatter
from d2l_bert.training.finetuning.tables import Table


# A number with a decimal point or an exponent, as in a column of floats.
DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(\.\d*)?[eE][+-]?\d+)")

# The most columns of probabilities in the table of predictions. With more classes than this, `classification` writes
# none of these columns, and `multilabel` writes those of the first classes.
PROBABILITY_COLUMNS = 20

# The largest number that can be predicted: models compute in float32.
LARGEST_NUMBER = float(np.finfo(np.float32).max)

TEXTS_AT_ONCE = 1000

CONFUSION_FILE = "confusion_matrix.png"
SCATTER_FILE = "predicted_and_true.png"


class TextKind(Kind):
    """What the kinds of this file share: columns, checks of texts, features, the head on [CLS]."""

    auto_class = "AutoModelForSequenceClassification"
    pipeline_task = "text-classification"
    problem_type = ""

    def find_columns(self, train):
        config, task = self.config, self.config.named_task()

        def choose(given, named, default):
            if given is not None:
                return given
            return named if named in train.columns and default not in train.columns else default

        self.text = choose(config.text_column, task and task.text, "text")
        train.require(self.text, "text_column")
        self.text_pair = choose(config.text_pair_column, task and task.text_pair, "text_pair")
        if config.text_pair_column is not None or (task and task.text_pair):
            train.require(self.text_pair, "text_pair_column")
        self.pair_name = self.text_pair
        if self.text_pair not in train.columns:
            self.text_pair = None
        self.label = config.label_column or [choose(None, task and task.label, "label")]
        for column in self.label:
            train.require(column, "label_column")
        chosen = [*self.text_columns(), *self.label]
        if len(set(chosen)) < len(chosen):
            raise UserError(f"column {max(chosen, key=chosen.count)!r} cannot be two of text, text_pair and label")

    def text_columns(self):
        return [self.text] if self.text_pair is None else [self.text, self.text_pair]

    def texts(self, table):
        return list(zip(*(table.columns[column] for column in self.text_columns()), strict=True))

    def usable(self, table):
        if not table.is_dataset:
            return table, {}
        without_text = {row for row, texts in enumerate(self.texts(table)) if not all(map(is_filled, texts))}
        without_label = set()
        labels = table.columns.get(self.label[0], [])
        if self.label[0] in table.class_names or all(label == -1 for label in labels):  # -1 is GLUE's "no label"
            without_label = {row for row, label in enumerate(labels) if label in (-1, None)}
        if labels and len(without_label) == len(table):
            columns = {name: values for name, values in table.columns.items() if name not in self.label}
            table, without_label = Table(**{**vars(table), "columns": columns}), set()
        counts = Counter({"an empty text": len(without_text), "no label": len(without_label - without_text)})
        dropped = without_text | without_label
        return table.select([row for row in range(len(table)) if row not in dropped]) if dropped else table, +counts

    def is_labelled(self, table):
        if any(column not in table.columns for column in self.label):
            return False
        # A multilabel cell may be empty: the row then has no label of them all.
        return self.problem_type == "multi_label_classification" or any(
            is_filled(value) for value in table.columns[self.label[0]]
        )

    def check(self, table):
        for column, option in zip(self.text_columns(), ("text_column", "text_pair_column"), strict=False):
            check_text_column(table, column, option)
        if self.text_pair is None and self.pair_name in table.columns:
            raise UserError(
                f"{table.label}: has a column {self.pair_name!r} of second texts, and the training rows have none; "
                f"add it to the training rows, or take it out here"
            )
        if self.is_labelled(table):
            self.targets(table)

    def targets(self, table) -> np.ndarray:
        """
        The labels of a labelled table as the model's: classes (N,), 0 or 1 (N, C), or numbers (N,).

        Raises:
            UserError: a label is missing, or is not one that the training rows have.
        """
        raise NotImplementedError

    def in_training(self, targets) -> list:
        """The targets as values of `labels` for the model in training."""
        return targets.tolist()

    def features(self, table, tokenizer, max_seq_length):
        columns = [table.columns[column] for column in self.text_columns()]
        targets = self.in_training(self.targets(table)) if self.is_labelled(table) else None
        rows, truncated = [], 0
        for start in range(0, len(table), TEXTS_AT_ONCE):
            texts = [values[start : start + TEXTS_AT_ONCE] for values in columns]
            encoded = tokenizer(*texts, verbose=False)
            cut = tokenizer(*texts, truncation=True, max_length=max_seq_length)
            truncated += sum(
                len(short) < len(whole) for short, whole in zip(cut["input_ids"], encoded["input_ids"], strict=True)
            )
            rows += [{name: values[row] for name, values in cut.items()} for row in range(len(texts[0]))]
        if targets is not None:
            rows = [{**row, "labels": target} for row, target in zip(rows, targets, strict=True)]
        return Features(rows, truncated)

    def collator(self, tokenizer):
        return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)

    def data_record(self):
        return {"labels": getattr(self, "classes", None), "has_pairs": self.text_pair is not None}


class Classification(TextKind):
    """One class of several for a text or a pair of texts."""

    problem_type = "single_label_classification"
    main_metric = "accuracy"
    metrics_shown = ("accuracy", "f1", "accuracy_f1_mean", "matthews_correlation")

    def is_labelled(self, table):
        missing = "-1" not in getattr(self, "number_of", {"-1": 0})  # GLUE's mark for test rows without labels
        labels = {str(value).strip() for value in table.columns.get(self.label[0], [])}
        return super().is_labelled(table) and not (missing and labels == {"-1"})

    def holdable(self, train, drawn):
        texts, chosen = self.texts(train), set(drawn)
        names = [self._name(train, row) for row in range(len(train))]
        left = {name for text, name in zip(texts, names, strict=True) if text not in chosen}
        needed = set()
        for text, name in zip(texts, names, strict=True):  # the first text of a class that would be held out whole
            if name not in left:
                needed.add(text)
                left.add(name)
        return chosen - needed

    def learn(self, train):
        column = self.label[0]
        for row, value in enumerate(train.columns[column]):
            if isinstance(value, list | dict):
                raise UserError(
                    f"{train.place(row)}: column {column!r} holds {type(value).__name__}, not a class; name another "
                    f"column with --label_column, or give --task multilabel for several labels"
                )
            if str(value).strip().lower() == "nan":
                raise UserError(
                    f"{train.place(row)}: column {column!r} holds {value}, as pandas writes a cell without a label; "
                    f"write a label, or take the row out"
                )
            if isinstance(value, float) or (isinstance(value, str) and DECIMAL.fullmatch(value.strip())):
                raise UserError(
                    f"{train.place(row)}: column {column!r} holds numbers such as {value}, not classes; give --task "
                    f"regression, or write classes as whole numbers or names"
                )
        values = [self._name(train, row) for row in range(len(train))]
        found = set(values)
        named = train.class_names.get(column) or (self.known_names() if found <= set(self.known_names()) else None)
        self.classes = [name for name in named if name in found] if named else sort_labels(found)
        if len(self.classes) == 1:
            raise UserError(
                f"{train.label}: every row has the label {self.classes[0]!r} in column {column!r}; there is nothing "
                f"to tell apart: give rows of two classes at least, or name another column with --label_column"
            )
        if len(self.classes) == len(train) and len(train) > 2:
            raise UserError(
                f"{train.label}: every row has a label of its own in column {column!r}; name the column of classes "
                f"with --label_column"
            )
        self.number_of = {name: number for number, name in enumerate(self.classes)}

    def known_names(self):
        """The names that the publishers of a named data set give its classes; () for other tasks."""
        task = self.config.named_task()
        return task.labels if task else ()

    def _name(self, table, row):
        """The label of a row as a string: the class's name if its dataset has names, else the value in the file."""
        column = self.label[0]
        value = table.columns[column][row]
        names = table.class_names.get(column)
        if names and isinstance(value, int) and 0 <= value < len(names):
            return names[value]
        if not is_filled(value):
            raise UserError(f"{table.place(row)}: column {column!r} is empty; write a label, or take the row out")
        value = str(value).strip()
        known = self.known_names()
        return known[int(value)] if value.isdecimal() and int(value) < len(known) else value

    def targets(self, table):
        names = [self._name(table, row) for row in range(len(table))]
        for row, name in enumerate(names):
            if name not in self.number_of:
                raise UserError(
                    f"{table.place(row)}: label {name!r} does not stand in the training rows, which have "
                    f"{listed_names(self.classes)}; correct the label, or add training rows with it"
                )
        return np.array([self.number_of[name] for name in names], dtype=np.int64)

    def model_settings(self):
        return label_settings(self.classes, self.problem_type)

    def metrics(self, table, features, predictions):
        return metrics.class_metrics(self.targets(table), predictions.argmax(-1), len(self.classes))

    def most_frequent_share(self, table):
        return float(np.bincount(self.targets(table)).max() / len(table))

    def constant_metrics(self, table):
        found = set(self.targets(table).tolist())
        without_second = ("f1",) if len(self.classes) == 2 and found == {0} else ()
        return (*without_second, "matthews_correlation") if len(found) == 1 else ()

    def predicted_columns(self, table, features, predictions):
        probabilities = softmax(predictions)
        chosen = predictions.argmax(-1)
        columns = {
            "prediction": [self.classes[number] for number in chosen],
            "probability": [rounded(row[number]) for row, number in zip(probabilities, chosen, strict=True)],
        }
        if len(self.classes) <= PROBABILITY_COLUMNS:
            for number, name in enumerate(self.classes):
                columns[f"probability of {name}"] = [rounded(value) for value in probabilities[:, number]]
        return columns

    def pictures(self, table, features, predictions, folder):
        draw_confusion(
            self.targets(table), predictions.argmax(-1), self.classes, table.name, Path(folder, CONFUSION_FILE)
        )
        return {CONFUSION_FILE: f"Confusion matrix on {table.name}"}


class Regression(TextKind):
    """
    A number for a text or a pair of texts.

    The model learns standardised labels (mean 0, standard deviation 1), so that the rate need not fit their scale.
    `finish` writes mean and deviation into the last layer: the finished model predicts in the labels' units.
    """

    problem_type = "regression"
    main_metric = "pearson_spearman_mean"
    metrics_shown = ("pearson", "spearman", "pearson_spearman_mean", "mse", "mae")

    def learn(self, train):
        numbers = self.targets(train)
        self.mean, self.deviation = float(numbers.mean()), float(numbers.std())
        if self.deviation == 0:
            raise UserError(
                f"{train.label}: every row has the number {numbers[0]:g} in column {self.label[0]!r}; there is "
                f"nothing to learn: name another column with --label_column"
            )

    def targets(self, table):
        column, numbers = self.label[0], []
        for row, value in enumerate(table.columns[column]):
            try:
                number = float(value) if isinstance(value, str | int | float) else math.nan
            except ValueError:
                number = math.nan
            except OverflowError:  # a whole number of hundreds of digits
                number = sys.float_info.max
            if not is_filled(value):
                shown = "is empty; write a number"
            elif not math.isfinite(number):
                shown = f"holds {value!r:.40}, not a finite number; write one"
            elif abs(number) > LARGEST_NUMBER:
                shown = f"holds {value!r:.40}, beyond float32's {LARGEST_NUMBER:.2g}; write a smaller number"
            else:
                numbers.append(number)
                continue
            raise UserError(f"{table.place(row)}: column {column!r} {shown}, or take the row out")
        return np.array(numbers)

    def in_training(self, targets):
        return ((targets - self.mean) / self.deviation).tolist()

    def model_settings(self):
        return {"num_labels": 1, "problem_type": self.problem_type}

    def rescaled(self, outputs):
        return outputs * self.deviation + self.mean

    def finish(self, model):
        import torch

        last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
        assert last.out_features == 1, "the head's last layer gives the number"
        with torch.no_grad():
            last.weight.mul_(self.deviation)
            last.bias.mul_(self.deviation).add_(self.mean)

    def metrics(self, table, features, predictions):
        return metrics.number_metrics(self.targets(table), predictions[:, 0])

    def constant_metrics(self, table):
        return ("pearson", "spearman", "pearson_spearman_mean") if np.ptp(self.targets(table)) == 0 else ()

    def predicted_columns(self, table, features, predictions):
        return {"prediction": [float(f"{value:.6g}") for value in predictions[:, 0]]}

    def pictures(self, table, features, predictions, folder):
        draw_scatter(self.targets(table), predictions[:, 0], table.name, Path(folder, SCATTER_FILE))
        return {SCATTER_FILE: f"Predicted and true numbers on {table.name}"}


def sort_labels(names) -> list[str]:
    """Labels in the order of their numbers if all are whole numbers, else in alphabetical order."""
    if all(re.fullmatch(r"[+-]?\d+", name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities (N, C) of logits (N, C), in float64."""
    exponentials = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def label_settings(classes, problem_type):
    """The fields of a model's configuration for its classes."""
    return {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
        "problem_type": problem_type,
    }


def is_filled(value):
    """Whether a cell holds more than white space."""
    return value is not None and str(value).strip() != ""


def listed_names(names, most=10):
    """The first names in a sentence, and how many more there are."""
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def rounded(probability):
    """A probability for the table of predictions."""
    return round(float(probability), 6)
