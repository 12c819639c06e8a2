"""How the lines of a text divide it: the kinds of text that are told apart, and what is read of each."""

import itertools
import random
import textwrap

import pytest
from text_sources import texts, write_table

from d2l_bert.tokenization import sources
from d2l_bert.tokenization.division import divided, find_division
from d2l_bert.tokenization.sentences import split_sentences
from d2l_bert.tokenization.sources import file_source


rng = random.Random(7)
WORDS = "the a old house river of and was seen near tall tree in winter while birds sang over fields again".split()


def words(least, most):
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def sentence(least=4, most=16, stop="."):
    return f"{words(least, most).capitalize()}{stop}"


def prose(sentences=4):
    return " ".join(sentence() for _ in range(sentences))


def repeated(make, count=40, separator="\n"):
    return separator.join(make(number) for number in range(count))


THAI = "ผมไปตลาด เขามาบ้าน ฝนตกหนัก นกร้องเพลง แม่น้ำกว้าง ต้นไม้สูง".split()
HINDI = "नदी घर पेड़ और था में पुराना बड़ा देखा पास सर्दी पक्षी गाते खेत फिर आदमी शहर दिन रात".split()
CHINESE = "山川河流春夏秋冬风花雪月人来去看听说话在有的是"


def thai(_):
    return " ".join(rng.choices(THAI, k=rng.randint(10, 60)))


def chinese():
    return "".join(rng.choices(CHINESE, k=rng.randint(6, 20)))


def chinese_sentence():
    return f"{chinese()}，{chinese()}。"


def hindi_sentence():
    return f"{' '.join(rng.choices(HINDI, k=9))}।"


def log(number):
    level = rng.choice(["INFO", "WARN"])
    return f"081109 2036{number:02d} {level} dfs.DataNode: PacketResponder for block blk_{rng.random()} {words(1, 9)}"


def trace(number):
    return f"{log(number)}\n  at java.io.Reader.read(Reader.java:{number})\n  at Main.main(Main.java:7)"


def code(number):
    return f"def f{number}(a, b):\n    c = a.b + {number}\n    return [c, b]\n"


def wrapped(width, **options):
    return repeated(lambda _: textwrap.fill(prose(8), width, **options), 12, "\n\n")


KINDS = {
    "books, a paragraph a line": (repeated(lambda _: prose(5), 40, "\n\n"), "file", "paragraphs"),
    "wrapped, with empty lines": (wrapped(70), "file", "wrapped"),
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
        repeated(lambda _: "\n".join(textwrap.wrap("".join(chinese_sentence() for _ in range(9)), 35)), 9, "\n\n"),
        "file",
        "wrapped",
    ),
    "wrapped Hindi": (
        repeated(lambda _: textwrap.fill(" ".join(hindi_sentence() for _ in range(8)), 60)),
        "file",
        "wrapped",
    ),
    "BERT's format": (
        repeated(lambda _: "\n".join(sentence() for _ in range(rng.randint(2, 6))), 20, "\n\n"),
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
        repeated(lambda _: "\n".join(prose() for _ in range(4)), 20, "\n\n"),
        "blank_line",
        "paragraphs",
    ),
    "log": (repeated(log), "line", "sentences"),
    "log with stack traces": (repeated(trace), "line", "sentences"),
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
    "Thai, a paragraph a line, without empty lines": (repeated(thai), "line", "sentences"),
    "Thai, a paragraph a line, with empty lines": (repeated(thai, separator="\n\n"), "file", "sentences"),
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
    division = find_division(text.split("\n"))
    assert [division.documents, division.lines] == expected


def read(source):
    """The documents of a source as lists of sentences."""
    found = {}
    for block in split_sentences(source.documents):
        found.setdefault(block.document, []).extend(block.sentences)
    return list(found.values())


def flat(documents):
    """Documents as lists of sentences, from documents as lists of paragraphs of them."""
    return [list(itertools.chain.from_iterable(paragraphs)) for paragraphs in documents]


def test_a_document_ends_where_the_option_says(tmp_path):
    """The same lines, read in each way; a line is never joined to the next, as the lines are not wrapped."""
    (tmp_path / "a.txt").write_text("One came. Two went.\nThree sat.\n\n \nFour rose. Five fell.\nSix stood.\n")
    lines = [["One came.", "Two went."], ["Three sat."], ["Four rose.", "Five fell."], ["Six stood."]]
    expected = {
        "auto": [lines],
        "file": [lines],
        "line": [[line] for line in lines],
        "blank_line": [lines[:2], lines[2:]],
    }
    for documents, of_documents in expected.items():
        source = file_source(tmp_path, documents=documents)
        assert read(source) == flat(of_documents), documents
        assert [count for key, count in (+source.counts).items() if key.startswith("files ")] == [1]
    identities = [file_source(tmp_path, documents=documents).identity for documents in expected]
    assert all(identities.count(identity) == 1 for identity in identities)


def test_in_bert_s_format_each_block_is_a_document_and_each_line_a_sentence(tmp_path):
    blocks = [[sentence(), f"Dr. Smith came, e.g. with No. {n}.", sentence()] for n in range(30)]
    (tmp_path / "a.txt").write_text("\n\n".join("\n".join(block) for block in blocks) + "\n")
    source = file_source(tmp_path)
    assert read(source) == flat([[block] for block in blocks])
    assert +source.counts == {"files divided at empty lines, a sentence a line": 1}


def test_a_line_of_a_log_is_a_document_and_a_sentence(tmp_path):
    lines = [f"{log(number)} of c. acme. Inc. {number}" if number % 3 == 0 else log(number) for number in range(100)]
    (tmp_path / "app.log").write_text("\r\n".join(lines))
    source = file_source(tmp_path / "app.log")
    assert read(source) == flat([[[line]] for line in lines])
    assert +source.counts == {"files divided into lines, a sentence a line": 1}
    assert read(file_source(tmp_path / "app.log", max_documents=7)) == flat([[[line]] for line in lines[:7]])


def test_a_row_is_a_document_whatever_the_other_rows_are(tmp_path):
    rows = [f"I love my dog. Day {number}." for number in range(40)]
    expected = [[["I love my dog.", f"Day {number}."]] for number in range(40)]
    write_table(tmp_path / "a.jsonl", [{"text": row} for row in rows])
    assert read(file_source(tmp_path / "a.jsonl")) == flat(expected)
    write_table(tmp_path / "b.jsonl", [{"text": row} for row in ["I\nlove my dog. Day 0.", *rows[1:]]])
    source = file_source(tmp_path / "b.jsonl")
    assert read(source) == flat([[["I"], ["love my dog.", "Day 0."]], *expected[1:]])
    assert +source.counts == {"rows read whole, a paragraph a line": 40}


def test_the_lines_of_rows_are_joined_where_they_are_wrapped_prose(tmp_path):
    paragraphs = [[prose(5), prose(5)] for _ in range(20)]
    write_table(tmp_path / "a.csv", [{"text": "\n\n".join(textwrap.fill(p, 60) for p in row)} for row in paragraphs])
    source = file_source(tmp_path)
    assert texts(source) == paragraphs
    assert +source.counts == {"rows read whole, lines joined": 20}


def test_rows_are_divided_like_files_and_put_together_in_blocks(tmp_path):
    write_table(tmp_path / "a.jsonl", [{"text": "One came.\nTwo went.\n\nThree sat."}] * 100)
    one, two, three = ["One came."], ["Two went."], ["Three sat."]
    assert read(file_source(tmp_path, documents="line")) == flat([[one], [two], [three]] * 100)
    assert read(file_source(tmp_path, documents="blank_line")) == flat([[[*one, *two]], [three]] * 100)
    blocks = file_source(tmp_path, documents="file")
    assert read(blocks) == flat([[[*one, *two, *three]] * 64, [[*one, *two, *three]] * 36])
    assert +blocks.counts == {"rows read in documents of 64 rows": 100}


def test_a_row_of_a_log_is_one_sentence(tmp_path):
    write_table(
        tmp_path / "a.jsonl", [{"text": f"started c. acme. Inc. {n}" if n < 9 else log(n)} for n in range(100)]
    )
    assert all(len(document) == 1 for document in read(file_source(tmp_path)))


@pytest.mark.parametrize("text", ["x" * 10_000_000, "word " * 2_000_000, "A word. " * 1_250_000])
@pytest.mark.parametrize("documents", ["auto", "blank_line", "line"])
def test_a_line_of_ten_megabytes_is_one_document(text, documents, tmp_path):
    (tmp_path / "a.txt").write_text(text)
    blocks = list(split_sentences(file_source(tmp_path, documents=documents).documents))
    assert blocks[-1].document == 0
    assert sum(len(sentence.replace(" ", "")) for block in blocks for sentence in block.sentences) == len(
        text.replace(" ", "")
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 64])
@pytest.mark.parametrize("documents", ["file", "blank_line", "line"])
def test_a_text_read_in_small_pieces_is_not_changed(size, documents, tmp_path, monkeypatch):
    text = "\ufeffOne\r\nline – naïve.\r\n\r\n \n\nNext\n \t\nparagraph 😀 here.\r\n\n\nالعربية.\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    division = find_division(text.split("\n"), documents)
    monkeypatch.setattr(sources, "find_division", lambda lines, documents: division)
    expected = [list(found) for found in divided(text.removeprefix("\ufeff").split("\n"), division, 1 << 20)]
    monkeypatch.setattr(sources, "READ_CHARACTERS", size)
    found = texts(file_source(tmp_path, documents=documents))
    if size < 32 and documents != "line":  # with such small pieces, long lines and paragraphs are cut
        found, expected = (
            ["".join("".join(paragraphs).split()) for paragraphs in found],
            ["".join("".join(paragraphs).split()) for paragraphs in expected],
        )
    assert found == expected


def test_a_line_longer_than_the_pieces_has_single_spaces_too():
    for line in ("a b", "  a  b ", "a\t\u2028b\xa0 c", "\x85", "a \x1f b"):
        for longest in (1, 100):
            found = [list(paragraphs) for paragraphs in divided([line], find_division([line]), longest)]
            assert found == [[" ".join(line.split())]] * bool(line.strip())
