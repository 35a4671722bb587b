"""Start-up: `import pgfence` on top of `import sqlalchemy`, the plugin of Alembic, and `pgfence run` until its command starts."""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import report
from benchmarks.place import server
from benchmarks.wire import counted

if TYPE_CHECKING:
    from sqlalchemy import URL

PROGRAM = """
import json, time
times = [(time.perf_counter(), time.process_time())]
import sqlalchemy
times.append((time.perf_counter(), time.process_time()))
import pgfence
times.append((time.perf_counter(), time.process_time()))
from pgfence import AdvisoryLock
times.append((time.perf_counter(), time.process_time()))
print(json.dumps(times))
"""
PLUGIN = """
import time, sqlalchemy
start = time.process_time()
import pgfence_alembic
spent = time.process_time() - start
register = pgfence_alembic._register
def timed(plugin):
    global spent
    start = time.process_time()
    register(plugin)
    spent += time.process_time() - start
pgfence_alembic._register = timed
import alembic
print(spent)
"""
BY_HAND = """
import subprocess, sys, psycopg
connection = psycopg.connect(sys.argv[1], autocommit=True)
connection.execute("SELECT pg_advisory_lock(1)")
subprocess.run(sys.argv[2:])
"""
CHILD = ("date", "+%s%N")
# Compiling every module anew would take three times as long as everything that is measured here.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Start(NamedTuple):
    """The start of a command: milliseconds until it ran, until everything had ended, and of processor time."""

    before: float
    after: float
    processor: float


def run(quick: bool) -> dict[str, Any]:
    """Measure both imports, and a command started under a lock, in new processes."""
    runs = 3 if quick else 40
    _once(PROGRAM)  # writes the bytecode
    found = [json.loads(_once(PROGRAM)) for _ in range(runs)]
    plugin = statistics.median(1e3 * float(_once(PLUGIN)) for _ in range(runs))
    added = {kind: statistics.median(1e3 * (run[2][n] - run[1][n]) for run in found) for n, kind in enumerate(KINDS)}
    lock = {kind: statistics.median(1e3 * (run[3][n] - run[2][n]) for run in found) for n, kind in enumerate(KINDS)}
    starts, trips = _measure_starts(runs)
    ours, by_hand = starts["pgfence run"], starts["the command under a lock of plain psycopg"]
    sqlalchemy = {
        kind: statistics.median(1e3 * (run[1][n] - run[0][n]) for run in found) for n, kind in enumerate(KINDS)
    }
    return {
        "scenario": "imports",
        "title": "Start-up",
        "method": (
            f"The figures are medians of {len(found)} new processes with cached files. Plain psycopg is a program"
            " that connects with psycopg, calls `pg_advisory_lock` and starts the command."
        ),
        "bars": [
            report.bar(
                f"`import pgfence` after `import sqlalchemy`, {kind}", "under 25 ms", added[kind], 25, " ms", digits=1
            )
            for kind in KINDS
        ]
        + [
            report.bar(
                "`pgfence run` until its command starts, against plain psycopg",
                "at most 2.5x",
                ours.before / by_hand.before,
                2.5,
                "x",
            ),
            report.bar(
                "processor time of `pgfence run`, against plain psycopg",
                "at most 2.5x",
                ours.processor / by_hand.processor,
                2.5,
                "x",
            ),
            report.bar("round trips of `pgfence run`", "at most 13", trips["pgfence run"], 13, digits=0),
        ]
        + [
            report.bar(
                "loading pgfence's plugin during `import alembic`, processor time",
                "under 5 ms",
                plugin,
                5,
                " ms",
                digits=1,
            )
        ],
        "tables": [
            report.table(
                "Import times",
                ("What", *KINDS),
                [
                    ("import sqlalchemy", *(f"{sqlalchemy[kind]:.0f} ms" for kind in KINDS)),
                    ("import pgfence, after sqlalchemy", *(f"{added[kind]:.0f} ms" for kind in KINDS)),
                    ("from pgfence import AdvisoryLock, after both", *(f"{lock[kind]:.0f} ms" for kind in KINDS)),
                ],
            ),
            report.table(
                "A command under a lock",
                ("What", "until it starts", "after it has started", "processor time", "round trips"),
                [
                    (name, *(f"{each:.0f} ms" for each in found), str(trips[name]) if name in trips else "")
                    for name, found in starts.items()
                ],
            ),
        ],
        "skipped": {},
    }


KINDS = ("time", "processor time")


def _build_commands(url: URL) -> dict[str, list[str]]:
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    pgfence = Path(sys.executable).with_name("pgfence")
    return {
        "the command alone": [*CHILD],
        "the command under a lock of plain psycopg": [sys.executable, "-c", BY_HAND, plain, *CHILD],
        "pgfence run": [str(pgfence), "run", "benchmark", "--dsn", plain, "--", *CHILD],
    }


def _measure_starts(runs: int) -> tuple[dict[str, Start], dict[str, int]]:
    with server() as place:
        commands = _build_commands(place.url())
        took: dict[str, list[Start]] = {name: [] for name in commands}
        for _ in range(runs):
            for name in random.sample(list(commands), len(commands)):
                took[name].append(_start(commands[name]))
        trips = {}
        for name in list(commands)[1:]:
            with counted(place.url()) as (url, counter):
                _start(_build_commands(url)[name])
                trips[name] = counter.trips
    medians = {name: Start(*map(statistics.median, zip(*each, strict=True))) for name, each in took.items()}
    return medians, trips


def _start(command: list[str]) -> Start:
    used, start = _read_processor_time(), time.time_ns()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    end, started = time.time_ns(), int(done.stdout)
    return Start((started - start) / 1e6, (end - started) / 1e6, 1e3 * (_read_processor_time() - used))


def _read_processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _once(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout
