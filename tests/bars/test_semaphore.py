"""Semaphores under faults: never more permits in use than there are, and none is lost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

from pgfence import Semaphore
from support.crews import FULL, Crew, crew, find_most_at_once, report
from support.waiting import blocking

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

TTL = 1.5 if FULL else 0.8

# Permits, processes, takes, seconds between two faults: with one permit, most faults stop everyone for a TTL.
ROWS = (
    [(1, 4, 20_000, 2.0), (5, 10, 20_000, 0.7), (50, 20, 20_000, 0.5)]
    if FULL
    else [(1, 4, 50, 0.5), (5, 5, 80, 0.3), (50, 10, 100, 0.3)]
)

# A permit counts as in use from its grant to the last moment at which its token was checked successfully.
WORK = """
from pgfence import Semaphore

name, permits, threads, ttl = arguments[0], int(arguments[1]), int(arguments[2]), float(arguments[3])
write = text(
    "INSERT INTO permit_ledger (name, token, lease_id) SELECT name, token, lease_id FROM pgfence_lease"
    " WHERE lease_id = CAST(:lease_id AS uuid)"
)

def work(number):
    engine = create_engine(url, pool_size=threads)
    semaphore = Semaphore(engine, name, permits=permits, ttl=ttl)

    def turn():
        permit = semaphore.acquire(timeout=60)
        note("take", permit.lease_id, time.monotonic())
        with contextlib.suppress(LockLostError), permit:
            for _ in range(3):
                time.sleep(random.uniform(0, 0.002 + 0.012 * (permits - 1)))  # so that all permits are in use most of the time
                moment = time.monotonic()
                permit.check()
                note("use", permit.lease_id, moment)
            if random.random() < 0.1:
                with permit.begin(engine) as connection:
                    connection.execute(write, {"lease_id": permit.lease_id})

    run_threads(threads, turn)
"""


@pytest.mark.usefixtures("tables")
@pytest.mark.timeout(900 if FULL else 120)
@pytest.mark.parametrize(("permits", "processes", "takes", "every"), ROWS)
def test_at_most_so_many_permits_in_use(
    name: str,
    dsn: str,
    admin: psycopg.Connection[Any],
    tmp_path: Path,
    permits: int,
    processes: int,
    takes: int,
    every: float,
) -> None:
    """4 workers for each permit, killed, stopped and disconnected at random: by token never too many hold, and all permits return."""
    admin.execute("CREATE TABLE IF NOT EXISTS permit_ledger (id bigserial, name text, token bigint, lease_id uuid)")
    threads = 4 * permits // processes
    with crew(dsn, tmp_path, WORK, processes, name, permits, threads, TTL) as workers:
        took = workers.run_until(
            lambda: workers.count("take") >= takes,
            lambda: workers.inject(admin, 2 * TTL),
            every,
            600,
        )
        workers.resume(everyone=True)
    uses = read_uses(workers)
    most = find_most_at_once(list(uses.values()))
    assert most <= permits
    stale = "SELECT name, token, newest FROM (SELECT name, token, max(token) OVER (PARTITION BY name ORDER BY id) AS newest FROM"
    assert admin.execute(f"{stale} permit_ledger) AS written WHERE token < newest".encode()).fetchall() == []
    twice = "SELECT name, token FROM permit_ledger GROUP BY name, token HAVING count(DISTINCT lease_id) > 1"
    assert admin.execute(twice.encode()).fetchall() == []
    check_none_lost(name, dsn, permits)
    report(
        f"semaphore of {permits}",
        takes=len(uses),
        most_in_use=most,
        takes_per_second=round(takes / took),
        faults=dict(workers.faults),
        errors=workers.count("error"),
    )


def read_uses(workers: Crew) -> dict[str, tuple[float, float]]:
    """Return for each grant its beginning and the last moment at which it was in use."""
    uses = {lease: (float(moment), float(moment)) for lease, moment in workers.read("take")}
    for lease, moment in workers.read("use"):
        start, end = uses[lease]
        uses[lease] = start, max(end, float(moment))
    return uses


def check_none_lost(name: str, dsn: str, permits: int) -> None:
    """All permits can be acquired once the TTL of those that died is over, and not one more."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    semaphore = Semaphore(engine, name, permits=permits, ttl=60)
    held = [blocking(semaphore.try_acquire, math.ceil(5 * TTL)) for _ in range(permits)]
    assert semaphore.try_acquire() is None
    for permit in held:
        permit.release()
    engine.dispose()
