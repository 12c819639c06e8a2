"""Parts of a corpus that are prepared apart are one corpus; a part that does not fit is refused."""

import os

import numpy as np
import pytest
from conftest import SMALL, write_books

from d2l_bert.cli import main
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare


OPTIONS = [*(option for option in SMALL if not option.startswith("--vocab_size")), "--mixed_precision=no"]

# Each part holds out 5 % of its text; together they hold out 5 %, and that is less than a part's own documents.
PARTS = 4


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Four folders of 24 books each."""
    folder = tmp_path_factory.mktemp("texts")
    return [write_books(folder / f"text-{number}", seed=100 + number) for number in range(PARTS)]


@pytest.fixture(scope="module")
def tokenizer(books, tmp_path_factory):
    """A prepared folder whose tokenizer all parts have."""
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    assert main(["prepare", f"--corpus={books}", f"--output_dir={folder}", "--vocab_size=400"]) == 0
    return folder


@pytest.fixture(scope="module")
def parts(texts, tokenizer, tmp_path_factory):
    """The four texts, each prepared by a command of its own."""
    folder = tmp_path_factory.mktemp("parts")
    for text in texts:
        out = folder / text.name.replace("text", "part")
        assert main(["prepare", f"--tokenizer={tokenizer}", f"--corpus={text}", f"--output_dir={out}"]) == 0
    return sorted(folder.iterdir())


def pretrain(folder, parts, *options):
    return main(["pretrain", "--corpus", *map(str, parts), f"--output_dir={folder}", *OPTIONS, *options])


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    *_, last = captured.err.splitlines()
    assert ": error: " in last
    return last


def documents(text):
    """The token ids of each document."""
    return [text.tokens.tokens(number).tolist() for number in range(len(text.tokens))]


def paths(folders):
    return [str(folder) for folder in folders]


# ---------------------------------------------------------------------------------------------------------------------
# One corpus of several parts


def test_parts_hold_the_documents_and_tokens_of_their_texts_in_order(parts, texts, tokenizer):
    together = prepare(TextConfig(corpus=paths(parts)))
    whole = prepare(TextConfig(corpus=paths(texts), tokenizer=str(tokenizer)))
    assert documents(together) == documents(whole) and len(together.tokens) == PARTS * 24
    assert together.source_ends == whole.source_ends == [24, 48, 72, 96]
    for table in ("sentence_ends", "paragraph_ends", "document_ends", "document_words"):
        tables = [getattr(text.tokens, table) for text in (together, whole)]
        found, expected = (table.at(np.arange(len(table))).tolist() for table in tables)
        assert found == expected, table
    assert np.concatenate(together.text_hashes).tolist() == np.concatenate(whole.text_hashes).tolist()
    assert together.reading == whole.reading
    assert together.corpus_name == "text-0, text-1, text-2, text-3"


# ---------------------------------------------------------------------------------------------------------------------
# Parts that do not go together


@pytest.fixture(scope="module")
def other_parts(texts, books, tokenizer, tmp_path_factory):
    """Folders that do not go with the four parts, by name."""
    folder = tmp_path_factory.mktemp("other")
    with_tokenizer = f"--tokenizer={tokenizer}"
    for name, options in {
        "own-tokenizer": ["--vocab_size=300"],
        "cleaned": [with_tokenizer, "--min_paragraph_characters=20"],
        "fraction": [with_tokenizer, "--validation_fraction=0.1"],
    }.items():
        assert main(["prepare", f"--corpus={texts[0]}", f"--output_dir={folder / name}", *options]) == 0
    return folder


REFUSED = [  # the second folder, then words of the line that refuses it
    ("own-tokenizer", "own-tokenizer: its tokenizer is not that of ", "prepare it again with --tokenizer "),
    ("cleaned", "cleaned: was prepared with min_paragraph_characters 20, and ", " with 0; prepare both alike"),
    ("fraction", "fraction: was prepared with validation_fraction 0.1, and ", " with 0.05; prepare both alike"),
]


@pytest.mark.parametrize("row", REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_part_that_does_not_fit_is_refused_by_name(row, parts, other_parts, tmp_path, capsys):
    name, *words = row
    corpus = ["--corpus", parts[1], other_parts / name]
    said = refused(capsys, "pretrain", *corpus, f"--output_dir={tmp_path / 'out'}", *OPTIONS, "--max_steps=1")
    assert f"corpus {other_parts / name}: " in said
    for word in words:
        assert word in said
    assert os.listdir(tmp_path) == []
