"""ReadWriteLock: readers beside each other, one writer, no starving, downgrade; invalid arguments."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pgfence import (
    AdvisoryLock,
    AsyncAdvisoryLock,
    AsyncReadWriteLock,
    AsyncWriteHeld,
    LockKey,
    ReadWriteLock,
    WriteHeld,
)
from pgfence.errors import LockLostError, LockNotHeldError, LockTimeoutError, SelfDeadlockError
from support.locking import has_ticket, labelled, waits
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

pytestmark = [pytest.mark.twins]


def lock(world: World, engine: Any, name: Any) -> Any:
    """Return the world's lock."""
    return world.pick(ReadWriteLock, AsyncReadWriteLock)(engine, name)


@pytest.mark.every_driver
async def test_readers_share_and_a_writer_excludes(world: World, name: str) -> None:
    """Readers of several processes hold the lock at the same time; a writer's try returns None until all release."""
    here, there = lock(world, world.engine(), name), lock(world, world.engine(), name)
    other, third = world.other(), world.other()
    one = await world.call(here.read.try_acquire)
    two = await other.call(here.read.acquire, timeout=5)
    three = await third.call(there.read.acquire, timeout=5)
    assert [holder.mode for holder in await world.call(here.write.holders)] == ["shared"] * 3
    assert await world.other().call(there.write.try_acquire) is None
    for contender, held in ((world, one), (other, two), (third, three)):
        await contender.call(held.release)
    writer = await world.call(there.write.try_acquire)
    assert isinstance(writer, world.pick(WriteHeld, AsyncWriteHeld))
    assert await other.call(here.read.try_acquire) is None
    assert await other.call(here.write.try_acquire) is None
    await world.call(writer.release)


async def test_an_advisory_lock_of_the_name_is_excluded_too(world: World, name: str) -> None:
    """A writer and an AdvisoryLock of the same name exclude each other, because both lock the same key."""
    engine = world.engine()
    exclusive = world.pick(AdvisoryLock, AsyncAdvisoryLock)(world.engine(), name)
    async with world.enter(lock(world, engine, name).read.hold()):
        assert await world.call(exclusive.try_acquire) is None
    async with world.enter(exclusive.hold()):
        assert await world.call(lock(world, engine, name).read.try_acquire) is None


@pytest.mark.every_driver
async def test_overlapping_readers_do_not_starve_a_writer(world: World, name: str) -> None:
    """While a writer waits, readers of any process that come later wait behind it."""
    stop = asyncio.Event()
    reads = 0

    async def read(contender: Any, after: float) -> None:
        nonlocal reads
        one = lock(world, world.engine(), name)
        await asyncio.sleep(after)
        while not stop.is_set():
            held = await contender.call(one.read.acquire, timeout=60)
            reads += 1
            # Longer than a slice of the writer's wait in the server's queue, and never without a reader.
            await asyncio.sleep(1)
            await contender.call(held.release)

    readers = [asyncio.create_task(read(world.other(), n / 4)) for n in range(4)]
    await eventually(lambda: reads >= 4)
    writer = world.other()
    for _ in range(2):
        held = await writer.call(lock(world, world.engine(), name).write.acquire, timeout=12)
        await writer.call(held.release)
    stop.set()
    await asyncio.gather(*readers)


async def test_waiting_writers_go_before_waiting_readers(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Writers that wait for the same reader are served one after the other, before a reader that came between them."""
    reader, order = await world.call(lock(world, world.engine(), name).read.acquire), []

    async def wait(who: str, side: str) -> None:
        contender = world.other()
        held = await contender.call(getattr(lock(world, labelled(world, who), name), side).acquire, timeout=30)
        order.append(who)
        await contender.call(held.release)

    waiting = [asyncio.create_task(wait("first", "write"))]
    await eventually(has_ticket(admin, "first", name))
    waiting.append(asyncio.create_task(wait("reader", "read")))
    await eventually(has_ticket(admin, "reader", name))
    waiting.append(asyncio.create_task(wait("second", "write")))
    # In one slice of the second writer's wait both wait for the key itself.
    await eventually(waits(admin, name, 2))
    await world.call(reader.release)
    await asyncio.gather(*waiting)
    assert order == ["first", "second", "reader"]


async def test_a_reader_cannot_become_a_writer(world: World, name: str) -> None:
    """An upgrade, and a second read, would wait for the caller itself; a try cannot deadlock."""
    one = lock(world, world.engine(), name)
    async with world.enter(one.read.hold()):
        with pytest.raises(SelfDeadlockError, match="a reader cannot become a writer"):
            await world.call(one.write.acquire, timeout=5)
        with pytest.raises(SelfDeadlockError, match="behind a writer that waits for the first"):
            await world.call(one.read.acquire, timeout=5)
        assert await world.call(one.write.try_acquire) is None


@pytest.mark.every_driver
async def test_a_writer_becomes_a_reader_without_a_gap(world: World, name: str) -> None:
    """After downgrade() readers are let in and writers are not; the writer's handle is released."""
    here, there = lock(world, world.engine(), name), lock(world, world.engine(), name)
    writer = await world.call(here.write.acquire)
    reader = await world.call(writer.downgrade)
    assert (writer.state, reader.state) == ("released", "held")
    with pytest.raises(LockNotHeldError):
        await world.call(writer.release)
    other = world.other()
    assert await other.call(there.write.try_acquire) is None
    second = await other.call(there.read.try_acquire)
    await other.call(second.release)
    await world.call(reader.release)
    await other.call((await other.call(there.write.try_acquire)).release)


@pytest.mark.every_driver
async def test_a_downgrade_after_the_loss_says_so(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """When the server has ended the session, there is nothing left to downgrade, and another writer may come."""
    one = lock(world, world.engine(), name)
    writer = await world.call(one.write.acquire)
    (holder,) = await world.call(one.write.holders)
    admin.execute("SELECT pg_terminate_backend(%s, 5000)", [holder.backend_pid])
    with pytest.raises(LockLostError):
        await world.call(writer.downgrade)
    assert writer.state == "lost"
    await world.call((await world.call(one.write.acquire, timeout=5)).release)


@pytest.mark.every_driver
async def test_a_downgrade_waits_for_a_probe(world: World, name: str) -> None:
    """A background probe of the connection, as after a pause of the process, does not disturb a downgrade."""
    one = lock(world, world.engine(), name)
    writer = await world.call(one.write.acquire)

    async def downgrade() -> Any:
        writer._hold.session.probe(writer._hold)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return await writer.downgrade()

    def downgrade_here() -> Any:
        writer._hold.session.probe(writer._hold)
        return writer.downgrade()

    reader = await world.call(world.pick(downgrade_here, downgrade))
    assert reader.state == "held"
    await world.call(reader.release)


@pytest.mark.async_only
async def test_a_cancelled_downgrade_leaves_nothing_behind(world: World, name: str) -> None:
    """Wherever it is cancelled, the lock is free afterwards, also for the same task, or the reader's handle is there."""
    one = AsyncReadWriteLock(world.engine(), name)

    async def downgrade_and_cancel(steps: int) -> bool:
        writer = await one.write.acquire(timeout=5)
        running = asyncio.create_task(writer.downgrade())
        for _ in range(steps):
            await asyncio.sleep(0)
        running.cancel()
        try:
            reader = await running
        except asyncio.CancelledError:
            return False
        await reader.release()
        return True

    assert False in [await world.call(downgrade_and_cancel, steps) for steps in range(1, 6)]
    await world.call((await world.call(one.write.acquire, timeout=5)).release)


async def test_a_key_of_two_integers_works_too(world: World) -> None:
    """Readers wait for a writer, and a writer for readers, on a pair key."""
    key = LockKey.pair(17, 42)
    here, there = lock(world, world.engine(), key), lock(world, world.engine(), key)
    other = world.other()
    held = await world.call(here.write.acquire)
    with pytest.raises(LockTimeoutError):
        await other.call(there.read.acquire, timeout=1.2)
    waiting = asyncio.create_task(other.call(there.read.acquire, timeout=30))
    await asyncio.sleep(0)
    await world.call((await world.call(held.downgrade)).release)
    await other.call((await waiting).release)


async def test_a_timeout_leaves_nothing_behind(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A reader and a writer that give up hold neither the lock nor a place in the queue."""
    here, there = lock(world, world.engine(), name), lock(world, world.engine(), name)
    other = world.other()
    held = await world.call(here.write.acquire)
    for side in (there.read, there.write):
        with pytest.raises(LockTimeoutError, match="held by"):
            await other.call(side.acquire, timeout=1.2)
    await world.call(held.release)
    assert await world.call(here.read.holders) == []
    await other.call((await other.call(there.read.try_acquire)).release)
    await world.call((await world.call(here.write.try_acquire)).release)


def test_what_cannot_hold_it_is_rejected(dsn: str) -> None:
    """A Connection is rejected, because a ReadWriteLock needs an engine."""
    from sqlalchemy import create_engine

    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    with engine.connect() as connection, pytest.raises(TypeError, match="not Connection"):
        ReadWriteLock(connection, "x")  # type: ignore[arg-type]
    engine.dispose()
