"""Interrupted runs: damaged checkpoints, signals in this process, errors, a full disk."""

import itertools
import shutil
import signal

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
