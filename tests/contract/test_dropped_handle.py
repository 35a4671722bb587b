"""A lock whose handle was dropped without release() is released in the background."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from pgfence import AdvisoryLock, AsyncAdvisoryLock, AsyncLease, Lease
from support.leases import row
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]

KINDS = {
    "lock": lambda world, engine, name: world.pick(AdvisoryLock, AsyncAdvisoryLock)(engine, name),
    "lease": lambda world, engine, name: world.pick(Lease, AsyncLease)(engine, name, ttl=60),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_dropped_lock_is_waited_for_and_logged(
    world: World, name: str, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Acquiring again after the handle was dropped raises no SelfDeadlockError, and logs a WARNING with the name."""
    make: Callable[..., Any] = KINDS[kind]
    one = make(world, world.engine(), name)

    async def acquire_twice() -> Any:
        await one.acquire()
        gc.collect()
        return await one.acquire(timeout=30)

    def acquire_twice_here() -> Any:
        one.acquire()
        gc.collect()
        return one.acquire(timeout=30)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        held = await world.call(acquire_twice if world.is_async else acquire_twice_here)
    await world.call(held.release)
    noun = f"the {kind} {name!r} was dropped without release()"
    await eventually(lambda: noun in caplog.text)
    assert [r.levelname for r in caplog.records if noun in r.getMessage()] == ["WARNING"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handle_cannot_be_copied(world: World, name: str, kind: str) -> None:
    """A dropped copy would release the lock of the original handle."""
    make: Callable[..., Any] = KINDS[kind]
    held = await world.call(make(world, world.engine(), name).acquire)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=f"^this {type(held).__name__} cannot be copied or pickled"):
            duplicate(held)
    gc.collect()
    assert held.state == "held"
    await world.call(held.release)


@pytest.mark.async_only
async def test_a_lease_that_is_dropped_after_its_loop_is_released(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A job that fails in asyncio.run() may drop its handle when the loop is closed. The heartbeat must not renew the lease."""
    engine = world.engine()

    async def fail() -> None:
        held = await AsyncLease(engine, name, ttl=3600).acquire()
        raise KeyError(held.token)

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            with pytest.raises(KeyError):
                asyncio.run(fail())
            gc.collect()

    await asyncio.to_thread(run)
    await eventually(lambda: row(admin, name).released_at is not None)
