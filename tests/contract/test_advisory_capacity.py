"""Locks need few connections, all of them outside the application's pool."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.pool import AssertionPool, AsyncAdaptedQueuePool, NullPool, QueuePool, SingletonThreadPool, StaticPool

from pgfence import AdvisoryLock
from pgfence.config import configure
from pgfence.errors import LockTimeoutError
from pgfence.keys import LockKey
from support.limits import set_limit
from support.locking import background, elsewhere, give, is_free, labelled, lock, run, sessions
from support.waiting import FAR, eventually
from support.worlds import World

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.twins


@pytest.mark.every_driver
async def test_the_holder_is_an_idle_session_outside_the_pool(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C010: it is idle, outside a transaction, with the application's name, and no pooled connection is in use."""
    engine = labelled(world, name)
    async with world.enter(lock(world, engine, name).hold()):
        (session,) = sessions(admin, name)
        assert (session.state, session.xact_start, session.backend_xmin) == ("idle", None, None)
        assert engine.pool.checkedout() == 0
        assert engine.pool.checkedin() == 0


async def test_an_exhausted_pool_is_no_obstacle(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C009: with the only pooled connection in use, a lock is acquired, waited for and released."""
    engine = world.engine(pool_size=1, max_overflow=0, pool_timeout=0.1)
    async with world.enter(engine.connect()) as connection:
        await run(world, connection, "SELECT 1")
        async with world.enter(lock(world, engine, name).hold(timeout=20)):
            assert not is_free(admin, name)
            await run(world, connection, "SELECT 1")
        assert engine.pool.checkedout() == 1


async def test_as_many_holders_as_the_pool_is_big_all_work(world: World, name: str) -> None:
    """C009: five holders of five locks each run a query through a pool of five."""
    engine = world.engine(pool_size=5, max_overflow=0, pool_timeout=2)

    async def work(number: int) -> int:
        other = world.other()
        async with other.enter(lock(world, engine, f"{name}:{number}").hold(timeout=5)):
            async with other.enter(engine.connect()) as connection:
                return await run(other, connection, f"SELECT {number}")

    assert await asyncio.gather(*(work(number) for number in range(5))) == list(range(5))


async def test_a_commit_of_the_users_session_is_no_unlock(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C001: the user's connections come and go, commit and roll back under the lock, fifty times: it stays."""
    engine = world.engine(pool_size=2)
    async with world.enter(lock(world, engine, name).hold()):
        for number in range(50):
            async with world.enter(engine.connect()) as connection:
                await run(world, connection, "SELECT 1")
                await world.call(connection.commit if number % 2 else connection.rollback)
        assert not is_free(admin, name)
    assert is_free(admin, name)


@pytest.mark.matrix
@pytest.mark.every_driver
@pytest.mark.parametrize("pool", [NullPool, StaticPool, QueuePool, AssertionPool, SingletonThreadPool])
async def test_every_kind_of_pool_serves(
    world: World, name: str, pool: type[Any], admin: psycopg.Connection[Any]
) -> None:
    """With every pool class, a lock is held on a separate connection while the caller's connection is open."""
    if world.is_async and pool is QueuePool:
        pool = AsyncAdaptedQueuePool
    if world.is_async and pool in (AssertionPool, SingletonThreadPool):
        pytest.skip("no pool for async engines")
    engine = labelled(world, name, poolclass=pool)
    async with world.enter(engine.connect()) as connection:
        theirs = await run(world, connection, "SELECT pg_backend_pid()")
        async with world.enter(lock(world, engine, name).hold()) as held:
            assert not is_free(admin, name)
            assert {row.pid for row in sessions(admin, name)} > {theirs}
            await world.call(connection.commit)
            held.check()
        assert is_free(admin, name)
        assert await run(world, connection, "SELECT 1") == 1


async def test_a_patched_connect_is_not_used(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch, admin: psycopg.Connection[Any]
) -> None:
    """Test isolation that hands out one connection in one transaction must not carry the lock."""
    engine = world.engine()
    inner = getattr(engine, "sync_engine", engine)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the user's connect()")

    for method in ("connect", "raw_connection", "begin"):
        monkeypatch.setattr(inner, method, refuse)
    async with world.enter(lock(world, engine, name).hold()):
        assert not is_free(admin, name)


@pytest.mark.every_driver
async def test_connections_are_opened_as_the_engine_opens_them(world: World, name: str, dsn: str) -> None:
    """`do_connect` and `connect` hooks run for lock connections too, because they provide tokens for cloud logins."""
    engine, seen = world.engine(dsn=dsn.replace("//postgres:", "//nobody_at_all:")), []
    inner = getattr(engine, "sync_engine", engine)
    user, password = dsn.split("//")[1].split("@")[0].split(":")

    @event.listens_for(inner, "do_connect")
    def log_in(dialect: Any, record: Any, args: Any, parameters: Any) -> None:
        parameters["user"], parameters["password"] = user, password
        seen.append("do_connect")

    @event.listens_for(inner, "connect")
    def connected(connection: Any, record: Any) -> None:
        seen.append("connect")

    async with world.enter(lock(world, engine, name).hold()):
        assert seen == ["do_connect", "connect"]


@pytest.mark.every_driver
async def test_a_creator_is_used(world: World, name: str, dsn: str, admin: psycopg.Connection[Any]) -> None:
    """If an engine has a function that opens its connections, lock connections are opened with it."""
    made: list[int] = []

    def creator() -> Any:
        made.append(1)
        if world.name == "psycopg":
            return psycopg.connect(dsn)
        import psycopg2

        return psycopg2.connect(dsn)

    async def async_creator() -> Any:
        made.append(1)
        if world.name == "asyncpg":
            import asyncpg

            return await asyncpg.connect(dsn)
        return await psycopg.AsyncConnection.connect(dsn)

    arguments = world.pick({"creator": creator}, {"async_creator": async_creator})
    async with world.enter(lock(world, world.engine(**arguments), name).hold()):
        assert not is_free(admin, name)
    assert made == [1]


async def test_events_of_the_engines_pool_do_not_run_for_lock_connections(world: World, name: str) -> None:
    """A checkout hook for the user's connections is not called for pgfence's."""
    engine, seen = world.engine(), []
    inner = getattr(engine, "sync_engine", engine)
    for what in ("checkout", "checkin", "reset", "close", "close_detached", "detach", "invalidate", "soft_invalidate"):
        event.listen(inner, what, lambda *_, what=what, **__: seen.append(what))
    async with world.enter(lock(world, engine, name).hold()):
        pass
    async with world.enter(lock(world, engine, name).hold()):
        pass
    async with world.enter(lock(world, engine, name).connect()):
        pass
    assert seen == []


async def test_a_warm_connection_is_used_again(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Locks held one after another use one connection; locks held at the same time have one each."""
    engine = labelled(world, name)
    pids = set()
    for number in range(5):
        async with world.enter(lock(world, engine, f"{name}:{number}").hold()):
            pids |= {row.pid for row in sessions(admin, name)}
    assert len(pids) == 1
    async with world.enter(lock(world, engine, name + "a").hold()):
        async with world.enter(lock(world, engine, name + "b").hold()):
            assert len(sessions(admin, name)) == 2


@pytest.mark.every_driver
async def test_dispose_keeps_holds_and_closes_the_rest(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Rule 6: a hold outlives engine.dispose(). Idle connections close at once, and the hold's closes with the hold."""
    engine = labelled(world, name)
    first = await world.call(lock(world, engine, name).acquire)
    async with world.enter(lock(world, engine, name + "2").hold()):
        assert len(sessions(admin, name)) == 2
    await world.call(engine.dispose)
    await eventually(lambda: len(sessions(admin, name)) == 1)
    first.check()
    assert not is_free(admin, name)
    await world.call(first.release)
    await eventually(lambda: sessions(admin, name) == [])
    async with world.enter(lock(world, engine, name).hold()):
        assert not is_free(admin, name)


async def test_idle_connections_are_closed_after_a_while(
    world: World, name: str, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that rarely locks keeps no connection: idle ones are closed without a further call."""
    set_limit(monkeypatch, "WARM_FOR", 0.1)
    engine = labelled(world, name)
    async with world.enter(lock(world, engine, name).hold()):
        pass
    assert len(sessions(admin, name)) == 1
    await eventually(lambda: sessions(admin, name) == [], 8)
    async with world.enter(lock(world, engine, name).hold()):
        pass


@pytest.mark.every_driver
async def test_an_engine_that_is_dropped_takes_its_connections_along(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """No engine is kept alive by pgfence: idle sessions end with the engine, and no descriptor stays open."""
    from sqlalchemy import create_engine
    from sqlalchemy.ext.asyncio import create_async_engine

    arguments = (
        {"server_settings": {"application_name": name}} if world.name == "asyncpg" else {"application_name": name}
    )

    async def use() -> None:
        engine = world.pick(create_engine, create_async_engine)(world.url, connect_args=arguments)
        async with world.enter(lock(world, engine, name).hold()):
            pass

    await use()  # threads and the like exist from here on
    await gone(world, admin, name)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await use()
    await gone(world, admin, name)
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def gone(world: World, admin: psycopg.Connection[Any], label: str) -> None:
    def ended() -> bool:
        gc.collect()
        return sessions(admin, label) == []

    await world.call(int)  # its thread remembers its last call
    await eventually(ended)


async def test_a_limit_on_connections_is_kept(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """max_lock_connections: a further contender waits, and gets a connection at the release of any lock."""
    engine = labelled(world, name)
    configure(engine, max_lock_connections=2)
    one = await world.call(lock(world, engine, name + "1").acquire)
    two = await world.call(lock(world, engine, name + "2").acquire)
    other = world.other()
    async with background(other.call(lock(world, engine, name + "3").acquire, timeout=10)) as task:
        await asyncio.sleep(0.1)
        assert not task.done()
        assert len(sessions(admin, name)) == 2
        await world.call(one.release)
        three = await task
    assert len(sessions(admin, name)) == 2
    await world.call(two.release)
    await other.call(three.release)


async def test_without_a_turn_the_timeout_names_the_setting(world: World, name: str) -> None:
    """The error says that connections for locks are scarce, not that the lock is held."""
    engine = world.engine()
    configure(engine, max_lock_connections=1)
    async with world.enter(lock(world, engine, name).hold()):
        start = time.monotonic()
        with pytest.raises(LockTimeoutError, match="max_lock_connections") as caught:
            await world.other().call(lock(world, engine, name + "2").acquire, timeout=0.2)
        assert 0.15 < time.monotonic() - start < FAR
        assert caught.value.names == (name + "2",)
    async with world.enter(lock(world, engine, name + "2").hold(timeout=20)):
        pass


async def test_at_the_limit_one_can_still_try_and_look(world: World, name: str, dsn: str) -> None:
    """At the limit, a try, timeout=0 and holders() do not wait for a connection, and do not report a guess."""
    engine = world.engine()
    configure(engine, max_lock_connections=1)
    one = lock(world, engine, name)
    other = world.other()
    async with world.enter(one.hold()):
        start = time.monotonic()
        assert await other.call(one.try_acquire) is None
        with pytest.raises(LockTimeoutError) as caught:
            await other.call(one.acquire, timeout=0)
        assert caught.value.names == (name,)
        with pytest.raises(LockTimeoutError, match="max_lock_connections"):
            await other.call(lock(world, engine, name + "2").acquire, timeout=0)
        assert await other.call(one.is_held) is True
        assert await other.call(lock(world, engine, name + "2").is_held) is False
        assert time.monotonic() - start < FAR


async def test_a_waiter_that_gives_up_leaves_its_turn_to_the_next(world: World, name: str) -> None:
    """At the limit, timeouts and cancellations lose no slot: afterwards all slots can be used."""
    engine = world.engine()
    configure(engine, max_lock_connections=2)
    for _ in range(3):
        held = [await world.call(lock(world, engine, f"{name}{n}").acquire) for n in range(2)]
        waiting = [
            asyncio.create_task(world.other().call(lock(world, engine, f"{name}w{n}").acquire, timeout=0.2))
            for n in range(4)
        ]
        await asyncio.sleep(0.05)
        if world.is_async:
            waiting[0].cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, (LockTimeoutError, asyncio.CancelledError)) for result in results)
        for one in held:
            await world.call(one.release)
    async with world.enter(lock(world, engine, name + "a").hold(timeout=20)):
        async with world.enter(lock(world, engine, name + "b").hold(timeout=20)):
            pass


@pytest.mark.every_driver
async def test_connections_that_died_free_their_slots(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """After each of ten killed connections, idle or holding, at a limit of one, the next lock is granted."""
    engine = labelled(world, name)
    configure(engine, max_lock_connections=1)
    for number in range(10):
        held = await world.call(lock(world, engine, name).acquire, timeout=5)
        if number % 2:
            await world.call(held.release)
        for row in sessions(admin, name):
            admin.execute("SELECT pg_terminate_backend(%s, 5000)", [row.pid])
        with contextlib.suppress(Exception):
            await world.call(held.release)
    async with world.enter(lock(world, engine, name).hold(timeout=5)):
        assert len(sessions(admin, name)) == 1


def test_a_process_without_more_threads_keeps_its_connection_slots(
    dsn: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no thread can be started to open a connection, Python's error is raised, and a later call succeeds."""
    engine = create_engine(World("psycopg", dsn).url)
    configure(engine, max_lock_connections=2)
    one = AdvisoryLock(engine, name)
    begin = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "pgfence-opener":
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refused)
        for _ in range(4):
            with pytest.raises(RuntimeError, match="new thread"):
                one.acquire(timeout=0)
    one.acquire(timeout=1).release()
    engine.dispose()


async def test_separate_locks_do_not_share_a_session(
    world: World, name: str, admin: psycopg.Connection[Any], advisory_rows: Callable[[], list[Any]]
) -> None:
    """Rule 1: a dead session harms exactly one hold."""
    engine = world.engine()
    one = await world.call(lock(world, engine, name + "1").acquire)
    two = await world.call(lock(world, engine, name + "2").acquire)
    pids = {row.pid for row in advisory_rows()}
    assert len(pids) == 2
    admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pids.pop()])
    await eventually(lambda: one.lost or two.lost)
    await asyncio.sleep(0.1)
    assert [one.state, two.state].count("held") == 1
    for held in (one, two):
        with contextlib.suppress(Exception):
            await world.call(held.release)


async def test_a_lock_engine_is_where_locks_live(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """configure(lock_engine=...), an engine or a function: lock connections use it, the other engine opens none."""
    direct = labelled(world, name)
    for given in (direct, lambda: direct):
        engine = labelled(world, name + ":app")
        configure(engine, lock_engine=given, namespace="n")
        async with world.enter(lock(world, engine, name).hold()) as held:
            assert sessions(admin, name)
            assert sessions(admin, name + ":app") == []
            assert held.keys == (LockKey.of(name, namespace="n"),)
            assert await world.call(lock(world, engine, name).is_held)


@pytest.mark.every_driver
async def test_a_cancelled_or_timed_out_opener_leaves_no_connection(
    world: World, name: str, dsn: str, make_proxy: Callable[[str], Any], admin: psycopg.Connection[Any]
) -> None:
    """A connection that is there too late is kept for the next one or closed: never lost."""
    proxy = make_proxy(dsn)
    engine = labelled_at(world, name, proxy.dsn)
    proxy.delay(0.05)
    one = lock(world, engine, name)
    for _ in range(3):
        if world.is_async:
            task = asyncio.create_task(world.call(one.acquire, timeout=5))
            await asyncio.sleep(0.06)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    proxy.delay(0)
    async with world.enter(one.hold(timeout=5)):
        assert not is_free(admin, name)
    await eventually(lambda: len(sessions(admin, name)) <= 4)
    await world.call(engine.dispose)
    await eventually(lambda: sessions(admin, name) == [])


def labelled_at(world: World, label: str, dsn: str) -> Any:
    arguments = (
        {"server_settings": {"application_name": label}} if world.name == "asyncpg" else {"application_name": label}
    )
    return world.engine(dsn=dsn, connect_args=arguments)


async def test_handing_back_and_forth_opens_nothing_new(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """Rejections, timeouts and grants in turn use one connection."""
    engine = labelled(world, name)
    with elsewhere(dsn, name) as rival:
        for _ in range(3):
            assert await world.call(lock(world, engine, name).try_acquire) is None
            with pytest.raises(LockTimeoutError):
                await world.call(lock(world, engine, name).acquire, timeout=0.12)
        give(rival, name)
        async with world.enter(lock(world, engine, name).hold()):
            pass
        assert len(sessions(admin, name)) == 1
