"""How documents become sentences, and blocks of sentences."""

import random
from collections import Counter

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


def test_sentences_are_split():
    document = Document(["Mr. Smith came. He sat down!", "Was it late?"])
    (split,) = blocks_of(document, Document([]))
    assert split.sentences == ["Mr. Smith came.", "He sat down!", "Was it late?"]


def test_chinese_sentences_are_split():
    (split,) = split_sentences([Document(["你好。我是学生。"])], "zh")
    assert split.sentences == ["你好。", "我是学生。"]


def test_nul_characters_pass_through():
    (split,) = split_sentences([Document(["A nul\0 here. And\0."])])
    assert split.sentences == ["A nul\0 here.", "And\0."]


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


def test_a_document_of_a_small_corpus_is_divided_alike_wherever_it_stands():
    """Small at first, so that a short text can be split; never more than a quarter of what stands before."""
    for paragraphs, sentences_each in [(4, 1), (30, 1), (1, 40), (100, 5)]:
        count = paragraphs * sentences_each
        first, second = ([], [])
        for block in split_sentences([book(paragraphs, sentences_each), book(paragraphs, sentences_each)]):
            (second if block.document else first).append(block)
        assert [block.sentences for block in first] == [block.sentences for block in second]
        assert [s for block in first for s in block.sentences] == [f"Sentence {n}." for n in range(count)]
        sizes = [len(block.sentences) for block in first]
        assert len(sizes) >= min(4, count // 2) and max(sizes[:4]) <= 6
        assert all(size <= 2 * (1 + sum(sizes[:number]) // 4) for number, size in enumerate(sizes))


def test_text_without_full_stops_is_cut_between_words_and_counted():
    words = [f"word{n}" for n in range(1000)]
    counts = Counter()
    document = Document([" ".join(words), "x" * 2500, "Short."])
    blocks = list(split_sentences([document], "en", counts))
    sentences = [sentence for block in blocks for sentence in block.sentences]
    assert " ".join(sentences[:-5]).split() == words and "".join(sentences[-5:-1]) == "x" * 2500
    assert list(map(len, sentences[-5:-1])) == [600, 600, 600, 700]  # where k-mers and pieces of 100 end, too
    assert sentences[-1] == "Short." and max(map(len, sentences)) <= LONGEST_SENTENCE
    assert min(map(len, sentences[:-6])) > LONGEST_SENTENCE - 10
    assert counts.pop("characters") == sum(map(len, document.paragraphs))
    assert counts == {CUT: 2, "documents": 1, "paragraphs": 3, "sentences": len(sentences)}


def test_a_long_text_without_full_stops_is_cut_in_each_window_and_loses_nothing():
    counts = Counter()
    blocks = list(split_sentences([Document(["A word " * 100_000 + "ends. Then two more. Three."])], "en", counts))
    sentences = [sentence for block in blocks for sentence in block.sentences]
    assert sentences[-2:] == ["Then two more.", "Three."]
    assert " ".join(sentences) == "A word " * 100_000 + "ends. Then two more. Three."
    assert counts[CUT] == -(-700_000 // (1 << 14))


def test_a_long_paragraph_is_split_in_windows_as_it_is_split_whole(monkeypatch):
    """Its time grows with the square of the length where quotes are open, so it gets short windows alone."""
    rng = random.Random(5)
    words = ["Anna", "saw", "Dr. Smith", "(e.g. No. 7)", '"so"', "today", "in", "Berlin"]
    paragraph = " ".join(
        f"{' '.join(rng.choices(words, k=rng.randint(3, 30)))}{rng.choice('.!?')}" for _ in range(2000)
    )
    whole = [sentence.strip() for sentence in sentencex.segment("en", paragraph)]
    lengths, segment = [], sentencex.segment

    def measured(language, text):
        lengths.append(len(text))
        return segment(language, text)

    monkeypatch.setattr(module.sentencex, "segment", measured)
    assert [sentence for block in split_sentences([Document([paragraph])]) for sentence in block.sentences] == whole
    assert max(lengths) <= 1 << 14 and sum(lengths) < 1.2 * len(paragraph) and len(lengths) > 10
    quotes = "Er sagte „Haus und ging. " * 20_000
    found = [sentence for block in split_sentences([Document([quotes])]) for sentence in block.sentences]
    assert "".join("".join(found).split()) == "".join(quotes.split()) and max(lengths) <= 1 << 14
