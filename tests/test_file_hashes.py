"""Hashes of files are remembered: what has not changed is not read again, and every change is seen."""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from d2l_bert.errors import UserError
from d2l_bert.tokenization import file_hashes
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.file_hashes import UNSETTLED_SECONDS, content_hashes
from d2l_bert.tokenization.prepare import prepare


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def opened(monkeypatch):
    """The names of the files that are opened to be hashed, in order."""
    names, whole = [], file_hashes.content_hash
    monkeypatch.setattr(file_hashes, "content_hash", lambda file: (names.append(Path(file).name), whole(file))[1])
    return names


@pytest.fixture
def files(tmp_path):
    """Three files that are older than what is still unsettled."""
    (tmp_path / "text").mkdir()
    paths = [tmp_path / "text" / name for name in ("a.txt", "b.txt", "c.txt")]
    for path in paths:
        path.write_text(f"The text of {path.name}.")
    return paths


@pytest.fixture
def later(monkeypatch):
    """Let the clock go on, so that the files count as settled."""
    now = time.time_ns

    def go_on(seconds=UNSETTLED_SECONDS + 1):
        monkeypatch.setattr("d2l_bert.tokenization.file_hashes.time.time_ns", lambda: now() + int(seconds * 10**9))

    return go_on


def digests(files):
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def record(home):
    (path,) = (home / "d2l_bert" / "hashes").iterdir()
    return path


def test_a_file_that_has_not_changed_is_not_opened_again(files, opened, later):
    later()
    assert content_hashes(files, "text") == digests(files)
    assert opened == ["a.txt", "b.txt", "c.txt"]
    opened.clear()
    later()
    assert content_hashes(files, "text") == digests(files)
    assert content_hashes(files[::-2], "text") == digests(files[::-2])
    assert opened == []


def test_other_files_of_the_same_record_are_hashed_once(files, opened, later):
    later()
    content_hashes(files[:2], "text")
    content_hashes(files, "text")
    content_hashes(files, "text")
    assert opened == ["a.txt", "b.txt", "c.txt"]
    content_hashes(files, "another text")  # has a record of its own
    assert opened == ["a.txt", "b.txt", "c.txt"] * 2


def change_size(file):
    file.write_text("More text than before stands here.")


def touch(file):
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def change_content_and_put_the_time_back(file):
    status, text = file.stat(), file.read_bytes()
    file.write_bytes(text[::-1])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def put_another_file_in_its_place(file):
    status, other = file.stat(), file.with_suffix(".new")
    other.write_bytes(file.read_bytes()[::-1])
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(file)


@pytest.mark.parametrize(
    "change", [change_size, touch, change_content_and_put_the_time_back, put_another_file_in_its_place]
)
def test_a_change_is_seen(change, files, opened, later):
    later()
    before = content_hashes(files, "text")
    opened.clear()
    time.sleep(0.02)  # some kernels advance the times of files every 10 milliseconds
    change(files[1])
    assert content_hashes(files, "text") == digests(files)
    assert opened == ["b.txt"]
    assert (digests(files) == before) == (change is touch)


def test_a_file_that_changed_just_now_is_not_remembered(files, opened, later):
    """Within its last two seconds it may change again without another time of change."""
    for seconds in (0, UNSETTLED_SECONDS - 1):
        later(seconds)
        assert content_hashes(files, "text") == digests(files)
    assert opened == ["a.txt", "b.txt", "c.txt"] * 2
    later(UNSETTLED_SECONDS + 1)
    for _ in range(2):
        content_hashes(files, "text")
    assert opened == ["a.txt", "b.txt", "c.txt"] * 3


def test_a_file_counts_as_settled_by_the_time_at_which_it_was_looked_at(files, opened, later, monkeypatch):
    """Hashing large files takes longer than two seconds, in which a file that was new may have changed."""
    whole = file_hashes.content_hash
    monkeypatch.setattr(file_hashes, "content_hash", lambda file: (later(60), whole(file))[1])
    content_hashes(files, "text")
    later(0)
    content_hashes(files, "text")
    assert opened == ["a.txt", "b.txt", "c.txt"] * 2


def test_a_file_from_the_future_is_not_remembered(files, opened, later):
    later()
    os.utime(files[0], (time.time() + 1000,) * 2)
    content_hashes(files, "text")
    content_hashes(files, "text")
    assert opened == ["a.txt", "b.txt", "c.txt", "a.txt"]


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "7", '{"a": 5}', '{"PATH": [1, 2]}', '{"PATH": ["x", "y", "z", "0"]}', "\0", '"\\ud800"'],
)
def test_a_damaged_record_means_that_files_are_hashed_again(damage, files, opened, later, home):
    later()
    content_hashes(files, "text")
    opened.clear()
    record(home).write_text(damage.replace("PATH", os.path.realpath(files[0])))
    assert content_hashes(files, "text") == digests(files)
    assert opened == ["a.txt", "b.txt", "c.txt"]
    assert len(json.loads(record(home).read_text())) == 3  # the record is whole again


def test_a_record_that_cannot_be_written_or_read_means_that_files_are_hashed(files, opened, later, home):
    later()
    (home / "d2l_bert").mkdir(parents=True)
    (home / "d2l_bert" / "hashes").write_text("a file where the folder of the records would be")
    for _ in range(2):
        assert content_hashes(files, "text") == digests(files)
    assert opened == ["a.txt", "b.txt", "c.txt"] * 2


def test_a_file_that_cannot_be_read_is_refused_by_name(files, later):
    later()
    files[1].unlink()
    with pytest.raises(UserError, match=r"b\.txt: cannot be read \(No such file or directory\)"):
        content_hashes(files, "text")


def test_a_prepared_text_is_found_again_without_opening_its_files(books, opened, later, home):
    later()
    run = TextConfig(corpus=[str(books)], vocab_size=300)
    first = prepare(run).tokens.fingerprint()
    assert sorted(opened) == sorted(path.name for path in books.iterdir())
    opened.clear()
    assert prepare(run).tokens.fingerprint() == first and opened == []
