"""Token classification: a tag for each word of a text, such as the entities of BIO (d2l, section 16.6.3)."""

import itertools
import logging
from collections import Counter

import numpy as np
from transformers import DataCollatorForTokenClassification

from d2l_bert.messages import counted, refuse_first
from d2l_bert.training.finetuning import metrics
from d2l_bert.training.finetuning.cells import check_length, check_text, list_in, listed, name_of
from d2l_bert.training.finetuning.features import Window, encoded, note_of_windows
from d2l_bert.training.finetuning.tasks import Task


logger = logging.getLogger(__name__)


class TokenClassification(Task):
    """
    A tag for each word.

    The first piece of a word has the word's tag as its label, the others have -100, which the loss leaves out (Devlin
    et al., 2018, section 5.3). A text of more tokens than `max_seq_length` is cut into windows, so that every word
    gets a tag: a window's positions are those of first pieces, its places the numbers of their words.
    """

    auto_class = "AutoModelForTokenClassification"
    main_metric = "f1"
    learnt = ("classes", "default", "scheme")
    metrics_shown = ("f1", "precision", "recall", "strict_f1", "accuracy")
    collator = DataCollatorForTokenClassification
    usual_columns = {"text_column": ("tokens", "words"), "label_column": ("ner_tags", "tags", "labels", "label")}

    def read(self, row, split):
        (column,) = self.columns["text_column"]
        words = list_in(row.cells, column, "text_column")
        for number, word in enumerate(words, 1):
            check_text(word, f"word {number} of column {column!r:.100}")
        check_length(sum(map(len, words)), f"column {column!r:.100}")
        names = split.class_names.get(self.label)
        tags = [name_of(tag, self.label, names) for tag in list_in(row.cells, self.label, "label_column")]
        if tags and len(tags) != len(words):
            raise ValueError(
                f"{counted(len(words), 'word')} in column {column!r:.100} and {counted(len(tags), 'tag')} in column "
                f"{self.label!r:.100}; give each word one tag"
            )
        return row._replace(texts=tuple(words), label=tags or None)

    def learn(self, train):
        counts = Counter(tag for row in train.rows for tag in row.label or [])
        self.learn_classes(train, set(counts), train.class_names.get(self.label))
        # The prediction for a word without pieces, such as a lone control character.
        self.default = "O" if "O" in counts else counts.most_common(1)[0][0]
        self.scheme = metrics.scheme_of(self.classes)
        if self.scheme is None:
            self.main_metric, self.metrics_shown = "accuracy", ("accuracy",)
        logger.info(
            f"the tags are {self.scheme}: the figures are those of entities"
            if self.scheme
            else f"the tags ({listed(self.classes)}) are not of {', '.join(metrics.SCHEMES)}: the figure is the "
            f"accuracy over words"
        )

    def features(self, split, tokenizer, max_seq_length):
        refuse_first(
            {
                f"{self.config.model}: its tokenizer gives a word of a list other tokens than the same word behind a "
                f"space; give a model whose tokenizer has add_prefix_space": (
                    "ByteLevel(add_prefix_space=False" in repr(tokenizer.backend_tokenizer.pre_tokenizer)
                )
            }
        )
        texts, seen = [row.texts for row in split.rows], set()
        for source, inputs, encoding in encoded(
            tokenizer, [texts], max_seq_length, is_split_into_words=True, return_overflowing_tokens=True
        ):
            firsts = {}  # the position of the first piece of each word, unless an earlier window has it
            for position, word in enumerate(encoding.word_ids):
                if word is not None and (source, word) not in seen:
                    firsts.setdefault(word, position)
            seen.update((source, word) for word in firsts)
            window = Window(source, np.array(list(firsts.values()), dtype=int), np.array(list(firsts), dtype=int))
            labels = np.full(len(encoding.ids), -100)
            if split.is_labelled:
                labels[window.positions] = [self.number_of[split.rows[source].label[word]] for word in firsts]
            split.features.append({**inputs, "labels": labels.tolist()})
            split.windows.append(window)
        split.note = note_of_windows(split, max_seq_length)

    def loss(self, logits, labels):
        return super().loss(logits.flatten(0, 1), labels.flatten())

    def predicted_tags(self, split, outputs) -> list[list[str]]:
        """The predicted tags of each row; `outputs` are logits (N, T, C) of the features."""
        tags = [[self.default] * len(row.texts) for row in split.rows]
        for window, logits in zip(split.windows, outputs, strict=True):
            for word, number in zip(window.places, logits[window.positions].argmax(-1), strict=True):
                tags[window.source][word] = self.classes[number]
        return tags

    def metrics(self, split, outputs):
        return metrics.tag_metrics(
            [row.label for row in split.rows], self.predicted_tags(split, outputs), self.scheme is not None
        )

    def know_nothing(self, train, split):
        counts = Counter(pair for row in train.rows for pair in zip(row.texts, row.label, strict=True))
        usual = {word: tag for (word, tag), _ in reversed(counts.most_common())}
        predicted = [[usual.get(word, self.default) for word in row.texts] for row in split.rows]
        return "each word's most frequent tag in the training rows", metrics.tag_metrics(
            [row.label for row in split.rows], predicted, self.scheme is not None
        )

    def sides(self, split, outputs):
        gold, predicted = [row.label for row in split.rows], self.predicted_tags(split, outputs)
        if self.scheme is not None:
            return metrics.types_at_spans(gold, predicted)
        return list(itertools.chain(*gold)), list(itertools.chain(*predicted)), self.classes

    def predictions(self, split, outputs):
        columns = {"prediction": self.predicted_tags(split, outputs)}
        if self.scheme is not None:
            columns["entities"] = [
                [
                    {"type": kind, "text": " ".join(texts[begin:end]), "first_word": begin, "last_word": end - 1}
                    for kind, begin, end in metrics.entities(tags)
                ]
                for tags, (_, _, texts, _) in zip(columns["prediction"], split.rows, strict=True)
            ]
        return columns
