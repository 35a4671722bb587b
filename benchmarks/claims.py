"""Claims: sixteen workers process a table of jobs with `claim`, and with handwritten SQL.

Every contestant has a copy of the table, and each worker a connection for each contestant. The workers process a small share of
one copy after another, in random order, so that disturbances of the machine and the age of the tables affect all of them alike.
Nothing runs in the background of the server: no checkpoint, and no autovacuum.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks import report
from benchmarks.place import server
from benchmarks.rounds import quantile
from pgfence import claim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Semaphore

    from benchmarks.place import Place

ROWS, HAND, AGAIN, ONCE, BUILT, OURS, OURS_ONCE = (
    "handwritten SQL, rows",
    "handwritten SQL, ORM objects",
    "the same, again",
    "select() written once, ORM objects",
    "select() written in the call, ORM objects",
    "pgfence, claim() of a class",
    "pgfence, claim() of a select() written once",
)
LIMIT = 10
SETTINGS = {"autovacuum": "off", "checkpoint_timeout": "1h", "max_wal_size": "10GB"}
CLAIM = "SELECT id, state, payload FROM job WHERE state = 'new' ORDER BY id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED"
FINISH = "UPDATE job SET state = 'done' WHERE id = ANY (:ids)"


class Base(DeclarativeBase):
    """The base class of this scenario's only mapped class."""


class Job(Base):
    """A job, which the workers claim."""

    __tablename__ = "job"
    __table_args__ = (sa.Index("job_new", "id", postgresql_where=sa.text("state = 'new'")),)
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]
    payload: Mapped[str]


def _claim_rows(session: Session) -> Sequence[Any]:
    return session.execute(_TEXT, {"limit": LIMIT}).all()


def _claim_by_text(session: Session) -> Sequence[Any]:
    return session.scalars(sa.select(Job).from_statement(_TEXT), {"limit": LIMIT}).all()


def _claim_by_constant(session: Session) -> Sequence[Any]:
    return session.scalars(_LOCKED).all()


def _claim_by_select(session: Session) -> Sequence[Any]:
    query = sa.select(Job).where(Job.state == "new").order_by(Job.id).limit(LIMIT)
    return session.scalars(query.with_for_update(key_share=True, skip_locked=True)).all()


def _claim_by_pgfence(session: Session) -> Sequence[Any]:
    return claim(session, Job, Job.state == "new", order_by=Job.id, limit=LIMIT)


def _claim_select_by_pgfence(session: Session) -> Sequence[Any]:
    return claim(session, _SELECT, limit=LIMIT)


_TEXT = sa.text(CLAIM)
_SELECT = sa.select(Job).where(Job.state == "new").order_by(Job.id)
_LOCKED = _SELECT.limit(LIMIT).with_for_update(key_share=True, skip_locked=True)
WAYS: dict[str, Callable[[Session], Sequence[Any]]] = {
    ROWS: _claim_rows,
    HAND: _claim_by_text,
    AGAIN: _claim_by_text,
    ONCE: _claim_by_constant,
    BUILT: _claim_by_select,
    OURS: _claim_by_pgfence,
    OURS_ONCE: _claim_select_by_pgfence,
}
SCHEMAS = {name: f"contestant_{number}" for number, name in enumerate(WAYS)}


class Cost(NamedTuple):
    """What a share of the rows costs.

    Attributes:
        wall: the seconds until all of them are processed.
        cpu: the processor time of the workers and of the server.
    """

    wall: float
    cpu: float


def run(quick: bool) -> dict[str, Any]:
    """Let each contestant process tables of jobs, share by share in alternation, and compare the time and the processor time."""
    workers, jobs, shares, rounds = (2, 400, 2, 1) if quick else (16, 100_000, 50, 2)
    costs: dict[str, list[Cost]] = {name: [] for name in WAYS}
    wrong = 0
    with server(**SETTINGS) as place:
        for _ in range(rounds):
            wrong += _process(place, workers, jobs, shares, costs)
    return _describe(costs, wrong, f"{workers} workers, {jobs:,} rows", shares, rounds)


def _process(place: Place, workers: int, jobs: int, shares: int, costs: dict[str, list[Cost]]) -> int:
    """Process a table of every contestant, add what each share costs, and return how many rows were processed twice or never."""
    _create_tables(place, jobs)
    done = dict.fromkeys(WAYS, 0)
    with _hire(place, workers) as crew:
        for number in range(shares + 1):
            # Some batches near the end of a table have fewer rows. What is left after all shares does not count.
            batches = jobs // LIMIT // shares if number < shares else jobs
            for name in random.sample(list(WAYS), len(WAYS)):
                cost, count = crew.process(name, batches)
                done[name] += count
                if number < shares:
                    costs[name].append(cost)
    return sum(abs(count - jobs) for count in done.values())


def _create_tables(place: Place, jobs: int) -> None:
    with place.connect() as connection:
        for schema in SCHEMAS.values():
            connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE; CREATE SCHEMA {schema}")
            engine = _connect(place.url().render_as_string(hide_password=False), schema)
            Base.metadata.create_all(engine)
            engine.dispose()
            fill = f"INSERT INTO {schema}.job (state, payload) SELECT 'new', repeat('x', 100) FROM generate_series(1, {jobs})"
            connection.execute(fill)
            connection.execute(f"VACUUM ANALYZE {schema}.job")
        connection.execute("CHECKPOINT")


class _Crew:
    """Workers that are connected and wait for their next share.

    Attributes:
        place: the server.
        pipes: one pipe for each worker.
        permits: the batches that are left of the share.
    """

    def __init__(self, place: Place, pipes: Sequence[Connection], permits: Semaphore) -> None:
        self.place, self.pipes, self.permits = place, pipes, permits
        self.spent = place.cpu_seconds().exact

    def process(self, name: str, batches: int) -> tuple[Cost, int]:
        """Let all workers process batches until the share or the table ends. Return what it cost, and the number of rows."""
        while self.permits.acquire(block=False):
            pass
        for _ in range(batches):
            self.permits.release()
        began = time.monotonic()
        for pipe in self.pipes:
            pipe.send(name)
        found = [pipe.recv() for pipe in self.pipes]
        wall = time.monotonic() - began
        before, self.spent = self.spent, self.place.cpu_seconds().exact
        cpu = self.spent - before + sum(spent for _, spent in found)
        return Cost(wall, cpu), sum(count for count, _ in found)


@contextmanager
def _hire(place: Place, workers: int) -> Iterator[_Crew]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.claims"])
    url = place.url().render_as_string(hide_password=False)
    permits = context.Semaphore(0)
    pipes = []
    with ExitStack() as stack:
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, permits, url), daemon=True)
            process.start()
            there.close()  # so that recv() fails if the worker dies
            stack.callback(process.join, 30)
            stack.callback(here.send, None)
            pipes.append(here)
        for pipe in pipes:
            pipe.recv()
        yield _Crew(place, pipes, permits)


def _connect(url: str, schema: str) -> sa.Engine:
    return sa.create_engine(url, connect_args={"options": f"-c search_path={schema}"})


def _work(pipe: Connection, permits: Semaphore, url: str) -> None:
    engines = {name: _connect(url, schema) for name, schema in SCHEMAS.items()}
    for engine in engines.values():
        with Session(engine) as session:
            session.scalars(sa.select(Job).limit(1)).all()  # connects, and configures the mapper
    pipe.send(None)
    while (name := pipe.recv()) is not None:
        began = time.process_time()
        count = _process_batches(engines[name], WAYS[name], permits)
        pipe.send((count, time.process_time() - began))
    for engine in engines.values():
        engine.dispose()


def _process_batches(engine: sa.Engine, way: Callable[[Session], Sequence[Any]], permits: Semaphore) -> int:
    finish, done = sa.text(FINISH), 0
    while permits.acquire(block=False):
        with Session(engine) as session, session.begin():
            jobs = way(session)
            if not jobs:
                break
            session.execute(finish, {"ids": [job.id for job in jobs]})
        done += len(jobs)
    return done


def _describe(costs: dict[str, list[Cost]], wrong: int, what: str, shares: int, rounds: int) -> dict[str, Any]:
    rows = []
    for name in WAYS:
        cpu, wall = (_compare(costs, name, HAND, kind) for kind in ("cpu", "wall"))
        rows.append(
            (
                name,
                f"{statistics.median(cpu):.2f}x",
                _show_middle(cpu),
                f"{statistics.median(wall):.2f}x",
                _show_middle(wall),
            )
        )
    return {
        "scenario": "claims",
        "title": "Claims",
        "method": (
            f"{what.replace(', ', ' process ', 1)}. They claim {LIMIT} rows at a time, in one transaction with the UPDATE that marks"
            " them as done, until no row is left. All contestants use the same UPDATE. Handwritten SQL is a text"
            " with FOR NO KEY UPDATE SKIP LOCKED, which the Session executes to load either ORM objects, as claim()"
            " does, or plain rows. A select() written once is built when the program starts; a select() written in the"
            " call is built in each call. Every contestant has a copy of the table. The"
            f" contestants take turns in random order, and process one share of the rows in each turn: there are {rounds}"
            f" rounds of {shares} shares. The limits apply to the processor time of the processes and the server together. The"
            " processes keep the cores busy, so the rows per second depend on that time, and other programs on"
            " the machine disturb the processor time less than the elapsed time."
        ),
        "bars": [
            report.bar(
                f"{what}: processor time of claim() of a class, against handwritten SQL",
                "at most 1.11x",
                statistics.median(_compare(costs, OURS, HAND, "cpu")),
                1.11,
                "x",
            ),
            report.bar(
                f"{what}: processor time of claim() of a select() written once, against the same select() without claim()",
                "at most 1.11x",
                statistics.median(_compare(costs, OURS_ONCE, ONCE, "cpu")),
                1.11,
                "x",
            ),
            report.bar(f"{what}: rows that were processed twice, or never", "0", wrong, 0, digits=0),
            report.null_test(statistics.median(_compare(costs, AGAIN, HAND, "cpu")), f"{HAND}, processor time"),
            report.null_test(statistics.median(_compare(costs, AGAIN, HAND, "wall")), f"{HAND}, time"),
        ],
        "tables": [
            report.table(
                "Cost of a share, against handwritten SQL that returns ORM objects",
                ("Contestant", "Processor time", "Middle half of the shares", "Time", "Middle half of the shares"),
                rows,
            )
        ],
        "skipped": {},
    }


def _compare(costs: dict[str, list[Cost]], name: str, base: str, kind: str) -> list[float]:
    """Return the ratios of two contestants, share by share, because the machine does not stay the same."""
    return [getattr(mine, kind) / getattr(other, kind) for mine, other in zip(costs[name], costs[base], strict=True)]


def _show_middle(found: list[float]) -> str:
    return f"{quantile(found, 0.25):.2f} to {quantile(found, 0.75):.2f}"
