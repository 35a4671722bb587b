"""An operator, or the server itself, ends a session of ours."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from pgfence.errors import LockLostError, LockNotHeldError
from support.locking import background, elsewhere, freed, give, is_free, labelled, lock, run, sessions, terminate, waits
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins

KILLS = 30


@pytest.mark.every_driver
async def test_a_holder_is_notified_of_its_loss_in_milliseconds(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C042: thirty kills, nobody touches the database: state, reason, check() and the callback tell each one."""
    one = lock(world, labelled(world, name), name)
    delays = []
    for _ in range(KILLS):
        held = await world.call(one.acquire)
        told: list[float] = []
        held.on_lost(lambda: told.append(time.monotonic()))  # noqa: B023
        (session,) = sessions(admin, name)
        began = time.monotonic()
        admin.execute("SELECT pg_terminate_backend(%s)", [session.pid])
        await eventually(lambda: held.lost and told)  # noqa: B023
        delays.append(told[0] - began)
        assert (held.state, held.loss_reason) == ("lost", "killed")
        with pytest.raises(LockLostError, match=name):
            held.check()
        assert is_free(admin, name)
        with pytest.raises(LockLostError) as caught:
            await world.call(held.release)
        assert (caught.value.names, caught.value.reason) == ((name,), "killed")
        with pytest.raises(LockNotHeldError):
            await world.call(held.release)
    assert sorted(delays)[KILLS // 2] < 0.1
    assert max(delays) < 1


async def test_leaving_a_block_raises_the_loss_unless_the_body_raised(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C005: LockLostError with the name; beside an error of the caller's own it is a note."""
    one = lock(world, labelled(world, name), name)
    with pytest.raises(LockLostError, match=name):
        async with world.enter(one.hold(on_loss="cancel")) as held:
            end(admin, name)
            await eventually(lambda: held.lost)
            if world.is_async:
                await eventually(lambda: False)
    with pytest.raises(ValueError, match="the caller's own") as caught:
        async with world.enter(one.hold(on_loss="flag")) as held:
            end(admin, name)
            await eventually(lambda: held.lost)
            raise ValueError("the caller's own")
    assert not hasattr(caught.value, "__notes__")
    async with world.enter(one.hold(on_loss="flag")) as held:
        end(admin, name)
        await eventually(lambda: held.lost)


async def test_release_raises_on_a_loss_that_was_not_noticed(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C005: released in the very moment of the kill: told by the server's answer, or by the watcher, never by silence."""
    one = lock(world, labelled(world, name), name)
    for _ in range(10):
        held = await world.call(one.acquire)
        end(admin, name)
        with pytest.raises(LockLostError):
            await world.call(held.release)
        assert (held.state, held.loss_reason) == ("lost", "killed")


async def test_a_lock_that_was_unlocked_behind_our_back_is_lost(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C005: a false unlock is a loss, not a warning nobody reads."""
    one = lock(world, labelled(world, name), name)
    held = await world.call(one.acquire)
    driver = held._hold.session.wire.driver
    await world.call(
        driver.execute if hasattr(driver, "execute") else driver.cursor().execute, "SELECT pg_advisory_unlock_all()"
    )
    with pytest.raises(LockLostError, match=name):
        await world.call(held.release)
    async with world.enter(one.hold(timeout=5)):
        assert not is_free(admin, name)


async def test_a_loss_frees_the_local_queue(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C042: whoever waits here gets the lock at once, while the loser has not left its block yet; it never takes it back."""
    one = lock(world, labelled(world, name), name)
    held = await world.call(one.acquire)
    waiter = world.other()
    async with background(waiter.call(one.acquire, timeout=20)) as waiting:
        end(admin, name)
        heir = await waiting
    assert (held.state, heir.state) == ("lost", "held")
    with pytest.raises(LockLostError):
        await world.call(held.release)
    heir.check()
    assert not is_free(admin, name)
    await waiter.call(heir.release)


async def test_a_waiter_whose_session_ends_goes_on_with_another(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """Terminated twice while it waits, once in the first slice and once later: it holds in the end."""
    one = lock(world, labelled(world, name), name)
    waiter = world.other()
    with elsewhere(dsn, name) as holder:
        async with background(waiter.call(one.acquire, timeout=20)) as waiting:
            await eventually(waits(admin, name))
            first = end(admin, name)
            await eventually(lambda: [s.pid for s in sessions(admin, name)] not in ([], [first]))
            began = time.monotonic()
            # A session that ends sooner than a second after the last one is taken for a server that ends them all.
            await eventually(lambda: time.monotonic() - began > 1.1 and waits(admin, name)())
            end(admin, name)
            await eventually(lambda: waiting.done() or waits(admin, name)())
            assert not waiting.done(), waiting.exception()
            assert give(holder, name)
            held = await waiting
    held.check()
    assert not is_free(admin, name)
    await waiter.call(held.release)


@pytest.mark.every_driver
async def test_a_warm_session_that_died_is_not_handed_out(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Ended while it was idle: the next acquire works, on a fresh session."""
    one = lock(world, labelled(world, name), name)
    for _ in range(5):
        held = await world.call(one.acquire)
        await world.call(held.release)
        old = end(admin, name)
        again = await world.call(one.try_acquire)
        again.check()
        (session,) = sessions(admin, name)
        assert session.pid != old
        await world.call(again.release)


@pytest.mark.every_driver
async def test_the_connection_that_works_dies_with_its_lock(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C044: kill, roll back, write: refused; the table has nothing that was written without the lock."""
    admin.execute("CREATE TABLE IF NOT EXISTS crash_written (what text)")
    admin.execute("TRUNCATE crash_written")
    engine = labelled(world, name)
    with pytest.raises((LockLostError, AssertionError)) as caught:
        async with world.enter(lock(world, engine, name).connect()) as connection:
            await run(world, connection, "INSERT INTO crash_written VALUES ('before')")
            await world.call(connection.commit)
            await run(world, connection, "INSERT INTO crash_written VALUES ('open')")
            end(admin, name)
            for _ in range(3):
                with pytest.raises(Exception):  # noqa: B017 each driver has its own; LockLostError is no answer to SQL
                    await run(world, connection, "INSERT INTO crash_written VALUES ('after')")
                await try_rollback(world, connection)
    assert isinstance(caught.value, LockLostError)
    assert admin.execute("SELECT what FROM crash_written").fetchall() == [("before",)]
    await freed(admin, name)


@pytest.mark.every_driver
async def test_the_callers_own_connection_never_goes_on_without_its_lock(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C044: SQLAlchemy reconnects in silence; there the next statement is refused, and check() and the block tell of a loss."""
    engine = labelled(world, name)
    connection = await world.call(_opened, engine)
    try:
        one = lock(world, connection, name)
        with pytest.raises(LockLostError):
            async with world.enter(one.hold(on_loss="flag")) as held:
                end(admin, name)
                for _ in range(2):
                    with pytest.raises(Exception):  # noqa: B017
                        await run(world, connection, "SELECT 1")
                    await try_rollback(world, connection)
                with pytest.raises(LockLostError):
                    await run(world, connection, "SELECT 1")
                assert is_free(admin, name)
                held.check()
        await try_rollback(world, connection)
        assert await run(world, connection, "SELECT 1") == 1
        await try_rollback(world, connection)
        async with world.enter(one.hold(timeout=5)):
            assert not is_free(admin, name)
    finally:
        await world.call(connection.close)


def _opened(engine: Any) -> Any:
    opened = engine.connect()
    return opened.start() if hasattr(opened, "start") else opened


async def try_rollback(world: World, connection: Any) -> None:
    try:
        await world.call(connection.rollback)
    except Exception:  # a dead connection may refuse
        return


def end(admin: psycopg.Connection[Any], label: str) -> int:
    """Terminate the one session with this label, and return its process id."""
    (session,) = sessions(admin, label)
    terminate(admin, session.pid)
    return session.pid
