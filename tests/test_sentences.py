"""How text becomes documents: cleaning, sentences, blocks of sentences."""

from collections import Counter

from d2l_bert.tokenization.sentences import (
    BLOCK_SENTENCES,
    LONGEST_SENTENCE,
    Cleaning,
    Document,
    clean,
    enough_blocks,
    split_sentences,
)


def test_each_cleaning_rule_changes_only_its_own_paragraphs_and_counts_them():
    ligature, composed = "The \ufb01rst cafe\u0301.", "The first caf\xe9."
    texts = [[ligature, "Short.", "Twice the same."], ["Twice the same."]]
    read = {"documents": 2, "paragraphs": 4, "characters": sum(len(line) for text in texts for line in text)}

    def cleaned(**rules):
        counts = Counter()
        found = clean([Document("a", text) for text in texts], Cleaning(**rules), counts)
        return [list(document.paragraphs) for document in found], dict(+counts)

    assert cleaned() == (texts, read)
    assert cleaned(unicode_normalization="NFC")[0][0][0] == "The \ufb01rst caf\xe9."
    assert cleaned(unicode_normalization="NFKC", min_paragraph_characters=8, drop_duplicate_paragraphs=True) == (
        [[composed, "Twice the same."], []],
        {**read, "normalized": 1, "too_short": 1, "duplicates": 1, "characters_cleaned": len("Short.Twice the same.")},
    )


def test_sentences_are_split_and_paragraphs_counted():
    document = Document("d", ["Mr. Smith came. He sat down!", "Was it late?"])
    (split,) = split_sentences([document, Document("empty", [])])
    assert split.sentences == ["Mr. Smith came.", "He sat down!", "Was it late?"]
    assert split.paragraph_ends == [2, 3]


def test_chinese_sentences_are_split():
    (split,) = split_sentences([Document("d", ["你好。我是学生。"])], "zh")
    assert split.sentences == ["你好。", "我是学生。"]


def test_nul_characters_pass_through():
    (split,) = split_sentences([Document("d", ["A nul\0 here. And\0."])])
    assert split.sentences == ["A nul\0 here.", "And\0."]


def book(paragraphs, sentences_each):
    sentences = [f"Sentence {n}." for n in range(paragraphs * sentences_each)]
    ends = range(0, len(sentences), sentences_each)
    return Document("book", (" ".join(sentences[start : start + sentences_each]) for start in ends))


def blocks_of(*documents):
    return list(enough_blocks(split_sentences(documents)))


def test_a_book_is_cut_into_blocks_of_whole_paragraphs():
    blocks = blocks_of(book(paragraphs=1000, sentences_each=5), book(paragraphs=1, sentences_each=3))
    assert [s for block in blocks[:-1] for s in block.sentences] == [f"Sentence {n}." for n in range(5000)]
    assert [block.document for block in blocks] == [0] * (len(blocks) - 1) + [1]
    for block in blocks[:-2]:
        assert block.paragraph_ends == list(range(5, 66, 5)) and len(block.sentences) == 65


def test_a_very_long_paragraph_is_cut_between_sentences():
    blocks = blocks_of(book(paragraphs=1, sentences_each=5000))
    assert [s for block in blocks for s in block.sentences] == [f"Sentence {n}." for n in range(5000)]
    assert max(len(block.sentences) for block in blocks) == 2 * BLOCK_SENTENCES
    assert [block.paragraph_ends for block in blocks[:-1]] == [[]] * (len(blocks) - 1)
    assert blocks[-1].paragraph_ends == [len(blocks[-1].sentences)]


def test_text_without_full_stops_is_cut_between_words_and_counted():
    words = [f"word{n}" for n in range(1000)]
    counts = Counter()
    document = Document("d", [" ".join(words), "x" * 2500, "Short."])
    blocks = list(split_sentences([document], "en", counts))
    sentences = [sentence for block in blocks for sentence in block.sentences]
    assert " ".join(sentences[:-5]).split() == words and "".join(sentences[-5:-1]) == "x" * 2500
    assert list(map(len, sentences[-5:-1])) == [600, 600, 600, 700]  # where k-mers and pieces of 100 end, too
    assert sentences[-1] == "Short." and max(map(len, sentences)) <= LONGEST_SENTENCE
    assert min(map(len, sentences[:-6])) > LONGEST_SENTENCE - 10
    assert counts == {"long_sentences": 2, "sentences": len(sentences)}
