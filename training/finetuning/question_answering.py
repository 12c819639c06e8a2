"""Question answering: the answer to a question is a span of a context, as in SQuAD (d2l, section 16.6.4)."""

import functools
import re
from typing import NamedTuple

import numpy as np
import torch

from d2l_bert.messages import UserError, explained
from d2l_bert.training.finetuning import intervals, scoring
from d2l_bert.training.finetuning.cells import check_length, json_in
from d2l_bert.training.finetuning.features import Features, Window, encoded, note_of_windows
from d2l_bert.training.finetuning.tasks import Task


# The default of `doc_stride`, as in Transformers' example of question answering.
STRIDE = 128

# The fewest tokens of the context in a window beside a question of full length, which has half of a row. Shorter
# windows would cut answers off, and hide the words around them.
LEAST_CONTEXT = 10

# The position of [CLS], whose scores mean that there is no answer.
NO_ANSWER = 0


class Answer(NamedTuple):
    """An answer of a row, and the character of the context at which it begins."""

    text: str
    start: int


class Span(NamedTuple):
    """A predicted span: the sum of its two scores, its probability, text and first character; None for no answer."""

    score: float
    probability: float = 0.0
    text: str = ""
    begin: int | None = None


class QuestionAnswering(Task):
    """
    An answer as a span of a context.

    A context of more tokens than fit beside the question is cut into windows that share `doc_stride` tokens. In a
    window without the answer, the answer is [CLS] (Devlin et al., 2018, section 4.3). The prediction is the best span
    over all windows of a question. If training rows have questions without an answer, as in SQuAD 2, the lowest score
    of [CLS] over the windows stands for "no answer". A row's texts are question and context, its label is a list of
    answers, or None. A window's positions are those of the context, its places the tokens' characters there.
    `row_results` are the predicted span of each row.
    """

    auto_class = "AutoModelForQuestionAnswering"
    main_metric = "f1"
    needed_to_predict = ("has_unanswerable",)
    least_texts = 2
    more_columns = ("is_impossible",)
    metrics_shown = ("f1", "exact_match")
    shares_of_rows = ("exact_match",)
    default_length = 384
    no_label = "has no answer, as each training row has; take the row out, or add training rows without an answer"
    usual_columns = {"question_column": ("question",), "context_column": ("context",), "label_column": ("answers",)}

    def read(self, row, split):
        question, context = self.texts(row.cells)
        check_length(len(context), f"column {self.columns['context_column'][0]!r:.100}")
        cell = json_in(row.cells.get(self.label_column), self.label_column)
        answers = answers_in(cell, self.label_column)
        for answer in answers:
            check_answer(answer, context)
        # For a question without an answer, SQuAD 2 may have a plausible but wrong one in the column of answers.
        is_impossible = str(row.cells.get("is_impossible")).lower() in ("true", "1")
        return row._replace(texts=(question, context), label=None if is_impossible else answers or None)

    def learn(self, train):
        self.settings["num_labels"] = 2  # the first token and the last, whatever the model was trained for before
        self.has_unanswerable = any(row.label is None for row in train.rows)
        if self.config.null_score_diff_threshold and not self.has_unanswerable:
            raise UserError(
                f"null_score_diff_threshold is for questions without an answer, and {train.title} has none; leave it "
                f"out"
            )

    def shown_label(self, row):
        return row.label[0].text if row.label else "no answer"

    def about_labels(self, rows):
        without = sum(row.label is None for row in rows)
        return f"answers in {self.label_column!r:.40}: {len(rows) - without:,} rows have one, {without:,} have none"

    def learnt(self):
        return {**super().learnt(), "has_unanswerable": self.has_unanswerable}

    def restore(self, learnt):
        super().restore(learnt)
        self.has_unanswerable = learnt["has_unanswerable"]

    def stride(self, max_seq_length: int) -> int:
        """How many tokens two windows of a context share."""
        if self.config.doc_stride is not None:
            return self.config.doc_stride
        return min(STRIDE, max_seq_length // 3)

    def features(self, split, tokenizer, max_seq_length):
        stride = self.stride(max_seq_length)
        capacity = max_seq_length - tokenizer.num_special_tokens_to_add(pair=True)
        most = capacity // 2  # the most tokens of a question
        if capacity - most < max(stride + 1, LEAST_CONTEXT):
            raise UserError(
                f"max_seq_length {max_seq_length}: leaves {capacity - most} tokens of the context beside a long "
                f"question, and answers need {LEAST_CONTEXT}, and more than doc_stride ({stride}); raise "
                f"max_seq_length, or lower doc_stride"
            )
        questions = [row.texts[0] for row in split.rows]
        contexts = [row.texts[1] for row in split.rows]
        short = beginnings(tokenizer, questions, most)
        features = []
        windows = []
        for number, inputs, encoding in encoded(
            tokenizer,
            [short, contexts],
            max_seq_length,
            truncation="only_second",
            stride=stride,
            return_overflowing_tokens=True,
        ):
            positions = np.array([place for place, part in enumerate(encoding.sequence_ids) if part == 1], dtype=int)
            window = Window(number, positions, np.array(encoding.offsets)[positions])
            answers = split.rows[number].label
            inputs["labels"] = positions_of(answers[0], window) if answers else [NO_ANSWER, NO_ANSWER]
            features.append(inputs)
            windows.append(window)
        notes = [note_of_windows(split, windows, max_seq_length)]
        cut = sum(one != other.strip() for one, other in zip(short, questions, strict=True))
        if cut:
            notes.append(f"{cut:,} questions are truncated to {most} tokens")
        lost = _count_lost(split, windows, features)
        if lost:
            notes.append(f"{lost:,} answers are in no window as a whole")
        return Features(features, windows, "; ".join(filter(None, notes)))

    def logits(self, outputs, attention_mask):
        """Start and end scores (B, T, 2); those of padding are the lowest, so that the loss does not depend on it."""
        scores = torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
        return scores.masked_fill(attention_mask[..., None] == 0, torch.finfo(scores.dtype).min)

    def by_row(self, split, windows, logits) -> list[Span]:
        """
        The predicted span of each row: the best over all windows, or no answer.

        Args:
            logits: start and end scores (N, T, 2) of the features.
        """
        answers = [Span(-np.inf)] * len(split.rows)
        no_answers = [Span(np.inf)] * len(split.rows)
        for window, scores in zip(windows, logits, strict=True):
            number = window.row
            context = split.rows[number].texts[1]
            answer, no_answer = _best_span(window, context, scores, self.config.max_answer_length)
            answers[number] = max(answers[number], answer, key=lambda span: span.score)
            no_answers[number] = min(no_answers[number], no_answer, key=lambda span: span.score)
        if not self.has_unanswerable:
            return answers
        predicted = []
        for answer, no_answer in zip(answers, no_answers, strict=True):
            has_none = no_answer.score - answer.score > self.config.null_score_diff_threshold
            predicted.append(no_answer if has_none else answer)
        return predicted

    def scores(self, split, row_results) -> np.ndarray:
        """Exact match and F1 of each row (N, 2)."""
        scores = []
        for row, span in zip(split.rows, row_results, strict=True):
            gold = [answer.text for answer in row.label or []]
            scores.append(scoring.answer_scores(span.text, gold))
        return np.array(scores)

    def metrics(self, split, row_results):
        exact_match, f1 = np.mean(self.scores(split, row_results), axis=0).tolist()
        return {"exact_match": exact_match, "f1": f1}

    def resampled(self, split, row_results):
        exact_match, f1 = self.scores(split, row_results).T
        return functools.partial(intervals.mean_figures, scores={"exact_match": exact_match, "f1": f1})

    def mistakes(self, split, features, logits, row_results):
        exact_match = self.scores(split, row_results)[:, 0]
        return np.where(exact_match == 1, np.nan, [span.probability for span in row_results])

    def predictions(self, split, row_results):
        return {
            "prediction": [span.text for span in row_results],
            "prediction_start": [span.begin for span in row_results],
            "probability": [round(span.probability, 6) for span in row_results],
        }


# ---------------------------------------------------------------------------------------------------------------------
# Answers in rows


def answers_in(value: object, column: str) -> list[Answer]:
    """
    The answers in a cell of SQuAD's form; [] for none.

    Raises:
        ValueError: the cell has another form.
    """
    with explained(
        f"column {column!r:.100} has no answers in SQuAD's form",
        'write {"text": ["..."], "answer_start": [0]}',
        *(KeyError, TypeError, ValueError, OverflowError),
    ):
        if isinstance(value, dict):  # as the Hub has them
            texts = value["text"]
            starts = value["answer_start"]
            if not isinstance(texts, list) or not isinstance(starts, list):
                raise TypeError("text and answer_start are no lists")
            return [Answer(str(text), _whole(start)) for text, start in zip(texts, starts, strict=True)]
        return [Answer(str(answer["text"]), _whole(answer["answer_start"])) for answer in value or []]


def _whole(start: object) -> int:
    """A place in a context, which may be written as a text, or as 4.0; raises `ValueError` for another value."""
    if isinstance(start, bool) or (isinstance(start, float) and not start.is_integer()):
        raise ValueError(f"answer_start is {start!r}, and no whole number")
    if isinstance(start, str) and not re.fullmatch(r"\s*-?[0-9]+\s*", start):
        raise ValueError(f"answer_start is {start!r:.40}, and no whole number")
    return int(start)


def check_answer(answer: Answer, context: str) -> None:
    """Raise `ValueError` if an answer does not stand in its context where it should begin."""
    text, start = answer
    if not text.strip() or start < 0 or context[start : start + len(text)] != text:
        known = f"it begins at {context.find(text)}" if text in context else "it is nowhere in the context"
        raise ValueError(
            f"the answer {text!r:.60} is not at character {start} of its context ({known}); correct "
            f"answer_start or the answer"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Windows


def beginnings(tokenizer, questions: list[str], most: int) -> list[str]:
    """The questions, truncated to `most` tokens."""
    short = []
    for number, _, encoding in encoded(tokenizer, [questions], most, add_special_tokens=False):
        end = max((end for _, end in encoding.offsets), default=0)
        short.append(questions[number][:end].strip())
    return short


def positions_of(answer: Answer, window: Window) -> list[int]:
    """
    The positions of the first and the last token of a window that hold a character of an answer.

    Those of no answer if a part of the answer is outside of the window, or if the answer has no tokens.
    """
    begin = answer.start + len(answer.text) - len(answer.text.lstrip())
    end = begin + len(answer.text.strip())
    begins = window.places[:, 0]
    ends = window.places[:, 1]
    inside = np.flatnonzero((begins < end) & (ends > begin))
    if not len(inside) or begins[0] > begin or ends[-1] < end:
        return [NO_ANSWER, NO_ANSWER]
    return window.positions[inside[[0, -1]]].tolist()


def _count_lost(split, windows, features) -> int:
    """How many rows have an answer that no window has as a whole."""
    found = set()
    for window, inputs in zip(windows, features, strict=True):
        if inputs["labels"] != [NO_ANSWER, NO_ANSWER]:
            found.add(window.row)
    return sum(bool(row.label) for row in split.rows) - len(found)


def _best_span(window: Window, context: str, scores: np.ndarray, longest: int) -> tuple[Span, Span]:
    """
    The best span of a window, of at most `longest` tokens, and the window's score of no answer.

    A span's probability is that of its start times that of its end, each among the context's tokens and [CLS].

    Args:
        scores: the start and end scores of all positions (T, 2); the window has C tokens of the context.
    """
    scores = scores[[*window.positions, NO_ANSWER]].astype(np.float64)  # those of the context, then [CLS] (C + 1, 2)
    total = np.logaddexp.reduce(scores).sum()
    score_of_none = scores[-1].sum()
    no_answer = Span(score_of_none, np.exp(score_of_none - total))
    longest = min(longest, len(window.positions))
    if longest == 0:
        return Span(-np.inf), no_answer
    # For each token the end scores of the tokens from itself on, as many as a span may have: (C, longest).
    ends = np.concatenate([scores[:-1, 1], np.full(longest - 1, -np.inf)])
    ends_from = np.lib.stride_tricks.sliding_window_view(ends, longest)
    sums = scores[:-1, :1] + ends_from  # of the span from token `first` to token `first + more`
    first, more = divmod(int(sums.argmax()), longest)
    score = sums[first, more]
    begin = int(window.places[first, 0])
    end = int(window.places[first + more, 1])
    return Span(score, np.exp(score - total), context[begin:end], begin), no_answer
