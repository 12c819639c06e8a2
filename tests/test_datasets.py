"""Datasets as a source of text, downloaded and streamed."""

import json

import datasets
import pytest
from text_sources import texts, write_table

from d2l_bert.tokenization.sources import (
    BLOCK_ROWS,
    _dataset_texts,
    dataset_source,
    row_documents,
)


def test_a_dataset_row_is_a_document(tmp_path):
    rows = [{"text": "First paragraph.\n\nSecond."}, {"text": "Another document."}, {"text": None}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = dataset_source(str(tmp_path))
    assert [paragraphs for _, paragraphs in texts(source)] == [["First paragraph.", "Second."], ["Another document."]]
    assert source.counts == {"rows_without_text": 1}


def test_dataset_rows_of_single_lines_become_paragraphs_of_larger_documents(tmp_path):
    rows = ["", " = Title = ", "A paragraph.", "", "Another one."]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    source = dataset_source(str(tmp_path))
    assert [paragraphs for _, paragraphs in texts(source)] == [["= Title =", "A paragraph.", "Another one."]]
    assert source.counts == {"rows_without_text": 2}
    blocks = list(row_documents("rows", (f"Line {number}." for number in range(5000))))
    assert [len(block.paragraphs) for block in blocks] == [BLOCK_ROWS] * 78 + [8]
    assert [line for block in blocks for line in block.paragraphs] == [f"Line {number}." for number in range(5000)]


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def streaming(request):
    return request.param


ROWS = [{"n": n, "text": f"Row {n}.\n\nIts end." if n % 3 else None} for n in range(3000)]


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet", "train.csv"])
def test_a_streamed_dataset_is_read_like_a_downloaded_one(name, streaming, tmp_path):
    write_table(tmp_path / name, ROWS)
    source = dataset_source(str(tmp_path), streaming=streaming)
    found = [paragraphs for _, paragraphs in texts(source)]
    assert found == [[f"Row {n}.", "Its end."] for n in range(3000) if n % 3]
    assert source.counts == {"rows_without_text": 1000} and source.name == tmp_path.name and not source.is_on_hub
    few = dataset_source(str(tmp_path), streaming=streaming, max_documents=5)
    assert len(texts(few)) == 5 and few.identity != source.identity


def test_the_identity_of_a_dataset_depends_on_its_content_and_not_on_streaming(tmp_path):
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
def test_a_damaged_row_of_a_dataset_is_refused_in_one_line(name, damage, words, streaming, tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr("logging.Logger.callHandlers", lambda logger, record: logged.append((logger.name, record)))
    write_table(tmp_path / name, ROWS)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + damage)
    with pytest.raises(ValueError) as refused:
        texts(dataset_source(str(tmp_path), streaming=streaming))
    said = str(refused.value)
    assert all(word in said for word in [f"dataset {tmp_path}", *words]) and "\n" not in said, said
    assert not [record for name, record in logged if name.startswith("datasets") and record.levelname == "ERROR"]


def test_the_error_of_a_damaged_stream_says_how_many_rows_were_read(tmp_path):
    write_table(tmp_path / "train-1.jsonl", ROWS)
    (tmp_path / "train-2.jsonl").write_text("no JSON\n")
    with pytest.raises(ValueError, match="cannot be read .*repair it"):
        texts(dataset_source(str(tmp_path), streaming=True))
    assert len(texts(dataset_source(str(tmp_path), streaming=True, max_documents=1999))) == 1999


@pytest.mark.parametrize("text", [1, [1, 2], {"en": "a"}, [["a"]]])
def test_a_dataset_column_without_text_is_refused(text, streaming, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": text}) + "\n")
    with pytest.raises(ValueError, match="row 1: column 'text' holds .*, not text"):
        texts(dataset_source(str(tmp_path), streaming=streaming))


def test_every_row_of_a_stream_with_unknown_columns_is_checked():
    def checked(*rows):
        return list(_dataset_texts("some/set", rows, "text"))

    assert checked({"text": "a"}, {"text": None}) == ["a", None]
    with pytest.raises(ValueError, match="some/set: cannot be read .*'text'"):
        checked({"body": "a", "n": 1})
    with pytest.raises(ValueError, match="some/set: cannot be read .*row 2: column 'text' holds int"):
        checked({"text": "a"}, {"text": 1})


def test_a_dataset_of_empty_files_is_refused(streaming, tmp_path):
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(ValueError, match="cannot be read"):
        dataset_source(str(tmp_path), streaming=streaming)


def test_folders_of_save_to_disk_are_read_and_a_missing_split_is_refused(streaming, tmp_path):
    train, test = (datasets.Dataset.from_list([{"text": f"{name}.", "n": 1}]) for name in ("Train", "Test"))
    train.with_format("pandas").save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "both")

    def lines(name, **options):
        found = texts(dataset_source(str(tmp_path / name), streaming=streaming, **options))
        return [line for _, paragraphs in found for line in paragraphs]

    assert lines("one") == lines("both") == ["Train."] and lines("both", split="test") == ["Test."]
    with pytest.raises(ValueError, match="both: cannot be read .*'dev'.*--dataset_split"):
        lines("both", split="dev")
    with pytest.raises(ValueError, match="has no configurations"):
        lines("one", config="a")
    with pytest.raises(ValueError, match="cannot be read .*'body'"):
        lines("one", text_column="body")
    identities = [dataset_source(str(tmp_path / "both"), split=split).identity for split in ("train", "test")]
    assert identities[0] != identities[1]
    assert identities[0] == dataset_source(str(tmp_path / "both")).identity
