"""Rows of keys that expire, are purged or are locked during a claim never lose or repeat the work."""

from __future__ import annotations

import asyncio
import logging
import secrets
import string
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import delete, select, text
from sqlalchemy.exc import NoResultFound

from pgfence import monitoring
from pgfence.config import configure
from pgfence.errors import IdempotencyInProgressError, IdempotencyMisuseError
from support.keyed import Desk, Receipt
from support.limits import set_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pgfence.types import Event
    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]

NAMED = "hashtextextended(%(scope)s || chr(31) || 'k', 'pgfence_idempotency_key'::regtype::oid::bigint)"
EQUAL_REQUEST = f"(({NAMED} >> 32)::integer, (hashtextextended('', {NAMED}) >> 32)::integer)"
"""What a claim of "k" without a payload locks first."""

STORE = (
    "INSERT INTO pgfence_idempotency_key (scope, key, status, result, created_at, expires_at) VALUES"
    " (%s, 'k', 'done', 'null', clock_timestamp(), clock_timestamp() + %s * interval '1 s')"
)
REMOVE = "DELETE FROM pgfence_idempotency_key WHERE scope = %s"


@pytest.fixture
def desk(world: World, admin: psycopg.Connection[Any]) -> Iterator[Desk]:
    """Sessions of a world, and effects."""
    here = Desk(world, admin)
    yield here
    here.close()


def rows(desk: Desk) -> list[tuple[Any, ...]]:
    return desk.admin.execute(
        "SELECT key, status FROM pgfence_idempotency_key WHERE scope = %s", [desk.scope]
    ).fetchall()


# ---------------------------------------------------------------- rows that vanish


@pytest.mark.every_driver
async def test_a_row_removed_during_the_wait_is_claimed_again(desk: Desk, eventually: Callable[..., Any]) -> None:
    """C098: the winner's row is deleted before the loser reads it: one claim is fresh, with a row; another one is rejected."""
    values = {"scope": desk.scope}
    claimed, go = asyncio.Event(), asyncio.Event()

    async def late() -> None:
        async with desk.at_work("k", who=desk.world.other()):
            claimed.set()
            await go.wait()

    desk.admin.execute(f"SELECT pg_advisory_lock{EQUAL_REQUEST}".encode(), values)
    try:
        task = asyncio.create_task(late())
        await eventually(lambda: desk.waiters() == 1)
        desk.admin.execute(STORE, [desk.scope, 60])
        desk.admin.execute(REMOVE, [desk.scope])
    finally:
        desk.admin.execute(f"SELECT pg_advisory_unlock{EQUAL_REQUEST}".encode(), values)
    await asyncio.wait_for(claimed.wait(), 10)
    with pytest.raises(IdempotencyInProgressError):
        await desk.pay("k", timeout=0)
    go.set()
    await task
    assert (desk.effects(), rows(desk)) == (1, [("k", "done")])


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("end", ["removed", "rolled back", "expired", "committed"])
async def test_a_claim_waits_for_a_row_that_is_being_written(
    desk: Desk, dsn: str, eventually: Callable[..., Any], end: str
) -> None:
    """C098: the claim waits at the unique index; then it is fresh, with one row, or gets what is stored."""
    with psycopg.connect(dsn) as writer:
        writer.execute(STORE, [desk.scope, -1 if end == "expired" else 60])
        task = asyncio.create_task(desk.pay("k", who=desk.world.other()))
        await eventually(lambda: desk.blocked() == 1)
        if end == "removed":
            writer.execute(REMOVE, [desk.scope])
        (writer.rollback if end == "rolled back" else writer.commit)()
        answer = await task
    assert answer == (None if end == "committed" else Receipt("k"))
    assert (desk.effects(), rows(desk)) == (int(end != "committed"), [("k", "done")])


async def test_one_caller_works_at_a_time_while_keys_are_purged(desk: Desk, dsn: str) -> None:
    """C098, C109: keys expire and are purged under six callers: each run has a row, no two run at once, and none fails."""
    callers = [desk.world.contender() for _ in range(6)]
    inside, done, removed = 0, 0, 0
    stop = False

    def work(session: Any) -> Receipt:
        nonlocal inside, done
        inside += 1
        assert inside == 1
        receipt = desk.charge("k")(session)
        inside -= 1
        done += 1
        return receipt

    async def call(who: Any) -> None:
        while (done < 5 or removed < 5) and not stop:  # other keys of this database are purged too
            assert await desk.pay("k", who=who, work=work) == Receipt("k")

    def clean_up() -> None:
        nonlocal removed
        engine = desk.plain()
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not stop:
                connection.execute(
                    "UPDATE pgfence_idempotency_key SET expires_at = clock_timestamp() WHERE scope = %s", [desk.scope]
                )
                removed += monitoring.purge(engine)
        engine.dispose()

    janitor = asyncio.create_task(asyncio.to_thread(clean_up))
    try:
        await asyncio.wait_for(asyncio.gather(*map(call, callers)), 30)
    finally:
        stop = True
        await janitor
    assert desk.effects("k") == done >= 5


# ---------------------------------------------------------------- what cannot be a key, and what a result refers to


def unusable() -> list[tuple[str, str]]:
    letters = "".join(secrets.choice(string.printable[:94]) for _ in range(10_000))
    return [
        ("", "empty"),
        (" \u00a0 ", "blank"),
        ("k" * 256, "longer"),
        (letters, "longer"),
        ("k" * 10_000_000, "longer"),
        ("a\0b", r"U\+0000"),
        ("a\nb", r"U\+000A"),
        ("\udcff", r"U\+DCFF"),
    ]


@pytest.mark.every_driver
async def test_an_impossible_key_or_scope_leaves_the_transaction_usable(desk: Desk) -> None:
    """C108: nothing is sent, the other changes can be committed, and the message shortens the key or scope."""
    async with desk.world.enter(desk.session()) as session:
        await desk.on(session, desk.charge("mine"))
        desk.sent.clear()
        for value, message in unusable():
            for arguments in ((value, desk.scope), ("k", value)):
                with pytest.raises(ValueError, match=message) as caught:
                    desk.key(session, arguments[0], scope=arguments[1])
                assert len(str(caught.value)) < 200
        assert desk.sent == []
        await desk.world.call(session.commit)
    assert (desk.effects("mine"), rows(desk)) == (1, [])


async def test_a_scope_that_is_too_long_with_its_namespace_is_rejected(desk: Desk, admin: Any) -> None:
    """C108: scope and namespace together have at most 255 characters, and the transaction stays usable."""
    other = Desk(desk.world, admin)
    configure(other.engine, namespace="n" * 100)
    try:
        async with desk.world.enter(other.session()) as session:
            await other.on(session, other.charge("mine"))
            for scope, fits in (("s" * 200, False), ("s" * 100, True)):
                key = other.key(session, "k", scope=scope)
                if fits:
                    await desk.world.call(key.run, other.body(session, other.charge("k")))
                else:
                    with pytest.raises(ValueError, match="the scope"):
                        await desk.world.call(key.run, other.body(session, other.charge("k")))
            await desk.world.call(session.commit)
        assert other.effects() == 2
    finally:
        other.close()
        admin.execute("DELETE FROM pgfence_idempotency_key WHERE starts_with(scope, %s)", ["n" * 100])


async def test_a_result_outlives_what_it_refers_to(desk: Desk) -> None:
    """C110: a replay returns the stored value, or the stored reference even if its row was deleted."""
    for key, result in (("value", Receipt("value")), ("reference", "reference")):
        for _ in range(2):
            answer = await desk.pay(
                key,
                result=type(result),
                work=lambda session, key=key, result=result: (desk.charge(key)(session), result)[1],
            )
            assert answer == result
            desk.admin.execute(str(delete(desk.table)).encode())
    assert desk.effects() == 0
    async with desk.world.enter(desk.session()) as session:
        with pytest.raises(NoResultFound):
            await desk.on(session, lambda one: one.scalars(select(desk.table).where(desk.table.c.key == answer)).one())


# ---------------------------------------------------------------- what is told


async def test_events_for_claims_and_failed_waits(desk: Desk, admin: Any) -> None:
    """`on_event` gets "acquired" when work begins, "timeout" when a wait has failed, and "replayed"."""
    told: list[Event] = []
    heard = Desk(desk.world, admin)
    heard.scope = desk.scope
    configure(heard.engine, on_event=told.append)
    try:
        async with desk.at_work("k"):
            with pytest.raises(IdempotencyInProgressError):
                await heard.pay("k", who=desk.world.other(), timeout=0.1)
        await heard.pay("k")
        await heard.pay("other")
    finally:
        heard.close()
    assert [(event.event, event.name) for event in told] == [
        ("timeout", f"{desk.scope}:k"),
        ("replayed", f"{desk.scope}:k"),
        ("acquired", f"{desk.scope}:other"),
    ]


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("end", ["in vain", "with an answer", "soon"])
async def test_a_long_wait_is_a_warning(
    desk: Desk,
    end: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eventually: Callable[..., Any],
) -> None:
    """A long wait logs one WARNING with the key when it ends, and a short wait logs none."""
    set_limit(monkeypatch, "WARN_AFTER", 20 if end == "soon" else 0.1)
    caplog.set_level(logging.WARNING, "pgfence")
    other = desk.world.other()
    async with desk.at_work("k"):
        waiting = asyncio.create_task(desk.pay("k", who=other, timeout=0.2 if end == "in vain" else 20))
        if end == "in vain":
            with pytest.raises(IdempotencyInProgressError):
                await waiting
        else:
            longer = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE %s"
            longer += " AND clock_timestamp() - query_start > interval '0.15 s' AND state = 'active'"
            await eventually(lambda: desk.admin.execute(longer, ["%claim_key%"]).fetchone() == (1,))
    if end != "in vain":
        assert await waiting == Receipt("k")
    await desk.pay("k")
    told = [record.getMessage() for record in caplog.records if record.name == "pgfence.idempotency"]
    if end == "soon":
        assert told == []
        return
    (line,) = told
    assert f"the idempotency key 'k' of scope {desk.scope!r}" in line
    assert ("unsuccessfully" in line) == (end == "in vain")


@pytest.mark.every_driver
async def test_an_unfinished_key_is_reported_on_every_connection(desk: Desk) -> None:
    """A commit of an unfinished key is rejected with our error on every connection, and so is SET CONSTRAINTS."""
    async with desk.world.enter(desk.session()) as session:
        with pytest.raises(ConnectionError):
            await desk.world.call(desk.key(session, "k").run, desk.body(session, _fail))
        with pytest.raises(IdempotencyMisuseError, match="no result"):
            await desk.world.call(session.execute, text("SET CONSTRAINTS ALL IMMEDIATE"))
        await desk.world.call(session.rollback)
    assert await desk.pay("k") == Receipt("k")


def _fail(_: Any) -> Receipt:
    raise ConnectionError
