"""What `import pgfence` adds to `import sqlalchemy`, and the installed plugin to `import alembic`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks import report

PROGRAM = """
import json, time
times = [(time.perf_counter(), time.process_time())]
import sqlalchemy
times.append((time.perf_counter(), time.process_time()))
import pgfence
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


def run(quick: bool) -> dict[str, Any]:
    """Import both in new processes."""
    runs = 3 if quick else 40
    found = [json.loads(_once(PROGRAM)) for _ in range(runs)]
    plugin = statistics.median(1e3 * float(_once(PLUGIN)) for _ in range(runs))
    added = {kind: statistics.median(1e3 * (run[2][n] - run[1][n]) for run in found) for n, kind in enumerate(KINDS)}
    sqlalchemy = {
        kind: statistics.median(1e3 * (run[1][n] - run[0][n]) for run in found) for n, kind in enumerate(KINDS)
    }
    return {
        "scenario": "imports",
        "title": "Import",
        "method": f"The medians of {len(found)} new processes with warm files.",
        "bars": [
            report.bar(
                f"`import pgfence` after `import sqlalchemy`, {kind}", "under 25 ms", added[kind], 25, " ms", digits=1
            )
            for kind in KINDS
        ]
        + [report.bar("the plugin in `import alembic`, processor time", "under 5 ms", plugin, 5, " ms", digits=1)],
        "tables": [
            report.table(
                "Import times",
                ("What", *KINDS),
                [
                    ("import sqlalchemy", *(f"{sqlalchemy[kind]:.0f} ms" for kind in KINDS)),
                    ("import pgfence after it", *(f"{added[kind]:.0f} ms" for kind in KINDS)),
                ],
            )
        ],
        "skipped": {},
    }


KINDS = ("time", "processor time")


def _once(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
