"""Outputs are whole or not there: one process writes one at a time, and what stands in the way is said at once."""

import errno
import json
import os
import re
import subprocess
import sys
import threading

import pytest

from d2l_bert import folders
from d2l_bert.messages import UserError, messages_shown, report, writing
from d2l_bert.model_cards import evaluations


LONG = "n" * 150


@pytest.mark.parametrize("name", ["out", LONG, "é" * 100, "\udcff" * 120], ids=["short", "long", "accents", "bytes"])
@pytest.mark.parametrize("new", [folders.new_folder, folders.new_file])
def test_the_second_writer_of_an_output_is_refused_before_any_work(tmp_path, new, name):
    output = tmp_path / name
    with new(output) as partial:
        with pytest.raises(UserError, match="another process is writing"), new(output):
            pytest.fail("the second one works, too")
        partial.joinpath("a").touch() if partial.is_dir() else partial.touch()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(UserError, match="exists already"), new(output):
        pytest.fail("it is replaced")


def test_a_writer_that_waited_for_the_lock_does_not_replace_what_was_written_meanwhile(tmp_path, monkeypatch):
    """The output is made after the first look, and before the lock."""
    locked = folders.locked

    def late(*arguments):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "of another").touch()
        return locked(*arguments)

    monkeypatch.setattr(folders, "locked", late)
    with pytest.raises(UserError, match="exists already"), folders.new_folder(tmp_path / "out"):
        pytest.fail("it works")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["of another"]


def test_names_that_begin_alike_are_written_at_once_into_folders_of_their_own(tmp_path):
    names = [f"{'n' * 210}-{number}" for number in range(3)]
    with (
        folders.new_folder(tmp_path / names[0]) as one,
        folders.new_folder(tmp_path / names[1]) as two,
        folders.new_file(tmp_path / names[2]) as three,
    ):
        for text, file in zip(names, (one / "name", two / "name", three), strict=True):
            file.write_text(text)
    assert [(tmp_path / name / "name").read_text() for name in names[:2]] == names[:2]
    assert (tmp_path / names[2]).read_text() == names[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["out", LONG])
def test_what_a_killed_process_left_is_deleted_by_the_next_one(tmp_path, name):
    code = "import os, sys; from pathlib import Path; from d2l_bert import folders\n"
    code += "with folders.new_folder(Path(sys.argv[1])) as partial: (partial / 'half').touch(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, tmp_path / name]).returncode == 9
    assert len(list(tmp_path.iterdir())) == 2  # its hidden folder, and its lock, which is free
    with folders.new_folder(tmp_path / name) as partial:
        (partial / "whole").touch()
    assert [path.name for path in tmp_path.rglob("*")] == [name, "whole"]


@pytest.mark.slow
def test_a_small_file_that_two_write_at_nearly_the_same_time_is_written_twice(tmp_path):
    in_block = threading.Event()
    done = []

    def write():
        in_block.wait()
        folders.write_json(tmp_path / "record.json", {"by": "second"})
        done.append(True)

    second = threading.Thread(target=write)
    second.start()
    with folders.atomic_file(tmp_path / "record.json") as partial:
        in_block.set()
        second.join(0.3)
        assert not done
        partial.write_text("{}")
    second.join()
    assert json.loads((tmp_path / "record.json").read_text()) == {"by": "second"}
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.slow
def test_figures_that_two_processes_add_to_one_folder_are_all_kept(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A card\n")

    def add(text):
        evaluations.update_folder(tmp_path, text, {"mlm_loss": 1.0, "pairs": 3}, None)

    threads = [threading.Thread(target=add, args=(f"text {number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert {name.split("/")[1] for name in metrics} == {f"text {number}" for number in range(6)}
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "metrics.json"}


def failing(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def test_an_empty_folder_that_cannot_be_replaced_is_found_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(type(tmp_path), "rmdir", failing(errno.EBUSY))  # as of a mount point
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="name a folder in it"), folders.new_folder(tmp_path / "out"):
        pytest.fail("it works")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_working_folder_is_not_replaced_under_the_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="working folder.* name a folder in it"), folders.new_folder(tmp_path):
        pytest.fail("it works")


def test_an_empty_folder_stays_with_its_rights_when_the_work_fails(tmp_path):
    (tmp_path / "out").mkdir(mode=0o700)
    with pytest.raises(RuntimeError), folders.new_folder(tmp_path / "out"):
        raise RuntimeError
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    assert not any((tmp_path / "out").iterdir())


def test_an_empty_folder_is_removed_before_the_rename_on_windows(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    rename = type(tmp_path).rename

    def rename_to_no_name_that_exists(path, target):
        assert not target.exists()
        return rename(path, target)

    with folders.new_folder(tmp_path / "out") as partial:
        (partial / "a").touch()
        monkeypatch.setattr(type(tmp_path), "rename", rename_to_no_name_that_exists)
        monkeypatch.setattr(folders, "IS_WINDOWS", True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


def test_a_lock_file_that_is_busy_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(type(tmp_path), "unlink", failing(errno.EBUSY))  # as on a network's disk
    with folders.locked(tmp_path / "lock", "in use"):
        pass
    with folders.locked(tmp_path / "lock", "in use"):
        pass


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("9600 requested and 5088 written"), "free some space"),  # NumPy's, of a full disk
        (OSError(errno.EBUSY, "busy"), "try again"),
        (OSError(errno.EROFS, "read-only"), "make it writable, or go"),
        (OSError(errno.EACCES, "denied", "/cache/hub/x"), "/cache/hub/x: cannot be used"),
        (OSError(errno.EACCES, "denied", "/a/.out.part/x"), "/a/out: cannot be written"),
        (OSError(errno.EACCES, "denied", "/a"), "/a/out: cannot be written"),
    ],
)
def test_a_write_that_fails_names_the_true_cause_and_the_true_place(error, words):
    with pytest.raises(UserError) as refusal, writing(folders.Path("/a/out"), ", or go"):
        raise error
    assert words in str(refusal.value)


def test_a_report_that_nobody_reads_fails_after_the_work(monkeypatch, capsys):
    done = []
    with pytest.raises(BrokenPipeError), messages_shown():
        monkeypatch.setattr(sys.stdout, "write", failing(errno.EPIPE))
        report.info("figures")
        done.append("published")
    assert done and capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["file", "file/out", "file/a/out", "to_file/out", "nowhere/out", "loop/out"])
def test_what_stands_in_the_way_of_a_folder_is_named(tmp_path, name):
    (tmp_path / "file").touch()
    for link, target in (("to_file", "file"), ("nowhere", "gone"), ("loop", "loop")):
        (tmp_path / link).symlink_to(target)
    writers = [folders.locked_folder, lambda path: folders.atomic_folder(path, "")]
    for writer in writers if "/" in name else writers[:1]:
        with pytest.raises(UserError) as error, writer(tmp_path / name):
            pytest.fail("it works")
        cause = re.search(r"\((.*)\)", str(error.value))[1]
        assert str(tmp_path / name.partition("/")[0]) in cause
        assert "in the way" in str(error.value) and "make it writable" not in str(error.value)


def test_a_folder_in_place_of_a_lock_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()
    with (
        pytest.raises(UserError, match=r"\.lock\); take out what is in the way"),
        folders.locked_folder(tmp_path),
    ):
        pytest.fail("it works")


def test_an_output_that_is_a_link_to_itself_is_one_line(tmp_path, books, fails):
    (tmp_path / "loop").symlink_to("loop")
    for place in ("loop", "loop/out"):
        said = fails("pretrain", f"--corpus={books}", f"--output_dir={tmp_path / place}")
        assert "in the way" in said and f"{tmp_path / 'loop'}" in said
