"""What is particular to WSGI: iterables and their close, `write`, errors after the start, bodies, and frameworks."""

from __future__ import annotations

import asyncio
import sys
from io import BytesIO
from typing import TYPE_CHECKING, Any
from wsgiref.util import FileWrapper

import pytest
from flask import Flask, Response, request, stream_with_context

from pgfence.wsgi import IdempotencyMiddleware
from support.sites import Site, ask_wsgi
from support.worlds import World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import psycopg

pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture
async def site(dsn: str, admin: psycopg.Connection[Any]) -> AsyncIterator[Site]:
    """An application behind the middleware."""
    world = World("psycopg", dsn)
    yield Site(world, admin)
    await world.close()


class Parts:
    """What an application returns: parts, an error perhaps, and a close that is counted."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        for part in self.parts:
            if isinstance(part, BaseException):
                raise part
            yield part

    def close(self) -> None:
        self.closed += 1


def serve(site: Site, app: Any, **options: Any) -> Any:
    """Put a middleware around an application of WSGI; return what sends it a request."""
    middleware = IdempotencyMiddleware(app, site.engine, **options)

    def send(key: str = "k", body: bytes = b"{}", **more: Any) -> Any:
        headers = [("idempotency-key", f"{site.label}:{key}"), ("authorization", "me")]
        return ask_wsgi(middleware, "POST", "/pay", "", headers, body, **more)

    return send


def begun(middleware: Any, site: Site, sent: list[Any], **more: Any) -> Any:
    """Send a request as a server that does what the test says with the parts."""
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/pay",
        "HTTP_IDEMPOTENCY_KEY": f"{site.label}:k",
        "HTTP_AUTHORIZATION": "me",
        "wsgi.input": BytesIO(b""),
        **more,
    }

    def start_response(status: str, headers: Any, exc_info: Any = None) -> Any:
        sent.append(status)
        if exc_info:
            raise exc_info[1]
        return sent.append

    return middleware(environ, start_response)


async def test_parts_are_read_before_they_are_sent_and_closed_afterwards(site: Site) -> None:
    """The key is done when the server gets the first part; the application's `close` runs after the response."""
    parts = Parts(b"a", b"", b"b")
    sent: list[Any] = []

    def app(environ: Any, start_response: Any) -> Any:
        start_response("201 Paid", [])
        return parts

    answer = begun(IdempotencyMiddleware(app, site.engine), site, sent)
    assert (site.row.status, parts.closed, sent) == ("done", 0, ["201 Paid"])
    assert b"".join(answer) == b"ab"
    answer.close()
    assert parts.closed == 1
    again = begun(IdempotencyMiddleware(app, site.engine), site, sent)
    assert (b"".join(again), sent) == (b"ab", ["201 Paid", "201 Created"])


@pytest.mark.parametrize("early", [True, False])
async def test_an_error_frees_the_key_and_closes_what_there_is(site: Site, early: bool) -> None:
    """C101: whether the application itself raises, or one of its parts."""
    parts = Parts(b"a", ValueError("declined"))

    def app(environ: Any, start_response: Any) -> Any:
        start_response("201 Paid", [])
        if early:
            raise ValueError("declined")
        return parts

    with pytest.raises(ValueError, match="declined"):
        serve(site, app)()
    assert (site.row.status, parts.closed) == ("free", 0 if early else 1)


async def test_write_is_a_part_like_others(site: Site) -> None:
    """What is written comes before the parts; all of it is recorded, or all of it passes."""

    def app(environ: Any, start_response: Any) -> Any:
        write = start_response("201 Paid", [("content-type", "text/plain")])
        write(b"abc")
        write(b"def")
        return [b"ghi"]

    send = serve(site, app, max_body=9)
    assert [(got.body, got.replayed) for got in (send(), send())] == [(b"abcdefghi", False), (b"abcdefghi", True)]
    for limit in (8, 5):
        send = serve(site, app, max_body=limit)
        assert send(f"{limit}").body == b"abcdefghi"
        assert (send(f"{limit}").status, len(site.rows())) == (409, 2 if limit == 8 else 3)


async def test_an_error_may_change_the_response_until_it_is_sent(site: Site) -> None:
    """`start_response` with `exc_info`: a new response before anything was sent; after that, the error itself."""

    def app(environ: Any, start_response: Any) -> Any:
        write = start_response("200 OK", [("content-type", "text/plain")])
        write(b"half a page")
        try:
            raise ValueError("too late")
        except ValueError:
            start_response("402 Declined", [("content-type", "text/html")], sys.exc_info())
        return [b"sorry"]

    send = serve(site, app)
    got = send()
    assert (got.status, got.headers, got.body) == (402, [("content-type", "text/html")], b"sorry")
    assert send().replayed

    site.admin.execute("DELETE FROM pgfence_idempotency_key WHERE key = %s", [f"{site.label}:k"])
    sent: list[Any] = []
    with pytest.raises(ValueError, match="too late"):
        begun(IdempotencyMiddleware(app, site.engine, max_body=5), site, sent)
    assert (sent, site.row.status) == (["200 OK", b"half a page", "402 Declined"], "free")


async def test_an_application_that_starts_no_response_is_an_error(site: Site) -> None:
    """Neither no call nor two calls of `start_response` are a response."""

    def none(environ: Any, start_response: Any) -> Any:
        return [b"a"]

    def two(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        start_response("200 OK", [])
        return [b"a"]

    for app, match in ((none, "did not call start_response"), (two, "called a second time")):
        with pytest.raises(AssertionError, match=match):
            list(begun(IdempotencyMiddleware(app, site.engine), site, []))
        assert site.row.status == "free"


async def test_a_long_response_that_never_began_is_closed(site: Site) -> None:
    """A server that gives up before it asks for a part leaves a failure, and nothing open."""
    parts = Parts(b"0123456789")
    answer = begun(IdempotencyMiddleware(lambda *_: parts, site.engine, max_body=5), site, [])
    answer.close()
    assert (parts.closed, site.row.status) == (1, "free")


async def test_a_long_response_is_sent_as_it_comes(site: Site) -> None:
    """Beyond `max_body` nothing is collected, and nothing waits for what comes after it."""
    parts = Parts(*[b"0123456789"] * 2, b"", *[b"0123456789"] * 3)
    given: list[Any] = []

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return (given.append(part) or part for part in parts)

    sent: list[Any] = []
    answer = iter(begun(IdempotencyMiddleware(app, site.engine, max_body=15), site, sent))
    assert next(answer) == b"0123456789" * 2
    assert (sent, len(given)) == (["200 OK"], 2)
    assert b"".join(answer) == b"0123456789" * 3
    assert site.row.status == "done"


async def test_the_part_that_completes_a_length_waits_until_it_is_recorded(site: Site) -> None:
    """A client that knows the length knows the end of its response: by then there is a record."""

    def app(environ: Any, start_response: Any) -> Any:
        write = start_response("200 OK", [("content-length", "40")])
        write(b"0123456789")
        return [b"0123456789"] * 3

    sent: list[Any] = []
    answer = iter(begun(IdempotencyMiddleware(app, site.engine, max_body=15), site, sent))
    assert sent == ["200 OK", b"0123456789"]
    assert [next(answer), next(answer), site.row.status] == [b"0123456789"] * 2 + ["in_progress"]
    assert [next(answer), site.row.status, list(answer)] == [b"0123456789", "done", []]


@pytest.mark.parametrize("kind", ["text/event-stream", "Text/Event-Stream; charset=utf-8"])
async def test_an_event_is_sent_before_the_next_one_is_produced(site: Site, kind: str) -> None:
    """A reader of a stream of events is never behind, also if it writes at the same time."""
    made: list[int] = []

    def app(environ: Any, start_response: Any) -> Any:
        write = start_response("200 OK", [("content-type", kind)])

        def events() -> Iterator[bytes]:
            for n in range(3):
                made.append(n)
                yield b"data: %d\n\n" % n
                write(b"\n")

        return events()

    sent: list[Any] = []
    for n, event in enumerate(begun(IdempotencyMiddleware(app, site.engine), site, sent)):
        assert (event, made, sent[1:]) == (b"data: %d\n\n" % n, list(range(n + 1)), [b"\n"] * n)
    assert (len(made), site.row.status) == (3, "done")


@pytest.mark.parametrize("read", [0, 1])
async def test_a_long_response_that_the_server_aborts_is_not_repeated(site: Site, read: int) -> None:
    """Its client has disconnected: the request was processed; also if the server never asked for a part."""
    parts = Parts(*[b"0123456789"] * 5)

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return parts

    answer = begun(IdempotencyMiddleware(app, site.engine, max_body=15, ttl=30), site, [])
    rest = iter(answer)
    for _ in range(read):
        next(rest)
    answer.close()
    assert parts.closed == 1
    assert site.row.status == "done"
    sent: list[Any] = []
    (told,) = begun(IdempotencyMiddleware(app, site.engine), site, sent)
    assert (sent, b"was processed" in told) == (["409 Conflict"], True)


@pytest.mark.parametrize(("status", "left"), [("200 OK", "done"), ("503 Away", "free")])
async def test_a_write_without_a_response_is_not_done_twice(site: Site, status: str, left: str) -> None:
    """A server that cannot send raises an error in the application, which gives up; a failure stays one."""

    def app(environ: Any, start_response: Any) -> Any:
        write = start_response(status, [])
        write(b"0123456789")
        return []

    class Gone(list[Any]):
        def append(self, item: Any) -> None:
            if isinstance(item, bytes):
                raise BrokenPipeError
            super().append(item)

    with pytest.raises(BrokenPipeError):
        begun(IdempotencyMiddleware(app, site.engine, max_body=5), site, Gone())
    assert site.row.status == left


@pytest.mark.parametrize("closes", [True, False])
async def test_a_nested_middleware_passes_until_a_long_response_has_ended(site: Site, closes: bool) -> None:
    """C100: inside it passes on while the answer flows; with the same environment after its end or its close it is a replay."""
    environs: list[Any] = []

    def app(environ: Any, start_response: Any) -> Any:
        environs.append(environ)
        start_response("200 OK", [])
        return [b"0123456789"] * 5

    middleware = IdempotencyMiddleware(app, site.engine, max_body=15, ttl=30)
    answer = begun(middleware, site, [])
    next(iter(answer))
    sent: list[Any] = []
    list(begun(middleware, site, sent, **environs[0]))
    if closes:
        answer.close()
    else:
        list(answer)
    list(begun(middleware, site, sent, **environs[0]))
    assert (sent, len(environs)) == (["200 OK", "409 Conflict"], 2)


async def test_an_error_before_the_first_byte_changes_a_long_response(site: Site) -> None:
    """The server has sent nothing yet and takes the new beginning: that one counts."""

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [("content-type", "text/event-stream")])
        yield b""
        try:
            raise ValueError("declined")
        except ValueError:
            start_response("503 Away", [("content-type", "text/plain")], sys.exc_info())
        yield b"away"

    got = serve(site, app)()
    assert (got.status, got.body, site.row.status) == (503, b"away", "free")


async def test_an_error_in_a_long_response_frees_the_key(site: Site) -> None:
    """C101: the client has half a response, and retries."""

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return Parts(b"0123456789", b"0123456789", ValueError("declined"))

    answer = iter(begun(IdempotencyMiddleware(app, site.engine, max_body=15), site, []))
    with pytest.raises(ValueError, match="declined"):
        list(answer)
    assert site.row.status == "free"


async def test_the_file_of_a_server_is_read(site: Site) -> None:
    """A file that a wrapper would send past the application is recorded like any other response."""

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [("content-type", "text/plain")])
        return environ["wsgi.file_wrapper"](BytesIO(b"receipt\n" * 100), 100)

    send = serve(site, app)
    for replayed in (False, True):
        got = send(**{"wsgi.file_wrapper": FileWrapper})
        assert (got.body, got.replayed) == (b"receipt\n" * 100, replayed)


# ---------------------------------------------------------------- bodies


def echo(environ: Any, start_response: Any) -> Any:
    body = environ["wsgi.input"].read()
    start_response("200 OK", [("content-type", "text/plain")])
    return [b"got ", body]


async def test_a_body_without_a_length_is_read_where_the_server_ends_it(site: Site) -> None:
    """A chunked body counts for the fingerprint and the limit; where its end is unknown there is none."""
    send = serve(site, echo, max_body=5)
    chunked = {"CONTENT_LENGTH": "", "wsgi.input_terminated": True}
    assert send(body=b"abcde", **chunked).body == b"got abcde"
    assert send(body=b"abcdx", **chunked).status == 422
    assert send(body=b"abcdef", **chunked).status == 413
    assert send("other", body=b"abcde", CONTENT_LENGTH="").body == b"got "


async def test_a_body_whose_end_is_unknown_is_rejected(site: Site) -> None:
    """411 if a server passes on a chunked body undecoded: taken as empty, all of them would be one request."""
    send = serve(site, echo)
    for announced in ({"CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked"}, {"CONTENT_LENGTH": "+5"}):
        got = send(body=b"abcde", **announced)
        assert (got.status, "Content-Length" in got.problem) == (411, True)
    assert site.rows() == []


async def test_a_length_of_too_many_digits_is_too_long(site: Site) -> None:
    """413 like any other; it is not parsed as a number."""
    sent: list[Any] = []
    begun(IdempotencyMiddleware(echo, site.engine), site, sent, CONTENT_LENGTH="5" * 5000)
    assert sent[0].startswith("413 ")


async def test_an_incomplete_body_is_not_a_request(site: Site) -> None:
    """The client disconnected in the middle: 400, and nothing was claimed."""
    got = serve(site, echo)(body=b"abc", CONTENT_LENGTH="5")
    assert (got.status, site.rows()) == (400, [])
    assert "ended before" in got.problem


async def test_texts_of_an_environment_are_bytes(site: Site) -> None:
    """A path that is no ASCII, or no text at all, is a path; `SCRIPT_NAME` is the root."""
    middleware = IdempotencyMiddleware(echo, site.engine, routes=["/zahlung/ü", "/*"])
    headers = [("idempotency-key", f"{site.label}:k"), ("authorization", "me\xe9")]
    for path in ("/zahlung/ü".encode().decode("latin-1"), "/\xff"):
        got = [ask_wsgi(middleware, "POST", path, "a=\xe9", headers, b"{}") for _ in range(2)]
        assert [one.replayed for one in got] == [False, True]
    assert not ask_wsgi(middleware, "POST", "/\xff", "a=\xe9", headers, b"{}", SCRIPT_NAME="/root").replayed
    assert any("/zahlung/%C3%BC" in row.scope for row in site.rows())


# ---------------------------------------------------------------- frameworks


async def test_a_path_without_its_first_slash_needs_a_key_too(site: Site) -> None:
    """C105: servers that take the root off leave one for `/apipay`, or are sent one, and Flask finds its endpoint all the same."""
    app = Flask("shop")
    paid: list[str] = []

    @app.post("/pay")
    def pay() -> str:
        paid.append(request.path)
        return "paid"

    environ = {"SCRIPT_NAME": "/api", "SERVER_NAME": "site", "SERVER_PORT": "80", "wsgi.url_scheme": "http"}
    sent: list[Any] = []
    for served in (app.wsgi_app, IdempotencyMiddleware(app.wsgi_app, site.engine, routes=["/pay"])):
        for path in ("/pay", "pay"):
            list(begun(served, site, sent, **environ, PATH_INFO=path, HTTP_IDEMPOTENCY_KEY=""))
    assert [status[:3] for status in sent if isinstance(status, str)] == ["200", "200", "400", "400"]
    assert len(paid) == 2


async def test_flask_behind_it(site: Site) -> None:
    """`app.wsgi_app` is wrapped: responses, errors that Flask turns into responses, streams, and work at the end of a request."""
    app = Flask("shop")
    paid: list[Any] = []
    closed: list[str] = []

    @app.post("/pay")
    def pay() -> Any:
        paid.append(request.get_json())
        response = app.make_response(({"payment": len(paid)}, 201))
        response.headers["Location"] = f"/payments/{len(paid)}"
        response.set_cookie("session", "1")
        response.call_on_close(lambda: closed.append(site.row.status))
        return response

    @app.post("/fails")
    def fails() -> Any:
        paid.append(None)
        raise ValueError("a bug")

    @app.post("/streams")
    def streams() -> Any:
        return Response(stream_with_context(piece + request.data for piece in (b"a", b"b")))

    app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]
        app.wsgi_app,
        site.engine,
        routes=["/pay", "/fails", "/streams"],
        principal=lambda environ: environ["HTTP_X_USER"],
    )
    headers = {"Idempotency-Key": f'"{site.label}:k"', "X-User": "7"}
    client = app.test_client()
    first = client.post("/pay", json={"amount": 5}, headers=headers)
    first.close()
    assert closed == ["done"]
    again = client.post("/pay", json={"amount": 5}, headers=headers)
    assert (first.status_code, again.status_code, again.data) == (201, 201, first.data)
    assert (again.headers["Location"], "Set-Cookie" in again.headers) == ("/payments/1", False)
    assert client.post("/pay", json={"amount": 6}, headers=headers).status_code == 422
    assert client.post("/pay", json={"amount": 5}, headers={"X-User": "7"}).status_code == 400
    assert [client.post("/fails", headers=headers).status_code for _ in range(2)] == [500, 500]
    assert len(paid) == 3
    streamed = [client.post("/streams", data=b"!", headers=headers) for _ in range(2)]
    assert [one.data for one in streamed] == [b"a!b!"] * 2
    assert streamed[1].headers["Idempotent-Replayed"] == "true"


async def test_an_async_engine_is_rejected(site: Site, dsn: str) -> None:
    """The application runs on threads, and so do its claims."""
    world = World("asyncpg", dsn)
    with pytest.raises(TypeError, match="needs an Engine, not AsyncEngine"):
        site.behind(engine=world.engine())
    await world.close()


async def test_many_threads_are_many_clients(site: Site) -> None:
    """Keys of different requests do not wait for each other."""
    got = await asyncio.gather(*(site.ask(f"k{n}", who=site.world.other()) for n in range(8)))
    assert [one.status for one in got] == [201] * 8
