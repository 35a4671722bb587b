"""`stuck_keys` shows effects that were begun and not finished; `free_key` frees one, with an audit row."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from pgfence import monitoring, schema
from pgfence.config import configure
from pgfence.effects import AsyncIdempotentEffect, IdempotentEffect
from pgfence.errors import AttemptLostError, LockTimeoutError, SchemaError, StandbyError, UnreachableError
from pgfence.idempotency import idempotent
from pgfence.keys import SEPARATOR, qualify_name
from support.attempts import CLAIM, OTHER, Attempts
from support.dates import strange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from sqlalchemy import Engine

    from pgfence.effects import AsyncAttempt, Attempt
    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@pytest.fixture
def attempts(name: str, admin: psycopg.Connection[Any]) -> Attempts:
    """Attempts under keys of a scope that no other test has."""
    return Attempts(admin, name)


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    """An engine of psycopg, where the driver does not matter."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    yield engine
    engine.dispose()


@pytest.mark.every_driver
async def test_attempts_are_shown_without_their_stored_values(world: World, attempts: Attempts) -> None:
    """C099: a running attempt and a lost one, the oldest first; names of steps, without what they returned."""
    attempts.claim("fresh")
    attempts.claim("old")
    attempts.step("old", "ship")
    attempts.step("old", "charge")
    attempts.lapse("old")
    attempts.claim("old", OTHER)
    attempts.lapse("old")
    old, fresh = await world.call(monitoring.stuck_keys, world.engine(), prefix=attempts.scope)
    assert (old.scope, old.key, old.state, old.attempt) == (attempts.scope, "old", "lost", 2)
    assert (old.steps, old.owner, old.host, old.pid) == (("charge", "ship"), "worker-7", "host-1", 7)
    now = datetime.now(UTC)
    assert now - old.since > timedelta(hours=4) and old.locked_until < now < old.expires_at
    assert (fresh.key, fresh.state, fresh.attempt, fresh.steps) == ("fresh", "running", 1, ())
    assert fresh.locked_until > now
    assert "secret" not in repr(old)


async def test_only_what_is_begun_and_not_finished_is_shown(world: World, attempts: Attempts) -> None:
    """Keys that are done, were freed, or are claimed in a caller's transaction are not shown."""
    attempts.claim("done")
    attempts.finish("done")
    attempts.claim("failed and free")
    attempts.release("failed and free")
    engine = world.engine()
    sync = create_engine(f"postgresql+psycopg://{world.dsn.split('://', 1)[1]}")
    with Session(sync) as session, idempotent(session, "mine", scope=attempts.scope) as op:
        assert list(await world.call(monitoring.stuck_keys, engine, prefix=attempts.scope)) == []
        op.complete(None)
    sync.dispose()


async def test_age_scope_and_namespace_choose(world: World, attempts: Attempts, admin: psycopg.Connection[Any]) -> None:
    """older_than counts from the first claim, prefix is of the scope as the caller knows it, namespaces never meet."""
    attempts.claim("old")
    attempts.lapse("old")
    attempts.claim("new")
    shop = Attempts(admin, qualify_name(attempts.scope, "shop"))
    shop.claim("in shop")

    async def keys(engine: Any, **chosen: Any) -> list[str]:
        return [found.key for found in await world.call(monitoring.stuck_keys, engine, **chosen)]

    engine = world.engine()
    assert await keys(engine, prefix=attempts.scope) == ["old", "new"]
    assert await keys(engine, prefix=attempts.scope, older_than=timedelta(hours=1)) == ["old"]
    assert await keys(engine, prefix=attempts.scope, older_than=float("inf")) == []
    assert await keys(engine, prefix=attempts.scope + "x") == []
    assert "in shop" not in await keys(engine)
    configure(engine, namespace="shop")
    assert await keys(engine, prefix=attempts.scope) == ["in shop"]
    (found,) = await world.call(monitoring.stuck_keys, engine, prefix=attempts.scope)
    assert found.scope == attempts.scope


def test_stuck_keys_waits_for_no_lock_and_writes_nothing(engine: Engine, attempts: Attempts, dsn: str) -> None:
    """stuck_keys() works with row locks and unfinished claims of other sessions, and in a read-only session."""
    attempts.claim("held")
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM pgfence_idempotency_key WHERE scope = %s FOR UPDATE", [attempts.scope])
        Attempts(other, attempts.scope).claim("not committed")
        reading = engine.execution_options(postgresql_readonly=True)
        (found,) = monitoring.stuck_keys(reading, prefix=attempts.scope)
        other.rollback()
    assert found.key == "held"


@pytest.mark.every_driver
async def test_a_freed_key_is_taken_at_once_and_a_late_attempt_is_rejected(world: World, attempts: Attempts) -> None:
    """C101: the next attempt begins with the steps that are done; the former one can neither renew nor store."""
    number = attempts.claim("k", ttl=3600)
    attempts.step("k", "charge")
    found = await world.call(monitoring.free_key, world.engine(), attempts.scope, "k", reason="hung", actor="ann")
    assert (found.key, found.state, found.attempt, found.steps) == ("k", "running", number, ("charge",))
    assert attempts.renew("k")[0] == "lost"
    assert attempts.step("k", "ship") != number
    assert attempts.finish("k") != number
    assert attempts.row("k") == ("free", number, ["charge"])
    assert attempts.claim("k", OTHER) == number + 1
    assert attempts.finish("k") == number + 1
    assert attempts.row("k") == ("in_progress", number + 1, ["charge"])
    assert attempts.audit("k") == [("free key", "ann", "hung")]
    assert attempts.finish("k", number + 1, OTHER) == number + 1


async def test_an_effect_whose_key_was_freed_stores_nothing_any_more(world: World, attempts: Attempts) -> None:
    """C100, C101: while it runs, another caller is the next attempt, with its steps; the late step and result are rejected."""
    engine, seen = world.engine(), []

    def effect() -> Any:
        kind = world.pick(IdempotentEffect, AsyncIdempotentEffect)
        return kind(engine, "k", scope=attempts.scope, result=str)

    def newer(attempt: Attempt) -> str:
        seen.append((attempt.number, attempt.step("charge", lambda _: "again")))
        return "newer"

    def hung(attempt: Attempt) -> str:
        attempt.step("charge", lambda key: key)
        monitoring.free_key(engine, attempts.scope, "k", reason="hung")
        assert effect().run(newer) == "newer"
        with pytest.raises(AttemptLostError) as lost:
            attempt.step("ship", lambda _: "late")
        seen.append((lost.value.attempt, lost.value.newest))
        return "late"

    async def newer_async(attempt: AsyncAttempt) -> str:
        seen.append((attempt.number, await attempt.step("charge", said("again"))))
        return "newer"

    async def hung_async(attempt: AsyncAttempt) -> str:
        await attempt.step("charge", said("k:charge"))
        await monitoring.free_key(engine, attempts.scope, "k", reason="hung")
        assert await effect().run(newer_async) == "newer"
        with pytest.raises(AttemptLostError) as lost:
            await attempt.step("ship", said("late"))
        seen.append((lost.value.attempt, lost.value.newest))
        return "late"

    with pytest.raises(AttemptLostError):
        await world.call(effect().run, world.pick(hung, hung_async))
    assert seen == [(2, "k:charge"), (1, 2)]
    assert attempts.row("k") == ("done", 2, ["charge"])
    assert await world.call(effect().run, world.pick(newer, newer_async)) == "newer"


def said(value: str) -> Callable[[str], Awaitable[str]]:
    """Return a step that returns a value."""

    async def step(_: str) -> str:
        return value

    return step


async def test_the_audit_says_what_was_found(world: World, attempts: Attempts, admin: psycopg.Connection[Any]) -> None:
    """The audit row has the attempt, owner, steps and times, but no stored values; the default actor is this user."""
    attempts.claim("k")
    attempts.step("k", "charge")
    attempts.lapse("k")
    await world.call(monitoring.free_key, world.engine(), attempts.scope, "k", reason="lost")
    actor, detail, at = admin.execute(
        "SELECT actor, detail, at BETWEEN clock_timestamp() - interval '1 min' AND clock_timestamp() FROM pgfence_audit"
        " WHERE resource = %s",
        [attempts.scope + SEPARATOR + "k"],
    ).fetchone()
    assert "@" in actor and at
    known = {"attempt": 1, "steps": ["charge"], "owner": "worker-7", "host": "host-1", "pid": 7, "running": False}
    assert known.items() <= detail.items()
    assert detail.keys() == {*known, "since", "locked_until", "expires_at"}


@pytest.mark.every_driver
async def test_times_are_read_whatever_sessions_and_drivers_make_of_them(
    world: World, attempts: Attempts, admin: psycopg.Connection[Any]
) -> None:
    """Dates in German, a driver that reads times in its own way: the look and the order to free give each to the microsecond."""
    attempts.claim("k")
    attempts.lapse("k")
    times = admin.execute(
        "SELECT created_at, locked_until, expires_at FROM pgfence_idempotency_key WHERE scope = %s", [attempts.scope]
    ).fetchone()
    engine = strange(world)
    (seen,) = await world.call(monitoring.stuck_keys, engine, prefix=attempts.scope)
    freed = await world.call(monitoring.free_key, engine, attempts.scope, "k", reason="lost")
    for found in (seen, freed):
        assert (found.since, found.locked_until, found.expires_at) == times
        assert found.since.utcoffset() == timedelta(0)


async def test_a_record_may_be_kept_for_good(world: World, attempts: Attempts, admin: psycopg.Connection[Any]) -> None:
    """An end that was set to infinity manually is shown as the last time that Python has."""
    attempts.claim("k")
    admin.execute("UPDATE pgfence_idempotency_key SET expires_at = 'infinity' WHERE scope = %s", [attempts.scope])
    (seen,) = await world.call(monitoring.stuck_keys, world.engine(), prefix=attempts.scope)
    assert seen.expires_at == datetime.max.replace(tzinfo=UTC)


async def test_where_nothing_is_stuck_nothing_is_done(world: World, attempts: Attempts) -> None:
    """An unknown, finished or free key is not an error, and adds no row to the audit."""
    attempts.claim("done")
    attempts.finish("done")
    attempts.claim("free")
    attempts.release("free")
    engine = world.engine()
    for key in ("unknown", "done", "free"):
        assert await world.call(monitoring.free_key, engine, attempts.scope, key, reason="hung") is None
        assert attempts.audit(key) == []
    assert attempts.row("done") == ("done", 1, None)


def test_a_result_that_is_being_stored_is_not_overtaken(engine: Engine, attempts: Attempts, dsn: str) -> None:
    """C100: while a transaction that completes the key is open, freeing it fails after 2 s, and nothing was done."""
    attempts.claim("k")
    with psycopg.connect(dsn) as other:
        Attempts(other, attempts.scope).finish("k")
        with pytest.raises(LockTimeoutError, match="about to store its result") as caught:
            monitoring.free_key(engine, attempts.scope, "k", reason="hung")
        assert caught.value.timeout == 2.0
        other.commit()
    assert attempts.row("k") == ("done", 1, None)
    assert attempts.audit("k") == []


@pytest.mark.every_driver
async def test_place_and_namespace_are_the_configured_ones(
    world: World, name: str, admin: psycopg.Connection[Any], attempts: Attempts
) -> None:
    """The key is freed in the configured tables and namespace, and the same key of another scope is kept."""
    engine = world.engine()
    configure(engine, namespace="shop", prefix="100%_")
    await world.call(schema.create_all, engine)
    attempts.claim("k")
    claim = '"100%%_claim_effect_v1"(%s, %s, NULL, %s, 60, 3600, true, NULL, NULL, NULL)'
    admin.execute(f"SELECT FROM {claim}", [qualify_name(name, "shop"), "k", CLAIM])
    (found,) = await world.call(monitoring.stuck_keys, engine, prefix=name)
    assert (found.scope, found.owner, found.host, found.pid) == (name, None, None, None)
    assert await world.call(monitoring.free_key, engine, name, "k", reason="hung") == found
    assert admin.execute('SELECT resource FROM "100%_audit" ORDER BY id DESC LIMIT 1').fetchone() == (
        qualify_name(name, "shop") + SEPARATOR + "k",
    )
    assert attempts.row("k") == ("in_progress", 1, None)


BAD = [
    ({"scope": ""}, ValueError),
    ({"scope": 7}, TypeError),
    ({"key": " "}, ValueError),
    ({"key": "x" * 256}, ValueError),
    ({"key": "a\x1fb"}, ValueError),
    ({"key": None}, TypeError),
    ({"reason": ""}, ValueError),
    ({"reason": None}, TypeError),
    ({"actor": "a\x00b"}, ValueError),
]


async def test_bad_input_is_rejected_before_any_statement(world: World) -> None:
    """Scopes, keys, reasons, actors, ages and prefixes that cannot be used are rejected without a query."""
    engine = world.engine(dsn="postgresql://nobody@127.0.0.1:1/nothing")
    for wrong, error in BAD:
        arguments = {"scope": "s", "key": "k", "reason": "hung"} | wrong
        with pytest.raises(error):
            await world.call(monitoring.free_key, engine, **arguments)
    for look, error in (
        ({"older_than": -1}, ValueError),
        ({"older_than": "1"}, TypeError),
        ({"prefix": 7}, TypeError),
        ({"prefix": "a\x00"}, ValueError),
    ):
        with pytest.raises(error):
            await world.call(monitoring.stuck_keys, engine, **look)


@pytest.mark.every_driver
async def test_without_a_server_it_is_unreachable(world: World) -> None:
    """Without a server, both functions raise UnreachableError."""
    engine = world.engine(dsn="postgresql://nobody@127.0.0.1:1/nothing")
    with pytest.raises(UnreachableError):
        await world.call(monitoring.stuck_keys, engine)
    with pytest.raises(UnreachableError):
        await world.call(monitoring.free_key, engine, "s", "k", reason="hung")


async def test_without_tables_it_says_what_makes_them(world: World) -> None:
    """Without tables, both functions raise SchemaError with the command."""
    engine = world.engine()
    configure(engine, prefix="no_such_")
    for call in ((monitoring.stuck_keys, engine), (monitoring.free_key, engine, "s", "k")):
        reason = {} if call[0] is monitoring.stuck_keys else {"reason": "hung"}
        with pytest.raises(SchemaError, match="pgfence install") as caught:
            await world.call(*call, **reason)
        assert caught.value.needed == 2


@pytest.mark.every_driver
async def test_what_a_role_may_not_do_is_named_and_nothing_is_done(
    world: World, attempts: Attempts, admin: psycopg.Connection[Any], role: Callable[..., str]
) -> None:
    """Listing needs SELECT, and freeing also UPDATE, and INSERT on the audit; the error has the missing GRANT."""
    attempts.claim("k")
    theirs = role()
    who = psycopg.conninfo.conninfo_to_dict(theirs)["user"]
    engine = world.engine(dsn=theirs)
    with pytest.raises(SchemaError, match="GRANT SELECT"):
        await world.call(monitoring.stuck_keys, engine, prefix=attempts.scope)
    admin.execute(f"GRANT SELECT ON pgfence_idempotency_key TO {who}")
    assert len(await world.call(monitoring.stuck_keys, engine, prefix=attempts.scope)) == 1
    admin.execute(f"GRANT UPDATE ON pgfence_idempotency_key TO {who}")
    with pytest.raises(SchemaError, match="GRANT INSERT") as caught:
        await world.call(monitoring.free_key, engine, attempts.scope, "k", reason="hung")
    assert attempts.row("k") == ("in_progress", 1, None)
    admin.execute(caught.value.command.replace("<role>", str(who)))
    assert await world.call(monitoring.free_key, engine, attempts.scope, "k", reason="hung")
    admin.execute(f"REVOKE ALL ON pgfence_idempotency_key, pgfence_audit FROM {who}")


def test_a_server_that_takes_no_writes_says_so(attempts: Attempts, role: Callable[..., str], dsn: str) -> None:
    """A read-only session raises the same error as a standby."""
    attempts.claim("k")
    options = "options=-cdefault_transaction_read_only%3Don"
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}?{options}")
    with pytest.raises(StandbyError, match="on the primary"):
        monitoring.free_key(engine, attempts.scope, "k", reason="hung")
    engine.dispose()
    assert attempts.audit("k") == []
