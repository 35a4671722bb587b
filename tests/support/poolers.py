"""Connection poolers: the real PgBouncer, and a stand-in that needs nothing installed."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from support.waiting import blocking

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONFIG = """
[databases]
{database} = host={host} port={server} dbname={database} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = 20
max_client_conn = 500
ignore_startup_parameters = extra_float_digits
"""


@contextmanager
def pgbouncer(dsn: str, mode: str, more: str = "") -> Iterator[str]:
    """Run a PgBouncer in front of a database and yield the DSN that goes through it; skip the test where there is none.

    `more` is appended to its configuration.
    """
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("PgBouncer is not installed")
    place, port = urlsplit(dsn), _free_port()
    with tempfile.TemporaryDirectory(prefix="pgfence-bouncer-") as folder:
        config = Path(folder) / "pgbouncer.ini"
        config.touch(mode=0o600)
        config.write_text(
            _CONFIG.format(
                database=place.path.lstrip("/"),
                host=place.hostname,
                server=place.port,
                user=place.username,
                password=place.password,
                port=port,
                mode=mode,
            )
            + more
        )
        process = _start([program, "-q", config], folder)
        try:
            through = urlunsplit(place._replace(netloc=f"{place.username}:{place.password}@127.0.0.1:{port}"))
            blocking(lambda: _answers(through), deadline=10)
            yield through
        finally:
            process.kill()
            process.wait()


def _start(words: list[Any], folder: str) -> subprocess.Popen[bytes]:
    options: dict[str, Any] = {}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        options = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        for path in (Path(folder), *Path(folder).iterdir()):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
    end_with_us = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    return subprocess.Popen([*end_with_us, *words], stderr=subprocess.DEVNULL, **options)


def _answers(dsn: str) -> bool:
    try:
        psycopg.connect(dsn, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Swap:
    """A psycopg connection as a transaction pooler gives it: the session behind it changes with every transaction.

    Unlike PgBouncer it tells the server's own process id. For
    `create_engine("postgresql+psycopg://", creator=lambda: Swap(dsn), use_native_hstore=False, poolclass=NullPool)`.
    """

    def __init__(self, dsn: str) -> None:
        self.__dict__.update(_sessions=[psycopg.connect(dsn), psycopg.connect(dsn)])

    def _end(self, how: str) -> None:
        idle = self._sessions[0].info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        getattr(self._sessions[0], how)()
        if not idle:
            self._sessions.reverse()

    def cursor(self, *args: Any, **kwargs: Any) -> _SwapCursor:
        """Open a cursor; in autocommit each of its statements is a transaction, so on the other session."""
        return _SwapCursor(self, args, kwargs)

    def commit(self) -> None:
        """End the transaction; the next one is on the other session."""
        self._end("commit")

    def rollback(self) -> None:
        """End the transaction; the next one is on the other session."""
        self._end("rollback")

    def close(self) -> None:
        """Close both sessions."""
        for session in self._sessions:
            session.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sessions[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        for session in self._sessions:
            setattr(session, name, value)


class _SwapCursor:
    """A cursor whose every statement goes to the session that the pooler gives it."""

    def __init__(self, swap: Swap, args: Any, kwargs: Any) -> None:
        self._open = lambda: swap._sessions[0].cursor(*args, **kwargs)
        self._swap = swap
        self._cursor = self._open()

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        if self._swap.autocommit:
            self._swap._sessions.reverse()
        self._cursor.close()
        self._cursor = self._open()
        return self._cursor.execute(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)
