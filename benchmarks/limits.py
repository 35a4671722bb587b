"""Semaphores, rate limits, elections and reader/writer locks without contention, compared with the same SQL by the driver."""

from __future__ import annotations

import uuid
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from benchmarks import floor, report, rounds, wire
from benchmarks.place import server
from pgfence import Election, RateLimit, ReadWriteLock, Semaphore, schema

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from benchmarks.place import Place
    from benchmarks.rounds import Make

PERMITS = 10
ACQUIRE = (
    f"SELECT * FROM pgfence_acquire_permits_v1(%s, {PERMITS}, 1, false, %s, 60, NULL, 'raw', 'here', 1, '', NULL, 0)"
)
RELEASE = "SELECT pgfence_release_permits_v1(%s, %s, %s)"
TAKE = "SELECT * FROM pgfence_take_v1(%s, 100000, 0.001, 1)"
READ, UNLOCK = "SELECT pg_try_advisory_lock_shared(%s)", "SELECT pg_advisory_unlock_shared(%s)"
SAME, AGAIN, OURS = "the same SQL by raw psycopg", "the same, again", "pgfence"


def raw_permit(name: str) -> Make:
    """Acquire and release a permit by the server functions."""

    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        connection = stack.enter_context(place.connect())

        def cycle() -> None:
            lease = str(uuid.uuid4())
            row = connection.execute(ACQUIRE, (name, lease), prepare=True).fetchone()
            assert row is not None
            connection.execute(RELEASE, (row[2], lease, row[3]), prepare=True).fetchone()

        return cycle

    return make


def raw_take(name: str) -> Make:
    """Take one unit by the server function."""

    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        connection = stack.enter_context(place.connect())
        return lambda: connection.execute(TAKE, (name,), prepare=True).fetchone()

    return make


def raw_read(name: str) -> Make:
    """Take and release PostgreSQL's own shared advisory lock."""

    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        connection, number = stack.enter_context(place.connect()), floor.key(name)

        def cycle() -> None:
            connection.execute(READ, (number,), prepare=True).fetchone()
            connection.execute(UNLOCK, (number,), prepare=True).fetchone()

        return cycle

    return make


def hold(build: Callable[[sa.Engine], Any]) -> Make:
    """Enter and leave the block of a lock."""

    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        engine = sa.create_engine(place.url())
        stack.callback(engine.dispose)
        lock = build(engine)

        def cycle() -> None:
            with lock():
                pass

        return cycle

    return make


def take(place: Place, stack: ExitStack) -> Callable[[], object]:
    """Take one unit of a rate limit."""
    engine = sa.create_engine(place.url())
    stack.callback(engine.dispose)
    return RateLimit(engine, "ours", limit=100_000, per=0.001).try_take


PERMIT = hold(lambda engine: Semaphore(engine, "ours", permits=PERMITS, ttl=60).hold)
READER = hold(lambda engine: ReadWriteLock(engine, "ours").read.hold)
FIELDS: dict[str, tuple[Make, Make, Make, float]] = {
    "a permit of a semaphore": (raw_permit("raw"), raw_permit("again"), PERMIT, 1.3),
    "a rate limit call": (raw_take("raw"), raw_take("again"), take, 1.3),
    "a read lock": (raw_read("raw"), raw_read("again"), READER, 1.6),
}


def run(quick: bool) -> dict[str, Any]:
    """Measure each of them, compared with the same statements sent by the plain driver, and count round trips."""
    bars, tables = [], []
    with server() as place:
        schema.create_all(sa.create_engine(place.url(), poolclass=sa.NullPool))
        for what, (raw, again, ours, limit) in FIELDS.items():
            medians = rounds.alternate(place, {SAME: raw, AGAIN: again, OURS: ours}, rounds.Effort.of(quick=quick))
            figure = rounds.ratio(medians, OURS, SAME)
            bars.append(report.bar(f"{what}, psycopg, against the same SQL", f"at most {limit}x", figure, limit, "x"))
            bars.append(report.null_test(rounds.ratio(medians, AGAIN, SAME), f"{what}, by raw psycopg"))
            rows = [
                (name, f"{rounds.ratio(medians, name, SAME):.2f}x", rounds.spread(medians, name, SAME))
                for name in medians
            ]
            tables.append(report.table(what.capitalize(), ("Contestant", "Ratio", "Middle half of the sets"), rows))
        bars += _count_trips(place)
    return {
        "scenario": "limits",
        "title": "Semaphores, rate limits, elections, reader/writer locks",
        "method": (
            "One cycle acquires and releases without contention, on a connection that is already open; a rate"
            " limit call needs no release. The plain driver alternates with pgfence, and calls the same server"
            " functions or, for the read lock, takes PostgreSQL's own shared lock."
        ),
        "bars": bars,
        "tables": tables,
        "skipped": {},
    }


def _count_trips(place: Place) -> list[dict[str, Any]]:
    with wire.counted(place.url()) as (url, counter):
        engine = sa.create_engine(url)
        take_one = RateLimit(engine, "trips", limit=100_000, per=0.001).try_take
        lock = ReadWriteLock(engine, "trips")
        blocks: dict[str, tuple[Callable[[], Any], int]] = {
            "a permit, acquired and released": (Semaphore(engine, "trips", permits=PERMITS, ttl=60).hold, 2),
            "a rate limit call": (lambda: nullcontext(take_one()), 1),
            "a read lock, acquired and released": (lock.read.hold, 2),
            "a write lock, acquired and released": (lock.write.hold, 2),
            "a term, acquired and released": (Election(engine, "elected", ttl=60).lead, 2),
        }
        bars = []
        for what, (block, wanted) in blocks.items():
            for _ in range(3):
                before = counter.trips
                with block():
                    pass
            bars.append(report.bar(f"round trips of {what}", str(wanted), counter.trips - before, wanted, digits=0))
        engine.dispose()
    return bars
