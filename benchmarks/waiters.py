"""The cost of a hundred waiters for the server: processor time, log, and the age of the oldest snapshot.

Each waiter has its own engine, as if it were a process: nothing is shared between them, and a hundred connections wait. For
comparison, the same number of connections only polls twice a second whether the lock is free.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from benchmarks import floor, report
from benchmarks.place import called, server, wait_until
from pgfence import AdvisoryLock

if TYPE_CHECKING:
    import psycopg

    from benchmarks.place import Cpu, Place

NAME = "waited for"
SLICE = 0.5
SETTLED = 35.0
"""Seconds after which the waiters far from the front of the queue sleep, and every waiter has logged who holds the lock."""
LATE = 0.1
"""Seconds by which a busy machine may wake a process late, which is not the waiter's fault."""
ASKING = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'waiter'"
OLDEST = (
    "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - coalesce(xact_start, query_start))), 0)::float"
    " FROM pg_stat_activity WHERE application_name = 'waiter' AND backend_xmin IS NOT NULL"
)


def run(quick: bool) -> dict[str, Any]:
    """Let them wait for a lock that is held all the time, and observe the server."""
    waiters, seconds = (10, 2.0) if quick else (100, 60.0)
    with server(autovacuum="off") as place, ExitStack() as stack:
        holder = stack.enter_context(place.connect())
        holder.execute("SELECT pg_advisory_lock(%s)", (floor.key(NAME),))
        monitor = stack.enter_context(place.connect())
        before = place.log_size()
        crowd = [_Waiter(place, stack) for _ in range(waiters)]
        wait_until(lambda: monitor.execute(ASKING).fetchone() == (waiters,), 60)
        time.sleep(2 * SLICE)
        first = place.log_size() - before
        settling, _ = _watch(place, monitor, min(SETTLED, seconds))
        settled = place.log_size()
        cpu, oldest = _watch(place, monitor, seconds)
        grown = (place.log_size() - settled) / seconds
        holder.execute("SELECT pg_advisory_unlock_all()")
        drain = time.monotonic()
        for each in crowd:
            each.join(60)
        drain = time.monotonic() - drain
        errors, total = place.log(before).count("ERROR:"), place.log_size() - before
        polling = _polled(place, monitor, waiters, seconds / 4)
    return {
        "scenario": "waiters",
        "title": "Many waiters",
        "method": (
            f"{waiters} engines, each with one connection and one thread, wait for the same name with a timeout of"
            f" ten minutes. The server is observed for {seconds:g} s, which begin {SETTLED:g} s after the first slice of their"
            " waits, when all but the first three sleep and each has queried and logged who holds the lock."
            " Processor time is that of all server processes except the observer's. The kernel's clock ticks,"
            " which `top` shows, miss work that is done between two ticks; the scheduler's own count does not."
        ),
        "bars": [
            report.bar(
                f"{waiters} waiters: server processor time, by ticks", "under 1.5 % of a core", cpu.ticks, 1.5, " %"
            ),
            report.bar(
                f"{waiters} waiters: server processor time, by the scheduler's count",
                "under 1.5 % of a core",
                cpu.exact,
                1.5,
                " %",
            ),
            report.bar(f"{waiters} waiters: server log", "under 1 kB/s", grown / 1000, 1.0, " kB/s", digits=3),
            report.bar("ERRORs in the server log, per wait", "at most 1", errors / waiters, 1.0),
            report.bar("oldest snapshot of a waiter", "at most one slice, 0.5 s", oldest, SLICE + LATE, " s", digits=3),
        ],
        "tables": [
            report.table(
                "Other figures",
                ("What", "Measured"),
                [
                    (
                        f"processor time, by the scheduler's count, of {waiters} connections that each send two requests a second",
                        f"{polling.exact:.2f} %",
                    ),
                    (
                        f"processor time, by the scheduler's count, in the first {SETTLED:g} s",
                        f"{settling.exact:.2f} %",
                    ),
                    ("server log of each waiter's first slice", f"{first / waiters:.0f} bytes, once"),
                    ("log from the first connection to the last release", f"{total / 1000:.1f} kB"),
                    (f"until all {waiters} waiters have held the lock, once it is free", f"{drain:.2f} s"),
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
        engine = sa.create_engine(place.url(), connect_args=called("waiter"))
        stack.callback(engine.dispose)
        self.lock: Any = AdvisoryLock(engine, NAME, namespace="benchmark")
        self.start()

    def run(self) -> None:
        with self.lock.hold(timeout=600):
            self.got = True


def _polled(place: Place, monitor: psycopg.Connection[Any], waiters: int, seconds: float) -> Cpu:
    """Return the cost of as many connections that poll instead of waiting."""
    over = threading.Event()

    def ask(connection: psycopg.Connection[Any]) -> None:
        while not over.wait(SLICE):
            connection.execute("SELECT pg_try_advisory_xact_lock(%s)", (floor.key(NAME),))

    with ExitStack() as stack:
        connections = [stack.enter_context(place.connect()) for _ in range(waiters)]
        crowd = [threading.Thread(target=ask, args=(connection,), daemon=True) for connection in connections]
        for each in crowd:
            each.start()
        time.sleep(2 * SLICE)
        cpu, _ = _watch(place, monitor, seconds)
        over.set()
        for each in crowd:
            each.join(10)
    return cpu


def _watch(place: Place, monitor: psycopg.Connection[Any], seconds: float) -> tuple[Cpu, float]:
    """Return the processor time in percent of a core, and the age of the oldest snapshot."""
    before, start, oldest = place.cpu_seconds(monitor.info.backend_pid), time.monotonic(), 0.0
    while (took := time.monotonic() - start) < seconds:
        (age,) = monitor.execute(OLDEST).fetchone() or (0.0,)
        oldest = max(oldest, age)
        time.sleep(0.1)
    after = place.cpu_seconds(monitor.info.backend_pid)
    return type(before)(*(100 * (late - early) / took for early, late in zip(before, after, strict=True))), oldest
