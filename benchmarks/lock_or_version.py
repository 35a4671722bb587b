"""Lock or version? The same read-modify-write with both, by one to eight workers, on one row and on many; with a picture."""

from __future__ import annotations

import multiprocessing
import random
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from benchmarks import picture, report
from benchmarks.place import server
from benchmarks.rounds import quantile
from pgfence import TransactionLock
from pgfence.retrying import run_transaction
from pgfence.versions import Versioned, VersionedSession

if TYPE_CHECKING:
    from multiprocessing.connection import Connection as Pipe

THOUGHT = 0.002
"""Seconds between read and write, in place of the program's work."""
ROWS = {"one row": 1, "200 rows": 200}
GUARDS = ("version, with retries", "TransactionLock")
NAME = "lock-or-version"


class Base(DeclarativeBase):
    """The base class of this scenario's only mapped class."""


class Counter(Versioned, Base):
    __tablename__ = "counter"
    id: Mapped[int] = mapped_column(primary_key=True)
    n: Mapped[int] = mapped_column(default=0)


class Phase(NamedTuple):
    """One measurement.

    Attributes:
        guard: one of GUARDS.
        rows: the number of rows that the workers choose from.
        workers: the number of workers that are active; the others are idle.
        seconds: the duration.
    """

    guard: str
    rows: int
    workers: int
    seconds: float


def run(quick: bool) -> dict[str, Any]:
    """Let workers increment rows, guarded by a version and by a lock."""
    crowds = (1, 2) if quick else (1, 2, 4, 8)
    seconds, rounds = (0.2, 1) if quick else (0.6, 6)
    phases = [
        Phase(guard, rows, workers, seconds) for rows in ROWS.values() for workers in crowds for guard in GUARDS
    ] * rounds
    random.shuffle(phases)
    took: dict[Phase, list[float]] = {}
    attempts: dict[Phase, int] = {}
    with server() as place:
        for phase, waits, tried in _act(place.url().render_as_string(hide_password=False), phases, max(crowds)):
            took.setdefault(phase, []).extend(waits)
            attempts[phase] = attempts.get(phase, 0) + tried
        counted = sum(map(len, took.values()))
        with place.connect() as connection:
            (total,) = connection.execute("SELECT sum(n) FROM counter").fetchone() or (0,)
    rates: dict[str, dict[str, list[float]]] = {title: {} for title in ROWS}
    slow: dict[str, list[float]] = {guard: [] for guard in GUARDS}
    rows = []
    for title, number in ROWS.items():
        for guard in GUARDS:
            found = [Phase(guard, number, workers, seconds) for workers in crowds]
            rates[title][guard] = [len(took[phase]) / (seconds * rounds) for phase in found]
            for phase, rate in zip(found, rates[title][guard], strict=True):
                tries = attempts[phase] / max(1, len(took[phase]))
                within = [quantile(took[phase], share) * 1000 for share in (0.5, 0.99)]
                cells = (f"{rate:,.0f}", f"{tries:.2f}", *(f"{each:,.0f}" for each in within))
                rows.append((title, guard, phase.workers, *cells))
                if number == 1:
                    slow[guard].append(within[1])
    panels = {f"{title}: commits a second": lines for title, lines in rates.items()}
    panels["one row: 99 of 100 within milliseconds"] = slow
    return {
        "scenario": "lock_or_version",
        "title": "Lock or version",
        "method": (
            f"Up to {max(crowds)} processes read a row, wait for {THOUGHT * 1000:g} ms and write it, for"
            f" {seconds * rounds:.3g} s for each row of the table, either with `run_transaction` and a version or in"
            " `TransactionLock.begin()`."
        ),
        "bars": [report.bar(f"lost updates, of {counted:,}", "0", abs(total - counted), 0, digits=0)],
        "tables": [
            report.table(
                "Commits a second",
                ("Rows", "Guard", "Workers", "Commits a second", "Attempts per commit", "p50, ms", "p99, ms"),
                rows,
            )
        ],
        "skipped": {},
        "pictures": [picture.curves(NAME, "workers", crowds, panels)],
    }


def _act(url: str, phases: list[Phase], workers: int) -> list[tuple[Phase, list[float], int]]:
    """Return the duration of each commit and the number of attempts, for each phase."""
    engine = sa.create_engine(url)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Counter(id=number) for number in range(max(ROWS.values()))])
        session.commit()
    engine.dispose()
    context = multiprocessing.get_context("spawn")
    pipes, crowd = [], []
    for number in range(workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(url, number, theirs))
        process.start()
        pipes.append(ours)
        crowd.append(process)
    found = []
    for pipe in pipes:
        pipe.recv()
    for phase in phases:
        for pipe in pipes[: phase.workers]:
            pipe.send(phase)
        counts = [pipe.recv() for pipe in pipes[: phase.workers]]
        found.append((phase, [wait for waits, _ in counts for wait in waits], sum(tried for _, tried in counts)))
    for pipe in pipes:
        pipe.send(None)
    for process in crowd:
        process.join()
    return found


def _serve(url: str, number: int, pipe: Pipe) -> None:
    """Work on command, and report how much was done."""
    chosen = random.Random(number)
    engine = sa.create_engine(url)
    make = sessionmaker(engine, class_=VersionedSession)
    with make() as session:
        session.scalars(sa.select(Counter).limit(1)).all()
    pipe.send(None)
    while phase := pipe.recv():
        work = _by_version if phase.guard == GUARDS[0] else _by_lock
        waits: list[float] = []
        tried, start = 0, time.monotonic()
        stop = start + phase.seconds
        while start < stop:
            tried += work(make, chosen.randrange(phase.rows))
            waits.append(time.monotonic() - start)
            start += waits[-1]
        pipe.send((waits, tried))
    engine.dispose()


def _by_version(make: sessionmaker[VersionedSession], number: int) -> int:
    tried = 0

    def count(session: Session) -> None:
        nonlocal tried
        tried += 1
        _count(session, number)

    run_transaction(make, count, attempts=1000)
    return tried


def _by_lock(make: sessionmaker[VersionedSession], number: int) -> int:
    with TransactionLock.begin(make, f"counter:{number}") as session:
        _count(session, number)
    return 1


def _count(session: Session, number: int) -> None:
    row = session.get_one(Counter, number)
    time.sleep(THOUGHT)
    row.n += 1
