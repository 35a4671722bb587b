"""AdvisoryLock serves the waiters of different processes in the order in which they came, once they wait longer than a slice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pgfence.errors import LockTimeoutError
from pgfence.keys import LockKey
from support.locking import (
    background,
    elsewhere,
    give,
    has_ticket,
    is_free,
    labelled,
    lock,
    sessions,
    take,
    terminate,
    waits,
)
from support.turns import Waiters
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AsyncExitStack

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins


@pytest.mark.every_driver
async def test_waiters_of_different_processes_are_served_in_order(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], stack: AsyncExitStack
) -> None:
    """Waiters are served in the order of arrival, however many slices they wait."""
    with elsewhere(dsn, name) as holder:
        waiters = Waiters(world, stack, admin, name)
        expected = [await waiters.add() for _ in range(4)]
        assert not waiters.overtaken
        await waiters.settle()
        give(holder, name)
        assert await waiters.finish() == expected
        assert is_free(holder, name)


@pytest.mark.parametrize("names", [("a", "b"), (LockKey.pair(11, 12),)], ids=["several", "pair"])
async def test_several_names_and_pairs_have_an_order_too(
    world: World, names: Any, name: str, dsn: str, admin: psycopg.Connection[Any], stack: AsyncExitStack
) -> None:
    """Locks with the same keys queue together."""
    keys = tuple(f"{name}:{one}" if isinstance(one, str) else one for one in names)
    with elsewhere(dsn, keys[0]) as holder:
        waiters = Waiters(world, stack, admin, *keys)
        expected = [await waiters.add() for _ in range(3)]
        await waiters.settle()
        give(holder, keys[0])
        assert await waiters.finish() == expected


async def test_a_lock_with_a_token_keeps_the_order(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], stack: AsyncExitStack, tables: None
) -> None:
    """The server's function waits in the order of the tickets, too."""
    with elsewhere(dsn, name) as holder:
        waiters = Waiters(world, stack, admin, name)
        expected = [await waiters.add(token=True) for _ in range(3)]
        await waiters.settle()
        give(holder, name)
        assert await waiters.finish() == expected


async def test_a_waiter_whose_session_ends_does_not_keep_the_others_back(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], stack: AsyncExitStack
) -> None:
    """A ticket ends with its session: the next waiter moves up, and the former owner joins the end of the queue."""
    with elsewhere(dsn, name) as holder:
        waiters = Waiters(world, stack, admin, name)
        for _ in range(3):
            await waiters.add()
        (session,) = sessions(admin, waiters.labelled(1))
        terminate(admin, session.pid)
        await eventually(has_ticket(admin, waiters.labelled(1), name))
        give(holder, name)
        assert await waiters.finish() == [0, 2, 1]


async def test_a_waiter_that_gives_up_leaves_no_ticket(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], advisory_rows: Callable[[], list[Any]]
) -> None:
    """After a timeout nothing is held but the lock of the holder, and the session is kept."""
    engine, other = labelled(world, f"turns-{name}"), world.other()
    with elsewhere(dsn, name) as holder:
        with pytest.raises(LockTimeoutError):
            await other.call(lock(world, engine, name).acquire, timeout=1.2)
        assert [row.pid for row in advisory_rows()] == [holder.info.backend_pid]
        assert len(sessions(admin, f"turns-{name}")) == 1


@pytest.mark.async_only
async def test_a_cancelled_waiter_leaves_no_ticket(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], advisory_rows: Callable[[], list[Any]]
) -> None:
    """The connection of a cancelled waiter is closed, which releases the ticket."""
    label = f"turns-{name}"
    with elsewhere(dsn, name) as holder:
        async with background(
            world.other().call(lock(world, labelled(world, label), name).acquire, timeout=60)
        ) as task:
            await eventually(has_ticket(admin, label, name))
            task.cancel()
        await eventually(lambda: [row.pid for row in advisory_rows()] == [holder.info.backend_pid])


async def test_clients_that_use_the_key_without_pgfence_are_served(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], stack: AsyncExitStack
) -> None:
    """A plain pg_advisory_lock waits in the server together with the waiter that has the first ticket."""
    with elsewhere(dsn, name) as holder, elsewhere(dsn) as plain:
        waiters = Waiters(world, stack, admin, name)
        for _ in range(2):
            await waiters.add()
        wait = asyncio.create_task(asyncio.to_thread(take, plain, name))
        await eventually(waits(admin, name, 2))
        give(holder, name)
        await wait
        give(plain, name)
        assert await waiters.finish() == [0, 1]


async def test_an_index_can_be_built_beside_a_queue(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], stack: AsyncExitStack
) -> None:
    """CREATE INDEX CONCURRENTLY on the session that holds the lock waits for a slice of each waiter, and no longer."""
    table = f"t_{name.rsplit(':', 1)[1]}"
    admin.execute(f"CREATE TABLE {table} AS SELECT n FROM generate_series(1, 100) AS n")
    with elsewhere(dsn, name) as holder:
        waiters = Waiters(world, stack, admin, name)
        for _ in range(6):
            await waiters.add()
        await asyncio.to_thread(holder.execute, f"CREATE INDEX CONCURRENTLY built_{table} ON {table} (n)")
        assert waiters.served == []
        give(holder, name)
        assert await waiters.finish() == list(range(6))
    valid = admin.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = %s::regclass", [f"built_{table}"])
    assert valid.fetchone() == (True,)
    admin.execute(f"DROP TABLE {table}")
