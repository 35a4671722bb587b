"""Claims: sixteen workers process a table of jobs with `claim`, and with hand-written SQL."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks import report
from benchmarks.place import server
from pgfence import claim

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from benchmarks.place import Place

ROWS, HAND, AGAIN, BUILT, OURS = (
    "hand-written SQL, rows",
    "hand-written SQL, ORM objects",
    "the same, again",
    "hand-written select(), ORM objects",
    "pgfence, claim()",
)
LIMIT = 10
CLAIM = "SELECT id, state, payload FROM job WHERE state = 'new' ORDER BY id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED"
FINISH = "UPDATE job SET state = 'done' WHERE id = ANY (:ids)"


class Base(DeclarativeBase):
    """Of the table here."""


class Job(Base):
    """What the workers claim."""

    __tablename__ = "job"
    __table_args__ = (sa.Index("job_new", "id", postgresql_where=sa.text("state = 'new'")),)
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]
    payload: Mapped[str]


def _claim_rows(session: Session) -> Sequence[Any]:
    return session.execute(_TEXT, {"limit": LIMIT}).all()


def _claim_by_text(session: Session) -> Sequence[Any]:
    return session.scalars(sa.select(Job).from_statement(_TEXT), {"limit": LIMIT}).all()


def _claim_by_select(session: Session) -> Sequence[Any]:
    query = sa.select(Job).where(Job.state == "new").order_by(Job.id).limit(LIMIT)
    return session.scalars(query.with_for_update(key_share=True, skip_locked=True)).all()


def _claim_by_pgfence(session: Session) -> Sequence[Any]:
    return claim(session, Job, Job.state == "new", order_by=Job.id, limit=LIMIT)


_TEXT = sa.text(CLAIM)
WAYS: dict[str, Callable[[Session], Sequence[Any]]] = {
    ROWS: _claim_rows,
    HAND: _claim_by_text,
    AGAIN: _claim_by_text,
    BUILT: _claim_by_select,
    OURS: _claim_by_pgfence,
}


def run(quick: bool) -> dict[str, Any]:
    """Let each contestant process tables of jobs, in alternation, and compare the rows per second."""
    workers, jobs, rounds = (2, 400, 1) if quick else (16, 100_000, 5)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    wrong = 0
    with server() as place:
        engine = sa.create_engine(place.url(), poolclass=sa.NullPool)
        for _ in range(rounds):
            for name in random.sample(list(WAYS), len(WAYS)):
                took, counts = _process(place, engine, name, workers, jobs)
                times[name].append(took)
                wrong += abs(sum(counts) - jobs)
    # By round: the machine does not stay the same.
    ratios = {name: [mine / other for mine, other in zip(times[name], times[HAND], strict=True)] for name in WAYS}
    what = f"{workers} workers, {jobs:,} rows"
    rows = [
        (name, f"{statistics.median(found):.2f}x", f"{min(found):.2f} to {max(found):.2f}")
        for name, found in ratios.items()
    ]
    return {
        "scenario": "claims",
        "title": "Claims",
        "method": (
            f"{workers} processes claim {LIMIT} of {jobs:,} rows at a time, in one transaction with the UPDATE that marks them as"
            " done, until none is left. The UPDATE is the same statement for all. Hand-written SQL is a text with FOR NO KEY UPDATE"
            " SKIP LOCKED, from which the Session loads ORM objects, as claim() returns them, or plain rows. The contestants"
            f" take turns, in random order, {rounds} times."
        ),
        "bars": [
            report.bar(
                f"{what}: time of claim(), against the best SQL written by hand",
                "at most 1.11x",
                statistics.median(ratios[OURS]),
                1.11,
                "x",
            ),
            report.bar(f"{what}: rows that were processed twice, or never", "0", wrong, 0, digits=0),
            report.null_test(statistics.median(ratios[AGAIN]), HAND),
        ],
        "tables": [report.table("Time to process all rows", ("Contestant", "Ratio", "Range of the rounds"), rows)],
        "skipped": {},
    }


def _process(place: Place, engine: sa.Engine, name: str, workers: int, jobs: int) -> tuple[float, list[int]]:
    """Create the rows, let the workers process them, and return the seconds and how many each worker did."""
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(
            f"INSERT INTO job (state, payload) SELECT 'new', repeat('x', 100) FROM generate_series(1, {jobs})"
        )
        connection.exec_driver_sql("VACUUM ANALYZE job")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.claims"])
    url = place.url().render_as_string(hide_password=False)
    pipes, crowd = [], []
    for _ in range(workers):
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, name, url), daemon=True)
        process.start()
        crowd.append(process)
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    began = time.monotonic()
    for pipe in pipes:
        pipe.send(None)
    counts = [pipe.recv() for pipe in pipes]
    took = time.monotonic() - began
    for process in crowd:
        process.join(30)
    return took, counts


def _work(pipe: Connection, name: str, url: str) -> None:
    engine, way, finish, done = sa.create_engine(url), WAYS[name], sa.text(FINISH), 0
    with Session(engine) as session:
        session.scalars(sa.select(Job).limit(1)).all()  # connects, and configures the mapper
    pipe.send(None)
    pipe.recv()
    while True:
        with Session(engine) as session, session.begin():
            jobs = way(session)
            if not jobs:
                break
            session.execute(finish, {"ids": [job.id for job in jobs]})
        done += len(jobs)
    engine.dispose()
    pipe.send(done)
