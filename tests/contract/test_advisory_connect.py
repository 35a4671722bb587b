"""AdvisoryLock.connect(): the work and the lock share one connection, so a lost lock ends the work."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import pgfence
from pgfence.errors import LockLostError, LockNotHeldError, LockTimeoutError
from support.locking import elsewhere, freed, is_free, labelled, limited, lock, run, sessions, terminate
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins


@pytest.fixture
def table(admin: psycopg.Connection[Any], name: str) -> Iterator[str]:
    """A table of numbers."""
    table = f"t_{name.rsplit(':', 1)[1]}"
    admin.execute(f"CREATE TABLE {table} (n int)")
    yield table
    admin.execute(f"DROP TABLE {table}")


def numbers(admin: psycopg.Connection[Any], table: str) -> list[int]:
    return [n for (n,) in admin.execute(f"SELECT n FROM {table} ORDER BY n").fetchall()]


async def backend(world: World, connection: Any) -> int:
    pid = await run(world, connection, "SELECT pg_backend_pid()")
    await world.call(connection.rollback)
    return pid


@pytest.mark.every_driver
async def test_the_connection_holds_the_lock(
    world: World, name: str, advisory_rows: Callable[[], list[Any]], admin: psycopg.Connection[Any]
) -> None:
    """The backend that executes statements is the one in pg_locks, is not in the pool, and is closed afterwards."""
    engine = labelled(world, name)
    async with world.enter(lock(world, engine, name).connect()) as connection:
        (row,) = advisory_rows()
        assert await backend(world, connection) == row.pid
        assert engine.pool.checkedout() == 0
    assert connection.closed
    await eventually(lambda: sessions(admin, name) == [])


@pytest.mark.every_driver
async def test_transactions_are_the_users(world: World, name: str, table: str, admin: psycopg.Connection[Any]) -> None:
    """Commit, roll back, begin again, savepoints: an ordinary connection, and the lock stays through all of it."""
    async with world.enter(lock(world, world.engine(), name).connect()) as connection:
        await run(world, connection, f"INSERT INTO {table} VALUES (1)")
        assert connection.in_transaction()
        assert numbers(admin, table) == []
        await world.call(connection.commit)
        await run(world, connection, f"INSERT INTO {table} VALUES (2)")
        await world.call(connection.rollback)
        async with world.enter(connection.begin()):
            await run(world, connection, f"INSERT INTO {table} VALUES (3)")
            async with world.enter(connection.begin_nested()):
                await run(world, connection, f"INSERT INTO {table} VALUES (4)")
        assert numbers(admin, table) == [1, 3, 4]
        assert not is_free(admin, name)
    assert is_free(admin, name)


async def test_a_session_works_on_it(world: World, name: str, table: str, admin: psycopg.Connection[Any]) -> None:
    """An ORM session bound to it may commit more than once under one lock."""
    make = world.pick(Session, AsyncSession)
    async with world.enter(lock(world, world.engine(), name).connect()) as connection:
        async with world.enter(make(bind=connection)) as session:
            for number in (1, 2):
                await run(world, session, f"INSERT INTO {table} VALUES ({number})")
                await world.call(session.commit)
                assert not is_free(admin, name)
    assert numbers(admin, table) == [1, 2]
    assert is_free(admin, name)


@pytest.mark.every_driver
async def test_leaving_rolls_back_what_is_open(
    world: World, name: str, table: str, admin: psycopg.Connection[Any]
) -> None:
    """C015: uncommitted work is rolled back before the lock is released: the next holder cannot miss it."""
    one = lock(world, world.engine(), name)
    async with world.enter(one.connect()) as connection:
        await run(world, connection, f"INSERT INTO {table} VALUES (1)")
    assert is_free(admin, name)
    with pytest.raises(ValueError, match="body"):
        async with world.enter(one.connect()) as connection:
            await run(world, connection, f"INSERT INTO {table} VALUES (2)")
            raise ValueError("body")
    assert is_free(admin, name)
    assert numbers(admin, table) == []


@pytest.mark.every_driver
async def test_an_error_of_the_database_is_the_error_that_is_seen(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C004: an aborted transaction neither hides its cause nor keeps the lock."""
    with pytest.raises(DBAPIError, match="division by zero"):
        async with world.enter(lock(world, world.engine(), name).connect()) as connection:
            await run(world, connection, "SELECT 1/0")
    assert is_free(admin, name)


@pytest.mark.every_driver
async def test_a_lost_lock_is_a_lost_connection(
    world: World, name: str, table: str, admin: psycopg.Connection[Any]
) -> None:
    """C044: kill, roll back, write: always rejected; another holder may follow; leaving raises that it was lost."""
    engine = world.engine()
    with pytest.raises(LockLostError) as caught:
        async with world.enter(lock(world, engine, name).connect()) as connection:
            pid = await backend(world, connection)
            held = pgfence.held(connection)
            await kill_and_wait(world, admin, pid, held)
            for _ in range(2):
                with pytest.raises(SQLAlchemyError):
                    await run(world, connection, f"INSERT INTO {table} VALUES (1)")
                await settle(world, connection.rollback)
            assert is_free(admin, name)
    assert caught.value.names == (name,)
    assert held.state == "lost"
    assert numbers(admin, table) == []
    async with world.enter(lock(world, engine, name).connect(timeout=5)) as connection:
        await run(world, connection, f"INSERT INTO {table} VALUES (2)")
        await world.call(connection.commit)
    assert numbers(admin, table) == [2]


async def settle(world: World, function: Any) -> None:
    try:
        await world.call(function)
    except SQLAlchemyError:
        pass


async def kill_and_wait(world: World, admin: psycopg.Connection[Any], pid: int, held: Any) -> None:
    """End a backend and wait until the handle knows; an async block is cancelled for it, which is taken back here."""
    terminate(admin, pid)
    try:
        await eventually(lambda: held.lost)
        await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        if not world.is_async:
            raise


@pytest.mark.every_driver
async def test_a_loss_inside_a_transaction_undoes_it(
    world: World, name: str, table: str, admin: psycopg.Connection[Any]
) -> None:
    """What was written under the lock and not committed when it was lost never becomes visible."""
    with pytest.raises((LockLostError, SQLAlchemyError)):
        async with world.enter(lock(world, world.engine(), name).connect()) as connection:
            pid = await backend(world, connection)
            await run(world, connection, f"INSERT INTO {table} VALUES (1)")
            await kill_and_wait(world, admin, pid, pgfence.held(connection))
            await world.call(connection.commit)
    assert numbers(admin, table) == []


async def test_the_users_exception_wins_over_the_loss(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C005: a ValueError keeps propagating, with a note that the lock was lost."""
    with pytest.raises(ValueError, match="body") as caught:
        async with world.enter(lock(world, world.engine(), name).connect()) as connection:
            pid = await backend(world, connection)
            await kill_and_wait(world, admin, pid, pgfence.held(connection))
            raise ValueError("body")
    assert any("LockLostError" in note for note in caught.value.__notes__)


async def test_held_finds_the_handle_of_a_connection(world: World, name: str) -> None:
    """pgfence.held(conn) inside, LockNotHeldError for any other connection and after the end."""
    engine = world.engine()
    async with world.enter(lock(world, engine, name).connect()) as connection:
        held = pgfence.held(connection)
        assert (held.names, held.state) == ((name,), "held")
        assert await world.call(pgfence.current, world.pick(pgfence.Held, pgfence.AsyncHeld)) is held
        async with world.enter(engine.connect()) as ordinary:
            with pytest.raises(LockNotHeldError):
                pgfence.held(ordinary)
    with pytest.raises(LockNotHeldError):
        pgfence.held(connection)


async def test_released_early_inside_the_block(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """held(conn).release() frees the lock; the connection must not go on working as if it held, and leaving is quiet."""
    async with world.enter(lock(world, world.engine(), name).connect()) as connection:
        await world.call(pgfence.held(connection).release)
        assert is_free(admin, name)
        with pytest.raises(SQLAlchemyError):
            await run(world, connection, "SELECT 1")
    assert is_free(admin, name)


@pytest.mark.every_driver
async def test_closed_inside_the_block(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C008: a connection that the user closes inside leaves no lock behind."""
    engine = labelled(world, name)
    async with world.enter(lock(world, engine, name).connect()) as connection:
        await run(world, connection, "SELECT 1")
        await world.call(connection.close)
    assert is_free(admin, name)
    await eventually(lambda: sessions(admin, name) == [])


@pytest.mark.every_driver
async def test_invalidated_inside_the_block(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A connection that the user throws away takes the lock along: it is free, and leaving says that it was lost."""
    with pytest.raises(LockLostError):
        async with world.enter(lock(world, world.engine(), name).connect()) as connection:
            await run(world, connection, "SELECT 1")
            await world.call(connection.invalidate)
            with pytest.raises(SQLAlchemyError):
                await run(world, connection, "SELECT 1")
    await freed(admin, name)


@pytest.mark.every_driver
async def test_an_isolation_level_of_the_users_own(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """AUTOCOMMIT or SERIALIZABLE inside: respected, and the lock is still released."""
    for level in ("AUTOCOMMIT", "SERIALIZABLE"):
        async with world.enter(lock(world, world.engine(), name).connect()) as connection:
            await world.call(connection.execution_options, isolation_level=level)
            assert await run(world, connection, "SHOW transaction_isolation") == (
                "serializable" if level == "SERIALIZABLE" else "read committed"
            )
            held = pgfence.held(connection)
        assert held.state == "released"
        assert is_free(admin, name)


@pytest.mark.every_driver
async def test_the_engines_isolation_level_holds_inside(world: World, name: str) -> None:
    """If the engine has an isolation level, this connection has it too."""
    engine = world.engine(isolation_level="REPEATABLE READ")
    async with world.enter(lock(world, engine, name).connect()) as connection:
        assert await run(world, connection, "SHOW transaction_isolation") == "repeatable read"


@pytest.mark.every_driver
async def test_the_sites_limits_are_in_force_inside(
    world: World, name: str, role: Callable[..., str], admin: psycopg.Connection[Any]
) -> None:
    """C039: the site's statement_timeout kills the user's statement, not the wait before it; its defaults hold too."""
    login = role(settings={"default_transaction_isolation": "repeatable read"})
    engine = limited(world, {"statement_timeout": "450ms"}, dsn=login)
    with pytest.raises(DBAPIError) as caught:
        async with world.enter(lock(world, engine, name).connect()) as connection:
            assert await run(world, connection, "SHOW transaction_isolation") == "repeatable read"
            assert await run(world, connection, "SHOW statement_timeout") == "450ms"
            await run(world, connection, "SELECT pg_sleep(30)")
    assert "statement timeout" in str(caught.value)
    assert is_free(admin, name)


async def test_a_busy_lock_gives_no_connection(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """The timeout is raised on entering, and the body never runs."""
    engine = labelled(world, name)
    with elsewhere(dsn, name), pytest.raises(LockTimeoutError):
        async with world.enter(lock(world, engine, name).connect(timeout=0.1)):
            raise AssertionError("entered")


async def test_a_neighbour_waits_for_the_end_of_the_connection(
    world: World, name: str, table: str, admin: psycopg.Connection[Any]
) -> None:
    """C015: in the same process too the next one sees all that was committed, never the session that was lent."""
    one = lock(world, world.engine(), name)
    other = world.other()
    pids = []

    async def work(who: Any) -> None:
        for _ in range(5):
            async with who.enter(one.connect(timeout=10)) as connection:
                count = await run(who, connection, f"SELECT count(*) FROM {table}")
                await run(who, connection, f"INSERT INTO {table} VALUES (:n)", n=count)
                pids.append(await run(who, connection, "SELECT pg_backend_pid()"))
                await who.call(connection.commit)

    await asyncio.gather(work(world), work(other))
    assert numbers(admin, table) == list(range(10))
    assert len(set(pids)) == 10


async def test_a_lock_on_a_connection_lends_no_other(world: World, name: str) -> None:
    """connect() of a lock made with a Connection is a TypeError."""
    async with world.enter(world.engine().connect()) as connection:
        with pytest.raises(TypeError, match="Engine"):
            async with world.enter(lock(world, connection, name).connect()):
                pass


async def test_several_names_work_on_one_connection(
    world: World, name: str, advisory_rows: Callable[[], list[Any]]
) -> None:
    """All names are held by the connection that is lent."""
    async with world.enter(lock(world, world.engine(), name, name + "2").connect()) as connection:
        pid = await backend(world, connection)
        assert [row.pid for row in advisory_rows()] == [pid, pid]


@pytest.mark.every_driver
async def test_the_lock_outlives_an_index_built_concurrently(
    world: World, name: str, table: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """On the connection that holds it, with waiters in the server: no deadlock, no waiter dies, all are served."""
    one, other = lock(world, world.engine(), name), lock(world, world.engine(), name)
    waiter = world.other()
    async with world.enter(one.connect()) as connection:
        await world.call(connection.execution_options, isolation_level="AUTOCOMMIT")
        waiting = asyncio.create_task(waiter.call(other.acquire, timeout=20))
        await eventually(lambda: not is_free(admin, name))
        for number in range(3):
            await run(world, connection, f"CREATE INDEX CONCURRENTLY i{number}_{table} ON {table} (n)")
        assert not waiting.done()
    held = await waiting
    await waiter.call(held.release)
