"""Prepared folders of strangers: whatever stands in them, they are read as written, or refused in one line."""

import copy
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from d2l_bert.__main__ import main
from d2l_bert.folders import short_hash
from d2l_bert.messages import UserError
from d2l_bert.tokenization.prepared_folder import check_prepared_folders, read_prepared_folders
from d2l_bert.tokenization.token_store import ARRAYS


@pytest.fixture(scope="module")
def prepared(books, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    assert main(["prepare", f"--corpus={books}", f"--output_dir={folder}", "--vocab_size=300"]) == 0
    return folder


@pytest.fixture
def tokens(prepared, tmp_path):
    """A copy of a prepared folder, to tamper with."""
    return Path(shutil.copytree(prepared, tmp_path / "tokens"))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sign(folder, record):
    """Compute the hashes of all files anew, as an attacker can; those of missing files stay."""
    for store in ("train", "held_out"):
        file = folder / store / "store.json"
        content = json.loads(file.read_text())
        if isinstance(content, dict) and "fingerprint" in content:
            hashes = [sha256(folder / store / f"{name}.bin") for name in ARRAYS]
            content["fingerprint"] = short_hash({k: v for k, v in content.items() if k != "fingerprint"}, hashes)
            file.write_text(json.dumps(content))
    files = record.get("files")
    for name, entry in files.items() if isinstance(files, dict) else ():
        if isinstance(entry, dict) and (folder / name).is_file():
            entry.update(bytes=(folder / name).stat().st_size, sha256=sha256(folder / name))
    counts = record.get("counts")
    if isinstance(counts, dict) and "corpus_fingerprint" in counts:
        prints = [json.loads((folder / s / "store.json").read_text()) for s in ("train", "held_out")]
        prints = [one.get("fingerprint") if isinstance(one, dict) else None for one in prints]
        counts.update(corpus_fingerprint=short_hash(*prints), held_out_fingerprint=prints[1])
    record["fingerprint_of_record"] = short_hash({k: v for k, v in record.items() if k != "fingerprint_of_record"})
    (folder / "prepared.json").write_text(json.dumps(record))


def record_of(folder):
    return json.loads((folder / "prepared.json").read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Single stories


def change_store(tokens, change):
    content = json.loads((tokens / "train" / "store.json").read_text())
    change(content)
    (tokens / "train" / "store.json").write_text(json.dumps(content))
    sign(tokens, record_of(tokens))


@pytest.mark.parametrize("kind", ["O", "|O", "<i8", "<f8", ">u2", "V2", "<U1", ["<u2"], None, "<u2,<u2"])
def test_bytes_are_read_as_the_numbers_that_are_written_and_as_nothing_else(tokens, kind, fails):
    """The type `O` would take the bytes for addresses of objects."""
    change_store(tokens, lambda content: content["types"].update(ids=kind))
    assert "types.ids" in fails("prepare", "--check", tokens)
    assert "types.ids" in fails("pretrain", "--corpus", tokens, "--output_dir", tokens.parent / "out", "--dry_run")


def set_numbers(name, place, value):
    def change(tokens):
        kind = "<u2" if name == "ids" else "<i8"
        numbers = np.memmap(tokens / "train" / f"{name}.bin", kind, "r+")
        numbers[place] = value
        numbers.flush()

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_numbers("ids", 3, 65535), "vocabulary"),
        (set_numbers("sentence_starts", 3, 2**62), "ascend"),
        (set_numbers("sentence_starts", 3, -5), "ascend"),
        (set_numbers("sentence_starts", -1, 7), "number of tokens"),
        (set_numbers("document_starts", 2, 2**63 - 1), "ascend"),
        (set_numbers("document_starts", -1, 2**40), "number of sentences"),
        (set_numbers("words_before", 2, 2**50), "descends"),
        (set_numbers("words_before", -1, 2**62), "too many for its characters"),
    ],
)
def test_numbers_that_point_nowhere_are_refused_although_the_hashes_fit(tokens, change, said, fails):
    change(tokens)
    sign(tokens, record_of(tokens))
    assert said in fails("prepare", "--check", tokens)
    assert said in fails("pretrain", "--corpus", tokens, "--output_dir", tokens.parent / "out", "--dry_run")


@pytest.mark.parametrize("ends", [[10**30], [-1, 10**6], [5, 3], ["3"], [], [True]])
def test_sources_that_do_not_end_with_the_documents_are_refused(tokens, ends, fails):
    change_store(tokens, lambda content: content.update(source_ends=ends))
    assert "source_ends" in fails("prepare", "--check", tokens)


@pytest.mark.parametrize("name", ["/dev/zero", "../secret", "train/../../secret", "a\nb", ""])
def test_a_record_names_files_of_its_folder_alone(tokens, name, fails):
    (tokens.parent / "secret").write_text("s")
    record = record_of(tokens)
    record["files"][name] = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    sign(tokens, record)
    assert "tokens" in fails("prepare", "--check", tokens)


def test_links_pipes_and_devices_in_a_prepared_folder_are_refused_at_once(tokens, fails):
    """Also of a file that the record does not list, and that Transformers would read."""
    (tokens.parent / "config.json").write_text("{}")
    (tokens / "config.json").symlink_to("../config.json")
    assert "leads out" in fails("prepare", "--check", tokens)
    (tokens / "config.json").unlink()
    os.mkfifo(tokens / "special_tokens_map.json")
    assert "no regular file" in fails("prepare", "--check", tokens)
    (tokens / "special_tokens_map.json").unlink()
    (tokens / "train" / "ids.bin").unlink()
    os.mkfifo(tokens / "train" / "ids.bin")
    assert "no regular file" in fails("prepare", "--check", tokens)


def test_a_file_that_the_record_does_not_list_is_not_read_unchecked(tokens, fails):
    record = record_of(tokens)
    del record["files"]["train/ids.bin"]
    sign(tokens, record)
    assert "does not list train/ids.bin" in fails("pretrain", "--corpus", tokens, "--dry_run")


@pytest.mark.parametrize(("part", "whole"), [("unknown_characters", "characters"), ("merged_types", "word_types")])
def test_a_part_of_a_text_that_is_more_than_the_text_is_refused(tokens, part, whole, fails):
    record = record_of(tokens)
    account = record["counts"]["account"]
    account[part] = account[whole] + 1
    sign(tokens, record)
    assert part in fails("prepare", "--check", tokens)
    assert part in fails("pretrain", "--corpus", tokens, "--max_unknown_share=1", "--dry_run")


@pytest.mark.parametrize("name", ["a" * 201, "one\ntwo"])
def test_the_name_of_a_corpus_is_short_and_a_line(name, tokens, fails):
    record = record_of(tokens)
    record["counts"]["corpus_name"] = name
    sign(tokens, record)
    assert "corpus_name" in fails("prepare", "--check", tokens)


def test_words_are_cut_as_this_version_can(tokens, fails):
    record = record_of(tokens)
    record["token_options"]["pre_tokenizer"] = "kmers:999999"
    sign(tokens, record)
    assert "kmers:999999" in fails("pretrain", "--corpus", tokens, "--dry_run")


def test_held_out_documents_that_stand_in_the_training_text_are_no_test(tokens, fails):
    shutil.rmtree(tokens / "held_out")
    shutil.copytree(tokens / "train", tokens / "held_out")
    sign(tokens, record_of(tokens))
    assert "stands in train" in fails("prepare", "--check", tokens)
    assert "stands in train" in fails("pretrain", "--corpus", tokens, "--dry_run")


def test_a_folder_of_a_newer_version_says_so(tokens, fails):
    (tokens / "prepared.json").write_text(json.dumps({"format": 99, "all": "other"}))
    assert "newer version" in fails("prepare", "--check", tokens)
    assert "newer version" in fails("pretrain", "--corpus", tokens, "--dry_run")


def test_an_id_beyond_the_vocabulary_in_a_large_folder_is_one_line_while_it_is_trained_on(tokens, monkeypatch, fails):
    """Of a large store only the first ids are checked when it is opened."""
    monkeypatch.setattr("d2l_bert.tokenization.token_store.CHECKED_IDS", 0)
    set_numbers("ids", slice(0, None, 2), 60_000)(tokens)
    sign(tokens, record_of(tokens))
    small = ["--num_hidden_layers=1", "--hidden_size=16", "--num_attention_heads=1", "--intermediate_size=16"]
    run = ["pretrain", "--corpus", tokens, "--output_dir", tokens.parent / "out", "--max_steps=2", *small]
    for workers in (0, 1):
        assert "not in the vocabulary" in fails(*run, f"--dataloader_num_workers={workers}")


# ---------------------------------------------------------------------------------------------------------------------
# Anything


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


VALUES = [
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**30, -(10**30), 1.5, 1e300, 1e400, float("nan"), "", "x", "O"),
    *("../x", "/dev/zero", "\0", "\ud800", "x" * 300, "BertTokenizer", "<i8", [], {}, [[]], [1], ["x"], {"a": 1}),
    *([True], [-1], [None], {"": None}, {"../x": {"bytes": 1, "sha256": ""}}, nested(200)),
]


def places(value, path=()):
    """The paths of all entries of a JSON value, of long lists the first three."""
    entries = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for name, entry in entries:
        yield (*path, name)
        yield from places(entry, (*path, name))


def change_json(content, rng):
    """The value with one to three entries replaced, deleted or added."""
    content = copy.deepcopy(content)
    for _ in range(rng.choice([1, 1, 2, 3])):
        found = list(places(content))
        if not found:
            break
        *path, last = rng.choice(found)
        holder = content
        for name in path:
            holder = holder[name]
        kind = rng.random()
        if kind < 0.2:
            del holder[last]
        elif kind < 0.3 and isinstance(holder, dict):
            holder[rng.choice(["more", "", "\ud800", "format", "auto_map", "../x"])] = rng.choice(VALUES)
        else:
            holder[last] = copy.deepcopy(rng.choice(VALUES))
    return content


def change_bytes(path, rng):
    """Cut, extend or change a file of numbers, or a text."""
    content = bytearray(path.read_bytes())
    kind = rng.randrange(6)
    if kind == 0:
        content = content[: rng.randrange(len(content) + 1)]
    elif kind == 1:
        content += rng.randbytes(rng.choice([1, 2, 8, 64]))
    elif kind == 2 and content:
        for _ in range(rng.choice([1, 8])):
            content[rng.randrange(len(content))] = rng.randrange(256)
    elif kind == 3:
        place = 8 * rng.randrange(max(1, len(content) // 8))
        number = rng.choice([-1, 0, 2**62, -(2**63), 2**63 - 1])
        content[place : place + 8] = np.array(number, "<i8").tobytes()
    elif kind == 4:
        content = bytearray(rng.randbytes(len(content)))
    else:
        content = bytearray((b"[" * 10_000 + b"]" * 10_000) if path.suffix == ".json" else b"")
    path.write_bytes(content)


def tamper(folder, rng):
    """Change something in a prepared folder, and mostly compute the hashes anew."""
    record = record_of(folder)
    kind = rng.random()
    if kind < 0.35:
        record = change_json(record, rng)
    elif kind < 0.6:
        file = folder / rng.choice(
            ["train/store.json", "held_out/store.json", "tokenizer_config.json", "tokenizer.json"]
        )
        file.write_text(json.dumps(change_json(json.loads(file.read_text()), rng)))
    elif kind < 0.95:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        change_bytes(rng.choice([path for path in files if path.name != "prepared.json"]), rng)
    else:
        change_bytes(folder / "prepared.json", rng)
        return
    try:
        sign(folder, record)
    except (ValueError, TypeError, RecursionError, AttributeError, KeyError):  # there is nothing left to sign
        (folder / "prepared.json").write_text(json.dumps(record))


def is_refused(read, folder):
    """Whether a prepared folder is refused; any exception but `UserError` fails the test."""
    try:
        read([folder])
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whatever_stands_in_a_prepared_folder_it_is_read_or_refused_in_one_line(seed, prepared, tmp_path):
    rng = random.Random(seed)
    refused = 0
    for number in range(40):
        folder = Path(shutil.copytree(prepared, tmp_path / str(number)))
        tamper(folder, rng)
        checked = is_refused(check_prepared_folders, folder)
        assert checked or not is_refused(read_prepared_folders, folder)  # what is whole can be read
        refused += checked
        shutil.rmtree(folder)
    assert refused > 25
