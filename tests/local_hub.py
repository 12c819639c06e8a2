"""A small Hugging Face Hub over HTTP, in memory, for tests that publish and download models.

The clients are the real ones (huggingface_hub, Transformers, the `hf` command). `environment` makes the environment
variables that send them to this Hub:

    with LocalHub({"hf_made_up": "someone"}) as hub:
        subprocess.run([sys.executable, "publish.py"], env=environment(hub, home, "hf_made_up"), check=True)
        assert "README.md" in hub.files("someone/bert")

Models have commits, branches, tags and pull requests. Datasets, Spaces, collections, organizations, gated
repositories, merges and Xet are missing, and a long list comes in one page. A request for a missing feature is
answered with 501, which no client retries. The tests cannot prove that the public Hub still gives the same answers.

This file holds the server. `hub_routes.py` answers its requests, with the calls and answers of `hub_answers.py`, the
repositories of `hub_store.py` and the checks of `hub_cards.py`.

Requires the standard library and PyYAML, which huggingface_hub installs.
"""

import os
import socket
import socketserver
import sys
import threading
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from hub_answers import Answer, Call, Refusal
from hub_routes import serve
from hub_store import Repository


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
    return {**kept, **told, **({"HF_TOKEN": token} if token else {})}


@dataclass
class Request:
    """One request: its path with query, the token it carried, and the status of the answer (None: no answer)."""

    method: str
    path: str
    token: str | None = None
    status: int | None = None


class LocalHub:
    """The server, and methods that read its store without a request. `users` maps tokens to user names."""

    def __init__(self, users: dict[str, str]):
        self.users = dict(users)
        self.requests: list[Request] = []
        # A function of (method, path), called before each request is served. Its result: None to serve the request; a
        # status to answer with; 0 to drop the connection unanswered.
        self.fail: Callable[[str, str], int | None] | None = None
        self.endpoint = ""
        self.repositories: dict[str, Repository] = {}
        self.links: dict[str, tuple] = {}
        self._port = 0
        self._server: _Server | None = None
        self._lock = threading.RLock()

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    def start(self):
        """Start serving: on a free port the first time, later on the same port."""
        self._server = _Server(self, self._port)
        self._port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self._port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self):
        """Stop serving, and close every open connection. The store keeps its contents."""
        with self._lock:
            server, self._server = self._server, None
        if server:
            server.shutdown()
            server.server_close()
            server.close_connections()  # last: a client that waits for its answer may start the Hub again

    def files(self, repo_id, revision="main") -> dict[str, bytes]:
        with self._lock:
            return {path: blob.data for path, blob in self.repositories[repo_id].at(revision).files.items()}

    def commits(self, repo_id, revision="main") -> list[str]:
        """The commit ids, newest first."""
        with self._lock:
            return [commit.sha for commit in self.repositories[repo_id].history(revision)]

    def tags(self, repo_id) -> dict[str, str]:
        with self._lock:
            return self.repositories[repo_id].under("refs/tags/")

    def branches(self, repo_id) -> dict[str, str]:
        with self._lock:
            return self.repositories[repo_id].under("refs/heads/")

    def is_private(self, repo_id) -> bool:
        return self.repositories[repo_id].private

    def answer(self, server, request, headers, body) -> Answer | None:
        """The answer to a request; None if the connection has to be dropped."""
        self.requests.append(request)
        failure = self.fail(request.method, request.path) if self.fail else None
        if failure == 0:
            return None
        if failure is not None:
            return Refusal(failure, "This request was made to fail.").answer()
        with self._lock:
            if server is not self._server:  # the Hub was stopped meanwhile
                return None
            try:
                return serve(self, Call(self, request, headers, body))
            except Refusal as refusal:
                return refusal.answer()
            except Exception:
                traceback.print_exc()
                return Refusal(501, traceback.format_exc()).answer()

    def visible(self, call, repo_id) -> Repository:
        """The repository; refused like a missing one if the caller may not see it."""
        repository = self.repositories.get(repo_id)
        if repository and (not repository.private or call.user == repository.owner):
            return repository
        if call.user is None:
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        raise Refusal(404, "Repository not found", "RepoNotFound")

    def link(self, *what) -> str:
        """An address for uploading one object; it needs no token."""
        key = uuid.uuid4().hex
        self.links[key] = what
        return f"{self.endpoint}/storage/{key}"


# HTTP
class _Server(socketserver.ThreadingTCPServer):
    """One thread per connection. Keeps a list of the connections, to close those that clients hold open."""

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
        if not isinstance(sys.exception(), ConnectionError):  # a client may close the connection early
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer is sent in one write

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
