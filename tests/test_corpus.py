"""Sources of text: what is read, what is left out, and how it becomes documents."""

import csv
import gzip
import io
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from d2l_bert.training import corpus, tables


def texts(source):
    return [(document.name, document.paragraphs) for document in source.documents]


def test_files_and_folders_in_order_a_blank_line_between_paragraphs(tmp_path):
    (tmp_path / "b.txt").write_text("One line\nand the next.\n \nSecond   paragraph.\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_text("\ufeff# Title\r\n\r\nText.\r\n")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("Gezippt – naïve.".encode()))
    (tmp_path / "d.gz").write_bytes(gzip.compress(b"No name for what it holds."))
    (tmp_path / ".hidden.txt").write_text("Not this.")
    (tmp_path / "picture.png").write_text("nor this")
    assert texts(corpus.file_source([tmp_path])) == [
        ("b.txt", ["One line and the next.", "Second paragraph."]),
        ("c.txt.gz", ["Gezippt – naïve."]),
        ("d.gz", ["No name for what it holds."]),
        ("a.md", ["# Title", "Text."]),
    ]


def test_a_source_is_known_by_its_content_not_its_place(tmp_path):
    for place, text in (("here", "Same."), ("there", "Same."), ("other", "Other.")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text(text)
    here, there, other = (corpus.file_source([tmp_path / place]).identity for place in ("here", "there", "other"))
    assert here == there != other


def test_a_dataset_row_is_a_document(tmp_path):
    rows = [{"text": "First paragraph.\n\nSecond."}, {"text": "Another document."}, {"text": None}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = texts(corpus.dataset_source(str(tmp_path)))
    assert [paragraphs for _, paragraphs in found] == [["First paragraph.", "Second."], ["Another document."], []]


def test_rows_of_single_lines_are_paragraphs_of_blocks(tmp_path):
    rows = ["", " = Title = ", "A paragraph.", "", "Another one."]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    found = texts(corpus.dataset_source(str(tmp_path)))
    assert [paragraphs for _, paragraphs in found] == [["= Title =", "A paragraph.", "Another one."]]
    blocks = list(corpus.row_documents("rows", (f"Line {number}." for number in range(5000))))
    assert [len(block.paragraphs) for block in blocks] == [corpus.BLOCK_ROWS] * 78 + [8]
    assert [line for block in blocks for line in block.paragraphs] == [f"Line {number}." for number in range(5000)]


TEXTS = ["First, with a comma.\n\nSecond – naïve.", "Another document.\nIn two lines."]


def write_table(file, rows):
    """Rows of dicts as the file's suffix says; a missing value stays out."""
    kind = tables.kind_of(file)
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
        return
    text = io.StringIO()
    if kind == ".jsonl":
        text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        writer = csv.DictWriter(text, list(rows[0]), delimiter="\t" if kind == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    data = text.getvalue().encode()
    pack = {".gz": gzip.compress, ".zst": lambda data: bytes(pa.compress(data, "zstd"))}.get(file.suffix, bytes)
    file.write_bytes(pack(data))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.csv.zst", "a.tsv", "a.parquet"])
@pytest.mark.parametrize("column", ["text", "content"])
def test_a_row_of_a_table_is_a_document(name, column, tmp_path):
    write_table(
        tmp_path / name, [{"id": "1", column: TEXTS[0]}, {"id": "2", column: None}, {"id": "3", column: TEXTS[1]}]
    )
    for path in (tmp_path / name, tmp_path):  # named, and found in its folder
        found = texts(corpus.file_source([path], column))
        assert [paragraphs for _, paragraphs in found] == [
            ["First, with a comma.", "Second – naïve."],
            ["Another document. In two lines."],
        ]


def test_packed_text_and_lines_of_bare_texts_are_read(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(bytes(pa.compress("One.\n\nTwo – naïve.".encode(), "zstd")))
    (tmp_path / "b.jsonl").write_text('"A bare text.\\nOf two lines."\n\n"Another."\n')
    found = [paragraphs for _, paragraphs in texts(corpus.file_source([tmp_path]))]
    assert found == [["One.", "Two – naïve."], ["A bare text. Of two lines."], ["Another."]]


def test_a_line_of_a_megabyte_is_one_row(tmp_path):
    write_table(tmp_path / "a.csv", [{"text": "word " * 200_000 + "\nend."}])
    ((_, (paragraph,)),) = texts(corpus.file_source([tmp_path]))
    assert len(paragraph) == 1_000_004


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": 3}\n', ["line 2", "holds no text but int"]),
        ("a.jsonl", b'{"text": "fine"}\n{"body": "x"}\n', ["line 2", "no column 'text'", "it has body"]),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "cut\n', ["line 2", "no JSON"]),
        ("a.jsonl", b'{"text": "fine"}\n[1, 2]\n', ["line 2", "holds no text but list"]),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', ["line 1", "not UTF-8"]),
        ("a.jsonl", b"[" * 100_000, ["line 1", "no JSON"]),
        ("a.csv", b"id,body\n1,x\n", ["no column 'text'", "it has id, body"]),
        ("a.csv", b"", ["no column 'text'", "it has none"]),
        ("a.csv", b"text\nfine\ncaf\xe9\n", ["not UTF-8 text"]),
        ("a.csv", b'text\nfine\n"never closed\n', ["no CSV"]),
        ("a.csv", b'text\nfine\n"closed" and on\n', ["line 3", "no CSV"]),
        ("a.parquet", b"PAR1 no more", ["cannot be read"]),
        ("a.txt.zst", b"not packed at all", ["cannot be read"]),
        ("a.jsonl.gz", gzip.compress(b'{"text": "fine"}\n' * 1000)[:-20], ["cannot be read"]),
        ("a.txt.zst", bytes(pa.compress(b"fine. " * 100_000, "zstd"))[:-20], ["cannot be read"]),
        ("a.json", b'[{"text": "fine"}]', [".jsonl"]),
    ],
)
def test_a_damaged_table_is_named_with_the_place(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as refused:
        texts(corpus.file_source([tmp_path / name]))
    assert all(word in str(refused.value) for word in [name, *words]), refused.value


def test_a_parquet_column_of_numbers_is_refused(tmp_path):
    write_table(tmp_path / "a.parquet", [{"text": 1}])
    with pytest.raises(ValueError, match="holds no text but int64"):
        texts(corpus.file_source([tmp_path]))


def test_a_column_of_numbers_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(ValueError, match="holds no text"):
        corpus.dataset_source(str(tmp_path))


def test_cleaning_does_what_it_is_asked_and_counts_it():
    ligature, composed = "The \ufb01rst cafe\u0301.", "The first caf\xe9."
    documents = [
        corpus.Document("a", [ligature, "Short.", "Twice the same."]),
        corpus.Document("b", ["Twice the same."]),
    ]

    def cleaned(**rules):
        counts = Counter()
        found = list(corpus.clean(documents, corpus.Cleaning(**rules), counts))
        return [document.paragraphs for document in found], dict(+counts)

    untouched = [document.paragraphs for document in documents]
    assert cleaned() == (untouched, {"paragraphs": 4})
    assert cleaned(unicode_normalization="NFC")[0][0][0] == "The \ufb01rst caf\xe9."
    assert cleaned(unicode_normalization="NFKC", min_paragraph_characters=8, drop_duplicate_paragraphs=True) == (
        [[composed, "Twice the same."], []],
        {"paragraphs": 4, "normalized": 1, "too_short": 1, "duplicates": 1},
    )


def test_sentences_are_split_and_paragraphs_counted():
    document = corpus.Document("d", ["Mr. Smith came. He sat down!", "Was it late?"])
    (split,) = corpus.split_sentences([document, corpus.Document("empty", [])])
    assert split.sentences == ["Mr. Smith came.", "He sat down!", "Was it late?"]
    assert split.paragraph_ends == [2, 3]


def test_chinese_sentences_are_split():
    (split,) = corpus.split_sentences([corpus.Document("d", ["你好。我是学生。"])], "zh")
    assert split.sentences == ["你好。", "我是学生。"]


def one_book(paragraphs, sentences_each):
    sentences = [f"Sentence {n}." for n in range(paragraphs * sentences_each)]
    return corpus.SplitDocument("book", sentences, [sentences_each * (n + 1) for n in range(paragraphs)])


def test_one_book_is_cut_into_blocks_of_whole_paragraphs():
    book = one_book(paragraphs=100, sentences_each=5)
    blocks = list(corpus.enough_documents([book]))
    assert len(blocks) >= corpus.FEWEST_DOCUMENTS
    assert [sentence for block in blocks for sentence in block.sentences] == book.sentences
    for block in blocks:
        assert block.paragraph_ends[-1] == len(block.sentences) and all(end % 5 == 0 for end in block.paragraph_ends)
    assert len({block.name for block in blocks}) == len(blocks)


def test_a_book_without_paragraphs_is_cut_between_sentences():
    book = one_book(paragraphs=1, sentences_each=400)
    blocks = list(corpus.enough_documents([book]))
    assert len(blocks) >= 10 and [s for block in blocks for s in block.sentences] == book.sentences


def test_enough_documents_are_left_as_they_are():
    documents = [one_book(3, 2) for _ in range(corpus.FEWEST_DOCUMENTS + 5)]
    assert list(corpus.enough_documents(iter(documents))) == documents


DOCSTRING = """
    Return the :class:`~foo.Bar` of ``x``, a *fast* operation that never blocks.

    Args:
        x (`int`): The number that is doubled before it is returned.

    Notes
    -----
    The lines of this paragraph are wrapped, and they belong
    together. Here is some code that has to go::

        result = frobnicate(x, y, z); print(result)

    >>> frobnicate(1)
    2

    ====== ======
    Input  Output
    ====== ======

    ```python
    model = Model.from_pretrained("x")  # this is code. really.
    ```

    Too short.
"""


def test_prose_is_what_is_left_without_code_tables_lists_of_arguments_and_markup():
    assert corpus.prose(DOCSTRING) == [
        "Return the foo.Bar of x, a fast operation that never blocks.",
        "The lines of this paragraph are wrapped, and they belong together. Here is some code that has to go:",
    ]


def test_docstrings_are_found_in_order_and_a_broken_file_has_none(tmp_path):
    source = (
        '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\nif True:\n    def g():\n'
    )
    source += '        """Function."""\n'
    (tmp_path / "good.py").write_text(source)
    (tmp_path / "bad.py").write_text('"""Doc."""\ndef (:\n')
    assert corpus.docstrings(tmp_path / "good.py") == ["Module.", "Class.", "Method.", "Function."]
    assert corpus.docstrings(tmp_path / "bad.py") == []


def test_the_embedded_corpus_is_english_about_python_without_duplicates():
    """Its first documents: the topics of the reference and the beginning of the standard library."""
    import itertools

    documents = list(itertools.islice(corpus.python_docs(), 150))
    paragraphs = [paragraph for document in documents for paragraph in document.paragraphs]
    assert len(set(paragraphs)) == len(paragraphs) > 500
    assert not any(">>>" in paragraph or "\n" in paragraph or "```" in paragraph for paragraph in paragraphs)
    words = " ".join(paragraphs).lower().split()
    assert words.count("the") > 0.03 * len(words) and words.count("object") > 100


def test_the_embedded_corpus_knows_the_packages_requirements_and_theirs():
    names = [found.metadata["Name"].lower().replace("_", "-") for found in corpus._required_distributions("d2l-bert")]
    assert {"torch", "transformers", "huggingface-hub", "numpy"} <= set(names)
    assert len(set(names)) == len(names) and "pytest" not in names
