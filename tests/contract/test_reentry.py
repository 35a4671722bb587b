"""A thread or task asks for a lock that it holds: a try returns None, a wait raises SelfDeadlockError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import pgfence
from pgfence.errors import LockTimeoutError, SelfDeadlockError
from support import leases, locking, transactions
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.usefixtures("tables")

both = pytest.mark.parametrize("world", ["psycopg", "asyncpg"], indirect=True)


def advisory(world: World, engine: Any, name: str) -> Any:
    return locking.lock(world, engine, name)


def with_token(world: World, engine: Any, name: str) -> Any:
    return locking.lock(world, engine, name, token=True)


def once(world: World, engine: Any, name: str) -> Any:
    return world.pick(pgfence.Once, pgfence.AsyncOnce)(engine, name, cron="0 0 1 1 *")


@pytest.mark.twins
@pytest.mark.matrix
@both
@pytest.mark.parametrize("noun", [advisory, with_token, leases.lease, once])
async def test_a_try_on_what_is_held_here_is_busy(world: World, noun: Any, name: str) -> None:
    """C006: try_acquire() returns None, timeout=0 names the holder and says that it is this one, and busy="skip" skips."""
    engine, ran = world.engine(), []
    one = noun(world, engine, name)

    def sync() -> None:
        ran.append(skipping())

    async def asynchronous() -> None:
        ran.append(await skipping())

    skipping = one.wrap(busy="skip")(world.pick(sync, asynchronous))
    async with world.enter(one.hold()) as held:
        assert await world.call(noun(world, engine, name).try_acquire) is None
        with pytest.raises(LockTimeoutError, match=f"this {world.pick('thread', 'task')} already holds it") as caught:
            await world.call(one.acquire, timeout=0)
        assert caught.value.held_here == (name,)
        assert [holder.name for holder in caught.value.holders] == [name]
        with pytest.raises(SelfDeadlockError, match="already"):
            await world.call(one.acquire, timeout=20)
        assert await world.call(skipping) is None
        assert ran == []
        held.check()


@both
async def test_a_skipping_function_that_meets_itself_is_skipped(world: World, name: str) -> None:
    """The inner call of a recursive function returns None, and the outer one continues."""
    ran: list[Any] = []

    def sync() -> str:
        ran.append(skipping())
        return "outer"

    async def asynchronous() -> str:
        ran.append(await skipping())
        return "outer"

    skipping = advisory(world, world.engine(), name).wrap(busy="skip")(world.pick(sync, asynchronous))
    assert await world.call(skipping) == "outer"
    assert ran == [None]


@pytest.mark.twins
@both
@pytest.mark.parametrize("shared", [False, True])
async def test_a_transaction_does_not_wait_for_its_own_tasks_lock(world: World, name: str, *, shared: bool) -> None:
    """A transaction that would wait for its task's own lock raises SelfDeadlockError, and stays usable."""
    engine, elsewhere = world.engine(), world.engine()
    async with world.enter(advisory(world, engine, name).hold()), transactions.session(world, elsewhere) as work:
        mine = transactions.lock(work, "before", name, "other", shared=shared)
        await transactions.run(world, work, "SET LOCAL lock_timeout = 4321")
        with pytest.raises(SelfDeadlockError, match="AdvisoryLock.connect") as caught:
            await world.call(mine.acquire, timeout=20)
        assert name in caught.value.names
        assert await world.call(mine.try_acquire) is False
        with pytest.raises(LockTimeoutError):
            await world.call(mine.acquire, timeout=0)
        assert await transactions.value(world, work, "SHOW lock_timeout") == "4321ms"
        await world.call(transactions.lock(work, "before", "other").acquire, timeout=0)


@both
async def test_a_transaction_on_the_connection_of_the_lock_is_granted(world: World, name: str) -> None:
    """The session that holds the key is the one that asks, for a lock on a Connection and for connect()."""
    engine = world.engine()
    async with transactions.connection(world, engine) as work:
        async with world.enter(locking.lock(world, work, name).hold()):
            await world.call(transactions.lock(work, name).acquire, timeout=5)
            await world.call(work.rollback)
    async with world.enter(advisory(world, engine, name).connect()) as work:
        await world.call(transactions.lock(work, name).acquire, timeout=5)


@both
async def test_a_transaction_waits_for_the_lock_of_another_task(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """The caller's own hold of that name in another database does not count, and another task will end."""
    engine, other = world.engine(), world.other()
    another_database = world.engine(dsn=dsn.rsplit("/", 1)[0] + "/postgres")
    theirs = await other.call(advisory(world, engine, name).acquire)
    async with (
        world.enter(advisory(world, another_database, name).hold()),
        transactions.connection(world, engine) as work,
        locking.background(world.call(transactions.lock(work, name).acquire, timeout=20)) as task,
    ):
        await eventually(locking.waits(admin, name))
        await other.call(theirs.release)
        await task


@both
async def test_a_lock_does_not_wait_for_its_own_hold_on_another_engine(world: World, name: str) -> None:
    """Two engines of one database have two local queues; the server shows that the holder is this very task."""
    one, two = world.engine(), world.engine()
    async with world.enter(advisory(world, one, name).hold()) as held:
        assert await world.call(advisory(world, two, name).try_acquire) is None
        with pytest.raises(SelfDeadlockError, match="another connection"):
            await world.call(advisory(world, two, name).acquire, timeout=20)
        held.check()


@pytest.mark.matrix
@both
@pytest.mark.parametrize(
    ("outer", "inner"), [(with_token, leases.lease), (leases.lease, with_token), (once, with_token)]
)
async def test_a_lease_and_a_token_lock_of_one_name_know_each_other(
    world: World, outer: Any, inner: Any, name: str
) -> None:
    """They exclude each other by their row, so a wait for the one under the other raises, and a try is busy."""
    engine = world.engine()
    async with world.enter(outer(world, engine, name).hold()) as held:
        one = inner(world, engine, name)
        assert await world.call(one.try_acquire) is None
        with pytest.raises(LockTimeoutError, match="already holds it"):
            await world.call(one.acquire, timeout=0)
        with pytest.raises(SelfDeadlockError, match="already"):
            await world.call(one.acquire, timeout=20)
        held.check()
