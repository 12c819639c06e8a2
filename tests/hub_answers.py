"""Calls to the local Hub, and its answers and refusals."""

import json
from dataclasses import dataclass, field
from urllib.parse import parse_qs


@dataclass
class Answer:
    """An answer's status, headers and body: bytes, or an object that is sent as JSON."""

    body: object = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.headers.setdefault("Content-Type", "application/octet-stream")
        if not isinstance(self.body, bytes):
            self.headers["Content-Type"] = "application/json; charset=utf-8"
            self.body = json.dumps(self.body).encode()


class Refusal(Exception):
    """An error in the Hub's own words: a status, a message, and the code by which clients tell some errors apart."""

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
    """A request as the routes see it: the user, the query and the body."""

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
        """The user's name; refuses a request without a valid token."""
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        return self.user

    def must_own(self, namespace, what):
        if self.known() != namespace:
            raise Refusal(403, f'You don\'t have the rights to {what} under the namespace "{namespace}"')
