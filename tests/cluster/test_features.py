"""A switchover, a crash of the server and a crash of the machine, with synchronous replication, beside everything at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cluster import wanted
from cluster.cluster import Cluster, make_folder
from cluster.observe import create_tables
from cluster.scenarios import PARTITIONS, PERMITS, SCENARIOS, STEPS, Failover
from cluster.strikes import Strike
from pgfence.errors import PgfenceError
from support.crews import report

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = wanted.LONG

KINDS = (Strike.SWITCHOVER, Strike.KILL_POSTMASTER, Strike.KILL_MACHINE)
SHORT_TTL, LONG_TTL = 8, 90


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with synchronous replication."""
    with Cluster(make_folder(), synchronous=True, block=3) as cluster:
        create_tables(cluster)
        yield cluster


@pytest.fixture(scope="module", params=KINDS, ids=[kind.name.lower() for kind in KINDS])
def failover(request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Failover:
    """One failover, beside which all scenarios run."""
    found = Failover(cluster, request.param, tmp_path_factory.mktemp("commands"))
    return asyncio.run(found.run(SCENARIOS))


def test_a_migration_is_applied_once_and_in_order(failover: Failover) -> None:
    """Each step of a migration is committed once and in order, and the error of a process that lost the lock is pgfence's."""
    found = failover.get("migrations")
    report(
        f"{failover.name}: migrations", outage=failover.outage, errors=[type(error).__name__ for error in found.errors]
    )
    assert found.steps == list(range(1, STEPS + 1))
    assert [error for error in found.errors if not isinstance(error, PgfenceError)] == []
    assert found.errors, "the process that migrated has lost its lock"


def test_a_command_continues_under_a_lease_and_is_stopped_under_a_session_lock(failover: Failover) -> None:
    """`pgfence run --lease` keeps its lease over a failover shorter than the TTL; with a lost lock the exit code is 76."""
    found = failover.get("commands")
    report(f"{failover.name}: pgfence run", outage=failover.outage, **{kind: one.code for kind, one in found.items()})
    assert 1.8 * failover.outage < LONG_TTL
    assert (found["long lease"].code, found["long lease"].stopped) == (4, False)
    assert (found["session lock"].code, found["session lock"].stopped) == (76, True)
    assert "lost" in found["session lock"].said
    if failover.outage > SHORT_TTL:
        assert (found["short lease"].code, found["short lease"].stopped) == (76, True)
    elif 1.8 * failover.outage < SHORT_TTL:
        assert (found["short lease"].code, found["short lease"].stopped) == (4, False)


def test_a_lease_that_was_handed_over_is_adopted_on_the_new_primary(failover: Failover) -> None:
    """The adopted lease has the token of the one that was handed over, and passes the fence."""
    found = failover.get("hand over")
    assert set(found) == {"psycopg", "asyncpg"}
    assert all(before == after for before, after in found.values())


def test_an_election_has_one_leader_at_a_time(failover: Failover) -> None:
    """No two members are leader at once, there is a leader after the failover, and another one after it has resigned."""
    found = failover.get("election")
    report(f"{failover.name}: election", outage=failover.outage, seconds_to_a_new_term=found.seconds)
    assert found.beliefs.find_overlaps(f"{failover.name} election") == []
    assert found.after


def test_a_semaphore_has_no_more_holders_than_permits(failover: Failover) -> None:
    """At most two workers have a permit at any time, and all of them get one after the failover."""
    found = failover.get("permits")
    most = found.beliefs.count_most(f"{failover.name} semaphore")
    report(f"{failover.name}: permits", outage=failover.outage, first_permit=found.seconds, most_at_once=most)
    assert most == PERMITS
    assert found.after


def test_each_partition_has_one_owner(failover: Failover) -> None:
    """No two workers own a partition at once, and all partitions are served after the failover."""
    found = failover.get("partitions")
    report(f"{failover.name}: partitions", outage=failover.outage, last_partition_taken_again=found.seconds)
    for partition in range(PARTITIONS):
        assert found.beliefs.find_overlaps(f"{failover.name} partitions {partition}") == []
    assert found.after
