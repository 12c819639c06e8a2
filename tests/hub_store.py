"""The store of the local Hub: files, commits, branches and tags of its repositories."""

import codecs
import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import PurePosixPath

from hub_answers import Refusal


@dataclass(frozen=True)
class Blob:
    """A file's content, kept in Git, or in the large file storage with a pointer to it in Git."""

    data: bytes
    lfs: bool = False

    @cached_property
    def sha256(self):
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def pointer(self):
        lines = "version https://git-lfs.github.com/spec/v1", f"oid sha256:{self.sha256}", f"size {len(self.data)}", ""
        return "\n".join(lines).encode()

    @cached_property
    def oid(self):
        """Git's own identifier of the blob."""
        content = self.pointer if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Commit:
    sha: str
    parent: str | None
    files: dict[str, Blob]
    author: str
    title: str
    message: str = ""
    date: str = field(default_factory=lambda: now())


@dataclass
class Repository:
    id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # full name of a branch, tag or pull request -> commit id
    objects: dict[str, bytes] = field(default_factory=dict)  # large files, by sha256

    @property
    def owner(self):
        return self.id.split("/")[0]

    def ref(self, revision) -> str | None:
        """The full name of a branch, tag or pull request."""
        names = (f"refs/heads/{revision}", f"refs/tags/{revision}", revision)
        return next((name for name in names if name in self.refs), None)

    def at(self, revision) -> Commit:
        sha = self.refs.get(self.ref(revision), revision)
        if sha not in self.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[sha]

    def history(self, revision) -> list[Commit]:
        found = [self.at(revision)]
        while found[-1].parent:
            found.append(self.commits[found[-1].parent])
        return found

    def under(self, prefix) -> dict[str, str]:
        return {name.removeprefix(prefix): sha for name, sha in self.refs.items() if name.startswith(prefix)}

    def add_commit(self, ref, parent, files, author, title, message="") -> Commit:
        tree = sorted((path, blob.oid) for path, blob in files.items())
        sha = hashlib.sha1(repr((self.id, len(self.commits), parent, title, tree)).encode()).hexdigest()
        self.commits[sha] = Commit(sha, parent, files, author, title, message)
        self.refs[ref] = sha
        return self.commits[sha]


LARGE = 10 * 2**20
ENDINGS = (
    "7z arrow bin bz2 ckpt gz h5 model msgpack npy npz onnx parquet pb pickle pkl pt pth rar safetensors tar xz zip"
)
# The files that the Hub puts into every new repository.
GITATTRIBUTES = "".join(f"*.{ending} filter=lfs diff=lfs merge=lfs -text\n" for ending in ENDINGS.split())


def is_large(attributes: str, path, size, sample: bytes) -> bool:
    """Whether a file goes to the large file storage: by .gitattributes, by its size, or because it is not text."""
    patterns = [line.split()[0] for line in attributes.splitlines() if "filter=lfs" in line]
    if size > LARGE or any(fnmatchcase(PurePosixPath(path).name, pattern) for pattern in patterns):
        return True
    try:
        return "\0" in codecs.getincrementaldecoder("utf-8")().decode(sample)  # the sample may end inside a character
    except UnicodeDecodeError:
        return True


def now():
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
