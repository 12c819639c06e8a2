"""The speed of a training step while other programs keep cores busy, for several settings of OpenMP.

    python -m benchmarks.neighbours [--settings default run GOMP_SPINCOUNT=3000 OMP_WAIT_POLICY=PASSIVE]
    python -m benchmarks.neighbours --size base --pairs 4 --compiled --repetitions 5

A setting says how OpenMP's threads wait at barriers: `run` as in `pretrain` (see `training/openmp.py`), `default` as
OpenMP decides, anything else by a comma-separated list of environment variables. For each setting, a separate process
computes the training step of a recipe as `pretrain` does, on random tokens. The processes take short turns: in each
round, each setting has a turn without a busy process, a turn with one, and a turn with two. The first steps of a turn
are not timed, as `run` adapts itself within a second. A busy process runs only during a turn. With `--own_sessions`
it has its own session, like a program in another terminal: Linux divides the cores between sessions first, so that a
training with two threads beside two such programs gets a third of each core instead of half.

Other programs on the machine falsify a turn. So a turn starts when other programs use at most a tenth of a core, or
after `--patience` seconds. A turn in which other programs use more is repeated, and the least disturbed of `--tries`
turns counts. The cores that other programs used are printed. As root, `echo -20 > /proc/self/autogroup` in the shell
that starts the benchmark gives the benchmark and its busy processes a higher priority. Turns without a busy process
need a quiet machine even then, because threads that sleep leave their cores to other programs.

Printed are medians and quartiles over the rounds: of tokens/s, and of the ratio to the first setting without a busy
process in the same round. The goals for `run` are at least 98 % without a busy process, 48 % with one and 30 %
with two. The exit code is 1 if a goal is missed.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.mlm_head import heading, positive
from benchmarks.peers import Contestant, full_batch, write_step
from d2l_bert import RECIPES
from d2l_bert.openmp import wait_settings
from d2l_bert.training.batching import micro_batch_pairs
from d2l_bert.training.energy import OPENMP_VARIABLES
from d2l_bert.training.other_programs import busy_seconds, own_seconds
from d2l_bert.training.recipes import architecture_options


SETTINGS = ("default", "run", "OMP_WAIT_POLICY=PASSIVE", "OMP_NUM_THREADS=1")
GOALS = {0: 0.98, 1: 0.48, 2: 0.30}  # the least ratio of `run`, by the number of busy processes
MOST_DISTURBANCE = 0.1  # cores that other programs may use during a turn
SETTLING_SECONDS = 0.1  # between the start of the busy processes and the start of the turn
UNTIMED_SECONDS = 1.5  # at the beginning of a turn

# A busy process ends with the process that has started it.
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000): pass"
AUTOGROUP = Path("/proc/self/autogroup")  # where Linux groups processes by session: "/autogroup-12 nice 0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="tiny", choices=tuple(RECIPES), help="recipe of the model (tiny)")
    parser.add_argument("--pairs", type=positive, help="pairs in a step (as in the recipe, but at most 64)")
    parser.add_argument("--max_seq_length", type=positive, default=128, help="tokens in a pair (128)")
    parser.add_argument("--compiled", action="store_true", help="compile the blocks, as --torch_compile true does")
    parser.add_argument(
        "--settings", type=setting, nargs="+", default=[setting(name) for name in SETTINGS], help="settings to compare"
    )
    parser.add_argument("--neighbours", type=int, nargs="*", default=[1, 2], help="numbers of busy processes (1 2)")
    parser.add_argument("--own_sessions", action="store_true", help="each busy process has its own session")
    parser.add_argument("--repetitions", type=positive, default=9, help="number of rounds (9)")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="timed part of a turn, which has at least one step (1.0)"
    )
    parser.add_argument(
        "--tries", type=positive, default=4, help="most tries of a turn, of which the least disturbed counts (4)"
    )
    parser.add_argument("--patience", type=float, default=20.0, help="most seconds to wait for a quiet machine (20)")
    arguments = parser.parse_args()
    print(heading("cpu"))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        task, file, tokens = make_task(arguments, Path(folder))
        contestants = {}
        for name, variables in arguments.settings:
            setup = {**task, "short_waits": name == "run"}
            contestants[name] = opened.enter_context(Contestant("ours", setup, variables=variables))
            contestants[name].call("steps_for", file, 0.0, 0.0)  # allocates memory
        description = next(iter(contestants.values())).description
        print(f"recipe {arguments.size}: {description}; {tokens:,} tokens a step", flush=True)
        speeds, disturbances = take_turns(contestants, file, tokens, arguments)
    print_speeds(speeds)
    print(f"cores that other programs used in a turn: {quartiles(disturbances, 2)}, at most {max(disturbances):.2f}")
    sys.exit(not goals_reached(speeds))


def setting(text: str) -> tuple[str, dict[str, str | None]]:
    """The name and the environment variables of a setting; None as a value unsets a variable."""
    if text == "default":
        variables = {}
    elif text == "run":
        variables = wait_settings({})
    else:
        variables = dict(part.partition("=")[::2] for part in text.split(","))
        if unknown := variables.keys() - set(OPENMP_VARIABLES):
            known = ", ".join(OPENMP_VARIABLES)
            raise argparse.ArgumentTypeError(f"{min(unknown)!r}: give default, run, or NAME=VALUE of {known}")
    return text, {**dict.fromkeys(OPENMP_VARIABLES), **variables}


def make_task(arguments, folder: Path) -> tuple[dict, str, int]:
    """The setup of the contestants, the file with the step that all of them compute, and the step's tokens."""
    architecture, run = RECIPES[arguments.size]()
    architecture.vocab_size = run.vocab_size
    pairs = arguments.pairs or min(run.global_batch_size, 64)
    run = replace(
        run,
        max_seq_length=arguments.max_seq_length,
        global_batch_size=pairs,
        micro_batch_size=min(micro_batch_pairs(run), pairs),
        length_schedule=[],
        torch_compile="true" if arguments.compiled else "false",
    )
    batch = full_batch(run, architecture.vocab_size)
    step = [
        {name: tensor[: pairs - start].clone() for name, tensor in batch.items()}
        for start in range(0, pairs, run.micro_batch_size)
    ]
    names = [*architecture_options(), "vocab_size", "pad_token_id"]
    task = {"architecture": {name: getattr(architecture, name) for name in names}, "run": asdict(run), "device": "cpu"}
    return task, str(write_step(step, folder / "step.safetensors")), pairs * run.max_seq_length


def take_turns(contestants, file, tokens, arguments) -> tuple[dict, list[float]]:
    """
    Let the contestants take turns.

    Returns:
        A list of tokens/s, one number for each round, by (setting, number of busy processes); and the number of cores
        that other programs used in each turn.
    """
    order = [(name, count) for count in (0, *arguments.neighbours) for name in contestants]
    speeds, disturbances = {key: [] for key in order}, []
    for turn in range(arguments.repetitions):
        for name, count in order[:: -1 if turn % 2 else 1]:
            tried = []
            while not tried or (min(tried)[0] > MOST_DISTURBANCE and len(tried) < arguments.tries):
                wait_until_quiet(arguments.patience)
                with busy_processes(count, arguments.own_sessions), OtherCores() as others:
                    steps, seconds = contestants[name].call("steps_for", file, arguments.seconds, UNTIMED_SECONDS)
                tried.append((others.cores, steps * tokens / seconds))
            disturbances.append(min(tried)[0])
            speeds[name, count].append(min(tried)[1])
    return speeds, disturbances


@contextlib.contextmanager
def busy_processes(count: int, own_sessions: bool):
    """Within the block, `count` processes each keep a core busy."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=own_sessions) for _ in range(count)]
    try:
        priority = autogroup_priority() if own_sessions else 0
        for process in processes if priority else ():
            Path(f"/proc/{process.pid}/autogroup").write_text(str(priority))
        time.sleep(SETTLING_SECONDS * (count > 0))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def autogroup_priority() -> int:
    """The priority (nice value) of this process's session, 0 where the kernel keeps no such groups.

    A kernel without the scheduler's groups of sessions has no such file, or an empty one.
    """
    words = AUTOGROUP.read_text().split() if AUTOGROUP.exists() else []
    return int(words[-1]) if words else 0


class OtherCores:
    """Measures how many cores other programs use during a `with` block; `cores` has the result after the block."""

    def __enter__(self):
        self.start, self.seconds = time.monotonic(), self._seconds()
        return self

    def __exit__(self, *_):
        self.cores = max(0.0, self._seconds() - self.seconds) / (time.monotonic() - self.start)

    def _seconds(self):
        busy = busy_seconds(range(os.cpu_count()))
        return 0.0 if busy is None else busy - own_seconds()


def wait_until_quiet(patience: float):
    """Wait until other programs use at most `MOST_DISTURBANCE` cores, but no longer than `patience` seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        with OtherCores() as others:
            time.sleep(0.3)
        if others.cores <= MOST_DISTURBANCE:
            return


def print_speeds(speeds):
    print("tokens/s, and the ratio to the first setting alone in the same round; medians (quartiles)")
    for count in dict.fromkeys(count for _, count in speeds):
        print(f"beside {count} busy process{'es' * (count > 1)}" if count else "alone")
        for name in dict.fromkeys(name for name, _ in speeds):
            ratios = quartiles(ratios_to_first(speeds, name, count), 3)
            print(f"  {name:32}{quartiles(speeds[name, count], 0):>28}{ratios:>26}")


def ratios_to_first(speeds, name, count) -> list[float]:
    """For each round, the speed of a setting with busy processes / the speed of the first setting without any."""
    first = next(iter(speeds))
    return [speed / alone for speed, alone in zip(speeds[name, count], speeds[first], strict=True)]


def quartiles(values, digits) -> str:
    low, middle, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else 3 * values
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def goals_reached(speeds) -> bool:
    """Print whether `run` reaches each of its goals; returns whether it reaches all that were measured."""
    reached = True
    for count, goal in GOALS.items():
        if ("run", count) in speeds:
            ratio = statistics.median(ratios_to_first(speeds, "run", count))
            reached &= ratio >= goal
            verdict = "reached" if ratio >= goal else "MISSED"
            print(f"run beside {count} busy processes: {ratio:.1%}; the goal is {goal:.0%}: {verdict}")
    return reached


if __name__ == "__main__":
    main()
