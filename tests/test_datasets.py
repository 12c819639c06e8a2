"""Datasets as a source of text, downloaded and streamed."""

import dataclasses
from pathlib import Path

import datasets
import pytest
from text_sources import texts, write_table

from d2l_bert.messages import UserError
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.sources import BLOCK_ROWS, dataset_source
from d2l_bert.training.config import PretrainConfig


def test_rows_of_single_lines_become_paragraphs_of_larger_documents_where_that_is_asked_for(tmp_path):
    rows = ["", " = Title = ", "A paragraph.", *(f"Line {number}." for number in range(5000)), ""]
    write_table(tmp_path / "train.jsonl", [{"text": row} for row in rows])
    source = dataset_source(str(tmp_path), documents="file")
    blocks = texts(source)
    assert [len(block) for block in blocks] == [BLOCK_ROWS] * 78 + [10]
    assert sum(blocks, []) == ["= Title =", *rows[2:-1]]
    assert source.counts["rows without text"] == 2


either_way = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])


ROWS = [{"n": n, "text": f"Row {n}.\n\nIts end." if n % 3 else None} for n in range(3000)]


@either_way
@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet", "train.csv"])
def test_a_streamed_dataset_is_read_like_a_downloaded_one(name, streaming, tmp_path):
    write_table(tmp_path / name, ROWS)
    source = dataset_source(str(tmp_path), streaming=streaming)
    assert texts(source) == [[f"Row {n}.", "Its end."] for n in range(3000) if n % 3]
    assert source.counts["rows without text"] == 1000 and source.name == tmp_path.name and not source.is_on_hub
    assert dataset_source(str(tmp_path), streaming=not streaming).identity == source.identity
    with pytest.raises(UserError, match="'body'"):
        texts(dataset_source(str(tmp_path), streaming=streaming, text_column="body"))
    few = dataset_source(str(tmp_path), streaming=streaming, max_documents=5)
    assert len(texts(few)) == 5 and few.identity != source.identity


@either_way
@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("train.jsonl", b"no JSON\n", "row 3000"),
        ("train.jsonl", b'{"n": 1, "text": "a \\ud83d b"}\n', "row 3000"),
        ("train.csv", b'1,"not closed', "ParserError"),
    ],
)
def test_a_damaged_row_of_a_dataset_is_refused_in_one_line(name, damage, words, streaming, tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr("logging.Logger.callHandlers", lambda logger, record: logged.append((logger.name, record)))
    write_table(tmp_path / name, ROWS)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + damage)
    with pytest.raises(UserError, match=f"^dataset {tmp_path}.*{words}.*$"):  # no dot stands for the end of a line
        texts(dataset_source(str(tmp_path), streaming=streaming))
    assert not [record for name, record in logged if name.startswith("datasets") and record.levelname == "ERROR"]


@either_way
def test_folders_of_save_to_disk_are_read_and_a_missing_split_is_refused(streaming, tmp_path):
    train, test = (datasets.Dataset.from_list([{"text": f"{name}.", "n": 1}]) for name in ("Train", "Test"))
    train.with_format("pandas").save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "both")

    def opened(name, **options):
        return dataset_source(str(tmp_path / name), streaming=streaming, **options)

    assert texts(opened("one")) == texts(opened("both")) == [["Train."]]
    assert texts(opened("both", split="test")) == [["Test."]]
    with pytest.raises(ValueError, match="both: cannot be read .*'dev'.*--dataset_split"):
        opened("both", split="dev")
    with pytest.raises(ValueError, match="has no configurations"):
        opened("one", config="a")
    with pytest.raises(ValueError, match="cannot be read .*'body'"):
        opened("one", text_column="body")
    assert opened("both").identity == opened("both").identity != opened("both", split="test").identity


def test_a_dataset_in_memory_is_read_like_its_folder_and_named_by_its_content(tmp_path):
    rows = [{"n": n, "text": f"Row {n}." if n % 3 else None} for n in range(2500)]
    dataset = datasets.Dataset.from_list(rows)
    config = TextConfig(dataset=dataset)
    config.check()
    (folder,) = config.dataset
    source = dataset_source(folder)
    assert texts(source) == [[f"Row {n}."] for n in range(2500) if n % 3]
    assert source.name == Path(folder).name and len(source.name) < 30 and not source.is_on_hub
    # The same rows in other pieces, in another order of memory, with another format and other columns.
    pieces = datasets.concatenate_datasets([dataset.select(range(700)), dataset.select(range(700, 2500))])
    shuffled = dataset.shuffle(seed=1).sort("n").remove_columns("n").with_format("numpy")
    saved = str(tmp_path / "saved")
    dataset.save_to_disk(saved)
    assert TextConfig(dataset=[pieces, shuffled, saved]).dataset == [folder, folder, saved]
    assert dataset_source(saved).identity[1:] == source.identity[1:]
    (other,) = TextConfig(dataset=[dataset.select(range(2499))]).dataset
    assert other != folder and dataset_source(other).identity[1:] != source.identity[1:]
    assert dataclasses.replace(config, vocab_size=99).dataset == [folder]
    assert PretrainConfig(validation_dataset=dataset).validation_dataset == [folder]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["a"]})), "DatasetDict"),
        (datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset(), "IterableDataset"),
        (datasets.Dataset.from_dict({"body": ["a"]}), "body"),
        (datasets.Dataset.from_dict({"text": [1, 2]}), "row 1: column 'text' holds int"),
        ([3], "int"),
    ],
)
def test_what_is_no_dataset_with_the_column_of_text_is_refused_in_one_line(dataset, words):
    with pytest.raises(UserError, match=words) as refused:
        texts(dataset_source(TextConfig(dataset=dataset).dataset[0]))
    assert len(str(refused.value)) < 250 and "\n" not in str(refused.value)
