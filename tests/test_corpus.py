"""Text files and folders as a source: what is read, what is skipped and counted, and its identity."""

import gzip

from text_sources import texts, write_table

from d2l_bert.tokenization.sources import (
    file_source,
)


def test_files_and_folders_are_read_in_order_with_a_paragraph_a_line(tmp_path):
    (tmp_path / "b.txt").write_text("One line.\nAnd the next.\n \nThird   paragraph.\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_text("\ufeff# Title\r\n\r\nText.\r\n")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("Gezippt – naïve.".encode()))
    (tmp_path / "d.gz").write_bytes(gzip.compress(b"No name for what it holds."))
    (tmp_path / ".hidden.txt").write_text("Not this.")
    (tmp_path / "picture.png").write_text("nor this")
    assert texts(file_source(tmp_path)) == [
        ("b.txt", ["One line.", "And the next.", "Third paragraph."]),
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
