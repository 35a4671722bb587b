"""Leases: the cost of acquire and release, ten thousand leases in one process, and the hand-over to a waiter."""

from __future__ import annotations

import multiprocessing
import statistics
import time
import uuid
from typing import TYPE_CHECKING, Any

import psutil
import sqlalchemy as sa

from benchmarks import report, rounds, wire
from benchmarks.place import called, server, wait_until
from benchmarks.rounds import quantile
from pgfence import Lease, schema

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from multiprocessing.connection import Connection

    from benchmarks.place import Place
    from benchmarks.rounds import Make

ACQUIRE = "SELECT * FROM pgfence_acquire_lease_v2(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, 'lease')"
RELEASE = "SELECT pgfence_release_lease_v1(%s, %s, %s)"
RAW, AGAIN, OURS = "the same SQL by raw psycopg", "the same, again", "pgfence, hold()"


def raw(name: str) -> Make:
    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        connection = stack.enter_context(place.connect())

        def cycle() -> None:
            lease = str(uuid.uuid4())
            asked = (name, lease, 60.0, 0.0, 0.0, None, "raw", "here", 1, "", None)
            row = connection.execute(ACQUIRE, asked, prepare=True).fetchone()
            assert row is not None
            connection.execute(RELEASE, (name, lease, row[1]), prepare=True).fetchone()

        return cycle

    return make


def ours(place: Place, stack: ExitStack) -> Callable[[], object]:
    engine = sa.create_engine(place.url())
    stack.callback(engine.dispose)
    lease = Lease(engine, "ours", ttl=60)

    def cycle() -> None:
        with lease.hold():
            pass

    return cycle


def run(quick: bool) -> dict[str, Any]:
    """Measure leases, compared with the same statements sent by the plain driver."""
    with server() as place:
        schema.create_all(sa.create_engine(place.url(), poolclass=sa.NullPool))
        field: dict[str, Make] = {RAW: raw("raw"), AGAIN: raw("again"), OURS: ours}
        medians = rounds.alternate(place, field, rounds.Effort.of(quick=quick))
        bars = [
            report.bar(
                "lease acquire + release, psycopg, against the same SQL",
                "at most 1.3x",
                rounds.ratio(medians, OURS, RAW),
                1.3,
                "x",
            ),
            report.null_test(rounds.ratio(medians, AGAIN, RAW), RAW),
            _trips(place),
            *_many(place, *((200, 3.0) if quick else (10_000, 30.0))),
            _take_over(place, 10 if quick else 300),
        ]
    rows = [(name, f"{rounds.ratio(medians, name, RAW):.2f}x", rounds.spread(medians, name, RAW)) for name in medians]
    return {
        "scenario": "leases",
        "title": "Leases",
        "method": (
            "One cycle acquires the lease and releases it. The baseline is the driver, which calls the same two"
            " server functions with prepared statements. The ten thousand leases have a TTL of 30 s and are held"
            " until each has been renewed once. A take-over is the time from just before the release in one"
            " process to the grant in another process that was waiting."
        ),
        "bars": bars,
        "tables": [report.table("Acquire and release", ("Contestant", "Ratio", "Middle half of the sets"), rows)],
        "skipped": {},
    }


def _trips(place: Place) -> dict[str, Any]:
    with wire.counted(place.url()) as (url, counter):
        engine = sa.create_engine(url)
        lease = Lease(engine, "trips", ttl=60)
        for _ in range(3):
            before = counter.trips
            with lease.hold():
                pass
        trips = counter.trips - before
        engine.dispose()
    return report.bar("round trips of lease acquire + release", "2", trips, 2, digits=0)


def _many(place: Place, count: int, ttl: float) -> list[dict[str, Any]]:
    """Hold many leases at once: memory, connections, and the delay of the latest renewal."""
    engine = sa.create_engine(place.url(), connect_args=called("many"))
    with place.connect() as look:
        with Lease(engine, "warm", ttl=ttl).hold():
            pass
        before = psutil.Process().memory_info().rss
        held = [Lease(engine, f"many:{number}", ttl=ttl).acquire() for number in range(count)]
        used = psutil.Process().memory_info().rss - before

        def renewed() -> bool:
            (left,) = look.execute(
                "SELECT count(*) FROM pgfence_lease WHERE name LIKE 'many:%' AND renewed_at = acquired_at"
            ).fetchone() or (1,)
            return bool(left == 0)

        wait_until(renewed, ttl)
        (late,) = look.execute(
            "SELECT max(extract(epoch FROM clock_timestamp() - renewed_at)) FROM pgfence_lease WHERE name LIKE 'many:%'"
        ).fetchone() or (ttl,)
        (connections,) = look.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'many'"
        ).fetchone() or (0,)
        lost = sum(lease.lost for lease in held)
        for lease in held:
            lease.release()
    engine.dispose()
    what = f"{count:,} leases held by one process"
    return [
        report.bar(f"{what}: connections", "at most 2", connections, 2, digits=0),
        report.bar(f"additional memory for {what}", "under 100 MB", used / 1e6, 100, " MB", digits=0),
        report.bar(
            f"{what}: longest time since a renewal",
            f"ttl/3 ({ttl / 3:g} s)",
            float(late),
            ttl / 3 + 0.5,
            " s",
            digits=1,
        ),
        report.bar(f"{what}: lost", "0", lost, 0, digits=0),
    ]


def _waiter(url: str, rounds_: int, pipe: Connection) -> None:
    engine = sa.create_engine(url)
    for number in range(rounds_):
        pipe.send("waits")
        held = Lease(engine, f"over:{number}", ttl=30).acquire(timeout=30)
        pipe.send(time.monotonic())
        held.release()
    engine.dispose()


def _take_over(place: Place, times: int) -> dict[str, Any]:
    url = place.url().render_as_string(hide_password=False)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_waiter, args=(url, times, there), daemon=True)
    engine = sa.create_engine(place.url())
    held = Lease(engine, "over:0", ttl=30).acquire()
    process.start()
    took = []
    for number in range(times):
        here.recv()
        time.sleep(0.03)
        released = time.monotonic()
        following = Lease(engine, f"over:{number + 1}", ttl=30).acquire() if number + 1 < times else None
        released = time.monotonic()
        held.release()
        took.append(here.recv() - released)
        if following is not None:
            held = following
    process.join(30)
    engine.dispose()
    return report.bar(
        f"take-over after a release, p99 of {times} (p50 {statistics.median(took) * 1000:.1f} ms)",
        "under 50 ms",
        quantile(took, 0.99) * 1000,
        50,
        " ms",
        digits=1,
    )
