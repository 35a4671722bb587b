"""Waiters far from the front of a queue that does not move sleep on the client, and nothing that is guaranteed changes."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

from pgfence import AdvisoryLock, ReadWriteLock, WaitCancelledError, cancel_waits, monitoring
from pgfence._locks import server_wait
from pgfence._sql.ticket_queue import AWAKE, build_wait_for_turn
from pgfence.errors import LockTimeoutError
from pgfence.keys import LockKey
from support.locking import background, elsewhere, give, has_ticket, is_free, labelled, lock, sessions, terminate
from support.turns import Waiters, front, is_asleep, sleeping
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AsyncExitStack

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins


@pytest.fixture
def only_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what it sees when it looks wakes a sleeper, not the check that comes after some looks."""
    monkeypatch.setattr(server_wait, "LOOKS", 1_000_000)


@pytest.fixture
def sleeps_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep that is not interrupted lasts longer than a test waits for anything."""
    monkeypatch.setattr(server_wait, "choose_sleep", lambda ahead: 3.0 * FAR)


@pytest.mark.every_driver
@pytest.mark.usefixtures("only_looks")
async def test_sleepers_keep_their_order(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], stack: AsyncExitStack
) -> None:
    """Those that sleep are served in order too, after those that do not, and before one that came while they slept."""
    with elsewhere(dsn, name) as holder:
        waiters = Waiters(world, stack, admin, name)
        expected = [await waiters.add() for _ in range(6)]
        for number in range(AWAKE, 6):
            await eventually(is_asleep(admin, waiters.labelled(number)))
        expected.append(await waiters.add())
        await eventually(is_asleep(admin, waiters.labelled(6)))
        for number in range(AWAKE):
            assert not is_asleep(admin, waiters.labelled(number))()
        give(holder, name)
        assert await waiters.finish() == expected
        assert is_free(holder, name)


@pytest.mark.usefixtures("only_looks")
async def test_the_death_of_the_first_and_of_a_sleeper_changes_no_order(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], stack: AsyncExitStack
) -> None:
    """Both come back at the end, and the others move up."""
    with elsewhere(dsn, name) as holder:
        waiters = Waiters(world, stack, admin, name)
        for _ in range(7):
            await waiters.add()
        for number in range(AWAKE, 7):
            await eventually(is_asleep(admin, waiters.labelled(number)))
        for number in (5, 0):
            (session,) = sessions(admin, waiters.labelled(number))
            terminate(admin, session.pid)
            await eventually(has_ticket(admin, waiters.labelled(number), name))
        give(holder, name)
        assert await waiters.finish() == [1, 2, 3, 4, 6, 5, 0]


@pytest.mark.usefixtures("only_looks")
async def test_a_sleeper_wakes_when_all_in_front_give_up(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """It is the first then."""
    async with sleeping(world, dsn, admin, name, timeout=60) as sleeper:
        sleeper.ahead.leave()
        await sleeper.is_served()


async def test_a_sleeper_passes_those_in_front_that_stopped(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all of them are stopped at once, no ticket is returned, and only a check of all tickets shows that."""
    monkeypatch.setattr(server_wait, "LOOKS", 1)
    async with sleeping(world, dsn, admin, name, timeout=60) as sleeper:
        sleeper.ahead.stop()
        await sleeper.is_served()


@pytest.mark.usefixtures("sleeps_long")
async def test_a_sleeper_whose_session_ends_waits_again_at_once(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """It takes another ticket on another connection."""
    async with sleeping(world, dsn, admin, name, timeout=7200) as sleeper:
        (session,) = sessions(admin, name)
        terminate(admin, session.pid)
        await eventually(has_ticket(admin, name, name))
        sleeper.ahead.leave()
        await sleeper.is_served()


@pytest.mark.async_only
@pytest.mark.usefixtures("sleeps_long")
async def test_a_task_is_cancelled_while_it_sleeps(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], held_by: Callable[[str], Any]
) -> None:
    """Its session is closed, and its ticket is released with it."""
    with elsewhere(dsn, name), front(dsn, admin, name):
        async with background(
            world.other().call(lock(world, labelled(world, name), name).acquire, timeout=3600)
        ) as task:
            await eventually(is_asleep(admin, name))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await eventually(lambda: held_by(name) == [])


@pytest.fixture
def held_by(admin: psycopg.Connection[Any]) -> Callable[[str], Any]:
    """A function that returns the advisory locks of the sessions with an application_name."""
    query = (
        "SELECT mode, objid FROM pg_locks JOIN pg_stat_activity USING (pid)"
        " WHERE locktype = 'advisory' AND application_name = %s"
    )
    return lambda label: admin.execute(query, [label]).fetchall()


@pytest.mark.sync_only
@pytest.mark.usefixtures("sleeps_long")
async def test_a_thread_is_cancelled_while_it_sleeps(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], held_by: Callable[[str], Any]
) -> None:
    """By the event of cancel_waits()."""
    stop, engine = threading.Event(), labelled(world, name)

    def wait() -> None:
        with cancel_waits(stop):
            AdvisoryLock(engine, name).acquire(timeout=math.inf)

    with elsewhere(dsn, name), front(dsn, admin, name), ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait)
        await eventually(is_asleep(admin, name))
        stop.set()
        with pytest.raises(WaitCancelledError):
            await asyncio.wait_for(asyncio.wrap_future(waiting), FAR)
        await eventually(lambda: held_by(name) == [])


async def test_a_wait_that_ends_in_a_sleep_leaves_nothing(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], held_by: Callable[[str], Any]
) -> None:
    """After the timeout, its session is kept and holds nothing. The end of the wait is spent in the server."""
    with elsewhere(dsn, name), front(dsn, admin, name):
        async with background(world.other().call(lock(world, labelled(world, name), name).acquire, timeout=12)) as task:
            await eventually(is_asleep(admin, name))
            (session,) = sessions(admin, name)
            assert session.backend_xmin is None
            await eventually(lambda: [one.state for one in sessions(admin, name)] == ["active"])
            with pytest.raises(LockTimeoutError):
                await task
        assert [one.pid for one in sessions(admin, name)] == [session.pid]
        assert held_by(name) == []


@pytest.mark.one_driver
async def test_a_sleeper_is_listed_as_waiting(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """With its whole wait, once, at the lock; the numbers that it locks in its queue are not listed."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    async with sleeping(world, dsn, admin, name, timeout=60) as sleeper:
        (row,) = [row for row in monitoring.ps(engine) if row.holder.key == LockKey.of(name)]
        (waiter,) = [waiter for waiter in row.waiters if waiter.who.application_name == name]
        assert waiter.waiting.total_seconds() >= 1
        assert waiter.blocked_by == (sleeper.holder.info.backend_pid,)
        own = [row for row in monitoring.ps(engine) if row.holder.application_name == name]
        assert own == []
        sleeper.ahead.leave()
        await sleeper.is_served()
    engine.dispose()


@pytest.mark.one_driver
async def test_a_reader_sleeps_and_a_writer_does_not(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """A writer must be there when the first one has its turn."""
    reader, writer = (f"{name}:reader", f"{name}:writer")
    one, two = world.other(), world.other()
    read, write = (ReadWriteLock(labelled(world, label), name) for label in (reader, writer))
    with elsewhere(dsn, name) as holder, front(dsn, admin, name) as ahead:
        async with background(two.call(write.write.acquire, timeout=60)) as writing:
            await eventually(has_ticket(admin, writer, name))
            async with background(one.call(read.read.acquire, timeout=60)) as reading:
                await eventually(is_asleep(admin, reader))
                assert not is_asleep(admin, writer)()
                ahead.leave()
                give(holder, name)
                for contender, task in ((two, writing), (one, reading)):
                    await contender.call((await asyncio.wait_for(task, FAR)).release)


@pytest.mark.one_driver
@pytest.mark.sync_only
@pytest.mark.parametrize("kind", ["writer", "own connection"])
async def test_a_waiter_that_never_sleeps_counts_no_tickets(
    kind: str, name: str, dsn: str, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number only decides whether to sleep, so a query for it would be an extra round trip."""
    slices: list[float] = []

    def build(keys: Any, milliseconds: int, **options: Any) -> tuple[str, ...]:
        slices.append(milliseconds)
        return build_wait_for_turn(keys, milliseconds, **options)

    monkeypatch.setattr(server_wait, "COUNT_TICKETS", "SELECT 1 / 0")
    monkeypatch.setattr(server_wait, "build_wait_for_turn", build)
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    with elsewhere(dsn, name) as holder, front(dsn, admin, name) as ahead, engine.connect() as connection:
        wait = ReadWriteLock(engine, name).write if kind == "writer" else AdvisoryLock(connection, name)
        async with background(asyncio.to_thread(wait.acquire, timeout=60)) as waiting:
            await eventually(lambda: waiting.done() or len(slices) > 4)
            ahead.leave()
            give(holder, name)
            (await asyncio.wait_for(waiting, FAR)).release()
    engine.dispose()
