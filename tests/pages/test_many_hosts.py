"""The plan for many hosts: its tables are the program's output, and names are spread over databases as the page says."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
choose_label = runpy.run_path(str(ROOT / "docs" / "examples" / "shards.py"))["choose_label"]
LABELS = st.lists(st.text(max_size=8), min_size=1, max_size=6, unique=True)


def test_the_tables_of_the_page_are_those_of_the_program() -> None:
    """The page has the tables that the simulation prints; `python -m benchmarks.scale --docs` writes them."""
    command = [sys.executable, "-m", "benchmarks.scale"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    page = (ROOT / "docs" / "operate" / "many-hosts.md").read_text(encoding="utf-8")
    written = [
        part.partition("\n\n<!-- end -->")[0] for part in page.split("<!-- written by benchmarks.scale -->\n\n")[1:]
    ]
    assert written == done.stdout.rstrip("\n").split("\n\n")


@given(name=st.text(), labels=LABELS, more=st.text(max_size=8))
def test_an_additional_database_takes_names_and_moves_no_other(name: str, labels: list[str], more: str) -> None:
    """The order of the labels does not matter, and with one more label a name stays or moves to that label."""
    label = choose_label(name, labels)
    assert label in labels
    assert choose_label(name, labels[::-1]) == label
    assert choose_label(name, [*labels, more]) in {label, more}


def test_names_are_spread_evenly_and_keep_their_database() -> None:
    """Four databases get a quarter of 4,000 names each, give or take a tenth, and the choice is the same in each release."""
    chosen = [choose_label(f"account:{number}", "ABCD") for number in range(4_000)]
    assert all(900 <= chosen.count(label) <= 1_100 for label in "ABCD")
    assert "".join(chosen[:16]) == "BADDABCBABCACCBD"
