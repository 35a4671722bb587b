"""AdvisoryLock waits in slices, is granted at once on release, keeps the caller's timeout, and logs little."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence.errors import LockTimeoutError
from support.locking import background, elsewhere, give, is_free, labelled, limited, lock, run, sessions, take, waits
from support.waiting import FAR, eventually
from support.worlds import NAMES, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.servers import OwnServer

pytestmark = pytest.mark.twins


@pytest.mark.every_driver
async def test_the_lock_is_handed_over_whenever_it_comes_free(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """The waiter gets the lock at the release, in the first slice and in later ones."""
    engine = world.engine()

    async def wait_for(after: float) -> None:
        other, mine = world.other(), f"{name}:{after}"
        with elsewhere(dsn, mine) as holder:
            async with background(other.call(lock(world, engine, mine).acquire, timeout=10)) as task:
                await eventually(waits(admin, mine))
                await asyncio.sleep(after)
                give(holder, mine)
                held = await task
            held.check()
            assert not is_free(holder, mine)
            await other.call(held.release)
            assert is_free(holder, mine)

    await asyncio.gather(*(wait_for(after) for after in (0.2, 0.8, 1.5)))


@pytest.mark.every_driver
async def test_a_holder_that_dies_lets_the_waiter_in(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """The server frees the lock of a dead session, and the waiter gets it at once."""
    other = world.other()
    with elsewhere(dsn, name) as holder:
        async with background(other.call(lock(world, world.engine(), name).acquire, timeout=10)) as task:
            await eventually(waits(admin, name))
            holder.close()
            held = await asyncio.wait_for(task, 20)
    await other.call(held.release)


@pytest.mark.every_driver
async def test_timeouts_are_kept(world: World, name: str, dsn: str) -> None:
    """Timeouts shorter than a slice, within a slice and after several slices end neither early nor late."""
    engine = world.engine()

    async def wait_for(timeout: float) -> None:
        other, mine = world.other(), f"{name}:{timeout}"
        await other.call((await other.call(lock(world, engine, mine).acquire)).release)  # a connection is there
        with elsewhere(dsn, mine):
            start = time.monotonic()
            with pytest.raises(LockTimeoutError):
                await other.call(lock(world, engine, mine).acquire, timeout=timeout)
            assert timeout - 0.01 < time.monotonic() - start < FAR

    await asyncio.gather(*(wait_for(timeout) for timeout in (0.05, 0.3, 1.1)))


async def test_a_waiter_pins_no_snapshot_for_longer_than_a_slice(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """Rule 3: it waits in one short transaction after another, so VACUUM and CREATE INDEX CONCURRENTLY do not wait for its end."""
    other = world.other()
    seen: set[Any] = set()
    with elsewhere(dsn, name) as holder:
        async with background(other.call(lock(world, labelled(world, name), name).acquire, timeout=20)) as task:
            await eventually(waits(admin, name))
            await eventually(lambda: seen.update(s.xact_start for s in sessions(admin, name)) or len(seen - {None}) > 3)
            assert not task.done()
            give(holder, name)
            await other.call((await task).release)


async def test_an_index_can_be_built_beside_waiters(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """C039, rule 3: with six waiters, the holder can build an index CONCURRENTLY before a waiter times out."""
    table = f"t_{name.rsplit(':', 1)[1]}"
    admin.execute(f"CREATE TABLE {table} AS SELECT n FROM generate_series(1, 100) AS n")
    engines = [world.engine() for _ in range(6)]
    others = [world.other() for _ in engines]
    with elsewhere(dsn, name) as holder:
        tasks = [
            asyncio.create_task(other.call(lock(world, engine, name).acquire, timeout=30))
            for other, engine in zip(others, engines, strict=True)
        ]
        await eventually(waits(admin, name, 6))
        await asyncio.to_thread(holder.execute, f"CREATE INDEX CONCURRENTLY ON {table} (n)")
        assert not any(task.done() for task in tasks)
        give(holder, name)
        released: set[Any] = set()
        while len(released) < len(tasks):
            (task,) = await eventually(lambda: [task for task in tasks if task.done() and task not in released])
            released.add(task)
            await others[tasks.index(task)].call((await task).release)
    admin.execute(f"DROP TABLE {table}")


@pytest.mark.every_driver
async def test_grant_and_timeout_at_the_same_moment_agree_with_the_server(
    world: World, name: str, dsn: str, advisory_rows: Callable[[], list[Any]]
) -> None:
    """Rule 2: if the holder releases at the waiter's deadline, the result agrees with the server each time."""
    engine, other, outcomes = world.engine(), world.other(), set()
    await other.call((await other.call(lock(world, engine, name).acquire)).release)
    dice = random.Random(7)
    with elsewhere(dsn) as rival:
        for number in range(30):
            timeout = 0.02 if number % 6 else 0.54
            take(rival, name)
            task = asyncio.create_task(other.call(lock(world, engine, name).acquire, timeout=timeout))
            await asyncio.sleep(timeout - 0.004 + dice.random() * 0.012)
            give(rival, name)
            try:
                held = await task
            except LockTimeoutError:
                outcomes.add("timeout")
                assert advisory_rows() == []
            else:
                outcomes.add("granted")
                assert [row.granted for row in advisory_rows()] == [True]
                await other.call(held.release)
                assert advisory_rows() == []
    assert outcomes == {"timeout", "granted"}


async def test_the_same_race_over_several_names(
    world: World, name: str, dsn: str, advisory_rows: Callable[[], list[Any]]
) -> None:
    """Rule 2: in the same race over several names, all of them are held or none."""
    engine, other = world.engine(), world.other()
    names = [f"{name}:{n}" for n in range(3)]
    await other.call((await other.call(lock(world, engine, *names).acquire)).release)
    dice = random.Random(11)
    with elsewhere(dsn) as rival:
        for number in range(16):
            take(rival, names[number % 3])
            task = asyncio.create_task(other.call(lock(world, engine, *names).acquire, timeout=0.05))
            await asyncio.sleep(0.044 + dice.random() * 0.012)
            give(rival, names[number % 3])
            try:
                held = await task
            except LockTimeoutError:
                assert advisory_rows() == []
            else:
                assert len(advisory_rows()) == 3
                await other.call(held.release)
                assert advisory_rows() == []


async def test_a_warm_session_is_fit_again_after_a_lent_one(world: World, name: str, dsn: str) -> None:
    """The role's limits apply to the user's statements, and never to a session that waits."""
    engine = limited(world, {"statement_timeout": "450ms"})  # less than a slice
    async with world.enter(lock(world, engine, name).connect()) as connection:
        assert await run(world, connection, "SHOW statement_timeout") == "450ms"
    with elsewhere(dsn, name):
        with pytest.raises(LockTimeoutError):
            await world.call(lock(world, engine, name).acquire, timeout=0.7)


async def on_every_driver(dsn: str, check: Callable[[World], Any]) -> None:
    """One private server serves all drivers in parallel, because starting a server takes longer than the test."""
    worlds = [World(driver, dsn) for driver in NAMES]
    try:
        await asyncio.gather(*(check(world) for world in worlds))
    finally:
        for world in worlds:
            await world.close()


async def test_with_a_tiny_deadlock_timeout_it_polls(name: str, make_server: Callable[..., OwnServer]) -> None:
    """If deadlock_timeout is too short for a slice, waiters poll; grants and timeouts still work."""
    server = make_server(fsync=False, settings={"deadlock_timeout": "20ms"})

    async def check(world: World) -> None:
        engine, other, mine = world.engine(), world.other(), f"{name}:{world.name}"
        with psycopg.connect(server.dsn, autocommit=True) as admin, elsewhere(server.dsn, mine) as holder:
            start = time.monotonic()
            with pytest.raises(LockTimeoutError):
                await other.call(lock(world, engine, mine).acquire, timeout=0.3)
            assert 0.29 < time.monotonic() - start < FAR
            async with background(other.call(lock(world, engine, mine, mine + "2").acquire, timeout=10)) as task:
                for _ in range(20):
                    assert not waits(admin, mine)()
                    await asyncio.sleep(0.01)
                give(holder, mine)
                held = await task
            await other.call(held.release)

    await on_every_driver(server.dsn, check)


async def test_a_wait_writes_one_line_into_the_servers_log(name: str, make_server: Callable[..., OwnServer]) -> None:
    """Rule 3: a wait of several slices writes at most one ERROR to the server's log; a try or release writes none."""
    server = make_server(
        fsync=False,
        settings={"logging_collector": "on", "log_directory": "log", "log_filename": "server.log"},
    )

    async def refused(world: World) -> None:
        mine = f"{name}:{world.name}"
        with elsewhere(server.dsn, mine):
            assert await world.call(lock(world, world.engine(), mine).try_acquire) is None
            with pytest.raises(LockTimeoutError):
                await world.call(lock(world, world.engine(), mine).acquire, timeout=1.7)

    async def granted(world: World) -> None:
        mine = f"{name}:{world.name}"
        with elsewhere(server.dsn, mine) as holder:
            async with background(
                world.call(lock(world, world.engine(), mine, mine + "2").acquire, timeout=10)
            ) as task:
                await asyncio.sleep(1.7)
                give(holder, mine)
                await world.call((await task).release)

    with psycopg.connect(server.dsn, autocommit=True) as admin:
        before = errors(admin)
        for check in (refused, granted):
            await on_every_driver(server.dsn, check)
            after = errors(admin)
            assert 0 < after - before <= len(NAMES)  # the first slice of each: the log is where we look
            before = after


def errors(admin: psycopg.Connection[Any]) -> int:
    """Return the number of errors in the server's log."""
    query = "SELECT count(*) FROM regexp_matches(pg_read_file('log/server.log'), 'ERROR:', 'g')"
    return admin.execute(query).fetchone()[0]


async def test_many_processes_are_served_each_in_turn(dsn: str, name: str) -> None:
    """Thirty contenders with an engine each, like thirty processes, are all served, one at a time."""
    world = World("asyncpg", dsn)
    inside, most, served = [0], [0], []

    async def contend(number: int) -> None:
        other = world.other()
        async with other.enter(lock(world, world.engine(), name).hold(timeout=30)):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            await asyncio.sleep(0.005)
            inside[0] -= 1
            served.append(number)

    await asyncio.gather(*(contend(number) for number in range(30)))
    assert (most[0], sorted(served)) == (1, list(range(30)))
    await world.close()


@pytest.mark.every_driver
async def test_a_waiter_keeps_its_name(world: World, name: str, dsn: str, admin: psycopg.Connection[Any]) -> None:
    """Before, during and after a wait, the session has the application's own application_name."""
    engine, other = labelled(world, name), world.other()
    with elsewhere(dsn, name) as holder:
        async with background(other.call(lock(world, engine, name).acquire, timeout=10)) as task:
            await eventually(waits(admin, name))
            await asyncio.sleep(0.7)
            assert len(sessions(admin, name)) == 1
            give(holder, name)
            held = await task
        assert len(sessions(admin, name)) == 1
        await other.call(held.release)
        assert len(sessions(admin, name)) == 1
