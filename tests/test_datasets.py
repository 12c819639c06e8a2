"""Datasets as a source of text, downloaded and streamed."""

import json
from collections import Counter

import datasets
import pytest
from text_sources import texts, write_table

from d2l_bert.tokenization.sources import (
    BLOCK_ROWS,
    dataset_source,
    row_documents,
)


def test_rows_of_single_lines_become_paragraphs_of_larger_documents_where_that_is_asked_for(tmp_path):
    rows = ["", " = Title = ", "A paragraph.", "", "Another one."]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    source = dataset_source(str(tmp_path), documents="file")
    assert [paragraphs for _, paragraphs in texts(source)] == [["= Title =", "A paragraph.", "Another one."]]
    assert source.counts["rows_without_text"] == 2
    rows = [f"Line {number}." for number in range(5000)]
    blocks = [list(block.paragraphs) for block in row_documents("rows", rows, Counter(), "file")]
    assert [len(block) for block in blocks] == [BLOCK_ROWS] * 78 + [8]
    assert [line for block in blocks for line in block] == rows
    assert [list(row.paragraphs) for row in row_documents("rows", rows, Counter())] == [[row] for row in rows]


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
    assert source.counts["rows_without_text"] == 1000 and source.name == tmp_path.name and not source.is_on_hub
    few = dataset_source(str(tmp_path), streaming=streaming, max_documents=5)
    assert len(texts(few)) == 5 and few.identity != source.identity


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
