"""Progress of long work, and how a command shows the package's messages beside its bars."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from d2l_bert.errors import UserError


logger = logging.getLogger(__name__)

# Every module has a logger of its own name, below this one.
PACKAGE = "d2l_bert"

# What a run has to tell when it is over. A command shows it on stdout.
report = logging.getLogger(f"{PACKAGE}.report")


def watched(
    items: Iterable, what: str, total: int | None = None, size: Callable[[object], int] | None = None
) -> Iterator:
    """Pass items on, with a bar on a terminal; then say how many documents there were, and how long they took.

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
    logger.info(f"{what}: {count:,} documents in {time.monotonic() - start:.0f} s")


class _ReportHandler(logging.StreamHandler):
    """Shows a run's report. What cannot be shown is not passed over, as logging would."""

    def handleError(self, record):
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            raise error
        raise UserError(
            f"stdout: the report cannot be written ({error.strerror}); what the run has made is complete all the same"
        ) from None


@contextlib.contextmanager
def messages_shown() -> Iterator[None]:
    """
    Within the block show the package's messages on stderr, as they are, and a run's report on stdout.

    For commands. A program that calls the package sets up the standard library's logging as it likes.
    """
    messages = logging.getLogger(PACKAGE)
    handlers = {messages: logging.StreamHandler(sys.stderr), report: _ReportHandler(sys.stdout)}
    before = {logger: (logger.level, logger.propagate) for logger in handlers}
    for logger, handler in handlers.items():
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        with logging_redirect_tqdm([messages]):  # a message does not break a bar
            yield
    finally:
        for logger, handler in handlers.items():
            logger.removeHandler(handler)
            level, logger.propagate = before[logger]
            logger.setLevel(level)


def are_messages_shown() -> bool:
    """Whether this process is in a block of `messages_shown`."""
    return not logging.getLogger(PACKAGE).propagate
