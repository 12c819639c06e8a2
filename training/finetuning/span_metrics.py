"""Metrics of spans: entities of BIO tags as CoNLL counts them, answers as SQuAD compares them."""

import re
import string
from collections import Counter


def entities(tags: list[str], strict: bool = False) -> list[tuple[str, int, int]]:
    """
    The entities that the BIO tags of a text mark.

    Without `strict`, as CoNLL's shared tasks count (Tjong Kim Sang and De Meulder, 2003): an entity begins at `B-X`,
    and at an `I-X` that follows `O` or a tag of another type; so tags of the older IOB1 scheme are read too. With
    `strict`, it begins at `B-X` only, and an `I-X` without its beginning belongs to no entity (IOB2).

    Returns:
        For each entity its type, the number of its first word, and the number after that of its last word.
    """
    found, kind, begin = [], None, 0
    for number, tag in enumerate([*tags, "O"]):
        prefix, _, named = tag.partition("-")
        if kind is not None and (prefix != "I" or named != kind):
            found.append((kind, begin, number))
            kind = None
        if prefix == "B" or (prefix == "I" and kind is None and not strict):
            kind, begin = named, number
    return found


def entity_counts(gold: list[list[str]], predicted: list[list[str]], strict: bool = False) -> dict[str, Counter]:
    """
    Counts of entities by their type, over texts. An entity is right if its type, first and last word are right.

    Returns:
        Three counters: `right`, `predicted` and `gold`.
    """
    counts = {"right": Counter(), "predicted": Counter(), "gold": Counter()}
    for true_tags, tags in zip(gold, predicted, strict=True):
        true, said = entities(true_tags, strict), entities(tags, strict)
        counts["gold"].update(kind for kind, _, _ in true)
        counts["predicted"].update(kind for kind, _, _ in said)
        counts["right"].update(kind for kind, _, _ in set(true) & set(said))
    return counts


def precision_recall_f1(right: int, predicted: int, gold: int) -> tuple[float, float, float]:
    """Precision, recall and F1 of counts; 0 where they have no denominator."""
    precision = right / predicted if predicted else 0.0
    recall = right / gold if gold else 0.0
    return precision, recall, 2 * right / (predicted + gold) if predicted + gold else 0.0


def tag_metrics(gold: list[list[str]], predicted: list[list[str]], has_entities: bool) -> dict[str, float]:
    """
    Metrics of the tags of texts.

    Args:
        has_entities: whether the tags are BIO.

    Returns:
        `accuracy` over words. With entities also `precision`, `recall` and `f1` over all entities of all texts (micro
        averages), and `strict_f1`, which reads both sides by IOB2.
    """
    pairs = [pair for true, said in zip(gold, predicted, strict=True) for pair in zip(true, said, strict=True)]
    found = {"accuracy": sum(true == said for true, said in pairs) / len(pairs)}
    if has_entities:
        totals = [counter.total() for counter in entity_counts(gold, predicted).values()]
        strict = [counter.total() for counter in entity_counts(gold, predicted, strict=True).values()]
        precision, recall, f1 = precision_recall_f1(*totals)
        strict_f1 = precision_recall_f1(*strict)[2]
        found |= {"precision": precision, "recall": recall, "f1": f1, "strict_f1": strict_f1}
    return found


ARTICLE = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised_answer(text: str) -> str:
    """
    An answer as SQuAD compares it: in lower case, without ASCII punctuation, without the words a, an and the, with one
    space between words (Rajpurkar et al., 2016, section 6.1).
    """
    return " ".join(ARTICLE.sub(" ", text.lower().translate(PUNCTUATION)).split())


def answer_scores(prediction: str, gold: list[str]) -> tuple[float, float]:
    """
    Exact match and F1 of one predicted answer, as the evaluation script of SQuAD 2 computes them.

    F1 is that of the words which both answers have, repeated words counted. If one of the two answers has no words
    after normalisation, both scores are 1 if the other has none either, else 0.

    Args:
        prediction: the predicted answer; "" says that the question has none.
        gold: the true answers, of which the best counts; [] if the question has none.
    """
    said = normalised_answer(prediction)
    true = [normalised for normalised in map(normalised_answer, gold) if normalised] or [""]
    return max(float(said == answer) for answer in true), max(
        _word_f1(said.split(), answer.split()) for answer in true
    )


def _word_f1(said, true):
    if not said or not true:
        return float(said == true)
    return 2 * (Counter(said) & Counter(true)).total() / (len(said) + len(true))


def answer_metrics(predictions: list[str], gold: list[list[str]]) -> dict[str, float]:
    """
    Means of exact match and F1 over questions.

    Args:
        predictions: an answer for each question; "" for none.
        gold: the true answers of each question; [] for a question without an answer.
    """
    scores = [answer_scores(said, true) for said, true in zip(predictions, gold, strict=True)]
    exact, f1 = (sum(values) / len(scores) for values in zip(*scores, strict=True))
    return {"exact_match": exact, "f1": f1}
