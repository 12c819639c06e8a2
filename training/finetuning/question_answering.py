"""Question answering: the answer to a question is a span of a context, as in SQuAD (d2l, section 16.6.4)."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from d2l_bert.messages import UserError
from d2l_bert.training.finetuning import metrics, tasks
from d2l_bert.training.finetuning.tasks import Example, Task


# The default of `doc_stride`, as in Transformers' example of question answering.
STRIDE = 128

# The fewest tokens of the context beside a question of full length, which has half of a row. In shorter windows,
# answers are cut off, and what they answer to is out of sight.
LEAST_CONTEXT = 10

FORM = '{"text": ["..."], "answer_start": [0]}'


class Window(NamedTuple):
    """
    The part of a context in one feature.

    Args:
        source: the number of the row.
        first: the position of the context's first token in the feature.
        begins, ends: for each token of the context, where its characters begin and end in the context (C,).
        no_answer: the position whose scores mean that there is no answer: that of [CLS].
    """

    source: int
    first: int
    begins: np.ndarray
    ends: np.ndarray
    no_answer: int


class Span(NamedTuple):
    """A predicted span: the sum of its two scores, its probability, its characters; begin is None for no answer."""

    score: float
    probability: float = 0.0
    begin: int | None = None
    end: int = 0


class QuestionAnswering(Task):
    """
    An answer as a span of a context.

    A context of more tokens than fit beside the question is cut into windows that share `doc_stride` tokens. In a
    window without the answer, the answer is [CLS] (Devlin et al., 2018, section 4.3). The prediction is the best span
    over all windows of a question. If training rows have questions without an answer, as in SQuAD 2, the lowest score
    of [CLS] over the windows stands for "no answer". An example's texts are question and context, its label is a list
    of answers, each with the character of the context at which it begins.
    """

    auto_class = "AutoModelForQuestionAnswering"
    main_metric = "f1"
    metrics_shown = ("f1", "exact_match")
    label_names = ("start_positions", "end_positions")
    default_length = 384
    usual_columns = {"question_column": ("question",), "context_column": ("context",), "label_column": ("answers",)}

    def example(self, cells, split):
        question, context = (self.text(cells, option) for option in ("question_column", "context_column"))
        answers = answers_in(tasks.json_in(cells.get(self.label), self.label), self.label)
        for text, start in answers:
            if not text.strip() or start < 0 or context[start : start + len(text)] != text:
                known = f"it begins at {context.find(text)}" if text in context else "it is nowhere in the context"
                raise ValueError(
                    f"the answer {text!r:.60} is not at character {start} of its context ({known}); correct "
                    f"answer_start or the answer"
                )
        # SQuAD 2 gives such questions what looks like an answer.
        is_impossible = str(cells.get("is_impossible")).lower() in ("true", "1")
        return Example((question, context), [] if is_impossible else answers)

    def learn(self, train):
        self.has_unanswerable = not all(example.label for example in train.examples)
        self.recorded["has_unanswerable"] = self.has_unanswerable

    def checked(self, example, split):
        if split.is_labelled and not example.label and not self.has_unanswerable:
            raise ValueError(
                "a question without an answer, and every training row has an answer; take the row out, or add "
                "training rows without an answer"
            )
        return example

    def check_tokenizer(self, tokenizer, max_seq_length):
        capacity, stride = max_seq_length - tokenizer.num_special_tokens_to_add(pair=True), self.stride(max_seq_length)
        left = capacity - capacity // 2
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

    def features(self, split, tokenizer, max_seq_length):
        most = (max_seq_length - tokenizer.num_special_tokens_to_add(pair=True)) // 2
        questions, contexts = zip(*(example.texts for example in split.examples), strict=True)
        questions = [question.strip() for question in questions]
        short = []
        of_question = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        for question in questions:
            places = tokenizer(question, **of_question)["offset_mapping"]
            short.append(question[: places[most - 1][1]] if len(places) > most else question)
        options = {"truncation": "only_second", "return_offsets_mapping": True, "stride": self.stride(max_seq_length)}
        found = set()
        for row, encoded, number, source in tasks.windows(tokenizer, [short, contexts], max_seq_length, **options):
            inside = [position for position, part in enumerate(encoded.sequence_ids(number)) if part == 1]
            places = [encoded["offset_mapping"][number][position] for position in inside]
            begins, ends = np.array(places, dtype=np.int32).reshape(-1, 2).T
            ids, cls = row["input_ids"], tokenizer.cls_token_id
            no_answer = ids.index(cls) if cls in ids else 0
            window = Window(source, inside[0] if inside else 0, begins, ends, no_answer)
            if split.is_labelled:
                row["start_positions"], row["end_positions"] = _positions(window, *split.examples[source].label[:1])
                if row["start_positions"] != window.no_answer:
                    found.add(source)
            split.features.append(row)
            split.windows.append(window)
        long = sum(count > 1 for count in Counter(window.source for window in split.windows).values())
        lost = sum(bool(example.label) for example in split.examples) - len(found) if split.is_labelled else 0
        cut = sum(one != other for one, other in zip(short, questions, strict=True))
        notes = {
            f"{long:,} contexts are longer than {max_seq_length} tokens: {len(split.features):,} windows": long,
            f"{cut:,} questions are truncated to {most} tokens": cut,
            f"{lost:,} answers are in no window as a whole": lost,
        }
        split.note = "; ".join(note for note, count in notes.items() if count)

    def spans(self, split, outputs) -> list[Span]:
        """
        The predicted span of each row: the best over all windows, or no answer.

        Args:
            outputs: start and end scores (N, T) of the features.
        """
        best, nothing = [Span(-np.inf)] * len(split.examples), [Span(np.inf)] * len(split.examples)
        for window, *scores in zip(split.windows, *outputs, strict=True):
            span, of_nothing = _best_span(window, *scores, self.config.max_answer_length)
            best[window.source] = max(best[window.source], span, key=lambda span: span.score)
            nothing[window.source] = min(nothing[window.source], of_nothing, key=lambda span: span.score)
        if not self.has_unanswerable:
            return best
        # `null_score_diff_threshold` decides between the two.
        return [
            none if none.score - span.score > self.config.null_score_diff_threshold else span
            for span, none in zip(best, nothing, strict=True)
        ]

    def texts(self, split, spans) -> list[str]:
        """The predicted answers; "" for no answer."""
        pairs = zip(split.examples, spans, strict=True)
        return ["" if span.begin is None else example.texts[1][span.begin : span.end] for example, span in pairs]

    def metrics(self, split, outputs):
        gold = [[text for text, _ in example.label] for example in split.examples]
        return metrics.answer_metrics(self.texts(split, self.spans(split, outputs)), gold)

    def predictions(self, split, outputs):
        spans = self.spans(split, outputs)
        return {
            "prediction": self.texts(split, spans),
            "prediction_start": [span.begin for span in spans],
            "probability": [round(span.probability, 6) for span in spans],
        }


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


def _best_span(window, starts, ends, longest):
    """
    The best span of a window, of at most `longest` tokens, and the window's score of no answer.

    A span's probability is that of its start times that of its end, each among the context's tokens and [CLS].
    """
    tokens = slice(window.first, window.first + len(window.begins))
    of_nothing = float(starts[window.no_answer] + ends[window.no_answer])
    sides = [np.append(side[tokens], side[window.no_answer]).astype(np.float64) for side in (starts, ends)]
    total = sum(np.logaddexp.reduce(side) for side in sides)
    nothing = Span(of_nothing, np.exp(of_nothing - total))
    longest = min(longest, len(window.begins))
    if longest == 0:
        return Span(-np.inf), nothing
    padded = np.concatenate([sides[1][:-1], np.full(longest - 1, -np.inf)])
    scores = sides[0][:-1, None] + np.lib.stride_tricks.sliding_window_view(padded, longest)  # (C, longest)
    first, more = divmod(int(scores.argmax()), longest)
    score = float(scores[first, more])
    return Span(score, np.exp(score - total), int(window.begins[first]), int(window.ends[first + more])), nothing
