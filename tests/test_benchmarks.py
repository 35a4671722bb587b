"""The benchmarks run, each with as little as it takes. No time is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
RUNS = 4  # each begins with a look at the machine, which takes a server


@pytest.mark.timeout(240)
@pytest.mark.parametrize("scenarios", [SCENARIOS[start::RUNS] for start in range(RUNS)], ids=" ".join)
def test_scenarios_run_and_write_their_figures(scenarios: tuple[str, ...], tmp_path: Path) -> None:
    """Every scenario gives bars with a verdict and tables whose rows fit, as JSON and as Markdown."""
    command = [sys.executable, "-m", "benchmarks", "--quick", *scenarios, "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (written,) = tmp_path.glob("*.json")
    found = json.loads(written.read_text())
    assert tuple(result["scenario"] for result in found["results"]) == scenarios
    for result in found["results"]:
        assert result["bars"] and all(
            bar["met"] in {True, False} and bar["what"] and bar["figure"] for bar in result["bars"]
        )
        assert all(len(row) == len(table["columns"]) for table in result["tables"] for row in table["rows"])
    assert found["machine"]["postgresql"] in written.with_suffix(".md").read_text()


def test_every_scenario_is_tested() -> None:
    """The list above is that of the command line."""
    usage = [sys.executable, "-m", "benchmarks", "--help"]
    shown = subprocess.run(usage, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"of {', '.join(SCENARIOS)}" in " ".join(shown.split())


def test_the_page_of_the_docs_has_a_place_for_the_tables() -> None:
    """The benchmark writes between two marks of the page."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert page.index("<!-- written by the benchmark -->") < page.index("<!-- end -->")
