"""The tasks about a text or a pair of texts: one class, several labels, or a number (d2l, section 16.6)."""

import functools
import re

import numpy as np
import torch

from d2l_bert.messages import UserError, explained
from d2l_bert.training.finetuning import intervals, scoring
from d2l_bert.training.finetuning.cells import WHOLE_FLOAT, is_filled, json_in, list_in, listed, name_of, whole
from d2l_bert.training.finetuning.features import Features, truncated
from d2l_bert.training.finetuning.tasks import Baseline, Task


# A number with a decimal point or an exponent, as in a column of floats.
NO_CLASS = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(\.\d*)?e[+-]?\d+)", re.IGNORECASE)

# The largest number that can be predicted: models compute in float32.
LARGEST_NUMBER = float(np.finfo(np.float32).max)

# The most yes and no of the labels of a split, a row and a label each: a file of a megabyte may have 50,000 rows with
# as many labels. A model's outputs for them take four bytes each.
MOST_YES_AND_NO = 1 << 28

# Numbers to learn are refused if their standard deviation is less than this many times the distance of neighbouring
# float32 numbers at their mean. The finished model adds the mean in float32, which would round their differences away.
LEAST_STEPS = 10


class TextTask(Task):
    """What the tasks of this file share: columns, features, the head on [CLS]. `row_results` are logits (N, C)."""

    auto_class = "AutoModelForSequenceClassification"
    usual_columns = {"text_column": ("text",), "text_pair_column": ("text_pair",), "label_column": ("label",)}

    def read(self, row, split):
        texts = self.texts(row.cells)
        label = None
        if self.reads_labels and all(column in split.columns for column in self.columns["label_column"]):
            label = self.label_in(row.cells, split)
        return row._replace(texts=texts, label=label)

    def targets(self, split) -> np.ndarray:
        """The number of each row's class (N,); -100 for a row without a label."""
        return np.array([-100 if row.label is None else self.number_of[row.label] for row in split.rows])

    def features(self, split, tokenizer, max_seq_length):
        # The texts of all rows; of pairs, the first texts and then the second ones.
        columns = list(zip(*(row.texts for row in split.rows), strict=True))
        inputs, windows, note = truncated(tokenizer, columns, max_seq_length)
        labels = self.targets(split)
        if labels.ndim == 1:
            # The collator makes float32 of Python's floats, and would make float64 of NumPy's.
            labels = labels.tolist()
        for feature, label in zip(inputs, labels, strict=True):
            feature["labels"] = label  # a number; of several labels a row (C,) of the array
        return Features(inputs, windows, note)

    def always(self, split, of_a_row) -> dict[str, float]:
        """
        The metrics of a split if a model said the same about every row.

        Args:
            of_a_row: in place of the logits of a row (C,). They need not be logits: the metrics of one class look at
                the place of the largest, those of several labels at the signs.
        """
        return self.metrics(split, np.broadcast_to(of_a_row, (len(split.rows), len(of_a_row))))


class TextClassification(TextTask):
    """One class of several for a text or a pair of texts."""

    problem_type = "single_label_classification"
    needed_to_predict = ("classes",)
    metrics_shown = ("accuracy", "f1", "accuracy_f1_mean", "matthews_correlation")

    @property
    def classes_of_data_set(self) -> tuple[str, ...]:
        """The names of the classes of the named data set, in the order of their numbers; () for other data."""
        return self.config.named_data_set.get("labels", ())

    def label_in(self, cells, split):
        """The label in a row; raises `ValueError` if there is something else."""
        value = whole(cells.get(self.label_column))
        if isinstance(value, str) and (of_pandas := WHOLE_FLOAT.fullmatch(value.strip())):
            value = of_pandas[1]
        if str(value).strip().lower() == "nan":
            raise ValueError(
                f"column {self.label_column!r:.100} holds {value!r:.40}, which pandas writes for an empty cell; write "
                f"a class, or take the row out"
            )
        if isinstance(value, list | dict | float) or NO_CLASS.fullmatch(str(value).strip()):
            raise ValueError(
                f"column {self.label_column!r:.100} holds {value!r:.40}, not a class; numbers are for --task "
                f"regression, lists for --task multi_label_classification; or name another column with --label_column"
            )
        if not is_filled(value):
            return None
        name = name_of(value, self.label_column, split.class_names.get(self.label_column))
        if re.fullmatch(r"\d{1,9}", name) and int(name) < len(self.classes_of_data_set):
            return self.classes_of_data_set[int(name)]
        return name

    def learn(self, train):
        # The order of the classes: that of the column of labels in a dataset; else that of the data set which `task`
        # names, unless the rows have other classes; else `learn_classes` sorts them.
        in_rows = {row.label for row in train.rows} - {None}
        of_column = train.class_names.get(self.label_column, [])
        if not in_rows.issubset(of_column):
            of_column = []  # numbers, in whose place `label_in` has put the names of the data set that `task` names
        unknown = sorted(in_rows.difference(self.classes_of_data_set))
        if of_column:
            self.learn_classes(train, in_rows, of_column)
        elif unknown:
            self.learn_classes(train, in_rows, None)
        else:
            self.learn_classes(train, in_rows, self.classes_of_data_set)
        if not of_column and 0 < len(unknown) < len(in_rows):
            raise UserError(
                f"{train.title}: column {self.label_column!r:.100} has {listed(unknown)} beside labels of --task "
                f"{self.config.task}, {listed(self.classes_of_data_set)}; write these names, or their numbers from 0"
            )
        if len(self.classes) == len(train.rows) > 2:
            raise UserError(
                f"{train.title}: every row has a label of its own in column {self.label_column!r:.100}; name the "
                f"column of classes with --label_column"
            )

    def resampled(self, split, row_results):
        return functools.partial(
            intervals.class_figures,
            true=self.targets(split),
            predicted=row_results.argmax(-1),
            classes=len(self.classes),
        )

    def mistakes(self, split, features, logits, row_results):
        is_right = row_results.argmax(-1) == self.targets(split)
        return np.where(is_right, np.nan, scoring.probabilities(row_results).max(-1))

    def baseline(self, train, split, known="training"):
        counts = np.bincount(self.targets(train), minlength=len(self.classes))  # the largest is chosen, as of logits
        return Baseline(f"always the most frequent class of the {known} rows", self.always(split, counts))

    def class_of_f1(self):
        return self.classes[1] if len(self.classes) == 2 else None

    def predicted(self, row_results) -> list[str]:
        """The likeliest class of each row."""
        return [self.classes[number] for number in row_results.argmax(-1)]

    def sides(self, split, row_results):
        return scoring.Sides([row.label for row in split.rows], self.predicted(row_results), self.classes)

    def predictions(self, split, row_results):
        probabilities = scoring.probability_columns(self.classes, row_results)
        return {"prediction": self.predicted(row_results), **probabilities}


class MultiLabelClassification(TextTask):
    """Several labels at once, or none, for a text or a pair of texts: a yes or no for each label."""

    problem_type = "multi_label_classification"
    needed_to_predict = ("classes",)
    main_metric = "f1"
    metrics_shown = ("f1", "macro_f1", "exact_match")
    shares_of_rows = ("exact_match",)

    def label_in(self, cells, split):
        """The labels of a row; raises `ValueError` if there is something else."""
        columns = self.columns["label_column"]
        if len(columns) == 1:
            entries = list_in(cells, self.label_column, "label_column", self.config.label_separator)
            return [name_of(entry, self.label_column, split.class_names.get(self.label_column)) for entry in entries]
        for column in columns:
            if cells.get(column) not in (0, 1, "0", "1", "0.0", "1.0"):
                raise ValueError(
                    f"column {column!r:.100} holds {cells.get(column)!r:.100}; write 0 or 1, or take the row out"
                )
        return [column for column in columns if float(cells[column]) == 1]

    def learn(self, train):
        labels = [row.label for row in train.rows]
        doubled = next((row for row in train.rows if len(set(row.label)) < len(row.label)), None)
        if doubled and set().union(*labels) <= {"0", "1"}:
            raise UserError(
                f"{train.title}, {doubled.place}: column {self.label_column!r:.100} holds {doubled.label!r:.40}, as a "
                f"yes or no for each label; write the names of the labels, or a column of 0 and 1 for each"
            )
        first = set(labels[0])
        if all(set(names) == first for names in labels):
            raise UserError(
                f"{train.title}: every row has the labels {listed(sorted(labels[0]))} in column "
                f"{self.label_column!r:.100}; name another column with --label_column, or what separates labels with "
                f"--label_separator"
            )
        columns = self.columns["label_column"]
        if len(columns) > 1:  # each is a label, also one without a 1
            self.learn_classes(train, set(columns), columns, least=1)
        else:
            self.learn_classes(train, set().union(*labels), train.class_names.get(self.label_column), least=1)

    def shown_label(self, row):
        return ", ".join(row.label or []) or "no label"

    def remarks(self, rows):
        """That no cell has the separator, and which sign may stand in its place, as in `farm#market`."""
        if not self.reads_labels or len(self.columns["label_column"]) > 1:
            return []
        separator = self.config.label_separator
        cells = set()
        for row in rows:
            value = json_in(row.cells.get(self.label_column), self.label_column)
            if isinstance(value, str):
                cells.add(value)
        if not cells or any(separator in cell for cell in cells):
            return []
        what = f"each row has one label at most, as no cell of {self.label_column!r:.30} has {separator!r:.10}"
        sign = joining_sign(cells)
        if sign is None:
            return [f"{what} (--label_separator)"]
        return [f"{what}; if {sign!r} separates labels, give --label_separator {sign!r}"]

    def targets(self, split):
        """1 for each label that a row has, 0 for each other one (N, C); a row without a label has zeros."""
        count = len(split.rows)
        labels = len(self.classes)
        if count * labels > MOST_YES_AND_NO:
            raise UserError(
                f"{split.title}: {count:,} rows with a yes or no for each of {labels:,} labels are more than "
                f"{MOST_YES_AND_NO:,} of them; give fewer rows, or fewer labels"
            )
        targets = np.zeros((count, labels), dtype=np.int8)
        for number, row in enumerate(split.rows):
            targets[number, [self.number_of[name] for name in row.label or []]] = 1
        return targets

    def loss(self, logits, labels):
        counts = labels != -100
        return torch.nn.functional.binary_cross_entropy_with_logits(
            logits[counts], labels[counts].to(logits.dtype), reduction="sum"
        )

    def metrics(self, split, row_results):
        is_exact = (self.predicted(row_results) == self.targets(split)).all(-1)
        return {**super().metrics(split, row_results), "exact_match": float(is_exact.mean())}

    def resampled(self, split, row_results):
        true = self.targets(split)
        predicted = self.predicted(row_results)
        return functools.partial(
            intervals.multilabel_figures,
            true=np.array(np.nonzero(true)),
            predicted=np.array(np.nonzero(predicted)),
            both=np.array(np.nonzero(true & predicted)),
            labels=len(self.classes),
        )

    def mistakes(self, split, features, logits, row_results):
        """The probability of the surest one of a row's labels that is wrong: that it has, or that it has not."""
        yes = scoring.probabilities(row_results, of_each=True)
        is_right = self.predicted(row_results) == self.targets(split)
        of_labels = np.where(is_right, -np.inf, np.maximum(yes, 1 - yes))
        return np.where(is_right.all(-1), np.nan, of_labels.max(-1))

    def baseline(self, train, split, known="training"):
        shares = self.targets(train).mean(0)
        of_more_than_half = self.always(split, shares - 0.5)  # a label is chosen if this is above 0, as a logit
        return Baseline(f"always the labels of more than half of the {known} rows", of_more_than_half)

    def predicted(self, row_results) -> np.ndarray:
        """1 for each label that a row is predicted to have, 0 for each other one (N, C)."""
        return (row_results > 0).astype(np.int8)

    def sides(self, split, row_results):
        return scoring.Sides(self.targets(split), self.predicted(row_results), self.classes)

    def predictions(self, split, row_results):
        chosen = []
        for logits in row_results:
            chosen.append([name for name, logit in zip(self.classes, logits, strict=True) if logit > 0])
        return {"prediction": chosen, **scoring.probability_columns(self.classes, row_results, of_each=True)}

    def in_csv(self, predicted):
        """
        The labels of a row as `read` takes them from a cell: with the separator between them, or as a list in JSON if
        a name has a character of the separator, or begins as JSON does.
        """
        between = self.config.label_separator
        for name in self.classes:
            if name[:1] in ("[", "{") or set(between.strip() or between) & set(name):
                return predicted
        joined = [names if names is None else between.join(names) for names in predicted["prediction"]]
        return {**predicted, "prediction": joined}


def joining_sign(cells: set[str]) -> str | None:
    """
    The sign that may separate the labels in cells: where they are cut at it, the fewest different parts are left.

    For example, "#" of the cells farm, farm#market, farm#river, market, market#river and river: 3 parts of 6 cells.
    None where no sign leaves fewer parts than there are cells.
    """
    best = None
    fewest = len(cells)
    for sign in sorted(set("".join(cells))):
        if sign.isalnum():
            continue
        parts = {part.strip() for part in sign.join(cells).split(sign)} - {""}
        if len(parts) < fewest:
            best = sign
            fewest = len(parts)
    return best


class Regression(TextTask):
    """
    A number for a text or a pair of texts.

    The model learns standardised labels (mean 0, standard deviation 1), so that the rate need not fit their scale.
    `finish` writes mean and deviation into the last layer: the finished model predicts in the labels' units.

    Attributes:
        mean, deviation: of the labels of the training rows.
    """

    problem_type = "regression"
    needed_to_predict = ("mean", "deviation")
    main_metric = "pearson_spearman_mean"
    metrics_shown = ("pearson", "spearman", "pearson_spearman_mean", "mse", "mae")
    shares_of_rows = ()
    mistake = "error"

    def label_in(self, cells, split):
        """The number in a row; raises `ValueError` if there is something else."""
        value = cells.get(self.label_column)
        if not is_filled(value):
            return None
        with explained(
            f"column {self.label_column!r:.100} holds {value!r:.40}, not a finite number in float32 with a decimal "
            f"point",
            "write one such as 5.3, or take the row out",
            *(ValueError, TypeError, OverflowError),
        ):
            if "_" in str(value):  # Python's own way to write numbers
                raise ValueError("it has an underscore")
            number = float(value)
            if not abs(number) <= LARGEST_NUMBER:  # NaN is not, either
                raise UserError(f"it is not within ±{LARGEST_NUMBER:.3g}") from None
            return number

    def learn(self, train):
        numbers = np.array([row.label for row in train.rows], dtype=float)
        self.mean = float(numbers.mean())
        self.deviation = float(numbers.std())
        self.settings["num_labels"] = 1
        if self.deviation <= LEAST_STEPS * np.spacing(np.float32(abs(self.mean))):
            raise UserError(
                f"{train.title}: the numbers in column {self.label_column!r:.100} differ by {self.deviation:.3g} "
                f"around {self.mean:.9g} (standard deviation, mean), too little for float32, in which models compute; "
                f"subtract a constant from them, or name another column with --label_column"
            )

    def about_labels(self, rows):
        numbers = [row.label for row in rows]
        return (
            f"numbers in {self.label_column!r:.40}: {min(numbers):g} to {max(numbers):g}, mean {np.mean(numbers):g}, "
            f"{len(set(numbers)):,} different"
        )

    def learnt(self):
        return {**super().learnt(), "mean": self.mean, "deviation": self.deviation}

    def restore(self, learnt):
        super().restore(learnt)
        self.mean = learnt["mean"]
        self.deviation = learnt["deviation"]

    def targets(self, split):
        """The standardised labels (N,); NaN for a row without a label."""
        return (np.array([row.label for row in split.rows], dtype=float) - self.mean) / self.deviation

    def loss(self, logits, labels):
        return ((logits[:, 0] - labels)[labels != -100] ** 2).sum()

    def rescaled(self, logits):
        return logits.astype(np.float64) * self.deviation + self.mean

    @torch.no_grad()
    def finish(self, model):
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        last = linear[-1]
        assert last.out_features == 1, "the head's last layer gives the number"
        last.weight.mul_(self.deviation)
        last.bias.mul_(self.deviation).add_(self.mean)

    def metrics(self, split, row_results):
        return scoring.number_metrics([row.label for row in split.rows], row_results[:, 0])

    def resampled(self, split, row_results):
        true = np.array([row.label for row in split.rows], dtype=float)
        predicted = row_results[:, 0].astype(float)
        return functools.partial(
            intervals.number_figures,
            true=true,
            predicted=predicted,
            place_of_true=np.unique(true, return_inverse=True)[1],
            place_of_predicted=np.unique(predicted, return_inverse=True)[1],
        )

    def mistakes(self, split, features, logits, row_results):
        error = np.abs(row_results[:, 0] - np.array([row.label for row in split.rows], dtype=float))
        return np.where(error == 0, np.nan, error)

    def baseline(self, train, split, known="training"):
        return Baseline("always the mean of the training labels", self.always(split, [self.mean]))

    def predictions(self, split, row_results):
        return {"prediction": [float(f"{value:.9g}") for value in row_results[:, 0]]}
