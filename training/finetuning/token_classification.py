"""Token classification: a tag for each word of a text, such as the entities of BIO (d2l, section 16.6.3)."""

import logging
from collections import Counter

import numpy as np
from transformers import DataCollatorForTokenClassification

from d2l_bert.messages import UserError, counted
from d2l_bert.training.finetuning import metrics, tasks
from d2l_bert.training.finetuning.tasks import Example, Task


logger = logging.getLogger(__name__)


class TokenClassification(Task):
    """
    A tag for each word.

    The first piece of a word has the word's tag as its label, the others have -100, which the loss leaves out (Devlin
    et al., 2018, section 5.3). A text of more tokens than `max_seq_length` is cut into windows, so that every word
    gets a tag. `Split.windows` has for each window its row, the positions of first pieces, and their words.
    """

    auto_class = "AutoModelForTokenClassification"
    pipeline_task = "token-classification"
    main_metric = "f1"
    metrics_shown = ("f1", "precision", "recall", "strict_f1", "accuracy")
    usual_columns = {"text_column": ("tokens", "words"), "label_column": ("ner_tags", "tags", "labels", "label")}

    def find_columns(self, train):
        super().find_columns(train)
        self.recorded["has_pairs"] = False

    def example(self, cells, split):
        (column,) = self.columns["text_column"]
        words = tasks.list_in(cells, column, "text_column")
        if not words:
            raise ValueError(f"column {column!r} has no words; take the row out")
        for number, word in enumerate(words, 1):
            tasks.check_text(word, f"word {number} of column {column!r}")
        tags = tasks.names_in(tasks.list_in(cells, self.label, "label_column"), self.label, split)
        if tags and len(tags) != len(words):
            raise ValueError(
                f"{counted(len(words), 'word')} in column {column!r} and {counted(len(tags), 'tag')} in column "
                f"{self.label!r}; give each word one tag"
            )
        return Example(tuple(words), tags or None)

    def learn(self, train):
        counts = Counter(tag for example in train.examples for tag in example.label or [])
        self.learn_classes(train, set(counts), train.class_names.get(self.label))
        # The prediction for a word without pieces, such as a lone control character.
        self.default = "O" if "O" in counts else counts.most_common(1)[0][0]
        self.scheme = metrics.scheme_of(self.classes)
        if self.scheme is None:
            self.main_metric, self.metrics_shown = "accuracy", ("accuracy",)
        logger.info(
            f"the tags are {self.scheme}: the figures are those of entities"
            if self.scheme
            else f"the tags are not of {', '.join(metrics.SCHEMES)}: the figure is the accuracy over words"
        )

    def check_tokenizer(self, tokenizer, max_seq_length):
        if "ByteLevel(add_prefix_space=False" in repr(tokenizer.backend_tokenizer.pre_tokenizer):
            raise UserError(
                f"{self.config.model}: its tokenizer gives a word of a list other tokens than the same word behind a "
                f"space; give a model whose tokenizer has add_prefix_space"
            )

    def features(self, split, tokenizer, max_seq_length):
        texts, last = [list(example.texts) for example in split.examples], [-1] * len(split.examples)
        for row, encoded, number, source in tasks.windows(
            tokenizer, [texts], max_seq_length, is_split_into_words=True
        ):
            firsts = {}  # the position of the first piece of each word, unless an earlier window has it
            for position, word in enumerate(encoded.word_ids(number)):
                if word is not None and word > last[source]:
                    firsts.setdefault(word, position)
            last[source] = max(firsts, default=last[source])
            places, words = np.array(list(firsts.values()), dtype=np.int32), np.array(list(firsts), dtype=np.int32)
            if split.is_labelled:
                labels = np.full(len(row["input_ids"]), -100)
                labels[places] = [self.number_of[split.examples[source].label[word]] for word in firsts]
                row["labels"] = labels.tolist()
            split.features.append(row)
            split.windows.append((source, places, words))
        long = sum(count > 1 for count in Counter(source for source, *_ in split.windows).values())
        if long:
            share = long / len(split.examples)
            split.note = f"{long:,} ({share:.1%}) are longer than {max_seq_length} tokens and are cut into windows"

    def collator(self, tokenizer):
        return DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8)

    def predicted_tags(self, split, outputs) -> list[list[str]]:
        """The predicted tags of each row; `outputs` are logits (N, T, C) of the features."""
        tags = [[self.default] * len(example.texts) for example in split.examples]
        for (source, places, words), logits in zip(split.windows, outputs, strict=True):
            for word, number in zip(words.tolist(), logits[places].argmax(-1).tolist(), strict=True):
                tags[source][word] = self.classes[number]
        return tags

    def metrics(self, split, outputs):
        gold = [example.label for example in split.examples]
        return metrics.tag_metrics(gold, self.predicted_tags(split, outputs), self.scheme is not None)

    def numbers(self, split, outputs):
        if self.scheme is not None:
            return None
        sides = [example.label for example in split.examples], self.predicted_tags(split, outputs)
        return tuple([self.number_of[tag] for tags in side for tag in tags] for side in sides)

    def report(self, split, outputs):
        if self.scheme is None:
            return super().report(split, outputs)
        gold = [example.label for example in split.examples]
        true, said, types = metrics.types_at_spans(gold, self.predicted_tags(split, outputs))
        return metrics.report_by_class(true, said, types, types)

    def predictions(self, split, outputs):
        columns = {"prediction": self.predicted_tags(split, outputs)}
        if self.scheme is not None:
            columns["entities"] = [
                [
                    {"type": kind, "text": " ".join(texts[begin:end]), "first_word": begin, "last_word": end - 1}
                    for kind, begin, end in metrics.entities(tags)
                ]
                for tags, (texts, _) in zip(columns["prediction"], split.examples, strict=True)
            ]
        return columns
