"""A server and its directories, from start to clean-up."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgfence.embedded import _binaries, _cluster
from pgfence.embedded._process import ServerProcess
from pgfence.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from pgfence.embedded._process import Mode

_HBA = "local all all trust\nlocal replication all trust\nhost all all all scram-sha-256\nhost replication all all scram-sha-256\n"
_OURS = ("data_directory", "hba_file", "listen_addresses", "port", "unix_socket_directories")
_ATTEMPTS = 5
_PATIENCE = 60.0
_LOG_LINES = 20


class Server:
    """A PostgreSQL server that can be stopped, crashed and restarted with the same data and port.

    Attributes:
        folder: the directory of this run. It contains the log, the Unix socket (which needs no password) and, unless the data is
            kept, the data.
        version: the version of the binaries, e.g. "18.6".
        port: the port of both the socket and 127.0.0.1; 0 before the first start.
        password: the password of its superuser `postgres` over TCP.
        environment: variables for the server's process, in addition to those of this process.
    """

    host = "127.0.0.1"

    def __init__(
        self,
        *,
        data_dir: str | PathLike[str] | None = None,
        fsync: bool = True,
        settings: dict[str, str] | None = None,
    ) -> None:
        self._settings = _check_settings(settings or {})
        if not fsync:
            self._settings = {"fsync": "off", "full_page_writes": "off"} | self._settings
        self.bindir = _binaries.find()
        self.version = _binaries.read_version(self.bindir)
        self.port = 0
        self.environment: Mapping[str, str] = {}
        self._creator = os.getpid()
        self._process: ServerProcess | None = None
        self.folder, self._lock = _cluster.make_run_folder()
        self.log = self.folder / "log"
        try:
            self.data = self.folder / "data" if data_dir is None else Path(data_dir).absolute()
            self._prepare(durable=fsync and data_dir is not None)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """The URL for SQLAlchemy, over TCP and with the password."""
        return f"postgresql+psycopg://postgres:{self.password}@{self.host}:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        if self._process is None:
            raise RuntimeError("the server is not running: call start() first")
        return self._process.pid

    def _prepare(self, *, durable: bool) -> None:
        found = sorted(self.data.iterdir()) if self.data.is_dir() else []
        if not found:
            _cluster.create(self.data, self.bindir, self.version, self.folder)
            if durable:
                _cluster.flush_to_disk(self.data, self.bindir)
        elif not (self.data / _cluster.PASSWORD_FILE).is_file():
            raise ValueError(
                f"data_dir '{self.data}' is neither empty nor a data directory that pgfence.embedded created: use another directory"
            )
        major = (self.data / "PG_VERSION").read_text().strip()
        if not re.match(rf"{major}\b", self.version):
            raise ValueError(
                f"data_dir '{self.data}' was created by PostgreSQL {major}, but the version of the binaries in '{self.bindir}' is"
                f" {self.version}: set {_binaries.VARIABLE} to the directory of binaries of PostgreSQL {major}, or use another"
                " data directory"
            )
        self.password = (self.data / _cluster.PASSWORD_FILE).read_text()
        hba = self.folder / "pg_hba.conf"
        hba.write_text(_HBA)
        _cluster.give(hba)

    def start(self) -> None:
        """Start the server and wait until it accepts connections. After a stop, it uses the same port.

        Raises:
            UnreachableError: the server did not start. The message ends with the last lines of the server's log.
        """
        fixed, log = self.port, ""
        for _ in range(_ATTEMPTS):
            self.port = fixed or _free_port(self.host)
            logged = self.log.stat().st_size if self.log.exists() else 0
            self._process = ServerProcess(self._build_command(), self.log, self._lock, self.environment)
            if self._wait_until_ready(self._process):
                return
            self.stop()
            log = self.log.read_bytes()[logged:].decode(errors="replace")
            # Another process may take the port between this check and the server's start.
            if "could not bind" not in log:
                break
        last = "\n".join(log.splitlines()[-_LOG_LINES:])
        raise UnreachableError(f"PostgreSQL {self.version} did not start:\n{last}", retryable=False)

    def stop(self, mode: Mode = "fast") -> None:
        """Stop the server. The call does nothing if the server is not running.

        Args:
            mode: "fast" shuts down cleanly. "immediate" is like a crash, which the data may not survive without `fsync`.
        """
        if self._process is not None:
            self._process.stop(mode)
            self._process = None

    def close(self) -> None:
        """Stop the server and delete the files of this run, but not the data in a directory of the caller."""
        if os.getpid() != self._creator:
            return
        self.stop()
        os.close(self._lock)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _build_command(self) -> list[str | Path]:
        settings = self._settings | {
            "listen_addresses": self.host,
            "port": str(self.port),
            # The setting is a list, so a comma or a blank in the name of a directory must be quoted.
            "unix_socket_directories": '"{}"'.format(str(self.folder).replace('"', '""')),
            "hba_file": str(self.folder / "pg_hba.conf"),
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [self.bindir / "postgres", "-D", self.data, *options]

    def _wait_until_ready(self, process: ServerProcess) -> bool:
        deadline = time.monotonic() + _PATIENCE
        while not process.ended.wait(0.005) and time.monotonic() < deadline:
            lines = self._read_status()
            if lines[:1] == [str(process.pid)] and lines[7:8] == ["ready"]:
                return True
        return False

    def _read_status(self) -> list[str]:
        """Return the lines of postmaster.pid. The first is the process id, and the eighth is the state."""
        try:
            return [line.strip() for line in (self.data / "postmaster.pid").read_text().splitlines()]
        except FileNotFoundError:
            return []


def _check_settings(settings: Mapping[Any, Any]) -> dict[str, str]:
    for name, value in settings.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"the names and values of settings must be strings, not {name!r}: {value!r}")
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", name, re.ASCII):
            raise ValueError(f"{name!r} is not a valid name for a server setting: use a name from postgresql.conf")
        if name.lower() in _OURS:
            raise ValueError(f"pgfence.embedded sets {name!r} itself: remove it from settings")
        if "\x00" in value:
            raise ValueError(f"the value of {name!r} must not contain NUL")
    return {name.lower(): value for name, value in settings.items()}


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
