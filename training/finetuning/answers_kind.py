"""The kind `answers`: the answer to a question is a span of a context, as in SQuAD (d2l, section 16.6.4)."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from d2l_bert.messages import UserError
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
from d2l_bert.training.finetuning.tables import Row


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
        self.label = [choose_column(train, "label_column", (self.config.label_column or [None])[0], "answers")]
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
        self.recorded["has_unanswerable"] = self.has_unanswerable

    def targets(self, table):
        for number, row in enumerate(table.rows):
            if not row.label and not self.has_unanswerable:
                raise UserError(
                    f"{table.place(number)}: a question without an answer, and every training row has an answer; take "
                    f"the row out, or add training rows without an answer"
                )

    def check_tokenizer(self, tokenizer, max_seq_length):
        capacity = max_seq_length - tokenizer.num_special_tokens_to_add(pair=True)
        left, stride = capacity - capacity // 2, self.stride(max_seq_length)
        if left < max(stride + 1, LEAST_CONTEXT):
            raise UserError(
                f"max_seq_length {max_seq_length}: leaves {left} tokens of the context beside a long question, and "
                f"answers need {LEAST_CONTEXT}, and more than doc_stride ({stride}); raise max_seq_length, or "
                f"lower doc_stride"
            )

    def stride(self, max_seq_length: int) -> int:
        """How many tokens two windows of a context share."""
        given = self.config.doc_stride
        return min(STRIDE, max_seq_length // 3) if given is None else given

    def features(self, table, tokenizer, max_seq_length):
        is_labelled = self.is_labelled(table)
        capacity = max_seq_length - tokenizer.num_special_tokens_to_add(pair=True)
        rows, sources, details, cut, found = [], [], [], 0, set()
        for begin, chunk in in_chunks(table.rows):
            questions = [row.texts[0].strip() for row in chunk]
            shortened = _shortened_questions(questions, tokenizer, capacity // 2)
            cut += sum(short != whole for short, whole in zip(shortened, questions, strict=True))
            encoded = tokenizer(
                shortened,
                [row.texts[1] for row in chunk],
                truncation="only_second",
                max_length=max_seq_length,
                stride=self.stride(max_seq_length),
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
            names = [name for name in encoded if name not in ("offset_mapping", "overflow_to_sample_mapping")]
            for feature, sample in enumerate(encoded["overflow_to_sample_mapping"]):
                window = _window(encoded, feature, tokenizer)
                rows.append({name: np.array(encoded[name][feature], dtype=np.int32) for name in names})
                if is_labelled:
                    start, end = _positions(window, *chunk[sample].label[:1])
                    rows[-1] |= {"start_positions": start, "end_positions": end}
                    if start != window.no_answer:
                        found.add(begin + sample)
                details.append(window)
                sources.append(begin + sample)
        lost = sum(bool(row.label) and number not in found for number, row in enumerate(table.rows) if is_labelled)
        long = sum(count > 1 for count in Counter(sources).values())
        notes = [f"{long:,} contexts are longer than {max_seq_length} tokens: {len(rows):,} windows"] * (long > 0)
        notes += [f"{cut:,} questions are truncated to {capacity // 2} tokens"] * (cut > 0)
        notes += [f"{lost:,} answers are in no window as a whole"] * (lost > 0)
        return Features(rows, "; ".join(notes), sources, details)

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
            # Windows that overlap may have the same span: its best score counts.
            by_place = {(span.begin, span.end): span for span in sorted(found, key=lambda span: span.score)}
            candidates = sorted(by_place.values(), key=lambda span: -span.score)
            if self.has_unanswerable:
                # `null_score_diff_threshold` decides between the two, so the first need not have the highest score.
                chosen = nothing_found = Span(score)
                if candidates and score - candidates[0].score <= self.config.null_score_diff_threshold:
                    chosen = candidates[0]
                candidates = sorted([nothing_found, *candidates], key=lambda span: (span is not chosen, -span.score))
            best.append(candidates[: self.config.n_best_size])
        return best

    def predicted_texts(self, table, features, predictions) -> list[str]:
        """The predicted answer of each row; "" for no answer."""
        spans = self.best_spans(table, features, predictions)
        return [_text(row, found[0]) if found else "" for row, found in zip(table.rows, spans, strict=True)]

    def metrics(self, table, features, predictions):
        gold = [[text for text, _ in row.label] for row in table.rows]
        return metrics.answer_metrics(self.predicted_texts(table, features, predictions), gold)

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
        # pandas writes whole numbers as floats where others of the column are missing
        answers = [
            (text, int(start) if type(start) is float and start.is_integer() else start) for text, start in answers
        ]
        if all(isinstance(text, str) and type(start) is int for text, start in answers):
            return answers
    except (KeyError, TypeError, ValueError):
        pass
    raise ValueError(f"column {column!r} has no answers in SQuAD's form; write {FORM}")


def _shortened_questions(questions, tokenizer, most):
    """The questions; those of more than `most` tokens cut at a token."""
    shortened, options = [], {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    for question in questions:  # the piece of a word that is cut may have more tokens than before, hence the loop
        while len(places := tokenizer(question, **options)["offset_mapping"]) > most:
            question = question[: places[most - 1][1]]
        shortened.append(question)
    return shortened


def _window(encoded, feature, tokenizer):
    """The `Window` of a feature."""
    parts = encoded.sequence_ids(feature)
    positions = [position for position, part in enumerate(parts) if part == 1]
    ids, places = encoded["input_ids"][feature], encoded["offset_mapping"][feature]
    first = positions[0] if positions else 0
    places = np.array([places[position] for position in positions], dtype=np.int32).reshape(-1, 2)
    no_answer = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
    return Window(first, places[:, 0], places[:, 1], no_answer)


def _positions(window, answer=("", 0)):
    """
    The positions of the first and the last token of a window that hold a character of an answer.

    Those of no answer if a part of the answer is outside of the window, or if the answer has no tokens.
    """
    text, start = answer
    begin = start + len(text) - len(text.lstrip())
    end = begin + len(text.strip())
    inside = np.flatnonzero((window.begins < end) & (window.ends > begin))
    if not len(inside) or window.begins[0] > begin or window.ends[-1] < end:
        return window.no_answer, window.no_answer
    return window.first + int(inside[0]), window.first + int(inside[-1])


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
