"""What people see: a table that fits a terminal, live on one and as lines elsewhere, and what the figures mean in words."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pgfence._demo.runner import Outcome
from pgfence._demo.workload import Fault, Figures, TakeOver, Verdict
from pgfence._demo.workloads import ACTS
from pgfence.cli import screen

CONTROL, LOCKED, _, FAULTY = (
    Figures(act=act.name, title=act.title, seconds=4.0, transfers=12_345, waits=[0.0004, 0.0123, 2.5]) for act in ACTS
)
CONTROL = replace(CONTROL, cents_lost=1_234_567, accounts_off=99, waits=())
FAULTY = replace(
    FAULTY, takeovers=(TakeOver(Fault.KILL, "x", 0.012), TakeOver(Fault.TERMINATE, "x", 0.0031)), retries={"Error": 1}
)


def outcome(*acts: tuple[Figures, Verdict]) -> Outcome:
    return Outcome(server="PostgreSQL 18.6", loaded_by="SQL", processes=8, acts=acts)


def test_the_table_fits_80_columns_and_says_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each act; no wait, no time to take over: a dash."""
    screen.show(outcome((CONTROL, Verdict.OK), (LOCKED, Verdict.OK), (FAULTY, Verdict.OK)))
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line[:22].strip(): line[22:].split() for line in lines[3:6]}
    assert rows[CONTROL.title] == ["12,345", "3,086", "1,234,567", "-", "-", "-", "-"]
    assert rows[LOCKED.title] == ["12,345", "3,086", "0", "12", "ms", "2.50", "s", "2.50", "s", "-"]
    assert rows[FAULTY.title][-2:] == ["12", "ms"]
    assert f"{CONTROL.title}: 1,234,567 cents lost in 99 accounts." in lines
    assert "Lock taken over 12 ms after SIGKILL, 3.1 ms after pg_terminate_backend." in lines
    assert "Retries of processes that lost their connection: 1 after Error." in lines
    assert lines[-1] == "No guarded act lost a cent."


@pytest.mark.parametrize(
    ("figures", "verdict", "said"),
    [
        (replace(CONTROL, cents_lost=0), Verdict.CONTROL_FAILED, "lost nothing, so the other acts prove nothing"),
        (replace(LOCKED, cents_lost=1, accounts_off=1), Verdict.GUARD_FAILED, "THE GUARD FAILED"),
        (replace(LOCKED, cents_lost=1, accounts_off=1), Verdict.GUARD_FAILED, "1 cent lost in 1 account."),
        (
            replace(FAULTY, takeovers=(TakeOver(Fault.KILL, "", None),)),
            Verdict.GUARD_FAILED,
            "SIGKILL: no process took over the lock.",
        ),
    ],
)
def test_a_failed_scenario_is_reported_without_praise(
    figures: Figures, verdict: Verdict, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One act that failed is enough."""
    screen.show(outcome((CONTROL, Verdict.OK), (figures, verdict)))
    shown = capsys.readouterr().out
    assert said in shown
    assert "No guarded act lost a cent" not in shown


def test_a_failed_guard_is_worse_than_a_failed_control() -> None:
    """One exit code for all acts."""
    failed = (LOCKED, Verdict.GUARD_FAILED)
    assert outcome((CONTROL, Verdict.CONTROL_FAILED), failed).verdict is Verdict.GUARD_FAILED
    assert outcome((CONTROL, Verdict.CONTROL_FAILED), (LOCKED, Verdict.OK)).verdict is Verdict.CONTROL_FAILED
    assert outcome((CONTROL, Verdict.OK), (LOCKED, Verdict.OK)).verdict is Verdict.OK


def watch() -> None:
    with screen.Screen() as reporter:
        reporter.step("loading")
        for seconds in (0.1, 0.2):
            reporter.progress(ACTS[0], seconds, 10)
        reporter.result(CONTROL, Verdict.OK)


def test_elsewhere_than_on_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A log has each thing once, on stderr; stdout is for the table."""
    watch()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "loading",
        f"{CONTROL.title}: 12,345 transfers, 1,234,567 cents lost in 99 accounts",
    ]


def test_on_a_terminal_the_table_lives(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is drawn again and again, and is gone at the end: the cursor is back."""
    terminal: Any = partial(screen.Console, force_terminal=True, width=80)
    monkeypatch.setattr(screen, "Console", terminal)
    monkeypatch.setenv("TERM", "xterm")
    watch()
    said = capsys.readouterr().err
    assert said.count(CONTROL.title) >= 1 and "\x1b[2K" in said
    assert said.rstrip("\r\n").endswith(("\x1b[2K", "\x1b[?25h"))
