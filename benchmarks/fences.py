"""The cost of a fence: a transaction that enters a gate, compared with the same one without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from benchmarks import report, rounds
from benchmarks.place import server
from pgfence import Lease, schema

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from benchmarks.place import Place
    from benchmarks.rounds import Make

UPDATE = sa.text("UPDATE bare SET n = n + 1 WHERE id = :id")
GUARDED = sa.text("UPDATE guarded SET n = n + 1 WHERE id = :id")


def bare(writes: int, *, trip: bool = False) -> Make:
    """Run updates without a fence; with `trip`, after an additional statement that does nothing."""

    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        engine = sa.create_engine(place.url())
        stack.callback(engine.dispose)

        def cycle() -> None:
            with engine.begin() as connection:
                if trip:
                    connection.exec_driver_sql("SELECT 1")
                for number in range(writes):
                    connection.execute(UPDATE, {"id": number})

        return cycle

    return make


def fenced(writes: int) -> Make:
    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        engine = sa.create_engine(place.url())
        stack.callback(engine.dispose)
        held = stack.enter_context(Lease(engine, "close", ttl=60).hold())

        def cycle() -> None:
            with held.begin(engine) as connection:
                for number in range(writes):
                    connection.execute(GUARDED, {"id": number})

        return cycle

    return make


def run(quick: bool) -> dict[str, Any]:
    """Measure transactions of one and of ten writes."""
    effort = rounds.Effort.of(quick=quick)
    bars, tables = [], []
    with server(durable=True) as place:
        engine = sa.create_engine(place.url())
        schema.create_all(engine)
        with engine.begin() as connection:
            for table in ("bare", "guarded"):
                connection.exec_driver_sql(f"CREATE TABLE {table} (id int PRIMARY KEY, n int NOT NULL)")
                connection.exec_driver_sql(f"INSERT INTO {table} SELECT i, 0 FROM generate_series(0, 99) AS i")
        schema.add_fence(engine, "guarded", resource="close")
        for writes, limit in ((1, 1.5), (10, 1.5)):
            field = {
                "bare": bare(writes),
                "bare, again": bare(writes),
                "bare, after a SELECT 1": bare(writes, trip=True),
                "fenced": fenced(writes),
            }
            some = rounds.Effort(effort.sets, max(10, effort.cycles // writes), max(3, effort.warm // writes))
            medians = rounds.alternate(place, field, some)
            what = f"fenced transaction of {writes} write{'s' if writes > 1 else ''}, against a bare one"
            bars.append(report.bar(what, f"at most {limit}x", rounds.ratio(medians, "fenced", "bare"), limit, "x"))
            bars.append(report.null_test(rounds.ratio(medians, "bare, again", "bare"), f"bare, {writes}"))
            rows = [
                (name, f"{rounds.ratio(medians, name, 'bare'):.2f}x", rounds.spread(medians, name, "bare"))
                for name in medians
            ]
            tables.append(
                report.table(
                    "1 write" if writes == 1 else f"{writes} writes",
                    ("Contestant", "Ratio", "Middle half of the sets"),
                    rows,
                )
            )
        engine.dispose()
    return {
        "scenario": "fences",
        "title": "Fences",
        "method": (
            "One cycle is a transaction of one-row updates through SQLAlchemy Core, either bare or in `lease.begin()`"
            " on a table with the statement trigger, on a server that syncs each commit to disk."
        ),
        "bars": bars,
        "tables": tables,
        "skipped": {},
    }
