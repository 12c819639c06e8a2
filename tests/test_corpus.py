"""Sources of text: what is read, what is left out, and how it becomes documents."""

import csv
import gzip
import io
import json
from collections import Counter

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from d2l_bert.errors import UserError
from d2l_bert.tokenization import arrow, tables
from d2l_bert.tokenization import sources as readers
from d2l_bert.tokenization.documents import Document, split_paragraphs
from d2l_bert.tokenization.python_docs import docstrings, prose, python_docs, required_distributions
from d2l_bert.tokenization.sentences import (
    BLOCK_SENTENCES,
    FEWEST_DOCUMENTS,
    LONGEST_SENTENCE,
    Cleaning,
    clean,
    enough_blocks,
    split_sentences,
)
from d2l_bert.tokenization.sources import (
    BLOCK_ROWS,
    _dataset_texts,
    all_documents,
    dataset_source,
    file_source,
    row_documents,
    text_paragraphs,
)


def texts(source):
    return [(document.name, list(document.paragraphs)) for document in source.documents]


def test_files_and_folders_in_order_a_blank_line_between_paragraphs(tmp_path):
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


def test_a_source_is_known_by_its_content_not_its_place(tmp_path):
    for place, text in (("here", "Same."), ("there", "Same."), ("other", "Other.")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text(text)
    here, there, other = (file_source(tmp_path / place).identity for place in ("here", "there", "other"))
    assert here == there != other


def test_a_dataset_row_is_a_document(tmp_path):
    rows = [{"text": "First paragraph.\n\nSecond."}, {"text": "Another document."}, {"text": None}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = dataset_source(str(tmp_path))
    assert [paragraphs for _, paragraphs in texts(source)] == [["First paragraph.", "Second."], ["Another document."]]
    assert source.counts == {"rows_without_text": 1}


def test_rows_of_single_lines_are_paragraphs_of_blocks(tmp_path):
    rows = ["", " = Title = ", "A paragraph.", "", "Another one."]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    source = dataset_source(str(tmp_path))
    assert [paragraphs for _, paragraphs in texts(source)] == [["= Title =", "A paragraph.", "Another one."]]
    assert source.counts == {"rows_without_text": 2}
    blocks = list(row_documents("rows", (f"Line {number}." for number in range(5000))))
    assert [len(block.paragraphs) for block in blocks] == [BLOCK_ROWS] * 78 + [8]
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
        found = texts(file_source(path, column))
        assert [paragraphs for _, paragraphs in found] == [
            ["First, with a comma.", "Second – naïve."],
            ["Another document. In two lines."],
        ]


def test_packed_text_and_lines_of_bare_texts_are_read(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(bytes(pa.compress("One.\n\nTwo – naïve.".encode(), "zstd")))
    (tmp_path / "b.jsonl").write_text('"A bare text.\\nOf two lines."\n\n"Another."\n')
    found = [paragraphs for _, paragraphs in texts(file_source(tmp_path))]
    assert found == [["One.", "Two – naïve."], ["A bare text. Of two lines."], ["Another."]]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_line_of_a_megabyte_is_one_row(name, tmp_path):
    write_table(tmp_path / name, [{"text": "word " * 200_000 + "\nend."}])
    ((_, (paragraph,)),) = texts(file_source(tmp_path))
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
        ("a.jsonl", b'{"text": "fine"}\n{"text": "a \\ud83d b"}\n', ["line 2", "U+D83D"]),
        ("a.jsonl", b'{"text": "\xed\xa0\x80"}\n', ["line 1", "U+D800"]),
        ("a.jsonl", b'{"text": {"en": "x"}}\n', ["line 1", "holds no text but dict"]),
        ("a.jsonl", b'{"text": "fine"}\n' * 999 + b'{"body": "x"}\n', ["line 1000", "no column 'text'"]),
        ("a.csv", b"body\nx\n", ["no column 'text'", "it has body"]),
        ("a.csv", " \n".encode("utf-16"), ["not UTF-8 text"]),
        # Without the time, which would be in the name of the test.
        ("a.csv.gz", gzip.compress(b"text\n" + b"fine\n" * 1000, mtime=0)[:-20], ["cannot be read"]),
        ("a.jsonl.zst", bytes(pa.compress(b'"fine"\n' * 100_000, "zstd"))[:-20], ["cannot be read"]),
        ("a.csv", b"text\nfine\ncaf\xe9\n", ["not UTF-8 text"]),
        ("a.csv", b'text\nfine\n"never closed\n', ["no CSV"]),
        ("a.csv", b'text\nfine\n"closed" and on\n', ["line 3", "no CSV"]),
        ("a.parquet", b"PAR1 no more", ["cannot be read"]),
        ("a.txt.zst", b"not packed at all", ["cannot be read"]),
        ("a.jsonl.gz", gzip.compress(b'{"text": "fine"}\n' * 1000, mtime=0)[:-20], ["cannot be read"]),
        ("a.txt.zst", bytes(pa.compress(b"fine. " * 100_000, "zstd"))[:-20], ["cannot be read"]),
        ("a.json", b'[{"text": "fine"}]', [".jsonl"]),
    ],
)
def test_a_damaged_table_is_named_with_the_place(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as refused:
        texts(file_source(tmp_path / name))
    assert all(word in str(refused.value) for word in [name, *words]), refused.value


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([1]), "holds no text but int64"),
        (pa.array([["a"]]), "holds no text but list"),
        (pa.array([{"en": "a"}]), "holds no text but struct"),
        (pa.array([b"fine", b"caf\xe9"]).view(pa.string()), "not UTF-8 text"),
    ],
)
def test_a_parquet_column_that_is_no_text_is_refused(column, words, tmp_path):
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=f"a.parquet: .*{words}"):
        texts(file_source(tmp_path))


def test_damaged_parquet_files_and_those_with_two_columns_of_a_name_are_named(tmp_path):
    write_table(tmp_path / "a.parquet", [{"text": "fine"}])
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:-60] + bytes(40) + whole[-20:])
    with pytest.raises(ValueError, match="a.parquet: cannot be read"):
        texts(file_source(tmp_path))
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: has several columns 'text'"):
        texts(file_source(tmp_path))


def test_rows_and_files_without_text_are_counted_and_left_out(tmp_path):
    for name in ("empty.txt", "empty.csv", "empty.jsonl", "empty.parquet", "empty.txt.gz", "empty.csv.zst"):
        (tmp_path / name).touch()
    (tmp_path / "blank.txt").write_text("\ufeff \n\n\t\n")
    (tmp_path / "header.csv").write_text("text,id\n")
    (tmp_path / "nothing.jsonl.gz").write_bytes(gzip.compress(b""))
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    source = file_source(tmp_path)
    assert texts(source) == [] and source.counts == {"files_without_text": 10}

    write_table(tmp_path / "some.jsonl", [{"text": None}, {"text": ""}, {"text": " \n"}, {"text": "A text."}])
    source = file_source(tmp_path)
    assert texts(source) == [("some.jsonl block 0", ["A text."])]
    assert source.counts == {"files_without_text": 10, "rows_without_text": 3}


def test_windows_files_lone_columns_and_folders_with_the_name_of_a_table_are_read(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbftext\r\n"One,\r\nin two lines."\r\nAnother.\r\n')
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "One,\\r\\nin two lines."}\r\n\r\n"Another."\r\n')
    (tmp_path / "c.jsonl").mkdir()
    (tmp_path / "c.jsonl" / "d.txt").write_text("Inside.")
    found = [paragraphs for _, paragraphs in texts(file_source(tmp_path))]
    assert found == [["One, in two lines."], ["Another."]] * 2 + [["Inside."]]
    assert texts(file_source(tmp_path / "c.jsonl")) == [("d.txt", ["Inside."])]


def test_a_file_name_that_is_no_text_becomes_one(tmp_path):
    try:
        (tmp_path / "caf\udce9.txt").write_text("Some text.")
    except OSError:
        pytest.skip("this file system takes text only")
    assert texts(file_source(tmp_path)) == [("caf\ufffd.txt", ["Some text."])]


def test_no_more_documents_are_read_than_asked_for(tmp_path):
    (tmp_path / "a.txt").write_text("First.")
    (tmp_path / "b.jsonl").write_text('"Second."\n""\n"Third."\n"Fourth."\nno JSON')
    (tmp_path / "c.txt").write_text("Fifth.")
    whole = file_source(tmp_path).identity
    for most, found in ((1, ["First."]), (2, ["First.", "Second."]), (4, ["First.", "Second.", "Third.", "Fourth."])):
        source = file_source(tmp_path, max_documents=most)
        assert [line for _, paragraphs in texts(source) for line in paragraphs] == found
        assert source.identity != whole
    assert len(texts(file_source("python-docs", max_documents=3))) == 3


def test_a_file_that_is_gone_before_it_is_read_is_named_and_not_the_cache(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "books" / f"{name}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "books" / f"{name}.txt").write_text("Some text.")
    source = file_source(tmp_path / "books")
    (tmp_path / "books" / "b.txt").unlink()
    with pytest.raises(UserError) as refusal:
        arrow.prepare_text([source], "en", Cleaning(), tmp_path / "cache")
    reason = "cannot be read (No such file or directory); put it back or leave it out"
    assert str(refusal.value) == f"{tmp_path / 'books' / 'b.txt'}: {reason}"
    assert not list((tmp_path / "cache").glob("[!.]*"))


def test_sources_are_read_one_after_the_other_with_their_numbers(tmp_path):
    for name, text in (("a.txt", "First."), ("b.jsonl", '""\n'), ("c.jsonl", '""\n"Last."\n')):
        (tmp_path / name).write_text(text)
    sources = [file_source(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.jsonl")]
    found = [(document.name, list(document.paragraphs), document.source) for document in all_documents(sources)]
    assert found == [("a.txt", ["First."], 0), ("c.jsonl block 0", ["Last."], 2)]
    assert sources[1].counts == {"rows_without_text": 1, "files_without_text": 1}


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def streaming(request):
    return request.param


ROWS = [{"n": n, "text": f"Row {n}.\n\nIts end." if n % 3 else None} for n in range(3000)]


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet", "train.csv"])
def test_a_stream_is_read_as_the_whole_dataset_is(name, streaming, tmp_path):
    write_table(tmp_path / name, ROWS)
    source = dataset_source(str(tmp_path), streaming=streaming)
    found = [paragraphs for _, paragraphs in texts(source)]
    assert found == [[f"Row {n}.", "Its end."] for n in range(3000) if n % 3]
    assert source.counts == {"rows_without_text": 1000} and source.name == tmp_path.name and not source.is_on_hub
    few = dataset_source(str(tmp_path), streaming=streaming, max_documents=5)
    assert len(texts(few)) == 5 and few.identity != source.identity


def test_a_dataset_is_known_by_its_content_streamed_or_not(tmp_path):
    def identity(place, text="Same.", **options):
        (tmp_path / place / "set").mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "set" / "train.jsonl").write_text(json.dumps({"text": text}))
        return json.dumps(dataset_source(str(tmp_path / place / "set"), **options).identity)

    same = {identity("here"), identity("here", streaming=True), identity("there"), identity("there", streaming=True)}
    assert len(same) == 1
    assert len(same | {identity("there", "Other"), identity("there", "Other", streaming=True)}) == 2


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("train.jsonl", b"no JSON\n", ["row 3000"]),
        ("train.jsonl", b'{"n": 1, "text": "a \\ud83d b"}\n', ["row 3000"]),
        ("train.csv", b'1,"not closed', ["ParserError"]),
    ],
)
def test_a_damaged_row_of_a_dataset_is_one_line(name, damage, words, streaming, tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr("logging.Logger.callHandlers", lambda logger, record: logged.append((logger.name, record)))
    write_table(tmp_path / name, ROWS)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + damage)
    with pytest.raises(ValueError) as refused:
        texts(dataset_source(str(tmp_path), streaming=streaming))
    said = str(refused.value)
    assert all(word in said for word in [f"dataset {tmp_path}", *words]) and "\n" not in said, said
    assert not [record for name, record in logged if name.startswith("datasets") and record.levelname == "ERROR"]


def test_a_stream_damaged_on_its_way_tells_how_far_it_came(tmp_path):
    write_table(tmp_path / "train-1.jsonl", ROWS)
    (tmp_path / "train-2.jsonl").write_text("no JSON\n")
    with pytest.raises(ValueError, match="broke off after 3,000 rows .*repair it"):
        texts(dataset_source(str(tmp_path), streaming=True))
    assert len(texts(dataset_source(str(tmp_path), streaming=True, max_documents=1999))) == 1999


@pytest.mark.parametrize("text", [1, [1, 2], {"en": "a"}, [["a"]]])
def test_a_column_of_a_dataset_that_holds_no_text_is_refused(text, streaming, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": text}) + "\n")
    with pytest.raises(ValueError, match="column 'text' holds no text"):
        dataset_source(str(tmp_path), streaming=streaming)


def test_a_stream_of_unknown_columns_is_checked_row_by_row():
    def checked(*rows):
        return list(_dataset_texts("some/set", rows, "text"))

    assert checked({"text": "a"}, {"text": None}) == ["a", None]
    with pytest.raises(ValueError, match="some/set, row 1: no column 'text'; it has body, n: name one"):
        checked({"body": "a", "n": 1})
    with pytest.raises(ValueError, match="some/set, row 2: column 'text' holds no text but int"):
        checked({"text": "a"}, {"text": 1})


def test_a_dataset_of_empty_files_is_refused(streaming, tmp_path):
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(ValueError, match="its files hold no rows"):
        dataset_source(str(tmp_path), streaming=streaming)


def test_folders_of_save_to_disk_are_read_and_missing_splits_named(streaming, tmp_path):
    train, test = (datasets.Dataset.from_list([{"text": f"{name}.", "n": 1}]) for name in ("Train", "Test"))
    train.with_format("pandas").save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "both")

    def lines(name, **options):
        found = texts(dataset_source(str(tmp_path / name), streaming=streaming, **options))
        return [line for _, paragraphs in found for line in paragraphs]

    assert lines("one") == lines("both") == ["Train."] and lines("both", split="test") == ["Test."]
    with pytest.raises(ValueError, match="no split 'dev'; it has train, test: name one with --dataset_split"):
        lines("both", split="dev")
    with pytest.raises(ValueError, match="has no configurations"):
        lines("one", config="a")
    with pytest.raises(ValueError, match="no column 'body'; it has text, n"):
        lines("one", text_column="body")
    identities = [dataset_source(str(tmp_path / "both"), split=split).identity for split in ("train", "test")]
    assert identities[0] != identities[1]
    assert identities[0] == dataset_source(str(tmp_path / "both")).identity


def test_cleaning_does_what_it_is_asked_and_counts_it():
    ligature, composed = "The \ufb01rst cafe\u0301.", "The first caf\xe9."
    documents = [
        Document("a", [ligature, "Short.", "Twice the same."]),
        Document("b", ["Twice the same."]),
    ]

    def cleaned(**rules):
        counts = Counter()
        found = clean(documents, Cleaning(**rules), counts)
        return [list(document.paragraphs) for document in found], dict(+counts)

    untouched = [document.paragraphs for document in documents]
    assert cleaned() == (untouched, {"paragraphs": 4})
    assert cleaned(unicode_normalization="NFC")[0][0][0] == "The \ufb01rst caf\xe9."
    assert cleaned(unicode_normalization="NFKC", min_paragraph_characters=8, drop_duplicate_paragraphs=True) == (
        [[composed, "Twice the same."], []],
        {"paragraphs": 4, "normalized": 1, "too_short": 1, "duplicates": 1},
    )


def test_sentences_are_split_and_paragraphs_counted():
    document = Document("d", ["Mr. Smith came. He sat down!", "Was it late?"])
    (split,) = split_sentences([document, Document("empty", [])])
    assert split.sentences == ["Mr. Smith came.", "He sat down!", "Was it late?"]
    assert split.paragraph_ends == [2, 3]


def test_chinese_sentences_are_split():
    (split,) = split_sentences([Document("d", ["你好。我是学生。"])], "zh")
    assert split.sentences == ["你好。", "我是学生。"]


def test_nul_characters_pass_through():
    (split,) = split_sentences([Document("d", ["A nul\0 here. And\0."])])
    assert split.sentences == ["A nul\0 here.", "And\0."]


def test_japanese_sentences_are_split():
    (split,) = split_sentences([Document("d", ["今日は天気がいいです。公園へ行きますか？"])], "ja")
    assert split.sentences == ["今日は天気がいいです。", "公園へ行きますか？"]


def book(paragraphs, sentences_each):
    sentences = [f"Sentence {n}." for n in range(paragraphs * sentences_each)]
    ends = range(0, len(sentences), sentences_each)
    return Document("book", (" ".join(sentences[start : start + sentences_each]) for start in ends))


def blocks_of(*documents):
    return list(enough_blocks(split_sentences(documents)))


def test_a_book_is_cut_into_blocks_of_whole_paragraphs():
    blocks = blocks_of(book(paragraphs=1000, sentences_each=5), book(paragraphs=1, sentences_each=3))
    assert [s for block in blocks[:-1] for s in block.sentences] == [f"Sentence {n}." for n in range(5000)]
    assert [block.document for block in blocks] == [0] * (len(blocks) - 1) + [1]
    for block in blocks[:-2]:
        assert block.paragraph_ends == list(range(5, 66, 5)) and len(block.sentences) == 65


@pytest.mark.parametrize("sentences", [101, 500])
def test_a_little_book_is_cut_into_about_twenty_documents(sentences):
    blocks = blocks_of(book(paragraphs=sentences, sentences_each=1))
    assert FEWEST_DOCUMENTS - 4 < len(blocks) < 1.5 * FEWEST_DOCUMENTS
    assert [s for block in blocks for s in block.sentences] == [f"Sentence {n}." for n in range(sentences)]
    assert [block.document for block in blocks] == list(range(len(blocks)))
    assert all(block.paragraph_ends == list(range(1, len(block.sentences) + 1)) for block in blocks)


def test_a_paragraph_without_end_is_cut_between_sentences():
    blocks = blocks_of(book(paragraphs=1, sentences_each=5000))
    assert [s for block in blocks for s in block.sentences] == [f"Sentence {n}." for n in range(5000)]
    assert max(len(block.sentences) for block in blocks) == 2 * BLOCK_SENTENCES
    assert [block.paragraph_ends for block in blocks[:-1]] == [[]] * (len(blocks) - 1)
    assert blocks[-1].paragraph_ends == [len(blocks[-1].sentences)]


def test_text_without_full_stops_is_cut_between_words_and_counted():
    words = [f"word{n}" for n in range(1000)]
    counts = Counter()
    document = Document("d", [" ".join(words), "x" * 2500, "Short."])
    blocks = list(split_sentences([document], "en", counts))
    sentences = [sentence for block in blocks for sentence in block.sentences]
    assert " ".join(sentences[:-4]).split() == words and "".join(sentences[-4:-1]) == "x" * 2500
    assert sentences[-1] == "Short." and max(map(len, sentences)) <= LONGEST_SENTENCE
    assert min(map(len, sentences[:-5])) > LONGEST_SENTENCE - 10
    assert counts == {"long_sentences": 2}


def test_enough_documents_are_left_as_they_are():
    blocks = blocks_of(*(book(3, 2) for _ in range(FEWEST_DOCUMENTS + 5)))
    assert [block.document for block in blocks] == list(range(FEWEST_DOCUMENTS + 5))
    assert all(len(block.sentences) == 6 and block.paragraph_ends == [2, 4, 6] for block in blocks)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 64])
def test_a_text_read_in_pieces_is_the_text(size, tmp_path, monkeypatch):
    text = "\ufeffOne\r\nline – naïve.\r\n\r\n \n\nNext\n \t\nparagraph 😀 here.\r\n\n\nالعربية.\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    expected = split_paragraphs(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    monkeypatch.setattr(readers, "READ_BYTES", size)
    found = list(text_paragraphs(tmp_path / "a.txt"))
    if size < 16:  # that long a paragraph is cut
        found, expected = "".join(found).replace(" ", ""), "".join(expected).replace(" ", "")
    assert found == expected


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
    assert prose(DOCSTRING) == [
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
    assert docstrings(tmp_path / "good.py") == ["Module.", "Class.", "Method.", "Function."]
    assert docstrings(tmp_path / "bad.py") == []


def test_the_embedded_corpus_is_english_about_python_without_duplicates():
    """Its first documents: the topics of the reference and the beginning of the standard library."""
    import itertools

    documents = list(itertools.islice(python_docs(), 150))
    paragraphs = [paragraph for document in documents for paragraph in document.paragraphs]
    assert len(set(paragraphs)) == len(paragraphs) > 500
    assert not any(">>>" in paragraph or "\n" in paragraph or "```" in paragraph for paragraph in paragraphs)
    words = " ".join(paragraphs).lower().split()
    assert words.count("the") > 0.03 * len(words) and words.count("object") > 100


def test_the_embedded_corpus_knows_the_packages_requirements_and_theirs():
    names = [found.metadata["Name"].lower().replace("_", "-") for found in required_distributions("d2l-bert")]
    assert {"torch", "transformers", "huggingface-hub", "numpy"} <= set(names)
    assert len(set(names)) == len(names) and "pytest" not in names


def test_a_row_with_more_fields_than_names_is_no_text_cut_short(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1,Early.\n2,It was late, and dark.\n")
    with pytest.raises(ValueError, match="a.csv, line 3: more fields than the first line has names; put texts with"):
        texts(file_source(tmp_path / "a.csv"))
    (tmp_path / "b.tsv").write_text("text\ttext\nOne.\tTwo.\n")
    with pytest.raises(ValueError, match="two columns are called 'text'"):
        texts(file_source(tmp_path / "b.tsv"))


def test_what_is_passed_over_in_a_folder_is_counted_and_links_are_followed(tmp_path):
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
    assert source.counts["files_of_other_kinds"] == 1 and source.counts["broken_links"] == 1


def test_a_dictionary_of_texts_is_text(tmp_path):
    column = pa.array(["One. Two.", "Three."]).dictionary_encode()
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert [line for _, lines in texts(file_source(tmp_path / "a.parquet")) for line in lines] == [
        "One. Two.",
        "Three.",
    ]


def test_text_in_four_bytes_a_character_and_a_file_as_a_dataset_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("Text.".encode("utf-32"))
    with pytest.raises(ValueError, match="UTF-32 text; convert it"):
        texts(file_source(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="a.txt: a file; give it with --corpus"):
        dataset_source(str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        file_source("/dev/null")
