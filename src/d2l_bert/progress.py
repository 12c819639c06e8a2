"""Progress of long work on stderr."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator

from tqdm.auto import tqdm


def watched(
    items: Iterable, what: str, total: int | None = None, size: Callable[[object], int] | None = None
) -> Iterator:
    """Pass items on with a bar on a terminal; elsewhere say how many documents there were, and how long they took.

    Args:
        size: documents in an item, if it is not one.
    """
    start, count = time.monotonic(), 0
    bar = tqdm(total=total, desc=what, unit=" documents", leave=False, disable=not sys.stderr.isatty())
    with bar:
        for item in items:
            yield item
            done = size(item) if size else 1
            count += done
            bar.update(done)
    say(f"{what}: {count:,} documents in {time.monotonic() - start:.0f} s")


def say(line: str) -> None:
    """One line for whoever watches, without breaking a bar."""
    tqdm.write(line, file=sys.stderr)
