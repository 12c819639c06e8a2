"""Parts of a corpus prepared apart and trained together; `prepare --check`; folders that are damaged or read-only."""

import json
import os
import shutil
import signal
import stat
import time

import numpy as np
import processes
import pytest
from conftest import SMALL, write_books
from huggingface_hub import constants

from d2l_bert.cli import main
from d2l_bert.folders import read_json
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.tokenization.prepared_folder import PREPARED_FORMAT
from d2l_bert.training.batching import make_phases
from d2l_bert.training.config import PretrainConfig


OPTIONS = [*(option for option in SMALL if not option.startswith("--vocab_size")), "--mixed_precision=no"]

# Each part holds out 5 % of its text; together they hold out 5 %, and that is less than a part's own documents.
PARTS = 4


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Four folders of 24 books each."""
    folder = tmp_path_factory.mktemp("texts")
    return [write_books(folder / f"text-{number}", seed=100 + number) for number in range(PARTS)]


@pytest.fixture(scope="module")
def tokenizer(books, tmp_path_factory):
    """A prepared folder whose tokenizer all parts have."""
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    assert main(["prepare", f"--corpus={books}", f"--output_dir={folder}", "--vocab_size=400"]) == 0
    return folder


@pytest.fixture(scope="module")
def parts(texts, tokenizer, tmp_path_factory):
    """The four texts, each prepared by a command of its own."""
    folder = tmp_path_factory.mktemp("parts")
    for text in texts:
        out = folder / text.name.replace("text", "part")
        assert main(["prepare", f"--tokenizer={tokenizer}", f"--corpus={text}", f"--output_dir={out}"]) == 0
    return sorted(folder.iterdir())


def pretrain(folder, parts, *options):
    return main(["pretrain", "--corpus", *map(str, parts), f"--output_dir={folder}", *OPTIONS, *options])


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    *_, last = captured.err.splitlines()
    assert ": error: " in last
    return last


def documents(text):
    """The token ids of each document."""
    return [text.tokens.tokens(number).tolist() for number in range(len(text.tokens))]


def paths(folders):
    return [str(folder) for folder in folders]


# ---------------------------------------------------------------------------------------------------------------------
# One corpus of several parts


def test_parts_hold_the_documents_and_tokens_of_their_texts_in_order(parts, texts, tokenizer):
    together = prepare(TextConfig(corpus=paths(parts)))
    whole = prepare(TextConfig(corpus=paths(texts), tokenizer=str(tokenizer)))
    assert documents(together) == documents(whole) and len(together.tokens) == PARTS * 24
    assert together.source_ends == whole.source_ends == [24, 48, 72, 96]
    for table in ("sentence_ends", "paragraph_ends", "document_ends", "document_words"):
        tables = [getattr(text.tokens, table) for text in (together, whole)]
        found, expected = (table.at(np.arange(len(table))).tolist() for table in tables)
        assert found == expected, table
    assert np.concatenate(together.text_hashes).tolist() == np.concatenate(whole.text_hashes).tolist()
    assert together.reading == whole.reading
    assert together.corpus_name == "text-0, text-1, text-2, text-3"


def test_the_order_of_the_parts_is_the_order_of_their_documents(parts):
    forwards, backwards = (prepare(TextConfig(corpus=paths(order))) for order in (parts, parts[::-1]))
    one = documents(forwards)
    assert documents(backwards) == [*one[72:], *one[48:72], *one[24:48], *one[:24]]
    assert forwards.tokens.fingerprint() != backwards.tokens.fingerprint()


def test_every_document_is_in_some_pair_of_an_epoch_once(parts):
    """Without a second loss a token is in exactly one sequence of an epoch."""
    text = prepare(TextConfig(corpus=paths(parts)))
    run = PretrainConfig(corpus=paths(parts), max_steps=1, max_seq_length=48, objective="none", vocab_size=400)
    (phase,) = make_phases(run, text, 1)
    train = text.train_documents()
    tokens = np.zeros(len(text.tokens.ids), dtype=int)
    for window in range(phase.pairs.windows(0)):
        for pair in phase.pairs.window(0, window):
            tokens[pair["a_start"] : pair["a_end"]] += 1
    expected = np.zeros(len(text.tokens.ids), dtype=int)
    for document in train.nth(np.arange(len(train))):
        first, end = text.tokens.first_tokens(np.array([document, document + 1]))
        expected[first:end] = 1
    assert (tokens == expected).all()


def test_parts_train_as_their_texts_do(parts, texts, tokenizer, tmp_path):
    """With a validation text nothing is held out, so both train on the same documents."""
    check = write_books(tmp_path / "check", seed=9)
    options = ["--max_steps=3", "--save_steps=3", f"--validation_corpus={check}"]
    assert pretrain(tmp_path / "parts", parts, *options) == 0
    assert pretrain(tmp_path / "texts", texts, f"--tokenizer={tokenizer}", *options) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("parts", "texts")]
    metrics = [read_json(tmp_path / name / "metrics.json")["eval_mlm_loss"] for name in ("parts", "texts")]
    # One part after the other is laid out by sources; a source of plain text is a part.
    assert weights[0] == weights[1] and metrics[0] == metrics[1]


def test_source_weights_are_one_for_each_part(parts, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["pretrain", "--corpus", *parts, f"--output_dir={out}", *OPTIONS, "--max_steps=2"]
    said = refused(capsys, *arguments, "--source_weights", "1", "2")
    assert "source_weights: 2 weights for 4 sources; give one for each" in said and not out.exists()
    assert pretrain(out, parts, "--max_steps=2", "--source_weights", "1", "0", "0", "3") == 0
    run = PretrainConfig(
        corpus=paths(parts), max_steps=1, max_seq_length=48, objective="none", source_weights=["1", "0", "0", "3"]
    )
    text = prepare(run)
    (phase,) = make_phases(run, text, 1)
    taken = np.zeros(PARTS)
    ends = text.tokens.first_tokens(np.append(0, text.source_ends))
    for epoch in range(4):
        pairs = np.concatenate([phase.pairs.window(epoch, number) for number in range(phase.pairs.windows(epoch))])
        lengths = pairs["a_end"] - pairs["a_start"]
        sources = np.searchsorted(ends, pairs["a_start"], side="right") - 1
        taken += np.bincount(sources, lengths, minlength=PARTS)
    assert taken[1] == taken[2] == 0 and taken[3] / taken[0] == pytest.approx(3, rel=0.1)


# ---------------------------------------------------------------------------------------------------------------------
# Runs that go on


def test_a_run_on_parts_that_goes_on_ends_with_the_same_bytes(parts, tmp_path):
    options = ["--max_steps=6", "--save_steps=3"]
    assert pretrain(tmp_path / "whole", parts, *options) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for name in ("checkpoint-6", "model.safetensors"):
        path = tmp_path / "stopped" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert pretrain(tmp_path / "stopped", parts, *options, "--resume_from_checkpoint=latest") == 0
    for name in ("model.safetensors", "checkpoint-6/optimizer.safetensors"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_does_not_go_on_with_the_parts_in_another_order(parts, tmp_path, capsys):
    assert pretrain(tmp_path / "out", parts, "--max_steps=4", "--save_steps=2") == 0
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    resume = ["--max_steps=4", "--resume_from_checkpoint=latest"]
    out = f"--output_dir={tmp_path / 'out'}"
    said = refused(capsys, "pretrain", "--corpus", *parts[::-1], out, *OPTIONS, *resume)
    assert "a checkpoint of another run: corpus (fingerprint) was" in said


@pytest.mark.slow
def test_a_killed_run_on_parts_ends_with_the_same_bytes(parts, tmp_path):
    options = [*OPTIONS, "--max_steps=12", "--save_steps=2", "--resume_from_checkpoint=latest"]
    options += ["--dataloader_num_workers=1"]  # as beside a GPU: the worker must find its place again, too

    def start(name, seconds=0.0):
        command = ["pretrain", "--corpus", *paths(parts), f"--output_dir={tmp_path / name}", *options]
        (run,) = processes.launch(command, tmp_path / f"{name}.txt", dawdle=(1, seconds))
        return run

    whole = start("whole")
    whole.join(120)
    assert whole.exitcode == 0, (tmp_path / "whole.txt").read_text()
    for checkpoint in ("checkpoint-4", "checkpoint-8"):  # killed twice, a little after each of these
        killed = start("killed", seconds=0.2)
        end = time.monotonic() + 120
        while not (tmp_path / "killed" / checkpoint).exists():
            assert killed.is_alive() and time.monotonic() < end, (tmp_path / "killed.txt").read_text()
            time.sleep(0.02)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.join()
        assert not (tmp_path / "killed" / "checkpoint-12").exists()
    last = start("killed")
    last.join(120)
    said = (tmp_path / "killed.txt").read_text()
    assert last.exitcode == 0 and "going on from" in said, said
    for name in ("model.safetensors", "checkpoint-12/optimizer.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# ---------------------------------------------------------------------------------------------------------------------
# Parts that do not go together


@pytest.fixture(scope="module")
def other_parts(texts, books, tokenizer, tmp_path_factory):
    """Folders that do not go with the four parts, by name."""
    folder = tmp_path_factory.mktemp("other")
    with_tokenizer = f"--tokenizer={tokenizer}"
    for name, options in {
        "own-tokenizer": ["--vocab_size=300"],
        "cleaned": [with_tokenizer, "--min_paragraph_characters=20"],
        "fraction": [with_tokenizer, "--validation_fraction=0.1"],
    }.items():
        assert main(["prepare", f"--corpus={texts[0]}", f"--output_dir={folder / name}", *options]) == 0
    shutil.copytree(folder / "cleaned", folder / "former")
    write_former_record(folder / "former")
    return folder


def write_former_record(folder):
    """The record of the format that 0.1.0 had before: names as `settled`, one hash for each file, no format."""
    record = {
        "settled": {"validation_fraction": 0.1, "vocab_size": 400, "lowercase": True, "min_paragraph_characters": 20},
        "corpus_name": "my books",
        "fingerprint": "0123456789abcdef",
        "hub_datasets": [],
        "reading": {"paragraphs": 7},
        "tokens": "tokens-0123456789abcdef",
        "counts": {"tokenizer": {}},
        "files": {"vocab.txt": "0" * 64},
    }
    (folder / "prepared.json").write_text(json.dumps(record))


REFUSED = [  # the second folder, then words of the line that refuses it
    ("own-tokenizer", "own-tokenizer: its tokenizer is not that of ", "prepare it again with --tokenizer "),
    ("cleaned", "cleaned: was prepared with min_paragraph_characters 20, and ", " with 0; prepare both alike"),
    ("fraction", "fraction: was prepared with validation_fraction 0.1, and ", " with 0.05; prepare both alike"),
]


@pytest.mark.parametrize("row", REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_part_that_does_not_fit_is_refused_by_name(row, parts, other_parts, tmp_path, capsys):
    name, *words = row
    corpus = ["--corpus", parts[1], other_parts / name]
    said = refused(capsys, "pretrain", *corpus, f"--output_dir={tmp_path / 'out'}", *OPTIONS, "--max_steps=1")
    assert f"corpus {other_parts / name}: " in said
    for word in words:
        assert word in said
    assert os.listdir(tmp_path) == []


def test_parts_given_twice_or_beside_plain_text_are_refused(parts, texts, tmp_path, capsys):
    beside = [f"--output_dir={tmp_path / 'out'}", *OPTIONS, "--max_steps=1"]
    said = refused(capsys, "pretrain", "--corpus", parts[0], parts[1], parts[0], *beside)
    assert f"corpus {parts[0]}: holds the same tokens as {parts[0]}; give each part once" in said
    copy = tmp_path / "copy"
    shutil.copytree(parts[0], copy)
    said = refused(capsys, "pretrain", "--corpus", parts[0], copy, *beside)
    assert f"corpus {copy}: holds the same tokens as {parts[0]}; give each part once" in said
    shutil.rmtree(copy)
    for more in ([texts[0]], ["--dataset", "some/set"]):
        said = refused(capsys, "pretrain", "--corpus", parts[0], *more, *beside, "--vocab_size=400")
        assert f"{parts[0]}: a prepared folder, not text" in said
    assert os.listdir(tmp_path) == []


def test_options_that_parts_fix_are_refused(parts, tmp_path, capsys):
    for option in ("--vocab_size=300", "--language=de", "--max_documents=3"):
        beside = [f"--output_dir={tmp_path / 'out'}", *OPTIONS, "--max_steps=1", option]
        name = option.partition("=")[0][2:]
        said = refused(capsys, "pretrain", "--corpus", *parts, *beside)
        assert f"{name} is fixed by the prepared folder {parts[0]}; leave {name} out" in said
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------------------
# Damage


def flip_a_byte(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    status = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def check(capsys, *folders):
    """Exit code, lines of stdout, last line of stderr."""
    capsys.readouterr()
    code = main(["prepare", "--check", *paths(folders)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out.splitlines(), captured.err.strip()


def test_check_reads_every_byte_of_whole_folders(parts, capsys):
    code, lines, said = check(capsys, *parts)
    assert (code, said, len(lines)) == (0, "", PARTS)
    for part, line in zip(parts, lines, strict=True):
        assert line.startswith(f"{part}: whole; 24 documents, ")


def test_check_finds_a_changed_byte_in_any_file(parts, tmp_path, capsys):
    names = [path.relative_to(parts[0]).as_posix() for path in parts[0].rglob("*") if path.is_file()]
    assert "tokens/ids.npy" in names and len(names) >= 12
    for name in names:
        folder = tmp_path / "part"
        shutil.copytree(parts[0], folder)
        flip_a_byte(folder / name)
        code, lines, said = check(capsys, parts[1], folder)
        assert code == 2 and len(lines) == 1
        assert said.startswith(f"d2l-bert prepare: error: corpus {folder}: a damaged prepared folder (")
        assert (name in said or name == "prepared.json") and said.endswith("prepare the text again")
        shutil.rmtree(folder)


def test_a_file_that_is_cut_short_or_missing_is_refused_at_the_start_of_a_run(parts, tmp_path, capsys):
    names = [path.relative_to(parts[0]).as_posix() for path in (parts[0] / "tokens").iterdir()]
    for name in [*names, "held_out_documents.npy", "text_hashes.npy"]:
        folder = tmp_path / "part"
        shutil.copytree(parts[0], folder)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1])
        run = ["pretrain", "--corpus", parts[1], folder, f"--output_dir={tmp_path / 'out'}", *OPTIONS, "--max_steps=1"]
        said = refused(capsys, *run)
        size = f"{name} has {len(content) - 1:,} bytes, and {len(content):,} were written"
        assert f"corpus {folder}: a damaged prepared folder ({size}); prepare the text again" in said
        (folder / name).unlink()
        said = refused(capsys, *run)
        assert f"corpus {folder}: a damaged prepared folder (" in said and name in said
        shutil.rmtree(folder)
    assert os.listdir(tmp_path) == []


def test_a_part_of_a_format_to_come_is_refused(parts, tmp_path, capsys):
    shutil.copytree(parts[0], tmp_path / "part")
    record = read_json(tmp_path / "part" / "prepared.json")
    record["format"] = PREPARED_FORMAT + 1
    (tmp_path / "part" / "prepared.json").write_text(json.dumps(record))
    code, _, said = check(capsys, tmp_path / "part")
    assert code == 2 and f"format is {PREPARED_FORMAT + 1}, and this version reads {PREPARED_FORMAT}" in said


def test_check_refuses_folders_that_are_none_and_options_beside_it(parts, texts, tmp_path, capsys):
    for folder in (texts[0], tmp_path / "nowhere", texts[0] / "book-00.txt"):
        code, lines, said = check(capsys, parts[0], folder)
        assert code == 2 and len(lines) == 1
        assert f"{folder}: no prepared folder (no prepared.json); give one that `d2l-bert prepare` has made" in said
    for option in (f"--corpus={texts[0]}", "--vocab_size=300", f"--output_dir={tmp_path / 'out'}", "--streaming"):
        name = option.partition("=")[0][2:]
        said = refused(capsys, "prepare", option, "--check", parts[0])
        assert f"{name} is for preparing a text, and check reads folders that are prepared; leave it out" in said
    assert "output_dir is missing: give --output_dir DIR" in refused(capsys, "prepare", f"--corpus={texts[0]}")
    assert os.listdir(tmp_path) == []


def test_nothing_is_written_into_a_prepared_folder(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    folders = [tmp_path / "parts" / part.name for part in parts[:2]]
    for part, folder in zip(parts, folders, strict=False):
        shutil.copytree(part, folder)
    entries = [*folders, *(path for folder in folders for path in folder.rglob("*"))]
    for path in entries:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.stat().st_size) for path in entries}
    try:
        assert pretrain(tmp_path / "out", folders, "--max_steps=2", "--save_steps=1") == 0
        shutil.rmtree(tmp_path / "out" / "checkpoint-2")
        assert pretrain(tmp_path / "out", folders, "--max_steps=2", "--resume_from_checkpoint=latest") == 0
        assert main(["prepare", "--check", *paths(folders)]) == 0
        after = [*folders, *(path for folder in folders for path in folder.rglob("*"))]
        assert {p: (p.stat().st_mtime_ns, p.stat().st_ctime_ns, p.stat().st_size) for p in after} == before
        assert not (tmp_path / "home" / "d2l_bert").exists()  # nor is anything of it copied into the cache
    finally:
        for path in entries:
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
