"""Kinds of tasks about one text or two: one class, several labels, or a number (d2l, section 16.6)."""

import math
import re
from pathlib import Path

import numpy as np

from d2l_bert.messages import UserError
from d2l_bert.training.finetuning import metrics
from d2l_bert.training.finetuning.kind import (
    Features,
    Kind,
    check_different,
    choose_column,
    in_chunks,
    is_filled,
    list_in,
    listed_names,
    names_in,
    rounded,
    softmax,
    text_in,
)
from d2l_bert.training.finetuning.pictures import draw_confusion, draw_counts, draw_scatter
from d2l_bert.training.finetuning.tables import Row
from d2l_bert.training.finetuning.tasks import NamedTask


# A number with a decimal point or an exponent, as in a column of floats; or pandas' mark of an empty cell.
NO_CLASS = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(\.\d*)?e[+-]?\d+)|nan", re.IGNORECASE)

# The most columns of probabilities in the table of predictions. With more classes than this, `classification` writes
# none of these columns, and `multilabel` writes those of the first classes.
PROBABILITY_COLUMNS = 20

# The largest number that can be predicted: models compute in float32.
LARGEST_NUMBER = float(np.finfo(np.float32).max)

CONFUSION_FILE = "confusion_matrix.png"
LABEL_FILE = "f1_by_label.png"
SCATTER_FILE = "predicted_and_true.png"


class TextKind(Kind):
    """What the kinds of this file share: columns, features, the head on [CLS]."""

    auto_class = "AutoModelForSequenceClassification"
    pipeline_task = "text-classification"
    problem_type = ""

    def find_columns(self, train):
        config, task = self.config, self.config.named_task() or NamedTask(kind="", dataset="")
        self.text_columns = [choose_column(train, "text_column", config.text_column, "text", task.text)]
        if config.text_pair_column or task.text_pair or "text_pair" in train.columns:
            usual = ("text_pair", task.text_pair)
            self.text_columns.append(choose_column(train, "text_pair_column", config.text_pair_column, *usual))
        self.label = config.label_column or [choose_column(train, "label_column", None, "label", task.label)]
        for column in self.label:
            train.require(column, "label_column")
        check_different([*self.text_columns, *self.label])
        self.known_names = task.labels  # that the publishers of a named data set give its classes
        self.settings["problem_type"], self.recorded["has_pairs"] = self.problem_type, len(self.text_columns) == 2

    def parse(self, cells, table):
        options = ("text_column", "text_pair_column")
        for column, option in zip(self.text_columns, options, strict=False):
            table.require(column, option)
        texts = [text_in(cells, *pair) for pair in zip(self.text_columns, options, strict=False)]
        is_labelled = all(column in table.columns for column in self.label)
        return Row(tuple(texts), self.label_in(cells, table) if is_labelled else None)

    def in_training(self, targets) -> list:
        """The targets as values of `labels` for the model in training."""
        return targets.tolist()

    def features(self, table, tokenizer, max_seq_length):
        targets = self.in_training(self.targets(table)) if self.is_labelled(table) else None
        rows, truncated = [], 0
        for _, chunk in in_chunks(table.rows):
            texts = [list(column) for column in zip(*(row.texts for row in chunk), strict=True)]
            whole = tokenizer(*texts, verbose=False)["input_ids"]
            cut = tokenizer(*texts, truncation=True, max_length=max_seq_length)
            truncated += sum(len(ids) < len(full) for ids, full in zip(cut["input_ids"], whole, strict=True))
            rows += [{name: values[number] for name, values in cut.items()} for number in range(len(chunk))]
        if targets is not None:
            rows = [{**row, "labels": target} for row, target in zip(rows, targets, strict=True)]
        return Features(rows, f"{truncated:,} are truncated to {max_seq_length} tokens" if truncated else "")


class Classification(TextKind):
    """One class of several for a text or a pair of texts."""

    problem_type = "single_label_classification"
    main_metric = "accuracy"
    metrics_shown = ("accuracy", "f1", "accuracy_f1_mean", "matthews_correlation")

    def label_in(self, cells, table):
        column = self.label[0]
        value, known = cells[column], self.known_names
        is_number = isinstance(value, float) or NO_CLASS.fullmatch(str(value).strip())
        if is_number or isinstance(value, list | dict):
            what = f"numbers such as {value}" if is_number else type(value).__name__
            raise ValueError(
                f"column {column!r} holds {what}, not classes; give --task "
                f"{'regression' if is_number else 'multilabel'}, or name another column with --label_column"
            )
        if not is_filled(value) or (table.is_dataset and value == -1):
            return None
        (name,) = names_in([value], column, table)
        return known[int(name)] if name.isdecimal() and int(name) < len(known) else name

    def learn(self, train):
        column, found = self.label[0], {row.label for row in train.rows} - {None}
        known = self.known_names if found <= set(self.known_names) else None
        self.learn_classes(train, found, train.class_names.get(column) or known)
        if len(self.classes) == len(train) > 2:
            raise UserError(
                f"{train.label}: every row has a label of its own in column {column!r}; name the column of classes "
                f"with --label_column"
            )

    def targets(self, table):
        return np.array([self.class_number(table, number, row.label) for number, row in enumerate(table.rows)])

    def metrics(self, table, features, predictions):
        return metrics.class_metrics(self.targets(table), predictions.argmax(-1), len(self.classes))

    def most_frequent_share(self, table):
        return float(np.bincount(self.targets(table)).max() / len(table))

    def predicted_columns(self, table, features, predictions):
        probabilities, chosen = softmax(predictions), predictions.argmax(-1)
        columns = {
            "prediction": [self.classes[number] for number in chosen],
            "probability": rounded(probabilities.max(-1)),
        }
        if len(self.classes) > PROBABILITY_COLUMNS:
            return columns
        return columns | {
            f"probability of {name}": rounded(probabilities[:, n]) for n, name in enumerate(self.classes)
        }

    def pictures(self, table, features, predictions, folder):
        path = Path(folder, CONFUSION_FILE)
        draw_confusion(self.targets(table), predictions.argmax(-1), self.classes, table.name, path)
        return {CONFUSION_FILE: f"Confusion matrix on {table.name}"}


class Multilabel(TextKind):
    """Several labels at once, or none, for a text or a pair of texts: a yes or no for each label."""

    problem_type = "multi_label_classification"
    main_metric = "f1"
    metrics_shown = ("f1", "macro_f1", "exact_match")

    def label_in(self, cells, table):
        if len(self.label) == 1:
            entries = list_in(cells, self.label[0], "label_column", self.config.label_separator)
            return names_in(entries, self.label[0], table)
        for column in self.label:
            if cells[column] not in (0, 1, "0", "1", "0.0", "1.0"):
                raise ValueError(f"column {column!r} holds {cells[column]!r}; write 0 or 1")
        return [column for column in self.label if float(cells[column]) == 1]

    def learn(self, train):
        labels = [row.label for row in train.rows]
        found = {name for names in labels for name in names}
        if not found or all(set(names) == found for names in labels):
            raise UserError(
                f"{train.label}: every row has the labels {listed_names(sorted(found))} in column {self.label[0]!r}; "
                f"name another column with --label_column, or what separates labels with --label_separator"
            )
        named = self.label if len(self.label) > 1 else train.class_names.get(self.label[0])
        self.learn_classes(train, found, named, least=1)

    def targets(self, table):
        found = np.zeros((len(table), len(self.classes)), dtype=np.float32)
        for number, row in enumerate(table.rows):
            for name in row.label:
                found[number, self.class_number(table, number, name)] = 1
        return found

    def metrics(self, table, features, predictions):
        return metrics.multilabel_metrics(self.targets(table), (predictions > 0).astype(int))

    def predicted_columns(self, table, features, predictions):
        chosen = [[name for name, logit in zip(self.classes, row, strict=True) if logit > 0] for row in predictions]
        columns = {"prediction": [self.config.label_separator.join(names) for names in chosen]}
        probabilities = 1 / (1 + np.exp(-predictions.astype(np.float64)))
        shown = enumerate(self.classes[:PROBABILITY_COLUMNS])
        return columns | {f"probability of {name}": rounded(probabilities[:, n]) for n, name in shown}

    def pictures(self, table, features, predictions, folder):
        true, said = self.targets(table).astype(bool), predictions > 0
        counts = np.stack([(true & said).sum(0), said.sum(0), true.sum(0)], 1)
        title = f"Labels on {table.name}: precision, recall and F1 by label (number of rows with the label)"
        draw_counts(dict(zip(self.classes, counts, strict=True)), title, Path(folder, LABEL_FILE))
        return {LABEL_FILE: f"Precision, recall and F1 of each label on {table.name}"}


class Regression(TextKind):
    """
    A number for a text or a pair of texts.

    The model learns standardised labels (mean 0, standard deviation 1), so that the rate need not fit their scale.
    `finish` writes mean and deviation into the last layer: the finished model predicts in the labels' units.
    """

    problem_type = "regression"
    main_metric = "pearson_spearman_mean"
    metrics_shown = ("pearson", "spearman", "pearson_spearman_mean", "mse", "mae")

    def label_in(self, cells, table):
        value = cells[self.label[0]]
        if not is_filled(value):
            return None
        try:
            number = float(value)
        except (ValueError, TypeError, OverflowError):
            number = math.nan
        if not abs(number) <= LARGEST_NUMBER:
            raise ValueError(
                f"column {self.label[0]!r} holds {value!r:.40}, not a finite number in float32; write one, or take "
                f"the row out"
            )
        return number

    def learn(self, train):
        numbers = self.targets(train)
        self.mean, self.deviation = float(numbers.mean()), float(numbers.std())
        self.settings["num_labels"] = 1
        if self.deviation == 0:
            raise UserError(
                f"{train.label}: every row has the number {numbers[0]:g} in column {self.label[0]!r}; there is "
                f"nothing to learn: name another column with --label_column"
            )

    def targets(self, table):
        return np.array([row.label for row in table.rows], dtype=float)

    def in_training(self, targets):
        return ((targets - self.mean) / self.deviation).tolist()

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

    def predicted_columns(self, table, features, predictions):
        return {"prediction": [float(f"{value:.6g}") for value in predictions[:, 0]]}

    def pictures(self, table, features, predictions, folder):
        draw_scatter(self.targets(table), predictions[:, 0], table.name, Path(folder, SCATTER_FILE))
        return {SCATTER_FILE: f"Predicted and true numbers on {table.name}"}
