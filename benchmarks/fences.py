"""What a fence costs: a transaction behind the gate against the same one without it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from benchmarks import report, rounds
from benchmarks.place import server
from pgfence import Lease, fence, schema

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from benchmarks.place import Place
    from benchmarks.rounds import Make

UPDATE = sa.text("UPDATE bare SET n = n + 1 WHERE id = :id")
GUARDED = sa.text("UPDATE guarded SET n = n + 1 WHERE id = :id")
WRITERS = 8


def bare(writes: int, *, trip: bool = False) -> Make:
    """Updates without a fence; with `trip` one more statement before them, which does nothing."""

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
    """Measure transactions of one and of ten writes, and eight writers with one token."""
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
            medians = rounds.alternate(place, field, effort)
            what = f"fenced transaction of {writes} write{'s' if writes > 1 else ''}, against a bare one"
            bars.append(report.bar(what, f"at most {limit}x", rounds.ratio(medians, "fenced", "bare"), limit, "x"))
            bars.append(report.null_test(rounds.ratio(medians, "bare, again", "bare"), f"bare, {writes}"))
            rows = [
                (name, f"{rounds.ratio(medians, name, 'bare'):.2f}x", rounds.spread(medians, name, "bare"))
                for name in medians
            ]
            tables.append(report.table(f"{writes} write(s)", ("Contestant", "Ratio", "Middle half of the sets"), rows))
        bars.append(_side_by_side(place, 0.3 if quick else 5.0))
        engine.dispose()
    return {
        "scenario": "fences",
        "title": "Fences",
        "method": (
            "One cycle is a transaction of one-row updates through SQLAlchemy Core, bare or in `lease.begin()` on a table"
            " with the statement trigger, on a server that syncs each commit to the disk. The eight writers are threads that"
            " update rows of their own."
        ),
        "bars": bars,
        "tables": tables,
        "skipped": {},
    }


def _side_by_side(place: Place, seconds: float) -> dict[str, Any]:
    engine = sa.create_engine(place.url(), pool_size=WRITERS)
    with Lease(engine, "close", ttl=60).hold() as held:

        def free(number: int) -> None:
            with engine.begin() as connection:
                connection.execute(UPDATE, {"id": number})

        def guarded(number: int) -> None:
            with engine.begin() as connection:
                fence(connection, "close", held.token)
                connection.execute(GUARDED, {"id": number})

        figures: dict[str, list[int]] = {"bare": [], "fenced": []}
        for _ in range(3):
            figures["bare"].append(_count(free, seconds / 3))
            figures["fenced"].append(_count(guarded, seconds / 3))
    engine.dispose()
    share = sum(figures["fenced"]) / max(1, sum(figures["bare"]))
    return report.bar(
        f"{WRITERS} writers with one token: unguarded throughput against theirs",
        "at most 1.43x (0.7)",
        1 / share,
        1 / 0.7,
        "x",
    )


def _count(write: Callable[[int], object], seconds: float) -> int:
    stop, counts = time.monotonic() + seconds, [0] * WRITERS

    def work(number: int) -> None:
        while time.monotonic() < stop:
            write(number)
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)
