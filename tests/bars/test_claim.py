"""Claims under faults: each row goes to one worker."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from support.crews import FULL, crew, report

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import psycopg

WORKERS, ROWS = (16, 100_000) if FULL else (5, 1_000)

# The row's work is an INSERT in the transaction of the claim: it is committed once if the row is claimed by one worker at a time.
WORK = """
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from pgfence import claim

class Base(DeclarativeBase):
    pass

class Job(Base):
    __tablename__ = "claim_job"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column()

done = text("INSERT INTO claim_done (id, pid) SELECT unnest(CAST(:ids AS int[])), :pid")

def work(number):
    engine = create_engine(url, pool_size=1)
    while True:
        try:
            with Session(engine) as session, session.begin():
                limit = random.randrange(1, 21)
                jobs = claim(session, Job, Job.state == "new", order_by=Job.id, limit=limit)
                if len(jobs) > limit:
                    note("above", len(jobs), limit)
                session.execute(done, {"ids": [job.id for job in jobs], "pid": os.getpid()})
                for job in jobs:
                    job.state = "done"
            if not jobs:
                time.sleep(0.05)
        except DBAPIError:  # the server process was terminated
            note("error")
"""


@contextmanager
def jobs(admin: psycopg.Connection[Any]) -> Iterator[None]:
    """Create the rows."""
    admin.execute("CREATE TABLE claim_job (id int PRIMARY KEY, state text)")
    admin.execute("CREATE INDEX ON claim_job (id) WHERE state = 'new'")
    admin.execute("CREATE TABLE claim_done (id int, pid int)")
    admin.execute("INSERT INTO claim_job SELECT n, 'new' FROM generate_series(1, %s) AS n", [ROWS])
    admin.execute("ANALYZE claim_job")
    try:
        yield
    finally:
        admin.execute("DROP TABLE claim_job, claim_done")


@pytest.mark.timeout(600 if FULL else 60)
def test_each_row_is_claimed_once(dsn: str, admin: psycopg.Connection[Any], tmp_path: Path) -> None:
    """Workers are killed and disconnected at random: their rows return, and no row is done twice or never, nor above the limit."""

    def fault() -> None:
        if len(workers.faults) == 0 or workers.faults["SIGKILL"] <= workers.faults["backend terminated"]:
            workers.kill()
        else:
            workers.end_backend(admin)

    with jobs(admin):
        left = "SELECT FROM claim_job WHERE state = 'new' LIMIT 1"
        with crew(dsn, tmp_path, WORK, WORKERS) as workers:
            took = workers.run_until(lambda: admin.execute(left).fetchone() is None, fault, 0.3, 500)
        done = admin.execute("SELECT count(*), count(DISTINCT id), count(DISTINCT pid) FROM claim_done").fetchone()
    assert workers.count("above") == 0
    assert done is not None
    assert done[:2] == (ROWS, ROWS)
    assert done[2] > 1
    report(
        "claims",
        workers=WORKERS,
        rows=ROWS,
        twice_or_never=0,
        rows_per_second=round(ROWS / took),
        faults=dict(workers.faults),
    )
