"""The corpus `python-docs`: documentation and docstrings installed with Python and our dependencies, as documents."""

import ast
import contextlib
import gc
import importlib.metadata
import inspect
import itertools
import re
import string
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from d2l_bert.tokenization.documents import Document
from d2l_bert.tokenization.processes import in_order


PYTHON_DOCS = "python-docs"  # the name of this corpus, in place of a path

# Files that a process parses in one call: some 50 ms of work, so that sending names and paragraphs costs little.
FILES_AT_ONCE = 32


def python_docs(processes: int = 1) -> Iterator[Document]:
    """
    The Python language reference, and the docstrings of the standard library and of this package's dependencies.

    A document is one topic of the reference, or the docstrings of one source file. Code, tables, markup and repeated
    paragraphs are dropped. Source files are parsed, never imported.

    Args:
        processes: how many processes parse the source files; 1 parses in this process. The documents are the same.

    Raises:
        UserError: a process was killed, or cannot be started.
    """
    from pydoc_data import topics

    reference = (prose(text) for _, text in sorted(topics.topics.items()))
    files = _source_files()
    groups = [files[first : first + FILES_AT_ONCE] for first in range(0, len(files), FILES_AT_ONCE)]
    of_files = itertools.chain.from_iterable(in_order(_prose_of_files, groups, processes))
    seen = set()
    for paragraphs in itertools.chain(reference, of_files):
        new = [paragraph for paragraph in dict.fromkeys(paragraphs) if paragraph not in seen]
        seen.update(new)
        if new:
            yield Document(new)


# ---------------------------------------------------------------------------------------------------------------------
# The source files and their docstrings


# Folders of tests, data, programs and other packages, among the source files.
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "testing",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "..",
}


def _source_files():
    """The path of each source file of the standard library, and of the packages that d2l-bert requires."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [(file.relative_to(root), file) for file in sorted(root.rglob("*.py"))]
    for distribution in required_distributions("d2l-bert"):
        files = sorted(file for file in distribution.files or [] if file.suffix == ".py")
        found += [(file, Path(file.locate())) for file in files]
    return [file for name, file in found if not SKIPPED_FOLDERS.intersection(name.parts)]


def required_distributions(name: str) -> list[importlib.metadata.Distribution]:
    """
    The installed distributions that a distribution requires, directly or indirectly, sorted by name.

    Requirements of extras, of other platforms and of other Python versions are left out, even if installed, so
    that the corpus does not depend on other packages of the environment.
    """
    required = {}
    pending = [name]
    while pending:
        for requirement in map(Requirement, importlib.metadata.requires(pending.pop()) or []):
            key = canonicalize_name(requirement.name)
            is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if is_needed and key not in required:
                # A package may have been installed without its dependencies.
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    required[key] = importlib.metadata.distribution(key)
                    pending.append(key)
    return [required[key] for key in sorted(required)]


def _prose_of_files(files):
    """The paragraphs of each source file."""
    gc.disable()  # syntax trees have no reference cycles; collecting them took 53 s instead of 21 s
    found = []
    for file in files:
        paragraphs = []
        for text in docstrings(file):
            paragraphs += prose(text)
        found.append(paragraphs)
    gc.enable()
    return found


def docstrings(file: Path) -> list[str]:
    """The docstrings of a source file's module, classes and functions, in order; [] if the file cannot be parsed."""
    # The parser warns about invalid escape sequences in other packages.
    with contextlib.suppress(OSError, SyntaxError, ValueError), warnings.catch_warnings(action="ignore"):
        source = file.read_bytes()
        if b'"""' in source or b"'''" in source:
            return list(_docstrings_below(ast.parse(source)))
    return []


def _docstrings_below(node):
    """Yield the docstrings of a syntax tree's node and of the statements in the node."""
    if not isinstance(node, (ast.If, ast.Try)) and (text := ast.get_docstring(node)):
        yield text
    # Only statements are visited: visiting every expression would take longer than parsing.
    for child in [*node.body, *getattr(node, "orelse", ())]:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.Try)):
            yield from _docstrings_below(child)


# ---------------------------------------------------------------------------------------------------------------------
# From a docstring to paragraphs


def prose(text: str) -> list[str]:
    """The paragraphs of a docstring or an .rst text that are English sentences, without code, tables and markup."""
    paragraphs = []
    code_depth = None  # indentation of the last paragraph if "::" ends it: more deeply indented paragraphs are code
    text = _HEADING.sub("", _FENCED_CODE.sub("", inspect.cleandoc(text)))
    for block in filter(str.strip, _BLANK_LINE.split(text)):
        depth = min(map(len, _INDENTATION.findall(block)))
        if code_depth is None or depth <= code_depth:
            code_depth = depth if block.rstrip().endswith("::") else None
            is_prose = not _NO_PROSE.search(block)
            for pattern, replacement in _MARKUP.items():
                block = re.sub(pattern, replacement, block)
            words = block.split()
            if is_prose and _are_prose(words):
                paragraphs.append(" ".join(words))
    return paragraphs


def _are_prose(words):
    """Whether words are English sentences: five words or more, none too long, few symbols, an end of a sentence."""
    paragraph = " ".join(words)
    symbols = paragraph.encode("ascii", "replace").translate(None, _LETTERS_AND_SPACE)
    if len(words) < 5 or max(map(len, words)) > 60:
        return False
    return len(symbols) <= 0.15 * len(paragraph) and any(mark in paragraph for mark in ".?!")


_LETTERS_AND_SPACE = (string.ascii_letters + " ").encode()
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_INDENTATION = re.compile(r"^[^\S\n]*(?=\S)", re.MULTILINE)
_FENCED_CODE = re.compile(r"```.*?(```|\Z)", re.DOTALL)

# A line of symbols, and the heading above it.
_HEADING = re.compile(r"""^(?:.*\S.*\n)?[^\S\n]*([-=~^"'*#`])\1{2,}[^\S\n]*$""", re.MULTILINE)

# A paragraph with such a line is code or a table, or describes arguments if it begins with such a line.
_NO_PROSE = re.compile(
    r"^\s*(?:>>>|\.\.\.|In \[|[|+#]|={3,}\s+=|-{3,}\s+-|\$ )"
    r"|\A\s*(?:(?i:Args|Arguments|Attributes|Parameters|Params|Keyword args|Inputs?)\s*:|[\w.*`]+\s*\(.*\)\s*:)",
    re.MULTILINE,
)

# Patterns of markup, in this order, and what replaces them.
_MARKUP = {
    r"(?m)^\s*(?:\.\. |@\w|[\w, *]+ : ).*": "",  # directives, decorators, numpy's "name : type"
    r"(?m)^\s*(?:[*+-] |\d+\. ?(?=[A-Z]))": "",  # bullets
    r":[\w:+-]+:`~?([^`<]*?)\s*(?:<[^`]*>)?`": r"\1",  # :class:`text <target>`
    r"\[`?~?([^\]`]+)`?\](?:\([^)]*\))?": r"\1",  # [`text`](target)
    r"`([^`<]+?)\s*<[^`>]*>`_*": r"\1",  # `text <target>`_
    r":(?:param|type|returns?|rtype|raises?|arg)\s*([^:]*):": r"\1",
    r"</?[a-zA-Z][^>]*>": "",
    r"`{1,2}~?([^`]*)`{1,2}_*": r"\1",
    r"\*\*([^*]+)\*\*|(?<!\w)\*([^*\s][^*]*)\*(?!\w)": r"\1\2",
    r"::\s*\Z": ":",
}
