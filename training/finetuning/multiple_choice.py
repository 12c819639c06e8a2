"""Multiple choice: which of several texts fits a context, as in SWAG; a score for each choice."""

import logging
import re
import string
from collections import Counter

import numpy as np
from transformers import DataCollatorForMultipleChoice

from d2l_bert.messages import UserError, counted
from d2l_bert.training.finetuning import metrics, tasks
from d2l_bert.training.finetuning.tasks import Example, Task


logger = logging.getLogger(__name__)

# Columns with a choice each: SWAG's ending0, ending1, ..., COPA's choice1, choice2, WinoGrande's option1 and option2.
CHOICE_COLUMN = re.compile(r"(ending|choice|option)_?(\d+)")

# The options with the columns before the choices.
FIRST = ("context_column", "question_column")


class MultipleChoice(Task):
    """
    The right one of several choices.

    The model gets each choice as a pair: the context, and the choice behind the question, if there is one (Zellers et
    al., 2018; Devlin et al., 2018, section 4.4: SWAG's `sent1` and `sent2` with an ending). A softmax over the scores
    of the pairs gives the probabilities. All rows have equally many choices. An example's texts are context, question
    and choices.
    """

    auto_class = "AutoModelForMultipleChoice"
    metrics_shown = ("accuracy",)
    usual_columns = {
        "context_column": ("context", "sent1", "premise"),
        "question_column": ("question", "sent2"),
        "choices_column": ("choices",),
        "label_column": ("label", "answerKey"),
    }

    def find_columns(self, train):
        numbered = [
            (match[1], int(match[2]), name) for name in train.columns if (match := CHOICE_COLUMN.fullmatch(name))
        ]
        if numbered and "choices" not in train.columns and not self.config.choices_column:
            self.columns["choices_column"] = [name for *_, name in sorted(numbered)]
        super().find_columns(train)
        self.first = [option for option in FIRST if option in self.columns]
        if not self.first:
            train.require("context", "context_column")

    def example(self, cells, split):
        columns, names = self.columns["choices_column"], []
        first = [self.text(cells, option) for option in self.first]
        choices, places = [cells.get(column) for column in columns], [f"column {column!r}" for column in columns]
        if len(columns) == 1:
            choices = tasks.json_in(choices[0], columns[0])
            if isinstance(choices, dict):  # as in CommonsenseQA and ARC
                choices, names = choices.get("text"), [str(name) for name in choices.get("label") or []]
            if not isinstance(choices, list):
                raise ValueError(
                    f"{places[0]} holds {type(choices).__name__}, not a list of choices; give JSONL or Parquet with "
                    f"lists, or name a column for each choice with --choices_column"
                )
            places = [f"choice {number} (from 0) of column {columns[0]!r}" for number in range(len(choices))]
        texts = [*first, *map(tasks.check_text, choices, places)]
        value, classes = cells.get(self.label), split.class_names.get(self.label)
        if classes and isinstance(value, int) and 0 <= value < len(classes):
            value = classes[value]
        if not tasks.is_filled(value):
            return Example(tuple(texts))
        label = re.sub(r"\.0+$", "", str(value).strip())
        return Example(tuple(texts), names.index(label) if label in names else label)

    def learn(self, train):
        counts = Counter(len(example.texts) - len(self.first) for example in train.examples)
        labels = {example.label for example in train.examples}
        self.count = counts.most_common(1)[0][0]
        self.begin = int("0" not in labels and str(self.count) in labels)
        if self.begin:
            logger.info(f"labels run from 1 to {self.count}: choices are counted from 1")
        if self.count < 2:
            raise UserError(
                f"{train.label}, {train.places[0]}: {counted(self.count, 'choice')} in column "
                f"{self.columns['choices_column'][0]!r}; name a column of lists of two choices at least, or several "
                f"columns, with --choices_column"
            )

    def checked(self, example, split):
        count = len(example.texts) - len(self.first)
        if count != self.count:
            raise ValueError(
                f"{counted(count, 'choice')}, and most training rows have {self.count}; give every row equally many"
            )
        numbers = [str(number + self.begin) for number in range(count)]
        for known in (numbers, string.ascii_uppercase[:count]):
            if isinstance(example.label, str) and example.label in known:
                return example._replace(label=known.index(example.label))
        if isinstance(example.label, str):
            raise ValueError(
                f"label {example.label!r} in column {self.label!r} is not the number of a choice "
                f"(from {self.begin}), its letter or its name; correct the label"
            )
        return example

    def features(self, split, tokenizer, max_seq_length):
        firsts, seconds = [], []
        for example in split.examples:
            *context, last = example.texts[: -self.count]
            for choice in example.texts[-self.count :]:
                firsts.append(context[0] if context else last)
                seconds.append(f"{last.strip()} {choice}" if context else choice)
        pairs, split.note = tasks.truncated(tokenizer, [firsts, seconds], max_seq_length)
        for number, example in enumerate(split.examples):
            of_row = pairs[number * self.count : (number + 1) * self.count]
            inputs = {name: [pair[name] for pair in of_row] for name in of_row[0]}
            split.features.append({**inputs, "labels": example.label if split.is_labelled else -100})

    def collator(self, tokenizer):
        return DataCollatorForMultipleChoice(tokenizer, pad_to_multiple_of=8)

    def metrics(self, split, outputs):
        labels = np.array([example.label for example in split.examples])
        return {"accuracy": float((outputs.argmax(-1) == labels).mean())}

    def predictions(self, split, outputs):
        chosen, probabilities = outputs.argmax(-1).tolist(), metrics.probabilities(outputs)
        columns = {
            "prediction": [number + self.begin for number in chosen],
            "predicted_choice": [
                example.texts[-self.count :][number] for example, number in zip(split.examples, chosen, strict=True)
            ],
        }
        return columns | {
            f"probability of {number + self.begin}": probabilities[:, number].tolist() for number in range(self.count)
        }
