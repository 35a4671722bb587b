"""Leases through PgBouncer in transaction mode: they need no dedicated session, so they work there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import event

from pgfence import (
    AsyncElection,
    AsyncPartitions,
    AsyncRateLimit,
    AsyncSemaphore,
    Election,
    Partitions,
    RateLimit,
    Semaphore,
)
from pgfence.config import configure
from support.leases import lease, rival, row
from support.locking import background
from support.transactions import connection, value
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World

pytestmark = pytest.mark.usefixtures("tables")


def pooled(world: World, through: str, **settings: Any) -> Any:
    """Return an engine as its driver's manual wants it behind a transaction pooler."""
    arguments: dict[str, dict[str, Any]] = {
        "psycopg": {"prepare_threshold": None},
        "psycopg2": {},
        "psycopg_async": {"prepare_threshold": None},
        "asyncpg": {"statement_cache_size": 0, "prepared_statement_cache_size": 0},
    }
    engine = world.engine(dsn=through, connect_args=arguments[world.name])
    configure(engine, **settings)
    return engine


@pytest.mark.matrix
@pytest.mark.parametrize("pooler", ["auto", "transaction"])
async def test_a_lease_is_taken_renewed_and_released_through_it(
    world: World, name: str, pgbouncer: Callable[..., str], admin: psycopg.Connection[Any], pooler: str
) -> None:
    """C022: declared or not, for longer than its TTL, with other clients on the same sessions, and again and again."""
    through = pgbouncer("transaction")
    engine = pooled(world, through, pooler=pooler)
    one = lease(world, engine, name, ttl=3)
    others = [psycopg.connect(through, prepare_threshold=None) for _ in range(2)]
    try:
        for turn in range(3):
            async with world.enter(one.hold()) as held:
                before = held.expires_at
                for other in others:
                    other.execute("SELECT 1")
                    other.commit() if turn % 2 else None
                await eventually(lambda at=before: held.expires_at > at)
                assert rival(admin, name) is None
    finally:
        for other in others:
            other.close()
    assert rival(admin, name) == 4


async def test_a_waiter_gets_the_lease_without_a_notification(
    world: World, name: str, pgbouncer: Callable[..., str], admin: psycopg.Connection[Any]
) -> None:
    """NOTIFY does not come through, the look at the row does."""
    engine = pooled(world, pgbouncer("transaction"), pooler="transaction")
    asked: list[str] = []
    event.listen(getattr(engine, "sync_engine", engine), "after_cursor_execute", lambda *args: asked.append(args[2]))
    one = lease(world, engine, name)
    rival(admin, name)
    async with background(world.other().call(one.acquire, timeout=20)) as waiting:
        await eventually(lambda: any("acquire_lease_v2" in text for text in asked))
        found = row(admin, name)
        admin.execute("SELECT pgfence_release_lease_v1(%s, %s, %s)", [name, str(found.lease_id), found.token])
        held = await waiting
    await world.call(held.release)


async def test_the_poolers_sessions_keep_nothing_of_pgfence(
    world: World, name: str, pgbouncer: Callable[..., str]
) -> None:
    """C021: no setting, no lock, no prepared statement is left for the next client of a session."""
    through = pgbouncer("transaction")
    engine = pooled(world, through)
    async with world.enter(lease(world, engine, name, ttl=3).hold()) as held:
        before = held.expires_at
        await eventually(lambda: held.expires_at > before)
    async with connection(world, pooled(world, through)) as plain:
        for query, wanted in (
            ("SELECT current_setting('lock_timeout')", "0"),
            ("SELECT current_setting('synchronous_commit')", "on"),
            ("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()", 0),
            ("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%pgfence%'", 0),
        ):
            assert await value(world, plain, query) == wanted


async def test_permits_rates_and_elections_work_through_it(
    world: World, name: str, pgbouncer: Callable[..., str]
) -> None:
    """Permits, takes and terms need no dedicated session either; without notifications a waiter and a member ask again."""
    engine = pooled(world, pgbouncer("transaction"), pooler="transaction")
    one = world.pick(Semaphore, AsyncSemaphore)(engine, name, permits=2, weight=2, ttl=30, fair=True)
    permit = await world.call(one.acquire, timeout=5)
    await world.call(permit.renew)
    waiting = asyncio.create_task(world.other().call(one.acquire, timeout=30))
    await asyncio.sleep(0)
    await world.call(permit.release)
    await world.call((await waiting).release)
    rate = world.pick(RateLimit, AsyncRateLimit)(engine, name, limit=1, per=60)
    assert [await world.call(rate.try_take) for _ in range(2)] == [True, False]
    member = await world.call(world.pick(Election, AsyncElection)(engine, name, ttl=3).stand)
    await eventually(lambda: member.is_leader)
    await world.call(member.resign)


async def test_partitions_are_shared_through_it(world: World, name: str, pgbouncer: Callable[..., str]) -> None:
    """Without notifications the workers query the server: a newcomer gets its share, and the other one all when it leaves."""
    through = pgbouncer("transaction")

    async def wait_async(_: int, held: Any) -> None:
        await held.wait_lost()

    def join() -> Any:
        engine = pooled(world, through, pooler="transaction")
        serve = world.pick(lambda _, held: held.wait_lost(), wait_async)
        return world.pick(Partitions, AsyncPartitions)(engine, name, 4, ttl=1).join(serve)

    first = await world.call(join)
    await eventually(lambda: len(first.owned) == 4)
    second = await world.call(join)
    await eventually(lambda: len(first.owned) == len(second.owned) == 2)
    await world.call(second.leave)
    await eventually(lambda: len(first.owned) == 4)
    await world.call(first.leave)
