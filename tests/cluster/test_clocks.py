"""The clock of one node is ahead of the others: a lease expires early there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cluster import wanted
from cluster.cluster import Cluster, make_folder
from cluster.observe import Beliefs, Calls, Client, create_tables, find_stale_writes
from cluster.strikes import switch_over
from pgfence.errors import LockTimeoutError, StaleFencingTokenError
from support.crews import report
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = wanted.LONG

TTL, AHEAD = 20, 16.0
_FAR = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster in which the clock of n3 is ahead. With asynchronous replication, each replica can be the next primary."""
    with Cluster(make_folder(), synchronous=False, block=3, clocks={"n3": AHEAD}) as cluster:
        create_tables(cluster)
        yield cluster


async def move_to(cluster: Cluster, name: str) -> None:
    """Make a node the primary, and wait until the cluster is ready."""
    leader = await asyncio.to_thread(cluster.find_leader)
    assert leader is not None
    if leader.name != name:
        switch_over(leader, name)
        await eventually(cluster.nodes[name].leads, _FAR, pause=0.1)
    await asyncio.to_thread(cluster.wait_until_ready)


async def test_a_lease_is_kept_over_a_switchover_between_equal_clocks(cluster: Cluster) -> None:
    """Without a difference of the clocks nobody else gets the lease."""
    await move_to(cluster, "n1")
    async with Client(cluster, "psycopg") as a, Client(cluster, "haproxy") as b:
        held = await a.call(a.build("Lease", "equal", ttl=TTL).acquire)
        waiting = asyncio.create_task(b.call(b.build("Lease", "equal", ttl=TTL).acquire, timeout=1.2 * TTL))
        await move_to(cluster, "n2")
        with pytest.raises(LockTimeoutError):
            await waiting
        assert held.state == "held"
        await a.call(held.release)


async def test_two_holders_rely_on_a_lease_if_the_new_clock_is_ahead(cluster: Cluster) -> None:
    """As documented: the new primary grants the lease early, both holders rely on it, and the fence rejects the first one."""
    await move_to(cluster, "n1")
    name, beliefs, calls = "ahead", Beliefs(), Calls()
    async with Client(cluster, "psycopg") as a, Client(cluster, "haproxy") as b:
        # Nobody renews it, so that the second holder gets it even if its request is later.
        held = await a.call(a.build("Lease", name, ttl=TTL, heartbeat="manual").acquire)
        first = beliefs.watch(name, "first", held)
        await a.write(name, held.token, "first")
        calls.repeat("first", lambda: a.write(name, held.token, "first"), pause=0.05)
        waiting = asyncio.create_task(b.other().call(b.build("Lease", name, ttl=TTL).acquire, timeout=_FAR))
        await move_to(cluster, "n3")
        beside = await waiting
        second = beliefs.watch(name, "second", beside)
        await b.write(name, beside.token, "second")
        await eventually(lambda: held.state == "lost", _FAR)
        await calls.stop()
        beliefs.close()
        await b.call(beside.release)
    rejected = [call for call in calls.made["first"] if isinstance(call.error, StaleFencingTokenError)]
    report(
        f"clock of the new primary {AHEAD:g} s ahead, ttl {TTL}",
        granted_after=second.start - first.start,
        overlap=beliefs.find_overlaps(name),
        rejected=len(rejected),
        loss=held.loss_reason,
    )
    assert second.start - first.start < 0.9 * TTL
    assert rejected
    assert find_stale_writes(cluster, name) == []
