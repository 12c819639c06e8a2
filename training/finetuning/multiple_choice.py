"""Multiple choice: which of several texts fits a context, as in SWAG; a score for each choice."""

import re
import string
from collections import Counter

from transformers import DataCollatorForMultipleChoice

from d2l_bert.messages import counted, refuse_first
from d2l_bert.training.finetuning import metrics
from d2l_bert.training.finetuning.cells import EmptyText, check_text, is_filled, json_in
from d2l_bert.training.finetuning.features import truncated
from d2l_bert.training.finetuning.tasks import Task


# A batch has a pair of texts for each choice of its rows.
MOST_CHOICES = 100


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
    learnt = ("count", "begin")
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
        if not {"context_column", "question_column"} & self.columns.keys():
            self.columns["context_column"] = ["context"]

    def choices_in(self, row) -> tuple[str, ...]:
        """The choices among the texts of a row: those behind context and question."""
        return row.texts[len(self.columns) - 2 :]  # two of the columns are those of choices and labels

    def read(self, row, split):
        columns, names, cells = self.columns["choices_column"], [], row.cells
        choices, places = [cells.get(column) for column in columns], [f"column {column!r:.100}" for column in columns]
        if len(columns) == 1:
            choices = json_in(choices[0], columns[0])
            if isinstance(choices, dict):  # as in CommonsenseQA and ARC
                names = choices.get("label") or []
                choices = choices.get("text")
                if not isinstance(names, list) or (isinstance(choices, list) and len(names) not in (0, len(choices))):
                    raise ValueError(f"{places[0]} has not one label for each of its choices; correct them")
                names = [str(name) for name in names]
                if len(set(names)) < len(names):
                    raise ValueError(f"{places[0]} has the same label for two choices; correct them")
            if not is_filled(choices):
                raise EmptyText(f"{places[0]} is empty; write a list of choices, or take the row out")
            if not isinstance(choices, list):
                raise ValueError(
                    f"{places[0]} holds {type(choices).__name__}, not a list of choices; give JSONL or Parquet with "
                    f"lists, or name a column for each choice with --choices_column"
                )
            places = [f"choice {number} (from 0) of column {columns[0]!r:.100}" for number in range(len(choices))]
        if len(choices) > MOST_CHOICES:
            others = " and others" if len(columns) > 1 else ""
            raise ValueError(
                f"{len(choices):,} choices in column {columns[0]!r:.100}{others}, and {MOST_CHOICES} at most are "
                f"read; give fewer"
            )
        texts = (*self.texts(cells), *map(check_text, choices, places))
        if not is_filled(cells.get(self.label)):
            return row._replace(texts=texts)
        label = str(cells[self.label]).strip().removesuffix(".0")  # pandas writes 1.0 where others are missing
        return row._replace(texts=texts, label=names.index(label) if label in names else label)

    def learn(self, train):
        labels = {row.label for row in train.rows}
        self.count = Counter(len(self.choices_in(row)) for row in train.rows).most_common(1)[0][0]
        self.begin = int("0" not in labels and str(self.count) in labels)
        refuse_first(
            {
                f"{train.label}, {train.rows[0].place}: {counted(self.count, 'choice')} in column "
                f"{self.columns['choices_column'][0]!r}; name a column of lists of two choices at least, or several "
                f"columns, with --choices_column": self.count < 2
            }
        )
        self.number_of = {str(number + self.begin): number for number in range(self.count)}
        self.number_of |= {name: number for number, name in enumerate(string.ascii_uppercase[: self.count])}

    def checked(self, row, split):
        super().checked(row, split)
        count = len(self.choices_in(row))
        if count != self.count:
            raise ValueError(
                f"{counted(count, 'choice')}, and most training rows have {self.count}; give every row equally many"
            )
        return row._replace(label=self.number_of.get(row.label, row.label))  # a name is a number already

    def features(self, split, tokenizer, max_seq_length):
        refuse_first(  # rows of `predict`, which are not `checked`
            {
                f"{split.label}, {row.place}: {counted(len(self.choices_in(row)), 'choice')}, and the model has "
                f"learnt to choose from {self.count}; give every row so many": True
                for row in split.rows
                if len(self.choices_in(row)) != self.count
            }
        )
        firsts = [row.texts[0] for row in split.rows for _ in range(self.count)]
        seconds = [
            " ".join([*map(str.strip, row.texts[1 : -self.count]), choice])
            for row in split.rows
            for choice in row.texts[-self.count :]
        ]
        pairs, split.note = truncated(tokenizer, [firsts, seconds], max_seq_length)
        for number, row in enumerate(split.rows):
            of_row = pairs[number * self.count : (number + 1) * self.count]
            inputs = {name: [pair[name] for pair in of_row] for name in of_row[0]}
            split.features.append({**inputs, "labels": row.label if split.is_labelled else -100})

    def metrics(self, split, outputs):
        return {"accuracy": float((outputs.argmax(-1) == [row.label for row in split.rows]).mean())}

    def predictions(self, split, outputs):
        chosen, numbers = outputs.argmax(-1), range(self.begin, self.begin + self.count)
        return {
            "prediction": [numbers[number] for number in chosen],
            "predicted_choice": [
                row.texts[-self.count :][number] for row, number in zip(split.rows, chosen, strict=True)
            ],
            **metrics.probability_columns(numbers, outputs),
        }
