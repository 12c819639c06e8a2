"""A small Hugging Face Hub over HTTP, in memory, for tests that publish and download models.

The clients are the real ones (huggingface_hub, Transformers, the `hf` command). `environment` makes the environment
variables that send them to this Hub:

    with LocalHub({"hf_made_up": "someone"}) as hub:
        subprocess.run([sys.executable, "publish.py"], env=environment(hub, home, "hf_made_up"), check=True)
        assert "README.md" in hub.files("someone/bert")

Models have commits, branches, tags and pull requests. All files come in the commit itself: large file storage and Xet
are missing, and so are Spaces and merges; datasets can only be read. A request for a missing feature is answered with
501, which no client retries. The tests cannot prove that the public Hub still gives the same answers.
"""

import base64
import hashlib
import json
import os
import re
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

from hub_cards import read_card


TOKEN = "hf_made_up_for_someone"


def environment(hub, home: Path, token: str | None) -> dict:
    """
    Environment variables of a process that uses this Hub, without the caller's own variables for Hubs and tokens.
    """
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))
    }
    told = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",  # with Xet, clients ask for a second upload protocol even if the server offers none
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        "DISABLE_SAFETENSORS_CONVERSION": "1",  # the conversion would send the token to another service
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    if token:
        told["HF_TOKEN"] = token
    return {**kept, **told}


# ---------------------------------------------------------------------------------------------------------------------
# The store


@dataclass
class Commit:
    sha: str
    parent: str | None
    files: dict[str, bytes]
    title: str


@dataclass
class Repository:
    id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # full name of a branch, tag or pull request -> commit id

    def ref(self, revision) -> str:
        """The full name of a branch, tag or pull request; what is none stays as it is."""
        names = (f"refs/heads/{revision}", f"refs/tags/{revision}")
        return next((name for name in names if name in self.refs), revision)

    def at(self, revision) -> Commit:
        sha = self.refs.get(self.ref(revision), revision)
        if sha not in self.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[sha]

    def under(self, prefix) -> dict[str, str]:
        return {name.removeprefix(prefix): sha for name, sha in self.refs.items() if name.startswith(prefix)}

    def commit(self, ref, parent, files, title) -> str:
        seed = repr((self.id, len(self.commits), title))
        made = Commit(hashlib.sha1(seed.encode()).hexdigest(), parent, files, title)
        self.commits[made.sha] = made
        self.refs[ref] = made.sha
        return made.sha


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class LocalHub:
    """The server, and methods that read its store without a request. `users` maps tokens to user names."""

    def __init__(self, users: dict[str, str]):
        self.users = users
        self.requests: list[Request] = []
        # A function of (method, path), called before each request is served. Its result: None to serve the request; a
        # status to answer with; 0 to drop the connection unanswered.
        self.fail: Callable[[str, str], int | None] | None = None
        self.repositories: dict[str, Repository] = {}
        self.lock = threading.RLock()
        self.server = None
        self.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self):
        """Start serving: on a free port the first time, later on the same port."""
        address = self.server.server_address if self.server else ("127.0.0.1", 0)
        self.server = ThreadingHTTPServer(address, _Handler)
        self.server.hub = self
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        """Stop serving. The store keeps its contents."""
        self.server.shutdown()
        self.server.server_close()

    def add_dataset(self, name, files: dict[str, bytes]):
        """Put a public dataset of one commit on the Hub; its name is that of no model."""
        repository = self.repositories[name] = Repository(name, private=False)
        repository.commit("refs/heads/main", None, files, "initial commit")

    def files(self, repo_id, revision="main") -> dict[str, bytes]:
        return self.repositories[repo_id].at(revision).files

    def commits(self, repo_id, revision="main") -> list[str]:
        """The commit ids, newest first."""
        repository = self.repositories[repo_id]
        found = [repository.at(revision).sha]
        while parent := repository.commits[found[-1]].parent:
            found.append(parent)
        return found

    def tags(self, repo_id) -> dict[str, str]:
        return self.repositories[repo_id].under("refs/tags/")

    def branches(self, repo_id) -> dict[str, str]:
        return self.repositories[repo_id].under("refs/heads/")

    def is_private(self, repo_id) -> bool:
        return self.repositories[repo_id].private


# ---------------------------------------------------------------------------------------------------------------------
# HTTP


class Refusal(Exception):
    """An error in the Hub's own words: a status, a message, and the code by which clients tell some errors apart."""

    def __init__(self, status, message, code="", **body):
        self.status = status
        self.body = {"error": message, **body}
        self.headers = {"X-Error-Message": message.splitlines()[-1].encode("ascii", "replace").decode()}
        if code:
            self.headers["X-Error-Code"] = code


@dataclass
class Request:
    """One request: its path with query, the user whose token it carried, and its body."""

    method: str
    path: str
    user: str | None = None
    body: bytes = b""

    def json(self) -> dict:
        return json.loads(self.body or b"{}")

    def known(self, owner=None) -> str:
        """The user's name; refuses a request without a valid token, or of another user than the owner."""
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        if owner not in (None, self.user):
            raise Refusal(403, f'You don\'t have the rights to write under the namespace "{owner}"')
        return self.user


class _Handler(BaseHTTPRequestHandler):
    """Serves one request of each connection, so that none is open when the Hub stops."""

    def _serve(self):
        hub = self.server.hub
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        request = Request(self.command, self.path, hub.users.get(token))
        request.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.requests.append(request)
        status = hub.fail(request.method, request.path) if hub.fail else None
        if status == 0:
            return
        headers = {}
        try:
            with hub.lock:
                if status:
                    raise Refusal(status, "This request was made to fail.")
                if token and not request.user:
                    raise Refusal(401, "Invalid credentials in Authorization header")
                status = 200
                body = answer(hub, request, headers)
        except Refusal as refusal:
            status = refusal.status
            body = refusal.body
            headers |= refusal.headers
        except Exception:
            traceback.print_exc()
            status = 501
            body = {}
        body = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def log_message(self, *_):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# The paths: functions of the hub, the request, the headers of the answer, and the named parts of the path

ROUTES = []


def route(method, pattern):
    """Register the function that serves a path. For `{repo}` it gets a repository, if the user may see it."""
    pattern = pattern.replace("{repo}", "(?P<repo>[^/]+/[^/]+)").replace("{path}", "(?P<path>.+)")
    pattern = re.compile(pattern.replace("{rev}", "(?P<rev>[^/]+)"))

    def register(function):
        ROUTES.append((method, pattern, function))
        return function

    return register


def answer(hub, request, headers):
    """The body of the answer: bytes, or an object to be sent as JSON."""
    for method, pattern, function in ROUTES:
        match = pattern.fullmatch(request.path.partition("?")[0])
        if match is None or method != request.method.replace("HEAD", "GET"):
            continue
        parts = {name: unquote(part) for name, part in match.groupdict().items()}
        if "repo" in parts:
            repository = hub.repositories.get(parts["repo"])
            if repository is None or (repository.private and request.user != repository.id.split("/")[0]):
                raise Refusal(404 if request.user else 401, "Repository not found", "RepoNotFound")
            parts["repo"] = repository
        return function(hub, request, headers, **parts)
    raise Refusal(501, f"This Hub does not know {request.method} {request.path}")


@route("GET", "/api/whoami-v2")
def whoami(hub, request, headers):
    return {"type": "user", "id": request.known(), "name": request.user, "orgs": []}


@route("POST", "/api/repos/create")
def create_repository(hub, request, headers):
    asked = request.json()
    owner = request.known(asked.get("organization"))
    # Clients of version 2 send "visibility", older ones "private".
    is_private = asked.get("visibility") == "private" or asked.get("private", False)
    repository = Repository(f"{owner}/{asked['name']}", is_private)
    told = {"url": f"{hub.endpoint}/{repository.id}", "name": repository.id}
    if repository.id in hub.repositories:
        raise Refusal(409, "You already created this model repo", **told)
    hub.repositories[repository.id] = repository
    repository.commit("refs/heads/main", None, {".gitattributes": b""}, "initial commit")
    return told


@route("PUT", "/api/models/{repo}/settings")
def settings(hub, request, headers, repo):
    request.known(repo.id.split("/")[0])
    asked = request.json()
    repo.private = asked.get("visibility") == "private" or asked.get("private", False)


@route("POST", "/api/models/{repo}/(?P<kind>branch|tag)/{rev}")
def create_ref(hub, request, headers, repo, kind, rev):
    """A branch of the name `rev` from main, or a tag of the commit `rev`."""
    request.known(repo.id.split("/")[0])
    ref = f"refs/heads/{rev}" if kind == "branch" else f"refs/tags/{request.json()['tag']}"
    if ref in repo.refs:
        raise Refusal(409, f"Reference already exists: {ref}")
    repo.refs[ref] = repo.at("main" if kind == "branch" else rev).sha


@route("GET", "/api/(?:models|datasets)/{repo}/revision/{rev}")
@route("GET", "/api/(?:models|datasets)/{repo}")
def information(hub, request, headers, repo, rev="main"):
    commit = repo.at(rev)
    card = read_card(commit.files.get("README.md", b"").decode())[0]
    told = {"id": repo.id, "sha": commit.sha, "private": repo.private, "cardData": card}
    described = {name: card[name] for name in ("pipeline_tag", "library_name", "tags") if name in card}
    return {**told, **described, "siblings": [{"rfilename": path} for path in sorted(commit.files)]}


@route("GET", "/api/(?:models|datasets)/{repo}/tree/{rev}")
@route("GET", "/api/(?:models|datasets)/{repo}/tree/{rev}/{path}")
def tree(hub, request, headers, repo, rev, path=None):
    """A row for every file of a commit; no tests ask for those of a folder."""
    if path:
        raise Refusal(404, f"{path} does not exist on {rev}", "EntryNotFound")
    rows = repo.at(rev).files.items()
    return [{"type": "file", "oid": git_hash(data), "size": len(data), "path": name} for name, data in rows]


@route("POST", "/api/datasets/{repo}/paths-info/{rev}")
def paths(hub, request, headers, repo, rev):
    """A row for each of the files that the request names and that are there."""
    named = [unquote(path) for path in parse_qs(request.body.decode()).get("paths", [])]
    return [row for row in tree(hub, request, headers, repo, rev) if row["path"] in named]


@route("GET", "/(?:datasets/)?{repo}/resolve/{rev}/{path}")
def resolve(hub, request, headers, repo, rev, path):
    """A file's content. The public Hub redirects to another server for large files."""
    commit = repo.at(rev)
    headers["X-Repo-Commit"] = commit.sha
    if path not in commit.files:
        raise Refusal(404, "Entry not found", "EntryNotFound")
    headers["ETag"] = f'"{git_hash(commit.files[path])}"'
    return commit.files[path]


@route("POST", "/api/models/{repo}/preupload/{rev}")
def before_upload(hub, request, headers, repo, rev):
    """Clients ask which files are large, and which are there: none is large."""
    files = repo.at(rev).files
    told = []
    for file in request.json()["files"]:
        there = {"oid": git_hash(files[file["path"]])} if file["path"] in files else {}
        told.append({"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, **there})
    return {"files": told}


@route("POST", "/api/models/{repo}/commit/{rev}")
def commit(hub, request, headers, repo, rev):
    """One commit. The body is lines of JSON: a header, then the files to add and to delete."""
    changes = [json.loads(line) for line in request.body.splitlines()]
    base = repo.at(rev)
    ref = repo.ref(rev)
    told = {}
    if "create_pr" in parse_qs(request.path.partition("?")[2]):
        number = len(repo.under("refs/pr/")) + 1
        ref = f"refs/pr/{number}"
        told = {"pullRequestUrl": f"{hub.endpoint}/{repo.id}/discussions/{number}"}
    else:
        request.known(repo.id.split("/")[0])
    files = dict(base.files)
    for change in changes:
        value = change["value"]
        if change["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif change["key"] == "deletedFile":
            del files[value["path"]]
    check_card(files.get("README.md", b""))
    sha = repo.commit(ref, base.sha, files, changes[0]["value"]["summary"])
    return {"success": True, "commitOid": sha, "commitUrl": f"{hub.endpoint}/{repo.id}/commit/{sha}", **told}


@route("POST", "/api/validate-yaml")
def validate(hub, request, headers):
    check_card(request.json()["content"].encode())
    return {"errors": [], "warnings": []}


def check_card(content):
    if errors := read_card(content.decode())[1]:
        raise Refusal(400, "Invalid metadata in README.md", errors=[{"message": one} for one in errors], warnings=[])
