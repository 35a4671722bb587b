"""A hot standby of a private server."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg

from pgfence.embedded import _process
from support.servers import OwnServer, own

if TYPE_CHECKING:
    from collections.abc import Iterator


class Standby(OwnServer):
    """A copy that follows its primary and answers reads."""

    def promote(self) -> None:
        """Make it a primary and wait until it is one."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")


@contextmanager
def standby(primary: OwnServer, **kwargs: Any) -> Iterator[Standby]:
    """Copy a private server, start the copy as its standby, and yield it."""
    data = primary.folder / "standby"
    words, options = _process.command(
        [
            primary.bindir / "pg_basebackup",
            *("-h", primary.folder, "-p", str(primary.port), "-U", "postgres"),
            *("-D", data, "-X", "stream", "-c", "fast", "--no-sync"),
        ]
    )
    subprocess.run(words, check=True, **options)
    # Not by its -R: that writes down every option of its own libpq, and the server may find an older one.
    with (data / "postgresql.auto.conf").open("a", encoding="utf-8") as settings:
        settings.write(f"primary_conninfo = 'host={primary.folder} port={primary.port} user=postgres'\n")
    (data / "standby.signal").touch()
    with own(Standby, data_dir=data, **kwargs) as server:
        yield server
