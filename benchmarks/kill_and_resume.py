"""Kill a run again and again, and see whether it ends as if it had never been.

    python -m benchmarks.kill_and_resume [--kills 50] [--seed 0]

Two runs of the command line train the recipe tiny on 400 documents of Python's documentation, each with a cache of its
own: 200 steps, a checkpoint after every fourth, batches from a loader's worker. One is left alone. The other one is
killed (SIGKILL, the worker too) at random instants and started again with `--resume_from_checkpoint latest`, the first
time too; a tenth of the kills are aimed at reading and tokenizing, a tenth at later start-ups, two tenths at any
moment of training, five tenths at a save, a tenth at what comes behind the last step. Weights and moments must be the
same bytes at the end, and the log the same losses, each step once.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from benchmarks.mlm_head import machine, positive


STEPS, SAVE_STEPS = 200, 4
OPTIONS = (
    "--max_documents=400 --max_seq_length=64 --global_batch_size=16 "
    f"--max_steps={STEPS} --save_steps={SAVE_STEPS} --eval_steps=100 --logging_steps=1 "
    "--hidden_dropout_prob=0.1 --dataloader_num_workers=1 --resume_from_checkpoint=latest"
).split()
SHARES = {"training": 0.2, "save": 0.5, "start": 0.1}  # and a tenth each at the very start and at the end
LONGEST = 600  # seconds that a run may live: then something hangs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=positive, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    arguments = parser.parse_args()
    print(f"python {' '.join(sys.orig_argv[1:])}    {date.today()}")
    print(f"{machine('cpu')}, {os.cpu_count()} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Run(Path(folder) / "whole"), Run(Path(folder) / "killed")
        timing = live_alone(whole)
        print(
            f"not killed: {timing.start:.1f} s to the first step, {1000 * timing.step:.0f} ms a step, "
            f"{1000 * timing.save:.0f} ms a save, {timing.finish:.1f} s behind the last step",
            flush=True,
        )
        begin = time.monotonic()
        deaths, made = kill_and_resume(killed, arguments.kills, timing, random.Random(arguments.seed))
        report(deaths, made, time.monotonic() - begin)
        sys.exit(0 if compare(whole, killed) else 1)


# ---------------------------------------------------------------------------------------------------------------------
# A run and its lives


class Run:
    """A run of the command line in a folder of its own, which may live several times."""

    def __init__(self, place: Path):
        self.model = place / "model"
        self.place = place
        place.mkdir()

    def live(self) -> "Life":
        return Life(self)

    def saves(self) -> bool:
        """Whether a checkpoint is being written, or was when the run died."""
        return any(self.model.glob(".checkpoint-*.part"))


class Life:
    """One process of a run, with its loader's worker, from its start to its end."""

    def __init__(self, run: Run):
        self.run, self.heard = run, run.place / "stderr.txt"
        self.starts_at_the_end = (run.model / f"checkpoint-{STEPS}").exists()
        environment = {**os.environ, "HF_HOME": str(run.place / "cache"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "d2l_bert", "pretrain", f"--output_dir={run.model}", *OPTIONS]
        self.begin = time.monotonic()
        with self.heard.open("w") as stderr:
            self.process = subprocess.Popen(
                command, env=environment, stderr=stderr, stdout=subprocess.DEVNULL, start_new_session=True
            )

    def steps(self) -> list[int]:
        """The steps that it made: it says each of them."""
        return [int(step) for step in re.findall(rf"(?m)^step +(\d+)/{STEPS} ", self.heard.read_text())]

    def step(self) -> int:
        return max(self.steps(), default=0)

    def past_the_last_step(self) -> bool:
        return self.starts_at_the_end or self.step() == STEPS

    def wait(self, happened, pause: float = 0.005) -> bool:
        """Until something has happened: True; or until the process has ended: False."""
        while not happened():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > self.begin + LONGEST:
                self.kill()
                sys.exit(f"no end after {LONGEST} s:\n{self.heard.read_text()}")
            time.sleep(pause)
        return True

    def kill(self) -> None:
        """Process and worker at once: they are a group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def succeed(self) -> None:
        """Live to the end."""
        self.wait(lambda: False)
        if self.process.returncode:
            sys.exit(f"exit code {self.process.returncode}:\n{self.heard.read_text()}")


@dataclass
class Timing:
    """Seconds to the first step, of a step, of a save, and behind the last step."""

    start: float
    step: float
    save: float
    finish: float


def live_alone(run: Run) -> Timing:
    """A run that nobody kills, and how long its parts took."""
    life, saves, since = run.live(), [], None
    life.wait(life.step)
    start = time.monotonic()
    while life.step() < STEPS and life.process.poll() is None:
        if since is None and run.saves():
            since = time.monotonic()
        elif since is not None and not run.saves():
            saves.append(time.monotonic() - since)
            since = None
        time.sleep(0.001)
    end = time.monotonic()
    life.succeed()
    save = statistics.median(saves)
    step = (end - start) / STEPS - save / SAVE_STEPS
    return Timing(start - life.begin, step, save, time.monotonic() - end)


# ---------------------------------------------------------------------------------------------------------------------
# Kills


def kill_and_resume(run: Run, kills: int, timing: Timing, rng: random.Random) -> tuple[Counter, int]:
    """Kill a run so often, then let it end: where the kills fell, and the steps that all its lives made."""
    deaths, made = Counter(), 0
    for aim, step in planned(kills, rng):
        while (death := killed_once(run, aim, step, timing, rng)) is None:
            aim = "start"  # it had ended before: then one of its start-ups is as good
        where, steps = death
        deaths[where] += 1
        made += steps
        print(f"kill {deaths.total()} of {kills}, {where}: {steps} steps made", file=sys.stderr)
    life = run.live()
    life.succeed()
    return deaths, made + len(life.steps())


def planned(kills: int, rng: random.Random) -> list[tuple[str, float]]:
    """What each kill is aimed at, and from which step on: they are spread over the run."""
    ends = kills // 10
    aims = rng.choices(list(SHARES), list(SHARES.values()), k=kills - 2 * ends)
    steps = sorted(rng.uniform(0, 0.95 * STEPS) for _ in aims)
    return [("start", 0)] * ends + list(zip(aims, steps, strict=True)) + [("end", STEPS)] * ends


def killed_once(run, aim, step, timing, rng) -> tuple[str, int] | None:
    """Start a run and kill it: where that fell, and the steps it had made; None if it ended by itself before."""
    life = run.live()
    if not aimed(life, aim, step, timing, rng):
        life.succeed()
        return None
    life.kill()
    steps = life.steps()
    if life.past_the_last_step() and not run.saves():
        return "behind the last step", len(steps)
    if not steps:  # what is half saved, if anything, is from the life before
        return "before training began", 0
    return "during a save" if run.saves() else "between saves", len(steps)


def aimed(life, aim, step, timing, rng) -> bool:
    """Wait for the instant of the kill; False if the run has ended before."""
    if aim == "start":  # which may be over sooner than it was
        end = life.begin + rng.uniform(0, timing.start)
        return life.wait(lambda: time.monotonic() >= end or life.step())
    if aim == "end":
        longest = timing.finish + (timing.start if life.starts_at_the_end else 0)
        return life.wait(life.past_the_last_step) and survives(life, rng.uniform(0, longest))
    if not life.wait(life.step):
        return False
    timing.start = time.monotonic() - life.begin  # shorter from here on: there is a cache
    if not life.wait(lambda: life.step() >= step):
        return False
    if aim == "training":
        return survives(life, rng.uniform(0, SAVE_STEPS * timing.step + timing.save))
    return life.wait(life.run.saves, pause=0.001) and survives(life, rng.uniform(0, timing.save))


def survives(life, seconds) -> bool:
    """Whether a life goes on for so long."""
    end = time.monotonic() + seconds
    return life.wait(lambda: time.monotonic() >= end, pause=min(0.005, seconds / 10))


# ---------------------------------------------------------------------------------------------------------------------
# What it came to


def report(deaths, made, seconds):
    print(f"killed {deaths.total()} times in {seconds:.0f} s:")
    for where in ("before training began", "between saves", "during a save", "behind the last step"):
        print(f"  {where:<22} {deaths[where]:>3}")
    print(f"steps made: {made}, of them {made - STEPS} again")


def compare(whole: Run, killed: Run) -> bool:
    """Whether two runs left the same, and say so."""
    same = True
    for name in ("model.safetensors", f"checkpoint-{STEPS}/optimizer.safetensors"):
        expected, found = ((run.model / name).read_bytes() for run in (whole, killed))
        print(f"{name}: {f'{len(found):,} bytes, the same' if found == expected else 'DIFFERENT'}")
        same &= found == expected
    losses = [logged(run) for run in (whole, killed)]
    once = [step for step, _ in losses[1]] == list(range(1, STEPS + 1))
    print(f"training_log.jsonl: {f'{STEPS} steps, each once' if once else 'STEPS MISSING OR REPEATED'}")
    print(f"training_log.jsonl: losses {'the same' if losses[0] == losses[1] else 'DIFFERENT'}")
    return same and once and losses[0] == losses[1]


def logged(run: Run) -> list[tuple[int, float]]:
    """Step and loss of each row of training; every line must be JSON."""
    rows = [json.loads(line) for line in (run.model / "training_log.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


if __name__ == "__main__":
    main()
