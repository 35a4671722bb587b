"""The cost of the middleware for `Idempotency-Key`, compared with a handler that sends the same SQL itself."""

from __future__ import annotations

import itertools
import uuid
from hashlib import sha256
from io import BytesIO
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks import report, rounds
from benchmarks.place import server
from pgfence import asgi, schema, wsgi

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AsyncExitStack, ExitStack

    from benchmarks.place import Place

INSERT = sa.text("INSERT INTO effect (n) VALUES (:n)")
CLAIM = sa.text(
    "SELECT * FROM pgfence_claim_effect_v1(:scope, :key, :fingerprint, :claim, 60.0, 86400.0, true, 'hand', 'here', 1)"
)
FINISH = sa.text(
    "SELECT pgfence_finish_effect_v1(:scope || chr(31) || :key, :claim, :attempt, 86400.0, 'done', NULL, 201,"
    """ '[["content-type", "application/json"]]', :body, true)"""
)
BODY, ANSWER = b'{"amount": 5}', b'{"paid": true}'
HAND, AGAIN, OURS = "the same SQL in the handler", "the same SQL, again", "the middleware"
NUMBERS = itertools.count()
HEADERS = [("content-type", "application/json")]


def _claimed(key: str, body: bytes) -> dict[str, Any]:
    return {"scope": "POST /pay me", "key": key, "fingerprint": sha256(body).digest(), "claim": str(uuid.uuid4())}


def _finished(claim: dict[str, Any], attempt: int) -> dict[str, Any]:
    return {**{name: claim[name] for name in ("scope", "key", "claim")}, "attempt": attempt, "body": ANSWER}


async def asgi_by_hand(place: Place, stack: AsyncExitStack) -> Callable[[], Awaitable[object]]:
    engine = create_async_engine(place.url("asyncpg"))
    stack.push_async_callback(engine.dispose)
    plain = engine.execution_options(isolation_level="AUTOCOMMIT")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        claim = _claimed(dict(scope["headers"])[b"idempotency-key"].decode(), body)
        async with plain.connect() as connection:
            row = (await connection.execute(CLAIM, claim)).one()
        assert row[0] == "granted"
        async with engine.begin() as connection:
            await connection.execute(INSERT, {"n": next(NUMBERS)})
        async with plain.connect() as connection:
            await connection.execute(FINISH, _finished(claim, row[1]))
        await _answer(send)

    return _asgi(app)


async def asgi_ours(place: Place, stack: AsyncExitStack) -> Callable[[], Awaitable[object]]:
    engine = create_async_engine(place.url("asyncpg"))
    stack.push_async_callback(engine.dispose)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        async with engine.begin() as connection:
            await connection.execute(INSERT, {"n": next(NUMBERS)})
        await _answer(send)

    return _asgi(asgi.IdempotencyMiddleware(app, engine, principal=lambda _: "me"))


async def _answer(send: Any) -> None:
    headers = [(name.encode(), value.encode()) for name, value in HEADERS]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


def _asgi(app: Any) -> Callable[[], Awaitable[object]]:
    async def receive() -> Any:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def cycle() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"idempotency-key", uuid.uuid4().hex.encode()), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/pay", "query_string": b"", "headers": headers}
        await app(scope, receive, send)
        assert sent[0]["status"] == 201

    return cycle


def wsgi_by_hand(place: Place, stack: ExitStack) -> Callable[[], object]:
    engine = sa.create_engine(place.url())
    stack.callback(engine.dispose)
    plain = engine.execution_options(isolation_level="AUTOCOMMIT")

    def app(environ: Any, start_response: Any) -> list[bytes]:
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        claim = _claimed(environ["HTTP_IDEMPOTENCY_KEY"], body)
        with plain.connect() as connection:
            row = connection.execute(CLAIM, claim).one()
        assert row[0] == "granted"
        with engine.begin() as connection:
            connection.execute(INSERT, {"n": next(NUMBERS)})
        with plain.connect() as connection:
            connection.execute(FINISH, _finished(claim, row[1]))
        start_response("201 Created", list(HEADERS))
        return [ANSWER]

    return _wsgi(app)


def wsgi_ours(place: Place, stack: ExitStack) -> Callable[[], object]:
    engine = sa.create_engine(place.url())
    stack.callback(engine.dispose)

    def app(environ: Any, start_response: Any) -> list[bytes]:
        environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        with engine.begin() as connection:
            connection.execute(INSERT, {"n": next(NUMBERS)})
        start_response("201 Created", list(HEADERS))
        return [ANSWER]

    return _wsgi(wsgi.IdempotencyMiddleware(app, engine, principal=lambda _: "me"))


def _wsgi(app: Any) -> Callable[[], object]:
    def cycle() -> None:
        sent: list[str] = []
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/pay",
            "CONTENT_TYPE": "application/json",
            "CONTENT_LENGTH": str(len(BODY)),
            "HTTP_IDEMPOTENCY_KEY": uuid.uuid4().hex,
            "wsgi.input": BytesIO(BODY),
        }
        assert b"".join(app(environ, lambda status, headers, exc_info=None: sent.append(status))) == ANSWER
        assert sent == ["201 Created"]

    return cycle


def run(quick: bool) -> dict[str, Any]:
    """Measure both middlewares."""
    effort = rounds.Effort.of(quick=quick)
    bars, tables = [], []
    with server(durable=True) as place:
        engine = sa.create_engine(place.url())
        schema.create_all(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE effect (n bigint PRIMARY KEY)")
        engine.dispose()
        found = {
            "ASGI, asyncpg": rounds.alternate_async(
                place, {HAND: asgi_by_hand, AGAIN: asgi_by_hand, OURS: asgi_ours}, effort
            ),
            "WSGI, psycopg": rounds.alternate(
                place, {HAND: wsgi_by_hand, AGAIN: wsgi_by_hand, OURS: wsgi_ours}, effort
            ),
        }
    for what, medians in found.items():
        ratio = rounds.ratio(medians, OURS, HAND)
        bars.append(
            report.bar(
                f"the middleware of {what}, against the same SQL in the handler", "at most 1.25x", ratio, 1.25, "x"
            )
        )
        bars.append(report.null_test(rounds.ratio(medians, AGAIN, HAND), what))
        rows = [
            (name, f"{rounds.ratio(medians, name, HAND):.2f}x", rounds.spread(medians, name, HAND)) for name in medians
        ]
        tables.append(
            report.table(f"A request with a key, {what}", ("Contestant", "Ratio", "Middle half of the sets"), rows)
        )
    return {
        "scenario": "middleware",
        "title": "The middleware for idempotency keys",
        "method": (
            "One cycle is a request with a new key, passed to the application without an HTTP server. The handler of"
            " the request commits one INSERT, with fsync. The baseline is a handler that calls the same two server functions"
            " through its own pool, before and after the INSERT."
        ),
        "bars": bars,
        "tables": tables,
        "skipped": {},
    }
