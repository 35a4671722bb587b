"""An application behind the middleware for `Idempotency-Key`, on every driver: of ASGI in async worlds, of WSGI in sync ones."""

from __future__ import annotations

import json
import secrets
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

from psycopg.rows import namedtuple_row

from pgfence.asgi import IdempotencyMiddleware
from pgfence.wsgi import IdempotencyMiddleware as WsgiIdempotencyMiddleware
from support.effects import _at_once as at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    import psycopg

    from support.worlds import Contender, World

_ROWS = """
    SELECT scope, key, status, attempt, http_status, claim_id,
        extract(epoch FROM locked_until - clock_timestamp())::float8 AS claim_left
    FROM pgfence_idempotency_key WHERE key LIKE %s || ':%%'
"""


class Asked(NamedTuple):
    """A request as the application sees it."""

    method: str
    path: str
    body: bytes


class Answer(NamedTuple):
    """What the application answers."""

    status: int = 201
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)
    chunks: tuple[bytes, ...] = (b'{"paid": true}',)


class Got(NamedTuple):
    """What a client has received."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        """Return the one header of that name."""
        found = [value for header, value in self.headers if header == name]
        assert len(found) <= 1
        return found[0] if found else None

    @property
    def replayed(self) -> bool:
        return self.header("idempotent-replayed") == "true"

    @property
    def problem(self) -> str:
        """What a problem says, of which the form is looked at."""
        assert self.header("content-type") == "application/problem+json"
        assert self.header("content-length") == str(len(self.body))
        told = json.loads(self.body)
        assert told["status"] == self.status
        assert set(told) == {"title", "status", "detail", "code"}
        return str(told["detail"])

    @property
    def code(self) -> str:
        """The code of a problem, of which the form is looked at."""
        assert self.problem
        return str(json.loads(self.body)["code"])


class Site:
    """An application and its clients. Keys belong to the site alone.

    Attributes:
        seen: what has come to the application.
        handler: answers it; of either half, see `support.effects.Gate`.
    """

    def __init__(self, world: World, admin: psycopg.Connection[Any], **options: Any) -> None:
        self.world = world
        self.admin = admin
        self.engine = world.engine(**options)
        self.label = secrets.token_hex(6)
        self.seen: list[Asked] = []
        self.handler: Callable[[Asked], Coroutine[Any, Any, Answer]] = self.pay
        self.middleware = self.behind()

    async def pay(self, _: Asked) -> Answer:
        return Answer()

    def behind(self, **options: Any) -> Any:
        """Return the application behind a middleware."""
        kind: Any = self.world.pick(WsgiIdempotencyMiddleware, IdempotencyMiddleware)
        app: Any = self.world.pick(self._wsgi, self._asgi)
        engine = options.pop("engine", self.engine)
        self.middleware = kind(app, engine, **options)
        return self.middleware

    async def _asgi(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message["body"]
            more = message.get("more_body", False)
        answer = await self._answer(Asked(scope["method"], scope["path"], body))
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        for chunk in answer.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})

    def _wsgi(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        answer = at_once(self._answer(Asked(environ["REQUEST_METHOD"], environ["PATH_INFO"], body)))
        start_response(f"{answer.status} Words", list(answer.headers))
        return answer.chunks

    async def _answer(self, asked: Asked) -> Answer:
        self.seen.append(asked)
        return await self.handler(asked)

    async def ask(
        self,
        key: str | list[str] | None = "k",
        *,
        method: str = "POST",
        path: str = "/pay",
        query: str = "",
        body: bytes = b'{"amount": 5}',
        user: str | None = "me",
        headers: Iterable[tuple[str, str]] = (),
        who: Contender | None = None,
        app: Any = None,
    ) -> Got:
        """Send a request and return the answer. A key is this site's own; several stand as they are."""
        keys = [] if key is None else [f"{self.label}:{key}"] if isinstance(key, str) else key
        pairs = [("idempotency-key", one) for one in keys]
        pairs += [("authorization", user)] if user else []
        pairs += [("content-type", "application/json"), *headers]
        send = self.world.pick(ask_wsgi, ask_asgi)
        request = (method, path, query, pairs, body)
        got: Got = await (who or self.world).call(send, app or self.middleware, *request)
        return got

    def rows(self) -> list[Any]:
        """Return the rows of this site's keys."""
        cursor = self.admin.cursor(row_factory=namedtuple_row)
        return cursor.execute(_ROWS.encode(), [self.label]).fetchall()

    @property
    def row(self) -> Any:
        """The only row of this site."""
        (row,) = self.rows()
        return row

    def lapse(self) -> None:
        """Let the claims of this site be over, as if their processes had died and their time had passed."""
        query = "UPDATE pgfence_idempotency_key SET locked_until = clock_timestamp() - interval '1 s' WHERE key LIKE %s || ':%%'"
        self.admin.execute(query.encode(), [self.label])


async def ask_asgi(app: Any, method: str, path: str, query: str, headers: Any, body: bytes) -> Got:
    """Send a request to an application of ASGI, its body in two pieces."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": quote(path).encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        "client": ("127.0.0.1", 1),
        "server": ("site", 80),
    }
    pieces = [
        {"type": "http.request", "body": body[:3], "more_body": True},
        {"type": "http.request", "body": body[3:], "more_body": False},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return pieces.pop(0) if pieces else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *parts = sent
    assert start["type"] == "http.response.start"
    assert [part["type"] for part in parts] == ["http.response.body"] * len(parts)
    assert [part.get("more_body", False) for part in parts] == [True] * (len(parts) - 1) + [False]
    pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in start["headers"]]
    return Got(start["status"], pairs, b"".join(part.get("body", b"") for part in parts))


def ask_wsgi(app: Any, method: str, path: str, query: str, headers: Any, body: bytes, **more: Any) -> Got:
    """Send a request to an application of WSGI, as a server that joins repeated headers, and look whether it keeps the rules."""
    environ: dict[str, Any] = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": BytesIO(body),
        **more,
    }
    for name, value in headers:
        plain = name.upper().replace("-", "_")
        variable = plain if plain in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{plain}"
        joined = [environ[variable]] if plain != variable and variable in environ else []
        environ[variable] = ",".join([*joined, value])
    setup_testing_defaults(environ)
    started: list[Any] = []
    written: list[bytes] = []

    def start_response(status: str, found: Any, exc_info: Any = None) -> Any:
        started[:] = [status, found]
        return written.append

    parts = validator(app)(environ, start_response)
    try:
        received = b"".join(parts)
    finally:
        parts.close()  # type: ignore[attr-defined]
    status, found = started
    return Got(int(status.split()[0]), [(name.lower(), value) for name, value in found], b"".join(written) + received)
