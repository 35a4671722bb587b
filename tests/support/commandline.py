"""`pgfence run` as a process, and another process that holds its lock."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from pgfence.keys import LockKey

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVER_VARIABLES = ("DATABASE_URL", "PGDATABASE", "PGHOST", "PGPASSWORD", "PGPORT", "PGSERVICE", "PGUSER")


class Cli:
    """Starts `pgfence run` with a server in its environment."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if k not in SERVER_VARIABLES}
        self.environment |= {"DATABASE_URL": dsn, "COLUMNS": "200"}

    def run(self, *words: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(
            [sys.executable, "-m", "pgfence", "run", *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
            cwd=self.folder,
            env=self.environment | environment,
            start_new_session=True,
        )

    @contextmanager
    def started(self, *words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """Start it, and end it with the block."""
        with subprocess.Popen(
            [sys.executable, "-m", "pgfence", "run", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment | environment,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                process.terminate()


@contextmanager
def holding(dsn: str, name: str, application: str = "other-deploy") -> Iterator[int]:
    """Hold a lock from another session with plain SQL; yield its backend."""
    with psycopg.connect(dsn, autocommit=True, application_name=application) as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", [LockKey.of(name).value])
        yield connection.info.backend_pid


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "Z" not in stat.rpartition(")")[2].split()[:1]
