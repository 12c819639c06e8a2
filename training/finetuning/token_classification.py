"""Token classification: a tag for each word of a text, such as the entities of BIO (d2l, section 16.6.3)."""

import functools
import itertools
from collections import Counter

import numpy as np
from transformers import DataCollatorForTokenClassification

from d2l_bert.messages import UserError, counted
from d2l_bert.training.finetuning import intervals, scoring
from d2l_bert.training.finetuning.cells import check_length, check_text, list_in, name_of
from d2l_bert.training.finetuning.features import Features, Window, encoded, note_of_windows
from d2l_bert.training.finetuning.rows import Row
from d2l_bert.training.finetuning.tasks import Baseline, Task


# What is wrong where `has_one_word_a_row`.
ONE_WORD = "each row has one word, and is a text of its own; give the words of a text in one row"


class TokenClassification(Task):
    """
    A tag for each word.

    The first piece of a word has the word's tag as its label, the others have -100, which the loss leaves out (Devlin
    et al., 2018, section 5.3). A text of more tokens than `max_seq_length` is cut into windows, so that every word
    gets a tag: a window's positions are those of first pieces, its places the numbers of their words. `row_results`
    are the predicted tags of each row, one for each word.

    Attributes:
        scheme: the scheme of entities that the tags belong to, such as BIO; None for other tags.
        default: the prediction for a word without pieces, such as a lone control character.
    """

    auto_class = "AutoModelForTokenClassification"
    main_metric = "f1"
    needed_to_predict = ("classes", "default", "scheme")
    metrics_shown = ("f1", "precision", "recall", "strict_f1", "accuracy")
    shares_of_rows = ()  # the words of a text are no draws of their own
    collator = DataCollatorForTokenClassification
    usual_columns = {"text_column": ("tokens", "words"), "label_column": ("ner_tags", "tags", "labels", "label")}

    def read(self, row, split):
        column = self.columns["text_column"][0]
        words = list_in(row.cells, column, "text_column")
        for number, word in enumerate(words, 1):
            check_text(word, f"word {number} of column {column!r:.100}")
        check_length(sum(map(len, words)), f"column {column!r:.100}")
        names = split.class_names.get(self.label_column)
        labels = list_in(row.cells, self.label_column, "label_column")
        tags = [name_of(label, self.label_column, names) for label in labels]
        if tags and len(tags) != len(words):
            raise ValueError(
                f"{counted(len(words), 'word')} in column {column!r:.100} and {counted(len(tags), 'tag')} in column "
                f"{self.label_column!r:.100}; give each word one tag"
            )
        return row._replace(texts=tuple(words), label=tags or None)

    def learn(self, train):
        if has_one_word_a_row(train.rows):
            of_texts = [name for name in train.columns if "sent" in name.lower()]
            which = f" (does column {of_texts[0]!r:.40} say which?)" if of_texts else ""
            raise UserError(f"{train.title}: {ONE_WORD}{which}, or give a .conll file, with a word a line")
        counts = Counter(tag for row in train.rows for tag in row.label or [])
        self.learn_classes(train, set(counts), train.class_names.get(self.label_column))
        self.default = "O" if "O" in counts else counts.most_common(1)[0][0]
        self.scheme = scoring.scheme_of(self.classes)
        if self.scheme is None:
            self.main_metric = "accuracy"
            self.metrics_shown = ("accuracy",)

    def shown_texts(self, row):
        if row.label is None:
            return [" ".join(row.texts)]
        return [" ".join(f"{word}/{tag}" for word, tag in zip(row.texts, row.label, strict=True))]

    def shown_label(self, row):
        return ""

    def about_classes(self):
        what = f"{self.scheme}: figures of entities" if self.scheme else "no entities: accuracy over words"
        return f"tags in {self.label_column!r:.40} ({what})"

    def remarks(self, rows):
        return [ONE_WORD] if has_one_word_a_row(rows) else []

    def learnt(self):
        return {**super().learnt(), "default": self.default, "scheme": self.scheme}

    def restore(self, learnt):
        super().restore(learnt)
        self.default = learnt["default"]
        self.scheme = learnt["scheme"]
        if self.default not in self.classes:
            raise ValueError("learnt.default is no class")

    def features(self, split, tokenizer, max_seq_length):
        if "ByteLevel(add_prefix_space=False" in repr(tokenizer.backend_tokenizer.pre_tokenizer):
            raise UserError(
                f"{self.config.model}: its tokenizer gives a word of a list other tokens than the same word behind a "
                f"space; give a model whose tokenizer has add_prefix_space"
            )
        texts = [row.texts for row in split.rows]
        features = []
        windows = []
        seen = set()  # row and number of each word that an earlier window has
        for number, inputs, encoding in encoded(
            tokenizer, [texts], max_seq_length, is_split_into_words=True, return_overflowing_tokens=True
        ):
            firsts = {}  # for each other word of this window the position of its first piece
            for position, word in enumerate(encoding.word_ids):
                if word is not None and (number, word) not in seen:
                    firsts.setdefault(word, position)
            seen.update((number, word) for word in firsts)
            positions = np.array(list(firsts.values()), dtype=int)
            words = np.array(list(firsts), dtype=int)
            labels = np.full(len(encoding.ids), -100)
            if split.is_labelled:
                tags = split.rows[number].label
                labels[positions] = [self.number_of[tags[word]] for word in firsts]
            features.append({**inputs, "labels": labels.tolist()})
            windows.append(Window(number, positions, words))
        note = note_of_windows(split, windows, max_seq_length)
        if no_token := sum(map(len, texts)) - len(seen):
            what = f"{counted(no_token, 'word')} of unseen signs alone, which the model does not see: {self.default!r}"
            note = f"{note}; {what}" if note else what
        return Features(features, windows, note)

    def loss(self, logits, labels):
        return super().loss(logits.flatten(0, 1), labels.flatten())

    def by_row(self, split, windows, logits):
        """The predicted tags of each row, of the logits (N, T, C) of all features."""
        tags = [[self.default] * len(row.texts) for row in split.rows]
        for window, of_window in zip(windows, logits, strict=True):
            numbers = of_window[window.positions].argmax(-1)
            for word, number in zip(window.places, numbers, strict=True):
                tags[window.row][word] = self.classes[number]
        return tags

    def resampled(self, split, row_results):
        gold = [row.label for row in split.rows]
        tallies = intervals.tag_tallies(gold, row_results, self.scheme is not None)
        return functools.partial(intervals.tag_figures, tallies=tallies)

    def mistakes(self, split, features, logits, row_results):
        """The probability of the surest wrong tag of a row; 0 if no wrong one is of a word with pieces."""
        wrong = []  # for each row the numbers of its words with a wrong tag
        for row, tags in zip(split.rows, row_results, strict=True):
            pairs = enumerate(zip(row.label, tags, strict=True))
            wrong.append({number for number, (true, said) in pairs if true != said})
        surest = np.array([0.0 if words else np.nan for words in wrong])
        for window, of_window in zip(features.windows, logits, strict=True):
            shares = scoring.probabilities(of_window[window.positions]).max(-1)
            for word, share in zip(window.places, shares, strict=True):
                if word in wrong[window.row]:
                    surest[window.row] = max(surest[window.row], share)
        return surest

    def baseline(self, train, split, known="training"):
        counts = Counter()
        for row in train.rows:
            counts.update(zip(row.texts, row.label, strict=True))
        usual = {}
        for (word, tag), _ in counts.most_common():  # the most frequent tag of a word comes first
            usual.setdefault(word, tag)
        predicted = []
        for row in split.rows:
            predicted.append([usual.get(word, self.default) for word in row.texts])
        return Baseline(f"each word's most frequent tag in the {known} rows", self.metrics(split, predicted))

    def sides(self, split, row_results):
        gold = [row.label for row in split.rows]
        if self.scheme is not None:
            return scoring.types_at_spans(gold, row_results)
        return scoring.Sides(list(itertools.chain(*gold)), list(itertools.chain(*row_results)), self.classes)

    def predictions(self, split, row_results):
        columns = {"prediction": row_results}
        if self.scheme is not None:
            tagged = zip(split.rows, row_results, strict=True)
            columns["entities"] = [entities_in(row.texts, tags) for row, tags in tagged]
        return columns


def has_one_word_a_row(rows: list[Row]) -> bool:
    """Whether each row has one word alone, as in a table with a word a row; False for a few rows."""
    return len(rows) > 2 and all(len(row.texts) == 1 for row in rows)


def entities_in(words: tuple[str, ...], tags: list[str]) -> list[dict]:
    """The entities that the tags of a text mark, as the table of predictions has them."""
    found = []
    for kind, begin, end in scoring.entities(tags):
        text = " ".join(words[begin:end])
        found.append({"type": kind, "text": text, "first_word": begin, "last_word": end - 1})
    return found
