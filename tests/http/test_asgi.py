"""The specifics of ASGI: receive and send, cancellation, clients that disconnect, work after the response, and frameworks."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from fastapi import BackgroundTasks, FastAPI, Request, WebSocket
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, StreamingResponse
from starlette.routing import Mount, Route

from pgfence.asgi import IdempotencyMiddleware
from support.sites import Answer, Asked, Site, ask_asgi
from support.stepping import at_every_step
from support.waiting import eventually
from support.worlds import World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import psycopg

pytestmark = pytest.mark.usefixtures("tables")
HEADERS = [("authorization", "me"), ("content-type", "text/plain")]


@pytest.fixture(params=["psycopg_async"])
async def site(request: pytest.FixtureRequest, dsn: str, admin: psycopg.Connection[Any]) -> AsyncIterator[Site]:
    """An application behind the middleware."""
    world = World(request.param, dsn)
    yield Site(world, admin)
    await world.close()


class Call:
    """A request message by message: what the server gives, and what it is sent."""

    def __init__(self, site: Site, *, body: bytes = b"{}", **scope: Any) -> None:
        headers = [("idempotency-key", f"{site.label}:k"), *HEADERS]
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/pay",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers],
            **scope,
        }
        self.given: list[Any] = [{"type": "http.request", "body": body}]
        self.sent: list[Any] = []
        self.gone = asyncio.Event()

    async def receive(self) -> Any:
        if self.given:
            return self.given.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def through(self, app: Any) -> list[str]:
        """Send it, and return the kinds of the messages that came."""
        await app(self.scope, self.receive, self.send)
        return [message["type"].removeprefix("http.response.") for message in self.sent]


def client(app: Any) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=app)
    return httpx2.AsyncClient(transport=transport, base_url="http://site", headers={"authorization": "me"})


# ---------------------------------------------------------------- the client goes away


async def test_an_incomplete_body_is_not_a_request(site: Site) -> None:
    """Half a request is none: the application is not called, the key not claimed; a middleware outside gets an answer."""

    async def outer(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    for app in (site.middleware, BaseHTTPMiddleware(site.middleware, outer)):
        call = Call(site)
        call.given = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
        await call.through(app)
        assert [message.get("status") for message in call.sent][:1] == [400]
    assert site.seen == site.rows() == []


async def test_a_client_that_disconnects_later_still_has_its_response(site: Site) -> None:
    """The application is not notified, runs to its end, and the client's next request gets the response."""
    told = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        leaving = asyncio.create_task(receive())
        call.gone.set()
        done, _ = await asyncio.wait([leaving], timeout=0.05)
        assert not done
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"paid"})
        assert (await leaving)["type"] == "http.disconnect"
        told.set()

    call = Call(site)
    middleware = IdempotencyMiddleware(app, site.engine)
    assert await call.through(middleware) == ["start", "body"]
    assert told.is_set()
    again = Call(site)
    await again.through(middleware)
    assert (again.sent[0]["headers"], again.sent[1]["body"]) == ([(b"idempotent-replayed", b"true")], b"paid")


async def test_the_application_sees_a_disconnect_while_it_responds(site: Site) -> None:
    """A stream of events is sent as it comes, and ends when the client disconnects; it is not replayed."""
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        seen.append(len(call.sent))
        call.gone.set()
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.body"})

    call = Call(site)
    middleware = IdempotencyMiddleware(app, site.engine)
    assert await call.through(middleware) == ["start", "body", "body"]
    assert seen == [2]
    again = Call(site)
    await again.through(middleware)
    assert again.sent[0]["status"] == 409


@pytest.mark.parametrize("spec", ["2.3", "2.4"])
@pytest.mark.parametrize("kind", ["text/event-stream", "text/plain"])
async def test_a_disconnect_during_the_response_does_not_charge_twice(site: Site, spec: str, kind: str) -> None:
    """The framework ends the response in the middle: by cancelling if it is notified, by an error if it cannot send."""
    paid: list[int] = []

    async def pay(_: Request) -> StreamingResponse:
        paid.append(1)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(50):
                yield b"x" * 10
                await asyncio.sleep(0)

        return StreamingResponse(pieces(), media_type=kind)

    class Leaving(Call):
        async def send(self, message: Any) -> None:
            await super().send(message)
            if len(self.sent) == 3:
                self.gone.set()
            if self.gone.is_set() and spec == "2.4":
                raise OSError

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    middleware = IdempotencyMiddleware(app, site.engine, max_body=15)
    with suppress(ClientDisconnect):
        await Leaving(site, asgi={"version": "3.0", "spec_version": spec}).through(middleware)
    again = Call(site)
    await again.through(middleware)
    assert (again.sent[0]["status"], b"was processed" in again.sent[1]["body"]) == (409, True)
    assert (paid, site.row.status) == ([1], "done")


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_response_that_fails_partway_frees_the_key(site: Site, leaves: bool) -> None:
    """C101: an invalid status, or an error of the application: nothing was paid, whether or not the client disconnected."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 503 if leaves else 200, "headers": kind})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        if leaves:
            await receive()
            call.gone.set()
            await receive()
        raise ValueError("declined")

    call = Call(site)
    with pytest.raises(ValueError, match="declined"):
        await call.through(IdempotencyMiddleware(app, site.engine))
    assert site.row.status == "free"


async def test_a_cancel_leaves_the_key_until_its_time_is_over(site: Site) -> None:
    """The outcome is unknown: the next request waits for the ttl, for any `on_failure`."""
    reached = asyncio.Event()

    async def pay(_: Asked) -> Answer:
        if len(site.seen) == 1:
            reached.set()
            await asyncio.Event().wait()
        return Answer()

    site.handler = pay
    site.behind(ttl=30)
    request = asyncio.create_task(site.ask())
    await reached.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    busy = await site.ask()
    assert busy.status == 409
    site.lapse()
    assert (await site.ask()).status == 201
    assert site.row.attempt == 2


@pytest.mark.parametrize("site", ["psycopg_async", "asyncpg"], indirect=True)
async def test_a_cancel_at_any_await_leaves_a_usable_key(site: Site) -> None:
    """Later its response is replayed, or the request is handled: never a second response, never a claim that stays alive."""
    keys: list[str] = []

    async def work() -> None:
        keys.append(f"k{len(keys)}")
        await site.ask(keys[-1])

    async def check() -> None:
        key = keys[-1]
        done = [row for row in site.rows() if row.key.endswith(f":{key}") and row.status == "done"]

        async def answered() -> Any:
            site.lapse()
            before = len(site.seen)
            got = await site.ask(key)
            return None if got.status == 409 else (got, len(site.seen) - before)

        got, handled = await eventually(answered, 10)
        assert (got.status, got.replayed) == (201, handled == 0)
        assert got.replayed or not done

    assert await at_every_step(work, check) >= 3


# ---------------------------------------------------------------- messages


async def test_an_application_without_a_response_frees_the_key(site: Site) -> None:
    """C101: no response, or half of one, is a failure; the server sees what it would see without the middleware."""
    half = [{"type": "http.response.start", "status": 200}, {"type": "http.response.body", "more_body": True}]
    for messages in ([], half[:1], half):

        async def app(scope: Any, receive: Any, send: Any, messages: Any = messages) -> None:
            for message in messages:
                await send(message)

        assert await Call(site).through(IdempotencyMiddleware(app, site.engine)) == []
        assert site.row.status == "free"


async def test_headers_may_be_read_only_once(site: Site) -> None:
    """What is an iterator of a server's or an application's is there for those who come later, too."""
    asked: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(list(scope["headers"]))
        await send({"type": "http.response.start", "status": 201, "headers": iter([(b"location", b"/1")])})
        await send({"type": "http.response.body"})

    for replayed in (False, True):
        call = Call(site)
        given = call.scope["headers"]
        call.scope["headers"] = iter(given)
        await call.through(IdempotencyMiddleware(app, site.engine))
        assert asked == [given]
        assert call.sent[0]["headers"] == [(b"location", b"/1"), (b"idempotent-replayed", b"true")][: 1 + replayed]


async def test_a_length_of_too_many_digits_is_too_long(site: Site) -> None:
    """413 like any other; it is not parsed as a number."""
    call = Call(site)
    call.scope["headers"].append((b"content-length", b"5" * 5000))
    await call.through(site.middleware)
    assert (call.sent[0]["status"], site.seen) == (413, [])


async def test_a_response_begins_once(site: Site) -> None:
    """A second beginning is an error of the application: nothing was sent, the key is free."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for status in (200, 500):
            await send({"type": "http.response.start", "status": status, "headers": []})

    call = Call(site)
    with pytest.raises(RuntimeError, match="twice"):
        await call.through(IdempotencyMiddleware(app, site.engine))
    assert (call.sent, site.row.status) == ([], "free")


async def test_credentials_are_the_same_in_any_order(site: Site) -> None:
    """HTTP/2 clients send a cookie in pieces, and the order of different headers is not guaranteed."""
    for n, credentials in enumerate(
        (
            [(b"authorization", b"me"), (b"cookie", b"a=1; b=2")],
            [(b"cookie", b"a=1; b=2"), (b"authorization", b"me")],
            [(b"cookie", b"a=1"), (b"Authorization", b"me"), (b"Cookie", b"b=2")],
        )
    ):
        call = Call(site)
        call.scope["headers"] = [(b"idempotency-key", f"{site.label}:k".encode()), *credentials]
        await call.through(site.middleware)
        assert ((b"idempotent-replayed", b"true") in call.sent[0]["headers"]) == (n > 0)


async def test_work_after_the_response_is_not_part_of_it(site: Site) -> None:
    """A background task runs when the client has its response and the key is done; its failure changes nothing."""
    app = FastAPI()

    def afterwards() -> None:
        assert site.row.status == "done"
        raise ValueError("afterwards")

    @app.post("/pay")
    async def pay(tasks: BackgroundTasks) -> dict[str, bool]:
        tasks.add_task(afterwards)
        return {"paid": True}

    call = Call(site)
    with pytest.raises(ValueError, match="afterwards"):
        await call.through(IdempotencyMiddleware(app, site.engine))
    assert [message["type"] for message in call.sent] == ["http.response.start", "http.response.body"]
    assert site.row.status == "done"


async def test_response_types_that_cannot_be_stored_are_not_offered(site: Site, tmp_path: Path) -> None:
    """A file is sent as a body, so that there is something to give again; what informs stays."""
    (tmp_path / "receipt").write_bytes(b"receipt\n" * 100)
    offered: list[Any] = []

    async def pay(request: Request) -> FileResponse:
        offered.append(request.scope["extensions"])
        return FileResponse(tmp_path / "receipt")

    middleware = IdempotencyMiddleware(Starlette(routes=[Route("/pay", pay, methods=["POST"])]), site.engine)
    extensions = {"http.response.pathsend": {}, "http.response.trailers": {}, "tls": {"x": 1}}
    for _ in range(2):
        call = Call(site, extensions=extensions)
        assert await call.through(middleware) == ["start", "body"]
        assert call.sent[1]["body"] == b"receipt\n" * 100
    assert offered == [{"tls": {"x": 1}}]


async def test_a_streamed_response_is_sent_when_it_is_complete(site: Site) -> None:
    """Within `max_body` a stream is a response like others, and replayed in one piece."""

    async def pay(_: Request) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            for piece in (b"a", b"b", b"c"):
                await asyncio.sleep(0)
                yield piece

        return StreamingResponse(pieces(), 202)

    middleware = IdempotencyMiddleware(Starlette(routes=[Route("/pay", pay, methods=["POST"])]), site.engine)
    for spec in ("2.0", "2.4"):
        for replayed in (spec == "2.4", True):
            call = Call(site, asgi={"version": "3.0", "spec_version": spec})
            assert await call.through(middleware) == ["start", "body"]
            assert (call.sent[0]["status"], call.sent[1]["body"]) == (202, b"abc")
            assert ((b"idempotent-replayed", b"true") in call.sent[0]["headers"]) == replayed


def test_other_scopes_pass_through(site: Site) -> None:
    """A lifespan and a WebSocket see no difference."""
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        events.append("up")
        yield
        events.append("down")

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(IdempotencyMiddleware, engine=site.engine, routes=["/ws"])

    @app.websocket("/ws")
    async def talk(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")

    with TestClient(app) as connected, connected.websocket_connect("/ws") as socket:
        assert socket.receive_text() == "hello"
    assert events == ["up", "down"]


# ---------------------------------------------------------------- frameworks


async def test_it_is_added_to_an_application_like_any_other(site: Site) -> None:
    """`add_middleware` on FastAPI: the scope that others look at afterwards is the application's."""
    app = FastAPI()
    paid: list[int] = []
    looked: list[Any] = []

    @app.middleware("http")
    async def inner(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    @app.post("/orders/{order}/payments", status_code=201)
    async def pay(order: int, request: Request) -> dict[str, int]:
        assert not await request.is_disconnected()
        paid.append(order)
        return {"order": order}

    app.add_middleware(IdempotencyMiddleware, engine=lambda: site.engine, routes=["/orders/{order}/payments"])

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)
        looked.append(scope.get("route"))

    async with client(outer) as ours:
        key = {"idempotency-key": f'"{site.label}:k"'}
        first = await ours.post("/orders/7/payments", headers=key)
        again = await ours.post("/orders/7/payments", headers=key)
        assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
        assert again.headers["idempotent-replayed"] == "true"
        assert (await ours.post("/orders/8/payments", headers=key)).json() == {"order": 8}
        assert (await ours.post("/orders/7/payments")).status_code == 400
    assert paid == [7, 8]
    assert looked[0] is not None


@pytest.mark.parametrize("path", ["/api/pay", "/pay"])
async def test_a_route_is_below_the_root_path(site: Site, path: str) -> None:
    """Servers put the root into the path or do not: one route, one key."""
    site.behind(routes=["/pay"])
    for n, seen in enumerate((path, "/api/pay", "/pay")):
        call = Call(site, root_path="/api", path=seen)
        await call.through(site.middleware)
        assert ((b"idempotent-replayed", b"true") in call.sent[0]["headers"]) == (n > 0)
    other = Call(site, root_path="/v2", path="/pay")
    await other.through(site.middleware)
    assert len(site.seen) == 2


@pytest.mark.parametrize(
    ("root", "path"), [("/pay", "/payments"), ("/api/", "/api/payments"), ("/api", "/api/payments")]
)
async def test_a_root_path_is_a_whole_one(site: Site, root: str, path: str) -> None:
    """What only begins like the root is below it as it is; a slash at its end makes no difference."""
    site.behind(routes=["/payments"])
    call = Call(site, root_path=root, path=path)
    call.scope["headers"] = []
    await call.through(site.middleware)
    assert call.sent[0]["status"] == 400


async def test_a_mounted_application_has_its_own_routes(site: Site) -> None:
    """Behind a mount the middleware sees the path below it, and keys of two mounts stay apart."""
    site.behind(routes=["/pay"])
    app = Starlette(routes=[Mount("/a", site.middleware), Mount("/b", site.middleware)])
    got = [
        await ask_asgi(app, "POST", path, "", [("idempotency-key", f"{site.label}:k"), *HEADERS], b"{}")
        for path in ("/a/pay", "/b/pay", "/a/pay")
    ]
    assert [one.replayed for one in got] == [False, False, True]


async def test_a_principal_that_is_not_a_text_raises(site: Site) -> None:
    """It raises for the developer, and is not treated as a missing principal."""
    site.behind(principal=lambda scope: 7)
    with pytest.raises(TypeError, match="principal must return a str or None, not int"):
        await site.ask()


def test_a_sync_engine_is_rejected(site: Site) -> None:
    """The application runs on a loop, and so do its claims."""
    with pytest.raises(TypeError, match="needs an AsyncEngine, not Engine"):
        site.behind(engine=site.engine.sync_engine)
