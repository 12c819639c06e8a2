"""Text files and folders as a source: what is read, what is skipped and counted, and its identity."""

import gzip

import pytest
from text_sources import texts, write_table

from d2l_bert.errors import UserError
from d2l_bert.tokenization.sentences import (
    Cleaning,
)
from d2l_bert.tokenization.sources import (
    all_documents,
    dataset_source,
    file_source,
)
from d2l_bert.tokenization.text_store import prepare_text


def test_files_and_folders_are_read_in_order_with_blank_lines_between_paragraphs(tmp_path):
    (tmp_path / "b.txt").write_text("One line\nand the next.\n \nSecond   paragraph.\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_text("\ufeff# Title\r\n\r\nText.\r\n")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("Gezippt – naïve.".encode()))
    (tmp_path / "d.gz").write_bytes(gzip.compress(b"No name for what it holds."))
    (tmp_path / ".hidden.txt").write_text("Not this.")
    (tmp_path / "picture.png").write_text("nor this")
    assert texts(file_source(tmp_path)) == [
        ("b.txt", ["One line and the next.", "Second paragraph."]),
        ("c.txt.gz", ["Gezippt – naïve."]),
        ("d.gz", ["No name for what it holds."]),
        ("a.md", ["# Title", "Text."]),
    ]


def test_the_identity_of_a_source_depends_on_its_content_and_not_on_its_path(tmp_path):
    for place, text in (("here", "Same."), ("there", "Same."), ("other", "Other.")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text(text)
    here, there, other = (file_source(tmp_path / place).identity for place in ("here", "there", "other"))
    assert here == there != other


def test_no_more_documents_are_read_than_max_documents(tmp_path):
    (tmp_path / "a.txt").write_text("First.")
    write_table(tmp_path / "b.jsonl", [{"text": text} for text in ("Second.", "", "Third.", "Fourth.")])
    (tmp_path / "c.txt").write_text("Fifth.")
    whole = file_source(tmp_path).identity
    for most, found in ((1, ["First."]), (2, ["First.", "Second."]), (4, ["First.", "Second.", "Third.", "Fourth."])):
        source = file_source(tmp_path, max_documents=most)
        assert [line for _, paragraphs in texts(source) for line in paragraphs] == found
        assert source.identity != whole
    assert len(texts(file_source("python-docs", max_documents=3))) == 3


def test_a_file_deleted_before_it_is_read_is_named_instead_of_the_cache(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "books" / f"{name}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "books" / f"{name}.txt").write_text("Some text.")
    source = file_source(tmp_path / "books")
    (tmp_path / "books" / "b.txt").unlink()
    with pytest.raises(UserError) as refusal:
        prepare_text([source], "en", Cleaning(), tmp_path / "cache")
    assert str(tmp_path / "books" / "b.txt") in str(refusal.value) and "cannot be read (" in str(refusal.value)
    assert not list((tmp_path / "cache").glob("[!.]*"))


def test_sources_are_read_one_after_the_other_and_documents_carry_the_number_of_their_source(tmp_path):
    for name, text in (("a.txt", "First."), ("b.csv", 'text\n""\n'), ("c.csv", 'text\n""\nLast.\n')):
        (tmp_path / name).write_text(text)
    sources = [file_source(tmp_path / name) for name in ("a.txt", "b.csv", "c.csv")]
    found = [(document.name, list(document.paragraphs), document.source) for document in all_documents(sources)]
    assert found == [("a.txt", ["First."], 0), ("c.csv block 0", ["Last."], 2)]
    assert sources[1].counts == {"rows_without_text": 1, "files_without_text": 1}


def test_skipped_files_are_counted_and_links_are_followed(tmp_path):
    folder, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    for path in (folder / "sub", elsewhere):
        path.mkdir(parents=True)
    (elsewhere / "linked.txt").write_text("Behind a link.")
    (folder / "sub" / "a.txt").write_text("Here.")
    (folder / "notes.rst").write_text("Not read.")
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
    (folder / "link").symlink_to(elsewhere)
    (folder / "sub" / "loop").symlink_to(folder)
    source = file_source(folder)
    assert sorted(name for name, _ in texts(source)) == ["a.txt", "linked.txt"]
    assert source.counts["files_of_other_kinds"] == 1


def test_utf_32_text_a_file_as_a_dataset_and_a_device_as_a_corpus_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("Text.".encode("utf-32"))
    with pytest.raises(ValueError, match="a.txt: cannot be read"):
        texts(file_source(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="a.txt: cannot be read"):
        dataset_source(str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="no text file or folder"):
        file_source("/dev/null")
