"""A text prepared once serves many runs, and they learn from it what they would have learnt from the text."""

import json
import multiprocessing
import os
import shutil
import sys
import time
from collections import Counter

import datasets
import pytest
from conftest import SMALL
from huggingface_hub import ModelCard, constants

from d2l_bert.cli import main
from d2l_bert.progress import messages_shown
from d2l_bert.tokenization import arrow
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.run_folder import default_output_dir


@pytest.fixture(scope="module")
def prepared(books, tmp_path_factory):
    """The folder that `d2l-bert prepare` leaves of the books."""
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    assert (
        main(["prepare", f"--corpus={books}", f"--output_dir={folder}", "--vocab_size=400", "--lowercase=false"]) == 0
    )
    return folder


def test_the_tokenizer_is_trained_as_asked_and_found_again(books, prepared, tmp_path, capsys):
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
    """The small model's options that a prepared text leaves open."""
    return [*(option for option in SMALL if not option.startswith("--vocab_size")), *changes]


def test_a_run_on_prepared_text_ends_with_the_bytes_of_a_run_on_the_text(books, prepared, tmp_path):
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


def test_a_run_may_go_on_from_text_to_tokens(books, prepared, tmp_path):
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


def test_what_is_settled_cannot_be_asked_for_again(books, prepared, tmp_path, capsys):
    for option in ("--vocab_size=300", "--language=de", "--tokenizer=x", "--validation_fraction=0.5"):
        said = refused(capsys, "pretrain", f"--corpus={prepared}", f"--output_dir={tmp_path / 'out'}", option)
        assert option.partition("=")[0][2:] in said and "settled in the prepared folder" in said
    assert "prepared already" in refused(capsys, "prepare", f"--corpus={prepared}", f"--output_dir={tmp_path / 'out'}")
    assert "something already" in refused(capsys, "prepare", f"--corpus={books}", f"--output_dir={prepared}")
    for more in ([str(books)], ["--dataset", "x/y"]):
        said = refused(capsys, "prepare", "--corpus", prepared, *more, f"--output_dir={tmp_path / 'out'}")
        assert "give it alone" in said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("damage", ["record", "tokens", "split", "tokenizer", "other split"])
def test_a_damaged_folder_is_named_with_the_mend(damage, prepared, tmp_path, capsys):
    folder = tmp_path / "tokens"
    shutil.copytree(prepared, folder)
    if damage == "record":
        (folder / "prepared.json").write_text("{")
    elif damage == "tokens":
        (arrow,) = folder.glob("tokens-*/data.arrow")
        arrow.write_bytes(arrow.read_bytes()[:1000])
    elif damage == "split":
        (folder / "train_documents.npy").write_bytes(b"")
    elif damage == "tokenizer":
        (folder / "tokenizer.json").write_text("{")
    else:
        shutil.copyfile(folder / "train_documents.npy", folder / "held_out_documents.npy")
    said = refused(
        capsys, "pretrain", f"--corpus={folder}", f"--output_dir={tmp_path / 'out'}", *options("--max_steps=1")
    )
    assert str(folder) in said and "prepare the text again" in said
    assert os.listdir(tmp_path) == ["tokens"]


def test_a_bug_while_a_prepared_folder_is_read_is_shown_as_one(prepared, tmp_path, monkeypatch, capsys):
    def fail(*_, **how):
        raise KeyError("of ours")

    monkeypatch.setattr("d2l_bert.tokenization.arrow.TokenizedCorpus", fail)
    code = main(["pretrain", f"--corpus={prepared}", f"--output_dir={tmp_path / 'out'}", *options("--max_steps=1")])
    assert code == 1 and "this is a bug of d2l-bert" in capsys.readouterr().err


@pytest.mark.parametrize("entry", ["counts", "files", "tokens", "fingerprint"])
def test_a_record_of_a_prepared_folder_that_lacks_an_entry_is_refused(prepared, tmp_path, capsys, entry):
    folder = tmp_path / "tokens"
    shutil.copytree(prepared, folder)
    record = json.loads((folder / "prepared.json").read_text())
    without = {name: value for name, value in record.items() if name != entry}
    for damaged in (without, [], without | {"files": {}}):
        (folder / "prepared.json").write_text(json.dumps(damaged))
        out = f"--output_dir={tmp_path / 'out'}"
        said = refused(capsys, "pretrain", f"--corpus={folder}", out, *options("--max_steps=1"))
        assert f"corpus {folder}: a damaged prepared folder" in said and "prepare the text again" in said


@pytest.mark.parametrize(
    "changes",
    [
        {"settled": 5},
        {"settled": {"nonsense": 1}},
        {"settled": {"language": 7}},
        {"hub_datasets": 5},
        {"corpus_name": 5},
        {"reading": "x"},
        {"counts": {"tokenizer": 5}},
    ],
    ids=str,
)
def test_a_record_of_a_prepared_folder_that_says_something_else_is_refused(prepared, tmp_path, capsys, changes):
    folder = tmp_path / "tokens"
    shutil.copytree(prepared, folder)
    record = json.loads((folder / "prepared.json").read_text())
    (folder / "prepared.json").write_text(json.dumps(record | changes))
    said = refused(
        capsys, "pretrain", f"--corpus={folder}", f"--output_dir={tmp_path / 'out'}", *options("--max_steps=1")
    )
    assert f"corpus {folder}: a damaged prepared folder" in said and "prepare the text again" in said


def test_one_byte_of_any_file_of_a_prepared_folder_matters(prepared, tmp_path, capsys):
    files = [path.relative_to(prepared) for path in prepared.rglob("*") if path.is_file()]
    assert len(files) >= 10
    for file in files:
        folder = tmp_path / "tokens"
        shutil.copytree(prepared, folder)
        content = bytearray((folder / file).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / file).write_bytes(content)
        out = f"--output_dir={tmp_path / 'out'}"
        said = refused(capsys, "pretrain", f"--corpus={folder}", out, *options("--max_steps=1"))
        assert str(folder) in said and "prepare the text again" in said, file
        shutil.rmtree(folder)
    shutil.copytree(prepared, folder)
    (folder / "prepared.json").unlink()
    said = refused(capsys, "pretrain", f"--corpus={folder}", out, *options("--max_steps=1"))
    assert "a prepared folder without its prepared.json" in said
    assert os.listdir(tmp_path) == ["tokens"]


def test_a_damaged_cache_is_named_with_the_mend(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    (tmp_path / "book.txt").write_text("\n\n".join(f"Anna has {n} apples. Boris sold them." for n in range(200)))
    command = ["prepare", f"--corpus={tmp_path / 'book.txt'}", f"--output_dir={tmp_path / 'out'}", "--vocab_size=300"]
    assert main(command) == 0
    for kind, name in (
        ("text", "counts.json"),
        ("text", "document_sources.npy"),
        ("tokenizer", "pieces.json"),
        ("tokens", "data.arrow"),
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
# Two processes on one text


@pytest.fixture
def prepare_beside(books, tmp_path):
    """Start processes that prepare the books in one new cache and take `seconds` to read each book."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["processes", "d2l_bert.training.pretrain", "matplotlib.figure"])
    started = []

    def start(name, seconds):
        said = tmp_path / f"{name}.txt"
        said.touch()
        started.append(context.Process(target=_prepare, args=(books, tmp_path / "home", said, seconds)))
        started[-1].start()
        return started[-1], said

    yield start
    for process in started:
        process.kill()
        process.join()


def _prepare(books, home, said, seconds):
    """Runs in a process of its own; what it says goes to a file."""
    constants.HF_HOME = str(home)
    sys.stderr = said.open("w", buffering=1)
    all_documents = arrow.all_documents

    def slowly(sources):
        for document in all_documents(sources):
            time.sleep(seconds)
            yield document

    arrow.all_documents = slowly
    with messages_shown():
        prepare(TextConfig(corpus=[str(books)], vocab_size=400, preprocessing_num_workers=1))


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_of_two_processes_on_one_text_one_works_and_the_other_says_that_it_waits(prepare_beside, tmp_path):
    runs = [prepare_beside(name, seconds=0.2) for name in ("one", "two")]  # 24 books: 4.8 s
    for process, _ in runs:
        process.join(60)
        assert process.exitcode == 0
    lines = [said.read_text().splitlines() for _, said in runs]
    done = Counter(line.partition(":")[0].partition(" of at most")[0] for line in [*lines[0], *lines[1]])
    assert [done[what] for what in ("reading books", "training a tokenizer", "tokenizing")] == [1, 1, 1]
    waiting = f"waiting for another process that is reading books (cache {tmp_path / 'home' / 'd2l_bert'})"
    assert sorted(said.count(waiting) for said in lines) == [0, 1], lines
    assert lines[0][-1] == lines[1][-1] and lines[0][-1].startswith("books: 22 documents, ")


def test_the_one_that_waits_goes_on_where_the_other_is_killed(prepare_beside, tmp_path):
    cache = tmp_path / "home" / "d2l_bert"
    first, said_by_first = prepare_beside("first", seconds=60)
    wait_for(lambda: any(cache.glob(".text-*.part")))
    second, said = prepare_beside("second", seconds=0)
    wait_for(lambda: "waiting for another process that is reading books" in said.read_text())
    first.kill()
    second.join(60)
    assert second.exitcode == 0 and said_by_first.read_text() == ""
    assert "\nreading books: 24 documents in" in said.read_text()
    assert not list(cache.glob(".*.part")) and {path.name.partition("-")[0] for path in cache.glob("[!.]*")} == {
        "text",
        "tokenizer",
        "tokens",
    }


# ---------------------------------------------------------------------------------------------------------------------
# What is said, recorded and refused


def test_a_name_that_no_json_could_hold_is_refused_at_once(books, tmp_path, capsys):
    out = f"--output_dir={tmp_path}/r\udcff"
    assert "its name is not UTF-8" in refused(capsys, "prepare", f"--corpus={books}", out)
    assert "its name is not UTF-8" in refused(capsys, "pretrain", f"--corpus={books}", out, *SMALL, "--max_steps=1")
    assert "given 2 times" in refused(capsys, "prepare", "--corpus", books, books, f"--output_dir={tmp_path / 'out'}")
    assert os.listdir(tmp_path) == []


def test_cleaning_is_reported_and_recorded(books, tmp_path, capsys):
    shutil.copytree(books, tmp_path / "books")
    twin = sorted((tmp_path / "books").iterdir())[0]
    shutil.copyfile(twin, tmp_path / "books" / "again.txt")
    paragraphs = len(twin.read_text().split("\n\n"))
    rules = ["--drop_duplicate_paragraphs", "--min_paragraph_characters=20", "--unicode_normalization=NFC"]
    out = ["--vocab_size=400", f"--output_dir={tmp_path / 'tokens'}"]
    assert main(["prepare", f"--corpus={tmp_path / 'books'}", *rules, *out]) == 0
    assert " duplicates" in capsys.readouterr().err
    record = json.loads((tmp_path / "tokens" / "prepared.json").read_text())
    assert record["reading"]["paragraphs"] == 10 * 25 and record["reading"]["duplicates"] >= paragraphs
    assert record["settled"]["unicode_normalization"] == "NFC"


def test_files_and_datasets_are_one_corpus(books, tmp_path, monkeypatch):
    for name, mark in (("left", "Alpha"), ("right", "Omega")):
        (tmp_path / name).mkdir()
        rows = [f"{mark} row number {n}.\n\nIt has two paragraphs." for n in range(8)]
        lines = [json.dumps({"text": text}) for text in ["", *rows]]
        (tmp_path / name / "train.jsonl").write_text("\n".join(lines))
    load, asked = datasets.load_dataset_builder, []

    def from_hub(name, config):  # some/set is on the Hub, and is what lies in the folder "right"
        asked.append((name, config))
        return load(str(tmp_path / "right") if name == "some/set" else name)

    monkeypatch.setattr("datasets.load_dataset_builder", from_hub)
    run = TextConfig(
        corpus=[str(books)], dataset=[str(tmp_path / "left"), "some/set:small"], vocab_size=300, max_documents=7
    )
    text = prepare(run)
    assert asked == [(str(tmp_path / "left"), None), ("some/set", "small")]
    assert text.corpus_name == "books, left, some/set" and text.hub_datasets == ["some/set"]
    assert text.document_sources.tolist() == [0] * 7 + [1] * 7 + [2] * 7
    assert text.reading["rows_without_text"] == 2
    assert prepare(run).reading == text.reading  # found again, nothing read
    source = [f"--corpus={books}", "--dataset", str(tmp_path / "left"), "some/set:small", "--max_documents=7"]
    assert main(["pretrain", *source, f"--output_dir={tmp_path / 'out'}", *SMALL, "--max_steps=1"]) == 0
    assert ModelCard.load(tmp_path / "out" / "README.md").data.datasets == ["some/set"]


def test_where_the_text_is_and_what_the_folder_is_called(tmp_path):
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
def test_a_language_without_spaces_is_learnt_from(language, sentences, tmp_path):
    for number in range(24):
        text = "".join(sentences[number % 5 :]) + "\0"
        (tmp_path / f"{number}.txt.jsonl").write_text(json.dumps({"text": text}))
    run = TextConfig(corpus=[str(tmp_path)], language=language, vocab_size=200)
    prepared = prepare(run)
    assert len(prepared.tokens.sentence_ends(0)) == len(sentences)
    tokens = prepared.tokens.tokens(0)
    assert len(tokens) > 5 * len(sentences) and prepared.tokenizer.unk_token_id not in tokens
    out = tmp_path / "out"
    source = [f"--corpus={tmp_path}", f"--language={language}", f"--output_dir={out}"]
    assert main(["pretrain", *source, "--vocab_size=200", *options("--max_steps=2")]) == 0
    assert (out / "model.safetensors").exists()
