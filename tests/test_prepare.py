"""Text prepared once serves many runs, which train the same weights as runs on the text itself."""

import json
import os
import shutil

import datasets
import numpy as np
import pytest
from conftest import SMALL
from huggingface_hub import ModelCard, constants

from d2l_bert.cli import main
from d2l_bert.tokenization import prepared_folder
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.run_folder import default_output_dir


@pytest.fixture(scope="module")
def prepared(books, tmp_path_factory):
    """The folder that `d2l-bert prepare` writes for the books."""
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    assert (
        main(["prepare", f"--corpus={books}", f"--output_dir={folder}", "--vocab_size=400", "--lowercase=false"]) == 0
    )
    return folder


def test_the_tokenizer_follows_its_options_and_is_cached(books, prepared, tmp_path, capsys):
    pieces = (prepared / "vocab.txt").read_text().splitlines()
    assert "Anna" in pieces and "Then" in pieces
    again = ["prepare", f"--corpus={books}", f"--output_dir={tmp_path / 'tokens'}", "--vocab_size=400"]
    capsys.readouterr()
    assert main([*again, "--lowercase=false"]) == 0
    assert "training a tokenizer" not in capsys.readouterr().err
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (tmp_path / "tokens" / name).read_bytes() == (prepared / name).read_bytes()
    for changed in ("--lowercase", "--min_frequency=60", "--limit_alphabet=30"):
        shutil.rmtree(tmp_path / "tokens")
        assert main([*again, "--lowercase=false", changed]) == 0
        assert (tmp_path / "tokens" / "vocab.txt").read_text().splitlines() != pieces


def options(*changes):
    """The options of the small model that a prepared folder does not fix, and further options."""
    return [*(option for option in SMALL if not option.startswith("--vocab_size")), *changes]


def test_a_run_on_prepared_text_ends_with_the_same_bytes_as_a_run_on_the_text(books, prepared, tmp_path):
    again = tmp_path / "elsewhere"
    shutil.copytree(prepared, again)
    whole = ["--max_steps=4", "--save_steps=2"]
    text = [f"--corpus={books}", "--lowercase=false", "--vocab_size=400"]
    assert main(["pretrain", *text, f"--output_dir={tmp_path / 'text'}", *options(*whole)]) == 0
    assert main(["pretrain", f"--corpus={again}", f"--output_dir={tmp_path / 'tokens'}", *options(*whole)]) == 0
    records = []
    for name in ("model.safetensors", "tokenizer.json", "vocab.txt"):
        assert (tmp_path / "text" / name).read_bytes() == (tmp_path / "tokens" / name).read_bytes(), name
    for name in ("text", "tokens"):
        records.append(json.loads((tmp_path / name / "run_config.json").read_text()))
    assert records[0]["data"] == records[1]["data"]
    assert records[1]["run"]["lowercase"] is False and records[1]["run"]["vocab_size"] == 400


def test_a_run_on_text_may_be_resumed_on_the_prepared_folder(books, prepared, tmp_path):
    out, text = f"--output_dir={tmp_path / 'out'}", [f"--corpus={books}", "--lowercase=false", "--vocab_size=400"]
    assert main(["pretrain", *text, out, *options("--max_steps=4", "--save_steps=2")]) == 0
    whole = (tmp_path / "out" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    resumed = ["--resume_from_checkpoint=latest", "--save_steps=2", "--max_steps=4"]
    assert main(["pretrain", f"--corpus={prepared}", out, *options(*resumed)]) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole


def refused(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert ": error: " in said and "Traceback" not in said
    return said


def test_options_that_the_prepared_folder_fixes_are_refused(books, prepared, tmp_path, capsys):
    for option in ("--vocab_size=300", "--language=de", "--tokenizer=x", "--validation_fraction=0.5"):
        said = refused(capsys, "pretrain", f"--corpus={prepared}", f"--output_dir={tmp_path / 'out'}", option)
        assert option.partition("=")[0][2:] in said and "fixed by the prepared folder" in said
    assert "prepared already" in refused(capsys, "prepare", f"--corpus={prepared}", f"--output_dir={tmp_path / 'out'}")
    assert "exists already" in refused(capsys, "prepare", f"--corpus={books}", f"--output_dir={prepared}")
    for more in ([str(books)], ["--dataset", "x/y"]):
        said = refused(capsys, "prepare", "--corpus", prepared, *more, f"--output_dir={tmp_path / 'out'}")
        assert "a prepared folder, not text" in said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("damage", ["record", "tokens", "hashes", "split", "tokenizer", "other split"])
def test_a_damaged_prepared_folder_is_refused_with_the_mend(damage, prepared, tmp_path, capsys):
    folder = tmp_path / "tokens"
    shutil.copytree(prepared, folder)
    if damage == "record":
        (folder / "prepared.json").write_text("{")
    elif damage == "tokens":
        ids = folder / "tokens" / "ids.npy"
        ids.write_bytes(ids.read_bytes()[:1000])
    elif damage == "hashes":
        (folder / "text_hashes.npy").unlink()
    elif damage == "split":
        (folder / "held_out_documents.npy").write_bytes(b"")
    elif damage == "tokenizer":
        (folder / "tokenizer.json").write_text("{")
    else:
        held_out = np.load(folder / "held_out_documents.npy")
        np.save(folder / "held_out_documents.npy", (held_out + 1) % 22)
    said = refused(
        capsys, "pretrain", f"--corpus={folder}", f"--output_dir={tmp_path / 'out'}", *options("--max_steps=1")
    )
    assert str(folder) in said and "prepare the text again" in said
    assert os.listdir(tmp_path) == ["tokens"]


def test_a_bug_while_reading_a_prepared_folder_is_shown_as_a_bug(prepared, tmp_path, monkeypatch, capsys):
    def fail(*_, **how):
        raise KeyError("of ours")

    monkeypatch.setattr("d2l_bert.tokenization.prepared_folder.TokenizedCorpus", fail)
    code = main(["pretrain", f"--corpus={prepared}", f"--output_dir={tmp_path / 'out'}", *options("--max_steps=1")])
    assert code == 1 and "this is a bug of d2l-bert" in capsys.readouterr().err


@pytest.mark.parametrize("entry", ["counts", "files", "fingerprint", "source_ends", "token_options"])
def test_a_prepared_folder_whose_record_lacks_an_entry_is_refused(prepared, tmp_path, capsys, entry):
    folder = tmp_path / "tokens"
    shutil.copytree(prepared, folder)
    record = json.loads((folder / "prepared.json").read_text())
    without = {name: value for name, value in record.items() if name != entry}
    for damaged in (without, []):
        (folder / "prepared.json").write_text(json.dumps(damaged))
        out = f"--output_dir={tmp_path / 'out'}"
        said = refused(capsys, "pretrain", f"--corpus={folder}", out, *options("--max_steps=1"))
        assert f"corpus {folder}: a damaged prepared folder" in said and "prepare the text again" in said


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 1},
        {"counts": 5},
        {"files": {"tokens/ids.npy": {}}},
    ],
    ids=str,
)
def test_a_prepared_folder_with_wrong_entries_in_its_record_is_refused(prepared, tmp_path, capsys, changes):
    folder = tmp_path / "tokens"
    shutil.copytree(prepared, folder)
    record = json.loads((folder / "prepared.json").read_text())
    (folder / "prepared.json").write_text(json.dumps(record | changes))
    said = refused(
        capsys, "pretrain", f"--corpus={folder}", f"--output_dir={tmp_path / 'out'}", *options("--max_steps=1")
    )
    assert f"corpus {folder}: a damaged prepared folder" in said and "prepare the text again" in said


def test_check_notices_one_changed_byte_in_any_file_of_a_prepared_folder(prepared, tmp_path, capsys):
    folder, other = tmp_path / "tokens", tmp_path / "other"
    shutil.copytree(prepared, folder)
    shutil.copytree(prepared, other)
    capsys.readouterr()
    assert main(["prepare", "--check", str(folder)]) == main(["prepare", "--check", str(other)]) == 0
    files = [path for path in folder.rglob("*") if path.is_file()]
    tokens = prepared_folder.read_prepared_folder(folder).tokens
    counts = f"24 documents, {len(tokens.ids):,} tokens"
    assert capsys.readouterr().out.splitlines() == [f"{path}: whole; {counts}" for path in (folder, other)]
    assert len(files) >= 12
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(bytes([*whole[: len(whole) // 2], whole[len(whole) // 2] ^ 1, *whole[len(whole) // 2 + 1 :]]))
        said = refused(capsys, "prepare", "--check", folder)
        assert f"corpus {folder}: " in said and "prepare the text again" in said, file
        file.write_bytes(whole)


def test_check_takes_prepared_folders_and_no_other_option(prepared, books, tmp_path, capsys):
    assert f"{books}: no prepared folder (no prepared.json)" in refused(capsys, "prepare", "--check", books)
    said = refused(capsys, "prepare", "--check", prepared, "--vocab_size=300")
    assert "vocab_size is for preparing a text" in said
    said = refused(capsys, "prepare", "--check", prepared, f"--output_dir={tmp_path / 'out'}")
    assert "output_dir is for preparing a text" in said
    assert "output_dir is missing" in refused(capsys, "prepare", f"--corpus={books}")
    assert os.listdir(tmp_path) == []


def test_a_run_notices_files_of_another_size_and_changed_small_files(prepared, tmp_path, capsys):
    for file in (path.relative_to(prepared) for path in prepared.rglob("*") if path.is_file()):
        folder = tmp_path / "tokens"
        shutil.copytree(prepared, folder)
        content = (folder / file).read_bytes()
        is_large = file.suffix == ".npy" and file.name != "held_out_documents.npy"
        middle = len(content) // 2
        changed = content + b"x" if is_large else content[:middle] + b"\1" + content[middle + 1 :]
        (folder / file).write_bytes(changed)
        out = f"--output_dir={tmp_path / 'out'}"
        said = refused(capsys, "pretrain", f"--corpus={folder}", out, *options("--max_steps=1"))
        assert str(folder) in said and "prepare the text again" in said, file
        shutil.rmtree(folder)
    shutil.copytree(prepared, folder)
    (folder / "prepared.json").unlink()
    said = refused(capsys, "pretrain", f"--corpus={folder}", out, *options("--max_steps=1"))
    assert "a prepared folder, not text" in said
    assert os.listdir(tmp_path) == ["tokens"]


def test_a_damaged_cache_is_refused_with_the_mend(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    (tmp_path / "book.txt").write_text("\n\n".join(f"Anna has {n} apples. Boris sold them." for n in range(200)))
    command = ["prepare", f"--corpus={tmp_path / 'book.txt'}", f"--output_dir={tmp_path / 'out'}", "--vocab_size=300"]
    assert main(command) == 0
    for kind, name in (
        ("text", "counts.json"),
        ("text", "document_ends.npy"),
        ("tokenizer", "pieces.json"),
        ("tokens", "ids.npy"),
        ("tokens", "store.json"),
        ("tokens", "paragraph_ends.npy"),
    ):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (file,) = (tmp_path / "home" / "d2l_bert").glob(f"{kind}-*/{name}")
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        said = refused(capsys, *command)
        assert f"cache {file.parent}: damaged" in said and "delete this folder" in said
        file.write_bytes(whole)
    assert main(command) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Messages, records, refusals


def test_names_that_are_not_utf_8_and_sources_given_twice_are_refused_at_once(books, tmp_path, capsys):
    out = f"--output_dir={tmp_path}/r\udcff"
    with pytest.raises(SystemExit):
        main(["prepare", f"--corpus={books}", out])
    assert "is not UTF-8" in capsys.readouterr().err
    assert "is not UTF-8" in refused(capsys, "pretrain", f"--corpus={books}", out, *SMALL, "--max_steps=1")
    assert "is given twice" in refused(capsys, "prepare", "--corpus", books, books, f"--output_dir={tmp_path / 'out'}")
    assert os.listdir(tmp_path) == []


def test_cleaning_is_reported_and_recorded(books, tmp_path, capsys):
    shutil.copytree(books, tmp_path / "books")
    twin = sorted((tmp_path / "books").iterdir())[0]
    shutil.copyfile(twin, tmp_path / "books" / "again.txt")
    paragraphs = len(twin.read_text().split("\n\n"))
    rules = ["--drop_duplicate_paragraphs", "--min_paragraph_characters=20", "--unicode_normalization=NFC"]
    out = ["--vocab_size=400", f"--output_dir={tmp_path / 'tokens'}"]
    assert main(["prepare", f"--corpus={tmp_path / 'books'}", *rules, *out]) == 0
    assert " duplicate paragraphs" in capsys.readouterr().err
    record = json.loads((tmp_path / "tokens" / "prepared.json").read_text())
    assert record["reading"]["paragraphs"] == 10 * 25 and record["reading"]["duplicates"] >= paragraphs
    assert record["token_options"]["unicode_normalization"] == "NFC"


def test_files_and_datasets_may_be_combined_in_one_corpus(books, tmp_path, monkeypatch):
    for name, mark in (("left", "Alpha"), ("right", "Omega")):
        (tmp_path / name).mkdir()
        rows = [f"{mark} row number {n}.\n\nIt has two paragraphs." for n in range(8)]
        lines = [json.dumps({"text": text}) for text in ["", *rows]]
        (tmp_path / name / "train.jsonl").write_text("\n".join(lines))
    load, asked = datasets.load_dataset_builder, []

    def from_hub(name, config):  # stands for the Hub, where some/set has the rows of the folder "right"
        asked.append((name, config))
        return load(str(tmp_path / "right") if name == "some/set" else name)

    monkeypatch.setattr("datasets.load_dataset_builder", from_hub)
    run = TextConfig(
        corpus=[str(books)], dataset=[str(tmp_path / "left"), "some/set:small"], vocab_size=300, max_documents=7
    )
    text = prepare(run)
    assert asked == [(str(tmp_path / "left"), None), ("some/set", "small")]
    assert text.corpus_name == "books, left, some/set" and text.hub_datasets == ["some/set"]
    assert text.source_ends == [7, 14, 21] == [len(text.tokens) * n // 3 for n in (1, 2, 3)]
    assert text.reading["rows_without_text"] == 2
    assert prepare(run).reading == text.reading  # from the cache: the sources are not read again
    source = [f"--corpus={books}", "--dataset", str(tmp_path / "left"), "some/set:small", "--max_documents=7"]
    assert main(["pretrain", *source, f"--output_dir={tmp_path / 'out'}", *SMALL, "--max_steps=1"]) == 0
    assert ModelCard.load(tmp_path / "out" / "README.md").data.datasets == ["some/set"]


def test_the_names_of_sources_and_of_the_default_output_folder(tmp_path):
    (tmp_path / "a:b").mkdir()
    both = TextConfig(dataset=["some/set", "other/set:en", f"{tmp_path}/a:b"])
    assert both.named_datasets() == [("some/set", None), ("other/set", "en"), (f"{tmp_path}/a:b", None)]
    one = TextConfig(dataset=["some/set"], dataset_config="en")
    assert one.named_datasets() == [("some/set", "en")] and one.text_paths() == []
    assert TextConfig().text_paths() == ["python-docs"]
    for options, name in (
        ({}, "python-docs"),
        ({"dataset": ["some/set:en"]}, "set"),
        ({"corpus": ["x/books.txt"]}, "books"),
        ({"corpus": ["books"], "dataset": ["some/set"]}, "texts"),
    ):
        assert default_output_dir(PretrainConfig(**options)) == f"d2l-bert-tiny-{name}"


WHO, WHERE = ("我", "你", "老师", "学生"), ("学校", "公园", "图书馆", "车站")
ALSO, DONE = ("先生", "学生", "友だち", "あなた"), ("駅", "公園", "図書館", "レストラン")


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("zh", [f"{who}今天去{where}看书。" for who in WHO for where in WHERE]),
        ("ja", [f"{who}は今日{where}へ行きます。" for who in ALSO for where in DONE]),
    ],
)
def test_a_language_without_spaces_can_be_prepared_and_trained_on(language, sentences, tmp_path):
    for number in range(24):
        text = "".join(sentences[number % 5 :]) + "\0"
        (tmp_path / f"{number}.txt.jsonl").write_text(json.dumps({"text": text}))
    run = TextConfig(corpus=[str(tmp_path)], language=language, vocab_size=200)
    prepared = prepare(run)
    assert len(prepared.tokens.sentences(0)) == len(sentences)
    tokens = prepared.tokens.tokens(0)
    assert len(tokens) > 5 * len(sentences) and prepared.tokenizer.unk_token_id not in tokens
    out = tmp_path / "out"
    source = [f"--corpus={tmp_path}", f"--language={language}", f"--output_dir={out}"]
    assert main(["pretrain", *source, "--vocab_size=200", *options("--max_steps=2")]) == 0
    assert (out / "model.safetensors").exists()
