"""What is seen only from inside: moments between two steps of a lock, and what the manager of an engine keeps."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from pgfence import AdvisoryLock, WaitCancelledError, cancel_waits
from pgfence._holds.queue import QueueEntry
from pgfence._holds.registry import ManagerRegistry
from pgfence._sql.storage import TableNames
from pgfence.advisory import _named as named
from pgfence.config import configure
from pgfence.errors import PoolerError, UnreachableError
from pgfence.keys import LockKey
from pgfence.transaction import _request
from support.leases import lease, rival, row
from support.limits import set_limit
from support.locking import background, is_free, lock, standing
from support.transactions import connection
from support.transactions import lock as transaction_lock
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

    from pgfence.testing._proxy import Proxy
    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


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


async def test_the_names_of_a_lock_object_are_hashed_once(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every namespace, driver and number of uses; an unusable name is rejected before that."""
    calls: list[Any] = []
    for module, resolve in ((named, named.resolve), (_request, _request.resolve)):
        monkeypatch.setattr(module, "resolve", lambda *args, resolve=resolve: calls.append(args) or resolve(*args))
    engine = world.engine()
    configure(engine, namespace="configured")
    names = [f"{name}:{number}" for number in range(150)]
    one = lock(world, engine, *names)
    with pytest.raises(ValueError, match="empty"):
        lock(world, engine, *names, "")
    assert calls == []
    for _ in range(2):
        async with world.enter(one.hold()):
            pass
    assert len(calls) == 1
    async with connection(world, engine) as work:
        inside = transaction_lock(work, *names)
        for _ in range(2):
            await world.call(inside.acquire)
    assert [namespace for _, namespace in calls] == ["configured"] * 2


@pytest.mark.every_driver
async def test_another_server_process_takes_neither_lock_nor_token(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A statement that reaches another backend than it was meant for is rejected as the work of a pooler."""
    engine = world.engine()
    one = lock(world, engine, name, token=True)
    async with world.enter(one.hold()):
        pass
    (domain,) = ManagerRegistry.of(getattr(engine, "sync_engine", engine)).values()
    (idle,) = domain.pool.state.idle
    idle.pid += 1
    with pytest.raises(PoolerError):
        await world.call(one.try_acquire)
    assert is_free(admin, name)
    found = row(admin, name)
    assert (found.token, found.lease_id) == (1, None)


async def test_a_notification_during_an_outage_causes_one_more_question(
    world: World, name: str, admin: psycopg.Connection[Any], proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """It may arrive while this waiter finds no server: it asks again at once, and from then on with growing pauses."""
    engine = world.engine(dsn=proxy.dsn)
    sync_engine = getattr(engine, "sync_engine", engine)
    one = lease(world, engine, name, ttl=60)
    await world.call((await world.call(one.acquire)).release)
    assert rival(admin, name, 60)
    async with background(world.other().call(one.acquire, timeout=3)) as waiting:
        heartbeat = await eventually(lambda: ManagerRegistry.of(sync_engine).get("heartbeat"))
        await eventually(lambda: heartbeat._queue.listeners)
        asked: list[Any] = []
        event.listen(sync_engine, "do_connect", lambda *_: asked.append(1))
        proxy.refuse()
        proxy.cut()
        await eventually(lambda: "cannot reach the primary while waiting" in caplog.text)
        heartbeat._on_notify(TableNames().channel, name)
        with pytest.raises(UnreachableError, match="it was held"):
            await waiting
    assert len(asked) < 40
    proxy.heal()


@pytest.mark.one_driver
async def test_a_lock_that_is_handed_over_as_the_wait_is_cancelled_is_free(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder in this process releases it just before the waiter leaves the queue: it stays with none of the two."""
    engine, stop = world.engine(), threading.Event()
    one = AdvisoryLock(engine, name)
    held = one.acquire()
    discard = QueueEntry.discard_partial

    def late(entry: QueueEntry) -> None:
        if held.state == "held":
            held.release()
        discard(entry)

    def wait() -> None:
        with cancel_waits(stop):
            one.acquire(timeout=math.inf)

    set_limit(monkeypatch, "BURST_TIME", math.inf)  # however long this takes, the lock is handed over
    monkeypatch.setattr(QueueEntry, "discard_partial", late)
    async with background(world.other().call(wait)) as waiting:
        await eventually(lambda: standing(engine) == 1)
        stop.set()
        with pytest.raises(WaitCancelledError):
            await waiting
    with one.hold(timeout=5):
        pass
