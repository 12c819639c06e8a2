"""The kind `multiple_choice`: which of several texts fits a context, as in SWAG; a score for each choice."""

import re
from collections import Counter
from pathlib import Path

import numpy as np

from d2l_bert.errors import UserError
from d2l_bert.progress import counted
from d2l_bert.training.finetuning.bars import draw_choice_probabilities
from d2l_bert.training.finetuning.kind import (
    Features,
    Kind,
    check_text,
    has_text,
    json_list,
    no_json_list,
    whole_number,
)
from d2l_bert.training.finetuning.text_kinds import softmax


# Columns with a choice each: SWAG's ending0, ending1, ..., or choice0, option1 and the like.
CHOICE_COLUMN = re.compile(r"(ending|choice|option)_?(\d+)")

# What the labels of a column may be, the usual first.
RULES = ("number", "letter", "text")

PROBABILITY_FILE = "true_choices.png"
ROWS_AT_ONCE = 500


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

        def choose(given, names):
            return given or next((name for name in names if name in columns), None)

        self.context = choose(config.context_column, ("context", "sent1"))
        self.question = choose(config.question_column, ("question", "sent2"))
        if self.context is None and self.question is None:
            train.require("context", "context_column")
        for column, option in ((self.context, "context_column"), (self.question, "question_column")):
            if column is not None:
                train.require(column, option)
        numbered = [(match[1], int(match[2]), name) for name in columns if (match := CHOICE_COLUMN.fullmatch(name))]
        self.choices = config.choices_column or (
            ["choices"] if "choices" in columns or not numbered else [name for *_, name in sorted(numbered)]
        )
        for column in self.choices:
            train.require(column, "choices_column")
        self.label = config.label_column or [choose(None, ("label", "answerKey")) or "label"]
        train.require(self.label[0], "label_column")
        chosen = [*filter(None, (self.context, self.question)), *self.choices, *self.label]
        if len(set(chosen)) < len(chosen):
            raise UserError(f"column {max(chosen, key=chosen.count)!r} cannot be two of context, question and choices")

    def learn(self, train):
        if not self.is_labelled(train):
            raise UserError(f"{train.label}: column {self.label[0]!r} is empty; training rows need labels")
        counts = Counter(len(self._choices(train, row)[0]) for row in range(len(train)))
        self.count = counts.most_common(1)[0][0]
        if self.count < 2:
            raise UserError(
                f"{train.place(0)}: {counted(self.count, 'choice')} in {_listed(self.choices)}; name a column of "
                f"lists of two choices at least, or several columns, with --choices_column"
            )
        self._learn_rule(train)

    def _learn_rule(self, train):
        """Choose how all labels are read: the rule by which every row's label is a choice."""
        known = [self._readings(train, row) for row in range(len(train))]
        reads_all = [rule for rule in RULES if all(rule in found for found in known)]
        for row, found in enumerate(known):
            places = {found[rule] for rule in reads_all}
            if len(places) > 1 and isinstance(train.columns[self.label[0]][row], str):
                one, other = reads_all[0], next(rule for rule in reads_all if found[rule] != found[reads_all[0]])
                raise UserError(
                    f"{train.place(row)}: label {train.columns[self.label[0]][row]!r} in column {self.label[0]!r} is "
                    f"the {one} of choice {found[one]} and the {other} of choice {found[other]}, counted from 0; "
                    f"write labels that are only one of both, such as {'letters' if one == 'number' else 'numbers'}"
                )
        reads_most = max(RULES, key=lambda rule: sum(rule in found for found in known))
        self.rule = reads_all[0] if reads_all else reads_most
        counts = [match[2] for column in self.choices if (match := CHOICE_COLUMN.fullmatch(column))]
        if len(counts) > 1 and "0" not in counts and self.rule == "number" and reads_all:
            if all(found["number"] > 0 for found in known):
                self.notes.append(
                    f"the columns of choices count from {min(map(int, counts))}, and labels count from 0: label 0 is "
                    f"{self.choices[0]!r}, and no row has label 0; if your labels count from 1, subtract 1"
                )

    def _choices(self, table, row) -> tuple[list[str], list[str]]:
        """The choices of a row, and their names in a dataset that names them (such as A, B, C), else []."""
        if len(self.choices) > 1:
            return [table.require(column, "choices_column")[row] for column in self.choices], []
        value, names = table.require(self.choices[0], "choices_column")[row], []
        if isinstance(value, str):
            try:
                value = json_list(value) or value
            except ValueError:
                raise no_json_list(table, row, self.choices[0], value) from None
        if isinstance(value, dict):  # as in CommonsenseQA and ARC
            value, names = value.get("text"), [str(name) for name in value.get("label") or []]
        if not isinstance(value, list):
            raise UserError(
                f"{table.place(row)}: column {self.choices[0]!r} holds {type(value).__name__}, not a list of choices; "
                f"give JSONL or Parquet with lists, or name a column for each choice with --choices_column"
            )
        return value, names if len(names) == len(value) else []

    def is_labelled(self, table):
        return any(_is_given(table, value) for value in table.columns.get(self.label[0], []))

    def usable(self, table):
        if not table.is_dataset:
            return table, {}
        labels = table.columns.get(self.label[0], [])
        sizes = [len(self._choices(table, row)[0]) for row in range(len(table))]
        if not hasattr(self, "count_on_hub"):  # `usable` is called with the training rows first
            self.count_on_hub = Counter(sizes).most_common(1)[0][0] if sizes else 0
        counts, kept, is_labelled = Counter(), [], self.is_labelled(table)
        for row in range(len(table)):
            if sizes[row] != self.count_on_hub:
                counts["another number of choices"] += 1
            elif not all(map(has_text, [*self._first_texts(table, row), *self._choices(table, row)[0]])):
                counts["an empty text"] += 1
            elif is_labelled and not _is_given(table, labels[row]):
                counts["no label"] += 1
            else:
                kept.append(row)
        return table.select(kept) if counts else table, counts

    def _first_texts(self, table, row):
        """The context and the question, as far as there are columns of them."""
        named = ((self.context, "context_column"), (self.question, "question_column"))
        return [table.require(column, option)[row] for column, option in named if column is not None]

    def check(self, table):
        is_labelled = self.is_labelled(table)
        columns = [column for column in (self.context, self.question) if column is not None]
        for row in range(len(table)):
            choices, _ = self._choices(table, row)
            if len(choices) != self.count:
                raise UserError(
                    f"{table.place(row)}: {counted(len(choices), 'choice')}, and most training rows have "
                    f"{self.count}; give every row equally many"
                )
            names = [f"column {name!r}" for name in (*columns, *self.choices)]
            if len(self.choices) == 1:
                column = self.choices[0]
                names[-1:] = [f"choice {number} (from 0) of column {column!r}" for number in range(len(choices))]
            for name, text in zip(names, [*self._first_texts(table, row), *choices], strict=True):
                check_text(table, row, name, text, "write a text")
            if is_labelled:
                self._target(table, row)

    def _readings(self, table, row) -> dict[str, int]:
        """The number of the choice, from 0, that a label means by each of `RULES`; without the rules that fail."""
        value = whole_number(table.columns[self.label[0]][row])
        choices, names = self._choices(table, row)
        if not _is_given(table, value):
            raise UserError(f"{table.place(row)}: column {self.label[0]!r} is empty; write the number of a choice")
        text = str(value).strip()
        class_names = table.class_names.get(self.label[0])
        if class_names and isinstance(value, int) and 0 <= value < len(class_names):
            text = class_names[value]
        if text in names:
            return {rule: names.index(text) for rule in RULES}
        found = {}
        if re.fullmatch(r"[0-9]+", text) and int(text) < len(choices):
            found["number"] = int(text)
        if not names and re.fullmatch(r"[A-Z]", text) and ord(text) - ord("A") < len(choices):
            found["letter"] = ord(text) - ord("A")
        if choices.count(text) == 1:
            found["text"] = choices.index(text)
        return found

    def _target(self, table, row) -> int:
        """
        The number of the right choice, from 0: the label is this number, the choice's name, a letter, or its text.

        Raises:
            UserError: the label is none of them, or the text of several choices, or another of them than in the other
                training rows.
        """
        found = self._readings(table, row)
        if self.rule in found:
            return found[self.rule]
        value, (choices, names) = table.columns[self.label[0]][row], self._choices(table, row)
        text = str(value).strip()
        allowed = ", ".join(names) if names else f"0 to {len(choices) - 1}, counted from 0"
        fault = f"is the text of {choices.count(text)} equal choices" if text in choices else "is no choice"
        if found:
            fault = f"is the {next(iter(found))} of a choice, and most training rows have its {self.rule}"
        elif self.rule != "number" and not names:
            raise UserError(
                f"{table.place(row)}: label {value!r} in column {self.label[0]!r} {fault}; write the {self.rule} of a "
                f"choice, as in the other rows"
            )
        raise UserError(
            f"{table.place(row)}: label {value!r} in column {self.label[0]!r} {fault}; write one of {allowed}"
        )

    def targets(self, table) -> np.ndarray:
        """The number of the right choice of each row (N,)."""
        return np.array([self._target(table, row) for row in range(len(table))], dtype=np.int64)

    def texts(self, table):
        return [(*self._first_texts(table, row), *self._choices(table, row)[0]) for row in range(len(table))]

    def data_record(self):
        return {"labels": None, "has_pairs": True, "choices": self.count}

    def features(self, table, tokenizer, max_seq_length):
        targets = self.targets(table) if self.is_labelled(table) else None
        rows, truncated = [], 0
        for begin in range(0, len(table), ROWS_AT_ONCE):
            numbers = range(begin, min(begin + ROWS_AT_ONCE, len(table)))
            firsts, seconds = [], []
            for row in numbers:
                *context, last = self._first_texts(table, row)
                for choice in self._choices(table, row)[0]:
                    firsts.append(context[0] if context else last)
                    seconds.append(f"{last.strip()} {choice}" if context else choice)
            whole = tokenizer(firsts, seconds, verbose=False)["input_ids"]
            cut = tokenizer(firsts, seconds, truncation=True, max_length=max_seq_length)
            for number, row in enumerate(numbers):
                pairs = range(number * self.count, (number + 1) * self.count)
                truncated += any(len(cut["input_ids"][pair]) < len(whole[pair]) for pair in pairs)
                made = {name: [values[pair] for pair in pairs] for name, values in cut.items()}
                if targets is not None:
                    made["labels"] = int(targets[row])
                rows.append(made)
        return Features(rows, truncated)

    def collator(self, tokenizer):
        import torch

        def collate(features):
            names = [name for name in features[0] if name not in self.label_names]
            flat = [
                {name: feature[name][choice] for name in names} for feature in features for choice in range(self.count)
            ]
            padded = tokenizer.pad(flat, pad_to_multiple_of=8, return_tensors="pt")
            batch = {name: values.view(len(features), self.count, -1) for name, values in padded.items()}  # (B, C, T)
            if "labels" in features[0]:
                batch["labels"] = torch.tensor([feature["labels"] for feature in features])
            return batch

        return collate

    def metrics(self, table, features, predictions):
        return {"accuracy": float((predictions.argmax(-1) == self.targets(table)).mean())}

    def predicted_columns(self, table, features, predictions):
        chosen, probabilities = predictions.argmax(-1).tolist(), softmax(predictions)
        columns = {
            "prediction": chosen,
            "predicted_choice": [self._choices(table, row)[0][number] for row, number in enumerate(chosen)],
        }
        for number in range(self.count):
            columns[f"probability of {number}"] = [round(float(value), 6) for value in probabilities[:, number]]
        return columns

    def pictures(self, table, features, predictions, folder):
        targets, probabilities = self.targets(table), softmax(predictions)
        draw_choice_probabilities(
            probabilities[np.arange(len(targets)), targets],
            predictions.argmax(-1) == targets,
            self.count,
            table.name,
            Path(folder, PROBABILITY_FILE),
        )
        return {PROBABILITY_FILE: f"Probability of the true choice on {table.name}"}


def _is_given(table, value):
    """Whether a label is given; in a dataset, -1 stands for none, as in SWAG's test rows."""
    return value is not None and str(value).strip() not in (("", "-1") if table.is_dataset else ("",))


def _listed(columns):
    return f"column {columns[0]!r}" if len(columns) == 1 else f"columns {', '.join(map(repr, columns))}"
