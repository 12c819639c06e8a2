"""`Account`: what a person should know of a text before a model is trained on it; the lines that say so."""

import logging
from collections.abc import Sequence
from pathlib import Path

from d2l_bert.messages import counted, printable, short_name, shortened, writing
from d2l_bert.tokenization.text_store import TextStore


logger = logging.getLogger(__name__)

# The file in a run's or a prepared folder that has all lines. It holds text, and is never published.
ACCOUNT_FILE = "reading.txt"

# A person reads at a glance what is logged before training begins: at most 14 lines of at most 120 characters.
MOST_LINES = 14
WIDTH = 120

# Of these, the lines that follow the remarks: counts of tokens, second loss, start from bigrams, loss before training.
LATER_LINES = 4

# Characters that are shown of a document's first and last sentence.
SHOWN_OF_BEGINNING = 60
SHOWN_OF_END = 30


class Account:
    """
    Lines about a text: the most important are logged, each cut to `WIDTH`, all are kept.

    Args:
        is_whole: log all of them, uncut.
    """

    def __init__(self, is_whole: bool = False):
        self.is_whole = is_whole
        self.lines = []
        self._logged = 0
        self._remarks = []

    def say(self, line: str) -> None:
        """Keep and log a line."""
        self.lines.append(line)
        self._log(line, logging.INFO)

    def keep(self, line: str) -> None:
        """Keep a line, which is not logged."""
        self.lines.append(line)
        if self.is_whole:
            self._log(line, logging.INFO)

    def remark(self, line: str) -> None:
        """Keep a line about what is likely to be wrong, the most important first; `log_remarks` logs it."""
        self.lines.append(line)
        self._remarks.append(line)

    def log_remarks(self) -> None:
        """Log the first remarks, as many as fit into `MOST_LINES`, and the number of the others."""
        room = max(1, MOST_LINES - LATER_LINES - self._logged)
        count = len(self._remarks)
        shown = count if count <= room or self.is_whole else room - 1
        for line in self._remarks[:shown]:
            self._log(line, logging.WARNING)
        if shown < count:
            self._log(f"{count - shown} more remarks: see {ACCOUNT_FILE}, or --full_account", logging.WARNING)
        self._remarks = []

    def _log(self, line, level):
        self._logged += 1
        logger.log(level, line if self.is_whole else shortened(line, WIDTH))


def counts_line(name: str, reading: dict[str, int]) -> str:
    """How much was read, and how most of it was read (`TextStore.reading`), in one line."""
    ways = {key: count for key, count in reading.items() if key.startswith(("files ", "rows ")) and "," in key}
    counts = [counted(reading.get(f"{unit}s", 0), unit) for unit in ("document", "sentence", "character")]
    way = max(ways, key=ways.get) if ways else ""
    return f"{short_name(name)}: {', '.join(counts)}{f'; {way}' if way else ''}"


def odd_counts(reading: dict[str, int]) -> list[str]:
    """What was passed over, cut or read in several ways, in a few words each."""
    ways = [what for what in reading if what.startswith(("files ", "rows ")) and "," in what]
    usual = {"documents", "paragraphs", "sentences", "characters", *(ways if len(ways) == 1 else [])}
    return [f"{count:,} {what}" for what, count in reading.items() if what not in usual]


def document_lines(store: TextStore) -> list[str]:
    """The beginning of the first document and of one in the middle, and the end of the first; [] of no document."""
    lines = []
    count = store.count_as_read()
    for document in dict.fromkeys((0, count // 2)) if count else ():
        first, last = store.ends_as_read(document)
        end = "" if lines else f' ... "{_ending(last)}"'
        lines.append(f'document {document + 1:,}: "{shortened(first, SHOWN_OF_BEGINNING)}"{end}')
    return lines


def _ending(text):
    return text if len(text) <= SHOWN_OF_END else f"...{text[3 - SHOWN_OF_END :]}"


def packed(label: str, items: Sequence[str], most_lines: int) -> list[str]:
    """Lines of at most `WIDTH` characters with these items, of which those that do not fit are left out."""
    lines = []
    line = ""
    for item in items:
        longer = f"{line}; {item}" if line else f"{label}: {item}"
        if line and len(longer) > WIDTH:
            lines.append(line)
            longer = f"{label}: {item}"
        line = longer
    return [*lines, line][:most_lines] if line else []


def write_account(folder: Path, lines: Sequence[str]) -> None:
    """
    Write all lines of an account into a folder.

    Raises:
        UserError: it cannot be written.
    """
    with writing(folder):
        (folder / ACCOUNT_FILE).write_text("".join(f"{printable(line)}\n" for line in lines), encoding="utf-8")
