"""Workers of partitions that are killed, paused or cut off: their partitions move, and nothing stale is written."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from pgfence import Partitions
from pgfence.testing._processes import pause
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.processes import Script
    from support.worlds import World

pytestmark = [pytest.mark.one_driver, pytest.mark.usefixtures("tables")]

TTL = 1.0
WORKER = """
import threading
import time
from sqlalchemy import create_engine
from pgfence import Partitions, StaleFencingTokenError

engine = create_engine(sys.argv[1], connect_args={"application_name": "victim"})
leases = {}

def serve(partition, lease):
    leases[partition] = lease
    lease.wait_lost()

worker = Partitions(engine, sys.argv[2], 4, ttl=float(sys.argv[3])).join(serve, address=str(os.getpid())).__enter__()
before = dict(worker.owned)  # now, because a worker that was stopped and continues may have lost them
say("owns", len(before))
"""
WRITES_LATE = """
park()
from pgfence import fence
for partition, lease in before.items():
    with engine.connect() as connection:
        try:
            fence(connection, f"{sys.argv[2]}/{partition}", lease.token)
            say("written")
        except StaleFencingTokenError:
            say("rejected", partition)
say("lost", all(lease.lost for lease in before.values()))
"""
OWNERS = (
    "SELECT metadata ->> 'address', count(*) FROM pgfence_lease WHERE kind = 'partition' AND starts_with(name, %s)"
    " AND released_at IS NULL AND expires_at > clock_timestamp() GROUP BY 1"
)
NEWER = "SELECT FROM pgfence_partition_member WHERE name = %s AND seen_at > %s"


def working(script: Callable[..., Script], dsn: str, name: str, code: str = "", ttl: float = TTL) -> Script:
    """Start a worker in another process, which owns all four partitions."""
    worker = script(WORKER + (code or "park()"), f"postgresql+psycopg://{dsn.split('://', 1)[1]}", name, str(ttl))
    worker.wait_for("owns 4")
    return worker


def list_owners(admin: psycopg.Connection[Any], name: str) -> dict[str, int]:
    """Return how many partitions each address owns."""
    return dict(admin.execute(OWNERS, [f"{name}/"]).fetchall())


async def test_the_partitions_of_a_killed_worker_move_within_two_ttls(
    world: World, script: Callable[..., Script], dsn: str, name: str, admin: psycopg.Connection[Any]
) -> None:
    """SIGKILL: the other worker owns all of them when their leases and the membership have expired."""
    ttl = 3.0
    victim = working(script, dsn, name, ttl=ttl)
    with Partitions(world.engine(), name, 4, ttl=ttl).join(lambda _, held: held.wait_lost(), address="here") as worker:
        await eventually(lambda: list_owners(admin, name) == {str(victim.pid): 2, "here": 2})
        victim.kill()
        killed = time.monotonic()
        await eventually(lambda: len(worker.owned) == 4)
        assert time.monotonic() - killed < 2 * ttl + 2  # two seconds for a busy machine
        assert sorted(held.token for held in worker.owned.values()) == [2, 2, 2, 2]


async def test_a_worker_paused_past_its_ttl_writes_nothing(
    world: World, script: Callable[..., Script], dsn: str, name: str
) -> None:
    """SIGSTOP: another worker owns the partitions; what the first one sends when it wakes is rejected, for each partition."""
    victim = working(script, dsn, name, WRITES_LATE)
    engine = world.engine()
    with pause(victim.pid):
        with Partitions(engine, name, 4, ttl=TTL).join(lambda _, held: held.wait_lost()) as worker:
            await eventually(lambda: len(worker.owned) == 4)
            for held in worker.owned.values():
                with held.begin(engine):
                    pass
            victim.kill(signal.SIGCONT)
            victim.go_on()
            assert {victim.read_line() for _ in range(4)} == {f"rejected {partition}" for partition in range(4)}
            assert victim.read_line() == "lost True"


async def test_a_worker_keeps_its_partitions_when_its_sessions_end(
    script: Callable[..., Script], dsn: str, name: str, admin: psycopg.Connection[Any]
) -> None:
    """pg_terminate_backend of all its sessions, several times: leases and membership do not depend on a connection."""
    worker = working(script, dsn, name)
    ended = 0
    for _ in range(5):
        seen = admin.execute("SELECT max(seen_at) FROM pgfence_partition_member WHERE name = %s", [name]).fetchone()
        ended += admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = 'victim'"
        ).rowcount
        await eventually(lambda seen=seen: admin.execute(NEWER, [name, *(seen or ())]).fetchone() is not None)
    assert ended > 0
    assert list_owners(admin, name) == {str(worker.pid): 4}
    tokens = admin.execute("SELECT max(token) FROM pgfence_lease WHERE starts_with(name, %s)", [f"{name}/"]).fetchone()
    assert tokens == (1,)
