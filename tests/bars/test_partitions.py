"""Partitions under faults: the writes of each key are in order, and a change is over within two TTLs."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from support.crews import FULL, Crew, crew, find_quantile, report
from support.waiting import blocking

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

PARTITIONS, WORKERS, CHANGES = (64, 8, 100) if FULL else (16, 4, 6)
KINDS = ("stopped", "left", "killed", "several", "terminated", "killed")
KEYS = 4
"""How many keys each partition has."""
TTL = 1.5 if FULL else 1.0

# A single writer needs to read the last number of a key only once: it knows what it has written since. Two of them would write one
# number twice, or an old token after a newer one. After an error the outcome is unknown, and the number is read again.
WORK = """
from pgfence import Partitions, fence, partition_for

name, count, keys, ttl = arguments[0], int(arguments[1]), int(arguments[2]), float(arguments[3])
last = text("SELECT COALESCE(max(n), 0) FROM partition_ledger WHERE name = :name AND key = :key")
write = text("INSERT INTO partition_ledger (name, key, n, token) VALUES (:name, :key, :n, :token)")
by_partition = {partition: [] for partition in range(count)}
for i in range(100 * count):
    of = by_partition[partition_for(f"key {i}", count)]
    if len(of) < keys:
        of.append(f"key {i}")

def work(number):
    engine = create_engine(url, pool_size=3, max_overflow=0)
    # A handler that sets an event would deadlock if the signal arrives while the main thread begins to wait for that event.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with Partitions(engine, name, count, ttl=ttl).join(lambda partition, lease: serve(engine, partition, lease)):
        signal.sigwait({signal.SIGTERM})

def serve(engine, partition, lease):
    known = {}
    apply_in_order(engine, partition, lease, known)
    # As one that does not know that it has lost the partition.
    for key, number in known.items():
        with contextlib.suppress(StaleFencingTokenError), engine.begin() as connection:
            fence(connection, f"{name}/{partition}", lease.token)
            connection.execute(write, {"name": name, "key": key, "n": number + 1, "token": lease.token})

def apply_in_order(engine, partition, lease, known):
    while not lease.lost:
        key = random.choice(by_partition[partition])
        try:
            with lease.begin(engine) as connection:
                if key not in known:
                    known[key] = connection.execute(last, {"name": name, "key": key}).scalar_one()
                connection.execute(write, {"name": name, "key": key, "n": known[key] + 1, "token": lease.token})
            known[key] += 1
        except LockLostError:
            return
        except StaleFencingTokenError:
            note("rejected", partition)
            known.clear()
            return
        except Exception as error:  # of a fault
            note("error", type(error).__name__)
            known.pop(key, None)
        lease.wait_lost(random.uniform(0, 0.05))
"""

OWNED = (
    "SELECT pid, count(*) FROM pgfence_lease WHERE starts_with(name, %s) AND kind = 'partition' AND released_at IS NULL"
    " AND expires_at > clock_timestamp() GROUP BY pid"
)
# The numbers of a key count up from 1 in the order of the writes, and its tokens never decrease.
UNORDERED = (
    "SELECT key, n, token FROM (SELECT *, row_number() OVER w AS expected, max(token) OVER w AS newest FROM partition_ledger"
    " WHERE name = %s WINDOW w AS (PARTITION BY key ORDER BY id)) AS l WHERE n <> expected OR token < newest"
)


class Changes:
    """Workers that leave, die, are stopped and disconnected, one or a few at a time, and how long the others need for it."""

    def __init__(self, workers: Crew, name: str, admin: psycopg.Connection[Any]) -> None:
        self.workers = workers
        self.name = name
        self.admin = admin
        self.times: dict[str, list[float]] = {}

    def is_balanced(self, alive: int, gone: set[int]) -> bool:
        """Return whether exactly the workers that are alive own all partitions, in numbers that differ by at most one."""
        owned = dict(self.admin.execute(OWNED, [f"{self.name}/"]).fetchall())
        pids = set(self.workers.members()) - gone
        return (
            set(owned) == pids
            and len(pids) == alive
            and sum(owned.values()) == PARTITIONS
            and max(owned.values()) - min(owned.values()) <= 1
        )

    def wait(self, kind: str, began: float, *gone: int, alive: int = WORKERS) -> None:
        """Wait until the partitions are balanced without those that are gone, and note how long that took."""
        blocking(lambda: self.is_balanced(alive, set(gone)), 60, 0.02)
        self.times.setdefault(kind, []).append(time.monotonic() - began)

    def make(self, kind: str) -> None:
        """Make one change, and wait until it is over."""
        began, victims = time.monotonic(), random.sample(self.workers.members(), 3)
        gone = {"left": victims[:1], "killed": victims[:1], "several": victims[:2]}.get(kind, [])
        if kind in ("left", "several"):
            self.leave(gone[-1])
        if kind in ("killed", "several"):
            self.workers.kill(gone[0])
        if kind in ("terminated", "several"):
            self.workers.end_backends_of(self.admin, victims[2])
        if kind == "stopped":
            self.workers.stop(0, victims[0])
            self.wait(kind, began, victims[0], alive=WORKERS - 1)
            kind, began = "continued", time.monotonic()
            self.workers.resume(everyone=True)
        self.wait(kind, began, *gone)

    def leave(self, pid: int) -> None:
        """Let a worker leave; another one is started in its place."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            self.workers.faults["SIGTERM"] += 1


@pytest.mark.usefixtures("tables")
@pytest.mark.timeout(1500 if FULL else 120)
def test_the_writes_of_each_key_are_in_order(
    name: str, dsn: str, admin: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """Workers join, leave, die, are stopped and disconnected: no number of a key is written twice, late or under an old token."""
    admin.execute(
        "CREATE TABLE IF NOT EXISTS partition_ledger (id bigserial PRIMARY KEY, name text, key text, n int, token bigint)"
    )
    admin.execute("CREATE INDEX IF NOT EXISTS partition_ledger_key ON partition_ledger (name, key, n)")
    with crew(dsn, tmp_path, WORK, WORKERS, name, PARTITIONS, KEYS, TTL) as workers:
        changes = Changes(workers, name, admin)
        changes.wait("started", time.monotonic())
        for number in range(CHANGES):
            changes.make(KINDS[number % len(KINDS)])
    assert admin.execute(UNORDERED.encode(), [name]).fetchall() == []
    figures = admin.execute(
        "SELECT count(*), count(DISTINCT key) FROM partition_ledger WHERE name = %s", [name]
    ).fetchone()
    assert figures is not None
    assert figures[1] == PARTITIONS * KEYS
    times = {
        f"{kind}_({len(found)})": f"p50 {find_quantile(found, 0.5) / TTL:.2f} max {max(found) / TTL:.2f} TTL"
        for kind, found in changes.times.items()
    }
    report(
        f"{PARTITIONS} partitions, {WORKERS} workers, ttl {TTL} s",
        writes=figures[0],
        out_of_order=0,
        **times,
        faults=dict(workers.faults),
        rejected=workers.count("rejected"),
        errors=workers.count("error"),
    )
