"""The kind `multilabel`: several labels at once, or none, for a text or a pair of texts."""

import re
from collections import Counter
from pathlib import Path

import numpy as np

from d2l_bert.errors import UserError
from d2l_bert.training.finetuning import metrics
from d2l_bert.training.finetuning.bars import draw_label_bars
from d2l_bert.training.finetuning.kind import json_list, no_json_list, whole_number
from d2l_bert.training.finetuning.text_kinds import (
    PROBABILITY_COLUMNS,
    TextKind,
    is_filled,
    label_settings,
    listed_names,
    rounded,
    sort_labels,
)


LABEL_FILE = "f1_by_label.png"

# What often stands between labels.
OTHER_SEPARATOR = re.compile(r"[,;|/\t]")


class Multilabel(TextKind):
    """Several labels at once, or none, for a text or a pair of texts: a yes or no for each label."""

    problem_type = "multi_label_classification"
    main_metric = "f1"
    metrics_shown = ("f1", "macro_f1", "exact_match")

    def learn(self, train):
        if len(self.label) > 1:
            self.classes = list(self.label)
        else:
            self.classes = sort_labels({name for row in range(len(train)) for name in self._names(train, row)})
        if not self.classes:
            raise UserError(f"{train.label}: no row has a label in column {self.label[0]!r}; name another column")
        if len(self.label) == 1:
            self._check_cells(train)
        self.number_of = {name: number for number, name in enumerate(self.classes)}
        totals = self.targets(train).sum(0)
        for name, total in zip(self.classes, totals, strict=True):
            if total == 0:
                raise UserError(f"{train.label}: no row has the label {name!r}; leave its column out of label_column")
        if (totals == len(train)).all():
            raise UserError(
                f"{train.label}: every row has all of the labels {listed_names(self.classes)}; nothing to learn"
            )

    def _check_cells(self, train):
        """Refuse a column of 0 and 1, and note that no cell holds the separator."""
        column, separator = self.label[0], self.config.label_separator
        cells = train.columns[column]
        if set(self.classes) <= {"0", "1"} and all(len(self._names(train, row)) == 1 for row in range(len(train))):
            raise UserError(
                f"{train.label}: column {column!r} holds a 0 or a 1 in each row; name several such columns with "
                f"--label_column, or give --task classification"
            )
        if all(isinstance(cell, str) and separator not in cell and json_list(cell) is None for cell in cells):
            example = next((cell for cell in cells if OTHER_SEPARATOR.search(cell)), self.classes[0])
            self.notes.append(
                f"no cell of column {column!r} holds the separator {separator!r}, so no row has two labels; one label "
                f"is {example!r:.40}: if that is several, name what separates them with --label_separator"
            )

    def _names(self, table, row):
        """The names of the labels of a row."""
        column = self.label[0]
        value = table.columns[column][row]
        if value is None:
            return []
        if isinstance(value, str):
            try:
                found = json_list(value)
            except ValueError:
                raise no_json_list(table, row, column, value) from None
            value = value if found is None else found
        if isinstance(value, list):
            names = table.class_names.get(column)
            for entry in value:
                if names and isinstance(entry, int) and not 0 <= entry < len(names):
                    raise UserError(
                        f"{table.place(row)}: column {column!r} holds {entry}, which is no label of the dataset; "
                        f"correct the row"
                    )
            named = [names[entry] if names and isinstance(entry, int) else entry for entry in value]
        elif isinstance(value, str):
            named = [entry for entry in value.split(self.config.label_separator) if entry.strip()]
        else:
            raise UserError(
                f"{table.place(row)}: column {column!r} holds {type(value).__name__}, not a list of labels; write a "
                f"list, or several columns of 0 and 1"
            )
        for entry in named:
            if not isinstance(entry, str | int) or not is_filled(entry):
                raise UserError(f"{table.place(row)}: {entry!r} in column {column!r} is no label; write a name")
        return [str(entry).strip() for entry in named]

    def targets(self, table):
        found = np.zeros((len(table), len(self.classes)), dtype=np.float32)
        if len(self.label) > 1:
            for number, column in enumerate(self.label):
                for row, value in enumerate(table.require(column, "label_column")):
                    value = whole_number(value)
                    if value not in (0, 1, "0", "1"):
                        raise UserError(f"{table.place(row)}: column {column!r} holds {value!r}; write 0 or 1")
                    found[row, number] = int(value)
            return found
        for row in range(len(table)):
            for name in self._names(table, row):
                if name not in self.number_of:
                    raise UserError(
                        f"{table.place(row)}: label {name!r} does not stand in the training rows, which have "
                        f"{listed_names(self.classes)}; correct the label, or add training rows with it"
                    )
                found[row, self.number_of[name]] = 1
        return found

    def model_settings(self):
        return label_settings(self.classes, self.problem_type)

    def metrics(self, table, features, predictions):
        return metrics.multilabel_metrics(self.targets(table), (predictions > 0).astype(int))

    def constant_metrics(self, table):
        return () if self.targets(table).any() else ("f1", "macro_f1")

    def predicted_columns(self, table, features, predictions):
        separator = self.config.label_separator
        chosen = [[name for name, logit in zip(self.classes, row, strict=True) if logit > 0] for row in predictions]
        columns = {"prediction": [separator.join(names) for names in chosen]}
        probabilities = 1 / (1 + np.exp(-predictions.astype(np.float64)))
        for number, name in enumerate(self.classes[:PROBABILITY_COLUMNS]):
            columns[f"probability of {name}"] = [rounded(value) for value in probabilities[:, number]]
        return columns

    def pictures(self, table, features, predictions, folder):
        true, said = self.targets(table).astype(bool), predictions > 0
        totals = {"right": true & said, "predicted": said, "gold": true}
        counts = {
            name: Counter(dict(zip(self.classes, cells.sum(0).tolist(), strict=True)))
            for name, cells in totals.items()
        }
        draw_label_bars(counts, table.name, Path(folder, LABEL_FILE))
        return {LABEL_FILE: f"Precision, recall and F1 of each label on {table.name}"}
