"""Multiple choice: which of several texts fits a context, as in SWAG; a score for each choice."""

import functools
import re
import string
from collections import Counter

import numpy as np
from transformers import DataCollatorForMultipleChoice

from d2l_bert.messages import UserError, counted
from d2l_bert.training.finetuning import intervals, scoring
from d2l_bert.training.finetuning.cells import EmptyText, check_text, is_filled, json_in
from d2l_bert.training.finetuning.features import Features, truncated
from d2l_bert.training.finetuning.tasks import Task


# A batch has a pair of texts for each choice of its rows.
MOST_CHOICES = 100


class MultipleChoice(Task):
    """
    The right one of several choices.

    The model gets each choice as a pair: the context, and the choice behind the question, if there is one (Zellers et
    al., 2018; Devlin et al., 2018, section 4.4: SWAG's `sent1` and `sent2` with an ending). A softmax over the scores
    of the pairs gives the probabilities. All rows have equally many choices. A row's texts are context, question and
    choices. `row_results` are logits, one for each choice (N, choices).

    Attributes:
        count: how many choices a row has.
        begin: the number of the first choice in the labels, 0 or 1.
    """

    auto_class = "AutoModelForMultipleChoice"
    metrics_shown = ("accuracy",)
    needed_to_predict = ("count", "begin")
    collator = DataCollatorForMultipleChoice
    usual_columns = {
        "context_column": ("context", "sent1", "premise"),
        "question_column": ("question", "sent2"),
        "choices_column": ("choices",),
        "label_column": ("label", "answerKey"),
    }

    def find_columns(self, names):
        super().find_columns(names)
        # A choice each: SWAG's ending0, ending1, ..., COPA's choice1, choice2, WinoGrande's option1 and option2.
        numbered = [name for name in names if re.fullmatch(r"(ending|choice|option)_?\d+", name)]
        if numbered and "choices" not in names and not self.config.choices_column:
            self.columns["choices_column"] = sorted(numbered, key=lambda name: (len(name), name))
        if "context_column" not in self.columns and "question_column" not in self.columns:
            self.columns["context_column"] = ["context"]

    def choices_in(self, row) -> tuple[str, ...]:
        """The choices among the texts of a row: those behind context and question."""
        return row.texts[len(self.options_of_texts()) :]

    def read(self, row, split):
        columns = self.columns["choices_column"]
        names = []  # of the choices, such as A, B and C: the label may be one of them
        if len(columns) == 1:
            choices, names = named_choices(row.cells.get(columns[0]), columns[0])
            places = [f"choice {number} (from 0) of column {columns[0]!r:.100}" for number in range(len(choices))]
        else:
            choices = [row.cells.get(column) for column in columns]
            places = [f"column {column!r:.100}" for column in columns]
        if len(choices) > MOST_CHOICES:
            others = " and others" if len(columns) > 1 else ""
            raise ValueError(
                f"{len(choices):,} choices in column {columns[0]!r:.100}{others}, and {MOST_CHOICES} at most are "
                f"read; give fewer"
            )
        texts = list(self.texts(row.cells))
        for choice, place in zip(choices, places, strict=True):
            texts.append(check_text(choice, place))
        return row._replace(texts=tuple(texts), label=self.label_in(row.cells, names))

    def label_in(self, cells, names: list[str]) -> int | str | None:
        """
        The label of a row: the number of a choice from 0, or a text of which `check_label` makes that number.

        | cell | names of the choices | label |
        |---|---|---|
        | B | A, B, C | 1 |
        | B | none | "B" |
        | 1, or 1.0 | none | "1", the first or the second choice, as `learn` finds |
        | empty, or not read | | None |
        """
        cell = cells.get(self.label_column)
        if not is_filled(cell):
            return None
        label = str(cell).strip().removesuffix(".0")  # pandas writes 1.0 where others are missing
        return names.index(label) if label in names else label

    def learn(self, train):
        labels = {row.label for row in train.rows}
        counts = Counter(len(self.choices_in(row)) for row in train.rows)
        self.count = counts.most_common(1)[0][0]
        counts_from_one = "0" not in labels and str(self.count) in labels
        self.begin = 1 if counts_from_one else 0
        if self.count < 2:
            raise UserError(
                f"{train.title}, {train.rows[0].place}: {counted(self.count, 'choice')} in column "
                f"{self.columns['choices_column'][0]!r}; name a column of lists of two choices at least, or several "
                f"columns, with --choices_column"
            )
        self._name_choices()

    def _name_choices(self):
        # Labels without names of their own: "1", or "A", is the first of choices that are counted from 1.
        self.number_of = {str(number + self.begin): number for number in range(self.count)}
        self.number_of |= {name: number for number, name in enumerate(string.ascii_uppercase[: self.count])}

    def shown_texts(self, row):
        before = row.texts[: len(self.options_of_texts())]
        return [*before, " / ".join(self.choices_in(row))]

    def shown_label(self, row):
        return "" if row.label is None else self.choices_in(row)[row.label]

    def about_labels(self, rows):
        counts = Counter(row.label + self.begin for row in rows)
        right = ", ".join(f"{number} {counts[number]:,}" for number in sorted(counts))
        return f"the right one of {self.count} choices, from {self.begin} on, in {self.label_column!r:.40}: {right}"

    def learnt(self):
        return {**super().learnt(), "count": self.count, "begin": self.begin}

    def restore(self, learnt):
        super().restore(learnt)
        self.count = learnt["count"]
        self.begin = learnt["begin"]
        if not 2 <= self.count <= MOST_CHOICES:
            raise ValueError("learnt.count is no number of choices")
        self._name_choices()

    def check_label(self, row, split):
        super().check_label(row, split)
        count = len(self.choices_in(row))
        if count != self.count:
            raise ValueError(
                f"{counted(count, 'choice')}, and most training rows have {self.count}; give every row equally many"
            )
        if isinstance(row.label, str):
            row = row._replace(label=self.number_of[row.label])
        return row

    def features(self, split, tokenizer, max_seq_length):
        firsts = []
        seconds = []
        for row in split.rows:
            choices = self.choices_in(row)
            if len(choices) != self.count:  # in a row of `predict`, whose label is not checked
                raise UserError(
                    f"{split.title}, {row.place}: {counted(len(choices), 'choice')}, and the model has learnt to "
                    f"choose from {self.count}; give every row so many"
                )
            # A row's texts are the context, the question if there is one, and the choices.
            question = [text.strip() for text in row.texts[1 : -self.count]]
            for choice in choices:
                firsts.append(row.texts[0])
                seconds.append(" ".join([*question, choice]))
        pairs, windows, note = truncated(tokenizer, [firsts, seconds], max_seq_length)
        features = []
        for number, row in enumerate(split.rows):
            of_row = pairs[number * self.count : (number + 1) * self.count]
            inputs = {name: [pair[name] for pair in of_row] for name in of_row[0]}
            features.append({**inputs, "labels": row.label if split.is_labelled else -100})
        return Features(features, windows, note)

    def is_right(self, split, row_results) -> np.ndarray:
        """Whether the right choice was chosen, for each row (N,)."""
        return row_results.argmax(-1) == [row.label for row in split.rows]

    def resampled(self, split, row_results):
        return functools.partial(intervals.mean_figures, scores={"accuracy": self.is_right(split, row_results)})

    def mistakes(self, split, features, logits, row_results):
        is_right = self.is_right(split, row_results)
        return np.where(is_right, np.nan, scoring.probabilities(row_results).max(-1))

    def predictions(self, split, row_results):
        chosen = row_results.argmax(-1)
        numbers = range(self.begin, self.begin + self.count)
        texts = [self.choices_in(row)[number] for row, number in zip(split.rows, chosen, strict=True)]
        return {
            "prediction": [numbers[number] for number in chosen],
            "predicted_choice": texts,
            **scoring.probability_columns(numbers, row_results),
        }


def named_choices(cell: object, column: str) -> tuple[list, list[str]]:
    """
    The choices in a cell with a list of them, and their names; [] where they have none.

    Raises:
        ValueError: the cell is no list, or its names are not one for each choice. `EmptyText` if there is none.
    """
    place = f"column {column!r:.100}"
    names = []
    choices = json_in(cell, column)
    if isinstance(choices, dict):  # as in CommonsenseQA and ARC
        names = choices.get("label") or []
        choices = choices.get("text")
        is_list = isinstance(names, list)
        if not is_list or (isinstance(choices, list) and len(names) not in (0, len(choices))):
            raise ValueError(f"{place} has not one label for each of its choices; correct them")
        names = [str(name) for name in names]
        if len(set(names)) < len(names):
            raise ValueError(f"{place} has the same label for two choices; correct them")
    if not is_filled(choices):
        raise EmptyText(f"{place} is empty; write a list of choices, or take the row out")
    if not isinstance(choices, list):
        raise ValueError(
            f"{place} holds {type(choices).__name__}, not a list of choices; give JSONL or Parquet with "
            f"lists, or name a column for each choice with --choices_column"
        )
    return choices, names
