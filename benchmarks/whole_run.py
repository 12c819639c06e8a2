"""The speed of a whole run of `d2l-bert pretrain` against the bare step, in turns."""

import contextlib
import copy
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.peers import environment
from benchmarks.turns import describe, step_arguments, summary
from d2l_bert.model_cards.card import METRICS_FILE
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training import batching
from d2l_bert.training.recipes import architecture_options
from d2l_bert.training.tracking import TrainingLog


RUNS, ROWS = 3, 10
TURN = 3.0  # seconds; a turn of the bare step has at least one step


def end_to_end(task, arguments, folder):
    """Compare `d2l-bert pretrain` with the bare step; both get the vocabulary size of the tokenizer."""
    run = replace(task.run, torch_compile=arguments.torch_compile == "true")
    architecture = copy.deepcopy(task.architecture)
    architecture.vocab_size = len(prepare(run).tokenizer)
    task = replace(task, run=run, architecture=architecture)
    # The bare step repeats these steps, so that it meets no new tensor shapes; a run does.
    steps, count = task.write_steps(folder, arguments.repetitions * arguments.steps), arguments.end_to_end
    describe(task, steps)
    found = []
    with task.contestant("ours") as ours:
        for number in range(RUNS):
            output = Path(folder) / f"model-{number}"
            bare = BareStep(ours, steps)
            stopped_seconds = train_in_turns(command_of(task, count, output), task.device, output, count, bare)
            found.append({"bare": bare.tokens / bare.seconds, **run_speeds(output, count, stopped_seconds)})
            share = found[-1]["later"] / found[-1]["bare"]
            print(
                f"  run {number + 1} of {RUNS}: {share:.1%} of the bare step's tokens/s, {bare.turns} turns",
                flush=True,
            )
    bare, later, whole, waited, mfu = ([each[name] for each in found] for name in found[0])
    print(f"  bare step, in turns with the runs: {summary(bare)} tokens/s")
    first = logging_steps(count)
    print(f"  d2l-bert pretrain, {RUNS} runs of {count} steps, after the first {first}: {summary(later)} tokens/s")
    for what, runs in (("", later), (f", the first {first} too", whole)):
        shares = [100 * run / beside for run, beside in zip(runs, bare, strict=True)]
        print(f"  of the bare step's{what}: {summary(shares, 1, ' %')}")
    waiting = statistics.median(waited)
    print(f"  waiting for batches {waiting:.2%} of the time; MFU {statistics.median(mfu):.1%}", flush=True)


def logging_steps(count) -> int:
    """Steps between two rows of the log, for a run of `count` steps."""
    return max(1, count // ROWS)


def command_of(task, count, output) -> list[str]:
    """The command that trains the same model on the same pairs as the bare step."""
    flags = {"corpus": task.run.corpus, "output_dir": output}
    flags |= {"max_steps": count, "logging_steps": logging_steps(count), "eval_steps": count, "save_steps": count}
    flags |= {"length_schedule": "none", "batch_size_schedule": "none", "torch_compile": task.run.torch_compile}
    for name in ("vocab_size", "pairing", "max_seq_length", "mlm_probability", "global_batch_size"):
        flags[name] = getattr(task.run, name)
    flags["micro_batch_size"] = batching.most_tokens(task.run) // task.run.max_seq_length
    flags |= {name: getattr(task.architecture, name) for name in architecture_options()}
    command = [sys.executable, "-m", "d2l_bert", "pretrain", "--recipe", task.run.recipe]
    for name, value in flags.items():
        values = value if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else str(value)]
        command += [f"--{name}", *values] if value is not None else []
    return command


class BareStep:
    """
    A contestant that repeats some steps, and the tokens and seconds of its turns. The first round is not counted.
    """

    def __init__(self, contestant, steps):
        self.contestant, self.steps = contestant, itertools.cycle(steps)
        self.turns, self.tokens, self.seconds = 0, 0, 0.0
        self.seconds_per_step = contestant.call("steps", *step_arguments(steps)) / len(steps)

    def work(self, seconds) -> float:
        """Work for about `seconds`, but at least one step; returns the seconds taken."""
        steps = list(itertools.islice(self.steps, max(1, round(seconds / self.seconds_per_step))))
        spent = self.contestant.call("steps", *step_arguments(steps))
        self.turns, self.seconds, self.seconds_per_step = self.turns + 1, self.seconds + spent, spent / len(steps)
        self.tokens += sum(step.tokens for step in steps)
        return spent


def train_in_turns(command, device, output, count, bare) -> float:
    """
    Train with the command while the bare step works in turns with it.

    From the first row of the log to the last, the run and its loader's workers are stopped (SIGSTOP) every few
    seconds, while the bare step works. Both get turns of equal length.

    Returns:
        The seconds for which the run was stopped.

    Raises:
        ValueError: the run failed, or ended before it was ever stopped.
    """
    log, turn, stopped_seconds = output / "training_log.jsonl", TURN, 0.0
    with tempfile.TemporaryFile("w+") as errors:
        outputs = {"stdout": subprocess.DEVNULL, "stderr": errors}
        process = subprocess.Popen(command, env=environment(device), start_new_session=True, **outputs)
        try:
            while is_running_after(process, turn):
                since = time.monotonic()
                os.killpg(process.pid, signal.SIGSTOP)
                rows = speed_rows(log)
                if rows and rows[-1]["step"] < count:
                    turn = bare.work(TURN)
                    stopped_seconds += time.monotonic() - since
                os.killpg(process.pid, signal.SIGCONT)
        finally:
            if process.returncode is None:  # after an error here, a stopped run would never end
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            errors.seek(0)
            reason = errors.read().strip().rpartition("\n")[2]
            raise ValueError(f"d2l-bert pretrain failed with exit code {process.returncode}: {reason}")
    if not stopped_seconds:
        raise ValueError(f"a run of {count} steps is over before the bare step has a turn; give --end_to_end more")
    return stopped_seconds


def is_running_after(process, seconds) -> bool:
    """Wait for some seconds; returns whether the process is still running then."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is None


def run_speeds(output, count, stopped_seconds) -> dict[str, float]:
    """Speeds of a finished run, without the seconds in which it was stopped (the run's own clock counts those).

    Returns:
        `later`: tokens/s after the first row of the log; `whole`: tokens/s of all steps; `waited`: the share of time
        spent waiting for batches; `mfu`.
    """
    rows, metrics = speed_rows(output / "training_log.jsonl"), json.loads((output / METRICS_FILE).read_text())
    seconds = metrics["train_seconds"]
    tokens, working = seconds * metrics["train_tokens_per_second"], seconds - stopped_seconds
    # A row does not hold the seconds of its steps; they follow from the estimate for the remaining steps.
    seconds_per_step = [row["seconds_left"] / (count - row["step"]) for row in rows[:-1]]
    first = rows[0]["step"] * seconds_per_step[0]
    # A run that is stopped while it waits seems to wait long, which the median of the rows ignores.
    waits = [row["data_wait_share"] * each for row, each in zip(rows, seconds_per_step, strict=False)]
    return {
        "later": (tokens - first * rows[0]["tokens_per_second"]) / (working - first),
        "whole": tokens / working,
        "waited": statistics.median(waits) * count / working,
        "mfu": metrics["train_mfu"] * seconds / working,
    }


def speed_rows(log: Path) -> list[dict]:
    return [row for row in TrainingLog(log).rows() if "tokens_per_second" in row]
