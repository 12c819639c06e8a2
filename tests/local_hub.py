"""A small Hugging Face Hub over HTTP, in memory, for tests of what is published and what is fetched.

The clients are the real ones (huggingface_hub, Transformers, the `hf` command); `environment` tells them where it is:

    with LocalHub({"hf_made_up": "someone"}) as hub:
        subprocess.run([sys.executable, "publish.py"], env=environment(hub, home, "hf_made_up"), check=True)
        assert "README.md" in hub.files("someone/bert")

Models and datasets have commits, branches, tags and pull requests, and collections list them. There are no Spaces,
organizations, gates, merges or Xet, and long lists come in one page. What is not served is answered 501, which no
client tries again. It follows what the clients ask for: that the public Hub still answers so, it cannot prove.

It needs the standard library and PyYAML, which huggingface_hub brings.
"""

import base64
import codecs
import hashlib
import json
import os
import re
import socket
import socketserver
import sys
import threading
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cached_property
from http.server import BaseHTTPRequestHandler
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, unquote

import yaml


TOKEN = "hf_made_up_for_someone"


def environment(hub, home: Path, token: str | None) -> dict:
    """The variables of a process whose Hub this is: whatever it is told elsewhere about Hubs and tokens is gone."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))
    }
    told = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",  # with it on, uploads ask for a second protocol, whatever the server says
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        "DISABLE_SAFETENSORS_CONVERSION": "1",  # it would hand the token to a service elsewhere
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    return {**kept, **told, **({"HF_TOKEN": token} if token else {})}


@dataclass
class Request:
    """One request: the path as sent, with its query; the token it carried; what was answered, None for nothing."""

    method: str
    path: str
    token: str | None = None
    status: int | None = None


class LocalHub:
    """The server, and a look into its store from outside; `users` maps tokens to names.

    Large files are kept by a second server, as on the public Hub: the token must not travel there.
    """

    def __init__(self, users: dict[str, str]):
        self.users = dict(users)
        self.requests: list[Request] = []
        # Asked (method, path) before each request is served. None: serve it. A number: answer this status.
        # 0: drop the connection without an answer. -1: serve it, and then drop the connection without an answer.
        self.fail: Callable[[str, str], int | None] | None = None
        self.endpoint = self.storage = ""
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.collections: dict[str, dict] = {}
        self.links: dict[str, tuple] = {}
        self._ports = [0, 0]
        self._servers: list[_Server] = []
        self._lock = threading.RLock()

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    def start(self):
        """Serve: on free ports the first time, on the same ones after."""
        self._servers = [_Server(self, port) for port in self._ports]
        self._ports = [server.server_address[1] for server in self._servers]
        self.endpoint, self.storage = (f"http://127.0.0.1:{port}" for port in self._ports)
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self):
        """Serve nobody any more, not even who is connected. What is stored stays."""
        with self._lock:
            servers, self._servers = self._servers, []
        for server in servers:
            server.shutdown()
            server.server_close()
        for server in servers:  # last, as whoever waits for an answer may start it again
            server.close_connections()

    def files(self, repo_id, revision="main", kind="model") -> dict[str, bytes]:
        with self._lock:
            return {path: blob.data for path, blob in self.repositories[kind, repo_id].at(revision).files.items()}

    def commits(self, repo_id, revision="main", kind="model") -> list[str]:
        """Newest first."""
        with self._lock:
            return [commit.sha for commit in self.repositories[kind, repo_id].history(revision)]

    def tags(self, repo_id, kind="model") -> dict[str, str]:
        with self._lock:
            return self.repositories[kind, repo_id].under("refs/tags/")

    def branches(self, repo_id, kind="model") -> dict[str, str]:
        with self._lock:
            return self.repositories[kind, repo_id].under("refs/heads/")

    def is_private(self, repo_id, kind="model") -> bool:
        return self.repositories[kind, repo_id].private

    def answer(self, server, request, headers, body) -> "Answer | None":
        """What a request gets; None if its connection is to be dropped."""
        self.requests.append(request)
        failure = self.fail(request.method, request.path) if self.fail else None
        if failure == 0:
            return None
        if failure is not None and failure > 0:
            return Refusal(failure, "This request was made to fail.").answer()
        with self._lock:
            if server not in self._servers:  # stopped in the meantime
                return None
            try:
                answer = _serve(self, Call(self, request, headers, body))
            except Refusal as refusal:
                answer = refusal.answer()
            except Exception:
                traceback.print_exc()
                answer = Refusal(501, traceback.format_exc()).answer()
        return None if failure == -1 else answer

    def visible(self, call, kind, repo_id) -> "Repository":
        """A repository, if the one who asks may know of it."""
        repository = self.repositories.get((kind, repo_id))
        if repository and (not repository.private or call.user == repository.owner):
            return repository
        if call.user is None:
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        raise Refusal(404, "Repository not found", "RepoNotFound")

    def link(self, *what) -> str:
        """An address that needs no token, of one object to be put or got."""
        key = uuid.uuid4().hex
        self.links[key] = what
        return f"{self.storage}/storage/{key}"


# What is stored


@dataclass(frozen=True)
class Blob:
    """A file's content, in Git or in the large file storage, where Git has a pointer to it."""

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
        """Git's own name of it."""
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
    date: str = field(default_factory=lambda: _now())


@dataclass
class Repository:
    kind: str
    id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # the full name of a branch, a tag, a pull request -> a commit
    objects: dict[str, bytes] = field(default_factory=dict)  # large files, by sha256

    @property
    def owner(self):
        return self.id.split("/")[0]

    @property
    def place(self):
        """Its path on the site."""
        return self.id if self.kind == "model" else f"{self.kind}s/{self.id}"

    def ref(self, revision) -> str | None:
        """The full name of a branch, a tag or a pull request."""
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
        sha = hashlib.sha1(repr((self.kind, self.id, len(self.commits), parent, title, tree)).encode()).hexdigest()
        self.commits[sha] = Commit(sha, parent, files, author, title, message)
        self.refs[ref] = sha
        return self.commits[sha]


LARGE = 10 * 2**20
ENDINGS = (
    "7z arrow bin bz2 ckpt gz h5 model msgpack npy npz onnx parquet pb pickle pkl pt pth rar safetensors tar xz zip"
)
# What every new repository holds.
GITATTRIBUTES = "".join(f"*.{ending} filter=lfs diff=lfs merge=lfs -text\n" for ending in ENDINGS.split())


def _is_large(attributes: str, path, size, sample: bytes) -> bool:
    """If a file goes to the large file storage: as .gitattributes has it, and whatever is large or no text."""
    patterns = [line.split()[0] for line in attributes.splitlines() if "filter=lfs" in line]
    if size > LARGE or any(fnmatchcase(PurePosixPath(path).name, pattern) for pattern in patterns):
        return True
    try:
        return "\0" in codecs.getincrementaldecoder("utf-8")().decode(sample)  # a sample may end within a character
    except UnicodeDecodeError:
        return True


def _now():
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# What is answered


@dataclass
class Answer:
    """A body of bytes, or one that becomes JSON."""

    body: object = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.headers.setdefault("Content-Type", "application/octet-stream")
        if not isinstance(self.body, bytes):
            self.headers["Content-Type"] = "application/json; charset=utf-8"
            self.body = json.dumps(self.body).encode()


class Refusal(Exception):
    """An error as the Hub words it: a status, a message and, for what clients tell apart, a code."""

    def __init__(self, status, message, code=None, headers=None, **body):
        super().__init__(message)
        self.status, self.message, self.code, self.headers, self.body = status, message, code, headers or {}, body

    def answer(self):
        line = self.message.strip().splitlines()[-1].encode("ascii", "replace").decode()
        headers = {**self.headers, "X-Error-Message": line}
        if self.code:
            headers["X-Error-Code"] = self.code
        return Answer({"error": self.message, **self.body}, self.status, headers)


class Call:
    """A request as the routes see it: who asks, and for what."""

    def __init__(self, hub, request, headers, body):
        self.method, self.headers, self.body = request.method, headers, body
        self.path, _, query = request.path.partition("?")
        self.query = parse_qs(query)
        self.user = hub.users.get(request.token)
        if request.token and not self.user:
            raise Refusal(401, "Invalid credentials in Authorization header")

    def json(self) -> dict:
        return json.loads(self.body or b"{}")

    def asks(self, name) -> bool:
        return self.query.get(name, [""])[0].lower() in ("1", "true")

    def known(self) -> str:
        """The user's name; without one, the request is refused."""
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        return self.user

    def must_own(self, namespace, what):
        if self.known() != namespace:
            raise Refusal(403, f'You don\'t have the rights to {what} under the namespace "{namespace}"')


ROUTES = []
PARTS = {
    "kind": "model|dataset",
    "prefix": "(?:datasets/)?",
    "repo": "[^/]+(?:/[^/]+)?",
    "slug": "[^/]+/[^/]+",
    "ref": "branch|tag",
    "path": ".+",
}


def route(method, pattern, owner=False):
    """The function that serves a path: called with the hub, the call, and the parts of the path by name.

    It gets a repository for `{repo}`, and only if that may be seen; with `owner`, only if it may be written. What it
    returns is the answer, or its JSON.
    """
    named = re.sub(r"\{(\w+)\}", lambda part: f"(?P<{part[1]}>{PARTS.get(part[1], '[^/]+')})", pattern)

    def register(function):
        ROUTES.append((method, re.compile(named), function, owner))
        return function

    return register


def _serve(hub, call) -> Answer:
    for method, pattern, function, owner in ROUTES:
        match = pattern.fullmatch(call.path)
        if match is None or method != ("GET" if call.method == "HEAD" else call.method):
            continue
        parts = {name: unquote(part) for name, part in match.groupdict().items()}
        if "repo" in parts:
            kind = parts.pop("kind", None) or parts.pop("prefix").rstrip("s/") or "model"
            parts["repo"] = hub.visible(call, kind, parts["repo"])
            if owner:
                call.must_own(parts["repo"].owner, "write")
        answer = function(hub, call, **parts)
        return answer if isinstance(answer, Answer) else Answer({} if answer is None else answer)
    raise Refusal(501, f"This Hub does not know {call.method} {call.path}")


# Users and repositories


@route("GET", "/api/agent-harnesses")
def agents(hub, call):
    """Clients look here for who may have started them."""
    return {"standardEnvVars": [], "harnesses": {}}


@route("GET", "/api/whoami-v2")
def whoami(hub, call):
    access = {"type": "access_token", "accessToken": {"displayName": "tests", "role": "write"}}
    return {"type": "user", "id": call.known(), "name": call.user, "fullname": call.user, "orgs": [], "auth": access}


@route("POST", "/api/repos/create")
def create_repository(hub, call):
    asked = call.json()
    kind, namespace = asked.get("type") or "model", asked.get("organization") or call.known()
    call.must_own(namespace, f"create a {kind}")
    if kind not in ("model", "dataset"):
        raise Refusal(501, f"This Hub has no {kind}s")
    repository = Repository(kind, f"{namespace}/{asked['name']}", _private(asked, False))
    url = f"{hub.endpoint}/{repository.place}"
    if (kind, repository.id) in hub.repositories:
        raise Refusal(409, f"You already created this {kind} repo", url=url)
    hub.repositories[kind, repository.id] = repository
    first = {".gitattributes": Blob(GITATTRIBUTES.encode())}
    repository.add_commit("refs/heads/main", None, first, namespace, "initial commit")
    return {"url": url, "name": repository.id, "id": uuid.uuid4().hex[:24]}


@route("DELETE", "/api/repos/delete")
def delete_repository(hub, call):
    asked = call.json()
    kind, namespace = asked.get("type") or "model", asked.get("organization") or call.known()
    repository = hub.visible(call, kind, f"{namespace}/{asked['name']}")
    call.must_own(namespace, f"delete a {kind}")
    del hub.repositories[kind, repository.id]


@route("PUT", "/api/{kind}s/{repo}/settings", owner=True)
def settings(hub, call, repo):
    repo.private = _private(call.json(), repo.private)
    return {"private": repo.private}


@route("GET", "/api/{kind}s/{repo}/auth-check/write", owner=True)
@route("GET", "/api/{kind}s/{repo}/auth-check")
def allowed(hub, call, repo):
    pass


def _private(asked, otherwise):
    """Clients of 2.x send "visibility", older ones "private"."""
    if asked.get("visibility"):
        return asked["visibility"] == "private"
    return otherwise if asked.get("private") is None else asked["private"]


# Branches, tags, history


@route("GET", "/api/{kind}s/{repo}/refs")
def refs(hub, call, repo):
    def rows(prefix):
        return [
            {"name": name, "ref": prefix + name, "targetCommit": sha}
            for name, sha in sorted(repo.under(prefix).items())
        ]

    found = {"branches": rows("refs/heads/"), "converts": [], "tags": rows("refs/tags/")}
    return {**found, "pullRequests": rows("refs/pr/")} if call.asks("include_prs") else found


@route("GET", "/api/{kind}s/{repo}/commits/{rev}")
def commits(hub, call, repo, rev):
    return [
        {
            "id": one.sha,
            "title": one.title,
            "message": one.message,
            "authors": [{"user": one.author}],
            "date": one.date,
        }
        for one in repo.history(rev)
    ]


@route("POST", "/api/{kind}s/{repo}/branch/{name}", owner=True)
def create_branch(hub, call, repo, name):
    _create_ref(repo, f"refs/heads/{name}", call.json().get("startingPoint", "main"))


@route("POST", "/api/{kind}s/{repo}/tag/{rev}", owner=True)
def create_tag(hub, call, repo, rev):
    _create_ref(repo, f"refs/tags/{call.json()['tag']}", rev)


def _create_ref(repo, ref, revision):
    commit = repo.at(revision)
    if ref in repo.refs:
        raise Refusal(409, f"Reference already exists: {ref}")
    repo.refs[ref] = commit.sha


@route("DELETE", "/api/{kind}s/{repo}/{ref}/{name}", owner=True)
def delete_ref(hub, call, repo, ref, name):
    if (ref, name) == ("branch", "main"):
        raise Refusal(403, "Cannot delete the default branch")
    if repo.refs.pop(f"refs/{'heads' if ref == 'branch' else 'tags'}/{name}", None) is None:
        raise Refusal(404, f"Reference doesn't exist: {name}", "RevisionNotFound")


# Looking at a repository


@route("GET", "/api/{kind}s/{repo}/revision/{rev}")
@route("GET", "/api/{kind}s/{repo}")
def information(hub, call, repo, rev="main"):
    commit = repo.at(rev)
    card = read_card(commit.files.get("README.md", Blob(b"")).data.decode(errors="replace"))[0]
    described = {name: card[name] for name in ("pipeline_tag", "library_name") if name in card}
    tags = [tag for tag in _listed(card, "tags") if isinstance(tag, str)]
    return {
        "id": repo.id,
        "modelId": repo.id,
        "author": repo.owner,
        "sha": commit.sha,
        "private": repo.private,
        "gated": False,
        "lastModified": commit.date,
        "createdAt": repo.history("main")[-1].date,
        "tags": [*tags, *described.values()],
        "cardData": card,
        "siblings": [_sibling(path, blob, call.asks("blobs")) for path, blob in sorted(commit.files.items())],
        **described,
    }


def _sibling(path, blob, details):
    if not details:
        return {"rfilename": path}
    row = {"rfilename": path, "size": len(blob.data), "blobId": blob.oid}
    large = {"sha256": blob.sha256, "size": len(blob.data), "pointerSize": len(blob.pointer)}
    return {**row, "lfs": large} if blob.lfs else row


@route("GET", "/api/{kind}s/{repo}/tree/{rev}")
@route("GET", "/api/{kind}s/{repo}/tree/{rev}/{path}")
def tree(hub, call, repo, rev, path=""):
    commit = repo.at(rev)
    rows = _rows(commit.files)
    if path and rows.get(path, {}).get("type") != "directory":
        raise Refusal(404, f"{path} does not exist on {rev}", "EntryNotFound", {"X-Repo-Commit": commit.sha})
    if call.asks("recursive"):
        return [row for name, row in rows.items() if not path or name.startswith(path + "/")]
    return [row for name, row in rows.items() if name.rpartition("/")[0] == path]


@route("POST", "/api/{kind}s/{repo}/paths-info/{rev}")
def paths_info(hub, call, repo, rev):
    rows = _rows(repo.at(rev).files)
    return [rows[path] for path in parse_qs(call.body.decode()).get("paths", []) if path in rows]


def _rows(files) -> dict[str, dict]:
    """Every file and folder of a commit, by path."""
    rows = {}
    for path, blob in sorted(files.items()):
        for folder in list(PurePosixPath(path).parents)[-2::-1]:
            oid = hashlib.sha1(f"tree {folder}".encode()).hexdigest()
            rows[str(folder)] = {"type": "directory", "oid": oid, "size": 0, "path": str(folder)}
        rows[path] = {"type": "file", "oid": blob.oid, "size": len(blob.data), "path": path}
        if blob.lfs:
            rows[path]["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": len(blob.pointer)}
    return rows


@route("GET", "/{prefix}{repo}/resolve/{rev}/{path}")
def resolve(hub, call, repo, rev, path):
    """A file, or where the large file storage has it."""
    commit = repo.at(rev)
    headers = {"X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
    if path not in commit.files:
        raise Refusal(404, "Entry not found", "EntryNotFound", headers)
    blob = commit.files[path]
    if not blob.lfs:
        return _content(call, blob.data, {**headers, "ETag": f'"{blob.oid}"'})
    headers |= {"X-Linked-ETag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data)), "ETag": f'"{blob.oid}"'}
    return Answer(b"", 302, {**headers, "Location": hub.link("GET", repo, blob.sha256, len(blob.data))})


def _content(call, data, headers):
    """All of it, or the range that is asked for."""
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", call.headers.get("Range", ""))
    if asked is None or asked[0] == "bytes=-":
        return Answer(data, 200, headers)
    first, last = asked.groups()
    begin = int(first) if first else max(len(data) - int(last), 0)
    end = min(int(last) + 1, len(data)) if first and last else len(data)
    if begin >= end:
        raise Refusal(416, "Range not satisfiable", None, {**headers, "Content-Range": f"bytes */{len(data)}"})
    return Answer(data[begin:end], 206, {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"})


# Publishing: what goes where, large files, then one commit of everything


@route("POST", "/api/{kind}s/{repo}/preupload/{rev}")
def before_upload(hub, call, repo, rev):
    _may_change(call, repo)
    files, told = repo.at(rev).files, []
    attributes = files.get(".gitattributes", Blob(b"")).data.decode()
    for file in call.json()["files"]:
        large = _is_large(attributes, file["path"], file["size"], base64.b64decode(file.get("sample", "")))
        row = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
        old = files.get(file["path"])
        told.append({**row, "oid": old.sha256 if old.lfs else old.oid} if old else row)
    return {"files": told}


@route("POST", "/{prefix}{repo}.git/info/lfs/objects/batch")
def large_files(hub, call, repo):
    call.known()
    objects = [{"oid": one["oid"], "size": one["size"]} for one in call.json()["objects"]]
    for one in objects:
        if one["oid"] not in repo.objects:
            upload = hub.link("PUT", repo, one["oid"], one["size"])
            verify = f"{hub.endpoint}/api/{repo.kind}s/{repo.id}/verify"
            one["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
    return {"transfer": "basic", "objects": objects}


@route("PUT", "/storage/{key}")
def put_large_file(hub, call, key):
    method, repo, oid, size = hub.links.get(key, [None] * 4)
    if method != "PUT":
        raise Refusal(403, "No such address")
    if len(call.body) != size or hashlib.sha256(call.body).hexdigest() != oid:
        raise Refusal(400, f"Not what was announced: {len(call.body)} bytes of {size}, or another sha256 than {oid}")
    repo.objects[oid] = call.body


@route("GET", "/storage/{key}")
def get_large_file(hub, call, key):
    method, repo, oid, _ = hub.links.get(key, [None] * 4)
    if method != "GET":
        raise Refusal(403, "No such address")
    return _content(call, repo.objects[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})


@route("POST", "/api/{kind}s/{repo}/verify")
def verify_large_file(hub, call, repo):
    asked = call.json()
    if len(repo.objects.get(asked["oid"], b"")) != asked["size"]:
        raise Refusal(404, f"{asked['oid']} was not uploaded")


@route("POST", "/api/{kind}s/{repo}/commit/{rev}")
def commit(hub, call, repo, rev):
    """Lines of JSON: a header, then what to add and to delete."""
    lines = [json.loads(line) for line in call.body.splitlines() if line.strip()]
    header = next(line["value"] for line in lines if line["key"] == "header")
    base, ref = repo.at(rev), repo.ref(rev)
    _may_change(call, repo)
    if call.asks("create_pr"):
        number = len(repo.under("refs/pr/")) + 1
        ref = f"refs/pr/{number}"
    elif ref is None or ref.startswith("refs/tags/"):
        raise Refusal(404, f"Not a branch: {rev}", "RevisionNotFound")
    if not base.sha.startswith(header.get("parentCommit") or ""):
        raise Refusal(412, "A commit has happened since. Please refresh and try again.")
    files = dict(base.files)
    for line in lines:
        if line["key"] != "header":
            _change(repo, files, line["key"], **line["value"])
    made = repo.add_commit(ref, base.sha, files, call.user, header["summary"], header.get("description", ""))
    site = f"{hub.endpoint}/{repo.place}"
    answer = {"success": True, "commitOid": made.sha, "commitUrl": f"{site}/commit/{made.sha}", "hookOutput": ""}
    return {**answer, "pullRequestUrl": f"{site}/discussions/{number}"} if call.asks("create_pr") else answer


def _may_change(call, repo):
    """Who sees a repository may ask for a change; to make one, it has to be theirs."""
    if call.known() != repo.owner and not call.asks("create_pr"):
        raise Refusal(403, "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request")


def _change(repo, files, key, path, content="", encoding="utf-8", oid=None, **_):
    if key == "file":
        data = base64.b64decode(content) if encoding == "base64" else content.encode()
        if path == "README.md":
            _, errors, _ = read_card(data.decode(errors="replace"))
            if errors:
                raise Refusal(400, "Invalid metadata in README.md: " + "; ".join(errors))
        files[path] = Blob(data)
    elif key == "lfsFile":
        if oid not in repo.objects:
            raise Refusal(400, f"LFS pointer pointed to a file that does not exist: {path}, {oid}")
        files[path] = Blob(repo.objects[oid], lfs=True)
    elif key in ("deletedFile", "deletedFolder"):
        inside = path.rstrip("/") + "/"
        gone = [name for name in files if name == path or key == "deletedFolder" and name.startswith(inside)]
        if not gone:
            raise Refusal(404, f"A {key[7:].lower()} with this name doesn't exist: {path}", "EntryNotFound")
        for name in gone:
            del files[name]
    else:
        raise Refusal(501, f"This Hub does not know the operation {key}")


# Model cards: the checks whose failure refuses a push


@route("POST", "/api/validate-yaml")
def validate(hub, call):
    _, errors, warnings = read_card(call.json()["content"])
    told = {"errors": [{"message": one} for one in errors], "warnings": [{"message": one} for one in warnings]}
    if errors:
        raise Refusal(400, "Invalid metadata", **told)
    return told


def read_card(text) -> tuple[dict, list[str], list[str]]:
    """A card's metadata, what is wrong with them, and what might be."""
    block = re.match(r"\s*---(?:\r\n|\r|\n)([\S\s]*?)(?:\r\n|\r|\n)---[ \t]*(?:\r\n|\n|$)", text)
    if block is None:
        return {}, [], ["empty or missing yaml metadata in repo card"]
    try:
        data = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        return {}, [f"Invalid YAML: {error}"], []
    if not isinstance(data, dict):
        return {}, [f"The metadata must be an object, not {data!r}"], []
    return json.loads(json.dumps(data, default=str)), [*_card_errors(data)], []


TEXTS = ("license", "license_name", "license_link", "library_name", "pipeline_tag")
RESULT = {"task": {"type": str}, "dataset": {"type": str, "name": str}, "metrics": [{"type": str, "value": object}]}


def _card_errors(data):
    """The Hub's rules for what our cards have, in its words."""
    for name in TEXTS:
        if name in data:
            yield from _mismatches(name, data[name], str)
    for place, tag in enumerate(_listed(data, "tags")):
        yield from _mismatches(f"tags[{place}]", tag, str)
    for place, name in enumerate(_listed(data, "language")):
        if not isinstance(name, str) or not re.fullmatch(r"[a-z]{2,3}(-\w+)*|code|multilingual", name):
            yield f'"language[{place}]" with value "{name}" is not valid. It must be an ISO 639-1, 639-2 or 639-3 code'
    for key, kind in (("datasets", "dataset"), ("base_model", "model")):
        for place, name in enumerate(_listed(data, key)):
            if not _is_id(name):
                yield f'"{key}[{place}]" with value "{name}" is not valid. Use a {kind} id from https://hf.co/{kind}s.'
    if "model-index" in data:
        yield from _mismatches("model-index", data["model-index"], [{"name": str, "results": [RESULT]}])


def _mismatches(place, value, expected):
    """Where a value differs from what is expected: a type, a list of such, or an object with such."""
    if value is None:
        yield f'"{place}" is required'
    elif isinstance(expected, list) and isinstance(value, list):
        for number, one in enumerate(value):
            yield from _mismatches(f"{place}[{number}]", one, expected[0])
    elif isinstance(expected, dict) and isinstance(value, dict):
        for key, one in expected.items():
            yield from _mismatches(f"{place}.{key}", value.get(key), one)
        if place.endswith(".dataset") and isinstance(value.get("type"), str) and not _is_id(value["type"]):
            yield f'"{place}.type" with value "{value["type"]}" fails to match the required pattern'
    elif isinstance(expected, list | dict) or not isinstance(value, expected):
        name = "a string" if expected is str else "an array" if isinstance(expected, list) else "an object"
        yield f'"{place}" must be {name}'


def _listed(data, name):
    """One or many may be given."""
    value = data.get(name, [])
    return value if isinstance(value, list) else [value]


def _is_id(name):
    pattern = r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*"
    return isinstance(name, str) and bool(re.fullmatch(pattern, name)) and not re.search(r"\.\.|--|\.git$", name)


# Collections


@route("POST", "/api/collections")
def create_collection(hub, call):
    asked = call.json()
    call.must_own(asked["namespace"], "create a collection")
    for slug, old in hub.collections.items():
        if (old["owner"]["name"], old["title"]) == (asked["namespace"], asked["title"]):
            raise Refusal(409, "A collection with this title already exists", slug=slug)
    title = re.sub("[^a-z0-9]+", "-", asked["title"].lower()).strip("-")
    slug = f"{asked['namespace']}/{title}-{uuid.uuid4().hex[:24]}"
    owner = {"name": asked["namespace"], "type": "user"}
    told = {"title": asked["title"], "description": asked.get("description"), "private": bool(asked.get("private"))}
    fixed = {"position": 0, "theme": "orange", "upvotes": 0, "lastUpdated": _now()}
    hub.collections[slug] = {"slug": slug, "owner": owner, **told, **fixed, "items": []}
    return hub.collections[slug]


@route("GET", "/api/collections/{slug}")
def get_collection(hub, call, slug):
    found = hub.collections.get(slug)
    if found is None or found["private"] and call.user != found["owner"]["name"]:
        raise Refusal(404, "Collection not found")
    return found


@route("POST", "/api/collections/{slug}/items")
def add_to_collection(hub, call, slug):
    collection, asked = get_collection(hub, call, slug), call.json()
    call.must_own(collection["owner"]["name"], "change a collection")
    kind, name = asked["item"]["type"], asked["item"]["id"]
    hub.visible(call, kind, name)
    if any((item["type"], item["id"]) == (kind, name) for item in collection["items"]):
        raise Refusal(409, "This item is already in the collection")
    item = {"_id": uuid.uuid4().hex[:24], "id": name, "type": kind, "position": len(collection["items"])}
    collection["items"].append({**item, "note": {"text": asked["note"]}} if asked.get("note") else item)
    collection["lastUpdated"] = _now()
    return collection


# HTTP


class _Server(socketserver.ThreadingTCPServer):
    """A thread for each connection, and a list of them, to close those that clients keep."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, hub, port):
        self.hub = hub
        self.connections = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request, client_address):
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self):
        for connection in self.connections.copy():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # a client may leave in the middle
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer is one write

    def _serve(self):
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        request = Request(self.command, self.path, token)
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            answer = Refusal(411, "Say how long the body is").answer()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = self.server.hub.answer(self.server, request, self.headers, body)
        if answer is None:
            self.close_connection = True
            return
        request.status = answer.status
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _serve

    def log_message(self, *_):
        pass
