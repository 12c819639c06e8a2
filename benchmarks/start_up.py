"""Start-up time: what importing d2l_bert adds to a program, and how long `d2l-bert --help` takes.

    python -m benchmarks.start_up [--repetitions 9]

Each time is the wall-clock time of a new process, interpreter included. The processes take turns, and added time is
the difference within a turn. The goals: importing d2l_bert adds less than 10 % to the import of the parts of
Transformers that every model needs, and `--help` adds less than 0.3 s to the import of d2l_bert.
"""

import argparse
import statistics
import subprocess
import sys
import time

from benchmarks.mlm_head import heading, positive


TRANSFORMERS = "from transformers import PreTrainedModel, AutoModelForMaskedLM"
BOTH = f"{TRANSFORMERS}; import d2l_bert"
OURS = "import d2l_bert"
HELP = "d2l-bert --help"
COMMANDS = {
    TRANSFORMERS: ["-c", TRANSFORMERS],
    BOTH: ["-c", BOTH],
    OURS: ["-c", OURS],
    HELP: ["-m", "d2l_bert", "--help"],
}
MOST_ADDED, MOST_FOR_HELP = 0.10, 0.3  # share of the import of Transformers; seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=positive, default=9, help="processes of each kind")
    arguments = parser.parse_args()
    print(heading("cpu"), flush=True)
    taken = take_turns(COMMANDS, arguments.repetitions)
    for what, seconds in taken.items():
        print(f"  {in_seconds(seconds)}  {what}")
    added = [both / alone - 1 for both, alone in zip(taken[BOTH], taken[TRANSFORMERS], strict=True)]
    beyond = [helped - imported for helped, imported in zip(taken[HELP], taken[OURS], strict=True)]
    share, more = statistics.median(added), statistics.median(beyond)
    reached = f"{MOST_ADDED:.0%}: {'reached' if share < MOST_ADDED else 'MISSED'}"
    print(f"import d2l_bert adds {share:.1%} ({min(added):.1%} to {max(added):.1%}); the goal is below {reached}")
    reached = f"{MOST_FOR_HELP:g} s: {'reached' if more < MOST_FOR_HELP else 'MISSED'}"
    print(f"--help adds {in_seconds(beyond)} to the import; the goal is below {reached}")


def take_turns(commands, repetitions) -> dict[str, list[float]]:
    """The seconds of each command in each turn. The first turn, which may compile or fill caches, is left out."""
    taken = {what: [] for what in commands}
    for turn in range(repetitions + 1):
        for what, arguments in list(commands.items())[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            taken[what].append(time.perf_counter() - start)
    return {what: seconds[1:] for what, seconds in taken.items()}


def in_seconds(values):
    return f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
