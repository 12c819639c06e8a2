"""Kill a run again and again, and check that it ends like a run that was never killed.

    python -m benchmarks.kill_and_resume [--kills 50] [--seed 0]

Two runs of the command train the recipe tiny on 400 documents of Python's documentation, each with its own cache: 200
steps, a checkpoint every fourth step, batches from a loader's worker. One run is not disturbed. The other run is
killed at random moments (SIGKILL, with its worker), and always started with `--resume_from_checkpoint latest`. A fifth
of the kills is aimed at reading, tokenizing and start-up, the others at later and later steps and, in the last tenth,
at the time after the last step; half of these wait for a save. At the end the weights and the optimizer's moments must
be the same bytes, and the log must hold the same losses, each step once.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

import torch

from benchmarks.turns import machine, positive


STEPS = 200
SAVE_STEPS = 4
OPTIONS = (
    "--max_documents=400 --max_seq_length=64 --global_batch_size=16 "
    f"--max_steps={STEPS} --save_steps={SAVE_STEPS} --eval_steps=100 --logging_steps=1 "
    "--hidden_dropout_prob=0.1 --dataloader_num_workers=1 --resume_from_checkpoint=latest"
).split()
AT_START = 0.2  # the share of the kills that are at the start of a process
IN_SAVE = 0.5  # and in a save
TIME_LIMIT = 600  # seconds for one process; a run that takes longer hangs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=positive, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments of the kills")
    arguments = parser.parse_args()
    print(f"python {' '.join(sys.orig_argv[1:])}    {date.today()}")
    print(f"{machine('cpu')}, {os.cpu_count()} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        whole = Run(Path(folder) / "whole")
        killed = Run(Path(folder) / "killed")
        seconds = whole.start().finish()
        print(f"not killed: {seconds:.1f} s", flush=True)
        begin = time.monotonic()
        kills_by_phase, steps_taken = kill_and_resume(killed, arguments.kills, random.Random(arguments.seed))
        report(kills_by_phase, steps_taken, time.monotonic() - begin)
        sys.exit(0 if compare(whole, killed) else 1)


# ---------------------------------------------------------------------------------------------------------------------
# A run and its processes


class Run:
    """A run of the command in a folder of its own. It takes several processes if it is killed."""

    def __init__(self, folder: Path):
        self.model = folder / "model"
        self.folder = folder
        folder.mkdir()

    def start(self) -> "RunProcess":
        return RunProcess(self)

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written, or was being written when the run was killed."""
        return any(self.model.glob(".checkpoint-*.part"))


class RunProcess:
    """One process of a run and its loader's worker, from start to end."""

    def __init__(self, run: Run):
        self.run = run
        self.stderr = run.folder / "stderr.txt"
        self.starts_at_the_end = (run.model / f"checkpoint-{STEPS}").exists()
        environment = {**os.environ, "HF_HOME": str(run.folder / "cache"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "d2l_bert", "pretrain", f"--output_dir={run.model}", *OPTIONS]
        self.begin = time.monotonic()
        with self.stderr.open("w") as stderr:
            self.popen = subprocess.Popen(
                command, env=environment, stderr=stderr, stdout=subprocess.DEVNULL, start_new_session=True
            )

    def steps(self) -> list[int]:
        """The steps that this process has taken, from its messages."""
        return [int(step) for step in re.findall(rf"(?m)^step +(\d+)/{STEPS} ", self.stderr.read_text())]

    def has_taken(self, step: float) -> bool:
        """Whether the run has taken this step, in this process or an earlier one."""
        return self.starts_at_the_end or max(self.steps(), default=0) >= step

    def wait(self, happened, pause: float = 0.005) -> bool:
        """Wait until `happened()` (returns True), or until the process ends (returns False)."""
        while not happened():
            if self.popen.poll() is not None:
                return False
            if time.monotonic() > self.begin + TIME_LIMIT:
                self.kill()
                sys.exit(f"no end after {TIME_LIMIT} s:\n{self.stderr.read_text()}")
            time.sleep(pause)
        return True

    def kill(self) -> None:
        """Kill the process and its worker at once: both are in one process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def runs_for(self, seconds: float) -> bool:
        """Whether the process runs for `seconds` more."""
        end = time.monotonic() + seconds
        return self.wait(lambda: time.monotonic() >= end, pause=min(0.005, seconds / 10))

    def finish(self) -> float:
        """Wait for the end; returns the seconds from the start. Exits if the process failed."""
        self.wait(lambda: False)
        if self.popen.returncode:
            sys.exit(f"exit code {self.popen.returncode}:\n{self.stderr.read_text()}")
        return time.monotonic() - self.begin


# ---------------------------------------------------------------------------------------------------------------------
# Kills


def kill_and_resume(run: Run, kills: int, rng: random.Random) -> tuple[Counter, int]:
    """
    Kill a run `kills` times, then let it end.

    Returns:
        The number of kills in each phase, and the number of steps that all processes took together.
    """
    kills_by_phase = Counter()
    steps_taken = 0
    for number in range(kills):
        is_at_start = rng.random() < AT_START
        step = min(STEPS, 1.1 * STEPS * number / kills)
        while True:
            process = run.start()
            if process.runs_for(rng.uniform(0, 6)) if is_at_start else wait_for_kill(process, step, rng):
                break
            process.finish()
            is_at_start = True  # the run ended before the kill: aim at a start-up instead
        process.kill()
        steps = process.steps()
        kills_by_phase[phase_of(run, process, steps)] += 1
        steps_taken += len(steps)
        print(f"kill {number + 1} of {kills}: {len(steps)} steps taken", file=sys.stderr)
    process = run.start()
    process.finish()
    return kills_by_phase, steps_taken + len(process.steps())


def wait_for_kill(process: RunProcess, step: float, rng: random.Random) -> bool:
    """Wait until some time after a step, or into a save after it; returns False if the run ends before."""
    if not process.wait(lambda: process.has_taken(step)):
        return False
    if step < STEPS and rng.random() < IN_SAVE / (1 - AT_START):
        return process.wait(process.run.is_saving, pause=0.001) and process.runs_for(rng.uniform(0, 0.05))
    return process.runs_for(rng.uniform(0, 1))


def phase_of(run: Run, process: RunProcess, steps: list[int]) -> str:
    """What a killed process was doing."""
    if process.has_taken(STEPS) and not run.is_saving():
        return "behind the last step"
    if not steps:  # an unfinished save is from an earlier process
        return "before training began"
    return "during a save" if run.is_saving() else "between saves"


# ---------------------------------------------------------------------------------------------------------------------
# The result


def report(kills_by_phase, steps_taken, seconds):
    print(f"killed {kills_by_phase.total()} times in {seconds:.0f} s:")
    for where in ("before training began", "between saves", "during a save", "behind the last step"):
        print(f"  {where:<22} {kills_by_phase[where]:>3}")
    print(f"steps taken: {steps_taken}, of them {steps_taken - STEPS} again")


def compare(whole: Run, killed: Run) -> bool:
    """Print whether both runs left the same files; returns that."""
    same = True
    for name in ("model.safetensors", f"checkpoint-{STEPS}/optimizer.safetensors"):
        expected, found = ((run.model / name).read_bytes() for run in (whole, killed))
        print(f"{name}: {f'{len(found):,} bytes, the same' if found == expected else 'DIFFERENT'}")
        same &= found == expected
    losses = [logged_losses(run) for run in (whole, killed)]
    once = [step for step, _ in losses[1]] == list(range(1, STEPS + 1))
    print(f"training_log.jsonl: {f'{STEPS} steps, each once' if once else 'STEPS MISSING OR REPEATED'}")
    print(f"training_log.jsonl: losses {'the same' if losses[0] == losses[1] else 'DIFFERENT'}")
    return same and once and losses[0] == losses[1]


def logged_losses(run: Run) -> list[tuple[int, float]]:
    """The step and loss of each training row; every line of the log must be JSON."""
    rows = [json.loads(line) for line in (run.model / "training_log.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


if __name__ == "__main__":
    main()
