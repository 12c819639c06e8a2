"""The embedded corpus: documentation and docstrings of Python and its packages."""

import itertools
import multiprocessing
import sysconfig
from pathlib import Path
from pydoc_data import topics

import pytest

from d2l_bert.tokenization import python_docs as python_docs_module
from d2l_bert.tokenization.python_docs import docstrings, prose, python_docs, required_distributions
from d2l_bert.tokenization.sentences import Document
from d2l_bert.tokenization.sources import file_source


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


def test_prose_is_a_docstring_without_code_tables_argument_lists_and_markup():
    assert prose(DOCSTRING) == [
        "Return the foo.Bar of x, a fast operation that never blocks.",
        "The lines of this paragraph are wrapped, and they belong together. Here is some code that has to go:",
    ]


def test_docstrings_are_found_in_order_and_a_file_that_does_not_parse_gives_none(tmp_path):
    (tmp_path / "good.py").write_text(
        '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\nif True:\n    def g():\n'
        '        """Function."""\n'
    )
    (tmp_path / "bad.py").write_text('"""Doc."""\ndef (:\n')
    assert docstrings(tmp_path / "good.py") == ["Module.", "Class.", "Method.", "Function."]
    assert docstrings(tmp_path / "bad.py") == []


@pytest.mark.parametrize(
    ("text", "paragraphs"),
    [
        ("    Indented, on one line only, it is read.\n", ["Indented, on one line only, it is read."]),
        ("It is read.\n\n    Indented, and read in the same way.", ["Indented, and read in the same way."]),
        ("Two words::\n\n    It is code, and left out.\n\nThis is text once more.", ["This is text once more."]),
        ("Two. Words::\n\n    All is text, indented as in code.", ["All is text, indented as in code."]),
        ("Is it kept? This is.\n    : This line goes.\nThe rest stays.", ["Is it kept? This is. The rest stays."]),
        ("x, y : int\n    The number of times that it is done.", ["The number of times that it is done."]),
        ("Time : money. This line of words goes away.", []),
        ("In [1]: print it. This is an example, not a sentence.", []),
        ("In the end, it is a sentence of words.", ["In the end, it is a sentence of words."]),
        ("It prints this line, which is no code:\n$ d2l-bert --help. ", []),
        ("It is cheap: $ 5 for all of it.\n$5 is the price.", ["It is cheap: $ 5 for all of it. $5 is the price."]),
        ("* An item, which is a whole sentence.", ["An item, which is a whole sentence."]),
        ("12. An item, which is a whole sentence.", ["An item, which is a whole sentence."]),
        (
            "A Heading of Some Words.\n~~~~~~~\nThe text below it is all that stays.",
            ["The text below it is all that stays."],
        ),
        ("Four words are few.", []),
        ("It has a word that is too long: " + 61 * "x" + ".", []),
        ("12 + 34 = 46, 56 + 78 = 134, and so on.", []),
        ("Ärger über süße Brötchen, über Öfen, über Häuser.", []),  # letters with accents count as symbols
    ],
)
def test_prose_looks_at_the_start_of_each_line(text, paragraphs):
    assert prose(text) == paragraphs


@pytest.mark.slow
def test_the_embedded_corpus_is_english_text_about_python_without_duplicates():
    """
    Reads the first 150 documents: the topics of the language reference and the beginning of the standard library.
    """
    documents = list(file_source("python-docs", max_documents=150).documents)
    paragraphs = [paragraph for document in documents for paragraph in document.paragraphs]
    assert len(documents) == 150 and len(set(paragraphs)) == len(paragraphs) > 500
    assert not any(mark in paragraph for paragraph in paragraphs for mark in (">>>", "\n", "```"))
    words = " ".join(paragraphs).lower().split()
    assert words.count("the") > 0.03 * len(words) and words.count("object") > 100


def test_two_processes_read_the_embedded_corpus_as_one_does(tmp_path, monkeypatch):
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[ab]*.py"))
    (tmp_path / "bad.py").write_text('"""This file has a docstring, and does not parse."""\ndef (:\n')
    files += [tmp_path / "bad.py", tmp_path / "gone.py", files[0]]
    monkeypatch.setattr(topics, "topics", {"ONE": "This is the text of a topic.", "TWO": "Too short."})
    monkeypatch.setattr(python_docs_module, "_source_files", lambda: iter(files))
    monkeypatch.setattr(python_docs_module, "FILES_AT_ONCE", 3)
    two = python_docs(2)
    found = list(itertools.islice(two, 2))
    assert found[0] == Document(["This is the text of a topic."]) and len(multiprocessing.active_children()) == 2
    found += two
    assert found == list(python_docs(1)) and len(found) > 10
    # The documents by a plain loop over the files: the last three add none.
    of_files = [[p for text in docstrings(file) for p in prose(text)] for file in files]
    assert len(found) == 1 + len(list(filter(None, of_files[:-3])))
    assert [p for document in found[1:] for p in document.paragraphs] == list(
        dict.fromkeys(itertools.chain(*of_files))
    )


def test_the_embedded_corpus_covers_the_packages_direct_and_indirect_requirements():
    names = [found.metadata["Name"].lower().replace("_", "-") for found in required_distributions("d2l-bert")]
    assert {"torch", "transformers", "huggingface-hub", "numpy"} <= set(names)
    assert len(set(names)) == len(names) and "pytest" not in names
    # The metrics of `finetune` come from an extra, so that they do not change the corpus, installed or not.
    assert not {"scikit-learn", "scipy", "joblib", "threadpoolctl"} & set(names)
