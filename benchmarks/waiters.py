"""What a hundred waiters cost the server: processor, log, and how old a snapshot they hold back.

Each waiter has an engine of its own, as if it were a process of its own: nothing is shared between them, and a hundred
connections wait.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from benchmarks import floor, report
from benchmarks.place import server, wait_until
from pgfence import AdvisoryLock

if TYPE_CHECKING:
    import psycopg

    from benchmarks.place import Place

NAME = "waited for"
SLICE = 0.5
ASKING = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'waiter'"
OLDEST = (
    "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - coalesce(xact_start, query_start))), 0)::float"
    " FROM pg_stat_activity WHERE application_name = 'waiter' AND backend_xmin IS NOT NULL"
)


def run(quick: bool) -> dict[str, Any]:
    """Let them wait for a lock that somebody holds all the time, and look at the server."""
    waiters, seconds = (10, 3.0) if quick else (100, 60.0)
    with server(autovacuum="off") as place, ExitStack() as stack:
        holder = stack.enter_context(place.connect())
        holder.execute("SELECT pg_advisory_lock(%s)", (floor.key(NAME),))
        monitor = stack.enter_context(place.connect())
        before = place.log_size()
        crowd = [_Waiter(place, stack) for _ in range(waiters)]
        wait_until(lambda: monitor.execute(ASKING).fetchone() == (waiters,), 60)
        time.sleep(2 * SLICE)
        steady, cpu, start = place.log_size(), _cpu(place, monitor), time.monotonic()
        oldest = _watch(monitor, seconds)
        took = time.monotonic() - start
        cpu, grown = (_cpu(place, monitor) - cpu) / took, (place.log_size() - steady) / took
        first = steady - before
        holder.execute("SELECT pg_advisory_unlock_all()")
        drain = time.monotonic()
        for each in crowd:
            each.join(60)
        drain = time.monotonic() - drain
        errors, total = place.log(before).count("ERROR:"), place.log_size() - before
    return {
        "scenario": "waiters",
        "title": "A hundred waiters",
        "method": (
            f"{waiters} engines, each with one connection and one thread that waits for the same name with a timeout of ten"
            f" minutes, looked at for {took:.0f} s after their first slice. Processor time is that of all server processes but the one that looks."
        ),
        "bars": [
            report.bar(f"{waiters} waiters: server processor", "under 1 % of a core", cpu * 100, 1.0, " %"),
            report.bar(f"{waiters} waiters: server log", "under 1 kB/s", grown / 1000, 1.0, " kB/s", digits=3),
            report.bar("ERRORs in the server log, per wait", "at most 1", errors / waiters, 1.0, digits=2),
            report.bar("oldest snapshot of a waiter", "at most a slice, 0.5 s", oldest, SLICE * 1.1, " s", digits=3),
        ],
        "tables": [
            report.table(
                "Beside the bars",
                ("What", "Measured"),
                [
                    ("log written by the first slice, per waiter", f"{first / waiters:.0f} bytes, once"),
                    ("log from the first connection to the last release", f"{total / 1000:.1f} kB"),
                    (f"the lock goes through all {waiters} hands once it is free", f"{drain:.2f} s"),
                    ("waiters that got the lock", f"{sum(each.got for each in crowd)} of {waiters}"),
                ],
            )
        ],
        "skipped": {},
    }


class _Waiter(threading.Thread):
    def __init__(self, place: Place, stack: ExitStack) -> None:
        super().__init__(daemon=True)
        self.got = False
        engine = sa.create_engine(place.url(application="waiter"))
        stack.callback(engine.dispose)
        self.lock: Any = AdvisoryLock(engine, NAME, namespace="benchmark")
        self.start()

    def run(self) -> None:
        with self.lock.hold(timeout=600):
            self.got = True


def _watch(monitor: psycopg.Connection[Any], seconds: float) -> float:
    """Return the age of the oldest snapshot that was seen."""
    oldest, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        (age,) = monitor.execute(OLDEST).fetchone() or (0.0,)
        oldest = max(oldest, age)
        time.sleep(0.1)
    return oldest


def _cpu(place: Place, monitor: psycopg.Connection[Any]) -> float:
    return place.cpu_seconds(without=monitor.info.backend_pid)
