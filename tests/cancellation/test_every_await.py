"""Cancelled at every await, once and twice: nothing is left behind, and everything still works (rule 13)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pgfence import AsyncAdvisoryLock
from pgfence.config import configure
from support.locking import elsewhere, freed, give, is_free, labelled, limited, run, sessions
from support.stepping import at_every_step, quitting_in_line, stepped
from support.waiting import eventually
from support.worlds import World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import psycopg

pytestmark = pytest.mark.filterwarnings("ignore:.*Future exception was never retrieved")


@pytest.fixture(params=["psycopg_async", "asyncpg"])
async def world(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[World]:
    """The async drivers."""
    here = World(request.param, dsn)
    yield here
    await here.close()


def cold(world: World, name: str) -> Any:
    """An engine whose every lock opens a connection."""
    return labelled(world, name)


async def test_a_free_lock_on_a_warm_connection(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """acquire, body, release: at each step the lock is free afterwards, and the next one gets it."""
    engine = labelled(world, name)

    async def work() -> None:
        async with AsyncAdvisoryLock(engine, name).hold(timeout=5):
            await asyncio.sleep(0)

    async def check() -> None:
        await freed(admin, name)
        async with AsyncAdvisoryLock(engine, name).hold(timeout=5):
            assert not is_free(admin, name)

    assert await at_every_step(work, check) >= 3
    assert len(sessions(admin, name)) <= 5


async def test_a_lock_that_opens_its_connection(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Cancelled while it connects: the connection is kept for the next one or closed, never lost."""
    engines = []

    async def work() -> None:
        engines.append(labelled(world, name))
        configure(engines[-1], max_lock_connections=1)
        async with AsyncAdvisoryLock(engines[-1], name).hold(timeout=5):
            await asyncio.sleep(0)

    async def check() -> None:
        await freed(admin, name)
        async with AsyncAdvisoryLock(engines[-1], name).hold(timeout=5):
            assert not is_free(admin, name)
        await engines[-1].dispose()

    assert await at_every_step(work, check) >= 3
    await eventually(lambda: sessions(admin, name) == [])


async def test_several_names(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """All of them are free afterwards, for every step."""
    engine = labelled(world, name)
    names = [f"{name}:{n}" for n in range(3)]

    async def work() -> None:
        await (await AsyncAdvisoryLock(engine, *names).acquire(timeout=5)).release()

    async def check() -> None:
        for one in names:
            await freed(admin, one)

    await at_every_step(work, check)


async def test_the_user_connection(world: World, name: str, dsn: str, admin: psycopg.Connection[Any]) -> None:
    """connect(): cancelled while lending, working, committing, closing; no session keeps the site's limits for later waits."""
    engine = limited(world, {"statement_timeout": "450ms"})

    async def work() -> None:
        async with AsyncAdvisoryLock(engine, name).connect(timeout=5) as connection:
            await run(world, connection, "SELECT 1")
            await connection.commit()

    async def check() -> None:
        await freed(admin, name)

    await at_every_step(work, check)
    with elsewhere(dsn, name) as holder:
        waiting = asyncio.create_task(AsyncAdvisoryLock(engine, name).acquire(timeout=5))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        give(holder, name)
        await (await waiting).release()


async def test_the_callers_connection(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A lock on the user's own connection: free afterwards, and the pool gets back what it lent or a new one."""
    engine = labelled(world, name, pool_size=1, max_overflow=0, pool_timeout=5)

    async def work() -> None:
        async with engine.connect() as connection:
            async with AsyncAdvisoryLock(connection, name).hold(timeout=5):
                await asyncio.sleep(0)

    async def check() -> None:
        await freed(admin, name)
        assert engine.pool.checkedout() == 0
        async with engine.connect() as connection:
            assert await run(world, connection, "SELECT 1") == 1

    await at_every_step(work, check)


async def test_with_listeners(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Statements that go through SQLAlchemy end the same way."""
    from sqlalchemy import event

    engine = labelled(world, name)
    event.listen(engine.sync_engine, "before_cursor_execute", lambda *_: None)

    async def work() -> None:
        async with AsyncAdvisoryLock(engine, name).hold(timeout=5):
            await asyncio.sleep(0)

    async def check() -> None:
        await freed(admin, name)

    await at_every_step(work, check)


async def test_looking(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A cancelled look loses no place among the connections."""
    engine = labelled(world, name)
    configure(engine, max_lock_connections=1)

    async def work() -> None:
        await AsyncAdvisoryLock(engine, name).is_held()

    async def check() -> None:
        async with AsyncAdvisoryLock(engine, name).hold(timeout=5):
            pass

    await at_every_step(work, check)


async def test_a_wait_in_the_server(world: World, name: str, dsn: str, admin: psycopg.Connection[Any]) -> None:
    """Cancelled at any moment of a wait, with the holder leaving at the same time: nothing is left, neighbours are served."""
    engine = labelled(world, name)
    for at in range(12):
        for times in (1, 2):
            with elsewhere(dsn, name) as holder:

                async def work() -> None:
                    await (await AsyncAdvisoryLock(engine, name).acquire(timeout=5)).release()

                stepper = asyncio.create_task(stepped(work, at, times))
                await asyncio.sleep(0.004)
                give(holder, name)
                await stepper
                await freed(holder, name)
    async with AsyncAdvisoryLock(engine, name).hold(timeout=5):
        pass


async def test_a_wait_in_the_local_queue(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Cancelled behind a neighbour, also in the moment of the hand-over: the one after it is served."""
    engine = labelled(world, name)

    async def check() -> None:
        await freed(admin, name)

    await quitting_in_line(lambda: AsyncAdvisoryLock(engine, name).acquire(timeout=5), check, 5)


async def test_a_cancelled_task_ends_as_cancelled(world: World, name: str, dsn: str) -> None:
    """C058: CancelledError comes out, not a driver's error, wherever the task was."""
    engine = world.engine()
    with elsewhere(dsn, name) as holder:
        tasks = [asyncio.create_task(AsyncAdvisoryLock(engine, name).acquire(timeout=20)) for _ in range(20)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.wait(tasks, timeout=5)
        assert len(done) == 20
        assert all(task.cancelled() for task in tasks)
        give(holder, name)
        await freed(holder, name)


async def test_a_release_that_is_cancelled_frees_the_lock(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Cancelled in the middle of the unlock: the connection is closed, and the lock with it; the handle is released."""
    engine = labelled(world, name)
    for times in (1, 2):
        held = await AsyncAdvisoryLock(engine, name).acquire(timeout=5)
        cancelled, _ = await stepped(held.release, 0, times)
        assert cancelled
        assert held.state == "released"
        await freed(admin, name)
    async with AsyncAdvisoryLock(engine, name).hold(timeout=5):
        pass
