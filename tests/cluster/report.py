"""Write the figures of campaigns into the page `docs/operate/cluster.md`: `python -m tests.cluster.report --docs`.

It reads the results in `tests/cluster/results`, which `python -m tests.cluster.campaign --out FILE` has written: one file for
each mode of replication, and `idle.json`, a campaign on an otherwise idle machine, for the times until recovery.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Result: TypeAlias = dict[str, Any]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operate" / "cluster.md"
RESULTS = Path(__file__).with_name("results")
MARKS = "<!-- written by tests.cluster.report -->\n\n", "\n\n<!-- end -->"
IDLE = RESULTS / "idle.json"
NONE = "The figures of this version have not been measured yet."
COUNTED = (
    "In the next table, the first number of a cell counts the cases that the row names, and the second number all cases that were"
    " checked. An error is any error except `CommitOutcomeUnknownError`."
)
KINDS = {
    "SWITCHOVER": "switchover",
    "KILL_POSTMASTER": "the server process is killed",
    "KILL_MACHINE": "all processes of the machine are killed",
    "PAUSE": "Patroni and the server are paused",
    "CUT_FROM_ETCD": "cut off from etcd only",
    "CUT_OFF": "cut off from etcd, standbys and clients",
    "STOP_PATRONI": "Patroni hangs, the server continues",
    "ETCD_NODE_LOST": "one of three etcd nodes is lost",
    "HANG_STANDBY": "a synchronous standby hangs",
}
WAYS = {
    "psycopg": "psycopg, list of hosts",
    "haproxy": "psycopg, HAProxy",
    "pgbouncer": "psycopg, PgBouncer and HAProxy",
    "asyncpg": "asyncpg, `asyncpg_hosts.py`",
}
PRIMITIVES = {
    "sql": "plain SQL",
    "key": "`idempotent()`",
    "lease": "`Lease`",
    "slot": "`Once`",
    "permit": "`Semaphore`",
    "lock": "`AdvisoryLock`",
}
HELD = {
    "lease": "leases",
    "slot": "slots",
    "term": "terms",
    "permit": "permits",
    "partition": "partitions",
    "lock": "`AdvisoryLock`",
    "token lock": "`AdvisoryLock(token=True)`",
}
TABLES = {
    "fenced": "fenced writes",
    "transaction": "transactions of `run_transaction()`",
    "key": "transactions with an idempotency key",
    "version": "changes of versioned rows",
    "claim": "changes of claimed rows",
}
PROGRAMS = {
    "pgfence": "pgfence",
    "postgresql": "PostgreSQL",
    "patroni": "Patroni",
    "etcd": "etcd",
    "haproxy": "HAProxy",
    "pgbouncer": "PgBouncer",
    "python": "Python",
    "sqlalchemy": "SQLAlchemy",
    "psycopg": "psycopg",
    "asyncpg": "asyncpg",
}


def read_results(paths: Iterable[Path]) -> list[Result]:
    """Return the results, synchronous replication first."""
    results: list[Result] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return sorted(results, key=lambda result: str(result["mode"]), reverse=True)


def render(results: Sequence[Result], idle: Result | None = None) -> str:
    """Return the text and the tables for the page."""
    if not results:
        return NONE
    parts = [_describe(results), _tabulate_failovers(results), _tabulate_recovery([idle] if idle else results)]
    if idle:
        parts.append(
            f"The times until the first success are from {_count_failovers(idle)} failovers on an otherwise idle machine with two"
            " cores. They exclude the failovers in which Patroni hangs, because the former primary then continues to serve. All"
            " other figures are from a machine that was also busy with other work."
        )
    if counts := _tabulate_counts(results):
        parts.append(COUNTED)
        parts.append(counts)
    parts.append("\n".join(f"- {line}" for line in _list_doubts(results)))
    return "\n\n".join(part for part in parts if part)


def _describe(results: Sequence[Result]) -> str:
    """Return what was measured, when, and with which versions."""
    newest = max(results, key=lambda result: str(result["date"]))
    versions = [
        f"{name} {found[0]}"
        for program, name in PROGRAMS.items()
        if (found := re.search(r"\d+(\.\w+)+", newest["versions"].get(program, "")))
    ]
    numbers = " and ".join(
        f"{_count_failovers(result)} failovers with {result['mode']} replication" for result in results
    )
    return f"These figures were measured on {newest['date']} in {numbers}, with {', '.join(versions)}."


def _count_failovers(result: Result) -> int:
    return sum(map(len, result["leaders"].values()))


def _tabulate_failovers(results: Sequence[Result]) -> str:
    """Return how long the cluster was without a leader, and what happened to long leases and advisory locks."""
    rows = []
    for kind, name in KINDS.items():
        for result in results:
            if not (number := result["strikes"].get(kind, 0)):
                continue
            leaders = result["leaders"].get(kind, [])
            kept, lost = result["kept"].get(kind, (0, 0))
            held = f"{kept} of {kept + lost}" if kept + lost else "-"
            overlaps = [each for kinds in result["overlaps"].values() for each in kinds.get(kind, [])]
            longest = f"{len(overlaps)} ({max(overlaps):.1f} s)" if overlaps else "0"
            rows.append([name, result["mode"], str(number), _summarize(leaders), held, longest])
    return _tabulate(
        [
            "Failure",
            "Replication",
            "Cases",
            "New leader after, median (longest)",
            "Long leases kept",
            "Overlaps of advisory locks (longest)",
        ],
        rows,
    )


def _tabulate_recovery(results: Sequence[Result]) -> str:
    """Return the seconds from the new leader to the first success of each primitive, for each way of connecting."""
    rows = []
    for way, name in WAYS.items():
        for result in results:
            firsts: dict[str, list[float | None]] = defaultdict(list)
            for kind, ways in result["recovery"].items():
                if kind == "STOP_PATRONI":
                    continue
                for primitive, times in ways.get(way, {}).items():
                    firsts[primitive] += times["first"]
            if firsts:
                rows.append([name, result["mode"], *(_summarize(firsts[primitive]) for primitive in PRIMITIVES)])
    return _tabulate(["From the new leader to the first success", "Replication", *PRIMITIVES.values()], rows)


def _tabulate_counts(results: Sequence[Result]) -> str:
    """Return what was counted, and how often a guarantee was broken."""

    def count(label: str, number: Callable[[Result], int], of: Callable[[Result], int]) -> None:
        if any(of(result) for result in results):
            rows.append([label, *(f"{number(result):,} of {of(result):,}" for result in results)])

    def find(rule: str) -> Callable[[Result], int]:
        return lambda result: int(result["findings"].get(rule, 0))

    def seen(*names: str) -> Callable[[Result], int]:
        return lambda result: sum(int(result["counts"].get(name, 0)) for name in names)

    rows: list[list[str]] = []
    count("tokens issued twice", find("tokens given out twice"), seen("tokens"))
    count("tokens lower than an earlier one", find("tokens below an earlier one"), seen("tokens"))
    for kind, name in HELD.items():
        clean = f"overlaps of {kind} after a clean end"
        count(
            f"overlapping holds of {name}",
            lambda result, kind=kind, clean=clean: find(f"overlaps of {kind}")(result) + find(clean)(result),  # type: ignore[misc]
            seen(f"holds: {kind}"),
        )
    count(
        "stale fenced writes that were committed on the surviving timeline",
        find("stale fenced writes"),
        seen("fenced rows"),
    )
    for table, name in TABLES.items():
        count(
            f"{name} that were acknowledged and then lost",
            find(f"acknowledged and lost: {table}"),
            seen(f"acknowledged: {table}"),
        )
    for table, name in TABLES.items():
        count(
            f"{name} that raised an error and were committed nevertheless",
            find(f"committed in spite of an error: {table}"),
            seen(f"failed: {table}"),
        )
    count("slots that two overlapping attempts finished", find("slots done twice"), seen("slots"))
    count(
        "slots that another attempt started after they were done",
        find("slots begun after they were done"),
        seen("slots"),
    )
    count(
        "keys for which two different results were returned",
        find("keys with two answers"),
        seen("answered: key", "answered: effect"),
    )
    count("versions that two transactions wrote", find("versions written twice"), seen("versions"))
    count("claimed rows that were processed twice", find("jobs done twice"), seen("jobs"))
    count("steps of effects that were called twice", seen("steps called twice"), seen("steps"))
    return _tabulate(["", *(f"{result['mode']} replication" for result in results)], rows)


def _list_doubts(results: Sequence[Result]) -> list[str]:
    """Return how often the outcome of a COMMIT was unknown."""
    lines = []
    for result in results:
        counts = result["counts"]
        doubts = sum(counts.get(f"in doubt: {table}", 0) for table in TABLES)
        committed = sum(counts.get(f"in doubt and committed: {table}", 0) for table in TABLES)
        lines.append(
            f"With {result['mode']} replication, the outcome of {doubts:,} transactions was unknown. Of these, {committed:,} had"
            " been committed."
        )
    return lines


def _summarize(seconds: Sequence[float | None]) -> str:
    """Return the median and the longest of some times. None is a time that was too long to be measured."""
    if not seconds:
        return "-"
    known = [float("inf") if each is None else each for each in seconds]
    median, longest = (
        f"{each:.1f} s" if each < float("inf") else "none" for each in (statistics.median(known), max(known))
    )
    return f"{median} ({longest})"


def _tabulate(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def render_committed() -> str:
    """Return the text for the page from the results in the repository."""
    files = sorted({*RESULTS.glob("*.json")} - {IDLE})
    return render(read_results(files), json.loads(IDLE.read_text(encoding="utf-8")) if IDLE.exists() else None)


def write_page(text: str) -> None:
    """Replace what is between the markers of the page."""
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    PAGE.write_text(before + MARKS[0] + text + rest[rest.index(MARKS[1]) :], encoding="utf-8")


def main() -> None:
    """Print the text, or write it into the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.report", description=__doc__)
    parser.add_argument("files", type=Path, nargs="*", help="results; default: those in tests/cluster/results")
    parser.add_argument("--docs", action="store_true", help="write the text into the page")
    options = parser.parse_args()
    text = render(read_results(options.files), None) if options.files else render_committed()
    if options.docs:
        write_page(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
