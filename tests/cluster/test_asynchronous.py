"""Asynchronous replication, with commits that no standby receives before the primary dies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from cluster import wanted
from cluster.cluster import Cluster, make_folder
from cluster.observe import Client, create_tables, find_stale_writes, read, wait_for_leader
from pgfence import idempotent, run_transaction
from pgfence.errors import StaleFencingTokenError
from pgfence.testing._processes import pause
from support import transactions
from support.crews import report
from support.waiting import blocking

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.node import Node

WINDOW = 20
"""Writes of each kind that only the old primary has."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with asynchronous replication."""
    with Cluster(make_folder(), synchronous=False, block=3) as cluster:
        create_tables(cluster)
        yield cluster


def wait_until_replicated(leader: Node) -> None:
    """Wait until both replicas have what was committed so far."""
    query = b"SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= %s::pg_lsn"
    with psycopg.connect(host=leader.host, port=leader.port, user="postgres", autocommit=True) as connection:
        end = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        assert end is not None
        blocking(lambda: connection.execute(query, end).fetchone() == (2,), 30)


async def claim_key(client: Client, name: str, number: int) -> None:
    """Store the result of a key, in a transaction that also writes a row."""

    async def work(session: Any) -> None:
        await session.execute(text("INSERT INTO written (name, who) VALUES (:name, 'key')"), {"name": f"{name} keys"})

    def sync_work(session: Any) -> None:
        session.execute(text("INSERT INTO written (name, who) VALUES (:name, 'key')"), {"name": f"{name} keys"})

    def run(session: Any) -> Any:
        key = idempotent(session, f"{name} {number}", scope="window")
        return key.run(lambda: client.pick(sync_work, work)(session))

    await client.call(run_transaction, transactions.factory(client, client.database), run)


@pytest.mark.parametrize("way", ["psycopg", pytest.param("asyncpg", marks=wanted.LONG)])
async def test_a_token_that_was_not_replicated_is_not_issued_again(cluster: Cluster, way: str) -> None:
    """After a failover that loses a grant, the next token is higher, and no write of the lost grant is accepted any more.

    The first holder may rely on its lease until it asks the new primary. What else is lost is counted.
    """
    name = f"reissue {way}"
    async with Client(cluster, way) as a, Client(cluster, way) as b:
        one = a.build("Lease", name, ttl=90)
        await a.call((await a.call(one.acquire)).release)
        leader = cluster.find_leader()
        assert leader is not None
        await asyncio.to_thread(wait_until_replicated, leader)
        with pause(*leader.list_walsenders()):
            held = await a.call(one.acquire)
            for number in range(WINDOW):
                await a.write(name, held.token, "A")
                await claim_key(a, name, number)
            leader.kill()
        try:
            await wait_for_leader(cluster, leader)
            beside = await b.call(b.build("Lease", name, ttl=90).acquire, timeout=60)
            await b.write(name, beside.token, "B")
            rejected = {"held": 0, "lost": 0}
            while rejected["lost"] < WINDOW:
                rejected[held.state] += await is_rejected(a, name, held.token)
            await b.write(name, beside.token, "B")
            await b.call(beside.release)
        finally:
            leader.start_patroni()
            await asyncio.to_thread(cluster.wait_until_ready)
    assert beside.token > held.token
    assert find_stale_writes(cluster, name) == []
    rows = read(cluster, "SELECT count(*) FROM written WHERE name = :name AND who = 'A'", name=name)[0][0]
    keys = read(cluster, "SELECT count(*) FROM written WHERE name = :name", name=f"{name} keys")[0][0]
    report(
        f"asynchronous replication, {way}",
        lost_token=held.token,
        next_token=beside.token,
        rejected_before_the_first_holder_was_notified=rejected["held"],
        rejected_afterwards=rejected["lost"],
        fenced_rows_lost=f"{WINDOW - rows} of {WINDOW}",
        keys_lost=f"{WINDOW - keys} of {WINDOW}",
    )


async def is_rejected(client: Client, name: str, token: int) -> bool:
    """Return whether the fence rejects a write. Writes that do not reach the primary do not count."""
    try:
        await client.write(name, token, "A after B")
    except StaleFencingTokenError:
        return True
    except DBAPIError:
        return False
    raise AssertionError(f"the fence of {name!r} has accepted token {token}")
