"""Text files and folders as a source: what is read, what is skipped and counted, and its identity."""

import errno
import gzip
import io
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from text_sources import lines_of, packed_by_zstd, texts, write_table

from d2l_bert.folders import short_hash
from d2l_bert.messages import UserError
from d2l_bert.tokenization.sentences import all_documents
from d2l_bert.tokenization.sources import decoded, file_source


def test_files_and_folders_are_read_in_order_with_a_paragraph_a_line(tmp_path):
    (tmp_path / "b.txt").write_text("One line.\nAnd the next.\n \nThird   paragraph.\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_text("\ufeff# Title\r\n\r\nText.\r\n")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("Gezippt – naïve.".encode()))
    (tmp_path / "d.gz").write_bytes(gzip.compress(b"No name for what it holds."))
    (tmp_path / ".hidden.txt").write_text("Not this.")
    (tmp_path / "picture.png").write_text("nor this")
    assert texts(file_source(tmp_path)) == [
        ["One line.", "And the next.", "Third paragraph."],
        ["Gezippt – naïve."],
        ["No name for what it holds."],
        ["# Title", "Text."],
    ]


def test_the_identity_of_a_source_depends_on_its_content_and_not_on_its_path(tmp_path):
    identities = []
    for place, text in (("here", "Same."), ("there", "Same."), ("other", "Other.")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text(text)
        identities.append(file_source(tmp_path / place).identity)
    assert identities[0] == identities[1] != identities[2]


def test_no_more_documents_are_read_than_max_documents(tmp_path):
    (tmp_path / "a.txt").write_text("First.")
    write_table(tmp_path / "b.jsonl", [{"text": text} for text in ("Second.", "", "Third.", "Fourth.")])
    (tmp_path / "c.txt").write_text("Fifth.")
    whole = file_source(tmp_path).identity
    for most, found in ((1, ["First."]), (2, ["First.", "Second."]), (4, ["First.", "Second.", "Third.", "Fourth."])):
        source = file_source(tmp_path, max_documents=most)
        assert [line for paragraphs in texts(source) for line in paragraphs] == found
        assert source.identity != whole


def test_links_are_followed_and_what_a_folder_leaves_out_is_said(tmp_path, caplog):
    folder, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    for path in (folder / "sub", elsewhere):
        path.mkdir(parents=True)
    (elsewhere / "linked.txt").write_text("Behind a link.")
    (folder / "sub" / "a.txt").write_text("Here.")
    for name, content in {
        "notes.rst": b"Not read.",
        "more.RST": b"Not read.",
        "page.html.gz": b"a",
        "r.json.GZ": b"bc",
    }.items():
        (folder / name).write_bytes(content)
    for name, target in {"a.txt": "sub/a.txt", "gone.txt": "nowhere", "link": elsewhere, "sub/loop": folder}.items():
        (folder / name).symlink_to(target)
    with caplog.at_level("INFO", "d2l_bert"):
        source = file_source(folder)
    assert sorted(texts(source)) == [["Behind a link."], ["Here."]]
    (line,) = caplog.messages
    assert set(line.partition("left out: ")[2].split("; ")) == {
        ".rst: 2 files, 18 bytes",
        ".html.gz: 1 file, 1 bytes",
        ".json.gz: 1 file, 2 bytes",
        "link to a file that is read: 1 file, 5 bytes",
        "no file to read: 1 file, 0 bytes",
    }


def test_a_file_without_a_suffix_is_read_unless_it_is_binary(tmp_path):
    (tmp_path / "LICENSE").write_text("No suffix.")
    (tmp_path / "app.log").write_text("A line.")
    (tmp_path / "wide").write_text("Wide.", encoding="utf-16")
    (tmp_path / "wide.gz").write_bytes(gzip.compress("Wide and packed.".encode("utf-16")))
    for name, content in {"program": b"\x7fELF\0", "packed.gz": gzip.compress(b"a\0"), "rows.tar.gz": b"a"}.items():
        (tmp_path / name).write_bytes(content)
    assert texts(file_source(tmp_path)) == [["No suffix."], ["A line."], ["Wide."], ["Wide and packed."]]


def test_file_names_of_any_bytes_are_read(tmp_path):
    """Upper case in the suffix, and a name that is not UTF-8, packed or not."""
    folder, pack = os.fsencode(tmp_path), {b"": bytes, b".gz": gzip.compress, b".ZST": packed_by_zstd}
    for end, packed in pack.items():
        for name, content in {b"TXT": b"In a file.", b"Jsonl": b'{"text": "In a row."}\n'}.items():
            Path(os.fsdecode(folder + b"/caf\xe9." + name + end)).write_bytes(packed(content))
    pq.write_table(pa.table({"text": ["In a row."]}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").rename(tmp_path / os.fsdecode(b"\xe9.parquet"))
    source = file_source(tmp_path)
    assert sorted(texts(source)) == [["In a file."]] * 3 + [["In a row."]] * 4
    assert len(short_hash(source.identity)) == 16
    assert len(texts(file_source(tmp_path / os.fsdecode(b"caf\xe9.TXT.gz")))) == 1


LINES = ["One is a line.", "Two – naïve – is next.", "", "Three 😀."]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "be-16", "be-32"])
@pytest.mark.parametrize("ends", [["\n"], ["\r"], ["\r\n"], ["\r\n", "\n", "\r", "\n"]])
@pytest.mark.parametrize("times", [1, 5001])
def test_every_line_end_and_every_marked_encoding_is_read(encoding, ends, times, tmp_path):
    lines = LINES * times  # the pieces of a stream then end within characters and line ends
    text = "".join(f"{line}{ends[n % len(ends)]}" for n, line in enumerate(lines))
    if encoding.startswith("be"):
        text, encoding = f"\ufeff{text}", f"utf-{encoding[3:]}-be"
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert lines_of(str(tmp_path / "a.txt")) == lines
    with io.BytesIO(text.encode(encoding)) as stdin:
        assert list(decoded(Path("stdin"), stdin)) == lines


def test_rows_have_every_line_end(tmp_path):
    write_table(tmp_path / "a.jsonl", [{"text": "One.\rTwo.\r\nThree.\nFour."}])
    assert texts(file_source(tmp_path)) == [["One.", "Two.", "Three.", "Four."]]
    assert texts(file_source(tmp_path, documents="line")) == [["One."], ["Two."], ["Three."], ["Four."]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('Fine.\r\n\n\rDort „so" – 5 €.'.encode("cp1252"), ["line 4:", "0x84", "iconv -f CP1252 -t UTF-8"]),
        (("Fine.\n" * 300_000 + "Zürich").encode("latin-1"), ["line 300,001:", "0xfc"]),
        (b"\x89PNG\r\n\0", ["binary"]),
        ("Zürich".encode("utf-16-be"), ["binary"]),
        ("Fine.\nZürich 😀".encode("utf-16")[:-1], ["line 2:", "UTF-16"]),
    ],
)
def test_a_text_in_no_known_encoding_is_refused_with_its_line(content, words, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError) as refused:
        texts(file_source(tmp_path / "a.txt"))
    assert all(word in str(refused.value) for word in ["a.txt", *words]), refused.value
    assert ("iconv" in str(refused.value)) == any(word.startswith("0x") for word in words)


@pytest.mark.parametrize("damage", [gzip.compress(b"Fine. " * 1000, mtime=0)[:-9], b"Fine."])
@pytest.mark.parametrize("name", ["a.txt.gz", "a.gz", "a.csv.gz"])
def test_a_damaged_packed_file_is_refused_without_the_advice_to_convert_it(name, damage, tmp_path):
    (tmp_path / name).write_bytes(damage)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=name) as refused:
            list(all_documents([file_source(path)]))
        assert "iconv" not in str(refused.value)


@pytest.mark.parametrize("most", [None, 1])
def test_a_file_that_changes_between_its_hash_and_its_reading_is_refused(most, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("Before.")
    source = file_source(tmp_path, max_documents=most)
    (tmp_path / "a.txt").write_text("After it.")
    with pytest.raises(UserError, match="a.txt: changed"):
        texts(source)


@pytest.mark.parametrize("call", ["listdir", "stat"])
def test_a_folder_that_cannot_be_read_is_named(call, tmp_path, monkeypatch, fails):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Text.")
    original = getattr(os, call)

    def refuse(path, *arguments, **options):
        if "texts" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, call, refuse)
    said = fails("prepare", f"--corpus={tmp_path / 'texts'}", f"--output_dir={tmp_path / 'out'}")
    assert f"{tmp_path / 'texts'}: cannot be read" in said
