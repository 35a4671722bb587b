"""What `import pgfence` adds to `import sqlalchemy`."""

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


def run(quick: bool) -> dict[str, Any]:
    """Import both in new processes."""
    found = [_once() for _ in range(3 if quick else 40)]
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
                f"`import pgfence` after `import sqlalchemy`, {kind}", "under 30 ms", added[kind], 30, " ms", digits=1
            )
            for kind in KINDS
        ],
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


def _once() -> list[list[float]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    times: list[list[float]] = json.loads(done.stdout)
    return times
