"""Waiters for one lock in one process queue, are served in order, and share one connection."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pgfence import AdvisoryLock, AsyncAdvisoryLock
from pgfence.config import configure
from pgfence.errors import LockTimeoutError, SelfDeadlockError
from support.limits import set_limit
from support.locking import (
    background,
    elsewhere,
    give,
    is_free,
    labelled,
    lock,
    run,
    sessions,
    standing,
    take,
    terminate,
    waits,
)
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins


async def test_two_hundred_threads_wait_on_one_connection(dsn: str, name: str, admin: psycopg.Connection[Any]) -> None:
    """C009: a crowd of threads that waits for a key costs one connection beside the holder's, and all are served."""
    from support.worlds import World

    world = World("psycopg", dsn)
    engine, rival = labelled(world, name), world.engine()
    served: list[int] = []
    held = AdvisoryLock(rival, name).acquire()

    def contend(number: int) -> None:
        with AdvisoryLock(engine, name).hold(timeout=50):
            served.append(number)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    await eventually(lambda: standing(engine) == 199, 20)
    await eventually(waits(admin, name))
    most = len(sessions(admin, name))
    held.release()
    await asyncio.to_thread(lambda: [thread.join(30) for thread in threads])
    assert sorted(served) == list(range(200))
    assert most == 1
    assert len(sessions(admin, name)) == 1
    await world.close()


@pytest.mark.parametrize("driver", ["psycopg_async", "asyncpg"])
async def test_a_thousand_tasks_wait_on_one_connection(
    dsn: str, name: str, driver: str, admin: psycopg.Connection[Any]
) -> None:
    """C009: the same for tasks, served in the order in which they came."""
    from support.worlds import World

    world = World(driver, dsn)
    engine, served = labelled(world, name), []

    async def contend(number: int) -> None:
        async with AsyncAdvisoryLock(engine, name).hold(timeout=50):
            served.append(number)

    with elsewhere(dsn, name) as holder:
        tasks = [asyncio.create_task(contend(number)) for number in range(1000)]
        await eventually(lambda: standing(engine) == 999)
        await eventually(waits(admin, name))
        assert len(sessions(admin, name)) == 1
        give(holder, name)
        await asyncio.gather(*tasks)
    assert served == list(range(1000))
    assert len(sessions(admin, name)) == 1
    await world.close()


async def enqueue(world: World, engine: Any, name: str, count: int, served: list[int], **kwargs: Any) -> list[Any]:
    """Have contenders come one after the other; each notes its number when it is served."""

    async def contend(number: int) -> None:
        other = world.other()
        async with other.enter(lock(world, engine, name).hold(**kwargs)):
            served.append(number)

    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(contend(number)))
        await eventually(lambda expected=number + 1: standing(engine) == expected)
    return tasks


async def test_first_come_first_served(world: World, name: str) -> None:
    """Contenders of one process are served in the order in which they came."""
    engine, served = world.engine(), []
    held = await world.call(lock(world, engine, name).acquire)
    tasks = await enqueue(world, engine, name, 8, served, timeout=20)
    await world.call(held.release)
    await asyncio.gather(*tasks)
    assert served == list(range(8))


async def test_a_try_does_not_jump_the_queue(world: World, name: str) -> None:
    """While other contenders of the process wait, a try fails at once, even in the gap between two holders."""
    engine, served, tries = world.engine(), [], []
    held = await world.call(lock(world, engine, name).acquire)
    tasks = await enqueue(world, engine, name, 3, served, timeout=20)
    for _ in range(3):
        tries.append(await world.other().call(lock(world, engine, name).try_acquire))
    await world.call(held.release)
    await asyncio.gather(*tasks)
    assert tries == [None] * 3
    assert served == [0, 1, 2]


async def test_a_try_behind_a_local_holder_sends_no_statement(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The try returns None without a connection."""
    engine = labelled(world, name)
    async with world.enter(lock(world, engine, name).hold()):
        for _ in range(5):
            assert await world.other().call(lock(world, engine, name).try_acquire) is None
        assert len(sessions(admin, name)) == 1


async def test_the_queue_skips_contenders_that_give_up(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A timeout in the middle of the line affects only that contender; those behind it are served."""
    engine, served = world.engine(), []
    held = await world.call(lock(world, engine, name).acquire)
    (first,) = await enqueue(world, engine, name, 1, served, timeout=20)
    quitter = asyncio.create_task(world.other().call(lock(world, engine, name).acquire, timeout=0.2))
    await eventually(lambda: standing(engine) == 2)
    last = asyncio.create_task(world.other().call(lock(world, engine, name).is_held))
    with pytest.raises(LockTimeoutError):
        await quitter
    assert standing(engine) == 1
    await world.call(held.release)
    await first
    await last
    assert served == [0]
    assert is_free(admin, name)


async def test_a_timeout_behind_a_neighbour_names_him(
    world: World, name: str, admin: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """C040: a wait for a thread or task of the same process names it, in the log and in the error."""
    engine = labelled(world, name)
    async with world.enter(lock(world, engine, name).hold()):
        (session,) = sessions(admin, name)
        with caplog.at_level(logging.INFO, "pgfence"), pytest.raises(LockTimeoutError) as caught:
            await world.other().call(lock(world, engine, name).acquire, timeout=0.3)
        assert len(sessions(admin, name)) == 1
    assert [seen.backend_pid for seen in caught.value.holders] == [session.pid]
    assert str(session.pid) in str(caught.value)


async def test_a_long_wait_behind_a_neighbour_warns_once(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rule 19: any wait over the limit logs once at WARNING, with the name: also one that never gets to the server."""
    set_limit(monkeypatch, "WARN_AFTER", 0.2)
    engine = world.engine()
    async with world.enter(lock(world, engine, name).hold()):
        with caplog.at_level(logging.WARNING, "pgfence"), pytest.raises(LockTimeoutError):
            await world.other().call(lock(world, engine, name).acquire, timeout=0.7)
    warned = [record for record in caplog.records if record.levelno == logging.WARNING and name in record.getMessage()]
    assert len(warned) == 1


async def test_a_long_wait_in_the_server_warns_once(
    world: World, name: str, dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rule 19: with name, holder and age."""
    set_limit(monkeypatch, "WARN_AFTER", 0.2)
    with elsewhere(dsn, name, label="other-deploy") as holder:
        with caplog.at_level(logging.WARNING, "pgfence"), pytest.raises(LockTimeoutError):
            await world.call(lock(world, world.engine(), name).acquire, timeout=1.6)
        (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert name in told
        assert "other-deploy" in told
        assert str(holder.info.backend_pid) in told


async def test_a_release_hands_the_lock_to_the_neighbour(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The next in line continues on the session that holds the lock: the server never sees it free."""
    engine, seen = labelled(world, name), []

    async def contend() -> None:
        other = world.other()
        held = await other.call(lock(world, engine, name).acquire, timeout=10)
        seen.append(holder(admin, name))
        await other.call(held.release)

    held = await world.call(lock(world, engine, name).acquire)
    first = holder(admin, name)
    task = asyncio.create_task(contend())
    await eventually(lambda: standing(engine) == 1)
    # The time for hand-overs counts from the grant, and this one is long ago: take it anew with the neighbour in line.
    await world.call(held.release)
    await task
    assert len(sessions(admin, name)) == 1
    assert seen == [first]


def holder(admin: psycopg.Connection[Any], name: str) -> int:
    from pgfence.keys import LockKey

    query = (
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1"
        " AND (classid::bigint << 32 | objid::bigint) = %s"
    )
    return admin.execute(query, [LockKey.of(name).value]).fetchone()[0]


async def test_a_crowd_does_not_keep_the_lock_from_other_processes(world: World, name: str, dsn: str) -> None:
    """Rule 15: a session that waits in the server gets its turn although contenders here pass the lock on and on."""
    engine = world.engine()
    stop = threading.Event()
    turns = [0]

    async def crowd() -> None:
        other = world.other()
        while not stop.is_set():
            async with other.enter(lock(world, engine, name).hold(timeout=20)):
                turns[0] += 1

    tasks = [asyncio.create_task(crowd()) for _ in range(4)]
    try:
        await eventually(lambda: turns[0] > 20)
        with elsewhere(dsn) as rival:
            for _ in range(5):
                await asyncio.wait_for(asyncio.to_thread(take, rival, name), 20)
                before = turns[0]
                give(rival, name)
                await eventually(lambda before=before: turns[0] > before)
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def test_hand_overs_in_a_row_are_counted(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 16 hand-overs in a row skip the server; then the lock is released there once."""
    set_limit(monkeypatch, "BURST_TIME", 60)
    engine, served, unlocks = world.engine(), [], []
    count_unlocks(engine, unlocks, served)
    held = await world.call(lock(world, engine, name).acquire)
    tasks = await enqueue(world, engine, name, 20, served, timeout=30)
    await world.call(held.release)
    await asyncio.gather(*tasks)
    assert served == list(range(20))
    assert unlocks == [16, 20]


def count_unlocks(engine: Any, unlocks: list[int], served: list[int]) -> None:
    from sqlalchemy import event

    @event.listens_for(getattr(engine, "sync_engine", engine), "before_cursor_execute")
    def before(*args: Any) -> None:
        if "pg_advisory_unlock(" in args[2] and "pg_try" not in args[2]:
            unlocks.append(len(served))


async def test_deadlocks_inside_the_process_are_found_at_once(world: World, name: str) -> None:
    """Rule 19: A waits for B's lock and B requests A's: rejected at once, over two engines too; the first one is served."""
    one, two = world.engine(), world.engine()
    other = world.other()
    for theirs in (one, two):
        a = await world.call(lock(world, one, name + "a").acquire)
        b = await other.call(lock(world, theirs, name + "b").acquire)
        async with background(other.call(lock(world, one, name + "a").acquire, timeout=20)) as task:
            await eventually(lambda: standing(one) == 1)
            with pytest.raises(
                SelfDeadlockError, match=f"is waiting for '{name}a', which this (task|thread) holds"
            ) as caught:
                await world.call(lock(world, theirs, name + "b").acquire, timeout=20)
            assert caught.value.names == (name + "b",)
            await world.call(a.release)
            second = await task
        await other.call(second.release)
        await other.call(b.release)


async def test_a_deadlock_of_three_is_found(world: World, name: str) -> None:
    """The contender that closes the cycle is rejected, and the others are served once it releases."""
    engine = world.engine()
    places = [world, world.other(), world.other()]
    held = [await place.call(lock(world, engine, f"{name}{n}").acquire) for n, place in enumerate(places)]
    tasks = []
    for n in (1, 2):
        tasks.append(asyncio.create_task(places[n].call(lock(world, engine, f"{name}{n - 1}").acquire, timeout=20)))
        await eventually(lambda n=n: standing(engine) == n)
    with pytest.raises(SelfDeadlockError):
        await world.call(lock(world, engine, f"{name}2").acquire, timeout=20)
    await world.call(held[0].release)
    await places[1].call((await tasks[0]).release)
    await places[1].call(held[1].release)
    await places[2].call((await tasks[1]).release)
    await places[2].call(held[2].release)


async def test_a_try_is_not_part_of_a_deadlock(world: World, name: str) -> None:
    """A call that does not wait cannot deadlock: it returns None."""
    engine, other = world.engine(), world.other()
    a = await world.call(lock(world, engine, name + "a").acquire)
    b = await other.call(lock(world, engine, name + "b").acquire)
    async with background(other.call(lock(world, engine, name + "a").acquire, timeout=20)) as task:
        await eventually(lambda: standing(engine) == 1)
        assert await world.call(lock(world, engine, name + "b").try_acquire) is None
        await world.call(a.release)
        second = await task
    await other.call(second.release)
    await other.call(b.release)


async def test_a_nested_wait_is_cut_and_names_both_locks(
    world: World, name: str, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default timeout of a contender that holds a lock is at most a minute; an explicit one applies as it is."""
    set_limit(monkeypatch, "NESTED_LIMIT", 0.2)
    engine = world.engine()
    configure(engine, default_timeout=300)
    inner = lock(world, engine, name + "inner")
    with elsewhere(dsn, name + "inner"):
        async with world.enter(lock(world, engine, name).hold()):
            with pytest.raises(LockTimeoutError) as caught:
                await world.call(inner.acquire)
            assert (caught.value.timeout, caught.value.held_here) == (0.2, (name,))
            assert name + "inner" in str(caught.value)
            assert f"'{name}'" in str(caught.value)
            with pytest.raises(LockTimeoutError) as caught:
                await world.call(inner.acquire, timeout=0.4)
            assert caught.value.timeout == 0.4


async def test_a_nested_wait_through_another_engine_is_cut_too(
    world: World, name: str, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock that is held may belong to another engine of the process."""
    set_limit(monkeypatch, "NESTED_LIMIT", 0.2)
    one, two = world.engine(), world.engine()
    configure(two, default_timeout=300)
    with elsewhere(dsn, name + "inner"):
        async with world.enter(lock(world, one, name).hold()):
            with pytest.raises(LockTimeoutError) as caught:
                await world.call(lock(world, two, name + "inner").acquire)
            assert (caught.value.timeout, caught.value.held_here) == (0.2, (name,))


async def test_a_lost_holder_lets_its_neighbours_go_on_at_once(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C042: those in line do not wait for the loser to leave its block."""
    engine, other = labelled(world, name), world.other()
    held = await world.call(lock(world, engine, name).acquire)
    async with background(other.call(lock(world, engine, name).acquire, timeout=20)) as task:
        await eventually(lambda: standing(engine) == 1)
        terminate(admin, sessions(admin, name)[0].pid)
        second = await task
    assert held.lost
    second.check()
    await other.call(second.release)
    with pytest.raises(Exception, match="lost"):
        await world.call(held.release)


async def test_a_session_that_dies_on_its_way_to_the_next_is_no_lock(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Handed over and killed at the same time: the next one holds, or its handle is lost; never two holders."""
    engine, other = labelled(world, name), world.other()
    for _ in range(5):
        held = await world.call(lock(world, engine, name).acquire)
        async with background(other.call(lock(world, engine, name).acquire, timeout=20)) as task:
            await eventually(lambda: standing(engine) == 1)
            pid = holder(admin, name)
            await asyncio.gather(
                world.call(held.release), asyncio.to_thread(terminate, admin, pid), return_exceptions=True
            )
            second = await task
        await eventually(lambda second=second: second.lost or not is_free(admin, name))
        try:
            await other.call(second.release)
        except Exception:
            assert second.lost
        assert is_free(admin, name)


async def test_two_engines_of_one_process_exclude_each_other(world: World, name: str) -> None:
    """They meet in the server."""
    one, two = world.engine(), world.engine()
    other = world.other()
    held = await world.call(lock(world, one, name).acquire)
    assert await other.call(lock(world, two, name).try_acquire) is None
    async with background(other.call(lock(world, two, name).acquire, timeout=10)) as task:
        await asyncio.sleep(0.05)
        assert not task.done()
        await world.call(held.release)
        second = await task
    await other.call(second.release)


async def test_copies_of_an_engine_share_one_queue(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """execution_options() gives another Engine object for the same database: one line, one set of connections."""
    engine = labelled(world, name)
    copy = engine.execution_options(logging_token="copy")
    async with world.enter(lock(world, engine, name).hold()):
        assert await world.other().call(lock(world, copy, name).try_acquire) is None
        with pytest.raises(SelfDeadlockError):
            await world.call(lock(world, copy, name).acquire)
        assert len(sessions(admin, name)) == 1


async def test_an_unrelated_query_is_not_kept_waiting(world: World, name: str, dsn: str) -> None:
    """C009: twenty contenders for one lock use nothing of the engine's pool: a query through it returns at once."""
    engine = world.engine(pool_size=5, max_overflow=0, pool_timeout=2)
    with elsewhere(dsn, name) as away:
        tasks = [
            asyncio.create_task(world.other().call(lock(world, engine, name).acquire, timeout=30)) for _ in range(20)
        ]
        await eventually(lambda: standing(engine) == 19)
        async with world.enter(engine.connect()) as connection:
            await run(world, connection, "SELECT 1")
            await run(world, connection, "SELECT 1")
        give(away, name)
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=10)
            (task,) = done
            tasks.remove(task)
            await world.call((await task).release)


async def test_waiters_in_the_server_are_woken_by_the_release(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """A contender that waits in the server is granted by the statement that waits, and not by the next one after its slice."""
    other, engine = world.other(), labelled(world, name)
    asked = "SELECT query_start FROM pg_stat_activity WHERE application_name = %s"
    same = []
    with elsewhere(dsn) as rival:
        for _ in range(5):  # a slice may end at the moment of the unlock
            take(rival, name)
            async with background(other.call(lock(world, engine, name).acquire, timeout=20)) as task:
                await eventually(waits(admin, name))
                before = admin.execute(asked, [name]).fetchall()
                give(rival, name)
                held = await task
                same.append(admin.execute(asked, [name]).fetchall() == before)
            await other.call(held.release)
    assert any(same)
