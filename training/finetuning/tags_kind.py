"""The kind `tags`: a tag for each word of a text, such as the entities of BIO (d2l, section 16.6.3)."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
from transformers import DataCollatorForTokenClassification

from d2l_bert.messages import UserError, counted
from d2l_bert.training.finetuning import metrics
from d2l_bert.training.finetuning.kind import (
    Features,
    Kind,
    check_different,
    check_text,
    choose_column,
    in_chunks,
    list_in,
    names_in,
)
from d2l_bert.training.finetuning.pictures import draw_confusion, draw_counts
from d2l_bert.training.finetuning.tables import Row
from d2l_bert.training.finetuning.text_kinds import CONFUSION_FILE


ENTITY_FILE = "f1_by_entity.png"
NO_ENTITY = "O"

BIO_TAG = re.compile(r"O|[BI](-.*)?")


class Tags(Kind):
    """
    A tag for each word.

    The first piece of a word has the word's tag as its label, the others have -100, which the loss leaves out (Devlin
    et al., 2018, section 5.3). A text of more tokens than `max_seq_length` is cut between words into windows, so that
    every word gets a tag.
    """

    auto_class = "AutoModelForTokenClassification"
    pipeline_task = "token-classification"
    main_metric = "f1"
    metrics_shown = ("f1", "precision", "recall", "strict_f1", "accuracy")

    def find_columns(self, train):
        self.words = choose_column(train, "text_column", self.config.text_column, "tokens", "words")
        self.label = [
            choose_column(
                train, "label_column", (self.config.label_column or [None])[0], "ner_tags", "tags", "labels", "label"
            )
        ]
        check_different([self.words, *self.label])
        self.recorded["has_pairs"] = False

    def parse(self, cells, table):
        table.require(self.words, "text_column")
        words = list_in(cells, self.words, "text_column")
        if not words:
            raise ValueError(f"column {self.words!r} has no words; take the row out")
        for number, word in enumerate(words, 1):
            check_text(word, f"word {number} of column {self.words!r}")
        column = self.label[0]
        tags = names_in(list_in(cells, column, "label_column"), column, table)
        if tags and len(tags) != len(words):
            raise ValueError(
                f"{counted(len(words), 'word')} in column {self.words!r} and {counted(len(tags), 'tag')} in column "
                f"{column!r}; give each word one tag"
            )
        return Row(tuple(words), tags or None)

    def learn(self, train):
        counts = Counter(tag for row in train.rows for tag in row.label)
        self.learn_classes(train, set(counts), train.class_names.get(self.label[0]))
        self.has_entities = all(map(BIO_TAG.fullmatch, self.classes))
        # The prediction for a word without pieces, such as a lone control character.
        self.default = NO_ENTITY if NO_ENTITY in self.classes else counts.most_common(1)[0][0]
        if not self.has_entities:
            self.main_metric, self.metrics_shown = "accuracy", ("accuracy",)

    def targets(self, table):
        """The numbers of the tags of each row, a list a row."""
        return [[self.class_number(table, number, tag) for tag in row.label] for number, row in enumerate(table.rows)]

    def check_tokenizer(self, tokenizer, max_seq_length):
        if "ByteLevel(add_prefix_space=False" in repr(tokenizer.backend_tokenizer.pre_tokenizer):
            raise UserError(
                f"{self.config.model}: its tokenizer gives a word of a list other tokens than the same word behind a "
                f"space; give a model whose tokenizer has add_prefix_space"
            )

    def features(self, table, tokenizer, max_seq_length):
        targets = self.targets(table) if self.is_labelled(table) else None
        capacity = max_seq_length - tokenizer.num_special_tokens_to_add()
        windows, sources, starts = [], [], []  # the words of each window, its row, the number of its first word
        for first, chunk in in_chunks(self.texts(table)):
            texts = list(map(list, chunk))
            encoded = tokenizer(texts, is_split_into_words=True, add_special_tokens=False, verbose=False)
            for number, words in enumerate(texts):
                pieces = Counter(encoded.word_ids(number))
                for begin, end in _cut([pieces[word] for word in range(len(words))], capacity):
                    windows.append(words[begin:end])
                    sources.append(first + number)
                    starts.append(begin)
        rows, details = [], []
        for first, texts in in_chunks(windows):
            encoded = tokenizer(texts, is_split_into_words=True, truncation=True, max_length=max_seq_length)
            for number in range(len(texts)):
                source, begin = sources[first + number], starts[first + number]
                word_ids = encoded.word_ids(number)
                firsts = {}  # the position of the first piece of each word
                for position, word in enumerate(word_ids):
                    if word is not None:
                        firsts.setdefault(word, position)
                row = {name: values[number] for name, values in encoded.items()}
                if targets is not None:
                    row["labels"] = [-100] * len(word_ids)
                    for word, position in firsts.items():
                        row["labels"][position] = targets[source][begin + word]
                rows.append(row)
                places = np.array(list(firsts.values()), dtype=np.int32)
                details.append((places, np.array(list(firsts), dtype=np.int32) + begin))
        too_long = sum(count > 1 for count in Counter(sources).values())
        note = (
            f"{too_long:,} ({too_long / len(table):.1%}) are longer than {max_seq_length} tokens and are cut into "
            f"windows between words"
        )
        return Features(rows, note if too_long else "", sources, details)

    def collator(self, tokenizer):
        return DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8)

    def predicted_tags(self, table, features, predictions) -> list[list[str]]:
        """The predicted tags of each row; `predictions` are logits (N, T, C) of the features."""
        tags = [[self.default] * len(row.texts) for row in table.rows]
        for source, (places, words), logits in zip(features.sources, features.details, predictions, strict=True):
            for word, number in zip(words.tolist(), logits[places].argmax(-1).tolist(), strict=True):
                tags[source][word] = self.classes[number]
        return tags

    def metrics(self, table, features, predictions):
        predicted = self.predicted_tags(table, features, predictions)
        return metrics.tag_metrics([row.label for row in table.rows], predicted, self.has_entities)

    def predicted_columns(self, table, features, predictions):
        predicted = self.predicted_tags(table, features, predictions)
        columns = {"prediction": predicted}
        if self.has_entities:
            columns["entities"] = [
                [
                    {"type": kind, "text": " ".join(row.texts[begin:end]), "first_word": begin, "last_word": end - 1}
                    for kind, begin, end in metrics.entities(tags)
                ]
                for tags, row in zip(predicted, table.rows, strict=True)
            ]
        return columns

    def pictures(self, table, features, predictions, folder):
        true, predicted = [row.label for row in table.rows], self.predicted_tags(table, features, predictions)
        if self.has_entities:
            counts = metrics.entity_counts(true, predicted)
            by_type = {
                kind or "entity": np.array([counter[kind] for counter in counts.values()])
                for kind in counts["gold"] + counts["predicted"]
            }
            title = f"Entities on {table.name}: precision, recall and F1 by type (number of true entities)"
            draw_counts(by_type, title, Path(folder, ENTITY_FILE))
            return {ENTITY_FILE: f"Precision, recall and F1 of each type of entity on {table.name}"}
        numbers = [[self.number_of[tag] for tags in side for tag in tags] for side in (true, predicted)]
        draw_confusion(*numbers, self.classes, table.name, Path(folder, CONFUSION_FILE), unit="words")
        return {CONFUSION_FILE: f"Confusion matrix of the tags on {table.name}"}


def _cut(lengths, capacity):
    """The longest ranges of words whose pieces fit into `capacity`; a longer word is alone in one."""
    ranges, begin, total = [], 0, 0
    for number, length in enumerate(lengths):
        if number > begin and total + length > capacity:
            ranges.append((begin, number))
            begin, total = number, 0
        total += length
    return [*ranges, (begin, len(lengths))]
