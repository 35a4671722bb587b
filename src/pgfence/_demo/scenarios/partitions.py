"""Share partitions among three workers, stop one of the workers, and let it continue.

The owner of a partition numbers the events of its keys: it reads the last number and inserts the next one. Two writers of a key
at once could use a number twice or out of order.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from sqlalchemy import text

from pgfence._demo.bank import SCHEMA
from pgfence._demo.scenario import (
    Scenario,
    ScenarioResult,
    create_engine_for,
    fork_process,
    read_part,
    say,
    start_processes,
)
from pgfence._demo.workload import Verdict
from pgfence._process.clock import clock
from pgfence.partitions import Partitions

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine

    from pgfence.fence.handles import HeldLease

WORKERS = 3
PARTITIONS = 12
KEYS = 48
TTL = 1.0
_BETWEEN_WRITES = 0.05
_LOOK = 0.02
_PATIENCE = 20.0
_TITLE = f"{PARTITIONS} partitions on {WORKERS} workers, one of which is stopped"
_TABLE = f"""
    CREATE TABLE {SCHEMA}.event (
        key text, number int, part int, worker text, token bigint, at timestamptz DEFAULT clock_timestamp()
    );
    CREATE INDEX ON {SCHEMA}.event (key, number);
    CREATE INDEX ON {SCHEMA}.event (part, at);
"""
_LAST = text(f"SELECT coalesce(max(number), 0) FROM {SCHEMA}.event WHERE key = :key")
_WRITE = text(
    f"INSERT INTO {SCHEMA}.event (key, number, part, worker, token) VALUES (:key, :number, :part, :worker, :token)"
)
_OWNERS = text(f"""
    SELECT worker, count(*)
    FROM (SELECT DISTINCT ON (part) worker FROM {SCHEMA}.event ORDER BY part, at DESC) AS latest
    GROUP BY worker
""")
_NOW = text("SELECT clock_timestamp()")
# Computes the milliseconds until the last of the stopped worker's partitions was written to again.
_TAKEN = text(f"""
    SELECT count(*), coalesce(round(extract(epoch FROM max(at) - :stopped) * 1000), 0)
    FROM (
        SELECT part, min(at) AS at FROM {SCHEMA}.event AS later
        WHERE at > :stopped AND worker <> :worker AND :worker = (
            SELECT worker FROM {SCHEMA}.event AS earlier
            WHERE earlier.part = later.part AND earlier.at < :stopped ORDER BY at DESC LIMIT 1
        )
        GROUP BY part
    ) AS taken
""")
_COUNT = text(f"""
    SELECT count(*), count(*) FILTER (WHERE number <> place)
    FROM (SELECT number, row_number() OVER (PARTITION BY key ORDER BY at) AS place FROM {SCHEMA}.event) AS placed
""")


def play(engine: Engine) -> ScenarioResult:
    """Start the workers, stop one of them until the others have its partitions, and let it continue."""
    with engine.begin() as connection:
        connection.exec_driver_sql(_TABLE)
    taken = taken_ms = 0
    with start_processes() as start:
        workers: dict[str, int] = start(__name__, engine.url).wait_for("workers")
        stopped = next(iter(workers))
        balanced = dict.fromkeys(workers, PARTITIONS // WORKERS)
        done = _wait_for_owners(engine, lambda owners: owners == balanced)
        if done:
            with engine.connect() as connection:
                at = connection.execute(_NOW).scalar_one()
            os.kill(workers[stopped], signal.SIGUSR1)
            done = _wait_for_owners(engine, lambda owners: stopped not in owners)
            with engine.connect() as connection:
                taken, taken_ms = map(int, connection.execute(_TAKEN, {"stopped": at, "worker": stopped}).one())
            os.kill(workers[stopped], signal.SIGCONT)
            done = _wait_for_owners(engine, lambda owners: owners == balanced) and done
    with engine.connect() as connection:
        events, disordered = connection.execute(_COUNT).one()
    return _describe(done=done, taken=taken, taken_ms=taken_ms, events=events, disordered=disordered)


def _describe(*, done: bool, taken: int, taken_ms: int, events: int, disordered: int) -> ScenarioResult:
    moved = (
        f"Worker stopped: the others write to its {taken} partitions after {taken_ms} ms (TTL {TTL:.0f} s)."
        if done
        else "The partitions of the worker that was stopped did not move."
    )
    line = f"{PARTITIONS} partitions on {WORKERS} workers. {moved} {events} events of {KEYS} keys, {disordered or 'none'} out of order."
    return ScenarioResult(
        scene="partitions",
        title=_TITLE,
        verdict=_judge(done=done, taken=taken, disordered=disordered),
        lines=(line,),
        figures={"taken": taken, "taken_ms": taken_ms, "events": events, "disordered": disordered},
    )


def _judge(*, done: bool, taken: int, disordered: int) -> Verdict:
    return Verdict.OK if done and taken and not disordered else Verdict.GUARD_FAILED


def _wait_for_owners(engine: Engine, is_met: Callable[[dict[str, int]], bool]) -> bool:
    """Wait until the last writers of all partitions meet a condition. Return False after `_PATIENCE`."""
    deadline = clock() + _PATIENCE
    while clock() < deadline:
        with engine.connect() as connection:
            owners: dict[str, int] = {row[0]: row[1] for row in connection.execute(_OWNERS)}
        if sum(owners.values()) == PARTITIONS and is_met(owners):
            return True
        time.sleep(_LOOK)
    return False


def main() -> None:
    """Fork the workers, and report their process ids."""
    url = read_part()["url"]
    say(workers={str(number): fork_process(partial(_join, str(number), url)) for number in range(WORKERS)})
    read_part()


def _join(name: str, url: str) -> None:
    """Join as a worker. SIGUSR1 stops this process between two transactions."""
    engine = create_engine_for(url)
    orders = Partitions(engine, "orders", PARTITIONS, ttl=TTL)
    # A worker that was stopped inside a transaction would make its successor wait at the gate.
    writing = threading.Lock()

    def stop(*_: object) -> None:
        with writing:
            os.kill(os.getpid(), signal.SIGSTOP)

    def serve(part: int, lease: HeldLease) -> None:
        keys = [key for key in map(str, range(KEYS)) if orders.partition_for(key) == part]
        for key in cycle(keys):
            if lease.lost:
                return
            with writing, lease.begin(engine) as connection:
                number = connection.execute(_LAST, {"key": key}).scalar_one() + 1
                values = {"key": key, "number": number, "part": part, "worker": name, "token": lease.token}
                connection.execute(_WRITE, values)
            lease.wait_lost(_BETWEEN_WRITES)

    signal.signal(signal.SIGUSR1, stop)
    orders.join(serve, owner=name)


SCENE = Scenario(name="partitions", title=_TITLE, play=play)

if __name__ == "__main__":
    main()
