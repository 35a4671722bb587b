"""Many threads or tasks of one process request one lock: how many connections they use, and how long it takes."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks import floor, report
from benchmarks.place import called, server, wait_until
from pgfence import AdvisoryLock, AsyncAdvisoryLock

if TYPE_CHECKING:
    import psycopg

    from benchmarks.place import Place

NAME = "one key"
CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'crowd'"
WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


class Outside:
    """Another session that holds the lock, and counts the connections of the crowd."""

    def __init__(self, place: Place) -> None:
        self.holder = place.connect()
        self.monitor = place.connect()
        self.most = 0
        self.holder.execute("SELECT pg_advisory_lock(%s)", (floor.key(NAME),))

    def one_waits(self) -> bool:
        self.look()
        return _number(self.monitor, WAITING) > 0

    def look(self) -> None:
        self.most = max(self.most, _number(self.monitor, CONNECTIONS))

    def let_go(self) -> float:
        self.holder.execute("SELECT pg_advisory_unlock_all()")
        return time.monotonic()

    def close(self) -> None:
        self.holder.close()
        self.monitor.close()


def _number(connection: psycopg.Connection[Any], text: str) -> int:
    (number,) = connection.execute(text).fetchone() or (0,)
    return int(number)


def run(quick: bool) -> dict[str, Any]:
    """Let threads and tasks of one process wait for another session, and then acquire the lock one by one."""
    threads, tasks = (20, 50) if quick else (200, 1000)
    with server() as place:
        rows = [(f"{threads} threads, psycopg", threads, *_threads(place, threads))]
        rows += [
            (f"{tasks} tasks, {driver}", tasks, *asyncio.run(_tasks(place, driver, tasks)))
            for driver in ("psycopg", "asyncpg")
        ]
    return {
        "scenario": "crowd",
        "title": "A crowd in one process",
        "method": (
            "Another session holds the lock until all threads or tasks wait; then each acquires it once and"
            " releases it. Connections, except the holder's, are counted on the server during the wait and until"
            " the last thread or task is done."
        ),
        "bars": [
            report.bar(f"connections that wait for one key, {who}", "1, besides the holder's", most, 1, digits=0)
            for who, _, most, _ in rows
        ],
        "tables": [
            report.table(
                "Through one key",
                ("Crowd", "Connections", "Until the last has held the lock", "Each"),
                [(who, most, f"{drain:.3f} s", f"{1e6 * drain / size:.0f} µs") for who, size, most, drain in rows],
            )
        ],
        "skipped": {},
    }


def _threads(place: Place, size: int) -> tuple[int, float]:
    """Return the maximum number of connections, and the seconds from the release until the last thread is done."""
    outside, asking = Outside(place), threading.Semaphore(0)
    engine = sa.create_engine(place.url(), connect_args=called("crowd"))
    lock: Any = AdvisoryLock(engine, NAME, namespace="benchmark")

    def take() -> None:
        asking.release()
        with lock.hold(timeout=120):
            pass

    crowd = [threading.Thread(target=take, daemon=True) for _ in range(size)]
    for each in crowd:
        each.start()
    for _ in crowd:
        asking.acquire(timeout=30)
    wait_until(outside.one_waits)
    start = outside.let_go()
    for number, each in enumerate(crowd):
        each.join(60)
        if number % (size // 5) == 0:
            outside.look()
    took = time.monotonic() - start
    outside.look()
    outside.close()
    engine.dispose()
    return outside.most, took


async def _tasks(place: Place, driver: str, size: int) -> tuple[int, float]:
    """Do the same as `_threads`, for the tasks of one event loop."""
    outside = Outside(place)
    engine = create_async_engine(place.url(driver), connect_args=called("crowd", driver))
    lock: Any = AsyncAdvisoryLock(engine, NAME, namespace="benchmark")
    asking, served = 0, 0

    async def take() -> None:
        nonlocal asking, served
        asking += 1
        async with lock.hold(timeout=120):
            served += 1
        if served % (size // 5) == 0:
            outside.look()

    crowd = [asyncio.create_task(take()) for _ in range(size)]
    while asking < size or not outside.one_waits():  # noqa: ASYNC110  only the server knows who waits there
        await asyncio.sleep(0.05)
    start = outside.let_go()
    await asyncio.gather(*crowd)
    took = time.monotonic() - start
    outside.look()
    outside.close()
    await engine.dispose()
    return outside.most, took
