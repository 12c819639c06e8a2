"""How the lines of a text divide it: the kinds of text that are told apart, what is read of each; its sentences."""

import itertools
import random
import re
import textwrap
from collections import Counter
from unittest import mock

import pytest
import sentencex
from text_sources import texts, write_table

from d2l_bert.tokenization import documents as documents_module
from d2l_bert.tokenization import sentences as module
from d2l_bert.tokenization.documents import Document
from d2l_bert.tokenization.sentences import (
    BLOCK_SENTENCES,
    CUT,
    FEWEST_DOCUMENTS,
    LONGEST_SENTENCE,
    WINDOW_CHARACTERS,
    split_sentences,
)
from d2l_bert.tokenization.sources import HowToRead, dataset_source, file_source
from d2l_bert.tokenization.text_layout import DROPPED, find_layout, split_documents


rng = random.Random(7)
WORDS = "the a old house river of and was seen near tall tree in winter while birds sang over fields again".split()


def words(least, most):
    return spaced(WORDS, rng.randint(least, most))


def sentence(least=4, most=16, stop="."):
    return f"{words(least, most).capitalize()}{stop}"


def prose(sentences=4):
    return " ".join(sentence() for _ in range(sentences))


def repeated(make, count=40, separator="\n"):
    return separator.join(make(number) for number in range(count))


THAI = "ผมไปตลาด เขามาบ้าน ฝนตกหนัก นกร้องเพลง แม่น้ำกว้าง ต้นไม้สูง".split()
HINDI = "नदी घर पेड़ और था में पुराना बड़ा देखा पास सर्दी पक्षी गाते खेत फिर आदमी शहर दिन रात".split()
CHINESE = "山川河流春夏秋冬风花雪月人来去看听说话在有的是"


def chinese_clause():
    return "".join(rng.choices(CHINESE, k=rng.randint(6, 20)))


def chinese_sentence():
    return f"{chinese_clause()}，{chinese_clause()}。"


def chinese(sentences):
    return "".join(chinese_sentence() for _ in range(sentences))


def mixed(sentences):
    """Chinese sentences, each before one in Latin letters."""
    return "".join(f"{chinese_sentence()}{sentence()}" for _ in range(sentences))


def hindi(sentences):
    return " ".join(f"{spaced(HINDI, 9)}।" for _ in range(sentences))


def lines_of(make, count):
    return "\n".join(make() for _ in range(count))


def by_columns(text, most):
    """Wrapped where a terminal would, on which a letter of Chinese takes two columns."""
    return textwrap.fill(re.sub(r"([^\0-\x7f])", "\\1\0", text), most).replace("\0", "")


def spaced(choices, count):
    return " ".join(rng.choices(choices, k=count))


def log(number):
    level = rng.choice(["INFO", "WARN"])
    return f"081109 2036{number:02d} {level} dfs.DataNode: PacketResponder for block blk_{rng.random()} {words(1, 9)}"


def code(number):
    return f"def f{number}(a, b):\n    c = a.b + {number}\n    return [c, b]\n"


KINDS = {
    "books, a paragraph a line": (repeated(lambda _: prose(5), 40, "\n\n"), "file", "paragraphs"),
    "wrapped, with empty lines": (repeated(lambda _: textwrap.fill(prose(8), 70), 12, "\n\n"), "file", "wrapped"),
    "wrapped and indented, without empty lines": (
        repeated(lambda _: textwrap.fill(prose(8), 60, initial_indent="  ")),
        "file",
        "wrapped",
    ),
    "wrapped, with headings": (
        repeated(lambda n: f"CHAPTER {n}\n\n{textwrap.fill(prose(6), 72)}", 12, "\n\n"),
        "file",
        "wrapped",
    ),
    "wrapped, with code and a wide table": (
        repeated(
            lambda n: f"# Part\n\n{textwrap.fill(prose(6), 80)}\n\n    {code(n)}\n| {words(30, 40)} | {n} |",
            12,
            "\n\n",
        ),
        "file",
        "wrapped",
    ),
    "wrapped Chinese": (
        repeated(lambda _: textwrap.fill(chinese(9), 35), 9, "\n\n"),
        "file",
        "wrapped",
    ),
    "wrapped Chinese with Latin words, by columns": (
        repeated(lambda _: by_columns(mixed(6), 76), 9, "\n\n"),
        "file",
        "wrapped",
    ),
    "wrapped at four widths, one after the other": (
        repeated(lambda n: textwrap.fill(prose(200), 55 + 8 * n), 4, "\n\n"),
        "file",
        "wrapped",
    ),
    "wrapped Hindi": (
        repeated(lambda _: textwrap.fill(hindi(8), 60)),
        "file",
        "wrapped",
    ),
    "BERT's format": (
        repeated(lambda _: lines_of(sentence, rng.randint(2, 6)), 20, "\n\n"),
        "blank_line",
        "sentences",
    ),
    "BERT's format, quotes and brackets": (
        repeated(lambda _: f"{sentence(stop='.”')}\n({sentence(stop='.)')}\n{sentence(stop='?')}", 20, "\n\n"),
        "blank_line",
        "sentences",
    ),
    "BERT's format, with Dr. Smith in some sentences": (
        repeated(lambda n: f"{sentence()}\n{sentence()}\nDr. Smith saw {words(3, 6)}.", 20, "\n\n"),
        "blank_line",
        "sentences",
    ),
    "BERT's format in Hindi": (repeated(lambda _: "नदी पुराना घर।\nपेड़ था।", 20, "\n\n"), "blank_line", "sentences"),
    "BERT's format in Chinese": (
        repeated(lambda _: f"{chinese_sentence()}\n{chinese_sentence()}", 20, "\n\n"),
        "blank_line",
        "sentences",
    ),
    "BERT's format in Urdu": (repeated(lambda _: "یہ گھر ہے۔\nکیا وہ آیا؟", 20, "\n\n"), "blank_line", "sentences"),
    "articles, a paragraph a line": (
        repeated(lambda _: lines_of(prose, 4), 20, "\n\n"),
        "blank_line",
        "paragraphs",
    ),
    "log": (repeated(log), "line", "sentences"),
    "log with stack traces": (
        repeated(lambda n: f"{log(n)}\n  at java.io.Reader.read(Reader.java:{n})\n  at Main.main(Main.java:7)"),
        "line",
        "sentences",
    ),
    "log of lines of the same length": (
        repeated(lambda n: f"node7 cron of c. acme. Inc. started job {n:03d}"),
        "line",
        "paragraphs",
    ),
    "tweets": (repeated(lambda n: words(3, 20) if n % 2 else f"{sentence()} {words(2, 5)}!"), "line", "paragraphs"),
    "tweets without full stops": (repeated(lambda n: words(3, 20)), "line", "sentences"),
    "SMILES": (repeated(lambda n: f"CC(=O)Oc1ccccc1C(=O)O{'C' * n}"), "line", "sentences"),
    "FASTA": (
        repeated(lambda n: f">seq{n}\n" + "\n".join("".join(rng.choices("ACGT", k=60)) for _ in range(5))),
        "line",
        "sentences",
    ),
    "Thai, a paragraph a line, without empty lines": (repeated(lambda _: spaced(THAI, 20)), "line", "sentences"),
    "Thai, a paragraph a line, with empty lines": (
        repeated(lambda _: spaced(THAI, 20), separator="\n\n"),
        "file",
        "sentences",
    ),
    "code": (repeated(code), "file", "sentences"),
    "verse": (
        repeated(lambda _: "\n".join(f"{words(4, 8).capitalize()}{s}" for s in ("", ",", "", ".")), 12, "\n\n"),
        "file",
        "paragraphs",
    ),
    "a sonnet, too short to tell": (repeated(lambda n: words(5, 8).capitalize(), 14), "file", "sentences"),
    "Markdown, a paragraph a line": (
        repeated(lambda n: f"## {words(1, 3)}\n\n{prose(3)}\n\n- {words(3, 6)}\n- {words(3, 6)}", 20, "\n\n"),
        "file",
        "paragraphs",
    ),
    "one line": (words(3000, 3001), "file", "sentences"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_taken_for_what_it_is(kind):
    text, *expected = KINDS[kind]
    layout = find_layout(text.split("\n"))
    assert [layout.documents, layout.lines] == expected


def read(source):
    """The documents of a source as lists of sentences."""
    found = {}
    for document, _, sentences in split_sentences(source.documents, "en", Counter()):
        found.setdefault(document, []).extend(sentences)
    return list(found.values())


def test_a_document_ends_where_the_option_says(tmp_path):
    """The same lines, read in each way; a line is never joined to the next, as the lines are not wrapped."""
    (tmp_path / "a.txt").write_text("One came. Two went.\nThree sat.\n\n \nFour rose. Five fell.\nSix stood.\n")
    one = ["One came.", "Two went."]
    three = ["Three sat."]
    four = ["Four rose.", "Five fell."]
    six = ["Six stood."]
    whole = [[*one, *three, *four, *six]]
    expected = {"auto": whole, "file": whole, "line": [one, three, four, six], "blank_line": [one + three, four + six]}
    sources = {documents: file_source(tmp_path, HowToRead(documents=documents)) for documents in expected}
    for documents, source in sources.items():
        assert read(source) == expected[documents], documents
        counted = +source.counts
        assert [counted[key] for key in counted if key.startswith("files ")] == [1]
    assert len({str(source.identity) for source in sources.values()}) == 4


BLOCKS = [[sentence(), f"Dr. Smith came, e.g. with No. {n}.", sentence()] for n in range(30)]
LOG = [f"{log(number)} of c. acme. Inc. {number}" if number % 3 == 0 else log(number) for number in range(100)]
FEW_STOPS = [*LOG[:6], *(line for line in LOG if "acme" not in line)]
DAYS = [["I love my dog.", f"Day {number}."] for number in range(40)]


def seen_sentences():
    return [f"{words(4, 16).capitalize()} seen." for _ in range(10)]


def japanese_sentence():
    return "".join(rng.choices("エディターとして使う", k=rng.randint(20, 90))) + "。"


def wrapped(sentences):
    return textwrap.fill(" ".join(sentences), 60)


PROSE = [seen_sentences() for _ in range(20)]
JAPANESE = [[japanese_sentence() for _ in range(4)] for _ in range(30)]
JAPANESE_WRAPPED = [textwrap.fill("".join(paragraph), 38) for paragraph in JAPANESE]


def with_controls(block):
    """Lines with characters that BERT deletes."""
    return "\n".join(block).replace("o", "o\x0b").replace("e", "\x85e")


READ = {  # the text of a file, or the rows of a table; its documents; how they are counted
    "BERT's format": ("\n\n".join(map("\n".join, BLOCKS)), BLOCKS, "files divided at empty lines, a sentence a line"),
    "a log": ("\r\n".join(LOG), [[line] for line in LOG], "files divided into lines, a sentence a line"),
    "wrapped Japanese": (
        "\n\n".join(JAPANESE_WRAPPED),
        [list(itertools.chain.from_iterable(JAPANESE))],
        "files read whole, lines joined",
    ),
    "control characters that BERT deletes": (
        "\n\n".join(map(with_controls, BLOCKS)),
        BLOCKS,
        "files divided at empty lines, a sentence a line",
    ),
    "rows": (list(map(" ".join, DAYS)), DAYS, "rows read whole, a paragraph a line"),
    "rows, a newline in one": (
        ["I\nlove my dog. Day 0.", *map(" ".join, DAYS[1:])],
        [["I", "love my dog.", "Day 0."], *DAYS[1:]],
        "rows read whole, a paragraph a line",
    ),
    "rows of wrapped prose": (
        [f"{wrapped(row[:5])}\n\n{wrapped(row[5:])}" for row in PROSE],
        PROSE,
        "rows read whole, lines joined",
    ),
    "rows of a log": (FEW_STOPS, [[line] for line in FEW_STOPS], "rows read whole, a sentence a line"),
}


@pytest.mark.parametrize("kind", READ)
def test_the_documents_and_sentences_are_those_of_the_text(kind, tmp_path):
    text, documents, counted = READ[kind]
    if "rows" in kind:
        file = write_table(tmp_path / "a.jsonl", [{"text": row} for row in text])
        count = len(text)
    else:
        file = tmp_path / "a.txt"
        file.write_bytes(text.encode())
        count = 1
    source = file_source(file)
    assert read(source) == documents
    whole = "\n".join(text) if "rows" in kind else text
    dropped = whole.count("\x0b") + whole.count("\x85")
    assert +source.counts == +Counter({counted: count, DROPPED: dropped})
    assert read(file_source(file, HowToRead(max_documents=7))) == documents[:7]


@pytest.mark.parametrize("opened", [file_source, lambda folder, how: dataset_source(str(folder), how=how)])
def test_rows_are_divided_like_files_and_put_together_in_blocks(opened, tmp_path):
    row = {"text": "One came.\nTwo went.\n\nThree sat."}
    write_table(tmp_path / "train.jsonl", [{"text": ""}, *[row] * 100])
    one = "One came."
    two = "Two went."
    three = "Three sat."
    assert read(opened(tmp_path, HowToRead(documents="line"))) == [[one], [two], [three]] * 100
    assert read(opened(tmp_path, HowToRead(documents="blank_line"))) == [[one, two], [three]] * 100
    blocks = opened(tmp_path, HowToRead(documents="file"))
    assert read(blocks) == [[one, two, three] * 64, [one, two, three] * 36]
    assert +blocks.counts == {"rows read in documents of 64 rows": 100, "rows without text": 1}


@pytest.mark.parametrize("documents", ["auto", "file", "blank_line", "line"])
def test_control_characters_that_are_dropped_of_rows_are_counted_wherever_documents_end(documents, tmp_path):
    """Two in the first row, one in the second."""
    table = write_table(tmp_path / "a.jsonl", [{"text": "One\x0b came.\x0c"}, {"text": "Two w\x1cent."}])
    source = file_source(table, HowToRead(documents=documents))
    assert list(itertools.chain.from_iterable(read(source))) == ["One came.", "Two went."]
    assert source.counts[DROPPED] == 3


@pytest.mark.slow
@pytest.mark.parametrize("text", ["x" * 4_000_000, "word " * 800_000, "A word. " * 500_000])
@pytest.mark.parametrize("documents", ["auto", "line"])
def test_a_line_of_megabytes_is_one_document(text, documents, tmp_path):
    (tmp_path / "a.txt").write_text(text)
    (sentences,) = read(file_source(tmp_path, HowToRead(documents=documents)))
    assert sum(len(sentence.replace(" ", "")) for sentence in sentences) == len(text.replace(" ", ""))


def without_spaces(paragraphs):
    return "".join("".join(paragraphs).split())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 64])
@pytest.mark.parametrize("documents", ["file", "blank_line", "line"])
def test_a_text_read_in_small_pieces_is_not_changed(size, documents, tmp_path, monkeypatch):
    text = "\ufeffOne\r\nline – naïve.\r\n\r\n \n\nNext\n \t\nparagraph 😀 here.\r\n\n\nالعربية.\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    layout = find_layout(text.split("\n"), documents)
    monkeypatch.setattr(documents_module, "find_layout", lambda lines, documents: layout)
    in_lines = split_documents(text.removeprefix("\ufeff").split("\n"), layout, 1 << 20, Counter())
    expected = list(map(list, in_lines))
    monkeypatch.setattr(documents_module, "READ_CHARACTERS", size)
    found = texts(file_source(tmp_path, HowToRead(documents=documents)))
    if size < 32 and documents != "line":  # with such small pieces, long lines and paragraphs are cut
        found = list(map(without_spaces, found))
        expected = list(map(without_spaces, expected))
    assert found == expected


@pytest.mark.parametrize("longest", [1, 100])
def test_a_line_longer_than_the_pieces_has_single_spaces_too(longest):
    for line in ("a b", "  a  b ", "a\t\u2028b\xa0 c", "\x85", "a \x1f b"):
        found = list(map(list, split_documents([line], find_layout([line]), longest, Counter())))
        assert found == [[" ".join(line.split())]] * bool(line.strip())


# ---------------------------------------------------------------------------------------------------------------------
# Sentences, and blocks of sentences


@pytest.mark.parametrize(
    ("paragraph", "language", "expected"),
    [
        ("Mr. Smith came. He sat down!", "en", ["Mr. Smith came.", "He sat down!"]),
        ("你好。我是学生。", "zh", ["你好。", "我是学生。"]),
        ("A nul\0 here. And\0.", "en", ["A nul\0 here.", "And\0."]),
        ("«ជាមួយ។» ជាពីរ។មែន៕", "km", ["«ជាមួយ។» ជាពីរ។", "មែន៕"]),
        ("བོད་ཡིག། དེ་རིང་། །", "bo", ["བོད་ཡིག།", "དེ་རིང་། །"]),
        ("ሰላም ነው፡፡ ደህና፡፡", "am", ["ሰላም ነው፡፡", "ደህና፡፡"]),
    ],
)
def test_sentences_are_split(paragraph, language, expected):
    assert list(split_sentences([Document([paragraph])], language, Counter())) == [(0, 0, expected)]


def book(paragraphs, sentences_each):
    sentences = [f"Sentence {n}." for n in range(paragraphs * sentences_each)]
    ends = range(0, len(sentences), sentences_each)
    return Document(" ".join(sentences[start : start + sentences_each]) for start in ends)


def blocks_of(*documents):
    """The blocks of some documents, read after `FEWEST_DOCUMENTS` others, so that a short one is one block."""
    others = [Document(["One sentence."]) for _ in range(FEWEST_DOCUMENTS)]
    return list(split_sentences([*others, *documents], "en", Counter()))[FEWEST_DOCUMENTS:]


def test_a_book_is_cut_into_blocks_of_whole_paragraphs():
    blocks = blocks_of(book(paragraphs=1000, sentences_each=5), book(paragraphs=1, sentences_each=3))
    documents, _, sentences = zip(*blocks, strict=True)
    assert sum(sentences[:-1], []) == [f"Sentence {n}." for n in range(5000)]
    assert list(documents) == [20] * (len(blocks) - 1) + [21]
    for block in itertools.dropwhile(lambda block: len(block) < 65, sentences[:-2]):
        assert len(block) == 65


def test_a_very_long_paragraph_is_cut_between_sentences():
    blocks = [sentences for *_, sentences in blocks_of(book(paragraphs=1, sentences_each=5000))]
    assert sum(blocks, []) == [f"Sentence {n}." for n in range(5000)]
    assert max(map(len, blocks)) == 2 * BLOCK_SENTENCES


@pytest.mark.parametrize(("paragraphs", "sentences_each"), [(4, 1), (30, 1), (1, 40), (100, 5)])
def test_a_document_of_a_small_corpus_is_divided_alike_wherever_it_stands(paragraphs, sentences_each):
    """Small at first, so that a short text can be split; never more than a quarter of what stands before."""
    books = [book(paragraphs, sentences_each) for _ in range(2)]
    first = []
    second = []
    for document, _, block in split_sentences(books, "en", Counter()):
        (first if document == 0 else second).append(block)
    count = paragraphs * sentences_each
    sizes = list(map(len, first))
    assert first == second and sum(first, []) == [f"Sentence {n}." for n in range(count)]
    assert len(sizes) >= min(4, count // 2)
    assert max(sizes[:4]) <= 6
    before = 0
    for size in sizes:
        assert size <= 2 * (1 + before // 4)
        before += size


def sentences_of(text, counts):
    blocks = [block for *_, block in split_sentences([Document(text)], "en", counts)]
    return list(itertools.chain.from_iterable(blocks))


def test_text_without_full_stops_is_cut_between_words_and_counted():
    words = [f"word{n}" for n in range(1000)]
    counts = Counter()
    paragraphs = [" ".join(words), "x" * 2500, "Short."]
    sentences = sentences_of(paragraphs, counts)
    assert " ".join(sentences[:-5]).split() == words
    assert "".join(sentences[-5:-1]) == "x" * 2500
    assert list(map(len, sentences[-5:-1])) == [600, 600, 600, 700]  # where k-mers and pieces of 100 end, too
    assert sentences[-1] == "Short." and max(map(len, sentences)) <= LONGEST_SENTENCE
    assert min(map(len, sentences[:-6])) > LONGEST_SENTENCE - 10
    characters = sum(map(len, paragraphs))
    assert counts == {CUT: 2, "documents": 1, "paragraphs": 3, "characters": characters, "sentences": len(sentences)}


def test_a_long_text_without_full_stops_is_cut_in_each_window_and_loses_nothing():
    counts = Counter()
    text = "A word " * 100_000 + "ends. Then two more. Three."
    sentences = sentences_of([text], counts)
    assert sentences[-2:] == ["Then two more.", "Three."]
    assert " ".join(sentences) == text
    assert counts[CUT] == -(-700_000 // WINDOW_CHARACTERS)


@pytest.mark.slow
def test_a_long_paragraph_is_split_in_windows_as_it_is_split_whole(monkeypatch):
    """Its time grows with the square of the length where quotes are open, so it gets short windows alone."""
    rng = random.Random(5)
    words = ["Anna", "saw", "Dr. Smith", "(e.g. No. 7)", '"so"', "today", "in", "Berlin"]
    sentences = []
    for _ in range(2000):
        drawn = rng.choices(words, k=rng.randint(3, 30))
        sentences.append(" ".join(drawn) + rng.choice(".!?"))
    paragraph = " ".join(sentences)
    whole = [sentence.strip() for sentence in sentencex.segment("en", paragraph)]
    windows = mock.Mock(wraps=sentencex.segment)
    monkeypatch.setattr(module.sentencex, "segment", windows)
    assert sentences_of([paragraph], Counter()) == whole
    lengths = [len(call.args[1]) for call in windows.call_args_list]
    assert max(lengths) <= 1 << 14
    assert sum(lengths) < 1.2 * len(paragraph)
    assert len(lengths) > 10
    quotes = "Er sagte „Haus und ging. " * 20_000
    assert "".join(sentences_of([quotes], Counter())).replace(" ", "") == quotes.replace(" ", "")
    assert max(len(call.args[1]) for call in windows.call_args_list) <= 1 << 14
