"""Run the benchmarks and say which bars are met."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
from pathlib import Path

from benchmarks import report
from benchmarks.place import RESULTS, machine

SCENARIOS = (
    "uncontended",
    "handoff",
    "waiters",
    "transactions",
    "crowd",
    "loss",
    "imports",
    "leases",
    "fences",
    "versions",
    "idempotency",
    "purge",
    "middleware",
    "lock_or_version",
    "transfers",
)


def main(arguments: list[str] | None = None) -> int:
    """Run the scenarios that were asked for. Returns 0 although a bar is missed: the table says so."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; all but the last if none is named"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few cycles of everything: shows that it runs, measures little"
    )
    parser.add_argument("--long", action="store_true", help="with 100,000 guarded transfers, which take minutes")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/benchmarks.md")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the folder for the results")
    options = parser.parse_args(arguments)
    if unknown := set(options.scenarios) - set(SCENARIOS):
        parser.error(f"no scenario {', '.join(sorted(unknown))}")
    # What is lost and waited for here is so on purpose.
    logging.getLogger("pgfence").addHandler(logging.NullHandler())
    where, results = machine(), []
    print(report.described(where), flush=True)
    for name in options.scenarios or SCENARIOS[: None if options.long or options.quick else -1]:
        start = time.monotonic()
        result = importlib.import_module(f"benchmarks.{name}").run(options.quick)
        results.append(result | {"quick": options.quick, "took": round(time.monotonic() - start, 1)})
        print(f"\n{report.markdown([result])}", flush=True)
    print(f"\nwritten: {report.write(results, where, options.output, docs=options.docs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
