"""The corpus `python-docs`: documentation and docstrings installed with Python and our dependencies, as documents."""

import ast
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

from d2l_bert.tokenization.processes import in_order
from d2l_bert.tokenization.sentences import Document


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

    reference = ((f"topic {name}", prose(text)) for name, text in sorted(topics.topics.items()))
    files = itertools.chain(_standard_library(), _dependencies())
    groups = iter(lambda: list(itertools.islice(files, FILES_AT_ONCE)), [])
    of_files = itertools.chain.from_iterable(in_order(_prose_of_files, groups, processes))
    seen = set()
    for name, paragraphs in itertools.chain(reference, of_files):
        new = [paragraph for paragraph in paragraphs if paragraph not in seen and not seen.add(paragraph)]
        if new:
            yield Document(name, new)


def _prose_of_files(files):
    """The (name, paragraphs) of each source file, given as (name, path)."""
    gc.disable()  # syntax trees have no reference cycles; collecting them took 53 s instead of 21 s
    found = [(name, [p for text in docstrings(file) for p in prose(text)]) for name, file in files]
    gc.enable()
    return found


def docstrings(file: Path) -> list[str]:
    """The docstrings of a source file's module, classes and functions, in order; [] if the file cannot be parsed."""
    try:
        source = file.read_bytes()
        if b'"""' not in source and b"'''" not in source:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parser warns about invalid escape sequences in other packages
            return list(_docstrings_below(ast.parse(source)))
    except (OSError, SyntaxError, ValueError):
        return []


def _docstrings_below(node):
    """Yield the docstrings of a syntax tree's node and of the statements in the node."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text:
            yield text
    # Only statements are visited: visiting every expression would take longer than parsing.
    for child in itertools.chain(getattr(node, "body", ()), getattr(node, "orelse", ())):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.Try)):
            yield from _docstrings_below(child)


def prose(text: str) -> list[str]:
    """The paragraphs of a docstring or an .rst text that are English sentences, without code, tables and markup."""
    text = _FENCED_CODE.sub("", inspect.cleandoc(text))
    paragraphs = []
    code_depth = None  # indentation of the last paragraph if "::" ends it: more deeply indented paragraphs are code
    for block in _BLANK_LINE.split(text):
        indented = block.strip("\n").splitlines()
        lines = [line.lstrip() for line in indented]
        underlines = {n for n, line in enumerate(lines) if _UNDERLINE.match(line)}
        kept = [n for n in range(len(lines)) if not underlines & {n, n + 1}]  # no headings, and no underlines
        indented, lines = [indented[n] for n in kept], [lines[n] for n in kept]
        if not lines:
            continue
        depth = min([len(line) - len(text) for line, text in zip(indented, lines, strict=True)])
        if code_depth is not None and depth > code_depth:
            continue
        code_depth = depth if lines[-1].rstrip().endswith("::") else None
        if _ARGUMENT_LIST.match(lines[0]):
            continue
        words = _words(indented, lines)
        if _are_prose(words):
            paragraphs.append(" ".join(words))
    return paragraphs


def _words(indented, lines):
    """
    The words of a paragraph, without markup; [] if a line is code or belongs to a table.

    Args:
        indented: the paragraph's lines.
        lines: the same lines without indentation.
    """
    kept = []
    for indented_line, line in zip(indented, lines, strict=True):
        if _CODE_OR_TABLE.match(line):
            return []
        if not _NOT_PROSE.match(indented_line):
            kept.append(_BULLET.sub("", line.rstrip()))
    text = " ".join(kept)
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text.split()


def _are_prose(words):
    """Whether words are English sentences: five words or more, none too long, few symbols, an end of a sentence."""
    if len(words) < 5 or max(map(len, words)) > 60:
        return False
    paragraph = " ".join(words)
    symbols = paragraph.encode("ascii", "replace").translate(None, _LETTERS_AND_SPACE)
    return len(symbols) <= 0.15 * len(paragraph) and any(mark in paragraph for mark in ".?!")


_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_FENCED_CODE = re.compile(r"```.*?(```|\Z)", re.DOTALL)
_LETTERS_AND_SPACE = (string.ascii_letters + " ").encode()

# These patterns match lines without indentation; `_NOT_PROSE` also matches an indented " : " with nothing before it.
_CODE_OR_TABLE = re.compile(r">>>|\.\.\.|In \[|[|+#]|={3,}\s+=|-{3,}\s+-|\$ ")
_ARGUMENT_LIST = re.compile(
    r"(Args|Arguments|Attributes|Parameters|Params|Keyword args|Inputs?)\s*:|[\w.*`]+\s*\(.*\)\s*:", re.IGNORECASE
)
_UNDERLINES = "=-~^\"'*#`"
_UNDERLINE = re.compile(rf"([{re.escape(_UNDERLINES)}])\1{{2,}}\s*$")
_NOT_PROSE = re.compile(r"\s*(\.\. |@\w|[\w, *]+ : )")  # directives, decorators, numpy's "name : type"
_BULLET = re.compile(r"^[*+-] |^\d+\. ?(?=[A-Z])")

# Patterns of markup, and what replaces them.
_MARKUP = [
    (re.compile(r":[\w:+-]+:`~?([^`<]*?)\s*(?:<[^`]*>)?`"), r"\1"),  # :class:`text <target>`
    (re.compile(r"\[`?~?([^\]`]+)`?\](?:\([^)]*\))?"), r"\1"),  # [`text`](target)
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_*"), r"\1"),  # `text <target>`_
    (re.compile(r":(?:param|type|returns?|rtype|raises?|arg)\s*([^:]*):"), r"\1"),
    (re.compile(r"</?[a-zA-Z][^>]*>"), ""),
    (re.compile(r"`{1,2}~?([^`]*)`{1,2}_*"), r"\1"),
    (re.compile(r"\*\*([^*]+)\*\*|(?<!\w)\*([^*\s][^*]*)\*(?!\w)"), r"\1\2"),
    (re.compile(r"::$"), ":"),
]


def _standard_library():
    """Yield (name, path) of each source file of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if not skipped.intersection(parts):
            yield ".".join(parts).removesuffix(".py"), file


def _dependencies():
    """Yield (name, path) of each source file of the installed packages that d2l-bert requires."""
    for distribution in required_distributions("d2l-bert"):
        files = sorted(file for file in distribution.files or [] if file.suffix == ".py")
        for file in files:
            if not {"test", "tests", "testing", ".."}.intersection(file.parts):
                yield ".".join(file.parts).removesuffix(".py"), Path(file.locate())


def required_distributions(name):
    """
    The installed distributions that a distribution requires, directly or indirectly, sorted by name.

    Requirements of extras, of other platforms and of other Python versions are left out, even if installed, so
    that the corpus does not depend on other packages of the environment.
    """
    required, pending = {}, [name]
    while pending:
        for requirement in map(Requirement, importlib.metadata.requires(pending.pop()) or []):
            key = canonicalize_name(requirement.name)
            is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not is_needed or key in required:
                continue
            try:
                required[key] = importlib.metadata.distribution(key)
            except importlib.metadata.PackageNotFoundError:  # the package was installed without its dependencies
                continue
            pending.append(key)
    return [required[key] for key in sorted(required)]
