"""The primary, the first host of each list, hangs: its processes are stopped, and its sockets stay open."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from cluster import wanted
from cluster.cluster import Cluster, make_folder
from cluster.observe import (
    WAYS,
    Beliefs,
    Calls,
    Client,
    create_tables,
    find_stale_writes,
    strike_beside,
    wait_for_leader,
)
from cluster.strikes import Strike
from pgfence.errors import PgfenceError
from support.crews import report
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from cluster.strikes import StrikeRecord

pytestmark = wanted.LONG

TTL = 50
SLOWER = 3.0
"""Seconds by which a host that hangs can delay a renewal: the pause between two attempts, and `connect_timeout`."""
BARS = {"psycopg": 4.0, "haproxy": 2.0, "asyncpg": 5.0}
"""Seconds from the new leader to the first success. The list of psycopg costs 2 s more for a host that hangs."""
NOTICE = 8.0
"""Seconds in which HAProxy finds that a server hangs and ends its sessions: two checks of 2 s each, and the pauses."""
HEAL_AFTER = 15.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with synchronous replication."""
    with Cluster(make_folder(), synchronous=True, block=3) as cluster:
        create_tables(cluster)
        yield cluster


@dataclass
class Pause:
    """What was observed while the primary was paused.

    Attributes:
        record: the fault.
        states: of the leases, immediately before the primary continued, by way.
        fenced: whether a write under the lease's token was accepted afterwards, by way.
        calls: new leases and locks, by way.
        beliefs: who relied on session locks.
        stale: names of session locks with tokens, and their stale writes.
    """

    record: StrikeRecord
    states: dict[str, str] = field(default_factory=dict)
    fenced: dict[str, bool] = field(default_factory=dict)
    calls: Calls = field(default_factory=Calls)
    beliefs: Beliefs = field(default_factory=Beliefs)
    stale: dict[str, list[Any]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def paused(cluster: Cluster) -> Pause:
    """One pause of the primary, beside which everything is observed."""
    return asyncio.run(observe_pause(cluster))


def build_attempt(client: Client, kind: str, number: list[int]) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a function that acquires and releases a new lease, or a session lock."""

    async def attempt() -> None:
        number[0] += 1
        name = f"new {client.way} {number[0]}"
        one = (
            client.build("Lease", name, ttl=5) if kind == "lease" else client.build("AdvisoryLock", f"new {client.way}")
        )
        place = client.other()
        await place.call((await place.call(one.acquire, timeout=1)).release)

    return attempt


async def follow(client: Client, beliefs: Beliefs, name: str, *, token: bool) -> Any:
    """Wait for a session lock and hold it: on the new primary it is granted while the first holder still relies on its own."""
    held = await client.other().call(client.build("AdvisoryLock", name, token=token).acquire, timeout=90)
    beliefs.watch(name, "second", held)
    if token:
        for _ in range(20):
            await client.write(name, held.token, "second")
            await asyncio.sleep(0.1)
    return held


async def observe_pause(cluster: Cluster) -> Pause:
    leader = cluster.find_leader()
    assert leader is not None
    clients = {way: Client(cluster, way, leader) for way in WAYS}
    # The last one has no limit for a host that hangs.
    clients["no limit"] = Client(cluster, "psycopg", leader, options="")
    second = Client(cluster, "haproxy")
    found = Pause(record=None)  # type: ignore[arg-type]  # set below
    leases = {
        way: await client.call(client.build("Lease", f"held {way}", ttl=TTL).acquire) for way, client in clients.items()
    }
    for way, client in clients.items():
        if way != "no limit":
            for kind in ("lease", "lock"):
                found.calls.repeat(f"{way} {kind}", build_attempt(client, kind, [0]))
    locks = {}
    for name, way, token in (("direct", "psycopg", False), ("proxied", "haproxy", False), ("token", "psycopg", True)):
        client = clients[way]
        held = locks[name] = await client.call(client.build("AdvisoryLock", name, token=token).acquire)
        found.beliefs.watch(name, "first", held)
    token = locks["token"].token
    found.calls.repeat("token writer", lambda: clients["psycopg"].write("token", token, "first"), pause=0.05)
    await clients["psycopg"].write("token", token, "first")
    followers = [asyncio.create_task(follow(second, found.beliefs, name, token=name == "token")) for name in locks]
    striking = asyncio.create_task(strike_beside(cluster, Strike.PAUSE, heal_after=HEAL_AFTER))
    await wait_for_leader(cluster, leader)
    # Still before the primary continues: the fault is healed some seconds after the new leader.
    await asyncio.sleep(HEAL_AFTER / 2)
    found.states = {way: held.state for way, held in leases.items()}
    found.record = await striking
    later = await asyncio.gather(*followers)
    for way, client in clients.items():
        try:
            await client.write(leases[way].names[0], leases[way].token, way)
            found.fenced[way] = True
        except PgfenceError:
            found.fenced[way] = False
    await eventually(lambda: all(held.state == "lost" for held in locks.values()), 60)
    await found.calls.stop()
    found.beliefs.close()
    found.stale["token"] = find_stale_writes(cluster, "token")
    for way, client in clients.items():
        if leases[way].state == "held":
            await client.call(leases[way].release)
        await client.close()
    for held in later:
        await second.call(held.release)
    await second.close()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_lease_is_kept_and_new_ones_are_granted_soon(paused: Pause, way: str) -> None:
    """A lease with ttl >= 1.8 * outage stays held, and a new lease and lock are granted within the bar after the new leader."""
    leader_at = paused.record.leader_at
    assert leader_at is not None
    outage = leader_at - paused.record.struck_at
    first = {kind: paused.calls.find_first_success(f"{way} {kind}", leader_at) for kind in ("lease", "lock")}
    report(
        f"pause, {way}",
        outage=outage,
        lease=paused.states[way],
        first_lease=first["lease"],
        first_lock=first["lock"],
        longest_lease_call=paused.calls.find_longest(f"{way} lease"),
        longest_lock_call=paused.calls.find_longest(f"{way} lock"),
        errors={**paused.calls.list_errors(f"{way} lease"), **paused.calls.list_errors(f"{way} lock")},
    )
    assert 1.8 * (outage + SLOWER) < TTL
    assert paused.states[way] == "held"
    assert paused.fenced[way]
    assert max(first.values()) <= BARS[way]


def test_a_list_without_a_limit_renews_nothing_while_its_first_host_hangs(paused: Pause) -> None:
    """As documented: without connect_timeout the driver waits for the host that hangs, and the lease is lost at its deadline."""
    report("pause, psycopg without connect_timeout", lease=paused.states["no limit"])
    assert paused.states["no limit"] in {"unknown", "lost"}


def test_the_holder_of_a_session_lock_behind_haproxy_is_notified(paused: Pause) -> None:
    """HAProxy ends the sessions on the server that hangs, so the holder is notified before the new primary is elected."""
    (first, second) = paused.beliefs.of("proxied")
    assert first.told is not None
    report(
        "pause, session lock behind HAProxy",
        notified_after=first.told - paused.record.struck_at,
        granted_again_after=second.start - paused.record.struck_at,
        overlap=paused.beliefs.find_overlaps("proxied"),
    )
    assert first.told - paused.record.struck_at < NOTICE
    assert paused.beliefs.find_overlaps("proxied") == []


def test_a_direct_holder_of_a_session_lock_relies_on_it_until_the_primary_continues(paused: Pause) -> None:
    """As documented: two holders from the promotion until the old primary continues; the fence admits the newer token only."""
    for name in ("direct", "token"):
        (first, second) = paused.beliefs.of(name)
        assert first.told is not None
        report(
            f"pause, session lock {name!r}",
            notified_after=first.told - paused.record.struck_at,
            granted_again_after=second.start - paused.record.struck_at,
            overlap=paused.beliefs.find_overlaps(name),
            stale_writes=len(paused.stale.get(name, [])),
        )
        assert first.told >= paused.record.healed_at - 1
    writes = [call for call in paused.calls.made["token writer"] if call.start > paused.record.struck_at]
    assert writes
    assert paused.stale["token"] == []
