"""The middleware for `Idempotency-Key` on every driver: of ASGI in async worlds, of WSGI in sync ones."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from pgfence import schema
from pgfence.config import configure
from support.effects import Gate
from support.sites import Answer, Asked, Got, Site
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

ROUNDS = 100 if os.environ.get("PGFENCE_TEST_FAULTS") else 1
CALLERS = 20
pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


class Declined(Exception):
    """A handler fails."""


@pytest.fixture
def site(world: World, admin: psycopg.Connection[Any]) -> Site:
    """An application behind the middleware."""
    return Site(world, admin)


# ---------------------------------------------------------------- replays


@pytest.mark.every_driver
async def test_a_second_request_gets_the_response_of_the_first(site: Site) -> None:
    """C105: status, body and headers byte for byte, and a mark; the application is called once."""
    headers = (("content-type", "application/x"), ("location", "/payments/\xe9"), ("link", "a"), ("link", "b"))
    passing = (("set-cookie", "session=1"), ("date", "today"), ("server", "x"))

    async def pay(_: Asked) -> Answer:
        return Answer(202, (*headers, *passing), (b"\x00\xff", b"", b"rest"))

    site.handler = pay
    first, again = await site.ask(), await site.ask()
    assert first == Got(202, [*headers, *passing], b"\x00\xffrest")
    assert again == Got(202, [*headers, ("idempotent-replayed", "true")], first.body)
    assert site.seen == [Asked("POST", "/pay", b'{"amount": 5}')]
    assert (site.row.status, site.row.attempt, site.row.http_status) == ("done", 1, 202)


async def test_a_key_is_the_same_with_and_without_its_quotes(site: Site) -> None:
    """A structured field is in quotes, and many clients forget them."""
    await site.ask([f'"{site.label}:k"'])
    assert (await site.ask([f"{site.label}:k"])).replayed
    assert len(site.seen) == 1


async def test_an_expired_key_is_a_new_one(site: Site) -> None:
    """C109: when the record is over, the request is handled again, also another one; whether or not the row is still there."""
    await site.ask()
    expire = (
        "UPDATE pgfence_idempotency_key SET expires_at = clock_timestamp() - interval '1 s' WHERE key LIKE %s || ':%%'"
    )
    site.admin.execute(expire.encode(), [site.label])
    assert not (await site.ask(body=b"{}")).replayed
    assert (await site.ask(body=b"{}")).replayed
    assert (len(site.seen), site.row.attempt) == (2, 1)


@pytest.mark.every_driver
async def test_of_concurrent_requests_one_runs_and_the_others_get_retry_after(site: Site) -> None:
    """C095: of twenty concurrent requests with one key one runs; retries of the others end with the same response."""
    for n in range(ROUNDS):
        before = len(site.seen)

        async def until_answered(key: str) -> Got:
            who = site.world.other()
            while (got := await site.ask(key, who=who)).status == 409:
                assert got.header("retry-after") == "1"
                await asyncio.sleep(0.01)
            return got

        answers = await asyncio.gather(*(until_answered(f"k{n}") for _ in range(CALLERS)))
        assert {(got.status, got.body) for got in answers} == {(201, b'{"paid": true}')}
        assert [got.replayed for got in answers].count(False) == 1
        assert len(site.seen) == before + 1


async def test_of_many_whose_handlers_fail_at_random_one_succeeds(site: Site) -> None:
    """C095, C101: twenty clients retry until it works, with an application that often fails: one success, one response."""
    done: list[bytes] = []

    async def pay(_: Asked) -> Answer:
        match random.randrange(4):
            case 0:
                raise Declined
            case 1:
                return Answer(503)
            case 2:
                return Answer(429)
        done.append(b"%d" % len(site.seen))
        return Answer(chunks=(done[-1],))

    async def until_done(key: str) -> Got:
        who = site.world.other()
        while True:
            with suppress(Declined):
                if (got := await site.ask(key, who=who)).status == 201:
                    return got
            await asyncio.sleep(0.01)

    site.handler = pay
    for n in range(ROUNDS):
        done.clear()
        answers = await asyncio.gather(*(until_done(f"k{n}") for _ in range(CALLERS)))
        assert [got.body for got in answers] == done * CALLERS
        assert [got.replayed for got in answers].count(False) == 1


# ---------------------------------------------------------------- which requests


async def test_a_request_without_a_valid_key_is_rejected_on_its_routes(site: Site) -> None:
    """C108: missing, repeated, malformed or too long is 400, before the application and the database are asked."""
    site.behind(routes=["/pay"])
    for keys in ([], [""], ["a", "b"], ["a,b"], ['"a'], ["k" * 256], ['"a\tb"'], ["\xe4"]):
        got = await site.ask(keys)
        assert (got.status, "Idempotency-Key" in got.problem) == (400, True), keys
    assert site.seen == []


@pytest.mark.filterwarnings("ignore:Unknown REQUEST_METHOD")
async def test_a_method_is_another_one_in_small_letters(site: Site) -> None:
    """Frameworks differ in how they treat such a method: it needs a key, and has separate stored responses."""
    site.behind(routes=["/pay"])
    assert (await site.ask(None, method="post")).status == 400
    assert [(await site.ask(method=method)).replayed for method in ("post", "POST", "post")] == [False, False, True]
    assert [asked.method for asked in site.seen] == ["post", "POST"]


async def test_what_needs_no_key_passes_through(site: Site) -> None:
    """Other methods and other routes need no key, and without `routes` no request needs one."""
    for options, request in (
        ({}, {"key": None}),
        ({}, {"method": "PUT"}),
        ({}, {"method": "HEAD"}),
        ({"routes": ["/pay"]}, {"path": "/other"}),
        ({"routes": ["/pay"], "methods": ["PUT"]}, {"key": None}),
    ):
        site.behind(**options)
        before = len(site.seen)
        assert [(await site.ask(**request)).replayed for _ in range(2)] == [False, False]
        assert len(site.seen) == before + 2
    assert site.rows() == []


async def test_inside_another_one_a_middleware_lets_a_request_pass(site: Site) -> None:
    """C105: of an application and one that is mounted in it, the outer one has the key, and the inner one does not wait for it."""
    outer = type(site.middleware)(site.middleware, site.engine)
    first, again = await site.ask(app=outer), await site.ask(app=outer)
    assert (first.status, again.status, again.replayed) == (201, 201, True)
    assert len(site.seen) == 1


async def test_a_nested_middleware_rejects_only_missing_principals(site: Site) -> None:
    """C102: the inner principal may know better; how a failure ends is said by the outer one."""
    kind = type(site.middleware)

    async def fail(_: Asked) -> Answer:
        return Answer(503)

    nobody = kind(site.behind(principal=lambda _: None), site.engine)
    assert ((await site.ask("a", app=nobody)).status, len(site.seen)) == (400, 0)
    short = kind(site.behind(max_body=3), site.engine)
    assert (await site.ask("b", app=short, headers=[("content-length", "13")])).status == 413
    site.handler = fail
    lapsing = kind(site.behind(on_failure="lapse"), site.engine)
    assert [(await site.ask("c", app=lapsing)).status for _ in range(2)] == [503, 503]
    assert len(site.seen) == 2


async def test_a_nested_request_with_its_own_key_is_handled_once(site: Site) -> None:
    """C105: what an endpoint passes on in a copy of its environment, as a batch does, is a request like any other."""
    inner, key = site.middleware, f"{site.label}:inner"

    def wsgi(environ: Any, start_response: Any) -> Any:
        return inner({**environ, "HTTP_IDEMPOTENCY_KEY": key}, start_response)

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        others = [pair for pair in scope["headers"] if pair[0] != b"idempotency-key"]
        await inner({**scope, "headers": [*others, (b"idempotency-key", key.encode())]}, receive, send)

    outer = type(inner)(site.world.pick(wsgi, asgi), site.engine)
    assert [(await site.ask(one, app=outer)).status for one in ("a", "b")] == [201, 201]
    assert len(site.seen) == 1


async def test_a_reused_environment_is_a_new_request(site: Site) -> None:
    """C100: outside stands one that tries again; its second try has a claim, and its third one is a replay."""

    async def pay(_: Asked) -> Answer:
        return Answer(503 if len(site.seen) == 1 else 201)

    def wsgi(environ: Any, start_response: Any) -> Any:
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        for _ in range(3):
            environ["wsgi.input"] = BytesIO(body)
            begun: list[Any] = []
            parts = middleware(
                environ, lambda status, headers, exc_info=None, begun=begun: begun.extend((status, headers))
            )
            found = list(parts)
            if close := getattr(parts, "close", None):
                close()
            tries.append(begun[0][:3])
        start_response(*begun)
        return found

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        pieces = [await receive() for _ in range(2)]
        for _ in range(3):
            left, sent = iter(pieces), []

            async def again(left: Any = left) -> Any:
                return next(left)

            async def keep(message: Any, sent: Any = sent) -> None:
                sent.append(message)

            await middleware(scope, again, keep)
            tries.append(str(sent[0]["status"]))
        for message in sent:
            await send(message)

    tries: list[str] = []
    site.handler = pay
    middleware = site.middleware
    got = [await site.ask(app=site.world.pick(wsgi, asgi)) for _ in range(2)]
    assert [(one.status, one.replayed) for one in got] == [(201, True), (201, True)]
    assert tries == ["503", "201", "201", "201", "201", "201"]
    assert (len(site.seen), site.row.status) == (2, "done")


async def test_a_key_belongs_to_a_principal_a_method_and_a_path(site: Site) -> None:
    """C102: the same key of another principal, method or path is another request."""
    for request in ({}, {"user": "you"}, {"path": "/refund"}, {"method": "PATCH"}, {"headers": [("cookie", "s=1")]}):
        assert not (await site.ask(**request)).replayed
        assert (await site.ask(**request)).replayed
    assert len(site.seen) == 5
    assert len({row.scope for row in site.rows()}) == 5


async def test_a_key_without_a_principal_is_rejected(site: Site) -> None:
    """C102: without credentials, or with the principal None, clients would share responses."""
    got = await site.ask(user=None)
    assert (got.status, got.problem[:30]) == (400, "An Idempotency-Key belongs to ")
    whose = {"ours": "me"}
    site.behind(principal=lambda raw: whose.get(raw.get("path") or raw.get("PATH_INFO", "")[1:]))
    assert (await site.ask()).status == 400
    assert (await site.ask(path="ours" if site.world.is_async else "/ours", user=None)).status == 201
    assert len(site.seen) == 1


@pytest.mark.every_driver
async def test_any_text_is_a_principal_and_no_other_one(site: Site) -> None:
    """C102: half a character too, as JSON may have it; and what stands for bytes is not the text of these bytes."""
    whose = ["\ud800", "\udcc3\udcbc", "ü"]
    site.behind(principal=lambda _: whose[0])
    while whose:
        assert [(await site.ask()).replayed for _ in range(2)] == [False, True]
        del whose[0]
    assert len(site.rows()) == 3


async def test_another_request_with_the_key_is_rejected_in_every_state(site: Site) -> None:
    """C102, C104: 422 for another body, query or content type; it wins over 409, and does not contain the stored response."""
    gate = Gate()

    async def slow(_: Asked) -> Answer:
        await gate.wait()
        return Answer()

    site.handler = slow
    others: list[dict[str, Any]] = [{"body": b"{}"}, {"query": "a=1"}, {"headers": [("content-type", "text/plain")]}]
    first = asyncio.create_task(site.ask(who=site.world.other()))
    await gate.reached()
    assert [(await site.ask(**other)).status for other in others] == [422] * len(others)
    busy = await site.ask()
    assert (busy.status, busy.header("retry-after"), busy.code) == (409, "1", "idempotency_in_progress")
    gate.open()
    assert (await first).status == 201
    for other in others:
        got = await site.ask(**other)
        assert got.status == 422
        assert "paid" not in got.problem
    assert len(site.seen) == 1


# ---------------------------------------------------------------- failures


async def test_failures_are_handled_again_and_rejections_are_stored(site: Site) -> None:
    """C101: a status from `record_below` on, or one that asks for a retry, is not recorded; a 402 is."""
    answers = [Answer(503), Answer(423, (("content-type", "text/plain"), ("retry-after", "1"))), Answer(402)]

    async def pay(_: Asked) -> Answer:
        return answers.pop(0)

    site.handler = pay
    got = [await site.ask() for _ in range(4)]
    assert [(one.status, one.replayed) for one in got] == [(503, False), (423, False), (402, False), (402, True)]
    assert site.row.attempt == 3
    site.behind(record_below=600)
    answers.append(Answer(503))
    assert [(await site.ask("other")).status for _ in range(2)] == [503, 503]


async def test_an_error_frees_the_key_and_goes_on_to_the_server(site: Site) -> None:
    """C101: an error of the application propagates unchanged, and the next request is handled at once."""
    failing = True

    async def pay(_: Asked) -> Answer:
        if failing:
            raise Declined
        return Answer()

    site.handler = pay
    with pytest.raises(Declined):
        await site.ask()
    assert site.row.status == "free"
    failing = False
    got = await site.ask()
    assert (got.status, got.replayed, site.row.attempt) == (201, False, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("raises", [True, False])
async def test_a_key_may_lapse_after_a_failure(site: Site, raises: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With "lapse" the next request after a failure waits until the claim ends, and Retry-After says how long."""

    async def pay(_: Asked) -> Answer:
        if raises and len(site.seen) == 1:
            raise Declined
        return Answer(503 if len(site.seen) == 1 else 201)

    site.handler = pay
    site.behind(on_failure="lapse", ttl=30)
    try:
        assert (await site.ask()).status == 503
    except Declined:
        assert raises
    busy = await site.ask()
    assert (busy.status, busy.code) == (409, "idempotency_attempt_failed")
    assert 25 < int(busy.header("retry-after") or 0) <= 30
    assert ("ended with Declined" if raises else "ended with status 503") in caplog.text
    site.lapse()
    assert (await site.ask()).status == 201
    assert (site.row.attempt, len(site.seen)) == (2, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("noticed", [True, False])
async def test_a_response_after_a_take_over_does_not_count(site: Site, noticed: bool) -> None:
    """C100: the late request must retry and gets the response that counts, whether or not the heartbeat noticed."""
    gate = Gate()

    async def pay(_: Asked) -> Answer:
        if len(site.seen) == 1:
            await gate.wait()
            return Answer(chunks=(b"late",))
        return Answer(chunks=(b"in time",))

    events: list[str] = []
    engine = site.world.engine()
    configure(engine, on_event=lambda event: events.append(event.event))
    site.handler = pay
    site.behind(engine=engine, ttl=0.6 if noticed else 60)
    first = asyncio.create_task(site.ask(who=site.world.other()))
    await gate.reached()
    site.lapse()
    assert (await site.ask()).body == b"in time"
    if noticed:
        await eventually(lambda: "lost" in events)
    gate.open()
    late = await first
    assert (late.status, late.header("retry-after")) == (409, "1")
    assert "lost its claim" in late.problem
    again = await site.ask()
    assert (again.body, again.replayed, site.row.attempt) == (b"in time", True, 2)


# ---------------------------------------------------------------- sizes


async def test_a_body_that_is_too_long_is_rejected(site: Site) -> None:
    """413 before the application is called; one byte less is handled."""
    site.behind(max_body=10)
    for headers in ([], [("content-length", "11")]):
        got = await site.ask(body=b"x" * 11, headers=headers)
        assert got.status == 413
        assert "10 bytes" in got.problem
    assert site.seen == site.rows() == []
    site.behind(max_body=13)
    assert (await site.ask(body=b"x" * 13)).status == 201


@pytest.mark.matrix
@pytest.mark.parametrize("announced", [True, False])
async def test_a_response_that_is_too_long_passes_and_is_not_replayed(site: Site, announced: bool) -> None:
    """The client gets the whole response. A retry learns that the request was processed; it does not run twice."""
    headers = (("content-length", "13"),) if announced else ()

    async def pay(_: Asked) -> Answer:
        return Answer(200, (("content-type", "text/plain"), *headers), (b"abc", b"", b"defghij", b"klm"))

    site.handler = pay
    site.behind(max_body=13, record_below=500)
    assert (await site.ask("other")).body == b"abcdefghijklm"
    site.behind(max_body=12)
    first, again = await site.ask(body=b"{}"), await site.ask(body=b"{}")
    assert (first.status, first.body) == (200, b"abcdefghijklm")
    assert (again.status, again.replayed, again.header("retry-after")) == (409, True, None)
    assert "was processed" in again.body.decode()
    assert len(site.seen) == 2


async def test_a_failure_during_a_long_response_frees_the_key(site: Site) -> None:
    """C101: a status from `record_below` on frees the key, however long its body is."""

    async def pay(_: Asked) -> Answer:
        return Answer(500, chunks=(b"x" * 20,) * 3)

    site.handler = pay
    site.behind(max_body=15)
    assert (await site.ask()).body == b"x" * 60
    assert site.row.status == "free"


@pytest.mark.every_driver
async def test_a_request_with_an_unstorable_response_runs_once(site: Site) -> None:
    """PostgreSQL has no text with NUL: only the fact that the request was processed is recorded."""

    async def pay(_: Asked) -> Answer:
        return Answer(headers=(("content-type", "text/plain"), ("x-note", "a\0b")))

    site.handler = pay
    with suppress(AssertionError):  # of what looks whether rules of WSGI are kept
        assert (await site.ask()).status == 201
    assert (await site.ask()).status == 409
    assert (len(site.seen), site.row.status) == (1, "done")


# ---------------------------------------------------------------- the database


async def test_a_handler_may_use_the_only_connection_of_the_pool(world: World, admin: psycopg.Connection[Any]) -> None:
    """No connection is held while the application works: a pool of one is enough for both."""
    site = Site(world, admin, pool_size=1, max_overflow=0, pool_timeout=1)

    async def pay(_: Asked) -> Answer:
        if world.is_async:
            async with site.engine.begin() as connection:
                await connection.execute(text("SELECT 1"))
        else:
            with site.engine.begin() as connection:
                connection.execute(text("SELECT 1"))
        return Answer()

    site.handler = pay
    assert [(await site.ask()).status for _ in range(2)] == [201, 201]


async def test_an_exhausted_pool_does_not_block_a_key(world: World, admin: psycopg.Connection[Any]) -> None:
    """Claims, records and replays use connections of pgfence."""
    site = Site(world, admin, pool_size=1, max_overflow=0, pool_timeout=1)
    async with world.enter(site.engine.connect()):
        got = await asyncio.gather(*(site.ask(f"k{n}", who=world.other()) for n in range(4)))
        again = [await site.ask(f"k{n}") for n in range(4)]
    assert [one.status for one in got] == [201] * 4
    assert all(one.replayed for one in again)


@pytest.mark.every_driver
async def test_without_a_response_of_the_database_nothing_is_handled(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """503 if it cannot be reached, 500 without tables; the client gets the kind of error, the log the details."""
    nowhere = site.world.engine(dsn="postgresql://nobody:secret@127.0.0.1:9/nowhere")
    bare = site.world.engine()
    configure(bare, prefix="missing_")
    for engine, status, kind in ((nowhere, 503, "database_unreachable"), (bare, 500, "schema")):
        caplog.clear()
        with caplog.at_level(logging.INFO, "pgfence.http"):
            site.behind(engine=lambda engine=engine: engine)
            got = await site.ask()
        assert (got.status, got.code) == (status, kind)
        (record,) = caplog.records
        assert (record.levelname, record.exc_info is not None) == ("ERROR", True)
        assert "secret" not in caplog.text
    assert site.seen == []


@pytest.mark.matrix
@pytest.mark.every_driver
@pytest.mark.parametrize(
    ("state", "problem", "reason"),
    [
        ("53100", "key_not_claimed", "not now"),
        ("57014", "key_not_claimed", "not now"),
        ("25006", "database_read_only", "rejected a write"),
    ],
)
async def test_a_claim_that_the_server_rejects_is_a_problem(
    site: Site, admin: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture, state: str, problem: str, reason: str
) -> None:
    """A full disk, an operator's cancel, a standby: nothing is handled, the client may retry, and the log says why."""
    place = f"full_{site.label}"
    admin.execute(f"CREATE SCHEMA {place}".encode())
    engine = site.world.engine()
    configure(engine, schema=place)
    admin.execute(schema.sql(schema=place).encode())
    refuse = f"""
        CREATE FUNCTION {place}.refuse() RETURNS trigger LANGUAGE plpgsql
            AS $$ BEGIN RAISE EXCEPTION 'not now' USING ERRCODE = '{state}'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON {place}.pgfence_idempotency_key
            FOR EACH ROW EXECUTE FUNCTION {place}.refuse();
    """
    admin.execute(refuse.encode())
    site.behind(engine=engine)
    with caplog.at_level(logging.INFO, "pgfence.http"):
        got = await site.ask()
    assert (got.status, got.code, site.seen) == (503, problem, [])
    (record,) = caplog.records
    assert (record.levelname, reason in caplog.text) == ("ERROR", True)
    admin.execute(f"DROP SCHEMA {place} CASCADE".encode())


async def test_a_response_that_could_not_be_stored_is_sent(
    site: Site, admin: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """When recording fails the work is done, and the client gets the response; the log reports the missing record."""
    place = f"gone_{site.label}"
    admin.execute(f"CREATE SCHEMA {place}".encode())
    engine = site.world.engine()
    configure(engine, schema=place)
    admin.execute(schema.sql(schema=place).encode())

    async def pay(_: Asked) -> Answer:
        admin.execute(f"DROP SCHEMA {place} CASCADE".encode())
        return Answer()

    site.handler = pay
    site.behind(engine=engine)
    with caplog.at_level(logging.ERROR, "pgfence.http"):
        assert (await site.ask()).status == 201
    assert "POST /pay: the response could not be stored" in caplog.text


async def test_an_engine_of_the_other_kind_is_rejected(site: Site) -> None:
    """An AsyncEngine for ASGI, an Engine for WSGI; never a session."""
    with pytest.raises(TypeError, match="IdempotencyMiddleware needs an"):
        site.behind(engine=7)
