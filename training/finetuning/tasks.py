"""`Task`: what a task brings to a run: its columns, rows, features, loss, metrics, predictions."""

import re
from typing import NamedTuple

import numpy as np
import torch
from transformers import DataCollatorWithPadding

from d2l_bert.messages import UserError
from d2l_bert.modeling.records import Learnt
from d2l_bert.training.finetuning import intervals, scoring
from d2l_bert.training.finetuning.cells import SURROGATE, check_text, listed
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.features import Features, Window
from d2l_bert.training.finetuning.rows import Row, Split
from d2l_bert.training.finetuning.scoring import Sides


# The options whose columns rows may lack.
OPTIONAL = ("text_pair_column", "context_column", "question_column")


class Baseline(NamedTuple):
    """A prediction that needs no model, in words, and its metrics of a split."""

    prediction: str
    metrics: dict[str, float]


class Task:
    """
    A task. `all_tasks.py` names a subclass for each of `config.TASKS`.

    The run calls `find_columns` with the names of the training rows' columns, `read` with every row, `learn` with the
    training rows, `check_label` with every row that was read, and `features` with every split. A `ValueError` about a
    row says what is wrong in which column, and the way out.

    What a model says goes three steps, of which a subclass may change each:

    | step | takes | gives |
    |---|---|---|
    | `logits` | the model's outputs for a batch | the part that the task reads |
    | `rescaled` | the logits of all features, while the model is in training | the same in the units of the labels |
    | `by_row` | these | `row_results`: what they say about each row |

    `row_results` takes the last two steps; `metrics`, `predictions` and `sides` read what it gives. For example, a
    text of 900 words that is cut into 4 windows has 4 features, whose logits `by_row` joins to one list of 900 tags.

    Only regression rescales: its model learns standardised numbers. After the training, `finish` writes their mean and
    deviation into the model, whose outputs then are in the units of the labels by themselves.

    | task | `Row.label` |
    |---|---|
    | text-classification | the name of the class |
    | multi_label_classification | the list of the names of the labels, which may be empty |
    | regression | the number |
    | token-classification | the list of the names of the tags, one for each word |
    | question-answering | the list of the answers |
    | multiple-choice | the number of the right choice, from 0; before `check_label`, it may be a name of that choice |

    In all tasks, a row without a label has None. So has every row of `predict`, where no label is read.

    A subclass defines these methods:

    - `read(row, split)`: the `Row` with texts and label, which are in its cells; raises `ValueError`;
    - `learn(train)` learns from the training rows what the labels are; raises `UserError` if they cannot be learnt;
    - `features(split, tokenizer, max_seq_length)`: the `Features` of a split; in a split without labels, their
      `labels` are not read. Raises `UserError` for a tokenizer or a length that cannot be used;
    - `resampled(split, row_results)`: a function of `counts`, how often each row is drawn, that gives the metrics of
      what is drawn (`intervals`), for which it need not give the `shares_of_rows`;
    - `mistakes(split, features, logits, row_results)`: how sure the model is of what it says wrongly in each row,
      or for numbers how far it is off; NaN for a row that is right (N,);
    - `predictions(split, row_results)`: columns with the predictions for each row of a split;
    - `about_labels(rows)`, if it has no classes.

    `learnt` gives what `learn` has found, for run_config.json; in `predict`, `restore` takes it back. A subclass that
    learns more than classes extends both.

    Attributes:
        auto_class: the Auto class that loads the model, such as `AutoModelForSequenceClassification`.
        main_metric: the metric that chooses, unless `metric_for_best_model` or a named data set gives another.
        metrics_shown: the metrics in the order of the tables; those in `scoring.LOWER_IS_BETTER` are best when small.
        collator: the class of the function that makes a padded batch of features.
        default_length: the default of `max_seq_length`.
        usual_columns: by the option that names a column, its usual names; the columns of texts stand in the order in
            which the model reads their texts.
        columns: by the option, the columns of this run, which `find_columns` finds, in the same order.
        reads_labels: whether `read` reads labels; a task that was restored, as in `predict`, does not before
            `read_labels`.
        classes: the names of the classes in the order of their numbers, which `learn` finds; [] for tasks without.
        number_of: by the name of a label, its number; {} for tasks without classes or choices.
        settings: the fields of the model's configuration that the task decides: `num_labels`, `id2label`, ...
        problem_type: that of the model's configuration, which has one for `AutoModelForSequenceClassification`.
        has_unanswerable: whether training rows have questions without an answer.
        no_label: for a message: what is wrong with an empty cell in the column of labels, and the way out.
        shares_of_rows: the metrics that are the share of rows for which something holds.
        mistake: the name of the column with what `mistakes` gives.
        needed_to_predict: the entries of `learnt`, beside the columns, that `predict` needs.
        least_texts: the least number of columns of texts, without those of choices.
        more_columns: columns that `read` uses if rows have them, and that no option names.
    """

    problem_type = None
    has_unanswerable = False
    no_label = "is empty; write a label, or take the row out"
    main_metric = "accuracy"
    collator = DataCollatorWithPadding
    default_length = 128
    shares_of_rows: tuple[str, ...] = ("accuracy",)
    mistake = "confidence in the mistake"
    needed_to_predict: tuple[str, ...] = ()
    least_texts = 1
    more_columns: tuple[str, ...] = ()

    def __init__(self, config: FinetuneConfig):
        self.config = config
        self.columns: dict[str, list[str]] = {}
        self.reads_labels = True
        self.classes: list[str] = []
        self.number_of: dict[str, int] = {}
        self.settings: dict = {"problem_type": self.problem_type}

    def metric(self) -> str:
        """
        The name of the metric that chooses checkpoint, rate and seed.

        Raises:
            UserError: `metric_for_best_model` is not a metric of the task.
        """
        chosen = self.config.metric_for_best_model or self.config.named_data_set.get("metric", self.main_metric)
        name = chosen.removeprefix("eval_")
        known = (*self.metrics_shown, "loss")
        if name not in known:
            raise UserError(
                f"metric_for_best_model {chosen!r}: --task {self.config.task} has {', '.join(known)}; give one"
            )
        return name

    # -----------------------------------------------------------------------------------------------------------------
    # What a finished model needs again

    def learnt(self) -> Learnt:
        """What the task has learnt of the training rows, for run_config.json."""
        learnt: Learnt = {"columns": self.columns, "classes": self.classes}
        if self.number_of:
            learnt["number_of"] = self.number_of
        return learnt

    def restore(self, learnt: Learnt) -> None:
        """
        Take what a finished run has learnt, in place of `find_columns` and `learn`; the task then reads no labels.

        Raises:
            ValueError: a part of it is missing, or cannot be that of a finished run of this task.
        """
        for name in ("columns", *self.needed_to_predict):
            if name not in learnt:
                raise ValueError(f"learnt lacks the entry {name!r}")
        self._restore_columns(learnt["columns"])
        if "classes" in self.needed_to_predict:
            self._restore_classes(learnt["classes"])
        self.reads_labels = False

    def read_labels(self, columns: list[str]) -> None:
        """
        Read the labels of rows again, after `restore`.

        Args:
            columns: of the labels; [] for those of the training.

        Raises:
            ValueError: neither these nor what was restored name a column of labels.
        """
        if columns:
            self.columns["label_column"] = columns
        if "label_column" not in self.columns:
            raise ValueError("learnt.columns names no column of labels; name it with --label_column")
        self.reads_labels = True

    def _restore_columns(self, columns):
        for option in self.usual_columns:
            if names := columns.get(option):
                self.columns[option] = names
        of_texts = [self.columns[option] for option in self.options_of_texts()]
        if len(of_texts) < self.least_texts or any(len(names) != 1 for names in of_texts):
            raise ValueError("learnt.columns does not name a column for each text of a row")
        if "choices_column" in self.usual_columns and "choices_column" not in self.columns:
            raise ValueError("learnt.columns names no column of choices")

    def _restore_classes(self, names):
        if not names:
            raise ValueError("learnt.classes is empty")
        if len(set(names)) < len(names):
            raise ValueError("learnt.classes has two classes of one name")
        if any(SURROGATE.search(name) for name in names):
            raise ValueError("learnt.classes has half a character (a surrogate alone)")
        self.classes = names
        self.number_of = {name: number for number, name in enumerate(names)}

    # -----------------------------------------------------------------------------------------------------------------
    # Columns

    @property
    def label_column(self) -> str | None:
        """The column of labels, the first one if there are several; None where labels are not read."""
        return self.columns["label_column"][0] if self.reads_labels else None

    def options_of_texts(self) -> list[str]:
        """
        The options whose columns hold a text each: all but those of choices and of labels.

        They are in the order in which `usual_columns` has them. For example, question answering has the question
        before the context, and multiple choice the context before the question.
        """
        return [option for option in self.columns if option not in ("choices_column", "label_column")]

    def find_columns(self, names: list[str]) -> None:
        """
        Find the columns: the option's, or a usual one, or the named data set's; `check_columns` follows.

        Args:
            names: of the columns of the training rows.
        """
        for option, usual in self.usual_columns.items():
            candidates = list(usual)
            if option in self.config.named_data_set:
                candidates.append(self.config.named_data_set[option])
            given = getattr(self.config, option)
            found = next((name for name in candidates if name in names), None)
            is_needed = option not in OPTIONAL or option in self.config.named_data_set
            if given:
                self.columns[option] = given if isinstance(given, list) else [given]
            elif found is not None:
                self.columns[option] = [found]
            elif is_needed:
                self.columns[option] = [candidates[0]]  # which `check_columns` then refuses, and names the option

    def check_columns(self, title: str, names: list[str], has_labels: bool = True) -> None:
        """
        Refuse rows without one of the columns, and a column that has two uses.

        Args:
            title: what the rows are, for the message.
            names: of their columns.
            has_labels: whether the column of labels must be there.

        Raises:
            UserError: as above.
        """
        used = [column for columns in self.columns.values() for column in columns]
        for column in used:
            if used.count(column) > 1:
                raise UserError(f"column {column!r:.100} cannot have two uses; name another column")
        for option, columns in self.columns.items():
            for column in columns:
                if column not in names and (has_labels or option != "label_column"):
                    raise UserError(
                        f"{title}: no column {column!r:.100}; it has {listed(names) or 'none'}: name one with "
                        f"--{option}"
                    )

    # -----------------------------------------------------------------------------------------------------------------
    # Rows

    def texts(self, cells: dict) -> tuple[str, ...]:
        """The texts in a row's columns, without choices; raises `ValueError` as `check_text`."""
        texts = []
        for option in self.options_of_texts():
            column = self.columns[option][0]
            way_out = f", or name another column with --{option}"
            texts.append(check_text(cells.get(column), f"column {column!r:.100}", way_out))
        return tuple(texts)

    def check_label(self, row: Row, split: Split) -> Row:
        """
        Check the label of a row that was read, and give the row back.

        Raises:
            ValueError: it has no label and others of its split have, or the training rows have not shown how to learn
                it.
        """
        if split.is_labelled and row.label is None and not self.has_unanswerable:
            raise ValueError(f"column {self.label_column!r:.100} {self.no_label}")
        for name in self.names_of(row):
            if name not in self.number_of:
                known = listed(list(self.number_of))
                way_out = ", or add training rows with it" if self.classes else ""
                raise ValueError(
                    f"label {name!r:.100} in column {self.label_column!r:.100} is none of {known}; correct the "
                    f"label{way_out}"
                )
        return row

    def names_of(self, row: Row) -> list[str]:
        """The names of the classes or choices in the label of a row; [] for a label of another kind, or for none."""
        if isinstance(row.label, str):
            return [row.label]
        if not self.classes:  # a number, or a list of answers
            return []
        return row.label or []

    def learn_classes(
        self, train: Split, found: set[str], given_order: list[str] | tuple[str, ...] | None, least: int = 2
    ) -> None:
        """
        Set the classes.

        Their order is that of `given_order`; else that of their numbers, if all names are whole numbers; else that of
        the alphabet.

        Args:
            found: the names in the training rows.
            given_order: all names in their order, if the dataset or its publishers give it; a name may stand there
                twice, where two differ only in how a letter such as ü is encoded: `cells.name_of` makes both NFC.
            least: the fewest classes; of one alone there is nothing to learn.

        Raises:
            UserError: there are too few classes.
        """
        if given_order:
            self.classes = [name for name in dict.fromkeys(given_order) if name in found]
        elif all(re.fullmatch(r"[+-]?\d{1,18}", name) for name in found):
            self.classes = sorted(found, key=lambda name: (int(name), name))
        else:
            self.classes = sorted(found)
        if len(self.classes) < least:
            raise UserError(
                f"{train.title}: every row has the label {self.classes[0]!r:.100} in column "
                f"{self.label_column!r:.100}; there is nothing to tell apart: give rows of two classes at least, or "
                f"name another column with --label_column"
            )
        self.number_of = {name: number for number, name in enumerate(self.classes)}
        self.settings |= {
            "num_labels": len(self.classes),
            "id2label": dict(enumerate(self.classes)),
            "label2id": dict(self.number_of),
        }

    # -----------------------------------------------------------------------------------------------------------------
    # Rows as a person looks at them

    def shown_texts(self, row: Row) -> list[str]:
        """The texts of a row; of words one text, with its tag behind each word."""
        return list(row.texts)

    def shown_label(self, row: Row) -> str:
        """The label of a row; "" for a row without, and where its tags stand in the text."""
        return "" if row.label is None else str(row.label)

    def about_labels(self, rows: list[Row]) -> str:
        """A line about the labels of rows, for a task without classes."""
        raise NotImplementedError

    def about_classes(self) -> str:
        """What the classes are, such as "classes in 'label'"."""
        return f"classes in {self.label_column!r:.40}"

    def remarks(self, rows: list[Row]) -> list[str]:
        """A line for each odd thing about rows that is no error, with the way out."""
        return []

    # -----------------------------------------------------------------------------------------------------------------
    # The model and its outputs

    def logits(self, outputs, attention_mask: torch.Tensor) -> torch.Tensor:
        """What the task reads of a model's outputs for a batch, (B, ...); with tokens, they are in dimension 1."""
        return outputs.logits

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum of the losses of all labels that are not -100."""
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    def rescaled(self, logits: np.ndarray) -> np.ndarray:
        """The outputs of a model in training, in the units of the labels."""
        return logits

    def finish(self, model) -> None:
        """Change a trained model in place, so that its outputs are those of `rescaled`."""

    def by_row(self, split: Split, windows: list[Window], logits: np.ndarray):
        """What the logits of all features, in their order, say about each row: the logits, where a row has one."""
        return logits

    def row_results(self, split: Split, features: Features, logits: np.ndarray, is_finished: bool = False):
        """
        What a model says about each row of a split.

        Args:
            logits: of all features of the split, in their order.
            is_finished: whether `finish` has changed the model, whose outputs then are in the units of the labels.
        """
        in_units_of_labels = logits if is_finished else self.rescaled(logits)
        return self.by_row(split, features.windows, in_units_of_labels)

    def metrics(self, split: Split, row_results) -> dict[str, float]:
        """The metrics of a labelled split by name, without the loss: those of its rows, each drawn once."""
        figures_of = self.resampled(split, row_results)
        once_each = np.ones(len(split.rows), dtype=int)
        return {name: float(value) for name, value in figures_of(once_each).items()}

    def estimates(self, split: Split, row_results) -> dict[str, intervals.Estimate]:
        """The metrics of a labelled split, with standard errors and intervals."""
        metrics = self.metrics(split, row_results)
        figures_of = self.resampled(split, row_results)
        return intervals.estimates(metrics, self.shares_of_rows, len(split.rows), figures_of)

    def baseline(self, train: Split, split: Split, known: str = "training") -> Baseline | None:
        """
        The baseline of a split, which needs the training rows, but no model; None for a task without one.

        Args:
            known: what the rows are called whose labels it knows.
        """
        return None

    def entry_of_baseline(self, baseline: Baseline, metric: str, of_model: float) -> dict:
        """
        A baseline as files have it: its `prediction` in words, its `figures`, and `is_beaten`: is a model better?

        Args:
            metric: the one that decides.
            of_model: the model's value of it.
        """
        shown = {}
        for name, value in baseline.metrics.items():
            # A correlation of a constant prediction is 0 by definition, and says nothing.
            if value or scoring.is_share(name):
                shown[name] = value
        is_beaten = scoring.goodness(metric, of_model) > scoring.goodness(metric, baseline.metrics[metric])
        return {"prediction": baseline.prediction, "figures": shown, "is_beaten": is_beaten}

    def class_of_f1(self) -> str | None:
        """The class that the metric `f1` is of; None where it is a mean over several, or there is none."""
        return None

    def in_csv(self, predicted: dict[str, list]) -> dict[str, list]:
        """The columns of `predictions` as a CSV file has them, where lists are JSON unless a task joins them."""
        return predicted

    def sides(self, split: Split, row_results) -> Sides | None:
        """The true and the predicted classes in a labelled split; None for a task without classes to report on."""
        return None
