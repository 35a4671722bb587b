"""The time until a holder is notified that the server has ended its session."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks import report
from benchmarks.place import server
from benchmarks.rounds import quantile
from pgfence import AdvisoryLock, AsyncAdvisoryLock
from pgfence.errors import LockLostError

if TYPE_CHECKING:
    import psycopg

    from benchmarks.place import Place

KILL = (
    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid()"
)


def run(quick: bool) -> dict[str, Any]:
    """Kill the backend of a holder repeatedly."""
    kills = 5 if quick else 150
    with server() as place, place.connect() as killer:
        told = {"psycopg": _sync(place, "psycopg", killer, kills), "psycopg2": _sync(place, "psycopg2", killer, kills)}
        for driver, name in (("psycopg", "psycopg async"), ("asyncpg", "asyncpg")):
            callback, cancelled = asyncio.run(_async(place, driver, killer, kills))
            told |= {f"{name}, callback": callback, f"{name}, block cancelled": cancelled}
    return {
        "scenario": "loss",
        "title": "Notification of a killed backend",
        "method": (
            f"{kills} kills are timed for each contestant, from just before `pg_terminate_backend` is sent until"
            " the callback of `on_lost` runs, or until the cancelled block of `hold()` has ended. The program is"
            " idle during that time."
        ),
        "bars": [
            report.bar(
                f"notified of a killed backend, p99, {how}",
                "under 100 ms",
                1e3 * quantile(times, 0.99),
                100,
                " ms",
                digits=1,
            )
            for how, times in told.items()
        ],
        "tables": [
            report.table(
                "From the kill to the notification",
                ("How", "p50", "p99", "Longest"),
                [
                    (how, *(f"{1e3 * quantile(times, share):.1f} ms" for share in (0.5, 0.99, 1.0)))
                    for how, times in told.items()
                ],
            )
        ],
        "skipped": {},
    }


def _sync(place: Place, driver: str, killer: psycopg.Connection[Any], kills: int) -> list[float]:
    engine = sa.create_engine(place.url(driver))
    lock: Any = AdvisoryLock(engine, "killed")
    times = []
    for _ in range(kills):
        told, at = threading.Event(), [0.0]

        def lost(told: threading.Event = told, at: list[float] = at) -> None:
            at[0] = time.monotonic()
            told.set()

        held = lock.acquire()
        held.on_lost(lost)
        start = time.monotonic()
        killer.execute(KILL)
        if not told.wait(30):
            raise TimeoutError("no holder was notified within 30 s")
        times.append(at[0] - start)
        with contextlib.suppress(LockLostError):
            held.release()
    engine.dispose()
    return times


async def _async(
    place: Place, driver: str, killer: psycopg.Connection[Any], kills: int
) -> tuple[list[float], list[float]]:
    engine = create_async_engine(place.url(driver))
    lock: Any = AsyncAdvisoryLock(engine, "killed")
    callback: list[float] = []
    cancelled: list[float] = []
    for _ in range(kills):
        told = asyncio.get_running_loop().create_future()
        with contextlib.suppress(LockLostError):
            async with lock.hold() as held:
                held.on_lost(lambda told=told: told.set_result(time.monotonic()))
                start = time.monotonic()
                # A blocking call: when it returns, the event loop is free and the server has the command.
                killer.execute(KILL)
                await asyncio.sleep(30)
        cancelled.append(time.monotonic() - start)
        callback.append(await told - start)
    await engine.dispose()
    return callback, cancelled
