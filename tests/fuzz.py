"""Draw new examples for every property test until time is up: `python tests/fuzz.py MINUTES`; `make fuzz` runs it.

A failing example is printed, and kept in .hypothesis, from where it is tried first the next time. Mended, it belongs
beside its test as an `@example`.
"""

import re
import subprocess
import sys
import time


COMMAND = "-m pytest -m hypothesis --hypothesis-profile=fuzz --hypothesis-show-statistics -q".split()


def main(minutes: float) -> int:
    """Run the property tests again and again; returns 0, or pytest's exit code where one failed."""
    end, examples, rounds = time.monotonic() + 60 * minutes, 0, 0
    while time.monotonic() < end:
        done = subprocess.run([sys.executable, *COMMAND], stdout=subprocess.PIPE, text=True)
        examples += sum(map(int, re.findall(r"- (\d+) passing", done.stdout)))
        rounds += 1
        print(f"{examples:,} examples in {rounds} rounds", flush=True)
        if done.returncode:
            print(done.stdout)
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
