"""Fair turns: several processes request one lock, with a timeout of twice the time of a fair turn."""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import sqlalchemy as sa

from benchmarks import floor, picture, report
from benchmarks.place import plain, server
from pgfence import AdvisoryLock
from pgfence.errors import LockTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from benchmarks.place import Place

NAME = "fair"
RAW, OURS = "raw pg_advisory_lock", "pgfence, hold()"
HOLD = 0.05


class Turns(NamedTuple):
    """The measurements of one process.

    Attributes:
        held: for each grant, when the lock was granted and when its release began.
        waits: the duration of each call, including those that timed out.
        timeouts: the number of calls that timed out.
        spent: the processor time of the process during the run, in seconds.
    """

    held: list[tuple[float, float]]
    waits: list[float]
    timeouts: int
    spent: float


def run(quick: bool) -> dict[str, Any]:
    """Let the processes take turns with pgfence, with a blocking lock of the driver, and with both again."""
    processes, seconds, rounds = (6, 1.0, 1) if quick else (40, 11.0, 4)
    found: dict[str, list[list[Turns]]] = {RAW: [], OURS: []}
    with server() as place:
        for _ in range(rounds):
            for kind, crowds in found.items():
                crowds.append(_compete(place, kind, processes, seconds))
    turn = HOLD * processes
    ours, raw = ([_describe(crowd, turn) for crowd in found[kind]] for kind in (OURS, RAW))
    handed = _median(each["hand-off"] for each in ours) / _median(each["hand-off"] for each in raw)
    worst = max(each["longest"] for each in ours)
    crowded = f"{processes} processes, holds of {HOLD * 1000:g} ms"
    bars = [
        report.bar(
            f"{crowded}: requests that timed out after two fair turns",
            "0",
            sum(each["timeouts"] for each in ours),
            0,
            digits=0,
        ),
        report.bar(f"{crowded}: longest wait, in fair turns", "at most 1.5x", worst, 1.5, "x"),
        report.bar(f"{crowded}: hand-off p50, against pg_advisory_lock", "at most 1.15x", handed, 1.15, "x"),
    ]
    grants = {kind: sorted(len(one.held) for one in crowds[0]) for kind, crowds in found.items()}
    return {
        "scenario": "fair",
        "title": "Fair turns between processes",
        "method": (
            f"For {seconds:g} s, {processes} processes repeatedly request the same lock and hold it for {HOLD * 1000:g}"
            f" ms each time. Each request times out after {2 * turn:g} s. If the processes were served in the order of"
            f" their requests, each would wait {turn:g} s; this time is called a fair turn. The hand-off is the time"
            " from the unlock in one process to the grant in the next. Raw is a blocking `pg_advisory_lock` with a `lock_timeout`."
        ),
        "bars": bars,
        "tables": [_table({RAW: raw, OURS: ours})],
        "skipped": {},
        "pictures": [
            picture.curves(
                "benchmark-fair", "processes, by their grants", range(1, processes + 1), {"grants of a process": grants}
            )
        ],
    }


def _describe(crowd: list[Turns], turn: float) -> dict[str, float]:
    held = sorted(each for one in crowd for each in one.held)
    grants = [len(one.held) for one in crowd]
    return {
        "grants": len(held),
        "fewest": min(grants),
        "median": statistics.median(grants),
        "most": max(grants),
        "timeouts": sum(one.timeouts for one in crowd),
        "longest": max(wait for one in crowd for wait in one.waits) / turn,
        "hand-off": _median(after[0] - before[1] for before, after in itertools.pairwise(held)),
        "spent": 1e3 * sum(one.spent for one in crowd) / max(1, len(held)),
    }


def _table(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    def show(key: str, digits: int = 0, unit: str = "") -> list[str]:
        return [", ".join(f"{each[key]:.{digits}f}{unit}" for each in found) for found in runs.values()]

    rows = [
        ("grants", *show("grants")),
        ("fewest, median and most grants of one process", *_spread(runs)),
        ("timeouts", *show("timeouts")),
        ("longest wait, in fair turns", *show("longest", 2)),
        (
            "hand-off, p50",
            *[", ".join(f"{1e3 * each['hand-off']:.2f} ms" for each in found) for found in runs.values()],
        ),
        ("client processor time per grant", *show("spent", 2, " ms")),
    ]
    return report.table("Run by run", ("What", *runs), rows)


def _spread(runs: dict[str, list[dict[str, float]]]) -> list[str]:
    keys = ("fewest", "median", "most")
    return [", ".join("/".join(f"{each[key]:g}" for key in keys) for each in found) for found in runs.values()]


def _median(values: Any) -> float:
    return statistics.median(list(values) or [0.0])


def _compete(place: Place, kind: str, processes: int, seconds: float) -> list[Turns]:
    """Start the processes, let them begin together, and return the measurements of each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.fair"])  # 40 imports would take longer than the run
    url = place.url().render_as_string(hide_password=False)
    crowd, pipes, turn = [], [], HOLD * processes
    for _ in range(processes):
        here, there = context.Pipe()
        process = context.Process(target=_want, args=(there, kind, url, 2 * turn), daemon=True)
        process.start()
        crowd.append(process)
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    end = time.monotonic() + seconds
    for pipe in pipes:
        pipe.send(end)
    found: list[Turns] = [pipe.recv() for pipe in pipes]
    for process in crowd:
        process.join(30)
    return found


def _want(pipe: Connection, kind: str, url: str, timeout: float) -> None:
    lock, unlock = (_ours if kind == OURS else _raw)(url, timeout)
    pipe.send(None)
    end, spent = pipe.recv(), time.process_time()
    held: list[tuple[float, float]] = []
    waits: list[float] = []
    timeouts = 0
    while (start := time.monotonic()) < end:
        granted = lock()
        waits.append(time.monotonic() - start)
        if granted:
            granted_at = time.monotonic()
            time.sleep(HOLD)
            held.append((granted_at, time.monotonic()))
            unlock()
        timeouts += not granted
    pipe.send(Turns(held, waits, timeouts, time.process_time() - spent))


def _ours(url: str, timeout: float) -> tuple[Callable[[], bool], Callable[[], object]]:
    engine = sa.create_engine(url)
    lock: Any = AdvisoryLock(engine, NAME, namespace="benchmark")
    AdvisoryLock(engine, multiprocessing.current_process().name).acquire().release()  # opens the connection
    handles: list[Any] = []

    def acquire() -> bool:
        try:
            handles.append(lock.acquire(timeout=timeout))
        except LockTimeoutError:
            return False
        return True

    return acquire, lambda: handles.pop().release()


def _raw(url: str, timeout: float) -> tuple[Callable[[], bool], Callable[[], object]]:
    connection = psycopg.connect(plain(sa.make_url(url)), autocommit=True)
    connection.execute(f"SET lock_timeout = {int(timeout * 1000)}")
    key = floor.key(NAME)

    def acquire() -> bool:
        try:
            connection.execute("SELECT pg_advisory_lock(%s)", (key,)).fetchone()
        except psycopg.errors.LockNotAvailable:
            return False
        return True

    return acquire, lambda: connection.execute("SELECT pg_advisory_unlock(%s)", (key,)).fetchone()
