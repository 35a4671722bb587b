"""Grant against cancel and timeout, aimed at each other many times (C058, C060)."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from pgfence import AsyncAdvisoryLock
from pgfence._holds.registry import ManagerRegistry
from pgfence.errors import LockTimeoutError
from support.locking import elsewhere, freed, give, is_free, labelled, sessions, take, waits
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


async def test_grant_and_cancel_at_the_same_moment(world: World, name: str, dsn: str, admin: Any) -> None:
    """C060: 300 rounds: the holder leaves at t, the waiter is cancelled at t plus or minus 2 ms: a lock or none, no orphan."""
    engine, dice, outcomes = labelled(world, name), random.Random(5), {"granted": 0, "cancelled": 0}
    with elsewhere(dsn) as rival:
        for _ in range(300):
            take(rival, name)
            task = asyncio.create_task(AsyncAdvisoryLock(engine, name).acquire(timeout=5))
            await asyncio.sleep(0.003)
            first, gap = dice.random() < 0.5, dice.random() * 0.002
            for step in (first, not first):
                if step:
                    give(rival, name)
                else:
                    task.cancel()
                await asyncio.sleep(gap)
            await asyncio.wait([task])
            if task.cancelled():
                outcomes["cancelled"] += 1
            else:
                outcomes["granted"] += 1
                await task.result().release()
            await freed(rival, name)
    assert outcomes["cancelled"] > 20
    assert outcomes["granted"] > 20
    assert len(sessions(admin, name)) <= 5


async def test_a_neighbours_release_and_a_cancel_at_the_same_moment(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C060: the same inside one process, where the lock is handed over without the server: 300 rounds."""
    engine, dice = labelled(world, name), random.Random(6)
    for _ in range(300):
        held = await AsyncAdvisoryLock(engine, name).acquire(timeout=5)
        tasks = [asyncio.create_task(AsyncAdvisoryLock(engine, name).acquire(timeout=5)) for _ in range(2)]
        await asyncio.sleep(0)
        steps = [held.release(), asyncio.sleep(0, tasks[0].cancel() if dice.random() < 0.3 else None)]
        await asyncio.gather(*steps)
        if dice.random() < 0.7:
            tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        if not tasks[0].cancelled():
            await tasks[0].result().release()
        await (await tasks[1]).release()
    await freed(admin, name)
    assert len(sessions(admin, name)) <= 5


async def test_timeout_scopes_at_the_grant(world: World, name: str, dsn: str) -> None:
    """C060: asyncio.timeout() around hold() ends at the grant, many times: held in the block or TimeoutError, then free."""
    engine, dice, outcomes, rounds = world.engine(), random.Random(8), set(), 0
    with elsewhere(dsn) as rival:
        while rounds < 60 or (len(outcomes) < 2 and rounds < 600):
            rounds += 1
            ends = 0.01 * dice.choice([1, 1, 1, 2, 5])  # 10 ms are enough for a grant unless the machine is busy
            take(rival, name)
            asyncio.get_running_loop().call_later(ends + dice.uniform(-0.002, 0.002), give, rival, name)
            try:
                async with asyncio.timeout(ends):
                    async with AsyncAdvisoryLock(engine, name).hold(timeout=5) as held:
                        assert held.state == "held"
                        outcomes.add("held")
            except TimeoutError:
                outcomes.add("timeout")
            await eventually(lambda: is_free(rival, name))
            assert asyncio.current_task().cancelling() == 0
    assert outcomes == {"held", "timeout"}


async def test_a_hundred_tasks_cancelled_anywhere(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C058: a hundred tasks with a lock each, cancelled at random points, some twice: no lock, no pooled connection left."""
    engine, dice = labelled(world, name), random.Random(9)

    async def work(number: int) -> None:
        async with AsyncAdvisoryLock(engine, f"{name}:{number}").hold(timeout=20):
            async with engine.connect() as connection:
                from sqlalchemy import text

                await connection.execute(text("SELECT pg_sleep(0.01)"))
            await asyncio.sleep(dice.random() * 0.01)

    tasks = [asyncio.create_task(work(number)) for number in range(100)]
    for task in dice.sample(tasks, 100):
        await asyncio.sleep(dice.random() * 0.006)
        task.cancel()
        if dice.random() < 0.3:
            await asyncio.sleep(0)
            task.cancel()
    await asyncio.wait(tasks)
    assert [task.exception() for task in tasks if not task.cancelled() and task.exception()] == []
    for number in range(100):
        await freed(admin, f"{name}:{number}")
    assert engine.pool.checkedout() == 0
    async with AsyncAdvisoryLock(engine, name).hold(timeout=5):
        pass


async def test_a_crowd_of_waiters_cancelled_in_any_order(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """The remaining waiters are served in order, whichever ones leave the line, its head included."""
    engine, dice, served = labelled(world, name), random.Random(10), []

    async def work(number: int) -> None:
        async with AsyncAdvisoryLock(engine, name).hold(timeout=20):
            served.append(number)

    with elsewhere(dsn, name) as holder:
        tasks = [asyncio.create_task(work(number)) for number in range(40)]
        await eventually(waits(admin, name))
        leaving = [0, 1, *dice.sample(range(2, 40), 18)]
        for number in leaving:
            tasks[number].cancel()
            await asyncio.sleep(dice.random() * 0.004)
        await eventually(waits(admin, name))
        give(holder, name)
        await asyncio.wait(tasks)
    assert served == [number for number in range(40) if number not in leaving]


async def test_wait_for_leaves_nothing(world: World, name: str, dsn: str) -> None:
    """asyncio.wait_for() around acquire(): its timeout leaves no lock and no waiter; a shorter timeout inside it comes first."""
    engine = world.engine()
    with elsewhere(dsn, name) as holder:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(AsyncAdvisoryLock(engine, name).acquire(timeout=5), 0.05)
        with pytest.raises(LockTimeoutError):
            await asyncio.wait_for(AsyncAdvisoryLock(engine, name).acquire(timeout=0.05), 5)
        give(holder, name)
        held = await asyncio.wait_for(AsyncAdvisoryLock(engine, name).acquire(timeout=5), 5)
        await held.release()
        assert is_free(holder, name)


async def test_a_task_group_that_fails_frees_its_locks(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """One task of a group fails, the others are cancelled with locks held, waited for and being opened."""
    engine = labelled(world, name)

    async def work(number: int) -> None:
        async with AsyncAdvisoryLock(engine, f"{name}:{number % 3}").hold(timeout=20):
            await asyncio.sleep(10)

    async def fail() -> None:
        await asyncio.sleep(0.03)
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            for number in range(9):
                group.create_task(work(number))
            group.create_task(fail())
    for number in range(3):
        await freed(admin, f"{name}:{number}")


async def test_a_connection_of_a_cancelled_caller_is_kept_for_the_next(world: World, name: str) -> None:
    """A cancellation while it is opened does not close it: the next caller opens none."""
    engine, opened = labelled(world, name), asyncio.Event()
    event.listen(engine.sync_engine, "do_connect", lambda *_: opened.set())
    first = asyncio.create_task(AsyncAdvisoryLock(engine, name).acquire())
    await opened.wait()
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    (manager,) = ManagerRegistry.of(engine.sync_engine).values()
    await eventually(lambda: manager.pool.state.idle)
    opened.clear()
    async with AsyncAdvisoryLock(engine, name).hold():
        assert not opened.is_set()
