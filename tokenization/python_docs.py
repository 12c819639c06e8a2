"""The embedded corpus: the documentation that every Python with this package already has."""

import ast
import gc
import importlib.metadata
import inspect
import itertools
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from d2l_bert.tokenization.documents import Document


def python_docs() -> Iterator[Document]:
    """
    The Python language reference and the docstrings of the standard library and of this package's dependencies.

    A topic of the reference is a document, and so are the docstrings of one source file. Code, tables, markup and
    paragraphs seen before are dropped. Sources are parsed, never imported.
    """
    from pydoc_data import topics

    seen = set()
    for name, text in sorted(topics.topics.items()):
        yield from _new_prose(f"topic {name}", [text], seen)
    for name, file in itertools.chain(_standard_library(), _dependencies()):
        yield from _new_prose(name, docstrings(file), seen)


def docstrings(file: Path) -> list[str]:
    """The docstrings of a source file's module, classes and functions, in order; none if it cannot be parsed."""
    try:
        source = file.read_bytes()
        if b'"""' not in source and b"'''" not in source:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sources of others: their escape sequences are not ours to judge
            gc.disable()  # a tree has no cycles, and looking for some takes longer than parsing: 53 s against 21 s
            return list(_docstrings_below(ast.parse(source)))
    except (OSError, SyntaxError, ValueError):
        return []
    finally:
        gc.enable()


def _docstrings_below(node):
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text:
            yield text
    # Statements only: walking every expression would take longer than parsing.
    for child in itertools.chain(getattr(node, "body", ()), getattr(node, "orelse", ())):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.Try)):
            yield from _docstrings_below(child)


def prose(text: str) -> list[str]:
    """The paragraphs of English sentences in a docstring or an .rst text, without code, tables and markup."""
    text = re.sub(r"```.*?(```|\Z)", "", inspect.cleandoc(text), flags=re.DOTALL)
    paragraphs = []
    code_depth = None  # indentation of the paragraph that announced a literal block with "::"
    for block in re.split(r"\n[^\S\n]*\n", text):
        lines = block.strip("\n").splitlines()
        underlines = {number for number, line in enumerate(lines) if _UNDERLINE.match(line)}
        lines = [line for number, line in enumerate(lines) if not underlines & {number, number + 1}]
        if not lines:
            continue
        depth = min(len(line) - len(line.lstrip()) for line in lines)
        if code_depth is not None and depth > code_depth:
            continue
        code_depth = depth if lines[-1].rstrip().endswith("::") else None
        if _ARGUMENT_LIST.match(lines[0]) or any(_CODE_OR_TABLE.match(line) for line in lines):
            continue
        kept = (_BULLET.sub("", line.strip()) for line in lines if not _NOT_PROSE.match(line))
        paragraph = " ".join(_strip_markup(" ".join(kept)).split())
        if _is_prose(paragraph):
            paragraphs.append(paragraph)
    return paragraphs


def _new_prose(name, texts, seen):
    paragraphs = [p for text in texts for p in prose(text) if p not in seen and not seen.add(p)]
    if paragraphs:
        yield Document(name, paragraphs)


_CODE_OR_TABLE = re.compile(r"\s*(>>>|\.\.\.|In \[|[|+#]|={3,}\s+=|-{3,}\s+-|\$ )")
_ARGUMENT_LIST = re.compile(
    r"\s*((Args|Arguments|Attributes|Parameters|Params|Keyword args|Inputs?)\s*:|[\w.*`]+\s*\(.*\)\s*:)", re.IGNORECASE
)
_UNDERLINE = re.compile(r"\s*([=\-~^\"'*#`])\1{2,}\s*$")
_NOT_PROSE = re.compile(r"\s*(\.\. |@\w|[\w, *]+ : )")  # directives, decorators, numpy's "name : type"
_BULLET = re.compile(r"^[*+-] |^\d+\. ?(?=[A-Z])")
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


def _strip_markup(text):
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text


def _is_prose(paragraph):
    words = paragraph.split()
    symbols = len(re.findall(r"[^A-Za-z\s]", paragraph))
    return (
        len(words) >= 5
        and symbols <= 0.15 * len(paragraph)
        and any(mark in paragraph for mark in ".?!")
        and max(map(len, words)) <= 60
    )


def _standard_library():
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if not skipped.intersection(parts):
            yield ".".join(parts).removesuffix(".py"), file


def _dependencies():
    for distribution in required_distributions("d2l-bert"):
        files = sorted(file for file in distribution.files or [] if file.suffix == ".py")
        for file in files:
            if not {"test", "tests", "testing", ".."}.intersection(file.parts):
                yield ".".join(file.parts).removesuffix(".py"), Path(file.locate())


def required_distributions(name):
    """The installed distributions that `name` needs, directly or not, without extras, sorted by name."""
    found, waiting = {}, [name]
    while waiting:
        for requirement in map(Requirement, importlib.metadata.requires(waiting.pop()) or []):
            required = canonicalize_name(requirement.name)
            # What belongs to an extra, or to another platform or Python, may be installed for something else.
            is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not is_needed or required in found:
                continue
            try:
                found[required] = importlib.metadata.distribution(required)
            except importlib.metadata.PackageNotFoundError:  # the package was installed without its dependencies
                continue
            waiting.append(required)
    return [found[key] for key in sorted(found)]
