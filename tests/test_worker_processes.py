"""Processes that prepare text: their errors, their start, their end with the one that started them, their cache."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback

import pytest
import torch
from huggingface_hub import constants
from promises.driving import wait_for

from d2l_bert.folders import atomic_folder
from d2l_bert.messages import UserError, messages_shown
from d2l_bert.tokenization import text_store
from d2l_bert.tokenization.cache import write_once
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.tokenization.processes import in_order


def test_an_exception_in_another_process_is_raised_here():
    """An `OSError` of the function does not say that processes cannot be started."""
    with pytest.raises(FileNotFoundError, match="no/such/file") as caught:
        list(in_order(os.stat, ["/", "/no/such/file"], 2))
    traceback.clear_frames(caught.tb)  # frees the loader: ended by the garbage collector, it waits for seconds


def raise_runtime_error(_):
    raise RuntimeError("an error of the function's own")


def raise_user_error(_):
    raise UserError("a.txt: what is wrong; the way out")


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_of_the_function_is_not_called_a_killed_process_and_keeps_its_traceback(processes):
    with pytest.raises(RuntimeError, match="an error of the function's own") as caught:
        list(in_order(raise_runtime_error, [1, 2], processes))
    assert "raise_runtime_error" in "".join(traceback.format_exception(caught.value))
    traceback.clear_frames(caught.tb)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_line_for_the_user_comes_from_another_process_as_it_is(processes):
    with pytest.raises(UserError) as caught:
        list(in_order(raise_user_error, [1, 2], processes))
    assert str(caught.value) == "a.txt: what is wrong; the way out"
    traceback.clear_frames(caught.tb)


def kill_itself(_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_said_in_one_line():
    with pytest.raises(UserError, match="killed .*lower preprocessing_num_workers") as caught:
        list(in_order(kill_itself, [1, 2], 2))
    traceback.clear_frames(caught.tb)


@pytest.mark.slow
def test_the_items_come_in_order_and_the_run_draws_the_same_random_numbers():
    before = torch.get_rng_state()
    assert list(in_order(slow_when_even, list(range(12)), 2)) == list(range(12))
    assert torch.equal(torch.get_rng_state(), before)


def slow_when_even(number):
    time.sleep(0.05 * (number % 2 == 0))
    return number


def test_processes_that_cannot_be_started_are_said_in_one_line(monkeypatch):
    def refuse(process):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    with pytest.raises(UserError, match="cannot be started .*lower preprocessing_num_workers"):
        list(in_order(int, "12", 2))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_other_processes_end_with_the_one_that_started_them(number):
    code = (
        "import time; from d2l_bert.tokenization.processes import in_order\n"
        # The other processes wait, for work or until a result of a megabyte is taken.
        "for number, _ in enumerate(in_order(bytes, [10**6] * 1000, 2)):\n"
        "    print(number, flush=True); time.sleep(0.5)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["0\n", "1\n"]
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        # The other processes hold stdout open, so this returns when all of them are gone.
        _, errors = process.communicate(timeout=30)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    # After an interrupt some libraries change Python's own exit code, which is that of the signal else.
    assert process.returncode == -number or number == signal.SIGINT
    assert errors.count("Traceback") == errors.count("KeyboardInterrupt") == (number == signal.SIGINT), errors


# ---------------------------------------------------------------------------------------------------------------------
# Writing the cache


def test_a_failed_write_leaves_no_file(tmp_path):
    def write(folder):
        (folder / "half").write_text("a")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_once(tmp_path / "x", write)
    assert [path.name for path in tmp_path.iterdir()] == [".x.lock"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "(No space left on device); free some space, or set HF_HOME to another folder"),
        (errno.EROFS, "(Read-only file system); make it writable, or set HF_HOME to another folder"),
        (errno.EACCES, "(Permission denied); make it writable, or set HF_HOME to another folder"),
    ],
)
def test_a_cache_that_cannot_be_written_names_the_cause_and_the_way_out(tmp_path, number, words):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    with pytest.raises(UserError) as refusal:
        write_once(tmp_path / "x", fail)
    assert str(refusal.value) == f"{tmp_path / 'x'}: cannot be written {words}"


def test_folders_of_the_same_name_below_two_new_parents_are_written_at_once(tmp_path):
    first, second = (tmp_path / parent / "deeper" / "model" for parent in ("one", "two"))
    with atomic_folder(first, "") as one, atomic_folder(second, "") as two:
        for path, text in ((one, "one"), (two, "two")):
            (path / "name.txt").write_text(text)
    assert [(path / "name.txt").read_text() for path in (first, second)] == ["one", "two"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_half_written_files_of_a_killed_process_are_removed_by_the_next_write(tmp_path):
    (tmp_path / ".x.part").mkdir()
    (tmp_path / ".x.part" / "half").touch()
    write_once(tmp_path / "x", lambda folder: (folder / "whole").touch())
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"whole", "written.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"x", ".x.lock"}


# ---------------------------------------------------------------------------------------------------------------------
# Two processes that prepare the same text


def _prepare(books, home, said, seconds):
    """Prepare the books in a process of its own, slowly at will; its messages go to the file `said`."""
    constants.HF_HOME = str(home)
    sys.stderr = said.open("w", buffering=1)
    all_documents = text_store.all_documents

    def slowly(sources):
        for document in all_documents(sources):
            time.sleep(seconds)
            yield document

    text_store.all_documents = slowly
    with messages_shown():
        prepare(TextConfig(corpus=[str(books)], vocab_size=400, preprocessing_num_workers=1))


@pytest.mark.slow
def test_a_waiting_process_continues_when_the_other_is_killed(books, tmp_path):
    context = multiprocessing.get_context("forkserver")
    cache = tmp_path / "home" / "d2l_bert"
    context.set_forkserver_preload(["processes", "d2l_bert.training.pretrain", "matplotlib.figure"])
    said = [tmp_path / "first.txt", tmp_path / "second.txt"]
    first, second = (
        context.Process(target=_prepare, args=(books, tmp_path / "home", file, seconds), daemon=True)
        for file, seconds in zip(said, (60, 0), strict=True)
    )
    first.start()
    wait_for(lambda: any(cache.glob(".text-*.part")), [])
    second.start()
    wait_for(lambda: said[1].exists() and "waiting for another process" in said[1].read_text(), [])
    first.kill()
    second.join(60)
    assert second.exitcode == 0 and said[0].read_text() == ""
    assert "22 documents, 6,112 tokens to train on; 2 documents" in said[1].read_text()
    names = [path.name for path in cache.iterdir() if not path.name.endswith(".lock")]
    assert sorted(name.partition("-")[0] for name in names) == ["text", "tokenizer", "tokens", "tokens"]
