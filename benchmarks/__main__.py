"""Run the benchmarks and report which limits are met."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.place import RESULTS, machine

SCENARIOS = (
    "uncontended",
    "handoff",
    "fair",
    "waiters",
    "many_names",
    "transactions",
    "network",
    "crowd",
    "loss",
    "imports",
    "telemetry",
    "leases",
    "limits",
    "claims",
    "fences",
    "fence_growth",
    "versions",
    "idempotency",
    "ps",
    "purge",
    "middleware",
    "lock_or_version",
    "transfers",
)
"""The scenarios, in the order of the page."""
LONG = ("purge", "transfers")
"""Scenarios that take several minutes each."""


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen scenarios. Return 1 after an error, and 0 otherwise, even if a limit is missed, which the table shows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "scenarios",
        nargs="*",
        metavar="SCENARIO",
        help=f"one or more of {', '.join(SCENARIOS)}; default: all except {' and '.join(LONG)}",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run only a few cycles, which shows that the scenarios run but measures little",
    )
    parser.add_argument(
        "--long", action="store_true", help=f"also run {' and '.join(LONG)}, which take several minutes each"
    )
    parser.add_argument(
        "--docs",
        action="store_true",
        help="put the results into _static/benchmarks.json of the documentation, and write the page from it",
    )
    parser.add_argument("--pages", type=Path, default=report.DOCS, help="the folder of the documentation")
    parser.add_argument(
        "--from",
        nargs="*",
        type=Path,
        metavar="JSON",
        dest="files",
        help="use the results in these files instead of running scenarios",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="the folder for the results")
    options = parser.parse_args(arguments)
    if unknown := set(options.scenarios) - set(SCENARIOS):
        parser.error(f"no scenario {', '.join(sorted(unknown))}")
    if options.docs and options.quick:
        parser.error("--quick measures too little for --docs")
    files, failed = options.files, False
    if files is None:
        names = options.scenarios or [name for name in SCENARIOS if options.long or options.quick or name not in LONG]
        path, failed = _run(names, options.quick, options.output)
        files = [path]
    if options.docs:
        report.publish(files, SCENARIOS, options.pages)
        print(f"written: {options.pages / report.KEPT}, {options.pages / report.PAGE}")
    return int(failed)


def _run(names: list[str], quick: bool, folder: Path) -> tuple[Path, bool]:
    """Run scenarios one by one. One that fails is left out, and the others are kept."""
    # Locks are lost and waited for on purpose here, so such warnings are noise.
    logging.getLogger("pgfence").addHandler(logging.NullHandler())
    where, results, failed = machine(), [], False
    print(report.described(where), flush=True)
    for name in names:
        start = time.monotonic()
        try:
            result: dict[str, Any] = importlib.import_module(f"benchmarks.{name}").run(quick)
        except Exception:
            traceback.print_exc()
            failed = True
            continue
        took = round(time.monotonic() - start, 1)
        result |= {"quick": quick, "took": took, "measured": time.strftime("%Y-%m-%d", time.gmtime())}
        results.append(result)
        print(f"\n{report.markdown([result])}", flush=True)
    path = report.save(results, where, folder)
    print(f"\nwritten: {path}", flush=True)
    return path, failed


if __name__ == "__main__":
    sys.exit(main())
