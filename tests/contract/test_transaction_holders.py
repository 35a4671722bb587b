"""holders() of a transaction lock: the sessions with exactly that key, and no others."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence.errors import LockTimeoutError
from pgfence.keys import LockKey
from support.servers import with_database
from support.transactions import connection, lock, run, session, value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.worlds import World

pytestmark = pytest.mark.twins


@contextmanager
def holding(dsn: str, call: str, name: str) -> Iterator[psycopg.Connection[Any]]:
    """A separate session that calls a lock function."""
    with psycopg.connect(dsn, autocommit=True, application_name=name) as other:
        other.execute(f"SELECT pg_{call}")
        yield other


async def ask(world: World, work: Any, function: Callable[..., Any], *args: Any) -> Any:
    return await world.call(*((work.run_sync, function) if world.is_async else (function, work)), *args)


@pytest.mark.every_driver
async def test_only_the_holder_of_the_very_key_is_named(world: World, dsn: str) -> None:
    """C117: half a key, the other key space and another database are not the key, and a negative one is found."""
    high = (7 << 32) | 0xFFFFFFFB
    elsewhere = with_database(dsn, "template1")
    with (
        holding(dsn, "advisory_lock(-5)", "the holder"),
        holding(dsn, f"advisory_lock({high})", "other half"),
        holding(dsn, "advisory_lock(-1, -5)", "other space"),
        holding(elsewhere, "advisory_lock(-5)", "other database"),
    ):
        async with session(world, world.engine()) as work:
            (found,) = await world.call(lock(work, LockKey.raw(-5)).holders)
            assert (found.application_name, found.key, found.mode) == ("the holder", LockKey.raw(-5), "exclusive")
            (found,) = await world.call(lock(work, LockKey.pair(-1, -5)).holders)
            assert found.application_name == "other space"
            assert await world.call(lock(work, LockKey.raw(-4)).holders) == []
            assert await world.call(lock(work, LockKey.raw(-4)).is_held) is False
            assert await world.call(lock(work, LockKey.raw(-4), LockKey.raw(-5)).is_held) is True


@pytest.mark.matrix
@pytest.mark.every_driver
@pytest.mark.parametrize("number", [0, 1, -1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63)])
async def test_every_number_is_decoded(world: World, dsn: str, number: int) -> None:
    """C117: what pg_locks shows unsigned is the key again, in both key spaces."""
    low = (number & 0xFFFFFFFF) - (1 << 32 if number & 0x80000000 else 0)
    pair = LockKey.pair(number >> 32, low)
    with (
        holding(dsn, f"advisory_lock('{number}'::bigint)", "whole"),
        holding(dsn, f"advisory_lock_shared('{number >> 32}'::int, '{low}'::int)", "pair"),
    ):
        async with connection(world, world.engine()) as work:
            found = await world.call(lock(work, LockKey.raw(number), pair).holders)
            assert {(one.key, one.mode, one.application_name) for one in found} == {
                (LockKey.raw(number), "exclusive", "whole"),
                (pair, "shared", "pair"),
            }


@pytest.mark.every_driver
async def test_a_holder_is_described(world: World, dsn: str, name: str) -> None:
    """A holder has its application name, backend, host and start time."""
    key = LockKey.of(name)
    with holding(dsn, f"advisory_lock({key.value})", "described") as other:
        async with connection(world, world.engine()) as work:
            (found,) = await world.call(lock(work, name).holders)
            pid = other.info.backend_pid
            assert (found.name, found.kind, found.backend_pid, found.pid) == (name, "advisory", pid, None)
            assert found.since is not None and found.since.tzinfo is not None
            host = await value(world, work, f"SELECT host(client_addr) FROM pg_stat_activity WHERE pid = {pid}")
            assert found.host == host
            assert "described" in str(found)


async def test_a_waiter_is_no_holder(world: World, name: str, advisory_rows: Any, eventually: Any) -> None:
    """A waiter also has a row in pg_locks, but is not reported as a holder."""
    engine, waiter = world.engine(), world.other()
    async with connection(world, engine) as holder, connection(world, engine, waiter) as waits:
        await world.call(lock(holder, name).acquire)
        waiting = asyncio.create_task(waiter.call(lock(waits, name).acquire, timeout=10))
        await eventually(lambda: len(advisory_rows()) == 2)
        (found,) = await world.call(lock(holder, name).holders)
        assert found.backend_pid == await value(world, holder, "SELECT pg_backend_pid()")
        await world.call(holder.commit)
        await waiting


async def test_looking_takes_no_lock(world: World, name: str, advisory_rows: Any) -> None:
    """holders() and is_held() leave no row in pg_locks."""
    async with session(world, world.engine()) as work:
        assert await world.call(lock(work, name).is_held) is False
        assert await world.call(lock(work, name).holders) == []
        assert advisory_rows() == []


@pytest.mark.every_driver
async def test_a_role_that_sees_nothing_of_others_still_sees_that_it_is_held(
    world: World, name: str, role: Any
) -> None:
    """Columns that the role may not see are None; the holder's backend is still reported."""
    async with (
        connection(world, world.engine()) as holder,
        connection(world, world.engine(dsn=role())) as work,
    ):
        await world.call(lock(holder, name).acquire)
        with pytest.raises(LockTimeoutError) as caught:
            await world.call(lock(work, name).acquire, timeout=0.02)
        (found,) = caught.value.holders
        assert found.backend_pid == await value(world, holder, "SELECT pg_backend_pid()")
        assert (found.host, found.since) == (None, None)


async def test_a_prepared_transaction_is_a_holder_without_a_process(world: World, name: str, lend_server: Any) -> None:
    """A lock of a prepared transaction is held without a process, and the message names the transaction."""
    server = lend_server(max_prepared_transactions="2")
    engine = world.engine(dsn=server.dsn)
    async with connection(world, engine) as work:
        await world.call(lock(work, name).acquire)
        await run(world, work, "PREPARE TRANSACTION 'stuck'")
        await world.call(work.rollback)
        with pytest.raises(LockTimeoutError, match="prepared transaction 'stuck'") as caught:
            await world.call(lock(work, name).acquire, timeout=0.02)
        (found,) = caught.value.holders
        assert (found.backend_pid, found.application_name) == (None, None)
        assert found.since is not None
        await world.call(work.rollback)
        # Whoever took it is another transaction now, and has to ask like everybody else.
        assert await world.call(lock(work, name).try_acquire) is False
        await world.call(work.rollback)
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute("ROLLBACK PREPARED 'stuck'")
