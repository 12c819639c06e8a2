"""Sources of text: what is read, what is left out, and how it becomes documents."""

import gzip
import json

import pytest

from d2l_bert.training import corpus


def texts(source):
    return [(document.name, document.paragraphs) for document in source.documents]


def test_files_and_folders_in_order_a_blank_line_between_paragraphs(tmp_path):
    (tmp_path / "b.txt").write_text("One line\nand the next.\n \nSecond   paragraph.\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_text("\ufeff# Title\r\n\r\nText.\r\n")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("Gezippt – naïve.".encode()))
    (tmp_path / ".hidden.txt").write_text("Not this.")
    (tmp_path / "table.csv").write_text("not,this")
    assert texts(corpus.file_source([tmp_path])) == [
        ("b.txt", ["One line and the next.", "Second paragraph."]),
        ("c.txt.gz", ["Gezippt – naïve."]),
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


def test_rows_of_single_lines_are_paragraphs_of_one_document(tmp_path):
    rows = ["", " = Title = ", "A paragraph.", "", "Another one."]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    assert texts(corpus.dataset_source(str(tmp_path))) == [("rows", ["= Title =", "A paragraph.", "Another one."])]


def test_a_column_of_numbers_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(ValueError, match="holds no text"):
        corpus.dataset_source(str(tmp_path))


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
