"""AdvisoryLock on the caller's Connection: the lock is acquired between transactions and never left behind."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from pgfence.config import configure
from pgfence.errors import LockLostError, LockTimeoutError, TransactionStateError
from pgfence.keys import LockKey
from support.locking import (
    background,
    elsewhere,
    freed,
    give,
    is_free,
    labelled,
    limited,
    lock,
    run,
    sessions,
    standing,
    take,
    terminate,
    waits,
)
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins


async def backend(world: World, connection: Any) -> int:
    pid = await run(world, connection, "SELECT pg_backend_pid()")
    await world.call(connection.rollback)
    return pid


@pytest.mark.every_driver
async def test_the_lock_lives_on_that_connection(
    world: World, name: str, advisory_rows: Callable[[], list[Any]], admin: psycopg.Connection[Any]
) -> None:
    """The Connection's backend holds the lock through the user's transactions and frees it after the block."""
    async with world.enter(world.engine().connect()) as connection:
        pid = await backend(world, connection)
        async with world.enter(lock(world, connection, name).hold()) as held:
            assert [row.pid for row in advisory_rows()] == [pid]
            for _ in range(2):
                await run(world, connection, "SELECT 1")
                await world.call(connection.commit)
            async with world.enter(connection.begin()):
                await run(world, connection, "SELECT 1")
            held.check()
        assert is_free(admin, name)
        assert await backend(world, connection) == pid


@pytest.mark.every_driver
async def test_the_user_finds_no_transaction_that_he_did_not_begin(world: World, name: str) -> None:
    """Acquiring, querying, checking and releasing leave the connection outside a transaction, as it was."""
    async with world.enter(world.engine().connect()) as connection:
        one = lock(world, connection, name)
        assert await world.call(one.is_held) is False
        assert not connection.in_transaction()
        async with world.enter(one.hold()):
            assert not connection.in_transaction()
            (seen,) = await world.call(one.holders)
            assert seen.key == LockKey.of(name)
            assert not connection.in_transaction()
        assert not connection.in_transaction()
        async with world.enter(connection.begin()):
            assert await world.call(one.is_held) is False
            await run(world, connection, "SELECT 1")


@pytest.mark.every_driver
async def test_a_rejection_leaves_the_connection_as_it_was(world: World, name: str, dsn: str) -> None:
    """After a failed try, timeout=0 or wait, no transaction is open, and the error names the holder."""
    async with world.enter(world.engine().connect()) as connection:
        one = lock(world, connection, name)
        with elsewhere(dsn, name, label="other-deploy"):
            assert await world.call(one.try_acquire) is None
            assert not connection.in_transaction()
            for timeout in (0, 0.2):
                with pytest.raises(LockTimeoutError, match="other-deploy"):
                    await world.call(one.acquire, timeout=timeout)
                assert not connection.in_transaction()
        async with world.enter(one.hold()):
            pass


@pytest.mark.every_driver
async def test_a_connection_in_a_transaction_is_rejected(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C015: after a statement, in an aborted transaction, and after a begin() without a statement."""
    async with world.enter(world.engine().connect()) as connection:
        one = lock(world, connection, name)
        await run(world, connection, "SELECT 1")
        with pytest.raises(TransactionStateError, match=r"(?s)AUTOCOMMIT.*connect\(\).*TransactionLock"):
            await world.call(one.acquire)
        with pytest.raises(DBAPIError):
            await run(world, connection, "SELECT 1/0")
        with pytest.raises(TransactionStateError):
            await world.call(one.try_acquire)
        await world.call(connection.rollback)
        async with world.enter(connection.begin()):
            with pytest.raises(TransactionStateError):
                await world.call(one.acquire)
        assert is_free(admin, name)
        async with world.enter(one.hold()):
            assert not is_free(admin, name)


@pytest.mark.every_driver
async def test_an_autocommit_connection_is_always_outside(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """In autocommit, statements before, inside and after the block begin no transaction."""
    async with world.enter(world.engine(isolation_level="AUTOCOMMIT").connect()) as connection:
        await run(world, connection, "SELECT 1")
        async with world.enter(lock(world, connection, name).hold()):
            await run(world, connection, "SELECT 1")
            assert not is_free(admin, name)
            await run(world, connection, "SELECT 1")
        assert is_free(admin, name)
        await run(world, connection, "SELECT 1")


@pytest.mark.every_driver
async def test_a_transaction_begun_in_plain_sql_is_rejected(world: World, name: str) -> None:
    """C015: SQLAlchemy does not notice a plain BEGIN in AUTOCOMMIT, but the driver does, also after an error in it."""
    async with world.enter(world.engine(isolation_level="AUTOCOMMIT").connect()) as connection:
        one = lock(world, connection, name)
        await run(world, connection, "BEGIN")
        with pytest.raises(TransactionStateError):
            await world.call(one.acquire)
        with pytest.raises(DBAPIError):
            await run(world, connection, "SELECT 1/0")
        with pytest.raises(TransactionStateError):
            await world.call(one.try_acquire)
        await run(world, connection, "ROLLBACK")
        async with world.enter(one.hold()):
            pass


@pytest.mark.every_driver
async def test_release_in_a_transaction_is_rejected_and_keeps_the_lock(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C015: the commit must come first, because the next holder must see what was written."""
    async with world.enter(world.engine().connect()) as connection:
        held = await world.call(lock(world, connection, name).acquire)
        await run(world, connection, "SELECT 1")
        with pytest.raises(TransactionStateError, match=r"(?i)commit"):
            await world.call(held.release)
        assert held.state == "held"
        assert not is_free(admin, name)
        await world.call(connection.commit)
        await world.call(held.release)
        assert is_free(admin, name)


@pytest.mark.every_driver
async def test_a_block_that_ends_inside_a_transaction_closes_the_connection(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C015: the lock does not outlive its block, and no writes are committed after it was released."""
    engine = labelled(world, name)
    admin.execute("CREATE TABLE IF NOT EXISTS blocks (label text)")
    async with world.enter(engine.connect()) as connection:
        with pytest.raises(TransactionStateError, match="(?i)commit inside the block"):
            async with world.enter(lock(world, connection, name).hold()):
                await run(world, connection, "INSERT INTO blocks VALUES (:label)", label=name)
        await freed(admin, name)
        with pytest.raises(SQLAlchemyError):
            await world.call(connection.commit)
            await run(world, connection, "SELECT 1")
        await world.call(connection.rollback)
        await run(world, connection, "SELECT 1")  # a new connection of the pool, honestly
    assert admin.execute("SELECT count(*) FROM blocks WHERE label = %s", [name]).fetchone() == (0,)
    assert engine.pool.checkedout() == 0


@pytest.mark.every_driver
async def test_the_users_error_wins_in_an_aborted_transaction(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C004: the caller sees the division error, the lock is free, and the connection is usable after a rollback."""
    async with world.enter(world.engine().connect()) as connection:
        with pytest.raises(DBAPIError, match="division by zero"):
            async with world.enter(lock(world, connection, name).hold()):
                await run(world, connection, "SELECT 1/0")
        await freed(admin, name)
        await world.call(connection.rollback)
        assert await run(world, connection, "SELECT 1") == 1


async def test_two_locks_on_one_connection(
    world: World, name: str, admin: psycopg.Connection[Any], advisory_rows: Callable[[], list[Any]]
) -> None:
    """Each lock is released separately, in any order."""
    first, second = f"{name}:1", f"{name}:2"
    async with world.enter(world.engine().connect()) as connection:
        one = await world.call(lock(world, connection, first).acquire)
        two = await world.call(lock(world, connection, second).acquire)
        assert len({row.pid for row in advisory_rows()}) == 1
        await world.call(one.release)
        assert is_free(admin, first)
        assert not is_free(admin, second)
        two.check()
        await world.call(two.release)
        assert is_free(admin, second)


async def test_a_hold_by_raw_sql_survives(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C006: a lock that the caller took on the same connection is not released by pgfence."""
    key = LockKey.of(name)
    async with world.enter(world.engine().connect()) as connection:
        await run(world, connection, f"SELECT pg_advisory_lock('{key.value}'::bigint)")
        await world.call(connection.commit)
        async with world.enter(lock(world, connection, name).hold()):
            pass
        assert not is_free(admin, name)
        assert await run(world, connection, f"SELECT pg_advisory_unlock('{key.value}'::bigint)") is True
        assert is_free(admin, name)


@pytest.mark.every_driver
async def test_after_a_reconnect_nothing_runs_without_the_lock(
    world: World, name: str, admin: psycopg.Connection[Any], dsn: str
) -> None:
    """C044: after a kill and a rollback, SQLAlchemy would reconnect; inside the block, that raises an error."""
    async with world.enter(world.engine().connect()) as connection:
        pid = await backend(world, connection)
        with pytest.raises(LockLostError):
            async with world.enter(lock(world, connection, name).hold(on_loss="cancel")) as held:
                terminate(admin, pid)
                try:
                    await eventually(lambda: held.lost)
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    assert world.is_async
                for _ in range(2):
                    with pytest.raises((SQLAlchemyError, LockLostError)):
                        await run(world, connection, "CREATE TABLE without_the_lock ()")
                    await world.call(connection.rollback)
                with pytest.raises(LockLostError):
                    await run(world, connection, "SELECT 1")
                with elsewhere(dsn, name):
                    pass
                await world.call(connection.rollback)
        assert held.state == "lost"
        await world.call(connection.rollback)
        assert await backend(world, connection) != pid
    assert admin.execute("SELECT to_regclass('without_the_lock')").fetchone() == (None,)


async def test_guard_raises_on_a_loss_that_was_not_noticed(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C044: after the caller has invalidated the connection, the first statement on a new backend is rejected."""
    async with world.enter(world.engine().connect()) as connection:
        held = await world.call(lock(world, connection, name).acquire)
        await world.call(connection.invalidate)
        with pytest.raises(LockLostError):
            await run(world, connection, "SELECT 1")
        assert held.lost
        with pytest.raises(LockLostError):
            await world.call(held.release)
        await world.call(connection.rollback)
        assert await run(world, connection, "SELECT 1") == 1


@pytest.mark.every_driver
async def test_closed_inside_the_block_it_leaves_nothing_on_the_pool(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C008: a connection that is returned to the pool too early does not keep the lock past the block."""
    engine = world.engine(pool_size=1, max_overflow=0)
    async with world.enter(engine.connect()) as connection:
        with pytest.raises(LockLostError, match="its Connection was closed"):
            async with world.enter(lock(world, connection, name).hold()):
                await world.call(connection.close)
        await freed(admin, name)
    async with world.enter(engine.connect()) as connection:
        assert await run(world, connection, "SELECT 1") == 1


@pytest.mark.every_driver
async def test_the_pool_gets_a_clean_connection_back(
    world: World, name: str, admin: psycopg.Connection[Any], advisory_rows: Callable[[], list[Any]]
) -> None:
    """The pool gets the connection back without a lock, and with its settings, hooks and mode unchanged."""
    engine = world.engine(pool_size=1, max_overflow=0)
    asked = (
        "SHOW lock_timeout",
        "SHOW statement_timeout",
        "SHOW application_name",
        "SHOW default_transaction_isolation",
    )

    async def state() -> list[Any]:
        async with world.enter(engine.connect()) as connection:
            values = [await run(world, connection, statement) for statement in asked]
            return [*values, await run(world, connection, "SELECT pg_backend_pid()")]

    before = await state()
    for _ in range(3):
        async with world.enter(engine.connect()) as connection:
            async with world.enter(lock(world, connection, name).hold()):
                pass
            async with world.enter(connection.begin()):
                await run(world, connection, "SELECT 1")
    assert await state() == before
    assert advisory_rows() == []


async def test_many_locks_leave_no_trace_on_the_connection(world: World, name: str) -> None:
    """Hooks, listeners and descriptors of a lock are removed with it."""
    import os

    async with world.enter(world.engine().connect()) as connection:
        one = lock(world, connection, name)
        async with world.enter(one.hold()):
            pass
        raw = await world.call(connection.get_raw_connection) if world.is_async else connection.connection
        driver = raw.driver_connection

        def trace() -> tuple[int, ...]:
            listeners = getattr(driver, "_termination_listeners", ())
            inner = getattr(connection, "sync_connection", connection)
            return len(listeners), len(list(inner.dispatch.before_cursor_execute)), len(os.listdir("/proc/self/fd"))

        before = trace()
        for _ in range(10):
            async with world.enter(one.hold()):
                pass
        assert trace() == before


@pytest.mark.matrix
@pytest.mark.every_driver
@pytest.mark.parametrize("freed_after", [0.1, 0.8], ids=["first-slice", "quiet-slice"])
async def test_it_waits_for_another_session(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], freed_after: float
) -> None:
    """The wait uses the caller's connection, which is outside a transaction before and after it."""
    async with world.enter(world.engine().connect()) as connection:
        pid = await backend(world, connection)
        with elsewhere(dsn, name) as holder:
            async with background(world.call(lock(world, connection, name).acquire, timeout=5)) as task:
                await eventually(waits(admin, name))
                await asyncio.sleep(freed_after)
                give(holder, name)
                held = await task
        assert held.state == "held"
        assert await backend(world, connection) == pid
        await world.call(held.release)


@pytest.mark.every_driver
async def test_a_short_statement_timeout_does_not_end_a_wait(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """C039: a limit of the role, or one that the user sets later, does not end the wait and is not changed."""
    engine = limited(world, {"statement_timeout": "450ms", "lock_timeout": "70ms"})
    async with world.enter(engine.connect()) as connection:
        one = lock(world, connection, name)
        for limit in ("450ms", "400ms", "0"):
            await run(world, connection, f"SET statement_timeout = '{limit}'")
            await world.call(connection.commit)
            with elsewhere(dsn, name):
                start = time.monotonic()
                with pytest.raises(LockTimeoutError):
                    await world.call(one.acquire, timeout=0.7)
                assert 0.65 < time.monotonic() - start < FAR
            assert await run(world, connection, "SHOW statement_timeout") == limit
            assert await run(world, connection, "SHOW lock_timeout") == "70ms"
            await world.call(connection.commit)


@pytest.mark.every_driver
async def test_a_connection_in_pipeline_mode_is_rejected(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C063: nothing is sent in pipeline mode, in which an earlier error would hide the response."""
    if not world.name.startswith("psycopg") or world.name == "psycopg2":
        pytest.skip("this driver has no pipeline mode")
    async with world.enter(world.engine(isolation_level="AUTOCOMMIT").connect()) as connection:
        raw = await world.call(connection.get_raw_connection) if world.is_async else connection.connection
        async with world.enter(raw.driver_connection.pipeline()):
            with pytest.raises(TransactionStateError, match="pipeline"):
                await world.call(lock(world, connection, name).try_acquire)
        assert is_free(admin, name)
        async with world.enter(lock(world, connection, name).hold()):
            assert not is_free(admin, name)


async def test_locks_are_not_handed_over_to_or_from_an_engines_lock(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A lock on a caller's connection is acquired at the server, but contenders of both kinds share one queue."""
    engine = labelled(world, name)
    other = world.other()
    async with world.enter(engine.connect()) as connection:
        mine, theirs = lock(world, connection, name), lock(world, engine, name)
        pid = await backend(world, connection)
        held = await world.call(mine.acquire)
        async with background(other.call(theirs.acquire, timeout=5)) as task:
            await eventually(lambda: standing(engine) == 1)
            await world.call(held.release)
            second = await task
        assert holder_of(admin, name) != pid
        async with background(world.call(mine.acquire, timeout=5)) as task:
            await eventually(lambda: standing(engine) == 1)
            await other.call(second.release)
            third = await task
        assert holder_of(admin, name) == pid
        await world.call(third.release)


def holder_of(admin: psycopg.Connection[Any], name: str) -> int:
    query = (
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1"
        " AND (classid::bigint << 32 | objid::bigint) = %s"
    )
    return admin.execute(query, [LockKey.of(name).value]).fetchone()[0]


async def test_a_lock_handed_over_to_a_cancelled_waiter_is_passed_on(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """A contender on the caller's connection cannot use a handed-over session, and does not touch it later."""
    engine = labelled(world, name)
    configure(engine, max_lock_connections=3)
    holder, third = world.other(), world.other()
    async with world.enter(engine.connect()) as connection:
        held = await holder.call(lock(world, engine, name).acquire)
        async with background(world.call(lock(world, connection, name).acquire, timeout=1.2)) as task:
            await eventually(lambda: standing(engine) == 1)
            with elsewhere(dsn) as rival:
                async with background(asyncio.to_thread(take, rival, name)) as queued:
                    await eventually(waits(admin, name))
                    await holder.call(held.release)
                    await queued
                neighbour = await third.call(lock(world, engine, name + ":other").acquire)
                with pytest.raises(LockTimeoutError):
                    await task
        await asyncio.sleep(0.05)
        neighbour.check()
        assert not is_free(admin, name + ":other")
        await third.call(neighbour.release)


@pytest.mark.async_only
@pytest.mark.every_driver
async def test_a_wait_given_up_leaves_the_connection_to_its_owner(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """A cancelled wait may close the connection, but leaves no lock on it; the owner's next statement works."""
    async with world.enter(world.engine().connect()) as connection:
        with elsewhere(dsn, name) as holder:
            async with background(world.call(lock(world, connection, name).acquire, timeout=5)) as task:
                await eventually(waits(admin, name))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            give(holder, name)
            await freed(holder, name)
        await world.call(connection.rollback)
        assert await run(world, connection, "SELECT 1") == 1


async def test_the_server_behind_a_callers_connection_is_judged_too(
    world: World, name: str, pgbouncer: Callable[..., str]
) -> None:
    """C019: through a pooler of unknown mode the lock is rejected, and the connection stays usable."""
    from pgfence.errors import PoolerError

    arguments = {"statement_cache_size": 0} if world.name == "asyncpg" else {}
    if world.name.startswith("psycopg") and world.name != "psycopg2":
        arguments = {"prepare_threshold": None}
    engine = world.engine(dsn=await asyncio.to_thread(pgbouncer, "transaction"), connect_args=arguments)
    async with world.enter(engine.connect()) as connection:
        with pytest.raises(PoolerError):
            await world.call(lock(world, connection, name).acquire)
        assert await run(world, connection, "SELECT 1") == 1


async def test_no_further_connection_is_opened_for_it(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Acquiring, waiting and releasing use only the caller's connection."""
    async with world.enter(labelled(world, name).connect()) as connection:
        async with world.enter(lock(world, connection, name).hold()):
            assert len(sessions(admin, name)) == 1
        assert len(sessions(admin, name)) == 1
