"""An operator, or the server itself, ends a session of pgfence."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from pgfence.errors import LockLostError, LockNotHeldError
from support.locking import is_free, labelled, lock, sessions, terminate
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
    """C042: thirty kills without using the database: state, reason, check() and the callback report each one."""
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


async def test_release_raises_on_a_loss_that_was_not_noticed(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C005: released at the moment of the kill: reported by the server's response or by the monitor, never missed."""
    one = lock(world, labelled(world, name), name)
    for _ in range(10):
        held = await world.call(one.acquire)
        end(admin, name)
        with pytest.raises(LockLostError):
            await world.call(held.release)
        assert (held.state, held.loss_reason) == ("lost", "killed")


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


def end(admin: psycopg.Connection[Any], label: str) -> int:
    """Terminate the one session with this label, and return its process id."""
    (session,) = sessions(admin, label)
    terminate(admin, session.pid)
    return session.pid
