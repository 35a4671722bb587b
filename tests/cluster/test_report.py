"""The figures on the page are those of the committed results; without a cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cluster import report

if TYPE_CHECKING:
    from pathlib import Path

RESULT: dict[str, Any] = {
    "date": "2026-11-29",
    "mode": "synchronous",
    "versions": {"haproxy": "HA-Proxy version 2.6.12-1 2023/12/16", "postgresql": "postgres (PostgreSQL) 18.6"},
    "strikes": {"SWITCHOVER": 2, "PAUSE": 1, "HANG_STANDBY": 1},
    "leaders": {"SWITCHOVER": [2.0, 3.0], "PAUSE": [21.5]},
    "counts": {
        "tokens": 1200,
        "holds: lease": 7,
        "holds: lock": 9,
        "acknowledged: fenced": 500,
        "failed: key": 3,
        "in doubt: key": 4,
        "in doubt and committed: key": 1,
    },
    "findings": {"tokens given out twice": 1, "overlaps of lock": 2, "overlaps of lock after a clean end": 1},
    "overlaps": {"lock": {"PAUSE": [4.26, 6.0]}},
    "kept": {"SWITCHOVER": [4, 0], "PAUSE": [1, 1]},
    "recovery": {
        "SWITCHOVER": {"psycopg": {"lease": {"first": [0.2, 0.4], "settled": [0.2, 0.4]}}},
        "PAUSE": {"psycopg": {"lease": {"first": [None], "settled": [None]}}},
        "STOP_PATRONI": {"psycopg": {"lease": {"first": [7.0], "settled": [7.0]}}},
    },
}


def test_the_page_has_the_figures_of_the_results() -> None:
    """`python -m tests.cluster.report --docs` writes them after a campaign."""
    content = report.PAGE.read_text(encoding="utf-8")
    text = report.render_committed()
    assert content.count(report.MARKS[0]) == 1
    assert report.MARKS[0] + text + report.MARKS[1] in content


def test_a_report_has_medians_and_the_longest_times_and_counts_of_all(tmp_path: Path) -> None:
    """Each violation is beside the number that was looked at; a time that was never measured is not a number."""
    other = {**RESULT, "mode": "asynchronous", "leaders": {"SWITCHOVER": [9.0, 8.0]}}
    for mode, result in (("asynchronous", other), ("synchronous", RESULT)):
        (tmp_path / f"{mode}.json").write_text(json.dumps(result))
    text = report.render(report.read_results(sorted(tmp_path.glob("*.json"))))
    assert "3 failovers with synchronous replication and 2 failovers with asynchronous replication" in text
    assert "PostgreSQL 18.6, HAProxy 2.6.12" in text
    lines = text.splitlines()
    for line in (
        "| switchover | synchronous | 2 | 2.5 s (3.0 s) | 4 of 4 | 0 |",
        "| Patroni and the server are paused | synchronous | 1 | 21.5 s (21.5 s) | 1 of 2 | 2 (6.0 s) |",
        "| a synchronous standby hangs | synchronous | 1 | - | - | 0 |",
        "| psycopg, list of hosts | synchronous | - | - | 0.4 s (none) | - | - | - |",
        "| tokens issued twice | 1 of 1,200 | 1 of 1,200 |",
        "| overlapping holds of leases | 0 of 7 | 0 of 7 |",
        "| overlapping holds of `AdvisoryLock` | 3 of 9 | 3 of 9 |",
        "| fenced writes that were acknowledged and then lost | 0 of 500 | 0 of 500 |",
        "- With synchronous replication, the outcome of 4 transactions was unknown. Of these, 1 had been committed.",
    ):
        assert line in lines, line


def test_times_until_recovery_are_those_of_an_idle_machine() -> None:
    """If such a campaign was run, the page says so."""
    idle = {**RESULT, "recovery": {"SWITCHOVER": {"psycopg": {"lease": {"first": [0.1], "settled": [0.1]}}}}}
    text = report.render([RESULT], idle)
    assert "| psycopg, list of hosts | synchronous | - | - | 0.1 s (0.1 s) | - | - | - |" in text
    assert "from 3 failovers on an otherwise idle machine" in text
