"""The output of `pgfence demo`.

Progress is shown on stderr, live on a terminal and otherwise as lines. The table is printed to stdout.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pgfence._demo.workload import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pgfence._demo.runner import Outcome
    from pgfence._demo.scenario import ScenarioResult
    from pgfence._demo.workload import Figures, Workload

# The table fits into 80 columns if the titles of the acts have at most 22 letters.
_COLUMNS = ("trans-\nfers", "per\nsecond", "cents\nlost", "wait\np50", "wait\np99", "longest\nwait", "take-\nover")
_WIDTH_OF_A_FILE = 120
_NONE = "-"


class Screen:
    """A context manager that shows the progress of a demo on stderr."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False, markup=False)
        self._rows: list[tuple[str, ...]] = []
        animated = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, transient=True) if animated else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, what: str) -> None:
        """Print a line about a step."""
        self._console.print(what)

    def progress(self, act: Workload, seconds: float, transfers: int) -> None:
        """Show the progress of an act; called several times a second."""
        if self._live is not None:
            now = (act.title, f"{transfers:,}", f"{transfers / seconds:,.0f}")
            self._live.update(_build_table([*self._rows, now]))

    def result(self, figures: Figures, verdict: Verdict) -> None:
        """Show the result of an act."""
        self._rows.append(_build_row(figures))
        if self._live is not None:
            self._live.update(_build_table(self._rows))
        else:
            self.step(f"{figures.title}: {figures.transfers:,} transfers, {_format_lost(figures)}")


def show(outcome: Outcome) -> None:
    """Print the table and the results of acts and scenes to stdout."""
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE)
    console.print(_build_table(_build_row(figures) for figures, _ in outcome.acts))
    for figures, verdict in outcome.acts:
        for line in _describe_verdict(figures, verdict):
            console.print(line, style="" if verdict is Verdict.OK else "bold red")
    for shown in outcome.scenes:
        for line in _describe_seen(shown):
            console.print(line, style="" if shown.verdict is Verdict.OK else "bold red")
    if outcome.verdict is Verdict.OK:
        console.print("No guarded act lost a cent.", style="bold green")


def _build_table(rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("\nact", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True, min_width=7)
    for row in rows:
        table.add_row(*row)
    return table


def _build_row(figures: Figures) -> tuple[str, ...]:
    waits = (_format_duration(figures.wait(percent)) for percent in (50, 99, 100))
    takeovers = [each.seconds for each in figures.takeovers]
    longest = max((seconds for seconds in takeovers if seconds is not None), default=None)
    return (
        figures.title,
        f"{figures.transfers:,}",
        f"{figures.per_second:,.0f}",
        f"{figures.cents_lost:,}",
        *waits,
        _format_duration(None if None in takeovers else longest),
    )


def _format_lost(figures: Figures) -> str:
    if not figures.accounts_off:
        return "nothing lost"
    cents = "cent" if figures.cents_lost == 1 else "cents"
    accounts = "account" if figures.accounts_off == 1 else "accounts"
    return f"{figures.cents_lost:,} {cents} lost in {figures.accounts_off} {accounts}"


def _format_duration(seconds: float | None) -> str:
    if seconds is None:
        return _NONE
    if seconds < 1:
        return f"{seconds * 1000:.{1 if seconds < 0.01 else 0}f} ms"
    return f"{seconds:.2f} s"


def _describe_seen(shown: ScenarioResult) -> list[str]:
    """Return the result of a scene as text."""
    if shown.verdict is Verdict.CONTROL_FAILED:
        return [f"{shown.title}: nothing went wrong without a guard, so this scene proves nothing."]
    return [*shown.lines, *([f"{shown.title}: THE GUARD FAILED."] if shown.verdict is Verdict.GUARD_FAILED else [])]


def _describe_verdict(figures: Figures, verdict: Verdict) -> list[str]:
    """Return the meaning of an act's figures as text."""
    if verdict is Verdict.CONTROL_FAILED:
        return [f"{figures.title}: lost nothing, so the other acts prove nothing."]
    lines = [f"{figures.title}: {_format_lost(figures)}."] if figures.cents_lost else []
    after = [
        f"{_format_duration(each.seconds)} after {each.fault}" for each in figures.takeovers if each.seconds is not None
    ]
    if after:
        lines.append(f"Lock taken over {', '.join(after)}.")
    lines += [f"{each.fault}: no process took over the lock." for each in figures.takeovers if each.seconds is None]
    if figures.retries:
        retries = ", ".join(f"{number} after {name}" for name, number in figures.retries.items())
        lines.append(f"Retries of processes that lost their connection: {retries}.")
    if verdict is Verdict.GUARD_FAILED:
        lines.append(f"{figures.title}: THE GUARD FAILED.")
    return lines
