"""The kind `answers`: the answer to a question is a span of a context, as in SQuAD (d2l, section 16.6.4)."""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from d2l_bert.errors import UserError
from d2l_bert.progress import counted
from d2l_bert.training.finetuning import span_metrics
from d2l_bert.training.finetuning.bars import draw_answer_bars
from d2l_bert.training.finetuning.kind import Features, Kind, check_text_column, has_text, whole_number


ANSWER_FILE = "answers_by_question.png"
ROWS_AT_ONCE = 500

# The default of `doc_stride`, as in Transformers' example of question answering.
STRIDE = 128

# The fewest tokens of the context beside a question of full length, which has half of a row. In shorter windows,
# answers are cut off, and what they answer to is out of sight.
LEAST_CONTEXT = 10


# How tables write the values of `is_impossible`; an empty cell says nothing.
IMPOSSIBLE = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False, "none": False}


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
        self.context = self.config.context_column or "context"
        self.question = self.config.question_column or "question"
        train.require(self.context, "context_column")
        train.require(self.question, "question_column")
        self.label = self.config.label_column or ["answers"]
        train.require(self.label[0], "label_column")
        chosen = [self.context, self.question, *self.label]
        if len(set(chosen)) < len(chosen):
            raise UserError(f"column {max(chosen, key=chosen.count)!r} cannot be two of context, question and answers")

    def learn(self, train):
        gold = [self.answers(train, row) for row in range(len(train))]
        if not any(gold):
            raise UserError(f"{train.label}: no row has an answer in column {self.label[0]!r}; name another column")
        self.has_unanswerable = not all(gold)

    def answers(self, table, row) -> list[tuple[str, int]]:
        """
        The answers of a row, each with the character of the context at which it begins; [] if there is none.

        Raises:
            UserError: the cell has another form than SQuAD's.
        """
        column = self.label[0]
        value, place = table.columns[column][row], table.place(row)
        form = '{"text": ["..."], "answer_start": [0]}'
        if isinstance(value, str) and value.strip():
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise UserError(f"{place}: column {column!r} holds {value[:40]!r}; write {form}") from None
        if value is None or value == "" or (isinstance(value, str) and not value.strip()):
            return []
        if isinstance(value, dict):
            texts, starts = value.get("text"), value.get("answer_start")
            if isinstance(texts, str):
                texts, starts = [texts], [starts]
        elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
            texts = [entry.get("text") for entry in value]
            starts = [entry.get("answer_start") for entry in value]
        else:
            texts = starts = None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"{place}: column {column!r} has no answers in SQuAD's form; write {form}")
        if not isinstance(starts, list) or not all(type(start) is int for start in starts):
            raise UserError(f"{place}: column {column!r} has no whole numbers under answer_start; write {form}")
        if len(texts) != len(starts):
            raise UserError(
                f"{place}: column {column!r} has {counted(len(texts), 'text')} and "
                f"{counted(len(starts), 'value')} of answer_start; give each text its own"
            )
        return list(zip(texts, starts, strict=True))

    def is_labelled(self, table):
        if self.label[0] not in table.columns:
            return False
        return any(self._is_impossible(table, row) or self.answers(table, row) for row in range(len(table)))

    def _is_impossible(self, table, row):
        """Whether a row says in SQuAD's column that its question has no answer."""
        value = table.columns["is_impossible"][row] if "is_impossible" in table.columns else None
        written = str(whole_number(value)).strip().lower()
        if written not in IMPOSSIBLE:
            raise UserError(f"{table.place(row)}: is_impossible is {value!r:.40}; write true or false")
        return IMPOSSIBLE[written]

    def usable(self, table):
        if not table.is_dataset:
            return table, {}
        counts, kept = Counter(), []
        contexts, questions = (
            table.require(self.context, "context_column"),
            table.require(self.question, "question_column"),
        )
        for row in range(len(table)):
            context, question = contexts[row], questions[row]
            if not (has_text(context) and has_text(question)):
                counts["an empty context or question"] += 1
            elif self.label[0] in table.columns and any(
                _misplaced(context, *answer) for answer in self.answers(table, row)
            ):
                counts["an answer that is not in its context"] += 1
            else:
                kept.append(row)
        return table.select(kept) if counts else table, counts

    def check(self, table):
        for column, option in ((self.context, "context_column"), (self.question, "question_column")):
            check_text_column(table, column, option)
        if not self.is_labelled(table):
            return
        for row in range(len(table)):
            context, gold = table.columns[self.context][row], self.answers(table, row)
            if not gold and not self.has_unanswerable:
                raise UserError(
                    f"{table.place(row)}: a question without an answer, and every training row has an answer; take "
                    f"the row out, or add training rows without an answer"
                )
            if gold and self._is_impossible(table, row):
                raise UserError(f"{table.place(row)}: is_impossible is true, and there is an answer; correct one")
            for text, start in gold:
                if not text.strip():
                    raise UserError(f"{table.place(row)}: an answer is empty; write its text, or take the answer out")
                if _misplaced(context, text, start):
                    place = context.find(text)
                    known = f"it begins at {place}" if place >= 0 else "it is nowhere in the context"
                    raise UserError(
                        f"{table.place(row)}: the answer {_shortened(text)!r} is not at character {start} of its "
                        f"context ({known}); correct answer_start or the answer"
                    )

    def texts(self, table):
        return list(zip(table.columns[self.question], table.columns[self.context], strict=True))

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
        for begin in range(0, len(table), ROWS_AT_ONCE):
            numbers = range(begin, min(begin + ROWS_AT_ONCE, len(table)))
            questions = [table.columns[self.question][row].strip() for row in numbers]
            contexts = [table.columns[self.context][row] for row in numbers]
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
                gold = self.answers(table, begin + number) if is_labelled else []
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
        contexts = table.columns[self.context]
        return [
            _text(context, spans[0]) if spans else ""
            for context, spans in zip(contexts, self.best_spans(table, features, predictions), strict=True)
        ]

    def gold_texts(self, table) -> list[list[str]]:
        """The texts of the true answers of each row; [] for a question without an answer."""
        return [[text for text, _ in self.answers(table, row)] for row in range(len(table))]

    def metrics(self, table, features, predictions):
        return span_metrics.answer_metrics(self.predicted_texts(table, features, predictions), self.gold_texts(table))

    def predicted_columns(self, table, features, predictions):
        columns = {"prediction": [], "prediction_start": [], "probability": [], "n_best": []}
        contexts = table.columns[self.context]
        for context, spans in zip(contexts, self.best_spans(table, features, predictions), strict=True):
            scores = np.array([span.score for span in spans])
            shares = np.exp(scores - scores.max(initial=-np.inf))
            shares = [round(float(share), 6) for share in shares / shares.sum()] if spans else [0.0]
            columns["prediction"].append(_text(context, spans[0]) if spans else "")
            columns["prediction_start"].append(spans[0].begin if spans else None)
            columns["probability"].append(shares[0])
            columns["n_best"].append(
                [
                    {"text": _text(context, span), "answer_start": span.begin, "probability": share}
                    for span, share in zip(spans, shares, strict=False)
                ]
            )
        return columns

    def pictures(self, table, features, predictions, folder):
        scores = defaultdict(list)
        predicted, gold = self.predicted_texts(table, features, predictions), self.gold_texts(table)
        for question, said, true in zip(table.columns[self.question], predicted, gold, strict=True):
            first = question.split()[0].lower().strip("?,.:") or question.split()[0]
            scores[first if true else "without an answer"].append(span_metrics.answer_scores(said, true))
        draw_answer_bars(scores, table.name, Path(folder, ANSWER_FILE))
        return {ANSWER_FILE: f"Exact match and F1 on {table.name}, by the first word of the question"}


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


def _text(context, span):
    return "" if span.begin is None else context[span.begin : span.end]


def _misplaced(context, text, start):
    return start < 0 or context[start : start + len(text)] != text


def _shortened(text, most=60):
    return text if len(text) <= most else f"{text[: most - 1]}…"
