"""How documents become sentences, and blocks of sentences."""

import random
from collections import Counter
from unittest import mock

import pytest
import sentencex

from d2l_bert.tokenization import sentences as module
from d2l_bert.tokenization.sentences import (
    BLOCK_SENTENCES,
    CUT,
    FEWEST_DOCUMENTS,
    LONGEST_SENTENCE,
    Document,
    split_sentences,
)


@pytest.mark.parametrize(
    ("paragraph", "language", "expected"),
    [
        ("Mr. Smith came. He sat down!", "en", ["Mr. Smith came.", "He sat down!"]),
        ("你好。我是学生。", "zh", ["你好。", "我是学生。"]),
        ("A nul\0 here. And\0.", "en", ["A nul\0 here.", "And\0."]),
    ],
)
def test_sentences_are_split(paragraph, language, expected):
    assert [block.sentences for block in split_sentences([Document([paragraph])], language)] == [expected]


def book(paragraphs, sentences_each):
    sentences = [f"Sentence {n}." for n in range(paragraphs * sentences_each)]
    ends = range(0, len(sentences), sentences_each)
    return Document(" ".join(sentences[start : start + sentences_each]) for start in ends)


def blocks_of(*documents):
    """The blocks of some documents, read after `FEWEST_DOCUMENTS` others, so that their first blocks are not small."""
    others = [Document(["One sentence."]) for _ in range(FEWEST_DOCUMENTS)]
    return list(split_sentences([*others, *documents]))[FEWEST_DOCUMENTS:]


def test_a_book_is_cut_into_blocks_of_whole_paragraphs():
    blocks = blocks_of(book(paragraphs=1000, sentences_each=5), book(paragraphs=1, sentences_each=3))
    assert [s for block in blocks[:-1] for s in block.sentences] == [f"Sentence {n}." for n in range(5000)]
    assert [block.document for block in blocks] == [20] * (len(blocks) - 1) + [21]
    for block in blocks[:-2]:
        assert len(block.sentences) == 65


def test_a_very_long_paragraph_is_cut_between_sentences():
    blocks = blocks_of(book(paragraphs=1, sentences_each=5000))
    assert [s for block in blocks for s in block.sentences] == [f"Sentence {n}." for n in range(5000)]
    assert max(len(block.sentences) for block in blocks) == 2 * BLOCK_SENTENCES


@pytest.mark.parametrize(("paragraphs", "sentences_each"), [(4, 1), (30, 1), (1, 40), (100, 5)])
def test_a_document_of_a_small_corpus_is_divided_alike_wherever_it_stands(paragraphs, sentences_each):
    """Small at first, so that a short text can be split; never more than a quarter of what stands before."""
    blocks = list(split_sentences([book(paragraphs, sentences_each) for _ in range(2)]))
    first, second = ([block.sentences for block in blocks if block.document == number] for number in (0, 1))
    count, sizes = paragraphs * sentences_each, list(map(len, first))
    assert first == second and sum(first, []) == [f"Sentence {n}." for n in range(count)]
    assert len(sizes) >= min(4, count // 2) and max(sizes[:4]) <= 6
    assert all(size <= 2 * (1 + sum(sizes[:number]) // 4) for number, size in enumerate(sizes))


def sentences_of(text, counts=None):
    return [sentence for block in split_sentences([Document(text)], "en", counts) for sentence in block.sentences]


def test_text_without_full_stops_is_cut_between_words_and_counted():
    words, counts = [f"word{n}" for n in range(1000)], Counter()
    paragraphs = [" ".join(words), "x" * 2500, "Short."]
    sentences = sentences_of(paragraphs, counts)
    assert " ".join(sentences[:-5]).split() == words and "".join(sentences[-5:-1]) == "x" * 2500
    assert list(map(len, sentences[-5:-1])) == [600, 600, 600, 700]  # where k-mers and pieces of 100 end, too
    assert sentences[-1] == "Short." and max(map(len, sentences)) <= LONGEST_SENTENCE
    assert min(map(len, sentences[:-6])) > LONGEST_SENTENCE - 10
    characters = sum(map(len, paragraphs))
    assert counts == {CUT: 2, "documents": 1, "paragraphs": 3, "characters": characters, "sentences": len(sentences)}


def test_a_long_text_without_full_stops_is_cut_in_each_window_and_loses_nothing():
    counts, text = Counter(), "A word " * 100_000 + "ends. Then two more. Three."
    sentences = sentences_of([text], counts)
    assert sentences[-2:] == ["Then two more.", "Three."] and " ".join(sentences) == text
    assert counts[CUT] == -(-700_000 // (1 << 14))


def test_a_long_paragraph_is_split_in_windows_as_it_is_split_whole(monkeypatch):
    """Its time grows with the square of the length where quotes are open, so it gets short windows alone."""
    rng = random.Random(5)
    words = ["Anna", "saw", "Dr. Smith", "(e.g. No. 7)", '"so"', "today", "in", "Berlin"]
    paragraph = " ".join(
        f"{' '.join(rng.choices(words, k=rng.randint(3, 30)))}{rng.choice('.!?')}" for _ in range(2000)
    )
    whole = [sentence.strip() for sentence in sentencex.segment("en", paragraph)]
    windows = mock.Mock(wraps=sentencex.segment)
    monkeypatch.setattr(module.sentencex, "segment", windows)
    assert sentences_of([paragraph]) == whole
    lengths = [len(call.args[1]) for call in windows.call_args_list]
    assert max(lengths) <= 1 << 14 and sum(lengths) < 1.2 * len(paragraph) and len(lengths) > 10
    quotes = "Er sagte „Haus und ging. " * 20_000
    assert "".join(sentences_of([quotes])).replace(" ", "") == quotes.replace(" ", "")
    assert max(len(call.args[1]) for call in windows.call_args_list) <= 1 << 14
