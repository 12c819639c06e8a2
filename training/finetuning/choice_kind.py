"""The kind `multiple_choice`: which of several texts fits a context, as in SWAG; a score for each choice."""

import re
import string
from collections import Counter

import numpy as np
from transformers import DataCollatorForMultipleChoice

from d2l_bert.messages import UserError, counted
from d2l_bert.training.finetuning.kind import (
    Features,
    Kind,
    check_different,
    check_text,
    choose_column,
    in_chunks,
    is_filled,
    json_in,
    rounded,
    softmax,
    text_in,
)
from d2l_bert.training.finetuning.tables import Row


# Columns with a choice each: SWAG's ending0, ending1, ..., or choice0, option1 and the like.
CHOICE_COLUMN = re.compile(r"(ending|choice|option)_?(\d+)")

LETTERS = string.ascii_uppercase


class MultipleChoice(Kind):
    """
    The right one of several choices.

    The model gets each choice as a pair: the context, and the choice behind the question, if there is one (Zellers et
    al., 2018; Devlin et al., 2018, section 4.4: SWAG's `sent1` and `sent2` with an ending). A softmax over the scores
    of the pairs gives the probabilities. All rows have equally many choices.
    """

    auto_class = "AutoModelForMultipleChoice"
    pipeline_task = None  # Transformers 5 has no pipeline for multiple choice
    main_metric = "accuracy"
    metrics_shown = ("accuracy",)

    def find_columns(self, train):
        config, columns = self.config, train.columns
        first = {"context_column": ("context", "sent1"), "question_column": ("question", "sent2")}
        self.first = {  # the columns of the context and of the question, at least one of both
            option: choose_column(train, option, getattr(config, option), *usual)
            for option, usual in first.items()
            if getattr(config, option) or any(name in columns for name in usual)
        }
        if not self.first:
            train.require("context", "context_column")
        numbered = [(match[1], int(match[2]), name) for name in columns if (match := CHOICE_COLUMN.fullmatch(name))]
        self.choices = config.choices_column or (
            ["choices"] if "choices" in columns or not numbered else [name for *_, name in sorted(numbered)]
        )
        for column in self.choices:
            train.require(column, "choices_column")
        self.label = [
            choose_column(train, "label_column", (self.config.label_column or [None])[0], "label", "answerKey")
        ]
        check_different([*self.first.values(), *self.choices, *self.label])
        self.count = None

    def parse(self, cells, table):
        for option, column in self.first.items():
            table.require(column, option)
        for column in self.choices:
            table.require(column, "choices_column")
        first = [text_in(cells, column, option) for option, column in self.first.items()]
        choices, names = [cells[column] for column in self.choices], []
        places = [f"column {column!r}" for column in self.choices]
        if len(self.choices) == 1:
            choices = json_in(cells[self.choices[0]], self.choices[0])
            if isinstance(choices, dict):  # as in CommonsenseQA and ARC
                choices, names = choices.get("text"), [str(name) for name in choices.get("label") or []]
            if not isinstance(choices, list):
                raise ValueError(
                    f"column {self.choices[0]!r} holds {type(choices).__name__}, not a list of choices; give JSONL or "
                    f"Parquet with lists, or name a column for each choice with --choices_column"
                )
            places = [f"choice {number} (from 0) of column {self.choices[0]!r}" for number in range(len(choices))]
        for choice, place in zip(choices, places, strict=True):
            check_text(choice, place)
        if self.count not in (None, len(choices)):
            raise ValueError(
                f"{counted(len(choices), 'choice')}, and most training rows have {self.count}; give every row equally "
                f"many"
            )
        value = cells.get(self.label[0])
        classes = table.class_names.get(self.label[0])
        if classes and isinstance(value, int) and 0 <= value < len(classes):
            value = classes[value]
        if not is_filled(value) or (table.is_dataset and value == -1):
            return Row((*first, *choices))
        label = re.sub(r"\.0+$", "", str(value).strip())
        numbers = list(map(str, range(len(choices))))
        for known in (names, numbers, list(LETTERS[: len(choices)])):
            if label in known:
                return Row((*first, *choices), known.index(label))
        raise ValueError(
            f"label {label!r} in column {self.label[0]!r} is not the number of a choice (from 0), its letter or its "
            f"name; correct the label"
        )

    def read(self, table):
        """As in `Kind`; the training rows, which are read first, say how many choices a row has."""
        if self.count is None:
            counts = Counter(len(row.texts) for row in super().read(table)[0].rows)
            self.recorded["choices"] = self.count = counts.most_common(1)[0][0] - len(self.first)
            if self.count < 2:
                raise UserError(
                    f"{table.place(0)}: {counted(self.count, 'choice')} in column {self.choices[0]!r}; name a column "
                    f"of lists of two choices at least, or several columns, with --choices_column"
                )
        return super().read(table)

    def choices_of(self, row: Row) -> tuple[str, ...]:
        """The choices of a row."""
        return row.texts[-self.count :]

    def learn(self, train):
        """Nothing is left to learn: `read` has found the number of choices."""

    def targets(self, table):
        return np.array([row.label for row in table.rows])

    def features(self, table, tokenizer, max_seq_length):
        targets = self.targets(table).tolist() if self.is_labelled(table) else [-100] * len(table)
        rows, truncated = [], 0
        for first, chunk in in_chunks(table.rows):
            firsts, seconds = [], []
            for row in chunk:
                *context, last = row.texts[: -self.count]
                for choice in self.choices_of(row):
                    firsts.append(context[0] if context else last)
                    seconds.append(f"{last.strip()} {choice}" if context else choice)
            whole = tokenizer(firsts, seconds, verbose=False)["input_ids"]
            cut = tokenizer(firsts, seconds, truncation=True, max_length=max_seq_length)
            for number in range(len(chunk)):
                pairs = range(number * self.count, (number + 1) * self.count)
                truncated += any(len(cut["input_ids"][pair]) < len(whole[pair]) for pair in pairs)
                rows.append({name: [values[pair] for pair in pairs] for name, values in cut.items()})
                rows[-1]["labels"] = targets[first + number]
        return Features(rows, f"{truncated:,} are truncated to {max_seq_length} tokens" if truncated else "")

    def collator(self, tokenizer):
        return DataCollatorForMultipleChoice(tokenizer, pad_to_multiple_of=8)

    def metrics(self, table, features, predictions):
        return {"accuracy": float((predictions.argmax(-1) == self.targets(table)).mean())}

    def predicted_columns(self, table, features, predictions):
        chosen, probabilities = predictions.argmax(-1).tolist(), softmax(predictions)
        columns = {
            "prediction": chosen,
            "predicted_choice": [self.choices_of(row)[number] for row, number in zip(table.rows, chosen, strict=True)],
        }
        return columns | {f"probability of {n}": rounded(probabilities[:, n]) for n in range(self.count)}
