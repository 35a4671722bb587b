"""Semaphore: the limit on holders, weights, fairness, resizing, loss, the handle, and invalid arguments."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import text

from pgfence import AsyncPermit, AsyncSemaphore, Permit, Semaphore
from pgfence.errors import LockLostError, LockTimeoutError, SelfDeadlockError, StaleFencingTokenError
from support.leases import lapse, lease, rival, row
from support.rows import every_row
from support.waiting import eventually

if TYPE_CHECKING:
    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


def semaphore(world: World, engine: Any, name: str, *, permits: int = 2, ttl: Any = 30, **kwargs: Any) -> Any:
    """Return the world's semaphore."""
    return world.pick(Semaphore, AsyncSemaphore)(engine, name, permits=permits, ttl=ttl, **kwargs)


async def free(world: World, *held: Any) -> None:
    """Release a handle."""
    for each in held:
        if each is not None:
            await world.call(each.release)


def waiters(admin: psycopg.Connection[Any], name: str) -> int:
    """Return the number of waiters in the server's queue of a fair semaphore."""
    found = admin.execute("SELECT count(*) FROM pgfence_permit_waiter WHERE name = %s", [name]).fetchone()
    assert found is not None
    return int(found[0])


def has_waiting_locks(admin: psycopg.Connection[Any]) -> bool:
    """Return whether any session of this database waits for a row."""
    waiting = (
        "SELECT FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE datname = current_database() AND NOT granted"
    )
    return admin.execute(waiting.encode()).fetchone() is not None


@pytest.mark.every_driver
async def test_as_many_holders_as_permits(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Each permit is a lease row with a token of its own; one more try gets None, until a permit is released."""
    engine = world.engine()
    one = semaphore(world, engine, name, owner="billing", purpose="closing")
    first, second = await world.call(one.try_acquire), await world.call(one.try_acquire)
    assert isinstance(first, world.pick(Permit, AsyncPermit))
    assert [row(admin, f"{name}#{i}").lease_id for i in (1, 2)] == [first.lease_id, second.lease_id]
    assert (first.names, first.weight, first.state, row(admin, f"{name}#1").owner) == ((name,), 1, "held", "billing")
    assert await world.call(one.try_acquire) is None
    holders = await world.call(one.holders)
    assert [(each.name, each.kind, each.token, each.purpose) for each in holders] == [
        (f"{name}#{i}", "permit", each.token, "closing") for i, each in enumerate((first, second), 1)
    ]
    await world.call(first.release)
    third = await world.call(one.acquire, timeout=5)
    assert third.token == first.token + 1
    assert row(admin, f"{name}#1").lease_id == third.lease_id
    await free(world, second, third)


async def test_one_task_may_hold_several_permits(world: World, name: str) -> None:
    """A holder leaves the local queue at the grant and can acquire again; only more permits than exist are rejected."""
    one = semaphore(world, world.engine(), name)
    held = [await world.call(one.acquire, timeout=5) for _ in range(2)]
    with pytest.raises(SelfDeadlockError, match="holds 2 of 2 permits and requests 1 more"):
        await world.call(one.acquire, timeout=5)
    with pytest.raises(LockTimeoutError):
        await world.call(one.acquire, timeout=0)
    await world.call(held.pop().release)
    await free(world, *held, await world.call(one.acquire, timeout=5))


async def test_a_release_wakes_a_waiter(world: World, name: str) -> None:
    """A contender of another engine gets the permit as soon as it is released."""
    held = await world.call(semaphore(world, world.engine(), name, permits=1).acquire)
    other = world.other()
    waiting = asyncio.create_task(other.call(semaphore(world, world.engine(), name, permits=1).acquire, timeout=30))
    await asyncio.sleep(0)
    await world.call(held.release)
    permit = await waiting
    assert permit.token == held.token + 1
    await other.call(permit.release)


async def test_tries_do_not_wait_for_each_other(world: World, name: str) -> None:
    """As many tries at the same moment as there are free permits all succeed."""
    one = semaphore(world, world.engine(), name, permits=8)
    await free(world, await world.call(one.acquire))
    others = [world.other() for _ in range(8)]
    permits = await asyncio.gather(*(other.call(one.try_acquire) for other in others))
    assert None not in permits
    await free(world, *permits)


async def test_a_heavy_waiter_does_not_block_its_process(world: World, name: str) -> None:
    """While one contender waits for two permits, another one of the same process gets the one that is free."""
    engine = world.engine()
    held = await world.call(semaphore(world, engine, name).acquire)
    heavy, light = world.other(), world.other()
    waiting = asyncio.create_task(heavy.call(semaphore(world, engine, name, weight=2).acquire, timeout=30))
    await asyncio.sleep(0.1)
    await free(world, await light.call(semaphore(world, engine, name).acquire, timeout=5), held)
    await free(world, await waiting)


async def test_many_contenders_never_exceed_the_number(world: World, name: str) -> None:
    """C091: however many acquire at the same moment, in several processes' worth of engines, at most three hold a permit."""
    held, most = 0, 0
    full = asyncio.Event()

    async def work(contender: Any, engine: Any) -> None:
        nonlocal held, most
        one = semaphore(world, engine, name, permits=3)
        for _ in range(4):
            permit = await contender.call(one.acquire, timeout=60)
            held += 1
            most = max(most, held)
            if held == 3:
                full.set()
            await full.wait()  # on a slow machine, short holds alone may never overlap three times
            await asyncio.sleep(0.005)
            held -= 1
            await contender.call(permit.release)

    engines = [world.engine() for _ in range(3)]
    await asyncio.gather(*(work(world.other(), engine) for engine in engines * 4))
    assert (held, most) == (0, 3)


@pytest.mark.every_driver
async def test_a_weight_is_taken_completely_or_not_at_all(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A weight of 2 needs two free permits, under one lease id; they are renewed and released together."""
    engine = world.engine()
    single = await world.call(semaphore(world, engine, name, permits=3).acquire)
    heavy = semaphore(world, engine, name, permits=3, weight=2)
    pair = await world.call(heavy.acquire)
    assert pair.weight == 2
    assert {row(admin, f"{name}#{i}").lease_id for i in (2, 3)} == {pair.lease_id}
    await world.call(single.release)
    assert await world.call(heavy.try_acquire) is None
    assert row(admin, f"{name}#1").released_at is not None
    before = [row(admin, f"{name}#{i}").expires_at for i in (2, 3)]
    await world.call(pair.renew)
    assert all(row(admin, f"{name}#{i}").expires_at > before[i - 2] for i in (2, 3))
    await world.call(pair.release)
    assert all(row(admin, f"{name}#{i}").released_at is not None for i in (2, 3))


async def test_a_dead_holders_permit_returns(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C093: a permit whose TTL is over is granted again, with a larger token; its former holder cannot release it."""
    one = semaphore(world, world.engine(), name, permits=1, heartbeat="manual")
    former = await world.call(one.acquire)
    lapse(admin, f"{name}#1")
    other = world.other()
    permit = await other.call(semaphore(world, world.engine(), name, permits=1).acquire, timeout=5)
    assert permit.token == former.token + 1
    with pytest.raises(LockLostError):
        await world.call(former.release)
    permit.check()
    await other.call(permit.release)


async def test_a_stale_permit_cannot_commit(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """`begin()` fences the permit's own row: a former holder is rejected, another holder of the semaphore is not."""
    engine = world.engine()
    one = semaphore(world, engine, name, heartbeat="manual")
    stale, other = await world.call(one.acquire), await world.call(one.acquire)
    lapse(admin, f"{name}#1")
    await world.call((await world.call(one.acquire)).release)
    with pytest.raises(StaleFencingTokenError):
        async with world.enter(stale.begin(engine)):
            pass
    async with world.enter(other.begin(engine)) as connection:
        await world.call(connection.execute, text("SELECT 1"))
    await free(world, other)
    stale.abandon()


async def test_a_permit_fences_no_other_resource(world: World, name: str) -> None:
    """Permits have several series of tokens, so that one must not be compared in the gate of a shared resource."""
    engine = world.engine()
    permit = await world.call(semaphore(world, engine, name).acquire)
    with pytest.raises(ValueError, match="a permit fences only its own resource"):
        async with world.enter(permit.begin(engine, "account")):
            pass
    await free(world, permit)


async def test_contenders_agree_on_the_number(world: World, name: str) -> None:
    """The first number is stored; another number raises, or is ignored with on_mismatch="stored"."""
    engine = world.engine()
    await world.call((await world.call(semaphore(world, engine, name).acquire)).release)
    with pytest.raises(ValueError, match="has 2 permits, not 3"):
        await world.call(semaphore(world, engine, name, permits=3).acquire)
    following = semaphore(world, engine, name, permits=9, on_mismatch="stored")
    held = [await world.call(following.try_acquire) for _ in range(3)]
    assert [each is not None for each in held] == [True, True, False]
    with pytest.raises(ValueError, match="has 2 permits, so a request with weight=9 could never be granted"):
        await world.call(semaphore(world, engine, name, permits=9, weight=9, on_mismatch="stored").try_acquire)
    await free(world, *held)


async def test_resizing_counts_the_permits_in_use(world: World, name: str) -> None:
    """C094: after a reduction no permit is granted until fewer than the new number are in use; after an increase at once."""
    engine = world.engine()
    one = semaphore(world, engine, name, permits=4)
    held = [await world.call(one.acquire) for _ in range(4)]
    await world.call(held.pop(0).release)
    await world.call(one.resize, 2)
    granted = []
    while held:
        granted.append(await world.call(one.try_acquire))
        await world.call(held.pop().release)
    assert [each is not None for each in granted] == [False, False, True]
    await world.call(one.resize, 3)
    more = [await world.call(one.try_acquire) for _ in range(3)]
    assert [each is not None for each in more] == [True, True, False]
    await free(world, *granted, *more)


async def test_permits_above_the_number_are_not_locked_while_in_use(
    world: World, name: str, admin: psycopg.Connection[Any], dsn: str
) -> None:
    """After a reduction, an acquire waits for no release in progress, so that the two cannot deadlock."""
    one = semaphore(world, world.engine(), name, permits=10, weight=10)
    held = await world.call(one.acquire)
    await world.call(one.resize, 2)
    other = world.other()
    with psycopg.connect(dsn) as releasing:
        releasing.execute("SELECT FROM pgfence_lease WHERE name = %s FOR UPDATE", [f"{name}#9"])
        trying = asyncio.create_task(other.call(semaphore(world, world.engine(), name).try_acquire))
        await eventually(lambda: trying.done() or has_waiting_locks(admin))
        assert trying.done()
    assert await trying is None
    await free(world, held)


async def test_fair_waiters_are_served_in_order(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A heavy waiter that came first is not overtaken by a light one, nor by a try, although a permit is free."""
    engine = world.engine()
    held = [await world.call(semaphore(world, engine, name, fair=True).acquire) for _ in range(2)]
    first, second, order = world.other(), world.other(), []

    async def wait(contender: Any, weight: int) -> None:
        fair = semaphore(world, world.engine(), name, weight=weight, fair=True)
        permit = await contender.call(fair.acquire, timeout=30)
        order.append(weight)
        await contender.call(permit.release)

    waiting = [asyncio.create_task(wait(first, 2))]
    await eventually(lambda: waiters(admin, name) == 1)
    waiting.append(asyncio.create_task(wait(second, 1)))
    await eventually(lambda: waiters(admin, name) == 2)
    await world.call(held.pop().release)
    assert await world.call(semaphore(world, engine, name).try_acquire) is None
    await world.call(held.pop().release)
    await asyncio.gather(*waiting)
    assert order == [2, 1]
    assert waiters(admin, name) == 0


async def test_waiters_of_one_process_keep_their_places(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Each fair waiter has its own place in the server's queue, before those of other processes that came later."""
    here, there, order = world.engine(), world.engine(), []
    held = [await world.call(semaphore(world, here, name, fair=True).acquire) for _ in range(2)]

    async def wait(number: int, engine: Any) -> None:
        contender = world.other()
        order.append((number, await contender.call(semaphore(world, engine, name, fair=True).acquire, timeout=30)))

    waiting = []
    for number, engine in enumerate((here, here, there)):
        waiting.append(asyncio.create_task(wait(number, engine)))
        await eventually(lambda count=number + 1: waiters(admin, name) == count)
    await free(world, *held)
    await asyncio.wait(waiting[:2])
    assert sorted(number for number, _ in order) == [0, 1]
    await free(world, *(permit for _, permit in order))
    await asyncio.gather(*waiting)
    await free(world, order[-1][1])


@pytest.mark.parametrize("none", [0, timedelta(0)])
async def test_a_fair_acquire_that_does_not_wait_is_in_no_queue(
    world: World, name: str, admin: psycopg.Connection[Any], none: Any
) -> None:
    """With a timeout of zero in any form, an acquire does not enter the queue of a fair semaphore."""
    one = semaphore(world, world.engine(), name, permits=1, fair=True)
    held = await world.call(one.acquire)
    with pytest.raises(LockTimeoutError):
        await world.other().call(one.acquire, timeout=none)
    assert waiters(admin, name) == 0
    await free(world, held)


async def test_a_waiter_that_gives_up_leaves_the_queue(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """After its timeout a fair waiter does not delay other waiters."""
    held = await world.call(semaphore(world, world.engine(), name, permits=1, fair=True).acquire)
    other = world.other()
    with pytest.raises(LockTimeoutError):
        await other.call(semaphore(world, world.engine(), name, permits=1, fair=True).acquire, timeout=0.2)
    await eventually(lambda: waiters(admin, name) == 0)
    await world.call(held.release)


async def test_one_name_excludes_whatever_takes_it(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A lease on the name of a permit's row blocks that permit, and a permit blocks the lease."""
    engine = world.engine()
    held = await world.call(lease(world, engine, f"{name}#1").acquire)
    one = semaphore(world, engine, name, permits=1)
    assert await world.call(one.try_acquire) is None
    await world.call(held.release)
    permit = await world.call(one.try_acquire)
    assert rival(admin, f"{name}#1") is None
    await free(world, permit)


async def test_the_holder_of_an_evicted_permit_is_told(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Evicting any row of a grant ends it; the next renewal notifies the holder and releases the other rows."""
    engine = world.engine()
    pair = await world.call(semaphore(world, engine, name, weight=2).acquire)
    admin.execute("SELECT pgfence_evict_lease_v2(%s, 'operator', 'test', NULL)", [f"{name}#2"])
    with pytest.raises(LockLostError):
        await world.call(pair.renew)
    assert pair.loss_reason == "evicted"
    with pytest.raises(LockLostError):
        await world.call(pair.release)
    await eventually(lambda: row(admin, f"{name}#1").released_at is not None)


@every_row(
    ("what", "arguments", "error", "message"),
    [
        ("no permits", {"permits": 0}, ValueError, "permits must be 1 or more"),
        ("negative", {"permits": -1}, ValueError, "permits must be 1 or more"),
        ("too many", {"permits": 1001}, ValueError, "1000 or less"),
        ("a bool", {"permits": True}, TypeError, "must be an int"),
        ("no weight", {"weight": 0}, ValueError, "weight must be 1 or more"),
        ("too heavy", {"weight": 3}, ValueError, "weight=3 is more than permits=2"),
        ("a choice", {"on_mismatch": "ignore"}, ValueError, "on_mismatch"),
        ("a permit", {"name": "a#1"}, ValueError, "cannot be the name of a semaphore"),
        ("a partition", {"name": "a/12"}, ValueError, "cannot be the name of a semaphore"),
        ("a long name", {"name": "a" * 251}, ValueError, "longer than 250 characters with its namespace, but has 251"),
    ],
)
def test_wrong_arguments_say_what_to_do(what: str, arguments: Any, error: Any, message: str) -> None:
    """An unusable argument is rejected before a statement is sent."""
    with pytest.raises(error, match=message):
        Semaphore(lambda: None, **{"name": "x", "permits": 2, "ttl": 30, **arguments})  # type: ignore[arg-type, return-value]
