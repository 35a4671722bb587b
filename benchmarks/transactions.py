"""A lock in the caller's transaction, compared with an additional statement there."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from benchmarks import floor, report, rounds, wire
from benchmarks.place import server
from pgfence import AsyncTransactionLock, TransactionLock

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.place import Place
    from benchmarks.rounds import AsyncMake, Make, Medians

    Body = Callable[[Any], object]

SELECT = sa.text("SELECT 1")
LOCK = sa.text("SELECT pg_advisory_xact_lock(:k)")
BASE, AGAIN = "BEGIN; SELECT 1; COMMIT", "BEGIN; SELECT 1; COMMIT, again"
OURS, TIMED = "TransactionLock(connection)", "TransactionLock(connection), timeout=2"
SESSION, ON_SESSION = "the same on a Session", "TransactionLock(session)"
ASYNC = {"psycopg": "psycopg async", "asyncpg": "asyncpg"}
# Deviations within the limits of the null test do not count as a cost.
LIMIT = rounds.NULL_TEST[1]


def run(quick: bool) -> dict[str, Any]:
    """Measure whole transactions: with a lock, and with a plain statement instead."""
    effort = rounds.Effort.of(quick=quick)
    with server() as place:
        field = _field()
        medians = rounds.alternate(place, field, effort)
        bars = [
            _bar(medians, OURS, BASE, "on a Connection"),
            _bar(medians, TIMED, BASE, "on a Connection, with a timeout"),
            _bar(medians, ON_SESSION, SESSION, "on a Session"),
            report.null_test(rounds.ratio(medians, AGAIN, BASE), "transaction on a Connection"),
        ]
        tables = [_table("Sync, psycopg", medians)]
        for driver, name in ASYNC.items():
            medians = rounds.alternate_async(place, _async_field(driver), effort)
            bars.append(_bar(medians, OURS, BASE, name))
            bars.append(report.null_test(rounds.ratio(medians, AGAIN, BASE), f"transaction, {name}"))
            tables.append(_table(f"Async, {name}", medians))
        bars += [_trips(place, field), *(_trips_async(place, driver) for driver in ASYNC)]
    return {
        "scenario": "transactions",
        "title": "A lock that ends with the transaction",
        "method": (
            "One cycle is a whole transaction on an engine with a pool: it takes a free lock, or runs `SELECT 1` with"
            " SQLAlchemy's `text()` instead."
        ),
        "bars": bars,
        "tables": tables,
        "skipped": {},
    }


def _bar(medians: Medians, ours: str, base: str, where: str) -> dict[str, Any]:
    figure = rounds.ratio(medians, ours, base)
    return report.bar(
        f"transaction with a free lock against SELECT 1, {where}", f"at most {LIMIT:g}x", figure, LIMIT, "x"
    )


def _field() -> dict[str, Make]:
    args = {"k": floor.key("transaction")}
    return {
        BASE: _on_connection(lambda c: c.execute(SELECT).scalar()),
        AGAIN: _on_connection(lambda c: c.execute(SELECT).scalar()),
        OURS: _on_connection(lambda c: TransactionLock(c, "connection").acquire()),
        TIMED: _on_connection(lambda c: TransactionLock(c, "timed").acquire(timeout=2)),
        "two names": _on_connection(lambda c: TransactionLock(c, "one", "two").acquire(timeout=2)),
        "pg_advisory_xact_lock in SQL": _on_connection(lambda c: c.execute(LOCK, args).scalar()),
        "TransactionLock.begin(engine)": _begin,
        SESSION: _on_session(lambda s: s.execute(SELECT).scalar()),
        ON_SESSION: _on_session(lambda s: TransactionLock(s, "session").acquire()),
    }


def _on_connection(body: Body) -> Make:
    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        engine = sa.create_engine(place.url())
        stack.callback(engine.dispose)

        def cycle() -> None:
            with engine.begin() as connection:
                body(connection)

        return cycle

    return make


def _on_session(body: Body) -> Make:
    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        engine = sa.create_engine(place.url())
        stack.callback(engine.dispose)
        factory = sessionmaker(engine)

        def cycle() -> None:
            with factory.begin() as session:
                body(session)

        return cycle

    return make


def _begin(place: Place, stack: ExitStack) -> Callable[[], object]:
    engine = sa.create_engine(place.url())
    stack.callback(engine.dispose)

    def cycle() -> None:
        with TransactionLock.begin(engine, "begin"):
            pass

    return cycle


def _async_field(driver: str) -> dict[str, AsyncMake]:
    return {
        BASE: _on_async(driver, lambda c: c.execute(SELECT)),
        AGAIN: _on_async(driver, lambda c: c.execute(SELECT)),
        OURS: _on_async(driver, lambda c: AsyncTransactionLock(c, "connection").acquire()),
        TIMED: _on_async(driver, lambda c: AsyncTransactionLock(c, "timed").acquire(timeout=2)),
    }


def _on_async(driver: str, body: Callable[[Any], Any]) -> AsyncMake:
    async def make(place: Place, stack: AsyncExitStack) -> Any:
        engine = create_async_engine(place.url(driver))
        stack.push_async_callback(engine.dispose)

        async def cycle() -> None:
            async with engine.begin() as connection:
                await body(connection)

        return cycle

    return make


def _table(title: str, medians: Medians) -> dict[str, Any]:
    rows = [(name, f"{rounds.ratio(medians, name, BASE):.2f}x", rounds.spread(medians, name, BASE)) for name in medians]
    columns = ("Transaction", "Ratio to the first", "Middle half of the sets")
    return report.table(title, columns, rows) | {"seconds": medians}


def _trips(place: Place, field: dict[str, Make]) -> dict[str, Any]:
    """Count the round trips that the lock adds to a transaction of only BEGIN and COMMIT."""

    class Proxied:
        def url(self) -> sa.URL:
            return url

    with wire.counted(place.url()) as (url, counter), ExitStack() as stack:
        here: Any = Proxied()
        trips = {}
        for name in (OURS, TIMED, ON_SESSION):
            cycle = field[name](here, stack)
            for _ in range(8):
                before = counter.trips
                cycle()
            trips[name] = counter.trips - before - 2
    return report.bar(
        "round trips of a free lock in a transaction, psycopg", "at most 1", max(trips.values()), 1, digits=0
    )


def _trips_async(place: Place, driver: str) -> dict[str, Any]:
    class Proxied:
        def url(self, _: str) -> sa.URL:
            return url

    async def count(counter: wire.Counter) -> int:
        async with AsyncExitStack() as stack:
            here: Any = Proxied()
            cycle = await _async_field(driver)[TIMED](here, stack)
            for _ in range(8):
                before = counter.trips
                await cycle()
            return counter.trips - before - 2

    with wire.counted(place.url(driver)) as (url, counter):
        trips = asyncio.run(count(counter))
    what = f"round trips of a free lock in a transaction, {ASYNC[driver]}"
    return report.bar(what, "at most 1", trips, 1, digits=0)
