"""Threads that contend for one lock never hold it at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import Engine

from pgfence import AdvisoryLock
from pgfence.testing import PgfenceHistory


def test_one_worker_at_a_time(engine: Engine, pgfence_history: PgfenceHistory) -> None:
    def work(name: str) -> None:
        for _ in range(5):
            with AdvisoryLock(engine, "report").connect() as connection:
                pgfence_history.enter(connection, name)
                connection.commit()
                pgfence_history.leave(connection, name)
                connection.commit()

    with ThreadPoolExecutor() as workers:
        list(workers.map(work, ["one", "two", "three"]))
    assert len(pgfence_history) == 3 * 5 * 2
    assert pgfence_history.check() == set()
