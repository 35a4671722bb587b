"""The site's own limits: set for the role, as a careful administrator does, and deadly for a quiet holder."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from pgfence.errors import LockTimeoutError, TransactionStateError
from support import transactions
from support.locking import background, elsewhere, give, is_free, labelled, lock, run, sessions, waits
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins

HOSTILE = {
    "idle_session_timeout": "600ms",
    "idle_in_transaction_session_timeout": "500ms",
    "statement_timeout": "550ms",
    "lock_timeout": "200ms",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "DateStyle": "German, DMY",
}
NEWER = {"transaction_timeout": ("650ms", 170000)}


@pytest.fixture
def hostile(role: Callable[..., str], admin: psycopg.Connection[Any]) -> str:
    """The DSN of a role with every setting that ends or misleads a quiet holder, as far as the server knows them."""
    newer = {name: value for name, (value, since) in NEWER.items() if admin.info.server_version >= since}
    return role(settings=HOSTILE | newer)


async def pass_by(seconds: float) -> None:
    """Let time go by while nothing is done: what is under test is that quiet."""
    began = time.monotonic()
    await eventually(lambda: time.monotonic() - began > seconds)


@pytest.mark.every_driver
async def test_a_quiet_holder_lives_on(world: World, name: str, hostile: str, admin: psycopg.Connection[Any]) -> None:
    """C047, C010: it is idle, in no transaction, and held after three times the longest of the site's limits."""
    async with world.enter(lock(world, labelled(world, name, dsn=hostile), name).hold()) as held:
        await pass_by(2)
        (session,) = sessions(admin, name)
        assert (session.state, session.xact_start, session.backend_xmin) == ("idle", None, None)
        assert not is_free(admin, name)
        assert held.state == "held"
        held.check()
    assert is_free(admin, name)


@pytest.mark.every_driver
async def test_a_wait_lasts_for_the_timeout(
    world: World, name: str, hostile: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """C039, C010: longer than every limit of the site, granted in the end; between slices it is idle, never in a transaction."""
    one = lock(world, labelled(world, name, dsn=hostile), name)
    waiter = world.other()
    with elsewhere(dsn, name) as holder:
        began = time.monotonic()
        async with background(waiter.call(one.acquire, timeout=10)) as waiting:
            await eventually(waits(admin, name))
            seen = set()
            while time.monotonic() - began < 1.8:
                seen |= {session.state for session in sessions(admin, name)}
                await asyncio.sleep(0.02)
            assert seen <= {"active", "idle"}
            assert not waiting.done()
            assert give(holder, name)
            held = await waiting
    await waiter.call(held.release)


async def test_a_wait_ends_at_the_callers_deadline_not_the_sites(
    world: World, name: str, hostile: str, dsn: str
) -> None:
    """C039: neither 57014 nor a bare 55P03, but our own error at our own time."""
    one = lock(world, world.engine(dsn=hostile), name)
    with elsewhere(dsn, name):
        began = time.monotonic()
        with pytest.raises(LockTimeoutError):
            await world.call(one.acquire, timeout=1)
        assert 0.9 < time.monotonic() - began < FAR


async def test_a_warm_session_lives_on(world: World, name: str, hostile: str, admin: psycopg.Connection[Any]) -> None:
    """C047: idle between two holds for longer than the site allows; the same session serves the second one."""
    one = lock(world, labelled(world, name, dsn=hostile), name)
    held = await world.call(one.acquire)
    (session,) = sessions(admin, name)
    await world.call(held.release)
    await pass_by(1.2)
    again = await world.call(one.acquire)
    assert [s.pid for s in sessions(admin, name)] == [session.pid]
    await world.call(again.release)


async def test_the_users_own_connections_keep_the_sites_settings(world: World, name: str, hostile: str) -> None:
    """C039: what is set on our sessions is set nowhere else, neither while a lock is held nor after it."""
    engine = world.engine(dsn=hostile)
    async with world.enter(lock(world, engine, name).hold()):
        assert await settings(world, engine) == of_the_site(world)
    assert await settings(world, engine) == of_the_site(world)


def of_the_site(world: World) -> dict[str, str]:
    """Return what a connection of the user's own has; psycopg2 sets one of them itself."""
    return HOSTILE | ({"DateStyle": "ISO, DMY"} if world.name == "psycopg2" else {})


async def settings(world: World, engine: Any) -> dict[str, str]:
    async with transactions.connection(world, engine) as connection:
        return {name: await run(world, connection, f"SHOW {name}") for name in HOSTILE}


@pytest.mark.every_driver
async def test_work_on_the_locks_own_connection_has_the_sites_limits(
    world: World, name: str, hostile: str, admin: psycopg.Connection[Any]
) -> None:
    """C039: on connect() a statement that is too long dies as everywhere; the idle limits alone are off, the lock depends on it."""
    async with world.enter(lock(world, labelled(world, name, dsn=hostile), name).connect()) as connection:
        with pytest.raises(Exception, match=r"(?i)statement.timeout") as caught:
            await run(world, connection, "SELECT pg_sleep(1)")
        await world.call(connection.rollback)
        assert "57014" in (getattr(caught.value.orig, "sqlstate", None) or getattr(caught.value.orig, "pgcode", None))
        found = {name: await run(world, connection, f"SHOW {name}") for name in HOSTILE}
        assert found == of_the_site(world) | {"idle_session_timeout": "0", "idle_in_transaction_session_timeout": "0"}
        assert await run(world, connection, "SHOW transaction_isolation") == "serializable"
        await world.call(connection.rollback)
        await pass_by(1.2)
        assert await run(world, connection, "SELECT 1") == 1
        assert not is_free(admin, name)
    assert is_free(admin, name)


@pytest.mark.every_driver
async def test_a_callers_connection_holds_a_lock_under_the_sites_limits(
    world: World, name: str, role: Callable[..., str], dsn: str
) -> None:
    """C039: nothing is set there, so a wait in the server would be ended by the site: it polls, and changes no setting."""
    limits = {"statement_timeout": "300ms", "lock_timeout": "200ms", "default_transaction_isolation": "serializable"}
    engine = world.engine(dsn=role(settings=limits))
    async with transactions.connection(world, engine) as connection:
        one = lock(world, connection, name)
        with elsewhere(dsn, name) as holder:
            began = time.monotonic()
            with pytest.raises(LockTimeoutError):
                await world.call(one.acquire, timeout=1)
            assert 0.9 < time.monotonic() - began < FAR
            assert give(holder, name)
        async with world.enter(one.hold(timeout=5)):
            assert {key: await run(world, connection, f"SHOW {key}") for key in limits} == limits
            await world.call(connection.rollback)


async def test_a_default_isolation_that_cannot_work_is_rejected_for_transaction_locks(
    world: World, name: str, hostile: str
) -> None:
    """A snapshot older than the lock is the site's default here: TransactionStateError, not a lock that protects nothing."""
    async with transactions.session(world, world.engine(dsn=hostile)) as session:
        with pytest.raises(TransactionStateError):
            await world.call(transactions.lock(session, name).acquire)
