"""The paths that the local Hub serves: users, repositories, files, commits."""

import base64
import hashlib
import json
import re
import uuid
from urllib.parse import unquote

from hub_answers import Answer, Refusal
from hub_cards import listed, read_card
from hub_store import GITATTRIBUTES, Blob, Repository, is_large


ROUTES = []
PARTS = {
    "repo": "[^/]+(?:/[^/]+)?",
    "path": ".+",
}


def route(method, pattern, owner=False):
    """Register the function that serves a path. It is called with the hub, the call, and the named parts of the path.

    For `{repo}` the function gets a repository, if the user may see it; with `owner`, if the user may write to it.
    It returns an answer, or an object to be sent as JSON.
    """
    named = re.sub(r"\{(\w+)\}", lambda part: f"(?P<{part[1]}>{PARTS.get(part[1], '[^/]+')})", pattern)

    def register(function):
        ROUTES.append((method, re.compile(named), function, owner))
        return function

    return register


def serve(hub, call) -> Answer:
    for method, pattern, function, owner in ROUTES:
        match = pattern.fullmatch(call.path)
        if match is None or method != ("GET" if call.method == "HEAD" else call.method):
            continue
        parts = {name: unquote(part) for name, part in match.groupdict().items()}
        if "repo" in parts:
            parts["repo"] = hub.visible(call, parts["repo"])
            if owner:
                call.must_own(parts["repo"].owner, "write")
        answer = function(hub, call, **parts)
        return answer if isinstance(answer, Answer) else Answer({} if answer is None else answer)
    raise Refusal(501, f"This Hub does not know {call.method} {call.path}")


@route("GET", "/api/whoami-v2")
def whoami(hub, call):
    access = {"type": "access_token", "accessToken": {"displayName": "tests", "role": "write"}}
    return {"type": "user", "id": call.known(), "name": call.user, "fullname": call.user, "orgs": [], "auth": access}


@route("POST", "/api/repos/create")
def create_repository(hub, call):
    asked = call.json()
    namespace = asked.get("organization") or call.known()
    call.must_own(namespace, "create a model")
    if asked.get("type", "model") != "model":
        raise Refusal(501, f"This Hub has no {asked['type']}s")
    repository = Repository(f"{namespace}/{asked['name']}", _private(asked, False))
    url = f"{hub.endpoint}/{repository.id}"
    if repository.id in hub.repositories:
        raise Refusal(409, "You already created this model repo", url=url)
    hub.repositories[repository.id] = repository
    first = {".gitattributes": Blob(GITATTRIBUTES.encode())}
    repository.add_commit("refs/heads/main", None, first, namespace, "initial commit")
    return {"url": url, "name": repository.id, "id": uuid.uuid4().hex[:24]}


@route("PUT", "/api/models/{repo}/settings", owner=True)
def settings(hub, call, repo):
    repo.private = _private(call.json(), repo.private)
    return {"private": repo.private}


def _private(asked, otherwise):
    """Whether a new repository is private: clients of version 2 send "visibility", older ones "private"."""
    if asked.get("visibility"):
        return asked["visibility"] == "private"
    return otherwise if asked.get("private") is None else asked["private"]


@route("POST", "/api/models/{repo}/branch/{name}", owner=True)
def create_branch(hub, call, repo, name):
    _create_ref(repo, f"refs/heads/{name}", call.json().get("startingPoint", "main"))


@route("POST", "/api/models/{repo}/tag/{rev}", owner=True)
def create_tag(hub, call, repo, rev):
    _create_ref(repo, f"refs/tags/{call.json()['tag']}", rev)


def _create_ref(repo, ref, revision):
    commit = repo.at(revision)
    if ref in repo.refs:
        raise Refusal(409, f"Reference already exists: {ref}")
    repo.refs[ref] = commit.sha


# Reading a repository
@route("GET", "/api/models/{repo}/revision/{rev}")
@route("GET", "/api/models/{repo}")
def information(hub, call, repo, rev="main"):
    commit = repo.at(rev)
    card = read_card(commit.files.get("README.md", Blob(b"")).data.decode(errors="replace"))[0]
    described = {name: card[name] for name in ("pipeline_tag", "library_name") if name in card}
    tags = [tag for tag in listed(card, "tags") if isinstance(tag, str)]
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
        "siblings": [{"rfilename": path} for path in sorted(commit.files)],
        **described,
    }


@route("GET", "/api/models/{repo}/tree/{rev}")
@route("GET", "/api/models/{repo}/tree/{rev}/{path}")
def tree(hub, call, repo, rev, path=""):
    """A row for every file of a commit, or of a folder in it."""
    commit, rows = repo.at(rev), []
    for name, blob in sorted(commit.files.items()):
        row = {"type": "file", "oid": blob.oid, "size": len(blob.data), "path": name}
        if blob.lfs:
            row["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": len(blob.pointer)}
        rows += [row] * name.startswith(f"{path}/" if path else "")
    if not rows:
        raise Refusal(404, f"{path} does not exist on {rev}", "EntryNotFound", {"X-Repo-Commit": commit.sha})
    return rows


@route("GET", "/{repo}/resolve/{rev}/{path}")
def resolve(hub, call, repo, rev, path):
    """A file's content. The public Hub redirects to another server for large files."""
    commit = repo.at(rev)
    headers = {"X-Repo-Commit": commit.sha}
    if path not in commit.files:
        raise Refusal(404, "Entry not found", "EntryNotFound", headers)
    return Answer(commit.files[path].data, 200, {**headers, "ETag": f'"{commit.files[path].oid}"'})


# Publishing: the client asks which files are large, uploads those, then sends one commit with everything
@route("POST", "/api/models/{repo}/preupload/{rev}")
def before_upload(hub, call, repo, rev):
    _may_change(call, repo)
    files, told = repo.at(rev).files, []
    attributes = files.get(".gitattributes", Blob(b"")).data.decode()
    for file in call.json()["files"]:
        large = is_large(attributes, file["path"], file["size"], base64.b64decode(file.get("sample", "")))
        row = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
        old = files.get(file["path"])
        told.append({**row, "oid": old.sha256 if old.lfs else old.oid} if old else row)
    return {"files": told}


@route("POST", "/{repo}.git/info/lfs/objects/batch")
def large_files(hub, call, repo):
    call.known()
    objects = [{"oid": one["oid"], "size": one["size"]} for one in call.json()["objects"]]
    for one in objects:
        if one["oid"] not in repo.objects:
            upload = hub.link(repo, one["oid"], one["size"])
            verify = f"{hub.endpoint}/api/models/{repo.id}/verify"
            one["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
    return {"transfer": "basic", "objects": objects}


@route("PUT", "/storage/{key}")
def put_large_file(hub, call, key):
    if key not in hub.links:
        raise Refusal(403, "No such address")
    repo, oid, size = hub.links[key]
    if len(call.body) != size or hashlib.sha256(call.body).hexdigest() != oid:
        raise Refusal(400, f"Not what was announced: {len(call.body)} bytes of {size}, or another sha256 than {oid}")
    repo.objects[oid] = call.body


@route("POST", "/api/models/{repo}/verify")
def verify_large_file(hub, call, repo):
    asked = call.json()
    if len(repo.objects.get(asked["oid"], b"")) != asked["size"]:
        raise Refusal(404, f"{asked['oid']} was not uploaded")


@route("POST", "/api/models/{repo}/commit/{rev}")
def commit(hub, call, repo, rev):
    """One commit. The body is lines of JSON: a header, then the files to add and to delete."""
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
    site = f"{hub.endpoint}/{repo.id}"
    answer = {"success": True, "commitOid": made.sha, "commitUrl": f"{site}/commit/{made.sha}", "hookOutput": ""}
    return {**answer, "pullRequestUrl": f"{site}/discussions/{number}"} if call.asks("create_pr") else answer


def _may_change(call, repo):
    """Refuse a change that the user may not make: readers may open a pull request, only the owner may write."""
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
    elif files.pop(path, None) is None:
        raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")


# Model cards: the checks that refuse an upload
@route("POST", "/api/validate-yaml")
def validate(hub, call):
    _, errors, warnings = read_card(call.json()["content"])
    told = {"errors": [{"message": one} for one in errors], "warnings": [{"message": one} for one in warnings]}
    if errors:
        raise Refusal(400, "Invalid metadata", **told)
    return told
