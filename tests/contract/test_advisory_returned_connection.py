"""C008: a lock on the caller's Connection ends when the connection returns to its pool; its next user is not affected."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool, StaticPool

from pgfence import AdvisoryLock
from pgfence.errors import LockLostError, UnreachableError
from support.locking import freed, is_free, lock, run, terminate
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World


@pytest.mark.matrix
@pytest.mark.parametrize("end", ["release", "leave", "drop"])
async def test_the_next_user_of_the_connection_is_left_alone(
    world: World, name: str, admin: psycopg.Connection[Any], end: str
) -> None:
    """However the lost lock ends, another request that has begun a transaction by then commits it."""
    admin.execute("CREATE TABLE IF NOT EXISTS returned (label text)")
    engine = world.engine(pool_size=1, max_overflow=0)
    async with world.enter(engine.connect()) as connection:
        held = await world.call(lock(world, connection, name).acquire)
        handle = held._hold
    assert (held.state, held.loss_reason) == ("lost", "returned")
    async with world.enter(engine.connect()) as other:
        await run(world, other, "INSERT INTO returned VALUES (:label)", label=name)
        await freed(admin, name)
        if end == "drop":
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                del held
                gc.collect()
            await eventually(lambda: handle.released)
        elif end == "release":
            with pytest.raises(LockLostError, match="its Connection was closed"):
                await world.call(held.release)
        else:
            with pytest.raises(LockLostError, match="its Connection was closed"):
                async with world.enter(held):
                    pass
        await run(world, other, "INSERT INTO returned VALUES (:label)", label=name)
        await world.call(other.commit)
    assert admin.execute("SELECT count(*) FROM returned WHERE label = %s", [name]).fetchone() == (2,)
    assert engine.pool.checkedout() == 0


@pytest.mark.matrix
@pytest.mark.parametrize("pool", [NullPool, StaticPool])
async def test_other_pools_end_the_lock_as_well(
    world: World, name: str, admin: psycopg.Connection[Any], pool: type
) -> None:
    """With NullPool and StaticPool too, the next user gets a connection without a lock."""
    engine = world.engine(poolclass=pool)
    connection = await world.call(engine.connect)
    held = await world.call(lock(world, connection, name).acquire)
    await world.call(connection.close)
    assert held.loss_reason == "returned"
    await freed(admin, name)
    async with world.enter(engine.connect()) as other:
        assert await run(world, other, "SELECT 1") == 1


def test_a_dropped_lock_ends_before_its_connection_is_reused(dsn: str, name: str) -> None:
    """If the Connection is returned while a pgfence thread closes it, the pool waits for the thread."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}", pool_size=1, max_overflow=0)
    connection = engine.connect()
    held = AdvisoryLock(connection, name).acquire()
    hold = held._hold
    close, given_back = hold.session.driver.close, []
    owner = threading.Thread(target=connection.close)

    def waits() -> bool:
        frame = sys._current_frames().get(owner.ident or 0)
        return frame is not None and frame.f_code.co_name == "on_checkin"

    def close_late() -> None:
        owner.start()
        eventually(lambda: waits() or engine.pool.checkedin())
        given_back.append(engine.pool.checkedin())
        close()

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore", ResourceWarning)
        patch.setattr(hold.session.driver, "close", close_late)
        del held
        gc.collect()
        eventually(lambda: given_back and owner.ident)
        owner.join()
    assert given_back == [0]
    with engine.connect() as other:
        assert other.scalar(text("SELECT 1")) == 1
    engine.dispose()


@pytest.mark.twins
async def test_a_pool_is_listened_to_once(world: World, name: str) -> None:
    """Each pool has one listener, however often engine.dispose() has copied the listeners to the next pool."""
    engine = world.engine()
    for _ in range(3):
        await world.call(engine.dispose)
        async with world.enter(engine.connect()) as connection, world.enter(lock(world, connection, name).hold()):
            pass
        assert len(tuple(engine.pool.dispatch.checkin)) == 1


@pytest.mark.twins
async def test_a_detached_connection_stays_its_owners(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """The lock survives detach() and is released there; closing that connection ends the lock."""
    engine = world.engine(pool_size=1, max_overflow=0)
    connection = await world.call(engine.connect)
    raw = await world.call(connection.get_raw_connection) if world.is_async else connection.connection
    driver = raw.driver_connection
    held = await world.call(lock(world, connection, name).acquire)
    await world.call(connection.detach) if not world.is_async else await world.call(
        connection.run_sync, lambda inner: inner.detach()
    )
    async with world.enter(engine.connect()) as other:
        await run(world, other, "SELECT 1")
    held.check()
    await world.call(held.release)
    assert is_free(admin, name)
    held = await world.call(lock(world, connection, name).acquire)
    await world.call(connection.close)
    if world.name == "psycopg_async":  # SQLAlchemy leaves this one open
        await world.call(driver.close)
    await eventually(lambda: held.lost)
    await freed(admin, name)


async def test_the_lock_of_an_invalidated_connection_spares_its_successor(world: World, name: str) -> None:
    """After invalidate() the Connection uses another driver's connection, which the end of the lock does not close."""
    async with world.enter(world.engine().connect()) as connection:
        inner = getattr(connection, "sync_connection", connection)
        held = await world.call(lock(world, connection, name).acquire)
        await world.call(connection.invalidate)
        with pytest.raises(LockLostError):
            await run(world, connection, "SELECT 1")
        successor = inner.connection.dbapi_connection
        with pytest.raises(LockLostError):
            await world.call(held.release)
        await world.call(connection.rollback)
        assert await run(world, connection, "SELECT 1") == 1
        assert inner.connection.dbapi_connection is successor


async def test_a_dead_connection_is_unreachable(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """An attempt on a Connection whose server process has ended raises UnreachableError, not an error of the driver."""
    async with world.enter(world.engine().connect()) as connection:
        pid = await run(world, connection, "SELECT pg_backend_pid()")
        await world.call(connection.rollback)
        terminate(admin, pid)
        with pytest.raises(UnreachableError):
            await world.call(lock(world, connection, name).try_acquire)
