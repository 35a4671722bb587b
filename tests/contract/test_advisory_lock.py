"""AdvisoryLock: try_acquire, acquire, hold, release, holders and is_held."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import pickle
import threading
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

import pgfence
from pgfence.config import configure
from pgfence.errors import LockNotHeldError, LockTimeoutError, SelfDeadlockError
from pgfence.keys import LockKey
from support.locking import background, elsewhere, give, is_free, labelled, lock, sessions, terminate, waits
from support.rows import every_row
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins

BAD_TIMES = [(-1, ValueError), (math.nan, ValueError), ("1", TypeError), (True, TypeError), ([], TypeError)]
KEYS = [LockKey.raw(n) for n in (0, 1, -1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63))] + [LockKey.pair(-1, 2**31 - 1)]


def kind(world: World) -> Any:
    return world.pick(pgfence.Held, pgfence.AsyncHeld)


@pytest.mark.every_driver
async def test_a_free_lock_is_acquired_and_released(
    world: World, name: str, admin: psycopg.Connection[Any], advisory_rows: Callable[[], list[Any]]
) -> None:
    """try_acquire returns a handle, the server shows one exclusive lock with the documented key, release removes it."""
    held = await world.call(lock(world, world.engine(), name).try_acquire)
    (row,) = advisory_rows()
    key = LockKey.of(name)
    assert isinstance(held, kind(world))
    assert (held.names, held.keys, held.state, held.lost, held.loss_reason) == ((name,), (key,), "held", False, None)
    assert ((row.classid << 32 | row.objid) & (2**64 - 1), row.objsubid, row.mode) == (
        key.value & (2**64 - 1),
        1,
        "ExclusiveLock",
    )
    held.check()
    assert not is_free(admin, name)
    await world.call(held.release)
    assert held.state == "released"
    assert is_free(admin, name)


async def test_a_failed_try_returns_none_and_holds_nothing(world: World, name: str, dsn: str) -> None:
    """C018: a try on a held lock returns None, not an object that looks true, and holds nothing."""
    one = lock(world, world.engine(), name)
    with elsewhere(dsn, name) as holder:
        assert await world.call(one.try_acquire) is None
        assert give(holder, name)
        assert is_free(holder, name)


@pytest.mark.async_only
async def test_a_try_that_is_not_awaited_warns(world: World, name: str) -> None:
    """C018: an async try without await is a coroutine that never ran: Python warns, nothing is held."""
    with pytest.warns(RuntimeWarning, match="never awaited"):
        bool(lock(world, world.engine(), name).try_acquire())
        gc.collect()


async def test_acquire_without_waiting_names_the_holder_at_once(world: World, name: str, dsn: str) -> None:
    """timeout=0 does not wait; the error names the holder."""
    engine = world.engine()
    with elsewhere(dsn, name, label="other-deploy") as holder:
        start = time.monotonic()
        with pytest.raises(LockTimeoutError) as caught:
            await world.call(lock(world, engine, name).acquire, timeout=0)
        assert time.monotonic() - start < FAR
        (seen,) = caught.value.holders
        assert (seen.application_name, seen.backend_pid) == ("other-deploy", holder.info.backend_pid)
        assert caught.value.timeout == 0


@pytest.mark.every_driver
async def test_a_timeout_names_the_lock_and_its_holder_without_secrets(
    world: World, name: str, dsn: str, role: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """C040: name, key, holder's application and backend in the error; a "waiting" line before it; never the password."""
    login = role()
    password = login.split("@")[0].rsplit(":", 1)[1]
    engine = world.engine(dsn=login)
    with elsewhere(login, name, label="other-deploy") as holder, caplog.at_level(logging.INFO, "pgfence"):
        with pytest.raises(TimeoutError) as caught:
            await world.call(lock(world, engine, name).acquire, timeout=1)
        pid = holder.info.backend_pid
    error = caught.value
    assert isinstance(error, LockTimeoutError)
    assert (error.names, error.keys, error.timeout, error.held_here) == ((name,), (LockKey.of(name),), 1, ())
    (seen,) = error.holders
    assert (seen.name, seen.kind, seen.mode, seen.backend_pid) == (name, "advisory", "exclusive", pid)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("pgfence")]
    assert any("waiting" in line for line in told)
    for text in (str(error), *told):
        assert name in text
        assert "other-deploy" in text
        assert str(pid) in text
        assert password not in text
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.holders, again.keys) == (str(error), error.holders, error.keys)


@pytest.mark.matrix
@pytest.mark.every_driver
@pytest.mark.parametrize("timeout", [0.2, timedelta(milliseconds=200)], ids=["number", "timedelta"])
async def test_a_wait_ends_at_its_timeout(world: World, name: str, dsn: str, timeout: Any) -> None:
    """A timeout in seconds or as a timedelta ends the wait neither earlier nor much later."""
    one = lock(world, world.engine(), name)
    await world.call((await world.call(one.acquire)).release)  # a connection is there
    with elsewhere(dsn, name):
        start = time.monotonic()
        with pytest.raises(LockTimeoutError):
            await world.call(one.acquire, timeout=timeout)
        assert 0.19 < time.monotonic() - start < FAR


async def test_the_configured_default_holds_where_a_call_says_nothing(world: World, name: str, dsn: str) -> None:
    """timeout=None is the configured default, in acquire and in hold."""
    engine = world.engine()
    configure(engine, default_timeout=timedelta(seconds=0.15))
    with elsewhere(dsn, name):
        with pytest.raises(LockTimeoutError) as caught:
            await world.call(lock(world, engine, name).acquire)
        assert caught.value.timeout == 0.15
        with pytest.raises(LockTimeoutError) as caught:
            async with world.enter(lock(world, engine, name).hold()):
                pass
        assert caught.value.timeout == 0.15


async def test_infinity_waits_until_it_is_free(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """math.inf waits without a limit."""
    with elsewhere(dsn, name) as holder:
        async with background(world.other().call(lock(world, world.engine(), name).acquire, timeout=math.inf)) as task:
            await eventually(waits(admin, name))
            give(holder, name)
            held = await asyncio.wait_for(task, 20)
    await world.call(held.release)


@every_row(("value", "error"), BAD_TIMES)
async def test_an_invalid_timeout_is_rejected_before_anything_is_sent(
    world: World, name: str, value: Any, error: type[Exception], admin: psycopg.Connection[Any]
) -> None:
    """A negative number, NaN, a str or a bool is an error in every method, before a connection is opened."""
    one = lock(world, labelled(world, name), name)
    with pytest.raises(error):
        await world.call(one.acquire, timeout=value)
    with pytest.raises(error):
        async with world.enter(one.hold(timeout=value)):
            pass
    with pytest.raises(error):
        async with world.enter(one.connect(timeout=value)):
            pass
    assert sessions(admin, name) == []


async def test_on_loss_accepts_two_values(world: World, name: str) -> None:
    """Any other value of on_loss is a ValueError when hold() is called."""
    with pytest.raises(ValueError, match="on_loss"):
        lock(world, world.engine(), name).hold(on_loss="ignore")


async def test_a_released_handle_cannot_begin_a_block(world: World, name: str) -> None:
    """The block would run without the lock, and would end without an error."""
    held = await world.call(lock(world, world.engine(), name).acquire)
    async with world.enter(held):
        pass
    with pytest.raises(LockNotHeldError, match="already released"):
        async with world.enter(held):
            pass


async def test_released_twice_is_an_error(world: World, name: str) -> None:
    """C006: the second release has nothing to release and raises; the first one is unaffected."""
    held = await world.call(lock(world, world.engine(), name).acquire)
    await world.call(held.release)
    with pytest.raises(LockNotHeldError, match="already released") as caught:
        await world.call(held.release)
    assert caught.value.names == (name,)
    with pytest.raises(LockNotHeldError):
        held.check()


async def test_two_contenders_release_one_handle(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Exactly one of two concurrent releases succeeds."""
    one = lock(world, world.engine(), name)
    others = [world.other() for _ in range(4)]
    for _ in range(10):
        held = await world.call(one.acquire)
        results = await asyncio.gather(*(other.call(held.release) for other in others), return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["LockNotHeldError"] * 3 + ["NoneType"]
        assert is_free(admin, name)


async def test_a_handle_is_a_context_manager(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Leaving `with held:` releases it; after a release inside, leaving does nothing more."""
    one = lock(world, world.engine(), name)
    held = await world.call(one.acquire)
    async with world.enter(held) as same:
        assert same is held
        assert not is_free(admin, name)
    assert is_free(admin, name)
    async with world.enter(await world.call(one.acquire)) as held:
        await world.call(held.release)
    assert held.state == "released"


async def test_hold_releases_however_the_block_ends(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C003: at a normal end, after an exception, which propagates unchanged, and after a release inside the block."""
    one = lock(world, world.engine(), name)
    async with world.enter(one.hold()) as held:
        assert held.state == "held"
    assert (held.state, is_free(admin, name)) == ("released", True)
    with pytest.raises(ZeroDivisionError) as caught:
        async with world.enter(one.hold()):
            1 / 0
    assert getattr(caught.value, "__notes__", []) == []
    assert is_free(admin, name)
    async with world.enter(one.hold()) as held:
        await world.call(held.release)
        assert is_free(admin, name)


async def test_hold_may_be_entered_again_after_it_was_left(world: World, name: str) -> None:
    """One hold() object can be used for several blocks, one after the other."""
    block = lock(world, world.engine(), name).hold()
    for _ in range(3):
        async with world.enter(block) as held:
            held.check()


async def test_hold_and_connect_are_no_decorators(world: World, name: str) -> None:
    """Used as decorators they raise TypeError, which names wrap(), because they would not guard async functions."""
    one = lock(world, world.engine(), name)

    async def work() -> None:
        raise AssertionError("unguarded")

    with pytest.raises(TypeError, match="wrap"):
        one.hold()(work)
    with pytest.raises(TypeError, match="decorator|not callable"):
        one.connect()(work)


async def test_waiting_for_oneself_raises_at_once(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C006: a wait by the thread or task that holds the lock is an error, a try returns None, and neither harms the hold."""
    engine = world.engine()
    one = lock(world, engine, name)
    async with world.enter(one.hold()) as held:
        for again in (one, lock(world, engine, name), lock(world, engine, "other", name)):
            with pytest.raises(SelfDeadlockError) as caught:
                await world.call(again.acquire, timeout=math.inf)
            assert name in caught.value.names
            assert await world.call(again.try_acquire) is None
        held.check()
    assert is_free(admin, name)


async def test_another_contender_of_the_same_process_waits(world: World, name: str) -> None:
    """A second thread or task is another contender: its try returns None, its wait ends with the release."""
    one = lock(world, world.engine(), name)
    other = world.other()
    held = await world.call(one.acquire)
    assert await other.call(one.try_acquire) is None
    async with background(other.call(one.acquire, timeout=5)) as task:
        await asyncio.sleep(0)
        await world.call(held.release)
        second = await task
    await other.call(second.release)


async def test_current_is_the_innermost_handle_of_this_contender(world: World, name: str) -> None:
    """`current()` returns the innermost of nested holds, none of other contenders, and None after the last."""
    engine, other = world.engine(), world.other()
    current = pgfence.current
    with pytest.raises(LockNotHeldError):
        await world.call(current, kind(world))
    async with world.enter(lock(world, engine, name).hold()) as outer:
        async with world.enter(lock(world, engine, name + "2").hold()) as inner:
            assert await world.call(current, kind(world)) is inner
            with pytest.raises(LockNotHeldError):
                await other.call(current, kind(world))
        assert await world.call(current, kind(world)) is outer
    with pytest.raises(LockNotHeldError):
        await world.call(current, kind(world))


@pytest.mark.every_driver
async def test_looking_shows_holders_and_takes_nothing(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], advisory_rows: Callable[[], list[Any]]
) -> None:
    """holders() and is_held() report the holder, this process included, and take no lock."""
    one = lock(world, labelled(world, name), name)
    assert await world.call(one.holders) == []
    assert await world.call(one.is_held) is False
    assert advisory_rows() == []
    with elsewhere(dsn, name, label="other-deploy") as holder:
        (seen,) = await world.call(one.holders)
        assert (seen.application_name, seen.backend_pid) == ("other-deploy", holder.info.backend_pid)
        assert (seen.name, seen.key, seen.mode, seen.token) == (name, LockKey.of(name), "exclusive", None)
        assert await world.call(one.is_held) is True
    async with world.enter(one.hold()):
        (seen,) = await world.call(one.holders)
        assert seen.application_name == name
        assert seen.backend_pid in {row.pid for row in sessions(admin, name)}


@pytest.mark.every_driver
async def test_looking_matches_the_whole_key(world: World, name: str, dsn: str) -> None:
    """C117: half a key, the same number in the other key space, and another database do not match."""
    key = LockKey.raw(-5)
    one = lock(world, world.engine(), key)
    pair, half = LockKey.pair(-1, -5), LockKey.raw(0xFFFFFFFB)
    with elsewhere(dsn, pair, half), elsewhere(dsn.rsplit("/", 1)[0] + "/postgres", key):
        assert await world.call(one.holders) == []
        async with world.enter(one.hold(timeout=20)):
            (seen,) = await world.call(one.holders)
            assert seen.key == key


@pytest.mark.every_driver
async def test_what_the_process_knows_costs_no_statement(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """check(), state, lost and names need no server, even if it is unreachable."""
    seen: list[str] = []
    engine = world.engine()
    held = await world.call(lock(world, engine, name).acquire)
    listen(engine, seen)
    for _ in range(100):
        held.check()
        assert (held.state, held.lost, held.names, held.loss_reason) == ("held", False, (name,), None)
    assert seen == []
    await world.call(held.release)
    assert len(seen) == 1


def listen(engine: Any, seen: list[str]) -> None:
    from sqlalchemy import event

    @event.listens_for(getattr(engine, "sync_engine", engine), "before_cursor_execute")
    def before(*args: Any) -> None:
        seen.append(args[2])


async def test_handles_and_locks_say_what_they_are(world: World, name: str) -> None:
    """A repr contains the lock's name and state, but no URL."""
    one = lock(world, world.engine(), name, "second")
    held = await world.call(one.acquire)
    assert name in repr(one)
    assert "second" in repr(one)
    assert name in repr(held)
    assert "held" in repr(held)
    await world.call(held.release)
    assert "released" in repr(held)


async def test_a_namespace_keeps_names_apart_and_ready_keys_stay(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C026: a namespace, configured or passed, applies to names; a LockKey is used unchanged."""
    engine = world.engine()
    configure(engine, namespace="configured")
    for one, key in (
        (lock(world, engine, name), LockKey.of(name, namespace="configured")),
        (lock(world, engine, name, namespace="given"), LockKey.of(name, namespace="given")),
        (lock(world, engine, name, namespace=""), LockKey.of(name)),
        (lock(world, engine, LockKey.of(name), namespace="given"), LockKey.of(name)),
    ):
        async with world.enter(one.hold()) as held:
            assert held.keys == (key,)
            assert not is_free(admin, key)


@pytest.mark.every_driver
async def test_every_key_works_on_every_driver(world: World, dsn: str, admin: psycopg.Connection[Any]) -> None:
    """C025: keys at the edges of 64 bits and pairs of both signs are acquired, rejected and waited for."""
    engine = world.engine()
    for key in KEYS:
        one = lock(world, engine, key)
        async with world.enter(one.hold(timeout=5)):
            assert not is_free(admin, key)
        with elsewhere(dsn, key):
            assert await world.call(one.try_acquire) is None
            with pytest.raises(LockTimeoutError, match="key "):
                await world.call(one.acquire, timeout=0.12)
        async with world.enter(one.hold(timeout=5)):
            pass


async def test_invalid_names_are_rejected_at_once(world: World) -> None:
    """No name, an empty name, NUL or a number is a ValueError or TypeError before a connection is opened."""
    engine = world.engine()
    for names, error in (((), ValueError), (("",), ValueError), (("a\x00",), ValueError), ((5,), TypeError)):
        with pytest.raises(error):
            lock(world, engine, *names)


async def test_only_engines_and_connections_carry_a_lock(world: World, name: str) -> None:
    """C001: the error for a Session names three alternatives, and that for a sync or async mismatch the right class."""
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
    from sqlalchemy.orm import Session, scoped_session, sessionmaker

    engine = world.engine()
    makers = world.pick(
        (lambda: Session(engine), lambda: scoped_session(sessionmaker(engine))),
        (
            lambda: AsyncSession(engine),
            lambda: async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task),
        ),
    )
    for make in makers:
        with pytest.raises(TypeError, match=r"(?s)TransactionLock.*connect\(\).*engine"):
            lock(world, make(), name)
    wrong = world.pick(pgfence.AsyncAdvisoryLock, pgfence.AdvisoryLock)
    with pytest.raises(TypeError, match=world.pick("use AdvisoryLock", "use AsyncAdvisoryLock")):
        wrong(engine, name)
    for thing in ("postgresql://", None, 5):
        with pytest.raises(TypeError):
            lock(world, thing, name)


async def test_an_engine_may_be_found_when_it_is_needed(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A function that returns an engine is called when the lock is used, not before."""
    made: list[Any] = []

    def engine() -> Any:
        made.append(world.engine())
        return made[-1]

    one = lock(world, engine, name)
    assert made == []
    async with world.enter(one.hold()):
        assert not is_free(admin, name)
    assert len(made) == 1


async def test_a_function_that_returns_no_engine_is_rejected(world: World, name: str) -> None:
    """An engine of the other half raises an error that names the twin; any other value is named in the error."""
    kind = world.pick(pgfence.Lease, pgfence.AsyncLease)
    makers = (lambda engine: lock(world, engine, name), lambda engine: kind(engine, name, ttl=10))
    for make in makers:
        for returned, message in (
            (
                world.pick(create_async_engine, create_engine)(f"postgresql+psycopg://{world.dsn.split('://', 1)[1]}"),
                r"Engine: use .*(AdvisoryLock|counterpart)",
            ),
            (None, "must return .* not NoneType"),
            (object(), "must return .* not object"),
        ):
            with pytest.raises(TypeError, match=message):
                await world.call(make(lambda returned=returned: returned).acquire)


@pytest.mark.every_driver
async def test_a_dropped_handle_warns_and_frees_the_lock(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A handle that is garbage-collected raises a ResourceWarning and frees the lock, and local waiters go on."""
    one = lock(world, world.engine(), name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = await world.call(one.acquire)
        del held
        await world.call(int)  # its thread remembers what it returned last
        await freed_after_collecting(admin, name)
    assert [str(w.message) for w in caught if w.category is ResourceWarning and name in str(w.message)]
    async with world.enter(one.hold(timeout=5)):
        pass


async def freed_after_collecting(admin: psycopg.Connection[Any], name: str) -> None:
    def collected() -> bool:
        gc.collect()
        return is_free(admin, name)

    await eventually(collected)


@pytest.mark.every_driver
async def test_a_handle_that_was_lost_is_dropped_in_silence(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A lost handle that is dropped raises no ResourceWarning, because nothing is left to release."""
    held = await world.call(lock(world, labelled(world, name), name).acquire)
    (session,) = sessions(admin, name)
    terminate(admin, session.pid)
    await eventually(lambda: held.lost)  # noqa: F821  deleted below
    del held
    await world.call(int)
    gc.collect()


@pytest.mark.every_driver
async def test_threads_and_tasks_share_a_lock_object(world: World, name: str) -> None:
    """Of many contenders that use one lock object, at most one is inside at a time."""
    one = lock(world, world.engine(), name)
    inside: list[int] = []
    most: list[int] = []
    guard = threading.Lock()

    async def contend() -> None:
        other = world.other()
        for _ in range(10):
            async with other.enter(one.hold(timeout=20)):
                with guard:
                    inside.append(1)
                    most.append(len(inside))
                await asyncio.sleep(0)
                with guard:
                    inside.pop()

    await asyncio.gather(*(contend() for _ in range(6)))
    assert max(most) == 1
    assert len(most) == 60


async def test_events_are_reported(world: World, name: str, dsn: str) -> None:
    """configure(on_event=...) receives grants, releases and timeouts, with the name."""
    seen: list[tuple[str, str | None]] = []
    engine = world.engine()
    configure(engine, on_event=lambda event: seen.append((event.event, event.name)))
    async with world.enter(lock(world, engine, name).hold()):
        pass
    with elsewhere(dsn, name), pytest.raises(LockTimeoutError):
        await world.call(lock(world, engine, name).acquire, timeout=0.1)
    assert seen == [("acquired", name), ("released", name), ("timeout", name)]


async def test_a_name_frees_up_for_others_at_once(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C001: after each of fifty blocks, another session gets the lock without a wait."""
    one = lock(world, world.engine(), name)
    for _ in range(50):
        async with world.enter(one.hold()):
            assert not is_free(admin, name)
        assert is_free(admin, name)


async def test_contention_is_no_cause_for_alarm(
    world: World, name: str, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Normal contention is logged at INFO at most: no WARNING for a wait, a failed try, a timeout or a skip."""
    engine = labelled(world, name)
    with caplog.at_level(logging.DEBUG, "pgfence"), elsewhere(dsn, name):
        assert await world.call(lock(world, engine, name).try_acquire) is None
        with pytest.raises(LockTimeoutError):
            await world.call(lock(world, engine, name).acquire, timeout=0.7)
    # A lease that another test has left to die in this process may be logged meanwhile.
    logged = [record for record in caplog.records if record.name == "pgfence.advisory"]
    assert logged
    assert all(record.levelno < logging.WARNING for record in logged)
