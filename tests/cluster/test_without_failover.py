"""Faults that leave the primary in place: a synchronous standby that hangs, and a lost etcd node of three."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from cluster import wanted
from cluster.cluster import Cluster, make_folder
from cluster.observe import WAYS, Beliefs, Calls, Client, create_tables, read, strike_beside
from cluster.strikes import Strike
from support import transactions
from support.crews import report

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

pytestmark = wanted.LONG

LONG, SHORT = 30, 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with synchronous replication and three etcd nodes."""
    with Cluster(make_folder(), synchronous=True, block=3, etcd_nodes=3) as cluster:
        create_tables(cluster)
        yield cluster


def build_commit(client: Client, name: str, committed: list[int]) -> Callable[[], Coroutine[object, object, None]]:
    """Return a function that commits a row and then notes its number."""

    async def commit() -> None:
        number = len(committed) + 1
        async with transactions.session(client, client.database) as session:
            insert = text("INSERT INTO written (name, token) VALUES (:name, :number)")
            await client.call(session.execute, insert, {"name": name, "number": number})
            await client.call(session.commit)
        committed.append(number)

    return commit


def build_turn(client: Client, name: str, beliefs: Beliefs) -> Callable[[], Coroutine[object, object, None]]:
    """Return a function that acquires a short lease, holds it for a moment, and releases it."""
    place = client.other()

    async def take_turn() -> None:
        held = await place.call(client.build("Lease", name, ttl=SHORT).acquire, timeout=30)
        belief = beliefs.watch(name, client.way, held)
        await asyncio.sleep(1)
        beliefs.drop(belief)
        if held.state == "held":
            await place.call(held.release)

    return take_turn


async def test_a_standby_that_hangs_delays_commits_and_loses_nothing(cluster: Cluster) -> None:
    """COMMIT waits until another standby is synchronous; a longer lease stays held, a shorter one never has two holders."""
    beliefs, calls = Beliefs(), Calls()
    committed: dict[str, list[int]] = {way: [] for way in WAYS}
    clients = {way: Client(cluster, way) for way in WAYS}
    leases = {}
    for way, client in clients.items():
        leases[way] = await client.call(client.build("Lease", f"long {way}", ttl=LONG).acquire)
        beliefs.watch(f"long {way}", way, leases[way])
        calls.repeat(f"commit {way}", build_commit(client, f"commits {way}", committed[way]), pause=0.05)
        calls.repeat(f"turn {way}", build_turn(client, "short", beliefs), pause=0.05)
    await asyncio.sleep(2)
    record = await strike_beside(cluster, Strike.HANG_STANDBY, heal_after=15)
    states = {way: held.state for way, held in leases.items()}
    await calls.stop()
    for way, client in clients.items():
        await client.call(leases[way].release)
        await client.close()
    beliefs.close()
    lost = [belief for belief in beliefs.of("short") if belief.told is not None]
    report(
        "synchronous standby hangs",
        longest_commit={way: round(calls.find_longest(f"commit {way}"), 1) for way in WAYS},
        long_leases=states,
        short_leases=len(beliefs.of("short")),
        short_leases_lost=len(lost),
        errors={label: calls.list_errors(label) for label in calls.made if calls.list_errors(label)},
    )
    assert record.new is None
    assert states == dict.fromkeys(WAYS, "held")
    assert beliefs.find_overlaps("short") == []
    for way in WAYS:
        rows = read(cluster, "SELECT token FROM written WHERE name = :name ORDER BY id", name=f"commits {way}")
        assert set(committed[way]) <= {number for (number,) in rows}
        assert committed[way]


async def test_a_lost_etcd_node_of_three_costs_no_lease(cluster: Cluster) -> None:
    """The leader of etcd dies: leases stay held with their tokens, and if the primary changes, that is like any failover."""
    calls = Calls()
    clients = {way: Client(cluster, way) for way in WAYS}
    leases = {}
    for way, client in clients.items():
        leases[way] = await client.call(client.build("Lease", f"etcd {way}", ttl=50).acquire)
        calls.repeat(way, build_commit(client, f"etcd {way}", []), pause=0.05)
    record = await strike_beside(cluster, Strike.ETCD_NODE_LOST)
    await calls.stop()
    states = {way: held.state for way, held in leases.items()}
    for way, client in clients.items():
        await client.write(f"etcd {way}", leases[way].token, way)
        await client.call(leases[way].release)
        await client.close()
    report(
        "etcd node lost",
        new_leader=record.new,
        longest_commit={way: round(calls.find_longest(way), 1) for way in WAYS},
        errors={way: calls.list_errors(way) for way in WAYS},
    )
    assert states == dict.fromkeys(WAYS, "held")
    if record.new is None:
        assert all(not calls.list_errors(way) for way in WAYS)
