"""The `Idempotency-Key` header as ASGI middleware, for FastAPI, Starlette, Django and others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

from pgfence._api.inputs import DAY
from pgfence._http import answers
from pgfence._http.answers import ProblemResponse
from pgfence._http.exchange import Exchange, RequestMarker, claim_key
from pgfence._http.problems import BODY_INCOMPLETE
from pgfence._http.rules import MEBIBYTE, WHY, HttpRequest, Rules, parse_length
from pgfence.effects._claim import Reply
from pgfence.effects._ends import describe_error
from pgfence.errors import PgfenceError
from pgfence.lease._engines import ASYNC_ENGINES

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence._http.rules import OnFailure
    from pgfence._process.clock import Seconds
    from pgfence.effects._running import RunningAttempt

__all__ = ["IdempotencyMiddleware"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

# Extensions of ASGI whose responses cannot be stored. The middleware removes them, so that the application sends a body instead.
_NOT_OFFERED = ("http.response.pathsend", "http.response.trailers", "http.response.zerocopysend")


class IdempotencyMiddleware:
    """Run the application once for all requests with the same `Idempotency-Key`, and return the same response to each.

    ::

        app.add_middleware(
            IdempotencyMiddleware,
            engine=engine,
            principal=user_of,
            routes=["/payments"],
        )

    The middleware claims the key in a separate transaction before it calls the application. When the response is complete, the
    middleware stores it and then sends it. While the application runs, a thread renews the claim, and no connection is held.

    Guarantees: among the requests with the same key, principal, method and path, at most one has the claim on the key at a
    time, and at most one response is stored, whose status is below `record_below`. Later requests get the status, body and
    headers of that response, without connection-specific headers, `Set-Cookie`, `Date` and `Server`, and with
    `Idempotent-Replayed: true`. Requests that arrive while the first one runs get a 409 with `Retry-After`. A request whose
    query, content type or body differs from that of the first one gets a 422. If the client disconnects before the response is
    sent, the request still runs to completion.

    Limitations: a handler that fails or dies may have done part of its work, and the next request runs it again. Do its database
    work in one transaction, and other work in an `IdempotentEffect`, whose steps are stored.

    A response larger than `max_body`, or of type `text/event-stream`, is sent as it is produced and not stored. Instead, a note
    that the request was processed is stored, even if the client disconnects partway, and later requests get a 409 without
    `Retry-After`. Scopes other than `http`, and requests that need no key, pass through unchanged.

    Inside another IdempotencyMiddleware that has already claimed the key, this middleware claims and stores nothing. It returns
    400 if it finds no principal, 413 if the announced body is longer than its own `max_body`, and otherwise passes the request
    on. The settings of the outer middleware apply, for example `on_failure`.

    Args:
        app: the application.
        engine: an AsyncEngine, or a function that returns one. The tables must exist: run `pgfence install`.
        principal: a function that takes the ASGI scope and returns the authenticated sender of the request. It must never return
            a constant, or a value that the client can choose. The principal must be unique among all applications and tenants
            that share the tables. If the function returns None, the request gets a 400. Without `principal`, a digest of the
            headers `Authorization` and `Cookie` identifies the client, and a request without both gets a 400. Omit `principal`
            only if these headers authenticate the client. A retry with other values of these headers runs again.
        methods: the HTTP methods that the middleware handles.
        routes: paths below the application's root path, such as `/payments`, `/orders/{id}/payments` or `/v1/*`. On these paths,
            a request without a key gets a 400. `{name:path}` matches any number of segments, and a trailing slash makes no
            difference, but `/v1/*` does not match `/v1`. None means all paths; a request without a key is then passed on to the
            application.
        record_below: responses with this status or above are failures, which are sent and not stored. The same applies to the
            statuses 401, 408, 425 and 429, and to responses with `Retry-After` whose status is 400 or above, because the same
            request may succeed later.
        max_body: the largest request or response body, in bytes. A longer request gets a 413, and a longer response is not
            stored.
        ttl: seconds until the claim of a dead process expires, from 0.3 s to a day (a timedelta may be longer). The TTL does not
            limit how long a request may take.
        keep: seconds for which a response is kept, at least the TTL.
        on_failure: what happens to the key after a failure, that is, an error, no response, or a response that is not stored.
            With "free", the next request runs immediately. With "lapse", the next request runs after the claim has expired; use
            "lapse" for handlers that leave work running. After a cancellation, the key always lapses.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value. For a request, TypeError is raised if `principal` returns
            something other than a str or None.
    """

    def __init__(
        self,
        app: App,
        engine: AsyncEngine | Callable[[], AsyncEngine],
        *,
        principal: Callable[[Scope], str | None] | None = None,
        methods: Collection[str] = ("POST", "PATCH"),
        routes: Collection[str] | None = None,
        record_below: int = 500,
        max_body: int = MEBIBYTE,
        ttl: Seconds = 60,
        keep: Seconds = DAY,
        on_failure: OnFailure = "free",
    ) -> None:
        self._app = app
        self._engine = ASYNC_ENGINES.bind(engine, type(self).__name__, WHY)
        self._rules = Rules.of(
            principal=principal,
            methods=methods,
            routes=routes,
            record_below=record_below,
            max_body=max_body,
            ttl=ttl,
            keep=keep,
            on_failure=on_failure,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. The server calls this method."""
        request = (
            _parse_request(scope)
            if scope["type"] == "http" and self._rules.is_handled_method(scope["method"])
            else None
        )
        if request is None or not self._rules.applies_to(request):
            await self._app(scope, receive, send)
            return
        found: _AsgiExchange | Reply | None
        try:
            found = await self._begin(request, scope, receive, send)
        except ProblemResponse as refusal:
            found = refusal.reply
        except PgfenceError as error:
            found = answers.build_refusal(error, str(request))
        if isinstance(found, _AsgiExchange):
            await found.run(self._app, scope)
        elif found is not None:
            await _send(found, send)
        else:
            await self._app(scope, receive, send)

    async def _begin(
        self, request: HttpRequest, scope: Scope, receive: Receive, send: Send
    ) -> _AsgiExchange | Reply | None:
        """Claim the key of a request, or return the response to send. Return None if an outer middleware has claimed the key."""
        rules = self._rules
        key, owner = rules.read_key(request), rules.find_principal(request, scope)
        if RequestMarker.is_marked(scope, request):
            return None
        body = await _read_body(receive, rules)
        wanted = rules.build_effect_key(request, owner, key, body)
        found = await claim_key(self._engine, wanted, request)
        return found if isinstance(found, Reply) else _AsgiExchange(found, rules, request, body, receive, send)


class _AsgiExchange(Exchange):
    """An ASGI request whose key is claimed."""

    def __init__(
        self, running: RunningAttempt, rules: Rules, request: HttpRequest, body: bytes, receive: Receive, send: Send
    ) -> None:
        super().__init__(running, rules, request)
        self._body: bytes | None = body
        self._receive, self._send = receive, send
        self._start: Message | None = None
        self._open = asyncio.Event()

    async def run(self, app: App, scope: Scope) -> None:
        self._marker.mark(scope)
        if "extensions" in scope:
            offered = scope["extensions"] or {}
            scope["extensions"] = {name: offered[name] for name in offered if name not in _NOT_OFFERED}
        try:
            await app(scope, self.receive, self.send)
        except Exception as error:
            await self._end_stopped(describe_error(error))
            raise
        except BaseException as error:
            self.interrupt(describe_error(error))
            raise
        await self._end_stopped("no response")

    async def receive(self) -> Message:
        """Return the body, then the client's further messages, which are read only while the response is being sent."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._open.wait()
        message = await self._receive()
        self._gone = self._gone or message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        """Handle a part of the application's response."""
        if message["type"] == "http.response.start" and not self._open.is_set():
            if self._start is not None:
                raise RuntimeError("the application sent http.response.start twice")
            self._start = {**message, "headers": list(message.get("headers", ()))}
            if self._rules.is_streaming(_decode_headers(self._start)):
                await self._start_streaming()
        elif message["type"] == "http.response.body" and self._start is not None and not self._marker.ended:
            await self._add(self._start, message)
        else:
            await self._send(message)

    async def _add(self, start: Message, message: Message) -> None:
        self._chunks.append(message.get("body", b""))
        self._size += len(self._chunks[-1])
        if not self._open.is_set() and self._size > self._rules.max_body:
            await self._start_streaming()
        if not message.get("more_body", False):
            await self._complete(start)
        elif self._open.is_set():
            await self._flush(more=True)

    async def _start_streaming(self) -> None:
        """From now on, send the response as it is produced."""
        assert self._start is not None
        self._open.set()
        await self._forward(self._start)

    async def _flush(self, *, more: bool) -> None:
        body = b"".join(self._chunks)
        self._chunks.clear()
        await self._forward({"type": "http.response.body", "body": body, "more_body": more})

    async def _forward(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:  # raised by servers when the client has disconnected
            self._gone = True
            raise

    async def _complete(self, start: Message) -> None:
        """Store the response, then send it or, if it was sent as it was produced, its last part."""
        flows = self._open.is_set()
        reply = self._rules.build_record(
            start["status"], _decode_headers(start), None if flows else b"".join(self._chunks)
        )
        if self._marker.skips_recording:
            reply = None
        instead = None
        if reply is None:
            await self.fail(f"status {start['status']}")
        else:
            instead = await self.store(reply)
        self._open.set()
        if not flows and instead:
            await _send(instead, self._send)
            return
        if not flows:
            await self._send(start)
        await self._flush(more=False)

    async def _end_stopped(self, how: str) -> None:
        """End the attempt after the application has stopped, unless the attempt has already ended."""
        if self._gone and self._start is not None and not self._marker.ended:
            # The application has responded, but the client disconnected before it had received the whole response.
            reply = self._rules.build_record(self._start["status"], _decode_headers(self._start), None)
            if reply is not None:
                await self.store(reply)
        await self.fail(how)


def _parse_request(scope: Scope) -> HttpRequest:
    root, path = scope.get("root_path", "").rstrip("/"), scope["path"]
    # Some servers include the root in the path.
    if root and path.startswith(root) and path[len(root) :][:1] in ("", "/"):
        path = path[len(root) :]
    keys, credentials, cookies = [], [], []
    content_type, length = b"", None
    headers = scope["headers"] = list(scope["headers"])
    for raw, value in headers:
        name = raw.lower()
        if name == b"idempotency-key":
            keys.append(value.decode("latin-1"))
        elif name == b"authorization" and value:
            credentials.append(name + b":" + value)
        elif name == b"cookie" and value:
            cookies.append(value)
        elif name == b"content-type":
            content_type = value
        elif name == b"content-length":
            length = parse_length(value.decode("latin-1"))
    if cookies:
        credentials.append(b"cookie:" + b"; ".join(cookies))
    query = scope.get("query_string", b"")
    return HttpRequest(scope["method"], root, path, query, content_type, tuple(keys), tuple(credentials), length)


async def _read_body(receive: Receive, rules: Rules) -> bytes:
    """Return the body of a request.

    Raises:
        ProblemResponse: the body is too long, or the client disconnected before the end of the body.
    """
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            # The client has disconnected, but outer middlewares, such as Starlette's, treat a missing response as an error.
            raise ProblemResponse(BODY_INCOMPLETE)
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        rules.check_length(size)
        more = message.get("more_body", False)
    return b"".join(chunks)


def _decode_headers(start: Message) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start.get("headers", ())]


async def _send(reply: Reply, send: Send) -> None:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
