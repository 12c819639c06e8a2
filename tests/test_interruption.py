"""Interrupted runs: damaged checkpoints, signals in this process, errors, a full disk."""

import itertools
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from interrupted_runs import RESUME, SHORT, contents, error_line, rows, weights

from d2l_bert.cli import main
from d2l_bert.training.interruption import StopSignals


FILES = (
    "config.json",
    "configuration_d2l_bert.py",
    "manifest.json",
    "model.safetensors",
    "modeling_d2l_bert.py",
    "optimizer.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training_state.json",
    "vocab.txt",
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def short(command, tmp_path_factory):
    """The folder of an uninterrupted run of 6 steps, with checkpoints at steps 3 and 6."""
    folder = tmp_path_factory.mktemp("short") / "model"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tests that compare with this run use one thread, too
    assert main(command(folder, *SHORT)) == 0
    torch.set_num_threads(threads)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Damaged checkpoints


def damages(whole):
    """The contents that a damaged file may have; None: the file is missing."""
    yield from (whole[: len(whole) // 2], b"", whole[:-1], None)
    for place in (0, len(whole) // 2, len(whole) - 1):
        yield flipped(whole, place)


def flipped(whole, place):
    return whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


def write(path, content):
    path.unlink() if content is None else path.write_bytes(content)


def test_the_files_of_a_checkpoint_are_those_that_the_tests_damage(short):
    for step in (3, 6):
        assert sorted(path.name for path in (short / f"checkpoint-{step}").iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_any_damage_to_a_checkpoint_is_noticed_and_the_one_before_is_taken(command, short, tmp_path, capsys, name):
    """Resume a run with another learning rate.

    That run is refused as soon as it has chosen a checkpoint, and the error names the chosen checkpoint.
    """
    stopped = tmp_path / "stopped"
    shutil.copytree(short, stopped)
    path = stopped / "checkpoint-6" / name
    other_run = command(stopped, *SHORT, "--learning_rate=0.5")
    whole = path.read_bytes()
    for damage in damages(whole):
        if name == "manifest.json" and damage == whole[:-1]:
            continue  # the end of its last line says nothing
        write(path, damage)
        capsys.readouterr()
        assert main([*other_run, RESUME]) == 2
        said = capsys.readouterr().err.splitlines()
        passed_over = [line for line in said if line.endswith("trying the checkpoint before")]
        assert len(passed_over) == 1 and f"{path.parent}: damaged (" in passed_over[0]
        assert name in passed_over[0] or name == "manifest.json"  # a damaged manifest may name another file
        assert f"error: {stopped / 'checkpoint-3'}: a checkpoint of another run" in said[-1]
        assert main([*other_run, f"--resume_from_checkpoint={path.parent}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"error: {path.parent}: damaged (" in line
        path.write_bytes(whole)
    assert main([*other_run, RESUME]) == 2 and f"{path.parent}: a checkpoint of another" in error_line(capsys)


@pytest.mark.parametrize("name", FILES)
def test_resuming_before_a_damaged_checkpoint_ends_with_the_same_bytes(command, short, tmp_path, name):
    stopped = tmp_path / "stopped"
    shutil.copytree(short, stopped)
    path = stopped / "checkpoint-6" / name
    path.write_bytes(flipped(path.read_bytes(), path.stat().st_size // 3))
    assert main(command(stopped, *SHORT, RESUME)) == 0
    assert weights(stopped) == weights(short)
    assert [row["step"] for row in rows(stopped) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_with_every_checkpoint_damaged_the_run_is_refused_and_no_file_is_changed(command, short, tmp_path, capsys):
    stopped = tmp_path / "stopped"
    shutil.copytree(short, stopped)
    for step in (3, 6):
        (stopped / f"checkpoint-{step}" / "optimizer.safetensors").write_bytes(b"")
    before = contents(stopped / "checkpoint-3")
    assert main(command(stopped, *SHORT, RESUME)) == 2
    said = capsys.readouterr().err
    assert (
        said.count("trying the checkpoint before") == 1
        and "there is no earlier checkpoint: --overwrite_output_dir" in said
    )
    assert contents(stopped / "checkpoint-3") == before and weights(stopped) == weights(short)


# ---------------------------------------------------------------------------------------------------------------------
# Signals in this process, errors


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_stopped_by_a_signal_in_this_process_resumes_to_the_same_weights(
    command, short, monkeypatch, tmp_path, capsys, number, code
):
    """And the run goes on from there as if it had never stopped."""
    before, wanted, asked = signal.getsignal(signal.SIGINT), StopSignals.should_stop, itertools.count(1)

    def told(stop):
        if next(asked) == 3:
            signal.raise_signal(number)
        return wanted(stop)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background commands with SIGINT ignored
    monkeypatch.setattr(StopSignals, "should_stop", told)
    try:
        with pytest.raises(SystemExit) as stopped:
            main(command(tmp_path, *SHORT))
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    (saved,) = tmp_path.glob("checkpoint-*")
    assert stopped.value.code == code and saved.name in capsys.readouterr().err.splitlines()[-1]
    assert saved.name == f"checkpoint-{rows(tmp_path)[-1]['step']}" != "checkpoint-6"
    assert main(command(tmp_path, *SHORT, RESUME)) == 0
    assert weights(tmp_path) == weights(short)


def test_a_run_out_of_memory_names_the_helpful_options(command, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("d2l_bert.training.learner.train_step", fail)
    assert main(command(tmp_path / "model", *SHORT)) == 2
    assert error_line(capsys).endswith("the steps stay the same; go on with --resume_from_checkpoint latest")


@pytest.fixture
def ignored():
    """Make this process ignore SIGINT and SIGTERM, as a shell does for background commands."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_run_whose_caller_ignores_signals_goes_on(command, ignored, short, monkeypatch, tmp_path):
    """A shell without job control makes background commands ignore Ctrl-C."""
    wanted = StopSignals.should_stop

    def told(stop):
        for number in ignored:
            os.kill(os.getpid(), number)
        return wanted(stop)

    monkeypatch.setattr(StopSignals, "should_stop", told)
    assert main(command(tmp_path / "model", *SHORT)) == 0
    assert weights(tmp_path / "model") == weights(short)


# ---------------------------------------------------------------------------------------------------------------------
# A full disk


def stopped_after(step, short, folder):
    """A copy of the short run as its folder was after `step`."""
    shutil.copytree(short, folder)
    for path in folder.iterdir():
        later = path.name.startswith("checkpoint-") and path.name != f"checkpoint-{step}"
        if later or path.name in ("model.safetensors", "metrics.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


def check_save_failed(folder, capsys, before):
    """
    One line names the checkpoint and the way out; the earlier checkpoint is unchanged, and no unfinished one is left.
    """
    line = error_line(capsys)
    assert str(folder / "checkpoint-6") in line and "--resume_from_checkpoint latest" in line
    assert {path.name for path in folder.glob("*checkpoint*")} | {
        path.name for path in folder.glob(".checkpoint*")
    } == {"checkpoint-3"}
    assert contents(folder / "checkpoint-3") == before


# Limits on the size of a file, in bytes: too small for the code, for the weights, for the moments.
@pytest.mark.parametrize("largest", [20_000, 60_000, 120_000])
def test_a_save_that_fails_is_reported_and_harms_no_earlier_checkpoint(command, short, tmp_path, capsys, largest):
    resource = pytest.importorskip("resource")
    folder = stopped_after(3, short, tmp_path / "stopped")
    before, (_, most) = contents(folder / "checkpoint-3"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, most))
    try:
        code = main(command(folder, *SHORT, RESUME))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert code == 2
    check_save_failed(folder, capsys, before)
    assert main(command(folder, *SHORT, RESUME)) == 0
    assert weights(folder) == weights(short)


@pytest.fixture
def small_disk(tmp_path):
    """A mounted disk of 1 MB, and a function that changes its size."""
    place, mount = tmp_path / "disk", shutil.which("mount")
    place.mkdir()

    def sized(size, *how):
        options = ",".join([*how, f"size={size}"])
        return subprocess.run([mount, "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True).returncode

    if sys.platform != "linux" or not mount or os.geteuid() or sized(1_000_000):
        pytest.skip("mounting a small disk takes Linux and its superuser")
    yield place, sized
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_stops_the_run_which_resumes_when_there_is_room(command, short, small_disk, capsys):
    """A checkpoint takes about 300 kB. The disk has room for one and a half."""
    place, resize = small_disk
    size = sum(path.stat().st_size for path in (short / "checkpoint-3").iterdir())
    assert not resize(int(1.5 * size) + 20_000, "remount")
    assert main(command(place / "model", *SHORT)) == 2
    before = contents(place / "model" / "checkpoint-3")
    check_save_failed(place / "model", capsys, before)
    assert before["model.safetensors"] == (short / "checkpoint-3" / "model.safetensors").read_bytes()
    assert not resize(10_000_000, "remount")
    assert main(command(place / "model", *SHORT, RESUME)) == 0
    assert weights(place / "model") == weights(short)


@pytest.mark.slow
def test_a_signal_in_the_middle_of_a_write_to_stderr_is_taken():
    """A handler that writes through Python's buffered stderr would raise: the buffer cannot be entered twice."""
    code = """
import io, os, signal, sys
from types import SimpleNamespace
from d2l_bert.training.interruption import StopSignals

class Raw(io.RawIOBase):
    def writable(self):
        return True
    def write(self, data):  # a signal arrives while Python writes
        if not stop.received_signal:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.getsignal(signal.SIGTERM)
        return len(data)

sys.stderr = io.TextIOWrapper(io.BufferedWriter(Raw()), write_through=True)
with StopSignals(SimpleNamespace(is_main_process=True)) as stop:
    print("progress" * 2000, file=sys.stderr, flush=True)
    assert stop.received_signal == signal.SIGTERM
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "SIGTERM: finishing the step and saving" in done.stderr


def test_a_longer_run_is_offered_from_the_weights_of_the_shorter(command, tmp_path, capsys):
    assert main(command(tmp_path, *SHORT)) == 0
    assert main(command(tmp_path, *SHORT, "--max_steps=99", RESUME)) == 2
    assert f"--init_from {tmp_path / 'checkpoint-'}" in error_line(capsys)
