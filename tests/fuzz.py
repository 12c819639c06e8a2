"""Try new examples in every property test until the time is up: `python tests/fuzz.py MINUTES`, or `make fuzz`.

A failing example is printed and kept in .hypothesis; the next run tries it first. When the bug is fixed, add the
example to its test as an `@example`.
"""

import re
import subprocess
import sys
import time


COMMAND = "-m pytest -m hypothesis --hypothesis-profile=fuzz --hypothesis-show-statistics -q".split()


def main(minutes: float) -> int:
    """Run the property tests again and again for some minutes; returns 0, or pytest's exit code if a test failed."""
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
