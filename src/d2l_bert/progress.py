"""Progress bars for long work, and the logging handlers with which a command shows the package's messages."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from d2l_bert.errors import launched_rank


logger = logging.getLogger(__name__)

# The parent of all loggers of this package: each module's logger has the module's name (`d2l_bert.training.pretrain`).
PACKAGE = "d2l_bert"

# The logger for the report at the end of a run. A command shows the report on stdout, all other messages on stderr.
report = logging.getLogger(f"{PACKAGE}.report")


def counted(count: int, one: str, more: str | None = None) -> str:
    """
    A number with its unit: "1 document", "1,000 documents".

    Args:
        one, more: the unit's singular and plural; without `more`, the plural is the singular with an "s".
    """
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and three dots if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def with_progress(
    items: Iterable,
    label: str,
    total: int | None = None,
    documents_in: Callable[[object], int] | None = None,
    unit: str = "document",
) -> Iterator:
    """
    Yield the items, with a progress bar if stderr is a terminal; then log the number of documents and the time.

    Args:
        label: what is done with the items, such as "reading books".
        total: number of documents, if it is known.
        documents_in: returns the number of documents in an item; without it an item is a document.
        unit: what a document is called, such as "line".
    """
    start, count = time.monotonic(), 0
    with progress_bar(label, total, f"{unit}s") as bar:
        for item in items:
            yield item
            done = documents_in(item) if documents_in else 1
            count += done
            bar.update(done)
    logger.info(f"{label}: {counted(count, unit)} in {time.monotonic() - start:.0f} s")


def progress_bar(label: str, total: int | None, unit: str) -> tqdm:
    """
    A progress bar to call `update` on, in a `with` block; not shown unless stderr is a terminal.

    Args:
        label: what is done.
        total: how many units there are.
        unit: what is counted, such as "pairs".
    """
    return tqdm(total=total, desc=label, unit=f" {unit}", leave=False, disable=not sys.stderr.isatty())


@contextlib.contextmanager
def messages_shown() -> Iterator[None]:
    """
    Within the block, write the package's log messages to stderr, without a prefix, and a run's report to stdout.

    Only commands use this. A program that calls the package configures `logging` itself.
    """
    messages = logging.getLogger(PACKAGE)
    handlers = {messages: logging.StreamHandler(sys.stderr), report: logging.StreamHandler(sys.stdout)}
    previous = {logger: (logger.level, logger.propagate) for logger in handlers}
    for logger, handler in handlers.items():
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR if launched_rank() else logging.INFO)  # rank 0 speaks for all
        logger.propagate = False
    try:
        with logging_redirect_tqdm([messages]):  # a message gets a line of its own above a progress bar
            yield
    finally:
        for logger, handler in handlers.items():
            logger.removeHandler(handler)
            level, logger.propagate = previous[logger]
            logger.setLevel(level)
