"""Which processes the guard ends: those of the command, and no neighbours."""

from __future__ import annotations

import os

import pytest

from pgfence.cli import guard
from pgfence.cli.guard import ProcessRow

COMMAND, OTHER, JOB, TICK = 11, 12, 10, 500


@pytest.mark.parametrize(
    ("started", "is_ended"),
    [(TICK - 1, False), (TICK, True), (TICK + 1, True)],
    ids=["before the guard", "in the tick of the guard", "after the guard"],
)
def test_an_orphan_in_the_job_of_the_shell_is_ended(
    monkeypatch: pytest.MonkeyPatch, started: int, is_ended: bool
) -> None:
    """At a terminal, the guard knows an orphan of the command from another program of the job by when it started."""
    table = {
        os.getpid(): ProcessRow(1, JOB, TICK, True),
        COMMAND: ProcessRow(1, JOB, TICK + 2, True),
        OTHER: ProcessRow(1, JOB, started, True),
    }
    monkeypatch.setattr(guard, "list_processes", lambda: table)
    assert guard._Left(COMMAND).find() == ({COMMAND, OTHER} if is_ended else {COMMAND})


def test_without_start_times_an_orphan_is_not_told_from_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """ps(1) does not show them. The guard then ends only the command and its descendants."""
    table = {pid: ProcessRow(1, JOB, 0, True) for pid in (os.getpid(), COMMAND, OTHER)}
    monkeypatch.setattr(guard, "list_processes", lambda: table)
    assert guard._Left(COMMAND).find() == {COMMAND}
