"""Expired idempotency keys, inserted and purged repeatedly: how long a statement takes, and how large the table becomes."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from benchmarks import report
from benchmarks.place import server
from pgfence import monitoring, schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from benchmarks.place import Place

LIMIT, GROWTH = 200, 1.1
LIVE = 1000
FILL = (
    "INSERT INTO pgfence_idempotency_key (scope, key, fingerprint, status, result, created_at, expires_at)"
    " SELECT 'user:' || n %% 5000 || ':pay', gen_random_uuid(), sha256(n::text::bytea), 'done',"
    """ '{"$c": "Receipt", "v": {"id": 123456, "amount": {"$t": "Decimal", "v": "12.30"}}}', at, at + CAST(%s AS interval)"""
    " FROM (SELECT n, clock_timestamp() - interval '2 days' + random() * interval '1 day' AS at"
    " FROM generate_series(1, %s) AS n) AS old"
)
SIZES = (
    "SELECT pg_relation_size('pgfence_idempotency_key'), pg_indexes_size('pgfence_idempotency_key'),"
    " (SELECT count(*) FROM pgfence_idempotency_key)"
)


class Cycle(NamedTuple):
    """One purge of a table that was filled before."""

    what: str
    took: float
    statements: list[float]
    heap: int
    indexes: int


def run(quick: bool) -> dict[str, Any]:
    """Fill, purge and vacuum, and again beside an old snapshot."""
    rows, cycles = (5_000, 2) if quick else (1_000_000, 5)
    with server(durable=True, max_wal_size="4GB", autovacuum="off") as place:
        engine = sa.create_engine(place.url())
        schema.create_all(engine)
        with place.connect() as connection:
            connection.execute(FILL, ["100 days", LIVE])
            found = list(_cycles(place, connection, engine, rows, cycles))
        engine.dispose()
    *usual, old = found
    longest = max(max(one.statements) for one in usual)
    size = (usual[-1].heap + usual[-1].indexes) / (usual[1].heap + usual[1].indexes)
    return {
        "scenario": "purge",
        "title": "Purging a million keys" if not quick else "Purging keys",
        "method": (
            f"{rows:,} expired keys and {LIVE:,} live ones are purged in batches of 1,000 by one process, on a"
            " server with fsync. VACUUM then runs as autovacuum would run it. The last purge runs while the"
            " snapshot of another transaction is older than all of the keys."
        ),
        "bars": [
            report.bar(
                f"purge of {rows:,} keys, {cycles} times: longest statement",
                "at most 200 ms",
                longest * 1e3,
                200,
                " ms",
            ),
            report.bar("the same beside an old snapshot", "at most 200 ms", max(old.statements) * 1e3, LIMIT, " ms"),
            report.bar(f"heap and indexes after cycle {cycles}, against cycle 2", "at most 1.1x", size, GROWTH, "x"),
        ],
        "tables": [
            report.table(
                "Each cycle",
                ("Cycle", "Keys per second", "Statement, p50", "Statement, longest", "Heap, MB", "Indexes, MB"),
                [_row(one, rows) for one in found],
            )
        ],
        "skipped": {},
    }


def _cycles(
    place: Place, connection: psycopg.Connection[Any], engine: sa.Engine, rows: int, cycles: int
) -> Iterator[Cycle]:
    took: list[float] = []
    began = 0.0

    def before(*_: Any) -> None:
        nonlocal began
        began = time.perf_counter()

    def after(*args: Any) -> None:
        if "DELETE" in args[2]:
            took.append(time.perf_counter() - began)

    sa.event.listen(engine, "before_cursor_execute", before)
    sa.event.listen(engine, "after_cursor_execute", after)
    for number in range(1, cycles + 2):
        connection.execute(FILL, ["1 day", rows])
        took.clear()
        with place.connect() if number > cycles else nullcontext() as old:
            if old is not None:
                old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                old.execute("SELECT 1")
            start = time.perf_counter()
            purged = monitoring.purge(engine)
            elapsed = time.perf_counter() - start
        heap, indexes, left = connection.execute(SIZES).fetchone() or (0, 0, 0)
        assert (purged, left) == (rows, LIVE)
        yield Cycle("beside an old snapshot" if number > cycles else str(number), elapsed, sorted(took), heap, indexes)
        connection.execute("VACUUM pgfence_idempotency_key")


def _row(cycle: Cycle, rows: int) -> list[str]:
    middle = cycle.statements[len(cycle.statements) // 2]
    return [
        cycle.what,
        f"{rows / cycle.took:,.0f}",
        f"{middle * 1e3:.1f} ms",
        f"{cycle.statements[-1] * 1e3:.0f} ms",
        f"{cycle.heap / 1e6:.0f}",
        f"{cycle.indexes / 1e6:.0f}",
    ]
