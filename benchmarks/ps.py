"""The list of holders in a database with many of them: how long one list takes, and what the live view costs the server."""

from __future__ import annotations

import resource
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import psutil
import sqlalchemy as sa

from benchmarks import report
from benchmarks.place import server
from pgfence import monitoring, schema

SESSIONS, SCREEN = 40, 40
FILL = (
    "INSERT INTO pgfence_lease (name, token, lease_id, owner, host, pid, backend_pid, purpose, ttl, acquired_at, renewed_at,"
    " expires_at, free_at, kind) SELECT 'account:' || n, 1, gen_random_uuid(), 'worker-' || n %% 50, 'host-' || n %% 50, n, n, '',"
    " 3600, now() - n * 7919 %% 10007 * interval '1 s', now(), now() + interval '1 h', now() + interval '1 h', 'lease'"
    " FROM generate_series(1, %s) AS n"
)
LOCK = "SELECT count(pg_advisory_lock(%s * 100000000::bigint + n)) FROM generate_series(1, %s) AS n"


def run(quick: bool) -> dict[str, Any]:
    """Fill the tables, take locks, and list them."""
    leases, locks, times = (200, 80, 3) if quick else (10_000, 2_000, 20)
    with server(max_locks_per_transaction="128") as place, ExitStack() as stack:
        engine = sa.create_engine(place.url())
        stack.callback(engine.dispose)
        schema.create_all(engine)
        with place.connect() as connection:
            connection.execute(FILL, [leases])
            connection.execute("VACUUM ANALYZE pgfence_lease")
        for number in range(SESSIONS):
            stack.enter_context(place.connect()).execute(LOCK, [number + 1, locks // SESSIONS])
        first = _measure(engine, times, 100)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        everything = _measure(engine, max(3, times // 5), None)
        cost = _measure_server(engine, times * 5)
    return {
        "scenario": "ps",
        "title": "The list of holders",
        "method": (
            f"This scenario measures the time of `monitoring.ps()` with {leases:,} leases and with {locks:,}"
            f" advisory locks held by {SESSIONS} sessions, and the server's processor time for `pgfence ps"
            f" --watch`, which refreshes a screen of {SCREEN} lines once a second."
        ),
        "bars": [
            report.bar("100 rows of the list, p50", "under 300 ms", median(first) * 1e3, 300, " ms"),
            report.bar("`--watch`: processor time of the server at 1 Hz", "under 1 % of a core", cost * 100, 1, " %"),
            report.bar("memory of the process, 100 rows", "under 100 MB", memory, 100, " MB"),
        ],
        "tables": [
            report.table(
                "Time of one list",
                ("Rows", "p50", "Longest"),
                [
                    ["100", f"{median(first) * 1e3:.0f} ms", f"{max(first) * 1e3:.0f} ms"],
                    ["all", f"{median(everything) * 1e3:.0f} ms", f"{max(everything) * 1e3:.0f} ms"],
                ],
            )
        ],
        "skipped": {},
    }


def _measure(engine: sa.Engine, times: int, limit: int | None) -> list[float]:
    took = []
    for _ in range(times):
        start = time.perf_counter()
        assert monitoring.ps(engine, limit=limit)
        took.append(time.perf_counter() - start)
    return took


def _measure_server(engine: sa.Engine, times: int) -> float:
    """Return the processor seconds of the server for one list, once the statement is prepared."""
    with engine.connect() as connection:
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    _measure(engine, 12, SCREEN)
    process = psutil.Process(pid)
    before = process.cpu_times()
    _measure(engine, times, SCREEN)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / times
