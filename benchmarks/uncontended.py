"""Acquire and release a lock without contention, on a warm connection."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks import floor, peers, picture, report, rounds, wire
from benchmarks.place import server
from pgfence import AdvisoryLock, AsyncAdvisoryLock

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from benchmarks.place import Place
    from benchmarks.rounds import AsyncMake, Make, Medians

RAW, AGAIN = "raw psycopg", "raw psycopg, again"
HOLD = "pgfence, hold()"
SYNC: dict[str, Make] = {
    RAW: floor.raw_psycopg("raw"),
    AGAIN: floor.raw_psycopg("again"),
    HOLD: floor.ours("hold", "hold"),
}
PEERS = tuple(name for name in peers.PEERS if "timeout" not in name)
ASYNC: dict[str, dict[str, AsyncMake]] = {
    "psycopg async": {
        "raw psycopg async": floor.raw_psycopg_async("raw"),
        "raw psycopg async, again": floor.raw_psycopg_async("again"),
        "pgfence, hold()": floor.ours_async("hold", "psycopg"),
    },
    "asyncpg": {
        "raw asyncpg": floor.raw_asyncpg("raw"),
        "raw asyncpg, again": floor.raw_asyncpg("again"),
        "pgfence, hold()": floor.ours_async("hold", "asyncpg"),
    },
}


def run(quick: bool) -> dict[str, Any]:
    """Measure pgfence, compared with the drivers, plain SQLAlchemy and other libraries."""
    effort = rounds.Effort.of(quick=quick)
    bars, tables = [], []
    with server() as place:
        medians = rounds.alternate(place, SYNC, effort)
        bars += _bars("psycopg", medians, RAW, AGAIN, HOLD)
        for driver, field in ASYNC.items():
            raw, again, ours = field
            medians = rounds.alternate_async(place, field, effort)
            bars += _bars(driver, medians, raw, again, ours)
            large = {**field, "SQLAlchemy Core, one connection": _core_async(driver)}
            tables.append(_table(f"Compared with SQLAlchemy, {driver}", rounds.alternate_async(place, large, effort)))
        bars += [_trips(place, "psycopg"), *(_trips_async(place, name) for name in ("psycopg", "asyncpg"))]
        found, skipped = peers.available(PEERS)
        medians = rounds.alternate(place, _everybody(found), effort)
        bars.append(report.null_test(rounds.ratio(medians, AGAIN, RAW), f"{RAW}, all contestants"))
        tables.insert(0, _table("All contestants, sync", medians))
    return {
        "scenario": "uncontended",
        "title": "Acquire and release, uncontended",
        "method": (
            "One cycle acquires the lock and releases it. The limits apply to a run with three contestants (raw, raw"
            " again, pgfence). With more contestants, each one runs with colder caches and takes longer, so compare"
            " figures only within a table."
        ),
        "bars": bars,
        "tables": tables,
        "skipped": skipped,
        "pictures": [
            picture.bars(
                "benchmark-uncontended",
                "Acquire and release, compared with plain psycopg",
                {name: rounds.ratio(medians, name, RAW) for name in medians},
            )
        ],
    }


def _bars(driver: str, medians: Medians, raw: str, again: str, ours: str) -> list[dict[str, Any]]:
    figure = rounds.ratio(medians, ours, raw)
    limit = 1.6 if driver == "asyncpg" else 1.5
    wanted = f"at most {limit}x" + (" (goal 1.3x)" if driver == "psycopg" else "")
    return [
        report.bar(f"uncontended acquire + release, {driver}, against the raw driver", wanted, figure, limit, "x"),
        report.null_test(rounds.ratio(medians, again, raw), raw),
    ]


def _core_async(driver: str) -> AsyncMake:
    return floor.core_async("core", driver.split(maxsplit=1)[0])


def _everybody(found: dict[str, type[peers.Client]]) -> dict[str, Make]:
    field = SYNC | {
        "pgfence, try_acquire() and release()": floor.ours("try", "try"),
        "pgfence, a new lock object each time": floor.ours("new", "new"),
        "SQLAlchemy Core, one connection": floor.core("core"),
        "SQLAlchemy Core, from the pool": floor.core("pool", checkout=True),
    }
    return field | {name: _peer(kind) for name, kind in found.items()}


def _peer(kind: type[peers.Client]) -> Make:
    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        client = kind(place, "benchmark")
        stack.callback(client.close)
        return client.cycle

    return make


def _table(title: str, medians: Medians) -> dict[str, Any]:
    base = next(iter(medians))
    rows = sorted((rounds.ratio(medians, name, base), name) for name in medians)
    return report.table(
        title,
        ("Contestant", "Ratio to raw", "Middle half of the sets"),
        [(name, f"{figure:.2f}x", rounds.spread(medians, name, base)) for figure, name in rows],
    ) | {"seconds": medians}


def _trips(place: Place, driver: str) -> dict[str, Any]:
    with wire.counted(place.url(driver)) as (url, counter):
        engine = sa.create_engine(url)
        lock = AdvisoryLock(engine, "trips")
        # The first cycles open the connection and prepare the statements.
        for _ in range(3):
            before = counter.trips
            with lock.hold():
                pass
        trips = counter.trips - before
        engine.dispose()
    return report.bar(f"round trips of acquire + release, {driver}", "2", trips, 2, digits=0)


def _trips_async(place: Place, driver: str) -> dict[str, Any]:
    async def cycle(url: sa.URL, counter: wire.Counter) -> int:
        engine = create_async_engine(url)
        lock = AsyncAdvisoryLock(engine, "trips")
        for _ in range(3):
            before = counter.trips
            async with lock.hold():
                pass
        await engine.dispose()
        return counter.trips - before

    with wire.counted(place.url(driver)) as (url, counter):
        trips = asyncio.run(cycle(url, counter))
    name = {"psycopg": "psycopg async"}.get(driver, driver)
    return report.bar(f"round trips of acquire + release, {name}", "2", trips, 2, digits=0)
