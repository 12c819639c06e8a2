"""The kind `tags`: a tag for each word of a text, such as the entities of BIO (d2l, section 16.6.3)."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
from tokenizers import pre_tokenizers
from transformers import DataCollatorForTokenClassification

from d2l_bert.errors import UserError
from d2l_bert.progress import counted
from d2l_bert.training.finetuning import span_metrics
from d2l_bert.training.finetuning.bars import draw_entity_bars
from d2l_bert.training.finetuning.kind import Features, Kind, json_list, no_json_list
from d2l_bert.training.finetuning.pictures import draw_confusion
from d2l_bert.training.finetuning.text_kinds import CONFUSION_FILE, sort_labels


WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("ner_tags", "tags", "labels", "label")

ENTITY_FILE = "f1_by_entity.png"
TEXTS_AT_ONCE = 1000
NO_ENTITY = "O"

BIO_TAG = re.compile(r"O|[BI](-.*)?")

# A tag of BIO, BIOES or BILOU, in capitals or not.
SPAN_TAG = re.compile(r"[bioeslu](-.+)?", re.IGNORECASE)


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
        self.words = self.config.text_column or _first(WORD_COLUMNS, train.columns)
        train.require(self.words, "text_column")
        given = self.config.label_column
        self.label = [given[0] if given else _first(TAG_COLUMNS, train.columns)]
        train.require(self.label[0], "label_column")
        if self.words == self.label[0]:
            raise UserError(f"column {self.words!r} cannot be both text_column and label_column")

    def learn(self, train):
        if not self.is_labelled(train):
            raise UserError(f"{train.label}: column {self.label[0]!r} is empty; training rows need tags")
        counts = Counter(tag for row in range(len(train)) for tag in self._tags(train, row))
        named = train.class_names.get(self.label[0])
        self.classes = [name for name in named if name in counts] if named else sort_labels(counts)
        if len(self.classes) == 1:
            raise UserError(
                f"{train.label}: every word has the tag {self.classes[0]!r}; there is nothing to tell apart: give "
                f"rows with two tags at least, or name another column with --label_column"
            )
        self.number_of = {name: number for number, name in enumerate(self.classes)}
        self.has_entities = all(map(BIO_TAG.fullmatch, self.classes))
        # The prediction for a word without pieces, such as a lone control character.
        self.default = NO_ENTITY if NO_ENTITY in self.classes else counts.most_common(1)[0][0]
        bare = [tag for tag in self.classes if tag in ("B", "I")]
        if not self.has_entities and all(map(SPAN_TAG.fullmatch, self.classes)):
            other = next(tag for tag in self.classes if not BIO_TAG.fullmatch(tag))
            self.notes.append(
                f"the tags mark spans, but not as BIO does (O, B-... and I-..., in capitals), such as "
                f"{other!r}: entities are not counted, and the accuracy of words chooses"
            )
        elif self.has_entities and bare:
            self.notes.append(f"entities of the tag {bare[0]!r} have no type; B-... and I-... name one")
        if not self.has_entities:
            self.main_metric, self.metrics_shown = "accuracy", ("accuracy",)

    def is_labelled(self, table):
        # A cell that is no list is refused later, by `check`.
        return any(_listed(cell) != [] for cell in table.columns.get(self.label[0], []))

    def usable(self, table):
        if not table.is_dataset:
            return table, {}
        empty = [
            row for row, words in enumerate(map(_listed, table.columns.get(self.words, []))) if not _are_words(words)
        ]
        kept = sorted(set(range(len(table))) - set(empty))
        return (table.select(kept), {"no words or an empty word": len(empty)}) if empty else (table, {})

    def check(self, table):
        table.require(self.words, "text_column")
        is_labelled = self.is_labelled(table)
        for row in range(len(table)):
            words = _listed(table.columns[self.words][row])
            if words is None:
                raise _no_list(table, row, self.words, "words", "text_column")
            if not words:
                raise UserError(f"{table.place(row)}: column {self.words!r} has no words; take the row out")
            for number, word in enumerate(words, 1):
                if not isinstance(word, str) or not word.strip():
                    raise UserError(
                        f"{table.place(row)}: word {number} of column {self.words!r} is {word!r}; write a word there, "
                        f"or take it and its tag out"
                    )
            if is_labelled:
                self._numbers(table, row, words)

    def _tags(self, table, row):
        """The names of the tags of a row."""
        column = self.label[0]
        tags, names = _listed(table.columns[column][row]), table.class_names.get(column)
        if tags is None:
            raise _no_list(table, row, column, "tags", "label_column")
        for number, tag in enumerate(tags, 1):
            is_whole = isinstance(tag, int) and not isinstance(tag, bool)
            if names and is_whole and not 0 <= tag < len(names):
                raise UserError(f"{table.place(row)}: tag {number} is {tag}, which is no tag of the dataset")
            if not is_whole and (not isinstance(tag, str) or not tag.strip()):
                raise UserError(
                    f"{table.place(row)}: tag {number} of column {column!r} is {tag!r}; write the name or the number "
                    f"of a tag"
                )
        return [names[tag] if names and isinstance(tag, int) else str(tag).strip() for tag in tags]

    def _numbers(self, table, row, words):
        """The tags of a row as numbers of classes, after their checks."""
        tags = self._tags(table, row)
        if len(tags) != len(words):
            raise UserError(
                f"{table.place(row)}: {counted(len(words), 'word')} in column {self.words!r} and "
                f"{counted(len(tags), 'tag')} in column {self.label[0]!r}; give each word one tag"
            )
        for number, tag in enumerate(tags, 1):
            if tag not in self.number_of:
                raise UserError(
                    f"{table.place(row)}: tag {tag!r} of word {number} ({words[number - 1]!r}) does not stand in the "
                    f"training rows; correct the tag, or add training rows with it"
                )
        return [self.number_of[tag] for tag in tags]

    def texts(self, table):
        return [tuple(_listed(cell)) for cell in table.columns[self.words]]

    def holdable(self, train, drawn):
        texts, chosen, left, needed = self.texts(train), set(drawn), set(), set()
        tags = [set(self._tags(train, row)) for row in range(len(train))]
        for text, found in zip(texts, tags, strict=True):
            left |= found if text not in chosen else set()
        for text, found in zip(texts, tags, strict=True):  # texts with a tag that would be held out everywhere
            if not found <= left:
                needed.add(text)
                left |= found
        return chosen - needed

    def model_settings(self):
        return {
            "num_labels": len(self.classes),
            "id2label": dict(enumerate(self.classes)),
            "label2id": dict(self.number_of),
        }

    def data_record(self):
        return {"labels": self.classes, "has_pairs": False}

    def check_tokenizer(self, tokenizer, max_seq_length):
        try:
            encoded = tokenizer(["a", "word"], is_split_into_words=True)
            encoded.word_ids()
        except Exception as error:  # tokenizers raise various exceptions
            raise UserError(
                f"{self.config.model}: its tokenizer takes no words one by one ({' '.join(str(error).split())}); give "
                f"a model with a fast tokenizer"
            ) from None
        before = tokenizer.backend_tokenizer.pre_tokenizer
        if isinstance(before, pre_tokenizers.ByteLevel):
            _mark_first_words(tokenizer, before)
        elif "ByteLevel(add_prefix_space=False" in repr(before):
            raise UserError(
                f"{self.config.model}: its tokenizer gives a word of a list other tokens than the same word behind a "
                f"space; give a model whose tokenizer has add_prefix_space"
            )

    def features(self, table, tokenizer, max_seq_length):
        is_labelled = self.is_labelled(table)
        room = max_seq_length - tokenizer.num_special_tokens_to_add()
        windows, sources, starts = [], [], []  # the words of each window, its row, the number of its first word
        for first in range(0, len(table), TEXTS_AT_ONCE):
            texts = [_listed(cell) for cell in table.columns[self.words][first : first + TEXTS_AT_ONCE]]
            encoded = tokenizer(texts, is_split_into_words=True, add_special_tokens=False, verbose=False)
            for number, words in enumerate(texts):
                pieces = Counter(encoded.word_ids(number))
                for begin, end in _cut([pieces[word] for word in range(len(words))], room):
                    windows.append(words[begin:end])
                    sources.append(first + number)
                    starts.append(begin)
        rows, details = [], []
        for first in range(0, len(windows), TEXTS_AT_ONCE):
            texts = windows[first : first + TEXTS_AT_ONCE]
            encoded = tokenizer(texts, is_split_into_words=True, truncation=True, max_length=max_seq_length)
            for number in range(len(texts)):
                source, begin = sources[first + number], starts[first + number]
                word_ids = encoded.word_ids(number)
                firsts = {}  # the position of the first piece of each word
                for position, word in enumerate(word_ids):
                    if word is not None:
                        firsts.setdefault(word, position)
                row = {name: values[number] for name, values in encoded.items()}
                if is_labelled:
                    tags = self._numbers(table, source, _listed(table.columns[self.words][source]))
                    labels = [-100] * len(word_ids)
                    for word, position in firsts.items():
                        labels[position] = tags[begin + word]
                    row["labels"] = labels
                rows.append(row)
                places = np.array(list(firsts.values()), dtype=np.int32)
                details.append((places, np.array(list(firsts), dtype=np.int32) + begin))
        too_long = sum(count > 1 for count in Counter(sources).values())
        note = (
            f"{too_long:,} ({too_long / len(table):.1%}) are longer than {max_seq_length} tokens and are cut into "
            f"windows between words"
        )
        return Features(rows, 0, sources, details, note if too_long else "")

    def collator(self, tokenizer):
        return DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8)

    def predicted_tags(self, table, features, predictions) -> list[list[str]]:
        """The predicted tags of each row; `predictions` are logits (N, T, C) of the features."""
        tags = [[self.default] * len(_listed(cell)) for cell in table.columns[self.words]]
        for source, (places, words), logits in zip(features.sources, features.details, predictions, strict=True):
            for word, number in zip(words.tolist(), logits[places].argmax(-1).tolist(), strict=True):
                tags[source][word] = self.classes[number]
        return tags

    def true_tags(self, table) -> list[list[str]]:
        """The tags of each row of a labelled table."""
        return [self._tags(table, row) for row in range(len(table))]

    def metrics(self, table, features, predictions):
        predicted = self.predicted_tags(table, features, predictions)
        return span_metrics.tag_metrics(self.true_tags(table), predicted, self.has_entities)

    def constant_metrics(self, table):
        is_empty = all(tag == NO_ENTITY for tags in self.true_tags(table) for tag in tags)
        return ("f1", "precision", "recall", "strict_f1") if self.has_entities and is_empty else ()

    def predicted_columns(self, table, features, predictions):
        predicted = self.predicted_tags(table, features, predictions)
        cells = table.columns[self.words]
        columns = {
            "prediction": [
                " ".join(tags) if isinstance(cell, str) and json_list(cell) is None else tags
                for tags, cell in zip(predicted, cells, strict=True)
            ]
        }
        if self.has_entities:
            columns["entities"] = [
                [
                    {"type": kind, "text": " ".join(words[begin:end]), "first_word": begin, "last_word": end - 1}
                    for kind, begin, end in span_metrics.entities(tags)
                ]
                for tags, words in zip(predicted, map(_listed, cells), strict=True)
            ]
        return columns

    def pictures(self, table, features, predictions, folder):
        true, predicted = self.true_tags(table), self.predicted_tags(table, features, predictions)
        if self.has_entities:
            counts = span_metrics.entity_counts(true, predicted)
            draw_entity_bars(counts, table.name, Path(folder, ENTITY_FILE))
            return {ENTITY_FILE: f"Precision, recall and F1 of each type of entity on {table.name}"}
        numbers = [[self.number_of[tag] for tags in side for tag in tags] for side in (true, predicted)]
        draw_confusion(*numbers, self.classes, table.name, Path(folder, CONFUSION_FILE), unit="words")
        return {CONFUSION_FILE: f"Confusion matrix of the tags on {table.name}"}


def _mark_first_words(tokenizer, before):
    """
    Let a tokenizer of bytes, such as RoBERTa's, put a space before a text; `before` is its pre-tokenizer.

    Each word of a list then has the tokens of the same word inside a text. The saved tokenizer keeps the setting.
    """
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=before.use_regex)
    tokenizer.add_prefix_space = tokenizer.init_kwargs["add_prefix_space"] = True  # Transformers loads these
    after = backend.post_processor
    if hasattr(after, "add_prefix_space"):  # else the place of a text's first token would lack the first character
        after.add_prefix_space = True
        backend.post_processor = after


def _cut(lengths, room):
    """Ranges of words whose pieces fit into `room`; as long as possible. A word longer than `room` is alone in one."""
    ranges, begin, total = [], 0, 0
    for number, length in enumerate(lengths):
        if number > begin and total + length > room:
            ranges.append((begin, number))
            begin, total = number, 0
        total += length
    return [*ranges, (begin, len(lengths))]


def _first(names, columns):
    """The first name that is a column, or the first name."""
    return next((name for name in names if name in columns), names[0])


def _listed(cell):
    """
    The entries of a cell: a list, also as JSON, or a text with spaces between the entries; None for a cell of another
    kind.
    """
    if isinstance(cell, str):
        try:
            found = json_list(cell)
        except ValueError:
            return None
        return cell.split() if found is None else found
    return [] if cell is None else cell if isinstance(cell, list) else None


def _no_list(table, row, column, entries, option):
    """The error for a cell of which `_listed` finds no entries."""
    cell = table.columns[column][row]
    if isinstance(cell, str):
        return no_json_list(table, row, column, cell)
    return UserError(
        f"{table.place(row)}: column {column!r} holds {type(cell).__name__}, not a list of {entries}; name another "
        f"column with --{option}"
    )


def _are_words(words):
    return bool(words) and all(isinstance(word, str) and word.strip() for word in words)
