"""AdvisoryLock with several names acquires all of them or none, in one order."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from pgfence.errors import LockTimeoutError
from pgfence.keys import LockKey
from support.locking import background, elsewhere, give, is_free, labelled, lock, sessions, standing, take, waits
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins


@pytest.mark.every_driver
async def test_all_names_are_one_lock_on_one_session(
    world: World, name: str, admin: psycopg.Connection[Any], advisory_rows: Callable[[], list[Any]]
) -> None:
    """One session locks all keys in sorted order, and one release frees all of them."""
    names = [f"{name}:{n}" for n in range(5)]
    async with world.enter(lock(world, world.engine(), *names).hold()) as held:
        rows = advisory_rows()
        assert len(rows) == 5
        assert len({row.pid for row in rows}) == 1
        assert held.names == tuple(names)
        assert held.keys == tuple(sorted(map(LockKey.of, names)))
    assert advisory_rows() == []


async def test_the_same_key_counts_once(
    world: World, name: str, admin: psycopg.Connection[Any], advisory_rows: Callable[[], list[Any]]
) -> None:
    """C006: a name given twice, or a name and its number, is one key, which is acquired and released once."""
    key = LockKey.of(name)
    one = lock(world, world.engine(), name, LockKey.raw(key.value), name, LockKey.raw(5))
    for _ in range(2):
        async with world.enter(one.hold()) as held:
            assert held.keys == tuple(sorted([key, LockKey.raw(5)]))
            assert len(advisory_rows()) == 2
        assert advisory_rows() == []
    assert is_free(admin, name)


@pytest.mark.every_driver
async def test_both_key_spaces_go_together(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], advisory_rows: Callable[[], list[Any]]
) -> None:
    """Names, raw numbers and pairs of any sign in one lock are acquired by a try and by both kinds of wait."""
    keys = [LockKey.of(name), LockKey.raw(-(2**63)), LockKey.pair(-1, -5), LockKey.pair(2**31 - 1, -(2**31))]
    one = lock(world, world.engine(), *keys)
    async with world.enter(one.hold()):
        assert [row.objsubid for row in sorted(advisory_rows(), key=lambda row: row.objsubid)] == [1, 1, 2, 2]
        assert not any(is_free(admin, key) for key in keys)
    with elsewhere(dsn, keys[2]) as holder:
        assert await world.call(one.try_acquire) is None
        async with background(world.call(one.acquire, timeout=5)) as task:
            await eventually(waits(admin, keys[2]))
            await asyncio.sleep(0.7)
            await eventually(waits(admin, keys[2]))  # a later, quiet slice
            give(holder, keys[2])
            held = await task
        assert len(advisory_rows()) == 4
        await world.call(held.release)


@pytest.mark.matrix
@pytest.mark.every_driver
@pytest.mark.parametrize("busy", [0, 1, 2], ids=["first", "middle", "last"])
async def test_a_failed_try_releases_what_it_locked(
    world: World, name: str, dsn: str, busy: int, advisory_rows: Callable[[], list[Any]]
) -> None:
    """C032: whichever of three names is held elsewhere, the other two are free after the try."""
    keys = sorted(LockKey.of(f"{name}:{n}") for n in range(3))
    with elsewhere(dsn, keys[busy]) as holder:
        one = lock(world, world.engine(), *keys)
        assert await world.call(one.try_acquire) is None
        assert [row.pid for row in advisory_rows()] == [holder.info.backend_pid]
        with pytest.raises(LockTimeoutError) as caught:
            await world.call(one.acquire, timeout=0)
        assert [seen.key for seen in caught.value.holders] == [keys[busy]]


@pytest.mark.matrix
@pytest.mark.parametrize("timeout", [0.2, 1.2], ids=["first-slice", "quiet-slices"])
async def test_a_timeout_leaves_none_of_them(
    world: World, name: str, dsn: str, timeout: float, advisory_rows: Callable[[], list[Any]]
) -> None:
    """C032: if one of three names is held elsewhere, the wait ends in time, and the other two are free."""
    keys = sorted(LockKey.of(f"{name}:{n}") for n in range(3))
    with elsewhere(dsn, keys[1]) as holder:
        start = time.monotonic()
        with pytest.raises(LockTimeoutError) as caught:
            await world.call(lock(world, world.engine(), *keys).acquire, timeout=timeout)
        assert timeout - 0.05 < time.monotonic() - start < FAR
        assert [row.pid for row in advisory_rows()] == [holder.info.backend_pid]
        assert is_free(holder, keys[0])
        assert is_free(holder, keys[2])
        assert caught.value.keys == tuple(keys)


async def test_keys_that_come_free_one_after_the_other_are_all_taken(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """If three names are freed one after the other, one wait acquires the lock after the last of them."""
    keys = sorted(LockKey.of(f"{name}:{n}") for n in range(3))
    with elsewhere(dsn, *keys) as holder:
        async with background(world.call(lock(world, world.engine(), *keys).acquire, timeout=10)) as task:
            for key in keys:
                await eventually(waits(admin, key))
                assert not task.done()
                give(holder, key)
            held = await task
        await world.call(held.release)


async def test_order_of_asking_does_not_matter(world: World, name: str) -> None:
    """C032: four contenders that request random subsets of ten names in random order are all served."""
    rounds = 25
    engines = [world.engine(), world.engine()]
    busy: set[str] = set()

    async def contend(number: int) -> None:
        other, dice = world.other(), random.Random(number)
        for _ in range(rounds):
            some = dice.choices([f"{name}:{n}" for n in range(10)], k=dice.randint(1, 5))
            async with other.enter(lock(world, engines[number % 2], *some).hold(timeout=20)):
                mine = set(some)
                assert not busy & mine
                busy.update(mine)
                await asyncio.sleep(0)
                busy.difference_update(mine)

    await asyncio.gather(*(contend(number) for number in range(4)))


@pytest.mark.every_driver
async def test_thousands_of_names_are_one_lock(
    world: World, name: str, dsn: str, advisory_rows: Callable[[], list[Any]]
) -> None:
    """2,000 names and pairs are acquired by a try and a wait; a failed try holds none, and a release frees all."""
    names = [f"{name}:{n}" for n in range(1_900)]
    one = lock(world, world.engine(), *names, *(LockKey.pair(-n, n) for n in range(100)))
    async with world.enter(one.hold()) as held:
        assert len(advisory_rows()) == 2_000
        assert held.keys == tuple(sorted(held.keys))
    for middle in (held.keys[1_000], held.keys[1_950]):
        with elsewhere(dsn, middle) as holder:
            assert await world.call(one.try_acquire) is None
            assert [row.pid for row in advisory_rows()] == [holder.info.backend_pid]
    with elsewhere(dsn, held.keys[1_000]) as holder:
        async with background(world.call(one.acquire, timeout=10)) as task:
            await eventually(waits(holder, held.keys[1_000]))
            give(holder, held.keys[1_000])
            again = await task
        assert len(advisory_rows()) == 2_000
        await world.call(again.release)
        assert advisory_rows() == []


async def test_overlapping_sets_share_one_queue(world: World, name: str) -> None:
    """In one process {A, B} waits behind {A} and before {B, C}: served in the order of arrival."""
    engine, served = world.engine(), []
    a, b, c = (f"{name}:{letter}" for letter in "abc")
    held = await world.call(lock(world, engine, a).acquire)

    async def contend(label: str, *names: str) -> None:
        other = world.other()
        async with other.enter(lock(world, engine, *names).hold(timeout=10)):
            served.append(label)

    tasks = []
    for label, names in (("ab", (a, b)), ("bc", (b, c)), ("c", (c,))):
        tasks.append(asyncio.create_task(contend(label, *names)))
        await eventually(lambda expected=len(tasks): standing(engine) == expected)
    await world.call(held.release)
    await asyncio.gather(*tasks)
    assert served == ["ab", "bc", "c"]


async def test_a_single_name_and_a_set_exclude_each_other(world: World, name: str, dsn: str) -> None:
    """One engine holds {A, B}; another cannot acquire A alone, B alone or {B, C}, and gets C."""
    a, b, c = (f"{name}:{letter}" for letter in "abc")
    ours, theirs = world.engine(), world.engine()
    async with world.enter(lock(world, ours, a, b).hold()):
        for names in ((a,), (b,), (b, c)):
            assert await world.call(lock(world, theirs, *names).try_acquire) is None
        async with world.enter(lock(world, theirs, c).hold(timeout=0)):
            pass


@pytest.mark.every_driver
async def test_a_wait_for_many_keys_is_sliced_as_a_whole(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """`lock_timeout` counts per key: keys that are freed one by one are waited for in several transactions."""
    keys = sorted(LockKey.of(f"{name}:{n}") for n in range(4))
    seen: set[Any] = set()
    with elsewhere(dsn, *keys) as holder:
        one = lock(world, labelled(world, name), *keys)
        async with background(world.call(one.acquire, timeout=20)) as task:
            await eventually(waits(admin, keys[0]))
            for key in keys:
                until = time.monotonic() + 0.3
                while time.monotonic() < until:
                    seen |= {session.xact_start for session in sessions(admin, name)}
                    await asyncio.sleep(0.02)
                give(holder, key)
            held = await task
        await world.call(held.release)
    assert len(seen - {None}) > 1


async def test_a_set_of_names_is_handed_over_like_one(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """The next contender for exactly the same names gets the same connection, whatever order it wrote them in."""
    engine = labelled(world, name)
    a, b = f"{name}:a", f"{name}:b"
    held = await world.call(lock(world, engine, a, b).acquire)
    other = world.other()
    async with background(other.call(lock(world, engine, b, a).acquire, timeout=5)) as task:
        await eventually(lambda: standing(engine) == 1)
        await world.call(held.release)
        second = await task
    assert len(sessions(admin, name)) == 1
    assert not is_free(admin, a)
    assert not is_free(admin, b)
    await other.call(second.release)
    take(admin, a)
    assert give(admin, a)
