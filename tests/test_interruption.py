"""Runs that are cut short: by damaged files, by signals, by a full disk, by numbers that are none."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import psutil
import pytest
import torch
from conftest import SMALL
from safetensors.torch import load_file

from d2l_bert import D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.errors import UserError
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.interruption import NonFiniteGuard, StopSignals, failures_explained
from d2l_bert.training.meter import StepFigures


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
OPTIONS = ("--mixed_precision=no", "--hidden_dropout_prob=0.1", "--logging_steps=1", "--save_total_limit=9", *SMALL)
SHORT = (*OPTIONS, "--max_steps=6", "--save_steps=3", "--eval_steps=6")
LONG = (*OPTIONS, "--max_steps=40", "--save_steps=10", "--eval_steps=40")
RESUME = "--resume_from_checkpoint=latest"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def command(books):
    """The arguments of a run into a folder."""

    def arguments(folder, *options):
        return ["pretrain", f"--corpus={books}", f"--output_dir={folder}", *options]

    return arguments


@pytest.fixture(scope="module")
def short(command, tmp_path_factory):
    """The folder of a run of 6 steps, checkpoints at 3 and 6, that nothing disturbed."""
    folder = tmp_path_factory.mktemp("short") / "model"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the tests
    assert main(command(folder, *SHORT)) == 0
    torch.set_num_threads(threads)
    return folder


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def error_line(capsys):
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    return line


def rows(folder):
    """The rows of the log; every line must be JSON, in which there is no NaN."""

    def refuse(constant):
        raise ValueError(constant)

    lines = (folder / "training_log.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


# ---------------------------------------------------------------------------------------------------------------------
# Damaged checkpoints


def damages(whole):
    """What can have become of a file: None if it is gone."""
    yield from (whole[: len(whole) // 2], b"", whole[:-1], None)
    for place in (0, len(whole) // 2, len(whole) - 1):
        yield flipped(whole, place)


def flipped(whole, place):
    return whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


def write(path, content):
    path.unlink() if content is None else path.write_bytes(content)


def test_a_checkpoint_holds_what_is_damaged_here(short):
    for step in (3, 6):
        assert sorted(path.name for path in (short / f"checkpoint-{step}").iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_any_change_of_a_checkpoint_is_found_and_the_one_before_is_taken(command, short, tmp_path, capsys, name):
    """The run is another one, so that it is refused as soon as it has chosen: the error names what it chose."""
    stopped = tmp_path / "stopped"
    shutil.copytree(short, stopped)
    path = stopped / "checkpoint-6" / name
    other_run = command(stopped, *SHORT, "--learning_rate=0.5")
    whole = path.read_bytes()
    for damage in damages(whole):
        write(path, damage)
        capsys.readouterr()
        assert main([*other_run, RESUME]) == 2
        said = capsys.readouterr().err.splitlines()
        passed_over = [line for line in said if line.endswith("trying the one before")]
        assert len(passed_over) == 1 and f"{path.parent}: damaged (" in passed_over[0]
        assert name in passed_over[0] or name == "manifest.json"  # which may name another by mistake, once damaged
        assert f"error: {stopped / 'checkpoint-3'}: a checkpoint of another run" in said[-1]
        assert main([*other_run, f"--resume_from_checkpoint={path.parent}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"error: {path.parent}: damaged (" in line
        path.write_bytes(whole)
    assert main([*other_run, RESUME]) == 2 and f"{path.parent}: a checkpoint of another" in error_line(capsys)


@pytest.mark.parametrize("name", FILES)
def test_the_checkpoint_before_a_damaged_one_leads_to_the_same_bytes(command, short, tmp_path, name):
    stopped = tmp_path / "stopped"
    shutil.copytree(short, stopped)
    path = stopped / "checkpoint-6" / name
    path.write_bytes(flipped(path.read_bytes(), path.stat().st_size // 3))
    assert main(command(stopped, *SHORT, RESUME)) == 0
    assert weights(stopped) == weights(short)
    assert [row["step"] for row in rows(stopped) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_with_every_checkpoint_damaged_the_run_is_refused_and_nothing_is_lost(command, short, tmp_path, capsys):
    stopped = tmp_path / "stopped"
    shutil.copytree(short, stopped)
    for step in (3, 6):
        (stopped / f"checkpoint-{step}" / "optimizer.safetensors").write_bytes(b"")
    before = contents(stopped / "checkpoint-3")
    assert main(command(stopped, *SHORT, RESUME)) == 2
    said = capsys.readouterr().err
    assert said.count("trying the one before") == 1 and "there is none before it: --overwrite_output_dir" in said
    assert contents(stopped / "checkpoint-3") == before and weights(stopped) == weights(short)


# ---------------------------------------------------------------------------------------------------------------------
# Signals


def run_through(arguments, said, count):
    """Run the command to its end in `count` processes."""
    launched = processes.launch(arguments, said, count)
    finish(launched)
    assert [process.exitcode for process in launched] == [0] * count, said.read_text()


def finish(launched):
    """Wait for the processes' ends, which must come in time."""
    end = time.monotonic() + 60
    for process in launched:
        process.join(max(0, end - time.monotonic()))
    late = [process for process in launched if process.is_alive()]
    for process in late:
        process.kill()
    assert not late


@pytest.fixture(scope="module")
def undisturbed(command, tmp_path_factory):
    """The weights that 40 steps end with on one process and on two."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for count in (1, 2):
        run_through(command(folder / f"{count}", *LONG), folder / f"{count}.txt", count)
    return {count: weights(folder / f"{count}") for count in (1, 2)}


@pytest.fixture
def start(command, tmp_path):
    """Start a run of slow steps in `count` processes and wait until it reaches `step`; at the end all are killed."""
    launched = []

    def started(*options, count=1, step=13, dawdle=(1, 0.05)):
        arguments = command(tmp_path / "model", *LONG, *options)
        launched.extend(processes.launch(arguments, tmp_path / "said.txt", count, dawdle))
        wait_for_step(tmp_path / "said.txt", step, lambda: launched[0].is_alive())
        return launched

    yield started
    for process in launched:
        process.kill()
        process.join()


def wait_for_step(said, step, alive):
    end = time.monotonic() + 90
    while step not in steps_in(said):
        assert alive() and time.monotonic() < end, said.read_text()
        time.sleep(0.01)


def steps_in(said):
    return [int(step) for step in re.findall(r"(?m)^step +(\d+)/40 ", said.read_text())]


def check_stopped(folder, said):
    """The run stopped after a step, not at a save that was due, and saved that step; half of nothing is left."""
    stop = max(steps_in(said))
    assert 13 <= stop < 20, said.read_text()
    saved = {path.name for path in folder.iterdir() if "checkpoint" in path.name}
    assert saved == {"checkpoint-10", f"checkpoint-{stop}"}
    assert not (folder / "model.safetensors").exists() and rows(folder)[-1]["step"] == stop
    return stop


def check_resumed(command, folder, said, stop, count, expected):
    """The run goes on from there, and ends as if it had never stopped."""
    run_through(command(folder, *LONG, RESUME), said, count)
    assert steps_in(said) == list(range(stop + 1, 41))
    assert weights(folder) == expected
    assert [row["step"] for row in rows(folder) if "loss" in row] == list(range(1, 41))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(command, start, undisturbed, tmp_path, number, code):
    (process,) = start()
    os.kill(process.pid, number)
    finish([process])
    assert process.exitcode == code
    stop = check_stopped(tmp_path / "model", tmp_path / "said.txt")
    assert f"checkpoint-{stop}" in (tmp_path / "said.txt").read_text().splitlines()[-1]
    check_resumed(command, tmp_path / "model", tmp_path / "again.txt", stop, 1, undisturbed[1])


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_a_signal_to_the_loaders_worker_too_does_no_harm(command, start, undisturbed, tmp_path, number, code):
    """A terminal's Ctrl-C and a scheduler's SIGTERM go to the whole group."""
    (process,) = start("--dataloader_num_workers=1")
    os.killpg(process.pid, number)
    finish([process])
    assert process.exitcode == code, (tmp_path / "said.txt").read_text()
    stop = check_stopped(tmp_path / "model", tmp_path / "said.txt")
    check_resumed(command, tmp_path / "model", tmp_path / "again.txt", stop, 1, undisturbed[1])


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_this_process_ends_the_run_after_its_step_with_a_checkpoint(
    command, short, monkeypatch, tmp_path, capsys, number, code
):
    """And the run goes on from there as if it had never stopped."""
    before, wanted, asked = signal.getsignal(signal.SIGINT), StopSignals.wanted, itertools.count(1)

    def told(stop):
        if next(asked) == 3:
            signal.raise_signal(number)
        return wanted(stop)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background a shell ignores it
    monkeypatch.setattr(StopSignals, "wanted", told)
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


@pytest.mark.parametrize("question", range(3, 12))
def test_whenever_a_signal_comes_the_last_step_made_is_saved(command, monkeypatch, tmp_path, question):
    """It comes right before the loop asks for the n-th time whether one has come."""
    asked = itertools.count(1)

    def wanted(stop):
        if next(asked) >= question:
            stop.agreed = signal.SIGTERM
        return bool(stop.agreed)

    monkeypatch.setattr(StopSignals, "wanted", wanted)
    with pytest.raises(SystemExit) as stopped:
        main(command(tmp_path, *LONG))
    assert stopped.value.code == 143
    (saved,) = tmp_path.glob("checkpoint-*")
    assert saved.name == f"checkpoint-{rows(tmp_path)[-1]['step']}"


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait_for_the_step(start, tmp_path):
    (process,) = start(step=12, dawdle=(13, 60.0))
    process.join(2)  # until it is in the middle of its slow step: between two steps a signal ends it at once
    os.kill(process.pid, signal.SIGINT)
    process.join(0.5)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    process.join(5)
    assert process.exitcode in (130, -signal.SIGINT)  # by itself, or by the signal; a shell shows 130 for both
    assert {path.name for path in (tmp_path / "model").glob("*checkpoint*")} == {"checkpoint-10"}


@pytest.mark.slow
def test_a_signal_to_both_processes_ends_both_after_one_step(command, start, undisturbed, tmp_path):
    launched = start(count=2)
    for process in launched:
        os.kill(process.pid, signal.SIGTERM)
    finish(launched)
    assert [process.exitcode for process in launched] == [143, 143]
    stop = check_stopped(tmp_path / "model", tmp_path / "said.txt")
    check_resumed(command, tmp_path / "model", tmp_path / "again.txt", stop, 2, undisturbed[2])


@pytest.mark.parametrize("told", ["one process", "the launcher"])
@pytest.mark.slow
def test_a_signal_under_torchrun_reaches_all_processes(command, undisturbed, tmp_path, told):
    said = tmp_path / "said.txt"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [processes.__file__, "1", "0.05", *command(tmp_path / "model", *LONG)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with said.open("w") as file:
        agent = subprocess.Popen([*launcher, *script], env=environment, stdout=file, stderr=file)
    try:
        wait_for_step(said, 13, lambda: agent.poll() is None)
        workers = psutil.Process(agent.pid).children()
        assert len(workers) == 2
        # The process of rank 1, or of rank 0: it must not matter which.
        os.kill(workers[1].pid if told == "one process" else agent.pid, signal.SIGTERM)
        assert agent.wait(60) != 0
        assert not psutil.wait_procs(workers, timeout=5)[1]
    finally:
        for process in [*psutil.Process(agent.pid).children(), agent] if agent.poll() is None else []:
            process.kill()
    stop = check_stopped(tmp_path / "model", said)
    check_resumed(command, tmp_path / "model", tmp_path / "again.txt", stop, 2, undisturbed[2])


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3107",
            "Connection closed by peer [127.0.0.1]:3107",
        ),
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled system error",
            "NCCL error in: unhandled system error",
        ),
    ],
)
def test_of_what_gloo_and_nccl_say_the_places_in_their_code_are_left_out(monkeypatch, reason, words):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(UserError) as refusal:
        with failures_explained(PretrainConfig()):
            raise RuntimeError(reason)
    assert str(refusal.value) == (
        f"another process of this run is gone, or cannot be reached ({words}): look at what it said; "
        f"go on with --resume_from_checkpoint latest"
    )


def test_a_dry_run_without_memory_names_the_options_that_help_and_no_run_to_go_on_with(
    command, tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("d2l_bert.training.learner.train_step", fail)
    assert main(command(tmp_path / "model", *SHORT, "--dry_run")) == 2
    assert error_line(capsys).endswith("or give --gradient_checkpointing: the steps stay the same")
    assert main(command(tmp_path / "model", *SHORT)) == 2
    assert error_line(capsys).endswith("the steps stay the same; go on with --resume_from_checkpoint latest")


COMMAND = str(Path(sys.executable).with_name("d2l-bert"))


@pytest.mark.parametrize("program", [["-m", "d2l_bert"], [COMMAND]], ids=["module", "script"])
@pytest.mark.parametrize(
    "number, code, said", [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_during_the_imports_ends_the_command_with_a_line(program, number, code, said):
    with importing([], program) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    (line,) = [line for line in errors.splitlines() if not line.startswith("import time:")]
    assert line == f"d2l-bert: {said}"


@pytest.mark.slow
def test_a_signal_that_the_caller_ignores_stays_ignored_during_the_imports():
    with importing(["sh", "-c", 'trap "" INT TERM; exec "$@"', "sh"], ["-m", "d2l_bert"]) as process:
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and told.startswith("usage: d2l-bert")


def importing(before, program):
    """The help of the command, in the middle of its imports: of each one Python says when it is done."""
    process = subprocess.Popen(
        [*before, sys.executable, "-X", "importtime", *program, "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert any("d2l_bert.early_signals" in line for line in process.stderr)
    return process


@pytest.fixture
def ignored():
    """SIGINT and SIGTERM are ignored in this process."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_run_whose_caller_ignores_signals_goes_on(command, ignored, short, monkeypatch, tmp_path):
    """As a shell without job control has it for Ctrl-C and a background command."""
    wanted = StopSignals.wanted

    def told(stop):
        for number in ignored:
            os.kill(os.getpid(), number)
        return wanted(stop)

    monkeypatch.setattr(StopSignals, "wanted", told)
    assert main(command(tmp_path / "model", *SHORT)) == 0
    assert weights(tmp_path / "model") == weights(short)


# ---------------------------------------------------------------------------------------------------------------------
# A full disk


def stopped_after(step, short, folder):
    """A copy of the short run as it was after a step."""
    shutil.copytree(short, folder)
    for path in folder.iterdir():
        later = path.name.startswith("checkpoint-") and path.name != f"checkpoint-{step}"
        if later or path.name in ("model.safetensors", "metrics.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


def check_save_failed(folder, capsys, before):
    """One line names the checkpoint and the mend; the one before is as it was, and half of nothing is left."""
    line = error_line(capsys)
    assert str(folder / "checkpoint-6") in line and "--resume_from_checkpoint latest" in line
    assert {path.name for path in folder.glob("*checkpoint*")} | {
        path.name for path in folder.glob(".checkpoint*")
    } == {"checkpoint-3"}
    assert contents(folder / "checkpoint-3") == before


@pytest.mark.parametrize("largest", [20_000, 60_000, 120_000])  # bytes of a file: too few for code, weights, moments
def test_a_file_that_cannot_be_written_stops_a_save_and_harms_no_other(command, short, tmp_path, capsys, largest):
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
    """Mount a disk, or change its size."""
    place, mount = tmp_path / "disk", shutil.which("mount")
    place.mkdir()

    def sized(size, *how):
        options = ",".join([*how, f"size={size}"])
        return subprocess.run([mount, "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True).returncode

    if sys.platform != "linux" or not mount or os.geteuid() or sized(1_000_000):
        pytest.skip("mounting a small disk takes Linux and its superuser")
    yield place, sized
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_stops_a_save_and_the_run_goes_on_when_there_is_room(command, short, small_disk, capsys):
    """A checkpoint takes some 300 kB; beside one there is room for half of another."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Numbers that are none


class SpoiltGradient(torch.autograd.Function):
    """Nothing on the way forward; no number on the way back."""

    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * float("nan")


SPOILERS = {
    "no loss": lambda loss: loss * float("nan"),
    "an endless loss": lambda loss: loss + float("inf"),
    "no gradient": SpoiltGradient.apply,
}


@pytest.fixture
def spoil(monkeypatch):
    """Spoil the loss of some steps of the next run; gives a list that grows by one with each step made."""

    def spoilt_steps(steps, how):
        forward, made = D2lBertForPreTraining.forward, []

        def spoilt(model, *arguments, **named):
            outputs = forward(model, *arguments, **named)
            if model.training:  # a step is a single micro-batch here
                made.append(None)
                if len(made) in steps:
                    outputs.mlm_loss = SPOILERS[how](outputs.mlm_loss)
                    outputs.loss = outputs.mlm_loss + outputs.nsp_loss
            return outputs

        monkeypatch.setattr(D2lBertForPreTraining, "forward", spoilt)
        return made

    return spoilt_steps


@pytest.fixture
def leave_out(monkeypatch):
    """Make the optimizer do nothing at some steps of the next run: what it means to skip them."""

    def left_out(steps):
        step, number = torch.optim.AdamW.step, itertools.count(1)

        def sometimes(optimizer, *arguments):
            return step(optimizer, *arguments) if next(number) not in steps else None

        monkeypatch.setattr(torch.optim.AdamW, "step", sometimes)

    return left_out


LONGER = (*OPTIONS, "--max_steps=18", "--save_steps=3", "--eval_steps=18")


@pytest.mark.parametrize("how, steps", [*((how, {5}) for how in SPOILERS), ("no loss", set(range(5, 14)))])
def test_steps_without_a_finite_loss_and_gradient_are_left_out(
    command, spoil, leave_out, monkeypatch, tmp_path, how, steps
):
    """One, or nine in a row; the rest of the run is that of an optimizer that does nothing at these steps."""
    made = spoil(steps, how)
    assert main(command(tmp_path / "spoilt", *LONGER)) == 0
    assert len(made) == 18
    monkeypatch.undo()
    leave_out(steps)
    assert main(command(tmp_path / "expected", *LONGER)) == 0
    assert weights(tmp_path / "spoilt") == weights(tmp_path / "expected")
    for folder, skipped in ((tmp_path / "spoilt", sorted(steps)), (tmp_path / "expected", [])):
        assert [row["step"] for row in rows(folder) if row.get("event") == "skipped"] == skipped


def test_ten_steps_in_a_row_without_a_finite_loss_end_the_run(command, spoil, tmp_path, capsys):
    spoil(set(range(5, 18)), "no loss")
    folder = tmp_path / "model"
    assert main(command(folder, *LONGER)) == 2
    line = error_line(capsys)
    assert "diverged" in line and "10 steps in a row" in line and "learning_rate" in line
    assert str(folder / "checkpoint-3") in line
    assert [row["step"] for row in rows(folder) if row.get("event") == "skipped"] == list(range(5, 15))
    assert {path.name for path in folder.iterdir() if "checkpoint" in path.name} == {"checkpoint-3"}
    assert main(["fill-mask", str(folder / "checkpoint-3"), "anna [MASK] to the garden ."]) == 0
    assert not any(path.name in ("model.safetensors", "metrics.json") for path in Path(folder).iterdir())


def step_figures(skipped):
    return StepFigures(*[math.nan if skipped else 1.0] * 3, *[1.0] * 5, float(skipped))


def test_only_steps_in_a_row_count_and_they_count_over_an_interruption(tmp_path):
    guard = NonFiniteGuard(tmp_path, {})
    for step in range(1, 40):
        guard.check(step, step_figures(skipped=step % 10))  # nine in a row, again and again
    guard = NonFiniteGuard(tmp_path, json.loads(json.dumps(guard.state())))
    with pytest.raises(
        ValueError, match="10 steps in a row, up to step 40 .loss nan, gradient norm nan.; start again"
    ):
        guard.check(40, step_figures(skipped=True))


def test_a_step_that_is_left_out_is_left_out_of_the_average(command, spoil, tmp_path):
    spoil({2}, "no loss")
    assert main(command(tmp_path, *SHORT, "--save_steps=1", "--ema_decay=0.5", "--max_steps=3")) == 0
    averages = [(tmp_path / f"checkpoint-{step}" / "average.safetensors") for step in (1, 3)]
    assert not (tmp_path / "checkpoint-2").exists(), "no save among steps that are left out"
    weights = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    before, after = map(load_file, averages)
    for name in weights:  # min(0.5, (1 + 3) / (10 + 3)) of what it was after the first step
        torch.testing.assert_close(after[name], before[name] * 4 / 13 + weights[name] * 9 / 13)


def test_the_same_run_meets_the_same_end_when_it_is_resumed(command, spoil, monkeypatch, tmp_path, capsys):
    folder = tmp_path / "model"
    spoil(set(range(5, 19)), "no loss")
    assert main(command(folder, *LONGER)) == 2
    monkeypatch.undo()
    spoil(set(range(2, 19)), "no loss")  # it starts at step 4
    assert main(command(folder, *LONGER, RESUME)) == 2
    assert "up to step 14" in capsys.readouterr().err.splitlines()[-1]
