"""A lost lock is noticed at once, callbacks are called, and the handle never turns back to held."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import pgfence
from pgfence.config import configure
from pgfence.errors import LockLostError, LockNotHeldError, LockTimeoutError, UnreachableError
from support.locking import (
    background,
    elsewhere,
    freed,
    give,
    is_free,
    labelled,
    lock,
    sessions,
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


def kill(admin: psycopg.Connection[Any], label: str) -> None:
    """End every session of an engine."""
    for row in sessions(admin, label):
        terminate(admin, row.pid)


@pytest.mark.every_driver
async def test_a_killed_backend_is_a_loss_at_once(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C042: the handle is lost without a further statement and stays lost, and other contenders can lock."""
    held = await world.call(lock(world, labelled(world, name), name).acquire)
    kill(admin, name)
    await eventually(lambda: held.lost)
    assert (held.state, held.loss_reason) == ("lost", "killed")
    with pytest.raises(LockLostError, match=f"'{name}'") as caught:
        held.check()
    assert (caught.value.names, caught.value.reason) == ((name,), "killed")
    await freed(admin, name)
    with pytest.raises(LockLostError):
        await world.call(held.release)
    with pytest.raises(LockNotHeldError):
        await world.call(held.release)
    assert (held.state, held.lost) == ("lost", True)


async def test_callbacks_are_called_once_where_they_belong(
    world: World, name: str, admin: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Each callback is called once, a late one at once, a sync one on our thread; a failing one stops no other."""
    held = await world.call(lock(world, labelled(world, name), name).acquire)
    calls: list[tuple[str, str]] = []

    def note(label: str) -> Callable[[], None]:
        return lambda: calls.append((label, threading.current_thread().name))

    held.on_lost(note("first"))
    held.on_lost(lambda: 1 / 0)
    held.on_lost(note("second"))
    with caplog.at_level(logging.ERROR, "pgfence"):
        kill(admin, name)
        await eventually(lambda: len(calls) == 2)
    assert "ZeroDivisionError" in caplog.text
    held.on_lost(note("late"))
    await eventually(lambda: len(calls) == 3)
    assert [label for label, _ in calls] == ["first", "second", "late"]
    threads = {thread for _, thread in calls}
    assert threads == ({threading.current_thread().name} if world.is_async else threads - {"contender", "MainThread"})
    await asyncio.sleep(0.05)
    assert len(calls) == 3
    with pytest.raises(LockLostError):
        await world.call(held.release)


@pytest.mark.sync_only
async def test_a_callback_that_exits_stops_no_other_callback(
    world: World, name: str, admin: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """SystemExit is logged, because it would only end the thread that runs all callbacks."""
    held = await world.call(lock(world, labelled(world, name), name).acquire)
    calls: list[str] = []
    held.on_lost(sys.exit)
    held.on_lost(lambda: calls.append("second"))
    with caplog.at_level(logging.ERROR, "pgfence"):
        kill(admin, name)
        await eventually(lambda: calls)
    assert "SystemExit" in caplog.text
    with pytest.raises(LockLostError):
        await world.call(held.release)


async def test_a_callback_that_cannot_be_called_is_rejected(world: World, name: str) -> None:
    """A sync handle rejects a coroutine function too, because nothing would await it."""

    async def callback() -> None: ...

    async with world.enter(lock(world, world.engine(), name).hold()) as held:
        with pytest.raises(TypeError, match="NoneType"):
            held.on_lost(None)
        if not world.is_async:
            with pytest.raises(TypeError, match="coroutine function"):
                held.on_lost(callback)


@pytest.mark.async_only
async def test_a_coroutine_function_is_awaited_on_the_loop(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """An async handle's callback may be async; it runs on the loop that acquired."""
    held = await lock(world, labelled(world, name), name).acquire()
    loops = []

    async def callback() -> None:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())

    held.on_lost(callback)
    kill(admin, name)
    await eventually(lambda: loops == [asyncio.get_running_loop()])
    with pytest.raises(LockLostError):
        await held.release()


async def test_a_callback_may_use_the_lock_itself(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """No internal lock is held while a callback runs, so it may query, release or acquire the lock."""
    engine = labelled(world, name)
    held = await world.call(lock(world, engine, name).acquire)
    taken: list[Any] = []

    def sync() -> None:
        with pytest.raises(LockLostError):
            held.release()
        taken.append(lock(world, engine, name).acquire(timeout=5))

    async def asynchronous() -> None:
        with pytest.raises(LockLostError):
            await held.release()
        taken.append(await lock(world, engine, name).acquire(timeout=5))

    held.on_lost(world.pick(sync, asynchronous))
    kill(admin, name)
    await eventually(lambda: taken)
    assert taken[0].state == "held"
    await world.call(taken[0].release)


@pytest.mark.sync_only
async def test_a_slow_callback_does_not_delay_another_lock(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """While one callback blocks, another loss is noticed and a lock whose handle was dropped is freed."""
    engine, gate, entered = labelled(world, name), threading.Event(), threading.Event()
    one = await world.call(lock(world, engine, name).acquire)
    one.on_lost(lambda: (entered.set(), gate.wait(30)))
    kill(admin, name)
    assert await asyncio.to_thread(entered.wait, 5)
    try:
        two = await world.call(lock(world, engine, name + "2").acquire)
        kill(admin, name)
        await eventually(lambda: two.lost)
        three = await world.call(lock(world, engine, name + "3").acquire)
        with pytest.warns(ResourceWarning):
            del three
            await world.call(int)
            gc.collect()
        await freed(admin, name + "3")
    finally:
        gate.set()
    for held in (one, two):
        with pytest.raises(LockLostError):
            await world.call(held.release)


async def test_wait_lost_waits_for_the_loss(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """wait_lost() returns False after its timeout, True at the loss, and True at once after it."""
    held = await world.call(lock(world, labelled(world, name), name).acquire)
    start = time.monotonic()
    assert await world.call(held.wait_lost, 0.1) is False
    assert 0.09 < time.monotonic() - start < FAR
    assert await world.call(held.wait_lost, 0) is False
    async with background(world.other().call(held.wait_lost)) as task:
        await asyncio.sleep(0.05)
        assert not task.done()
        kill(admin, name)
        assert await task is True
    assert await world.call(held.wait_lost, 0) is True
    assert await world.call(held.wait_lost) is True
    with pytest.raises(LockLostError):
        await world.call(held.release)


async def test_wait_lost_ends_when_the_lock_is_released(world: World, name: str) -> None:
    """A release ends `wait_lost` with False."""
    held = await world.call(lock(world, world.engine(), name).acquire)
    async with background(world.other().call(held.wait_lost)) as task:
        await asyncio.sleep(0.05)
        await world.call(held.release)
        assert await asyncio.wait_for(asyncio.shield(task), 20) is False
    assert await asyncio.wait_for(world.other().call(held.wait_lost), 20) is False


@pytest.mark.async_only
@pytest.mark.every_driver
async def test_an_async_body_is_cancelled_with_the_reason(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Async: the block is cancelled where it waits, and raises LockLostError instead of a cancellation."""
    engine, ended = labelled(world, name), []
    with pytest.raises(LockLostError) as caught:
        async with lock(world, engine, name).hold():
            kill(admin, name)
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError as error:
                ended.append(error.args)
                raise
    assert ended == [("the lock was lost",)]
    assert caught.value.names == (name,)
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)  # nothing is left of the cancellation


@pytest.mark.sync_only
async def test_a_sync_body_finds_out_and_the_end_says_so(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Sync: check() raises inside the block, and leaving it after a loss raises LockLostError."""
    one = lock(world, labelled(world, name), name)
    with pytest.raises(LockLostError):
        async with world.enter(one.hold()) as held:
            kill(admin, name)
            await eventually(lambda: held.lost)
    with pytest.raises(LockLostError):
        async with world.enter(one.hold(timeout=5)) as held:
            kill(admin, name)
            await eventually(lambda: held.lost)
            held.check()


async def test_flag_leaves_the_body_alone(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """With on_loss="flag", a loss only sets `lost`; it neither cancels the block nor raises at its end."""
    async with world.enter(lock(world, labelled(world, name), name).hold(on_loss="flag")) as held:
        kill(admin, name)
        await eventually(lambda: held.lost)
        await asyncio.sleep(0.05)
    assert (held.state, held.loss_reason) == ("lost", "killed")
    await freed(admin, name)


async def test_the_bodys_exception_wins(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C005: the block's ValueError propagates, with a note about the loss."""
    for on_loss in ("cancel", "flag"):
        with pytest.raises(ValueError, match="body") as caught:
            async with world.enter(lock(world, labelled(world, name), name).hold(on_loss=on_loss, timeout=5)) as held:
                kill(admin, name)
                try:
                    await eventually(lambda held=held: held.lost)
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    assert world.is_async
                raise ValueError("body")
        notes = getattr(caught.value, "__notes__", [])
        assert [name in note and "LockLostError" in note for note in notes] == (
            [True] if on_loss == "cancel" else notes
        )


@pytest.mark.async_only
async def test_a_body_that_swallows_its_cancellation_raises_at_its_end(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Async: a block that catches the cancellation raises LockLostError at its end; the task is not left cancelled."""
    with pytest.raises(LockLostError):
        async with lock(world, labelled(world, name), name).hold():
            kill(admin, name)
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                pass
            await asyncio.sleep(0.01)
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)


@pytest.mark.async_only
async def test_an_outer_cancel_at_the_same_time_goes_on(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Async: a task that was also cancelled from outside ends as cancelled."""
    engine, entered = labelled(world, name), asyncio.Event()

    async def work() -> None:
        async with lock(world, engine, name).hold():
            entered.set()
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                task.cancel("outer")  # before the block ends
                raise

    task = asyncio.create_task(work())
    await entered.wait()
    kill(admin, name)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    await freed(admin, name)


@pytest.mark.async_only
@pytest.mark.every_driver
async def test_an_outer_timeout_is_still_a_timeout(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Async: asyncio.timeout() around the block ends it with TimeoutError, and the lock is free."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            async with lock(world, world.engine(), name).hold():
                await asyncio.sleep(10)
    await freed(admin, name)
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.every_driver
async def test_a_loss_at_the_very_end_of_the_block_is_a_loss_or_a_release(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C005: a block whose session is killed at its end raises LockLostError or nothing, never a driver's error."""
    engine = labelled(world, name)
    outcomes = set()
    for number in range(12):
        held = await world.call(lock(world, engine, name).acquire, timeout=5)
        (pid,) = [row.pid for row in sessions(admin, name)][:1]
        killing = asyncio.create_task(asyncio.to_thread(admin.execute, f"SELECT pg_terminate_backend({pid})"))
        await asyncio.sleep(number * 0.0004)
        try:
            async with world.enter(held):
                pass
            outcomes.add("released")
        except LockLostError:
            outcomes.add("lost")
        await killing
        assert held.state in ("lost", "released")
        await freed(admin, name)
        if world.is_async:
            assert asyncio.current_task().cancelling() == 0
    assert outcomes


@pytest.mark.every_driver
async def test_a_loss_found_by_the_unlock_raises(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C005: if the application has unlocked the key on the session, release() raises LockLostError with the name."""
    engine = world.engine()
    held = await world.call(lock(world, engine, name).acquire)
    await behind_our_back(world, held)
    with pytest.raises(LockLostError, match=f"'{name}'"):
        await world.call(held.release)
    assert held.state == "lost"
    async with world.enter(lock(world, engine, name).hold(timeout=20)):
        assert not is_free(admin, name)


async def behind_our_back(world: World, held: Any) -> None:
    driver = held._hold.session.driver.raw
    if world.name == "psycopg2":
        await world.call(driver.cursor().execute, "SELECT pg_advisory_unlock_all()")
    else:
        await world.call(driver.execute, "SELECT pg_advisory_unlock_all()")


@pytest.mark.every_driver
async def test_a_killed_waiter_goes_on_waiting(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """C042: a session that ends while it waits is replaced within the same timeout, and the lock is granted."""
    engine, other = labelled(world, name), world.other()
    with elsewhere(dsn, name) as holder:
        async with background(other.call(lock(world, engine, name).acquire, timeout=20)) as task:
            await eventually(waits(admin, name))
            kill(admin, name)
            await eventually(waits(admin, name))
            assert not task.done()
            give(holder, name)
            held = await task
        held.check()
        await other.call(held.release)


@pytest.mark.every_driver
async def test_a_waiter_that_is_killed_again_and_again_is_not_granted(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """Rule 21: a waiter whose sessions all end at once retries until its deadline, and then holds nothing."""
    engine, other = labelled(world, name), world.other()
    with elsewhere(dsn, name):
        async with background(other.call(lock(world, engine, name).acquire, timeout=2)) as task:
            while not task.done():
                kill(admin, name)
                await asyncio.sleep(0.01)
            with pytest.raises((UnreachableError, LockTimeoutError)) as caught:
                await task
            assert caught.value.retryable
    await freed(admin, name)


@pytest.mark.every_driver
async def test_a_cancelled_statement_of_a_waiter_leaves_nothing(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """Rule 13: after pg_cancel_backend on a waiter, none of its locks is left, and other waiters are served."""
    engine, other = labelled(world, name), world.other()
    with elsewhere(dsn, name) as holder:
        async with background(other.call(lock(world, engine, name).acquire, timeout=20)) as task:
            await eventually(waits(admin, name))
            for row in sessions(admin, name):
                admin.execute("SELECT pg_cancel_backend(%s)", [row.pid])
            give(holder, name)
            done, _ = await asyncio.wait([task], timeout=3)
            if task in done and task.exception() is None:
                await other.call(task.result().release)
        take(holder, name)
        give(holder, name)
    async with world.enter(lock(world, engine, name).hold(timeout=5)):
        pass


async def test_events_tell_of_a_loss(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """configure(on_event=...) receives "lost" once, and no "released" after it."""
    engine, seen = labelled(world, name), []
    configure(engine, on_event=lambda event: seen.append(event.event))
    held = await world.call(lock(world, engine, name).acquire)
    kill(admin, name)
    await eventually(lambda: held.lost and "lost" in seen)
    with pytest.raises(LockLostError):
        await world.call(held.release)
    assert seen == ["acquired", "lost"]


async def test_current_shows_a_lost_handle_until_its_block_ends(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Inside a block whose lock was lost, current().check() raises LockLostError, not LockNotHeldError."""
    kind = world.pick(pgfence.Held, pgfence.AsyncHeld)
    async with world.enter(lock(world, labelled(world, name), name).hold(on_loss="flag")) as held:
        kill(admin, name)
        await eventually(lambda: held.lost)
        assert await world.call(pgfence.current, kind) is held
    with pytest.raises(LockNotHeldError):
        await world.call(pgfence.current, kind)


async def test_one_loss_of_two_leaves_the_other(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Nested holds have separate sessions: after the inner hold is lost, the outer one is still held."""
    outer_engine, inner_engine = world.engine(), labelled(world, name)
    with pytest.raises(LockLostError) as caught:
        async with world.enter(lock(world, outer_engine, name + "outer").hold()) as outer:
            try:
                async with world.enter(lock(world, inner_engine, name).hold()) as inner:
                    kill(admin, name)
                    await eventually(lambda: inner.lost)
                    await asyncio.sleep(0.05)
            finally:
                assert outer.state == "held"
                outer.check()
                assert not is_free(admin, name + "outer")
    assert caught.value.names == (name,)
    assert outer.state == "released"
