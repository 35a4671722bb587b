"""A full lock table prevents all logins: pgfence stops before it is full, and releases its locks when others fill it."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence import schema
from pgfence.errors import CapacityError
from pgfence.fence import fence
from support.locking import lock
from support.servers import own
from support.transactions import session
from support.waiting import blocking

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import OwnServer
    from support.worlds import World

pytestmark = pytest.mark.twins

CONNECTIONS, PER_TRANSACTION = 20, 64
LIMIT = CONNECTIONS * PER_TRANSACTION
MANY = 20_000
GATES = 10_000


@pytest.fixture(scope="module")
def _small() -> Iterator[OwnServer]:
    with own(
        fsync=False,
        settings={"max_connections": str(CONNECTIONS), "max_locks_per_transaction": str(PER_TRANSACTION)},
    ) as server:
        yield server


@pytest.fixture
def small(_small: OwnServer) -> Iterator[OwnServer]:
    """A server with room for few locks, left empty by each test and healthy."""
    yield _small
    blocking(lambda: _advisory(_small) == 0)
    assert_healthy(_small)


def _advisory(server: OwnServer) -> int:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        return connection.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone()[0]


def assert_healthy(server: OwnServer) -> None:
    """A new session can log in and create tables, each of which takes a few locks."""
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        for number in range(5):
            connection.execute(f"CREATE TEMPORARY TABLE healthy{number} (id bigint PRIMARY KEY, what text UNIQUE)")


def names(count: int, label: str = "many") -> list[str]:
    return [f"{label}:{number}" for number in range(count)]


async def test_a_request_that_would_fill_the_table_is_rejected(world: World, small: OwnServer) -> None:
    """C035: twenty thousand keys: CapacityError with the figures, nothing locked, all other sessions unaffected."""
    engine = world.engine(dsn=small.dsn)
    one = lock(world, engine, *names(MANY))
    for call in (one.try_acquire, one.acquire):
        with pytest.raises(CapacityError, match="max_locks_per_transaction") as caught:
            await world.call(call)
        assert caught.value.limit == LIMIT
        assert 0 <= caught.value.used < LIMIT
        assert _advisory(small) == 0
    assert_healthy(small)
    async with world.enter(lock(world, engine, "few").hold(timeout=5)):
        assert_healthy(small)


async def test_many_requests_that_would_fill_it_together_are_rejected(world: World, small: OwnServer) -> None:
    """C035: piece by piece, small ones and large ones, it stops below nine tenths, and what is held stays held."""
    engine = world.engine(dsn=small.dsn)
    async with AsyncExitStack() as stack:
        taken: list[Any] = []
        with pytest.raises(CapacityError):
            for number in range(CONNECTIONS):
                other = lock(world, engine, *names(150 if number % 2 else 90, f"part{number}"))
                taken.append(await stack.enter_async_context(world.enter(other.hold(timeout=5))))
        held = sum(len(handle.keys) for handle in taken)
        assert LIMIT * 0.6 < held <= LIMIT * 0.9
        assert _advisory(small) == held
        assert_healthy(small)
        for handle in taken:
            handle.check()


async def test_released_entries_are_available_at_once(
    world: World, small: OwnServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of the table, locked and released several times within a second: never rejected, and no warning."""
    one = lock(world, world.engine(dsn=small.dsn), *names(LIMIT // 2))
    with caplog.at_level(logging.WARNING, "pgfence"):
        for _ in range(5):
            async with world.enter(one.hold(timeout=5)):
                assert _advisory(small) == LIMIT // 2
    assert warned(caplog) == 0


async def test_a_table_that_fills_up_is_logged_once(
    world: World, small: OwnServer, caplog: pytest.LogCaptureFixture
) -> None:
    """C035: from eight tenths on there is a warning in the log."""
    engine = world.engine(dsn=small.dsn)
    with caplog.at_level(logging.WARNING, "pgfence"):
        async with world.enter(lock(world, engine, *names(int(LIMIT * 0.7), "first")).hold(timeout=5)):
            assert warned(caplog) == 0
            async with world.enter(lock(world, engine, *names(int(LIMIT * 0.13), "second")).hold(timeout=5)):
                assert warned(caplog) == 1
    assert warned(caplog) == 1


def warned(caplog: pytest.LogCaptureFixture) -> int:
    return sum("lock table" in record.getMessage() for record in caplog.records)


@pytest.mark.every_driver
async def test_a_table_that_others_have_filled_is_a_capacity_error_too(world: World, small: OwnServer) -> None:
    """C035: on SQLSTATE 53200 all keys that this lock acquired are released, for a try and a wait; then it works again."""
    engine = world.engine(dsn=small.dsn)
    one = lock(world, engine, *names(60, "ours"))
    warm = await world.call(one.acquire)
    await world.call(warm.release)
    with psycopg.connect(small.dsn, autocommit=True) as filler:
        for call in (one.try_acquire, one.acquire):
            fill(filler)
            with pytest.raises(CapacityError) as caught:
                await world.call(call)
            assert caught.value.sqlstate == "53200"
            filler.execute("SELECT pg_advisory_unlock_all()")
            assert _advisory(small) == 0
            async with world.enter(one.hold(timeout=5)):
                assert _advisory(small) == 60


def fill(connection: psycopg.Connection[Any]) -> None:
    """Take keys until the server has no room for one more."""
    try:
        connection.execute("SELECT pg_advisory_lock(i) FROM generate_series(1, 1000000) AS i")
    except psycopg.errors.OutOfMemory:
        return
    raise AssertionError("the lock table has no end")


async def test_raising_more_gates_than_there_is_room_for_is_a_capacity_error(world: World, small: OwnServer) -> None:
    """C035: thousands of new tokens in one transaction: nothing is left, and the next transaction gets in."""
    engine = world.engine(dsn=small.dsn)
    await world.call(schema.create_all, engine)
    with psycopg.connect(small.dsn, autocommit=True) as admin:
        admin.execute(
            "INSERT INTO pgfence_gate (resource, token, updated_at) SELECT 'many:' || i, 1, now() FROM generate_series(0, %s) AS i ON CONFLICT DO NOTHING",
            [GATES],
        )
    async with session(world, engine) as work:
        with pytest.raises(CapacityError, match="enter fewer gates in one transaction") as caught:
            await world.call(fence, work, dict.fromkeys(names(GATES), 2))
        assert caught.value.sqlstate == "53200"
    async with session(world, engine) as work:
        await world.call(fence, work, dict.fromkeys(names(GATES), 1))
        await world.call(work.commit)
