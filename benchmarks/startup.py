"""What a cron job waits for: from the start of `pgfence run` to the start of its command, and until it is over."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import picture, report, wire
from benchmarks.place import plain, server

if TYPE_CHECKING:
    from collections.abc import Sequence

    import sqlalchemy as sa

    from benchmarks.place import Place

HAND, OURS = "psycopg and pg_advisory_lock by hand", "pgfence run"
CHILD = ("date", "+%s%N")
BY_HAND = """
import subprocess, sys, psycopg
with psycopg.connect(sys.argv[1], autocommit=True) as connection:
    connection.execute("SELECT pg_advisory_lock(1)")
    subprocess.run(sys.argv[2:])
"""


def run(quick: bool) -> dict[str, Any]:
    """Start each in a new process, in random order, and ask the child when it was started."""
    times = 2 if quick else 25
    with server() as place:
        programs = _list_programs(place.url())
        began: dict[str, list[float]] = {name: [] for name in programs}
        ended: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(times):
            for name in random.sample(list(programs), len(programs)):
                first, last = _start(programs[name])
                began[name].append(first)
                ended[name].append(last)
        trips = _count_trips(place)
    to_child = {name: statistics.median(found) for name, found in began.items()}
    ratio = to_child[OURS] / to_child[HAND]
    return {
        "scenario": "startup",
        "title": "Start of the command line tool",
        "method": (
            f"The medians of {times} new processes with warm files. The child is `date`, which says when it was started. By hand"
            " is a Python program that imports psycopg, takes a lock and starts the child. Round trips are those of the whole"
            " program, the connection included."
        ),
        "bars": [report.bar("`pgfence run` to its child, against psycopg by hand", "at most 2x", ratio, 2.0, "x")],
        "tables": [
            report.table(
                "From the start of the process",
                ("What", "to the child", "until it is over", "round trips"),
                [
                    (
                        name,
                        f"{to_child[name]:.0f} ms",
                        f"{statistics.median(ended[name]):.0f} ms",
                        trips.get(name, ""),
                    )
                    for name in programs
                ],
            )
        ],
        "skipped": {},
        "pictures": [picture.bars("benchmark-startup", "From the start to the child", to_child, " ms")],
    }


def _list_programs(url: sa.URL) -> dict[str, Sequence[str]]:
    tool = str(Path(sys.executable).with_name("pgfence"))
    return {
        "the command alone": CHILD,
        "python and subprocess": (
            sys.executable,
            "-c",
            "import subprocess, sys; subprocess.run(sys.argv[1:])",
            *CHILD,
        ),
        HAND: (sys.executable, "-c", BY_HAND, plain(url), *CHILD),
        OURS: (tool, "run", "startup", "--dsn", url.render_as_string(hide_password=False), "--", *CHILD),
    }


def _start(program: Sequence[str]) -> tuple[float, float]:
    """Return the milliseconds until the child was started, and until the program was over."""
    start = time.time_ns()
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    end = time.time_ns()
    return (int(done.stdout) - start) / 1e6, (end - start) / 1e6


def _count_trips(place: Place) -> dict[str, int]:
    found = {}
    with wire.counted(place.url()) as (url, counter):
        programs = _list_programs(url)
        for name in (HAND, OURS):
            before = counter.trips
            _start(programs[name])
            found[name] = counter.trips - before
    return found
