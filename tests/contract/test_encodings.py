"""Text that the database's encoding cannot represent is a `ValueError` that names it, and nothing else fails."""

from __future__ import annotations

import logging
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pgfence import AdvisoryLock, AsyncAdvisoryLock, AsyncLease, AsyncOnce, Lease, Once, compat, fence, schema
from pgfence.effects import AsyncIdempotentEffect, IdempotentEffect
from pgfence.idempotency import idempotent
from pgfence.monitoring import evict, free_key, stuck_keys
from support.servers import with_database
from support.worlds import NAMES, World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

NIGHT = "Ночь"
DAY = timedelta(days=1)


@pytest.fixture(scope="module", params=["LATIN1", "SQL_ASCII"])
def elsewhere(request: pytest.FixtureRequest, dsn: str) -> Iterator[tuple[str, str]]:
    """A database with an encoding other than UTF8."""
    name = f"pgfence_test_{secrets.token_hex(4)}_encoding"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{request.param}' LOCALE 'C'".encode())
        there = with_database(dsn, name)
        engine = create_engine(there.replace("postgresql://", "postgresql+psycopg2://", 1))
        schema.create_all(engine)
        engine.dispose()
        yield request.param, there
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture(params=NAMES)
async def there(request: pytest.FixtureRequest, elsewhere: tuple[str, str]) -> AsyncIterator[World]:
    """A driver on that database."""
    encoding, dsn = elsewhere
    if encoding == "SQL_ASCII" and request.param != "psycopg2":
        # SQLAlchemy cannot use psycopg there; asyncpg sends UTF-8, and the server takes any bytes.
        pytest.skip("rejects no text there")
    here = World(request.param, dsn)
    yield here
    await here.close()


def calls(world: World, engine: Any) -> dict[str, Callable[[], Any]]:
    """Return one call for each kind of text, without those in transactions of the caller's."""
    lock, lease = world.pick(AdvisoryLock, AsyncAdvisoryLock), world.pick(Lease, AsyncLease)
    once, effect = world.pick(Once, AsyncOnce), world.pick(IdempotentEffect, AsyncIdempotentEffect)
    lost = {"name": NIGHT, "lease_id": "00000000-0000-4000-8000-000000000000", "token": 1}

    def work(result: str) -> Any:
        async def asynchronous(_: Any) -> str:
            return result

        return asynchronous if world.is_async else lambda _: result

    return {
        "name of a token lock": lock(engine, NIGHT, token=True).try_acquire,
        "name of a lease": lease(engine, NIGHT, ttl=5).try_acquire,
        "name of a lease, waiting": lambda: lease(engine, NIGHT, ttl=5).acquire(timeout=1),
        "is_held": lease(engine, NIGHT, ttl=5).is_held,
        "owner": lease(engine, "plain", ttl=5, owner=NIGHT).try_acquire,
        "purpose": lease(engine, "plain", ttl=5, purpose=NIGHT).try_acquire,
        "metadata": lease(engine, "plain", ttl=5, metadata={"who": NIGHT}).try_acquire,
        "adopt": lambda: lease.adopt(engine, lost),
        "name of a slot": lambda: once(engine, NIGHT, every=DAY).acquire(timeout=0),
        "name to evict": lambda: evict(engine, NIGHT, reason="why"),
        "reason": lambda: evict(engine, "plain", reason=NIGHT),
        "actor": lambda: evict(engine, "plain", reason="why", actor=NIGHT),
        "scope": lambda: stuck_keys(engine, prefix=NIGHT),
        "key to free": lambda: free_key(engine, "scope", NIGHT, reason="why"),
        "key of an effect": lambda: effect(engine, NIGHT, scope="scope", result=str).run(work("done")),
        "scope of an effect": lambda: effect(engine, "key", scope=NIGHT, result=str).run(work("done")),
        "result of an effect": lambda: effect(engine, secrets.token_hex(4), scope="scope", result=str).run(work(NIGHT)),
    }


def written(world: World, engine: Any) -> dict[str, Callable[[], Any]]:
    """Return one call for each kind of text that is sent in a transaction of the caller's."""

    async def in_transaction(use: Callable[[Any], Any]) -> None:
        async with world.enter(world.pick(Session, AsyncSession)(engine)) as session, world.enter(session.begin()):
            await use(session)

    async def key(session: Any, key: str, result: str) -> None:
        async with world.enter(idempotent(session, key, scope="scope", result=str)) as op:
            op.complete(result)

    async def checkpoint(session: Any) -> None:
        held = await world.call(world.pick(Lease, AsyncLease)(engine, "plain", ttl=5).acquire)
        try:
            await world.call(held.checkpoint, session, {"at": NIGHT})
        finally:
            await world.call(held.release)

    async def hashed(session: Any) -> None:
        connection = await world.call(session.connection)
        await world.call(compat.hashtext_key, connection, NIGHT)

    return {
        "resource": lambda: in_transaction(lambda session: world.call(fence, session, NIGHT, 1)),
        "resources": lambda: in_transaction(lambda session: world.call(fence, session, {"plain": 1, NIGHT: 1})),
        "key": lambda: in_transaction(lambda session: key(session, NIGHT, "done")),
        "result": lambda: in_transaction(lambda session: key(session, secrets.token_hex(4), NIGHT)),
        "checkpoint": lambda: in_transaction(checkpoint),
        "hashtext": lambda: in_transaction(hashed),
    }


async def test_a_text_that_the_database_cannot_represent_is_a_value_error(
    there: World, elsewhere: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The ValueError names the text, the encoding and the remedy, and nothing is retried in the background."""
    caplog.set_level(logging.WARNING, "pgfence")
    engine = there.engine()
    await there.call((await there.call(there.pick(Lease, AsyncLease)(engine, "plain", ttl=5).acquire)).release)
    seen = {}
    for what, call in calls(there, engine).items():
        try:
            seen[what] = await there.call(call)
        except Exception as error:
            seen[what] = error
    for what, coroutine in written(there, engine).items():
        try:
            seen[what] = await coroutine()
        except Exception as error:
            seen[what] = error
    wrong = {
        what: outcome
        for what, outcome in seen.items()
        if not isinstance(outcome, ValueError)
        or isinstance(outcome, UnicodeError)
        or any(word not in str(outcome) for word in (NIGHT, elsewhere[0], "UTF8"))
    }
    assert wrong == {}
    # A lease still works: its connections and its heartbeat have taken no harm.
    held = await there.call(there.pick(Lease, AsyncLease)(engine, "plain", ttl=5).acquire, timeout=5)
    await there.call(held.renew)
    await there.call(held.release)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("bad", ["half \ud800", "\udcff"])
async def test_half_a_surrogate_pair_in_json_is_a_value_error(world: World, tables: None, name: str, bad: str) -> None:
    """A lone surrogate in JSON is rejected, because jsonb cannot store it in any encoding."""
    del tables
    engine = world.engine()
    lease: Any = world.pick(Lease, AsyncLease)
    with pytest.raises(ValueError, match="lone surrogate"):
        lease(engine, name, ttl=5, metadata={"who": [bad]})
    held = await world.call(lease(engine, name, ttl=5, metadata={"who": "both halves 🚀"}).acquire)
    async with world.enter(world.pick(Session, AsyncSession)(engine)) as session:
        with pytest.raises(ValueError, match="lone surrogate"):
            await world.call(held.checkpoint, session, {bad: 1})
    await world.call(held.release)
    with pytest.raises(ValueError, match="lone surrogate"):
        await world.call(evict, engine, name, reason=f"why {bad}")


@pytest.mark.every_driver
async def test_a_backslash_before_u0000_in_json_is_no_nul(world: World, tables: None, name: str) -> None:
    """The six characters of an escape are stored as they are, after any number of backslashes; a NUL behind them is rejected."""
    del tables
    engine = world.engine()
    lease: Any = world.pick(Lease, AsyncLease)
    for number, text in enumerate((r"\u0000", r"\\u0000", "\\" * 3 + "u0000")):
        held = await world.call(lease(engine, f"{name}{number}", ttl=5, metadata={"path": text}).acquire)
        await world.call(held.release)
    with pytest.raises(ValueError, match="NUL"):
        lease(engine, name, ttl=5, metadata=r"\u0000" + "\x00")
