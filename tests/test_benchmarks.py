"""The benchmarks run, each with as little as it takes. No time is judged here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

ROOT = Path(__file__).parent.parent
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
        # Without pgbench a scenario says that it was skipped.
        assert (result["bars"] or result["skipped"]) and all(
            bar["met"] in {True, False} and bar["what"] and bar["figure"] for bar in result["bars"]
        )
        assert all(len(row) == len(table["columns"]) for table in result["tables"] for row in table["rows"])
    assert found["machine"]["postgresql"] in written.with_suffix(".md").read_text()


def test_the_proxy_counts_what_a_client_waits_for(dsn: str) -> None:
    """Three statements are three round trips, and one in a pipeline; a delay makes each longer."""
    url = make_url(dsn)
    command = [sys.executable, "-m", "benchmarks.wire", str(url.host), str(url.port), "0.02"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdin is not None
        assert proxy.stdout is not None
        through = url.set(drivername="postgresql", host="127.0.0.1", port=int(proxy.stdout.readline()))

        def count() -> int:
            print(file=proxy.stdin, flush=True)
            return int(proxy.stdout.readline())

        with psycopg.connect(through.render_as_string(hide_password=False), autocommit=True) as connection:
            before, start = count(), time.monotonic()
            for number in range(3):
                connection.execute("SELECT %s", (number,))
            assert count() - before == 3
            assert time.monotonic() - start >= 3 * 0.02
            before = count()
            with connection.pipeline():
                answers = [connection.execute("SELECT %s", (number,)) for number in range(3)]
            assert [answer.fetchone() for answer in answers] == [(0,), (1,), (2,)]
            assert count() - before == 1
        proxy.stdin.close()
        assert proxy.wait(10) == 0


def test_every_scenario_is_tested() -> None:
    """The list above is that of the command line."""
    usage = [sys.executable, "-m", "benchmarks", "--help"]
    shown = subprocess.run(usage, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"of {', '.join(SCENARIOS)}" in " ".join(shown.split())


def test_a_quick_run_is_kept_out_of_the_page(tmp_path: Path) -> None:
    """Its figures say nothing: neither a quick run with --docs nor the results of one are written there."""
    copy = shutil.copy(ROOT / "docs" / "benchmarks.md", tmp_path)
    before = Path(copy).read_bytes()
    file = _write_results(tmp_path, "imports", "20 ms", quick=True)
    for words in (["--quick", "--docs", "imports"], ["--docs", "--from", file]):
        command = [
            sys.executable,
            "-m",
            "benchmarks",
            *map(str, words),
            "--pages",
            str(tmp_path),
            "--output",
            str(tmp_path),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0
        assert "too little" in done.stderr
    assert Path(copy).read_bytes() == before
    assert not (tmp_path / "_static").exists()


def test_the_page_is_written_from_results_that_are_kept(tmp_path: Path) -> None:
    """A scenario that was measured again takes its own place, the others stay, and the pictures are drawn."""
    shutil.copy(ROOT / "docs" / "benchmarks.md", tmp_path)
    for name, figure in (("imports", "20 ms"), ("fair", "1.30x"), ("imports", "19 ms")):
        file = _write_results(tmp_path, name, figure, quick=False)
        command = [sys.executable, "-m", "benchmarks", "--docs", "--pages", str(tmp_path), "--from", str(file)]
        subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
    page = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert "2 of 2 limits are met" in page
    assert page.index("| 1.30x | yes |") < page.index("| 19 ms | yes |") < page.index("<!-- end -->")
    assert "20 ms" not in page
    assert "![curves](_static/picture-of-fair.svg)" in page
    for name in ("imports", "fair"):
        assert "<circle" in (tmp_path / "_static" / f"picture-of-{name}.svg").read_text(encoding="utf-8")
    kept = json.loads((tmp_path / "_static" / "benchmarks.json").read_text(encoding="utf-8"))
    assert [result["scenario"] for result in kept["results"]] == ["fair", "imports"]


def _write_results(folder: Path, name: str, figure: str, *, quick: bool) -> Path:
    machine = {
        "cores": 1,
        "machine": "m",
        "system": "s",
        "postgresql": "18",
        "python": "3",
        "packages": {"psycopg": "3"},
    }
    panels = {"seconds": {"hold()": [1.0, 2.5]}}
    described = {
        "name": f"picture-of-{name}",
        "title": "curves",
        "kind": "curves",
        "across": "names",
        "places": [1, 1000],
        "panels": panels,
    }
    result = {
        "scenario": name,
        "quick": quick,
        "took": 1.0,
        "measured": "2026-11-29",
        "title": name,
        "method": "By a test.",
        "bars": [{"what": name, "bar": "fast", "figure": figure, "value": 1, "met": True}],
        "tables": [],
        "skipped": {},
        "pictures": [described],
    }
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"machine": machine, "results": [result]}))
    return file


def test_the_page_of_the_docs_has_a_place_for_the_tables() -> None:
    """The benchmark writes between two marks of the page."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert page.index("<!-- written by the benchmark -->") < page.index("<!-- end -->")
