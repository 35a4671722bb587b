"""Run a job of a millisecond once per slot, in twenty processes whose clocks are minutes apart."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from sqlalchemy import text

from pgfence._api.handles import current
from pgfence._demo.bank import SCHEMA
from pgfence._demo.scenario import Scenario, ScenarioResult, create_engine_for, read_part, say, start_processes
from pgfence._demo.workload import Verdict
from pgfence.once import Once, Slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine

PROCESSES = 20
SLOTS = 50
EVERY = timedelta(milliseconds=150)
SKEW = 600.0
_JOB = 0.001
_LOOK = 0.1
_TITLE = f"one job on {PROCESSES} hosts, clocks up to {SKEW / 60:.0f} minutes wrong"
_TABLE = f"CREATE TABLE {SCHEMA}.runs (slot timestamptz, process int)"
_BOOK = text(f"INSERT INTO {SCHEMA}.runs VALUES (:slot, :process)")
_COUNT = text(f"SELECT count(DISTINCT slot), count(*), count(DISTINCT process) FROM {SCHEMA}.runs")


def play(engine: Engine) -> ScenarioResult:
    """Run the processes until enough slots are done."""
    with engine.begin() as connection:
        connection.exec_driver_sql(_TABLE)
    with start_processes() as start:
        start(__name__, engine.url).wait_for("done")
    with engine.connect() as connection:
        slots, runs, processes = connection.execute(_COUNT).one()
    verdict = _judge(slots, runs)
    each = ", each slot once" if verdict is Verdict.OK else ""
    return ScenarioResult(
        scene="slots",
        title=_TITLE,
        verdict=verdict,
        lines=(
            f"Job on {PROCESSES} hosts, clocks up to {SKEW / 60:.0f} minutes wrong: {slots} slots, {runs} runs on {processes} hosts{each}.",
        ),
        figures={"slots": slots, "runs": runs, "processes": processes},
    )


def _judge(slots: int, runs: int) -> Verdict:
    return Verdict.OK if slots >= SLOTS and runs == slots else Verdict.GUARD_FAILED


def main() -> None:
    """Fork the processes, and report when all of them have ended."""
    url = read_part()["url"]
    children = [pid for number in range(PROCESSES) if (pid := _fork(number, url))]
    for child in children:
        os.waitpid(child, 0)
    say(done=True)


def _fork(number: int, url: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _run_job(number, url)
    finally:
        os._exit(0)


def _run_job(number: int, url: str) -> None:
    skew = random.Random(number).uniform(-SKEW, SKEW)
    true_time: Callable[[], float] = time.time
    time.time = lambda: true_time() + skew
    engine = create_engine_for(url)

    def run_job() -> None:
        time.sleep(_JOB)
        with engine.begin() as connection:
            connection.execute(_BOOK, {"slot": current(Slot).slot, "process": number})

    guarded = Once(engine, "job", every=EVERY, ttl=5).wrap()(run_job)
    while True:
        guarded()
        with engine.connect() as connection:
            if connection.execute(_COUNT).one()[0] >= SLOTS:
                return
        time.sleep(_LOOK)


SCENE = Scenario(name="slots", title=_TITLE, play=play)

if __name__ == "__main__":
    main()
