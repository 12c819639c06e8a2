"""The kind `answers`: the answer to a question is a span of a context, as in SQuAD (d2l, section 16.6.4)."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from d2l_bert.errors import UserError
from d2l_bert.training.finetuning import metrics
from d2l_bert.training.finetuning.kind import (
    Features,
    Kind,
    check_different,
    choose_column,
    in_chunks,
    json_in,
    rounded,
    softmax,
    text_in,
)
from d2l_bert.training.finetuning.pictures import MOST_GROUPS, draw_bars
from d2l_bert.training.finetuning.tables import Row


ANSWER_FILE = "answers_by_question.png"

# The default of `doc_stride`, as in Transformers' example of question answering.
STRIDE = 128

# The fewest tokens of the context beside a question of full length, which has half of a row. In shorter windows,
# answers are cut off, and what they answer to is out of sight.
LEAST_CONTEXT = 10

FORM = '{"text": ["..."], "answer_start": [0]}'


@dataclass
class Window:
    """
    The part of a context in one feature.

    Args:
        first: the position of the context's first token in the feature.
        begins, ends: for each token of the context, where its characters begin and end in the context (C,).
        no_answer: the position whose scores mean that there is no answer: that of [CLS].
    """

    first: int
    begins: np.ndarray
    ends: np.ndarray
    no_answer: int


@dataclass
class Span:
    """A predicted span: the sum of its two scores, and its characters in the context; begin None for no answer."""

    score: float
    begin: int | None = None
    end: int | None = None


class Answers(Kind):
    """
    An answer as a span of a context.

    A context of more tokens than fit beside the question is cut into windows that share `doc_stride` tokens. In a
    window without the answer, the answer is [CLS] (Devlin et al., 2018, section 4.3). The prediction is the best span
    over all windows of a question. If training rows have questions without an answer, as in SQuAD 2, the lowest score
    of [CLS] over the windows stands for "no answer".
    """

    auto_class = "AutoModelForQuestionAnswering"
    pipeline_task = None  # Transformers 5 has no pipeline "question-answering"
    main_metric = "f1"
    metrics_shown = ("f1", "exact_match")
    label_names = ("start_positions", "end_positions")
    default_length = 384

    def find_columns(self, train):
        self.context = choose_column(train, "context_column", self.config.context_column, "context")
        self.question = choose_column(train, "question_column", self.config.question_column, "question")
        given = self.config.label_column[0] if self.config.label_column else None
        self.label = [choose_column(train, "label_column", given, "answers")]
        check_different([self.context, self.question, *self.label])

    def parse(self, cells, table):
        table.require(self.context, "context_column")
        table.require(self.question, "question_column")
        context = text_in(cells, self.context, "context_column")
        texts = (text_in(cells, self.question, "question_column"), context)
        answers = answers_in(json_in(cells.get(self.label[0]), self.label[0]), self.label[0])
        for text, start in answers:
            if not text.strip() or start < 0 or context[start : start + len(text)] != text:
                known = f"it begins at {context.find(text)}" if text in context else "it is nowhere in the context"
                raise ValueError(
                    f"the answer {text!r:.60} is not at character {start} of its context ({known}); correct "
                    f"answer_start or the answer"
                )
        return Row(texts, answers)

    def is_labelled(self, table):
        return any(row is not None and row.label for row in table.rows)

    def learn(self, train):
        self.has_unanswerable = not all(row.label for row in train.rows)

    def targets(self, table):
        for number, row in enumerate(table.rows):
            if not row.label and not self.has_unanswerable:
                raise UserError(
                    f"{table.place(number)}: a question without an answer, and every training row has an answer; take "
                    f"the row out, or add training rows without an answer"
                )

    def data_record(self):
        return {"labels": None, "has_pairs": True, "has_unanswerable": self.has_unanswerable}

    def check_tokenizer(self, tokenizer, max_seq_length):
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"{self.config.model}: its tokenizer gives no places of tokens in the text; give a model with a fast "
                f"tokenizer"
            )
        special = tokenizer.num_special_tokens_to_add(pair=True)
        room = max_seq_length - special
        if (left := room - room // 2) < LEAST_CONTEXT:
            raise UserError(
                f"max_seq_length {max_seq_length}: leaves {left} tokens of the context beside a long question, and "
                f"answers need {LEAST_CONTEXT}; give {2 * LEAST_CONTEXT - 1 + special} or more, and a model with as "
                f"many positions"
            )
        stride = self.config.doc_stride
        if stride is not None and stride >= room:
            raise UserError(
                f"doc_stride ({stride}) must be smaller than the tokens of a window ({room} of max_seq_length "
                f"{max_seq_length}); lower doc_stride"
            )

    def features(self, table, tokenizer, max_seq_length):
        is_labelled = self.is_labelled(table)
        room = max_seq_length - tokenizer.num_special_tokens_to_add(pair=True)
        wanted = self.config.doc_stride
        stride = min(STRIDE, max_seq_length // 3) if wanted is None else wanted
        rows, sources, details, cut, lost = [], [], [], 0, 0
        for begin, chunk in in_chunks(table.rows):
            questions = [row.texts[0].strip() for row in chunk]
            contexts = [row.texts[1] for row in chunk]
            shortened, lengths = _shortened_questions(questions, tokenizer, room // 2)
            cut += sum(short != whole for short, whole in zip(shortened, questions, strict=True))
            # Beside a long question there is less room for the context; two windows then share fewer tokens.
            strides = defaultdict(list)
            for number, length in enumerate(lengths):
                strides[min(stride, room - length - 1)].append(number)
            made = {}  # for each row, its features: arguments of the model, and windows
            for shared, chosen in strides.items():
                encoded = tokenizer(
                    [shortened[number] for number in chosen],
                    [contexts[number] for number in chosen],
                    truncation="only_second",
                    max_length=max_seq_length,
                    stride=shared,
                    return_overflowing_tokens=True,
                    return_offsets_mapping=True,
                )
                names = [name for name in encoded if name not in ("offset_mapping", "overflow_to_sample_mapping")]
                for feature, sample in enumerate(encoded["overflow_to_sample_mapping"]):
                    arguments = {name: np.array(encoded[name][feature], dtype=np.int32) for name in names}
                    window = _window(encoded, feature, tokenizer)
                    made.setdefault(chosen[sample], []).append((arguments, window))
            for number in range(len(questions)):
                gold = chunk[number].label if is_labelled else []
                found = False
                windows = [window for _, window in made[number]]
                places = _positions(windows, *gold[0]) if gold else [(window.no_answer,) * 2 for window in windows]
                for (arguments, window), (start, end) in zip(made[number], places, strict=True):
                    if is_labelled:
                        found = found or start != window.no_answer
                        arguments |= {"start_positions": start, "end_positions": end}
                    rows.append(arguments)
                    details.append(window)
                    sources.append(begin + number)
                lost += bool(gold) and not found
        long = sum(count > 1 for count in Counter(sources).values())
        notes = [f"{long:,} contexts are longer than {max_seq_length} tokens: {len(rows):,} windows"] * (long > 0)
        notes += [f"{cut:,} questions are truncated to {room // 2} tokens"] * (cut > 0)
        notes += [f"{lost:,} answers are in no window as a whole"] * (lost > 0)
        return Features(rows, cut, sources, details, "; ".join(notes))

    def collator(self, tokenizer):
        import torch

        def collate(features):
            names = [name for name in features[0] if name not in self.label_names]
            padded = tokenizer.pad(
                [{name: feature[name].tolist() for name in names} for feature in features],
                pad_to_multiple_of=8,
                return_tensors="pt",
            )
            batch = dict(padded)
            for name in self.label_names:
                if name in features[0]:
                    batch[name] = torch.tensor([feature[name] for feature in features])
            return batch

        return collate

    def best_spans(self, table, features, predictions) -> list[list[Span]]:
        """
        The best `n_best_size` spans of each row over all windows, by their scores; one may be "no answer".

        Args:
            predictions: start and end scores (N, T) of the features.
        """
        spans, nothing = [[] for _ in range(len(table))], [np.inf] * len(table)
        for source, window, starts, ends in zip(features.sources, features.details, *predictions, strict=True):
            nothing[source] = min(nothing[source], float(starts[window.no_answer] + ends[window.no_answer]))
            spans[source] += _window_spans(
                window, starts, ends, self.config.max_answer_length, self.config.n_best_size
            )
        best = []
        for found, score in zip(spans, nothing, strict=True):
            different = {}  # windows that overlap may have the same span
            for span in sorted(found, key=lambda span: -span.score):
                different.setdefault((span.begin, span.end), span)
            candidates = list(different.values())
            if self.has_unanswerable:
                nothing_found, best_found = Span(score), candidates[0] if candidates else None
                candidates = sorted([nothing_found, *candidates], key=lambda span: -span.score)
                # `null_score_diff_threshold` decides between the two, so the first need not have the highest score.
                margin = self.config.null_score_diff_threshold
                chosen = best_found if best_found and score - best_found.score <= margin else nothing_found
                candidates.remove(chosen)
                candidates.insert(0, chosen)
            best.append(candidates[: self.config.n_best_size])
        return best

    def predicted_texts(self, table, features, predictions) -> list[str]:
        """The predicted answer of each row; "" for no answer."""
        spans = self.best_spans(table, features, predictions)
        return [_text(row, found[0]) if found else "" for row, found in zip(table.rows, spans, strict=True)]

    def gold_texts(self, table) -> list[list[str]]:
        """The texts of the true answers of each row; [] for a question without an answer."""
        return [[text for text, _ in row.label] for row in table.rows]

    def metrics(self, table, features, predictions):
        return metrics.answer_metrics(self.predicted_texts(table, features, predictions), self.gold_texts(table))

    def predicted_columns(self, table, features, predictions):
        columns = {"prediction": [], "prediction_start": [], "probability": [], "n_best": []}
        for row, spans in zip(table.rows, self.best_spans(table, features, predictions), strict=True):
            spans = spans or [Span(0.0)]
            shares = rounded(softmax(np.array([span.score for span in spans])))
            columns["prediction"].append(_text(row, spans[0]))
            columns["prediction_start"].append(spans[0].begin)
            columns["probability"].append(shares[0])
            columns["n_best"].append(
                [
                    {"text": _text(row, span), "answer_start": span.begin, "probability": share}
                    for span, share in zip(spans, shares, strict=True)
                ]
            )
        return columns

    def pictures(self, table, features, predictions, folder):
        groups = defaultdict(list)
        predicted, gold = self.predicted_texts(table, features, predictions), self.gold_texts(table)
        for row, said, true in zip(table.rows, predicted, gold, strict=True):
            first = row.texts[0].split()[0].lower().strip("?,.:")
            groups[first if true else "without an answer"].append(metrics.answer_scores(said, true))
        largest = sorted(groups.items(), key=lambda group: -len(group[1]))[:MOST_GROUPS]
        scores = [("all", sum(groups.values(), [])), *largest]
        title = f"Answers on {table.name}: exact match and F1 by first word of the question (number of questions)"
        draw_bars(
            [(f"{name} ({len(pairs):,})", np.mean(pairs, axis=0)) for name, pairs in scores],
            ("exact match", "F1"),
            title,
            Path(folder, ANSWER_FILE),
        )
        return {ANSWER_FILE: f"Exact match and F1 on {table.name}, by the first word of the question"}


def answers_in(value: object, column: str) -> list[tuple[str, int]]:
    """
    The answers in a cell of SQuAD's form, each with the character of the context at which it begins; [] for none.

    Raises:
        ValueError: the cell has another form.
    """
    if value is None or value == "":
        return []
    try:
        if isinstance(value, list):
            answers = [(entry["text"], entry["answer_start"]) for entry in value]
        elif isinstance(value["text"], str):
            answers = [(value["text"], value["answer_start"])]
        else:
            answers = list(zip(value["text"], value["answer_start"], strict=True))
        if all(isinstance(text, str) and type(start) is int for text, start in answers):
            return answers
    except (KeyError, TypeError, ValueError):
        pass
    raise ValueError(f"column {column!r} has no answers in SQuAD's form; write {FORM}")


def _shortened_questions(questions, tokenizer, most):
    """The questions, those of more than `most` tokens cut at a token, and their numbers of tokens."""
    shortened, lengths = [], []
    encoded = tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    for question, places in zip(questions, encoded["offset_mapping"], strict=True):
        while len(places) > most:  # the piece of a word that is cut may have more tokens than before
            question = question[: places[most - 1][1]]
            places = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        shortened.append(question)
        lengths.append(len(places))
    return shortened, lengths


def _window(encoded, feature, tokenizer):
    """The `Window` of a feature."""
    parts = encoded.sequence_ids(feature)
    positions = [position for position, part in enumerate(parts) if part == 1]
    ids, places = encoded["input_ids"][feature], encoded["offset_mapping"][feature]
    first = positions[0] if positions else 0
    places = np.array([places[position] for position in positions], dtype=np.int32).reshape(-1, 2)
    no_answer = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
    return Window(first, places[:, 0], places[:, 1], no_answer)


def _positions(windows, text, start):
    """
    For each window of a context, the positions of the first and the last token that hold a character of an answer.

    Those of no answer if a token of the answer is outside of the window, or if the answer has no tokens.
    """
    leading = len(text) - len(text.lstrip())
    begin, end = start + leading, start + leading + len(text.strip())
    inside = [np.flatnonzero((window.begins < end) & (window.ends > begin)) for window in windows]
    held = [
        (window.begins[numbers[0]], window.ends[numbers[-1]]) if len(numbers) else None
        for window, numbers in zip(windows, inside, strict=True)
    ]
    # The places of the whole answer's tokens; a window may begin or end in the middle of the answer. The tokens may
    # begin later than the answer, or end earlier, because a tokenizer may drop characters.
    parts = [part for part in held if part]
    whole = (min(first for first, _ in parts), max(last for _, last in parts)) if parts else None
    return [
        (window.first + int(numbers[0]), window.first + int(numbers[-1]))
        if part and part == whole
        else (window.no_answer, window.no_answer)
        for window, numbers, part in zip(windows, inside, held, strict=True)
    ]


def _window_spans(window, starts, ends, longest, most):
    """The best `most` spans of a window; a span has at most `longest` tokens."""
    count = len(window.begins)
    if count == 0:
        return []
    starts = starts[window.first : window.first + count].astype(np.float64)
    ends = ends[window.first : window.first + count].astype(np.float64)
    longest = min(longest, count)
    padded = np.concatenate([ends, np.full(longest - 1, -np.inf)])
    scores = starts[:, None] + np.lib.stride_tricks.sliding_window_view(padded, longest)  # (C, longest)
    flat = scores.ravel()
    best = np.argpartition(-flat, min(most, len(flat)) - 1)[:most]
    best = best[np.argsort(-flat[best], kind="stable")]
    return [
        Span(float(flat[number]), int(window.begins[first]), int(window.ends[first + number % longest]))
        for number in best.tolist()
        if np.isfinite(flat[number])
        for first in (number // longest,)
    ]


def _text(row, span):
    return "" if span.begin is None else row.texts[1][span.begin : span.end]
