"""The `Idempotency-Key` header as WSGI middleware, for Flask, Django and others."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

from pgfence._api.contexts import attach
from pgfence._api.inputs import DAY
from pgfence._http import answers
from pgfence._http.answers import ProblemResponse
from pgfence._http.exchange import Exchange, RequestMarker, claim_key
from pgfence._http.problems import BODY_INCOMPLETE, LENGTH_REQUIRED, choose_phrase
from pgfence._http.rules import MEBIBYTE, WHY, HttpRequest, Rules, find_length, parse_length
from pgfence._process.coroutines import run_sync
from pgfence.effects._claim import Reply
from pgfence.effects._ends import describe_error
from pgfence.errors import PgfenceError
from pgfence.lease._engines import SYNC_ENGINES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from types import TracebackType
    from typing import TypeAlias
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from sqlalchemy import Engine

    from pgfence._http.rules import OnFailure
    from pgfence._process.clock import Seconds
    from pgfence.effects._running import RunningAttempt

    Headers: TypeAlias = list[tuple[str, str]]
    ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]

__all__ = ["IdempotencyMiddleware"]


class IdempotencyMiddleware:
    """Run the application once for all requests with the same `Idempotency-Key`, and return the same response to each.

    ::

        app.wsgi_app = IdempotencyMiddleware(
            app.wsgi_app,
            engine,
            principal=user_of,
            routes=["/payments"],
        )

    Guarantees, arguments and responses are the same as for `pgfence.asgi.IdempotencyMiddleware`, with an Engine, a WSGI
    application, and a `principal` that takes the WSGI environment and does not read the body. Routes are matched against
    `PATH_INFO`, the path below the application's root. Inside another IdempotencyMiddleware that has already claimed the key,
    this middleware claims and stores nothing.

    An iterable, a generator, the function `write` and the server's file wrapper are supported. The whole output is collected
    before the response is stored and sent, unless the response is larger than `max_body` or of type `text/event-stream`. The
    iterable's `close()` is called when the server closes the response. The status code is stored, but the reason phrase is not. A
    server that joins repeated headers turns two keys into one malformed key, which gets a 400. A request body needs a length, or a
    server that terminates it (`wsgi.input_terminated`). Otherwise, the request gets a 411.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value. For a request, TypeError is raised if `principal` returns
            something other than a str or None.
    """

    def __init__(
        self,
        app: WSGIApplication,
        engine: Engine | Callable[[], Engine],
        *,
        principal: Callable[[dict[str, Any]], str | None] | None = None,
        methods: Collection[str] = ("POST", "PATCH"),
        routes: Collection[str] | None = None,
        record_below: int = 500,
        max_body: int = MEBIBYTE,
        ttl: Seconds = 60,
        keep: Seconds = DAY,
        on_failure: OnFailure = "free",
    ) -> None:
        self._app = app
        self._engine = SYNC_ENGINES.bind(engine, type(self).__name__, WHY)
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

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve a request. The server calls this method."""
        request = _parse_request(environ) if self._rules.is_handled_method(environ["REQUEST_METHOD"]) else None
        if request is None or not self._rules.applies_to(request):
            return self._app(environ, start_response)
        found: _WsgiExchange | Reply | None
        try:
            found = self._begin(request, environ, start_response)
        except ProblemResponse as refusal:
            found = refusal.reply
        except PgfenceError as error:
            found = answers.build_refusal(error, str(request))
        if isinstance(found, _WsgiExchange):
            return found.run(self._app, environ)
        return self._app(environ, start_response) if found is None else _send(found, start_response)

    def _begin(
        self, request: HttpRequest, environ: WSGIEnvironment, start_response: StartResponse
    ) -> _WsgiExchange | Reply | None:
        """Claim the key of a request, or return the response to send. Return None if an outer middleware has claimed the key."""
        rules = self._rules
        key, owner = rules.read_key(request), rules.find_principal(request, environ)
        if RequestMarker.is_marked(environ, request):
            return None
        body = _read_body(environ, request, rules)
        wanted = rules.build_effect_key(request, owner, key, body)
        found = run_sync(claim_key, self._engine, wanted, request)
        if isinstance(found, Reply):
            return found
        environ["wsgi.input"] = BytesIO(body)
        return _WsgiExchange(found, rules, request, start_response)


class _WsgiExchange(Exchange):
    """A WSGI request whose key is claimed."""

    def __init__(
        self, running: RunningAttempt, rules: Rules, request: HttpRequest, start_response: StartResponse
    ) -> None:
        super().__init__(running, rules, request)
        self._server = start_response
        self._started: tuple[str, Headers] | None = None
        self._write: Callable[[bytes], object] | None = None
        self._streams = False
        self._length: int | None = None

    def run(self, app: WSGIApplication, environ: WSGIEnvironment) -> Iterable[bytes]:
        parts: Iterable[bytes] = ()
        self._marker.mark(environ)
        try:
            parts = app(environ, self.start_response)
            rest = iter(parts)
            for chunk in rest:
                self._chunks.append(chunk)
                self._size += len(chunk)
                if self._flows:
                    return _ResponseBody(self, self._start_streaming(rest), parts)
            return _ResponseBody(self, iter(self._complete()), parts)
        except BaseException as error:
            self._end_stopped(error)
            try:
                _close(parts)
            except Exception as failure:
                attach(error, failure, "while the response was being closed")
            raise

    def start_response(
        self, status: str, headers: Headers, exc_info: ExcInfo | None = None, /
    ) -> Callable[[bytes], object]:
        """Handle the status and headers of the application's response."""
        if exc_info is None and self._started is not None:
            raise AssertionError("start_response was called a second time without exc_info")
        if self._write is not None:
            self._write = self._server(status, headers, exc_info)
        # Nothing has been sent yet, so an error may still replace the response.
        self._started = status, headers
        self._chunks.clear()
        self._size = 0
        self._streams = self._rules.is_streaming(headers)
        self._length = find_length(headers)
        return self.write

    def write(self, data: bytes) -> None:
        """Handle a part of the response that the application passes to `write`."""
        self._size += len(data)
        if self._write is None:
            self._chunks.append(data)
            if not self._flows:
                return
            self._write = self._begin()
            data = b"".join(self._chunks)
            self._chunks.clear()
        try:
            self._write(data)
        except OSError:  # raised by servers when the client has disconnected
            self._gone = True
            raise

    @property
    def _begun(self) -> tuple[str, Headers]:
        if self._started is None:
            raise AssertionError("the application did not call start_response")
        return self._started

    @property
    def _flows(self) -> bool:
        """Whether the response is sent as it is produced."""
        return self._streams or self._write is not None or self._size > self._rules.max_body

    def _begin(self) -> Callable[[bytes], object]:
        return self._server(*self._begun)

    def _start_streaming(self, rest: Iterator[bytes]) -> Iterator[bytes]:
        """Send the collected parts, then each further part. The part that completes the announced length waits for the record."""
        held: list[bytes] = []  # sent only after the response is recorded
        try:
            if self._write is None:
                self._write = self._begin()
            part: bytes | None = b"".join(self._chunks)
            self._chunks.clear()
            while part is not None:
                if held or self._size == self._length:
                    held.append(part)
                else:
                    yield part
                if (part := next(rest, None)) is not None:
                    self._size += len(part)
            self._record(None)
        except BaseException as error:
            self._end_stopped(error)
            raise
        yield from held

    def _complete(self) -> Iterable[bytes]:
        """Store the response, then return what is left to send of it."""
        if self._write is not None:
            self._record(None)
            return ()
        instead = self._record(b"".join(self._chunks))
        if instead is not None:
            return _send(instead, self._server)
        self._begin()
        return self._chunks

    def _record(self, body: bytes | None) -> Reply | None:
        """Store a response, unless it is a failure. Return the response to send instead if this attempt was superseded."""
        status, headers = self._begun
        reply = self._rules.build_record(int(status.split(" ", 1)[0]), headers, body)
        if reply is None:
            self._end_failed(None)
            return None
        return run_sync(self.store, reply)

    def give_up(self) -> None:
        """End the attempt when the server stops reading the response."""
        self._gone = True
        self._end_stopped(None)

    def _end_stopped(self, error: BaseException | None) -> None:
        """End the attempt after the application has stopped, unless the attempt has already ended."""
        answered = self._started is not None and isinstance(error, Exception | None)
        if self._gone and answered and not self._marker.ended:
            # The application has responded, but the client disconnected before it had received the whole response.
            self._record(None)
        self._end_failed(error)

    def _end_failed(self, error: BaseException | None) -> None:
        """End the attempt without a record, unless it has already ended."""
        if self._marker.ended:
            return
        begun = self._started
        how = describe_error(error) if error else f"status {begun[0]}" if begun else "no response"
        if isinstance(error, Exception | None):
            run_sync(self.fail, how)
        else:
            self.interrupt(how)


class _ResponseBody:
    """The response body that the server sends and then closes."""

    def __init__(self, exchange: _WsgiExchange, chunks: Iterator[bytes], parts: Iterable[bytes]) -> None:
        self._exchange = exchange
        self._chunks = chunks
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks

    def close(self) -> None:
        try:
            self._exchange.give_up()
        finally:
            _close(self._parts)


def _close(parts: object) -> None:
    if close := getattr(parts, "close", None):
        close()


def _parse_request(environ: WSGIEnvironment) -> HttpRequest:
    key = environ.get("HTTP_IDEMPOTENCY_KEY")
    credentials = [
        f"{name.lower()}:{value}".encode("latin-1")
        for name in ("AUTHORIZATION", "COOKIE")
        if (value := environ.get(f"HTTP_{name}"))
    ]
    return HttpRequest(
        environ["REQUEST_METHOD"],
        _decode_text(environ.get("SCRIPT_NAME", "")),
        _decode_text(environ.get("PATH_INFO", "")),
        environ.get("QUERY_STRING", "").encode("latin-1"),
        environ.get("CONTENT_TYPE", "").encode("latin-1"),
        () if key is None else (key,),
        tuple(credentials),
        parse_length(environ.get("CONTENT_LENGTH", "")),
    )


def _decode_text(raw: str) -> str:
    """Return the UTF-8 text of a value that the environment contains decoded as Latin-1."""
    return raw.encode("latin-1").decode("utf-8", "surrogateescape")


def _read_body(environ: WSGIEnvironment, request: HttpRequest, rules: Rules) -> bytes:
    """Return the body of a request.

    Raises:
        ProblemResponse: the body is too long, its end is unknown, or the client has disconnected before its end.
    """
    left = request.length
    if left is None:
        if not environ.get("wsgi.input_terminated"):
            if environ.get("CONTENT_LENGTH") or environ.get("HTTP_TRANSFER_ENCODING"):
                raise ProblemResponse(LENGTH_REQUIRED)
            return b""
        left = rules.max_body + 1
    chunks = []
    while left and (chunk := environ["wsgi.input"].read(left)):
        chunks.append(chunk)
        left -= len(chunk)
    body = b"".join(chunks)
    rules.check_length(len(body))
    if request.length is not None and left:
        raise ProblemResponse(BODY_INCOMPLETE)
    return body


def _send(reply: Reply, start_response: StartResponse) -> Iterable[bytes]:
    start_response(f"{reply.status} {choose_phrase(reply.status)}", list(reply.headers))
    return [reply.body]
