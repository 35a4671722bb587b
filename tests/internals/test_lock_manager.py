"""What is seen only from inside: moments between two steps of a lock, and what the manager of an engine keeps."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from pgfence.advisory import _named as named
from pgfence.config import configure
from pgfence.keys import LockKey
from support.locking import background, lock

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins


@pytest.mark.sync_only
async def test_the_first_use_by_two_threads_is_one_lock(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch, admin: psycopg.Connection[Any]
) -> None:
    """A lock object of a module, a configured namespace, two threads that come first: both ask for the same key."""
    engine, other = world.engine(), world.other()
    configure(engine, namespace="configured")
    one = lock(world, engine, name)
    entered = threading.Event()
    resolve = named.resolve

    def slow(*args: Any) -> Any:
        entered.set()
        time.sleep(0.05)  # the moment in which the other thread comes
        return resolve(*args)

    monkeypatch.setattr(named, "resolve", slow)
    async with background(other.call(one.try_acquire)) as task:
        await asyncio.to_thread(entered.wait, 5)
        mine = await world.call(one.try_acquire)
        theirs = await task
        for place, held in ((world, mine), (other, theirs)):
            if held is not None:
                assert held.keys == (LockKey.of(name, namespace="configured"),)
                await place.call(held.release)
    assert (mine is None) != (theirs is None)
