"""The time from the release in one process until the waiter in another process runs.

The contestants alternate on pairs of processes. The clock starts just before the holder calls release, and stops when the
waiter's acquire has returned. Both processes read the same clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks import floor, peers, picture, report
from benchmarks.place import plain, server
from benchmarks.rounds import quantile
from pgfence import AdvisoryLock, AsyncAdvisoryLock

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from benchmarks.place import Place

WAIT, UNLOCK = "SELECT pg_advisory_lock({0})", "SELECT pg_advisory_unlock({0})"
TIMEOUT = 30
UNQUEUED = 0.006
"""Seconds after which a waiter is certainly in the queue. The release comes a little later."""


class Raw(peers.Client):
    """A blocking lock, with the plain driver."""

    def __init__(self, place: Place, name: str) -> None:
        self.connection, self.number = place.connect(), floor.key(name)

    def acquire(self) -> None:
        self.connection.execute(WAIT.format("%s"), (self.number,)).fetchone()

    def release(self) -> None:
        self.connection.execute(UNLOCK.format("%s"), (self.number,)).fetchone()

    def close(self) -> None:
        self.connection.close()


class Ours(peers.Client):
    def __init__(self, place: Place, name: str) -> None:
        self.engine = sa.create_engine(place.url())
        self.lock: Any = AdvisoryLock(self.engine, name)

    def acquire(self) -> None:
        self.held = self.lock.acquire(timeout=TIMEOUT)

    def release(self) -> None:
        self.held.release()

    def close(self) -> None:
        self.engine.dispose()


class RawLate(Raw):
    """A blocking lock after a longer wait, when all caches are cold."""

    polls = 1.0


class OursLate(Ours):
    """pgfence after a longer wait. Half of these waits last longer than their first slice in the server."""

    polls = 1.0


class OnLoop(peers.Client):
    """An async lock on its own event loop, which runs while the lock is waited for."""

    def __init__(self, place: Place, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.open(place, name))

    async def open(self, place: Place, name: str) -> None:
        raise NotImplementedError

    async def end(self) -> None:
        """Close the connection that `open` opened."""

    def close(self) -> None:
        self.loop.run_until_complete(self.end())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class RawAsyncpg(OnLoop):
    async def open(self, place: Place, name: str) -> None:
        self.connection, self.number = await asyncpg.connect(plain(place.url())), floor.key(name)

    def acquire(self) -> None:
        self.loop.run_until_complete(self.connection.fetchval(WAIT.format("$1"), self.number))

    def release(self) -> None:
        self.loop.run_until_complete(self.connection.fetchval(UNLOCK.format("$1"), self.number))

    async def end(self) -> None:
        await self.connection.close()


class RawPsycopgAsync(OnLoop):
    async def open(self, place: Place, name: str) -> None:
        self.connection = await psycopg.AsyncConnection.connect(place.dsn, autocommit=True)
        self.number = floor.key(name)

    def acquire(self) -> None:
        self.loop.run_until_complete(self._run(WAIT.format("%s")))

    def release(self) -> None:
        self.loop.run_until_complete(self._run(UNLOCK.format("%s")))

    async def _run(self, text: str) -> None:
        await (await self.connection.execute(text, (self.number,))).fetchone()

    async def end(self) -> None:
        await self.connection.close()


def ours_async(driver: str) -> type[peers.Client]:
    class OursAsync(OnLoop):
        async def open(self, place: Place, name: str) -> None:
            self.engine = create_async_engine(place.url(driver))
            self.lock: Any = AsyncAdvisoryLock(self.engine, name)

        def acquire(self) -> None:
            self.held = self.loop.run_until_complete(self.lock.acquire(timeout=TIMEOUT))

        def release(self) -> None:
            self.loop.run_until_complete(self.held.release())

        async def end(self) -> None:
            await self.engine.dispose()

    return OursAsync


OWN: dict[str, Callable[[], type[peers.Client]]] = {
    "raw psycopg": lambda: Raw,
    "raw psycopg, again": lambda: Raw,
    "pgfence": lambda: Ours,
    "raw psycopg, after a wait of up to a second": lambda: RawLate,
    "pgfence, after a wait of up to a second": lambda: OursLate,
    "raw psycopg async": lambda: RawPsycopgAsync,
    "raw psycopg async, again": lambda: RawPsycopgAsync,
    "pgfence, psycopg async": lambda: ours_async("psycopg"),
    "raw asyncpg": lambda: RawAsyncpg,
    "raw asyncpg, again": lambda: RawAsyncpg,
    "pgfence, asyncpg": lambda: ours_async("asyncpg"),
}
PEERS = (
    "sqlalchemy-dlock, one connection",
    "sqlalchemy-dlock, timeout=30",
    "pals (psycopg)",
    "django-pglock",
    "redis-py",
    "python-redis-lock",
)
JUDGED = {
    "psycopg": ("pgfence", "raw psycopg"),
    "psycopg async": ("pgfence, psycopg async", "raw psycopg async"),
    "asyncpg": ("pgfence, asyncpg", "raw asyncpg"),
}


def run(quick: bool) -> dict[str, Any]:
    """Measure the hand-over, compared with a blocking lock of the same driver and with other libraries."""
    pairs, cycles = (1, 4) if quick else (10, 40)
    found, skipped = peers.available(PEERS)
    field = (*OWN, *found)
    sets: list[dict[str, list[float]]] = []
    with server() as place:
        sets += [_pair(place, field, cycles) for _ in range(pairs)]
    bars = []
    for driver, (ours, raw) in JUDGED.items():
        figure = _ratio(sets, ours, raw)
        bars.append(report.bar(f"hand-off between two processes, p50, {driver}", "at most 1.3x", figure, 1.3, "x"))
        bars.append(report.null_test(_ratio(sets, f"{raw}, again", raw), f"hand-off, {raw}"))
    return {
        "scenario": "handoff",
        "title": "Hand-off to a waiter in another process",
        "method": (
            "The waiter waits in the queue, with a timeout if its library has one. Figures are ratios to the"
            " hand-off of a blocking `pg_advisory_lock` between the same two processes, as medians over pairs of"
            " processes. That lock is taken with the same driver for the limits, and with psycopg 3 for the table."
        ),
        "bars": bars,
        "tables": [_table(sets, field)],
        "skipped": skipped,
        "pictures": [
            picture.bars(
                "benchmark-handoff",
                "Hand-off to a waiter in another process, p50 compared with plain psycopg",
                {name: _ratio(sets, name, field[0]) for name in field if "up to a second" not in name},
            )
        ],
    }


def _ratio(sets: list[dict[str, list[float]]], name: str, base: str) -> float:
    return statistics.median(statistics.median(each[name]) / statistics.median(each[base]) for each in sets)


def _table(sets: list[dict[str, list[float]]], field: tuple[str, ...]) -> dict[str, Any]:
    base = field[0]
    floor_p50 = statistics.median(statistics.median(each[base]) for each in sets)
    rows = []
    for name in field:
        everything = [took for each in sets for took in each[name]]
        rows.append((_ratio(sets, name, base), name, quantile(everything, 0.99) / floor_p50, len(everything)))
    return report.table(
        "From the release to the running waiter",
        ("Contestant", "p50, ratio to raw", "p99, ratio to the p50 of raw", "Samples"),
        [(name, f"{p50:.2f}x", f"{p99:.1f}x", count) for p50, name, p99, count in sorted(rows)],
    ) | {"seconds": sets}


def _pair(place: Place, field: tuple[str, ...], cycles: int) -> dict[str, list[float]]:
    """Let the contestants alternate between two new processes."""
    context = multiprocessing.get_context("spawn")
    took: dict[str, list[float]] = {name: [] for name in field}
    with contextlib.ExitStack() as stack:
        ends = []
        for _ in range(2):
            here, there = context.Pipe()
            process = context.Process(target=_side, args=(there, place.dsn, random.sample(field, len(field))))
            process.start()
            stack.callback(process.join, 30)
            stack.callback(here.send, None)
            ends.append(here)
        polls = {name: there[name] for there in (end.recv() for end in ends) for name in there}
        for _ in range(cycles + 2):
            for name in random.sample(field, len(field)):
                # Contestants that poll or wait long get few samples, because each takes long.
                if polls[name] and random.random() > 0.05 / polls[name] and len(took[name]) > 2:
                    continue
                took[name].append(_hand_over(*ends, name, polls[name]))
    return {name: times[2 if len(times) > 4 else 0 :] for name, times in took.items()}


def _hand_over(holder: Connection, waiter: Connection, name: str, polls: float) -> float:
    holder.send((name, "acquire"))
    holder.recv()
    waiter.send((name, "acquire"))
    time.sleep(UNQUEUED + random.uniform(0, max(0.01, polls)))
    holder.send((name, "release"))
    start, end = holder.recv()[0], waiter.recv()[1]
    waiter.send((name, "release"))
    waiter.recv()
    return end - start


def _side(pipe: Connection, dsn: str, field: list[str]) -> None:
    """Run one process: a client for each contestant, and commands until it receives None."""

    class There:
        """The server, as seen from another process."""

        def __init__(self) -> None:
            self.dsn = dsn

        def url(self, driver: str = "psycopg") -> sa.URL:
            return sa.make_url(dsn).set(drivername=f"postgresql+{driver}")

        def connect(self) -> Any:
            return psycopg.connect(dsn, autocommit=True)

    found, _ = peers.available(PEERS)
    place: Any = There()
    clients = {name: (OWN[name]() if name in OWN else found[name])(place, f"handoff of {name}") for name in field}
    pipe.send({name: client.polls for name, client in clients.items()})
    while (command := pipe.recv()) is not None:
        client, verb = clients[command[0]], command[1]
        start = time.monotonic()
        getattr(client, verb)()
        pipe.send((start, time.monotonic()))
    for client in clients.values():
        client.close()
