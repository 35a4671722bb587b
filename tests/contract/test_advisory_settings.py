"""AdvisoryLock and the settings of an engine: listeners, echo, round trips, poolers, configure()."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.ext.asyncio import create_async_engine

from pgfence.config import configure
from pgfence.errors import LockTimeoutError, PoolerError, UnreachableError
from pgfence.keys import LockKey
from support.locking import (
    background,
    elsewhere,
    freed,
    give,
    is_free,
    labelled,
    limited,
    lock,
    run,
    sessions,
    terminate,
    waits,
)
from support.proxy import CountingProxy
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins


def listen(engine: Any, what: str, seen: list[str]) -> None:
    event.listen(getattr(engine, "sync_engine", engine), what, lambda *args: seen.append(args[2]))


@pytest.fixture
def counting(dsn: str) -> Iterator[CountingProxy]:
    proxy = CountingProxy(dsn)
    yield proxy
    proxy.close()


@pytest.mark.every_driver
async def test_a_free_lock_costs_two_round_trips(world: World, name: str, counting: CountingProxy) -> None:
    """On a warm connection, every method takes one round trip to lock and one to unlock, for one name or many."""
    engine = world.engine(dsn=counting.dsn)
    for one in (lock(world, engine, name), lock(world, engine, name, name + "2")):
        for _ in range(3):  # statements are prepared by then
            await world.call((await world.call(one.try_acquire)).release)
        for verb in (one.try_acquire, one.acquire):
            before = counting.trips
            held = await world.call(verb)
            assert counting.trips - before == 1
            held.check()
            await world.call(held.release)
            assert counting.trips - before == 2
        before = counting.trips
        async with world.enter(one.hold()):
            pass
        assert counting.trips - before == 2


@pytest.mark.every_driver
async def test_a_busy_try_costs_one_round_trip(world: World, name: str, dsn: str, counting: CountingProxy) -> None:
    """Keys that were locked before the rejection are released in the same round trip."""
    engine = world.engine(dsn=counting.dsn)
    with elsewhere(dsn, name):
        for one in (lock(world, engine, name), lock(world, engine, name, name + "2")):
            await world.call(one.try_acquire)
            await world.call(one.try_acquire)
            before = counting.trips
            assert await world.call(one.try_acquire) is None
            assert counting.trips - before == 1


@pytest.mark.every_driver
async def test_listeners_see_every_statement(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Hooks see the try, both kinds of wait and the unlock, and the lock works as it does without hooks."""
    engine, before, after = world.engine(), [], []
    listen(engine, "before_cursor_execute", before)
    listen(engine, "after_cursor_execute", after)
    one = lock(world, engine, name)
    async with world.enter(one.hold()):
        assert not is_free(admin, name)
    assert [text for text in before if "pg_try_advisory_lock" in text]
    assert [text for text in before if "pg_advisory_unlock" in text]
    other = world.other()
    with elsewhere(dsn, name) as holder:
        assert await other.call(one.try_acquire) is None
        with pytest.raises(LockTimeoutError):
            await other.call(one.acquire, timeout=0.12)
        async with background(other.call(one.acquire, timeout=10)) as task:
            await eventually(waits(admin, name))
            await eventually(lambda: sum("DO $$" in text for text in before) >= 2)
            give(holder, name)
            held = await task
    assert not is_free(admin, name)
    await other.call(held.release)
    assert is_free(admin, name)
    assert [text for text in before if "pg_advisory_xact_lock" in text and "DO $$" not in text]
    assert set(after) <= set(before)
    assert [text for text in after if "pg_advisory_unlock" in text]


async def test_echo_shows_every_statement(world: World, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """echo=True logs what is sent."""
    engine = world.engine(echo=True)
    logging.getLogger("sqlalchemy.engine.Engine").propagate = True
    with caplog.at_level(logging.INFO, "sqlalchemy.engine"):
        async with world.enter(lock(world, engine, name).hold()):
            pass
    assert "pg_try_advisory_lock" in caplog.text
    assert "pg_advisory_unlock" in caplog.text


@pytest.mark.every_driver
async def test_a_hook_may_add_a_comment(world: World, name: str, dsn: str, admin: psycopg.Connection[Any]) -> None:
    """Tracing that writes a comment into each statement (retval=True) breaks no step of a wait."""
    engine, other = world.engine(), world.other()

    def comment(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> Any:
        return f"{statement} /* traceparent='00-1' */", parameters

    event.listen(getattr(engine, "sync_engine", engine), "before_cursor_execute", comment, retval=True)
    with elsewhere(dsn, name) as holder:
        async with background(other.call(lock(world, engine, name).acquire, timeout=10)) as task:
            await eventually(waits(admin, name))
            await asyncio.sleep(0.7)
            give(holder, name)
            held = await task
    assert not is_free(admin, name)
    await other.call(held.release)
    assert is_free(admin, name)


async def test_a_hook_that_fails_is_the_users_own_error(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """An exception in a hook propagates unchanged, nothing is held, and without the hook the lock works."""
    engine, broken = world.engine(), [True, "advisory"]

    def fail(*args: Any) -> None:
        if broken[0] and broken[1] in args[2]:
            raise ZeroDivisionError("hook")

    for moment in ("before_cursor_execute", "after_cursor_execute"):
        event.listen(getattr(engine, "sync_engine", engine), moment, fail)
        with pytest.raises(ZeroDivisionError):
            await world.call(lock(world, engine, name).acquire)
        await freed(admin, name)
        event.remove(getattr(engine, "sync_engine", engine), moment, fail)
    broken[1] = "unlock"
    event.listen(getattr(engine, "sync_engine", engine), "before_cursor_execute", fail)
    with pytest.raises(ZeroDivisionError):
        async with world.enter(lock(world, engine, name).hold()):
            pass
    await freed(admin, name)  # C003: an unlock that cannot be proven closes the connection
    broken[0] = False
    async with world.enter(lock(world, engine, name).hold(timeout=5)):
        pass


async def test_a_failing_unlock_does_not_hide_the_bodys_error(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C003, C004: the body's ValueError wins, the hook's failure is a note on it, and the lock is free."""
    engine = world.engine()

    def fail(*args: Any) -> None:
        if "unlock" in args[2]:
            raise ZeroDivisionError("hook")

    event.listen(getattr(engine, "sync_engine", engine), "before_cursor_execute", fail)
    with pytest.raises(ValueError, match="body") as caught:
        async with world.enter(lock(world, engine, name).hold()):
            raise ValueError("body")
    assert any("ZeroDivisionError" in note for note in caught.value.__notes__)
    await freed(admin, name)


async def test_a_listened_lock_is_lost_and_waited_for_like_any_other(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """With hooks too, a killed holder is notified, and a killed waiter continues."""
    engine, other = labelled(world, name), world.other()
    listen(engine, "before_cursor_execute", [])
    held = await world.call(lock(world, engine, name).acquire)
    terminate(admin, sessions(admin, name)[0].pid)
    await eventually(lambda: held.lost)
    with pytest.raises(Exception, match="lost"):
        await world.call(held.release)
    with elsewhere(dsn, name) as holder:
        async with background(other.call(lock(world, engine, name).acquire, timeout=20)) as task:
            await eventually(waits(admin, name))
            for row in sessions(admin, name):
                terminate(admin, row.pid)
            await eventually(waits(admin, name))
            give(holder, name)
            await other.call((await task).release)


@pytest.mark.every_driver
async def test_a_small_statement_timeout_with_a_declared_pooler(world: World, name: str, dsn: str) -> None:
    """C039: with a declared pooler pgfence sets nothing, but a wait still ends at the caller's timeout."""
    engine = limited(world, {"statement_timeout": "450ms"})
    configure(engine, pooler="session")
    with elsewhere(dsn, name), pytest.raises(LockTimeoutError):
        await world.call(lock(world, engine, name).acquire, timeout=0.9)
    async with world.enter(lock(world, engine, name).hold(timeout=5)):
        pass


@pytest.mark.every_driver
async def test_behind_a_declared_pooler_nothing_is_set(
    world: World, name: str, role: Callable[..., str], admin: psycopg.Connection[Any]
) -> None:
    """A lent connection has all settings of the role, because pgfence's would reach the session's next client."""
    settings = {"statement_timeout": "9s", "idle_session_timeout": "8min", "lock_timeout": "7s"}
    engine = world.engine(dsn=role(settings=settings))
    configure(engine, pooler="session")
    async with world.enter(lock(world, engine, name).connect()) as connection:
        for setting, value in settings.items():
            assert await run(world, connection, f"SHOW {setting}") == value


async def test_a_declared_transaction_pooler_is_rejected(world: World, name: str) -> None:
    """C019: each method raises, and the message says how to fix it."""
    engine = world.engine()
    configure(engine, pooler="transaction")
    one = lock(world, engine, name)
    for verb in (one.try_acquire, one.acquire):
        with pytest.raises(PoolerError, match="lock_engine") as caught:
            await world.call(verb)
        assert caught.value.mode == "transaction"
    with pytest.raises(PoolerError):
        async with world.enter(one.connect()):
            pass


@pytest.mark.every_driver
async def test_a_transaction_pooler_is_found_out(
    world: World, name: str, pgbouncer: Callable[..., str], dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """C019, C021: through PgBouncer in transaction mode no method grants; a direct lock_engine does."""
    through = await asyncio.to_thread(pgbouncer, "transaction")
    arguments: dict[str, Any] = {"asyncpg": {"statement_cache_size": 0}, "psycopg2": {}}.get(
        world.name, {"prepare_threshold": None}
    )
    engine = world.engine(dsn=through, connect_args=arguments)
    for _ in range(3):
        with pytest.raises(PoolerError) as caught:
            await world.call(lock(world, engine, name).acquire)
        assert "lock_engine" in str(caught.value)
    assert caught.value.mode == "transaction"
    assert is_free(admin, name)
    app = world.engine(dsn=through, connect_args=arguments)
    configure(app, lock_engine=world.engine())
    async with world.enter(lock(world, app, name).hold()):
        assert not is_free(admin, name)


@pytest.mark.every_driver
async def test_a_session_pooler_works_when_it_is_declared(
    world: World, name: str, pgbouncer: Callable[..., str], dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """C019: an undeclared session pooler is rejected; a declared one works, and no setting leaks."""
    through = await asyncio.to_thread(pgbouncer, "session")
    with pytest.raises(PoolerError) as caught:
        await world.call(lock(world, world.engine(dsn=through), name).acquire)
    assert caught.value.mode == "unknown"
    engine, other = world.engine(dsn=through), world.other()
    configure(engine, pooler="session")
    async with world.enter(lock(world, engine, name).hold()):
        assert not is_free(admin, name)
    assert is_free(admin, name)
    with elsewhere(dsn, name) as holder:
        async with background(other.call(lock(world, engine, name).acquire, timeout=10)) as task:
            await eventually(waits(admin, name))
            await asyncio.sleep(0.6)
            give(holder, name)
            await other.call((await task).release)
    async with world.enter(lock(world, engine, name).connect()) as connection:
        assert await run(world, connection, "SELECT 1") == 1
    assert is_free(admin, name)


async def test_settings_made_too_late_are_rejected_or_apply(world: World, name: str, dsn: str) -> None:
    """After the first use, a configure() call raises an error or takes effect completely."""
    engine = world.engine()
    async with world.enter(lock(world, engine, name).hold()):
        pass
    try:
        configure(engine, default_timeout=0.1, namespace="late")
    except ValueError:
        expected = (30.0, "")
    else:
        expected = (0.1, "late")
    with elsewhere(dsn, name):
        async with world.enter(lock(world, engine, name + "x").hold()) as held:
            assert held.keys == (LockKey.of(name + "x", namespace=expected[1]),)
        assert lock(world, engine, name)._place()[0].config.default_timeout == expected[0]


@pytest.mark.every_driver
async def test_passwords_in_a_query_are_not_printed(world: World, name: str) -> None:
    """A password in the query of a URL is not shown in any error."""
    url = f"postgresql+{world.driver}://somebody@127.0.0.1:1/nothing?password=s3cret-word"
    engine = world.pick(create_engine, create_async_engine)(url)
    with pytest.raises(UnreachableError) as caught:
        await world.call(lock(world, engine, name).acquire)
    error: BaseException | None = caught.value
    assert "s3cret-word" not in str(error)
    assert "s3cret-word" not in repr(error)
    await world.call(engine.dispose)


@pytest.mark.every_driver
async def test_what_the_server_rejects_for_good_is_not_retryable(world: World, name: str, dsn: str) -> None:
    """A missing database raises UnreachableError; with the driver's SQLSTATE it is not retryable."""
    engine = world.engine(dsn=dsn.rsplit("/", 1)[0] + "/no_such_database")
    with pytest.raises(UnreachableError, match="no_such_database") as caught:
        await world.call(lock(world, engine, name).acquire)
    if world.name == "asyncpg":
        assert (caught.value.sqlstate, caught.value.retryable) == ("3D000", False)
