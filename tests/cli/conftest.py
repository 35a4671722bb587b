"""Fixtures of the tests that start `pgfence run` as a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pgfence.keys import LockKey
from support.commandline import Cli

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg


@pytest.fixture
def cli(dsn: str, tmp_path: Path) -> Cli:
    """A `pgfence run` that talks to the test's server."""
    return Cli(dsn, tmp_path)


@pytest.fixture
def backend(admin: psycopg.Connection[Any], name: str) -> Callable[[], int | None]:
    """A function that returns the backend that holds the lock, if one does."""
    key = LockKey.of(name).value % 2**64

    def pid() -> int | None:
        row = admin.execute(
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1"
            " AND classid = %s::bigint::oid AND objid = %s::bigint::oid",
            [key >> 32, key & 0xFFFFFFFF],
        ).fetchone()
        return row[0] if row else None

    return pid
