"""Locks of every kind work with very long timeouts, odd names, savepoint settings, and in large numbers."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from pgfence.errors import LockTimeoutError, TransactionStateError
from support import transactions
from support.leases import lease, rival
from support.locking import (
    background,
    elsewhere,
    freed,
    give,
    is_free,
    labelled,
    lock,
    run,
    sessions,
    take,
    terminate,
    waits,
)
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins

HUGE = [2**31, 1e10, 1e300, timedelta.max]
ODD = {
    "long": "x" * 250,
    "blanks": "   ",
    "backslashes": "a\\b\\\\'",
    "percent": "%(x)s %s %%",
    "colon": ":x ::int {y}",
    "emoji": "\N{PILE OF POO}\u0301\U0001f469\u200d\U0001f680",
    "case": "Name",
    "other case": "nAME",
}


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("timeout", HUGE, ids=str)
async def test_a_huge_timeout_is_a_wait_for_every_kind(
    world: World, name: str, timeout: Any, tables: None, admin: psycopg.Connection[Any], dsn: str
) -> None:
    """With a huge timeout, locks on a Connection, transaction locks, leases and wait_lost() wait."""
    engine = labelled(world, name)
    async with transactions.connection(world, engine) as own, transactions.connection(world, engine) as work:
        held = None
        for one in (transactions.lock(work, name), lock(world, own, name)):
            with elsewhere(dsn, name) as holder:
                async with background(world.call(one.acquire, timeout=timeout)) as waiting:
                    await eventually(waits(admin, name))
                    assert give(holder, name)
                    held = await waiting
            await world.call(work.rollback)
        async with background(world.other().call(held.wait_lost, timeout)) as told:
            await world.call(held.release)
            assert await told is False
    asked: list[str] = []
    event.listen(getattr(engine, "sync_engine", engine), "after_cursor_execute", lambda *args: asked.append(args[2]))
    rival(admin, name)
    async with background(world.call(lease(world, engine, name).acquire, timeout=timeout)) as waiting:
        await eventually(lambda: any("acquire_lease" in text for text in asked))
        assert not waiting.done()
        admin.execute(
            "UPDATE pgfence_lease SET released_at = clock_timestamp(), free_at = 'epoch' WHERE name = %s", [name]
        )
        await world.call((await waiting).release)


@pytest.mark.every_driver
async def test_a_lock_on_a_connection_survives_commits_and_rollbacks(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Transactions of the caller inside the block end as they like, also in an error, and the lock stays."""
    async with world.enter(world.engine().connect()) as connection:
        async with world.enter(lock(world, connection, name).hold()) as held:
            for end in (connection.commit, connection.rollback, connection.commit):
                await run(world, connection, "SELECT 1")
                await world.call(end)
            with pytest.raises(Exception, match="division by zero"):
                await run(world, connection, "SELECT 1 / 0")
            await world.call(connection.rollback)
            held.check()
            assert not is_free(admin, name)
        assert is_free(admin, name)


@pytest.mark.every_driver
async def test_a_session_lock_where_the_open_transaction_has_the_name_locked(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The session lock is rejected, because it would outlive the transaction, whose lock stays held."""
    async with transactions.connection(world, world.engine()) as work:
        await world.call(transactions.lock(work, name).acquire)
        with pytest.raises(TransactionStateError):
            await world.call(lock(world, work, name).acquire)
        assert await run(world, work, "SELECT 1") == 1
        assert not is_free(admin, name)
        await world.call(work.commit)
        assert is_free(admin, name)
        async with world.enter(lock(world, work, name).hold()):
            assert not is_free(admin, name)


async def test_several_wait_for_the_loss_of_a_lock_that_is_released(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """wait_lost() returns False to all of them, and no callback is called, at the release or when the session ends later."""
    engine = labelled(world, name)
    held = await world.call(lock(world, engine, name).acquire)
    told: list[str] = []
    held.on_lost(lambda: told.append("lost"))
    waiting = [asyncio.create_task(world.other().call(held.wait_lost)) for _ in range(5)]
    other = await world.other().call(lock(world, engine, f"{name}!").acquire)
    await world.call(held.release)
    assert await asyncio.gather(*waiting) == [False] * 5
    for session in sessions(admin, name):
        terminate(admin, session.pid)
    await eventually(lambda: other.lost)
    assert told == []
    with pytest.raises(Exception, match="lost"):
        await world.call(other.release)


async def test_the_sessions_of_an_engine_do_not_add_up(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """After many locks, busy tries and lent connections there are no more sessions than after the first ones: two are reused."""
    engine, counts = labelled(world, name), []
    with elsewhere(dsn, f"{name}!"):
        for number in range(30):
            async with world.enter(lock(world, engine, f"{name}{number}").hold()):
                assert await world.call(lock(world, engine, f"{name}!").try_acquire) is None
            async with world.enter(lock(world, engine, f"{name}{number}").connect()) as connection:
                await run(world, connection, "SELECT 1")
            counts.append(len(sessions(admin, name)))
    assert max(counts) <= 3


@pytest.mark.every_driver
async def test_odd_names_are_names_for_every_kind(
    world: World, name: str, tables: None, admin: psycopg.Connection[Any]
) -> None:
    """Each odd name is a separate lock, transaction lock and lease, and its holder is found by the name."""
    engine = world.engine()
    names = [name[-12:] + odd if key != "long" else odd[: -len(name)] + name for key, odd in ODD.items()]
    for kind in (lock, lease):
        held = [await world.call(kind(world, engine, each).acquire) for each in names]
        assert [one.names for one in held] == [(each,) for each in names]
        for each in names:
            (seen,) = await world.call(kind(world, engine, each).holders)
            assert seen.name == each
        for one in held:
            await world.call(one.release)
    async with transactions.connection(world, engine) as work:
        for each in (*names, "y" * 1000):
            await world.call(transactions.lock(work, each).acquire)
            assert not is_free(admin, each)
        await world.call(work.rollback)
        assert all(is_free(admin, each) for each in names)
    async with world.enter(lock(world, engine, "z" * 1000 + name).hold()):
        assert not is_free(admin, "z" * 1000 + name)


@pytest.mark.every_driver
async def test_settings_of_savepoints_come_back_around_transaction_locks(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """SET LOCAL in nested savepoints that are rolled back: each level has its own value, whatever became of the lock in it."""

    async def shown() -> str:
        return await run(world, work, "SHOW lock_timeout")

    async with transactions.connection(world, world.engine()) as work:
        with elsewhere(dsn, f"{name}:busy"):
            await run(world, work, "SET LOCAL lock_timeout = '11s'")
            for attempt in ("granted", "refused", "timed out"):
                await run(world, work, "SAVEPOINT one")
                await run(world, work, "SET LOCAL lock_timeout = '22s'")
                await run(world, work, "SAVEPOINT two")
                await run(world, work, "SET LOCAL lock_timeout = '33s'")
                if attempt == "granted":
                    assert await world.call(transactions.lock(work, name).try_acquire)
                elif attempt == "refused":
                    assert not await world.call(transactions.lock(work, f"{name}:busy").try_acquire)
                else:
                    with pytest.raises(LockTimeoutError):
                        await world.call(transactions.lock(work, f"{name}:busy").acquire, timeout=0.05)
                assert await shown() == "33s"
                await run(world, work, "ROLLBACK TO two")
                assert await shown() == "22s"
                assert is_free(admin, name)
                await run(world, work, "ROLLBACK TO one")
                assert await shown() == "11s"
        take(admin, name)
        assert not await world.call(transactions.lock(work, name).try_acquire)
        assert give(admin, name)
    await freed(admin, name)
