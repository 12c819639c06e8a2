"""Files of other formats: the text alone is read, a document for each article, read or sequence."""

import pytest

from d2l_bert.messages import UserError
from d2l_bert.tokenization.sources import file_source


def paragraphs_of(path):
    """The paragraphs of each document of a file."""
    return [list(document.paragraphs) for document in file_source(path).documents]


def written(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_subtitles_are_what_is_said(tmp_path):
    srt = (
        "1\n00:00:01,000 --> 00:00:03,500\n<i>I have not</i>\nseen her since May.\n\n"
        "2\n00:00:04,000 --> 00:00:05,000\n{\\an8}1984 was long ago.\n"
    )
    vtt = (
        "WEBVTT - a film\n\nNOTE made by hand\n\nintro\n00:01.000 --> 00:03.500 align:start\n<v Orla>I have not\n"
        "seen her since May.</v>\n\n00:04.000 --> 00:05.000\n1984 was <b>long</b> ago.\n"
    )
    said = [["I have not seen her since May.", "1984 was long ago."]]
    for name, text in (("film.srt", srt), ("film.vtt", vtt)):
        documents = paragraphs_of(written(tmp_path, name, text))
        assert [["\n".join(paragraphs).split("\n") for paragraphs in documents]] == [said]


def test_sequences_of_fasta_are_joined(tmp_path):
    fasta = ">one first\nACGT\nACCA\n\n>two\n>three\nGG\nTT\n"
    documents = paragraphs_of(written(tmp_path, "genome.fa", fasta))
    assert "\n".join(documents[0][0].split()) == "ACGTACCA\nGGTT"


def test_a_chromosome_is_read_in_pieces(tmp_path):
    line = "ACGTACGTAC" * 6
    fasta = ">chr1\n" + f"{line}\n" * 30_000  # 1.8 million letters
    documents = paragraphs_of(written(tmp_path, "chr.fasta", fasta))
    pieces = [piece for paragraphs in documents for paragraph in paragraphs for piece in paragraph.split("\n")]
    assert len(pieces) == 3
    assert "".join(pieces) == line * 30_000
    assert all(len(piece) % 600 == 0 for piece in pieces)


def test_reads_of_fastq(tmp_path):
    fastq = "@r1\nACGT\n+\n@III\n@r2\n\n+\n\n@r3\nTTGA\n+r3\n!!!!\n\n"
    documents = paragraphs_of(written(tmp_path, "reads.fq", fastq))
    assert " ".join(documents[0]).split() == ["ACGT", "TTGA"]  # a read without a base is none


def test_what_is_no_fastq_is_refused_with_its_line(tmp_path):
    path = written(tmp_path, "reads.fastq", "@r1\nACGT\nACGT\n+\nIIIIIIII\n")
    with pytest.raises(UserError, match=r"reads\.fastq: line 3 "):
        paragraphs_of(path)


def test_articles_of_wikiextractor(tmp_path):
    wiki = "".join(
        f'<doc id="{number}" url="https://example.org/wiki?curid={number}" title="Page {number}">\n'
        f"Page {number}\n\nThis is article {number}. It has two sentences.\n\n</doc>\n\n"
        for number in range(3)
    )
    documents = paragraphs_of(written(tmp_path, "wiki_00", wiki))
    assert documents == [[f"Page {n}", f"This is article {n}. It has two sentences."] for n in range(3)]


def test_a_folder_of_them_is_read(tmp_path):
    written(tmp_path, "a.srt", "1\n00:00:01,000 --> 00:00:03,500\nGood evening.\n")
    written(tmp_path, "b.fna", ">x\nACGT\n")
    assert [document[0] for document in paragraphs_of(tmp_path)] == ["Good evening.", "ACGT"]


def test_a_folder_whose_text_is_left_out_is_refused(tmp_path):
    written(tmp_path, "README.md", "About these files.")
    written(tmp_path, "bnc.train", "A sentence of the corpus. " * 40)
    with pytest.raises(UserError, match=r"\.train: 1 file, 1,040 bytes.*/\*\.train"):
        file_source(tmp_path)
    (tmp_path / "picture.jpg").write_bytes(b"\xff\xd8\0" * 1000)
    (tmp_path / "bnc.train").unlink()
    (tmp_path / "gone.link").symlink_to(tmp_path / "a name that leads nowhere, and is longer than all that is read")
    assert paragraphs_of(tmp_path) == [["About these files."]]
