"""The programs of the cluster: what is missing is listed at once; without a cluster."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from cluster import programs

if TYPE_CHECKING:
    from pathlib import Path


def test_all_missing_programs_are_in_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message lists each missing program and how to install it."""
    monkeypatch.setattr(programs, "_find", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.delenv(programs.PATRONI, raising=False)
    monkeypatch.setenv("PGFENCE_PG_BINDIR", str(tmp_path))
    with pytest.raises(programs.ProgramsMissingError) as caught:
        programs.find_programs()
    lines = str(caught.value).splitlines()[1:]
    advice = ("etcd-server", "haproxy", "pgbouncer", "PGFENCE_PG_BINDIR", "pip install 'patroni[etcd3,psycopg3]>=4.1'")
    assert len(lines) == len(advice)
    assert all(words in line for words, line in zip(advice, lines, strict=True))


def test_a_patroni_that_loses_commits_is_rejected() -> None:
    """Versions before 4.1 are too old, because some of them give the leadership back to a paused leader."""
    assert programs.is_too_old("patroni 3.0.2")
    assert programs.is_too_old("patroni 4.0.7")
    assert not programs.is_too_old("patroni 4.1.5")
    assert not programs.is_too_old("patroni 10.0.0")
