"""Copies of a private server: a hot standby of it, and what a restore of its backup gives."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence.embedded import _process
from pgfence.testing import FaultUnavailableError
from pgfence.testing._clock import ServerClock
from support.servers import OwnServer, own
from support.waiting import blocking

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Standby(OwnServer):
    """A copy that follows its primary and answers reads."""

    def promote(self) -> None:
        """Make it a primary and wait until it is one."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")

    def stop_following(self, primary: OwnServer) -> None:
        """Let it have everything that the primary has committed, and nothing that it commits from now on."""
        with (
            psycopg.connect(primary.dsn, autocommit=True) as there,
            psycopg.connect(self.dsn, autocommit=True) as connection,
        ):
            end = there.execute("SELECT pg_current_wal_lsn()").fetchone()
            assert end is not None
            replayed = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
            blocking(lambda: connection.execute(replayed, end).fetchone() == (True,), 30)
            connection.execute("ALTER SYSTEM SET primary_conninfo = ''")
            connection.execute("SELECT pg_reload_conf()")
            blocking(lambda: connection.execute("SELECT FROM pg_stat_wal_receiver").fetchone() is None, 30)


@contextmanager
def standby(primary: OwnServer, **kwargs: Any) -> Iterator[Standby]:
    """Copy a private server, start the copy as its standby, and yield it."""
    data = _copied(primary, "standby")
    # Not by its -R: that writes down every option of its own libpq, and the server may find an older one.
    _configure(data, f"primary_conninfo = 'host={primary.folder} port={primary.port} user=postgres'", "standby.signal")
    with own(Standby, data_dir=data, **kwargs) as server:
        yield server


@contextmanager
def restored(primary: OwnServer, **kwargs: Any) -> Iterator[OwnServer]:
    """Restore a private server to this moment from a backup, on a separate timeline, and yield what was restored."""
    data = _copied(primary, "restored")
    _configure(data, "restore_command = 'false'", "recovery.signal")
    with own(OwnServer, data_dir=data, **kwargs) as server:
        yield server


@contextmanager
def receive_wal(primary: OwnServer) -> Iterator[None]:
    """Run pg_receivewal, which can be a synchronous standby, until the end of the block."""
    folder = primary.folder / "received"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    words, options = _process.build_command(
        [
            primary.bindir / "pg_receivewal",
            *("-h", primary.folder, "-p", str(primary.port), "-U", "postgres", "-D", folder, "--synchronous"),
        ]
    )
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, **options) as receiver:
        try:
            yield
        finally:
            receiver.kill()


@contextmanager
def move_clock(server: OwnServer, seconds: float) -> Iterator[None]:
    """Run a server with its clock set ahead until the end of the block. Skip the test where there is no libfaketime."""
    try:
        clock = ServerClock(server.folder / "clock")
    except FaultUnavailableError as error:
        pytest.skip(str(error))
    with clock.move(seconds):
        server.environment = clock.environment
        try:
            server.restart()
            yield
        finally:
            server.environment = {}
            server.restart()


def _copied(primary: OwnServer, name: str) -> Path:
    data = primary.folder / name
    words, options = _process.build_command(
        [
            primary.bindir / "pg_basebackup",
            *("-h", primary.folder, "-p", str(primary.port), "-U", "postgres"),
            *("-D", data, "-X", "stream", "-c", "fast", "--no-sync"),
        ]
    )
    subprocess.run(words, check=True, **options)
    return data


def _configure(data: Path, line: str, signal: str) -> None:
    with (data / "postgresql.auto.conf").open("a", encoding="utf-8") as settings:
        settings.write(f"{line}\n")
    (data / signal).touch()
