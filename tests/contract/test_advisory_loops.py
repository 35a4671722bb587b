"""Engines, locks and blocks that are shared by threads, tasks and event loops, or belong to the other twin."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import threading
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

import pgfence
from pgfence import AdvisoryLock, AsyncAdvisoryLock
from pgfence.config import configure
from pgfence.errors import LockLostError, UnsupportedServerError
from support.locking import background, freed, is_free, labelled, lock, remembered, sessions, standing, terminate
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

ASYNC_URLS = ["psycopg", "asyncpg"]


def label_arguments(driver: str, label: str) -> dict[str, Any]:
    return {"server_settings": {"application_name": label}} if driver == "asyncpg" else {"application_name": label}


@pytest.fixture(params=ASYNC_URLS)
def async_engine(request: pytest.FixtureRequest, dsn: str, name: str) -> Any:
    """An async engine that no loop has used yet."""
    url = f"postgresql+{request.param}://{dsn.split('://', 1)[1]}"
    return create_async_engine(url, connect_args=label_arguments(request.param, name))


def test_one_engine_in_one_loop_after_another(async_engine: Any, name: str, admin: psycopg.Connection[Any]) -> None:
    """Repeated asyncio.run(): each loop has separate connections, which end with it."""

    async def main() -> None:
        async with AsyncAdvisoryLock(async_engine, name).hold(timeout=5):
            assert not is_free(admin, name)
            assert len(sessions(admin, name)) == 1

    for _ in range(3):
        asyncio.run(main())
        eventually(lambda: sessions(admin, name) == [])


def test_a_loop_that_ends_with_a_lock_held_frees_it(
    async_engine: Any, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The connection is closed with the loop, and the handle is lost or released, not held."""

    async def main() -> Any:
        return await AsyncAdvisoryLock(async_engine, name).acquire(timeout=5)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        held = asyncio.run(main())
        eventually(lambda: is_free(admin, name))
        assert held.state != "held"
        del held
        gc.collect()
    asyncio.run(use_and_dispose(async_engine, name))


@pytest.mark.parametrize(("driver", "no_tls"), [("psycopg", "sslmode"), ("asyncpg", "ssl")])
def test_a_loop_that_ends_while_connecting_leaves_nothing_half_open(driver: str, no_tls: str) -> None:
    """The socket is closed with the loop, so the server does not wait for the rest of a login."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        engine = create_async_engine(
            f"postgresql+{driver}://me@127.0.0.1:{listening.getsockname()[1]}/x?{no_tls}=disable"
        )

        async def main() -> socket.socket:
            asking = asyncio.ensure_future(AsyncAdvisoryLock(engine, "half open").acquire(timeout=20))
            login, _ = await asyncio.to_thread(listening.accept)
            assert await asyncio.to_thread(login.recv, 1000)
            asking.cancel()
            return login

        gc.collect()
        gc.disable()
        try:
            with asyncio.run(main()) as login:
                login.settimeout(5)
                assert login.recv(1000) == b""
        finally:
            gc.enable()


async def use_and_dispose(engine: Any, name: str) -> None:
    async with AsyncAdvisoryLock(engine, name).hold(timeout=5):
        pass
    await engine.dispose()


def test_two_loops_at_the_same_time(async_engine: Any, name: str, admin: psycopg.Connection[Any]) -> None:
    """Two threads with a loop each and one engine: they exclude each other through the server, and both are served."""
    inside, most = [0], [0]

    async def main() -> None:
        for _ in range(10):
            async with AsyncAdvisoryLock(async_engine, name).hold(timeout=20):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                await asyncio.sleep(0.001)
                inside[0] -= 1

    threads = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1]
    eventually(lambda: sessions(admin, name) == [])


def test_a_loop_that_ends_while_tasks_wait(async_engine: Any, name: str, admin: psycopg.Connection[Any]) -> None:
    """Waiters in the queue, in the server and for a connection are cancelled with their loop, and leave nothing."""
    configure(async_engine, max_lock_connections=2)

    async def main() -> None:
        held = await AsyncAdvisoryLock(async_engine, name).acquire(timeout=5)
        for other in (name, name, name + "2", name + "3"):
            main.tasks.append(asyncio.create_task(AsyncAdvisoryLock(async_engine, other).acquire(timeout=50)))
        await asyncio.sleep(0.1)
        await held.release()

    main.tasks = []  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.run(main())
        main.tasks.clear()  # type: ignore[attr-defined]
        gc.collect()
        eventually(lambda: sessions(admin, name) == [])
    assert is_free(admin, name)


@pytest.mark.twins
async def test_a_handle_may_be_released_by_another_contender(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A worker can release a handle that it was given; the contender that acquired it can then lock again."""
    one, other = lock(world, world.engine(), name), world.other()
    for _ in range(3):
        held = await world.call(one.acquire, timeout=5)
        await other.call(held.release)
        assert is_free(admin, name)


@pytest.mark.twins
async def test_a_contender_that_ended_leaves_its_handle_to_others(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """After the thread or task that acquired a handle has ended, the lock is held, and any contender can release it."""
    engine = world.engine()
    if world.is_async:
        held = await asyncio.create_task(AsyncAdvisoryLock(engine, name).acquire())
    else:
        box: list[Any] = []
        thread = threading.Thread(target=lambda: box.append(AdvisoryLock(engine, name).acquire()))
        thread.start()
        thread.join()
        held = box.pop()
    gc.collect()
    held.check()
    assert not is_free(admin, name)
    await world.call(held.release)
    assert is_free(admin, name)


@pytest.mark.twins
async def test_an_engine_of_the_other_kind_is_rejected(world: World, name: str) -> None:
    """The sync Engine of an AsyncEngine, or a function that returns the wrong kind, raises a clear error at once."""
    engine = world.engine()
    if world.is_async:
        with pytest.raises((UnsupportedServerError, TypeError)):
            await asyncio.to_thread(AdvisoryLock(engine.sync_engine, name).try_acquire)
        with pytest.raises((UnsupportedServerError, TypeError)):
            await asyncio.to_thread(AdvisoryLock(lambda: engine, name).try_acquire)
    else:
        with pytest.raises(TypeError, match="AsyncAdvisoryLock"):
            await AsyncAdvisoryLock(lambda: engine, name).try_acquire()


@pytest.mark.twins
async def test_a_lock_engine_of_the_other_kind_is_rejected(world: World, name: str, dsn: str) -> None:
    """configure(lock_engine=...) with the wrong kind of engine: TypeError that names the setting."""
    rest = dsn.split("://", 1)[1]
    wrong = world.pick(
        create_async_engine(f"postgresql+asyncpg://{rest}"), create_engine(f"postgresql+psycopg://{rest}")
    )
    engine = world.engine()
    with pytest.raises(TypeError, match="lock_engine"):
        configure(engine, lock_engine=wrong)
        await world.call(lock(world, engine, name).try_acquire)


@pytest.mark.twins
async def test_one_block_object_shared_by_contenders(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A shared `guard = lock.hold()`: leaving the block ends the hold of the contender that leaves, also after a loss."""
    engine, other = labelled(world, name), world.other()
    guard = lock(world, engine, name).hold(timeout=10)
    enter, leave = world.pick(("__enter__", "__exit__"), ("__aenter__", "__aexit__"))
    first = await world.call(getattr(guard, enter))
    for row in sessions(admin, name):
        terminate(admin, row.pid)
    try:
        await eventually(lambda: first.lost)
        await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        assert world.is_async
    second = await other.call(getattr(guard, enter))
    with pytest.raises(LockLostError):
        await world.call(getattr(guard, leave), None, None, None)
    assert second.state == "held"
    assert not is_free(admin, name)
    await other.call(getattr(guard, leave), None, None, None)
    assert is_free(admin, name)


@pytest.mark.twins
async def test_nothing_is_remembered_of_names_that_were_locked(world: World, name: str) -> None:
    """After many names, one after the other, no queue, entry or hold stays in memory."""
    engine = world.engine()
    for number in range(50):
        one = lock(world, engine, f"{name}:{number}")
        async with world.enter(one.hold()):
            assert await world.other().call(one.try_acquire) is None
    assert remembered(engine) == 0
    assert standing(engine) == 0
    with pytest.raises(pgfence.errors.LockNotHeldError):
        await world.call(pgfence.current, world.pick(pgfence.Held, pgfence.AsyncHeld))


@pytest.mark.matrix
@pytest.mark.twins
@pytest.mark.parametrize("timeout", [math.inf, timedelta.max, 1e9, 3_000_000], ids=str)
async def test_the_longest_waits_are_waits(
    world: World, name: str, timeout: Any, admin: psycopg.Connection[Any]
) -> None:
    """Infinite timeouts, and those too long for a clock or for lock_timeout, wait in the queue and in the server."""
    one, two = world.engine(), world.engine()
    here, there = world.other(), world.other()
    held = await world.call(lock(world, one, name).acquire)
    async with background(here.call(lock(world, one, name).acquire, timeout=timeout)) as mine:
        async with background(there.call(lock(world, two, name).acquire, timeout=timeout)) as theirs:
            await eventually(lambda: standing(one) == 1)
            await asyncio.sleep(0.05)
            await world.call(held.release)
            places = {mine: here, theirs: there}
            while places:
                done, _ = await asyncio.wait(places, timeout=10, return_when=asyncio.FIRST_COMPLETED)
                (task,) = done
                await places.pop(task).call((await task).release)
    await freed(admin, name)


@pytest.mark.twins
async def test_a_wait_that_hardly_waits(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A timeout of a nanosecond acquires a free lock, and ends the wait for a held one."""
    one, other = world.engine(), world.other()
    async with other.enter(lock(world, world.engine(), name).hold()):
        with pytest.raises(pgfence.errors.LockTimeoutError):
            await world.call(lock(world, one, name).acquire, timeout=1e-9)
    async with world.enter(lock(world, one, name).hold(timeout=1e-9)):
        assert not is_free(admin, name)


async def test_drivers_own_options_do_not_matter(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """The lock works without prepared statements, and with the driver's other row factories and codecs."""
    options: dict[str, dict[str, Any]] = {
        "psycopg": {"prepare_threshold": None},
        "psycopg_async": {"prepare_threshold": 0},
        "psycopg2": {"options": "-c lock_timeout=50"},
        "asyncpg": {"statement_cache_size": 0},
    }
    engine, rival = world.engine(connect_args=options[world.name]), world.engine()
    async with world.enter(lock(world, engine, name, name + "2").hold()):
        assert not is_free(admin, name)
    async with world.enter(lock(world, rival, name).hold()):
        with pytest.raises(pgfence.errors.LockTimeoutError):
            await world.other().call(lock(world, engine, name).acquire, timeout=0.7)
