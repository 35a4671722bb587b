"""One node of the cluster: Patroni, PostgreSQL, and the forwarder through which Patroni reaches etcd."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from cluster import settings
from cluster.cleanup import MARKER, change_route, find_processes, find_routes, send_signals
from cluster.readiness import Sender, View
from pgfence.embedded import _process

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.programs import Programs
    from pgfence.testing._clock import ServerClock

_VIEW = """
    SELECT pg_is_in_recovery(),
           CASE WHEN pg_is_in_recovery()
                THEN (SELECT received_tli FROM pg_stat_wal_receiver WHERE status = 'streaming')
                ELSE ('x' || left(pg_walfile_name(CASE WHEN pg_is_in_recovery() THEN NULL
                                                       ELSE pg_current_wal_insert_lsn() END), 8))::bit(32)::int
           END
"""
_SENDERS = """
    SELECT application_name, state, sync_state = 'sync',
           pg_wal_lsn_diff(pg_current_wal_insert_lsn(), replay_lsn)::bigint
    FROM pg_stat_replication WHERE replay_lsn IS NOT NULL
"""


class Daemon:
    """One process of the cluster that runs until it is killed."""

    def __init__(
        self,
        folder: Path,
        name: str,
        words: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
        *,
        as_server: bool = True,
    ) -> None:
        """Prepare a process of the cluster in `folder`. Its output goes to `log/<name>`.

        Args:
            folder: the folder of the cluster.
            name: the name of the process.
            words: the command.
            environment: variables in addition to those of this process.
            as_server: whether root must run the process as another user.
        """
        self._as_server = as_server
        self._folder = folder
        self._words = words
        self._environment = environment or {}
        self._file = folder / "run" / f"{name}.pid"
        self._popen: subprocess.Popen[bytes] | None = None
        self._killed = False
        self.name = name

    @property
    def pid(self) -> int | None:
        """The process id, None if the process is not running."""
        if self._popen is not None:
            return self._popen.pid if self._popen.poll() is None else None
        # Another process has started the cluster.
        with suppress(OSError, ValueError):
            pid = int(self._file.read_text())
            return pid if pid in find_processes(self._folder) else None
        return None

    def start(self) -> None:
        """Start the process, in a separate session because Ctrl-C in a terminal is for the tests, which clean up."""
        words, options = _process.build_command(self._words)
        if not self._as_server:
            words, options = list(self._words), {"env": dict(os.environ), "stdin": subprocess.DEVNULL}
        marker = {MARKER: str(self._folder)}
        options |= {"cwd": str(self._folder), "env": {**options["env"], **self._environment, **marker}}
        with (self._folder / "log" / self.name).open("ab") as output:
            self._popen = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True, **options)
        self._killed = False
        self._file.write_text(str(self._popen.pid))

    def has_failed(self) -> bool:
        """Return whether the process has ended although `kill` was not called."""
        return self._popen is not None and self._popen.poll() is not None and not self._killed

    def read_log(self) -> str:
        """Return what the process has printed."""
        return (self._folder / "log" / self.name).read_text(errors="replace")

    def kill(self) -> None:
        """End the process with SIGKILL, and wait for the end."""
        self._killed = True
        _send(self.pid, signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait()
        while self.pid is not None:
            time.sleep(0.05)


class Node:
    """One node, with what a strike does to it.

    Attributes:
        name: "n1" to "n3".
        host: its address on loopback.
        clock: the clock of this node, if the cluster has one for it.
        patroni: the process of Patroni.
        forwarder: the process through which Patroni reaches etcd.
    """

    port = settings.POSTGRESQL

    def __init__(
        self, name: str, addresses: settings.Addresses, folder: Path, programs: Programs, clock: ServerClock | None
    ) -> None:
        self.name = name
        self.host = addresses.nodes[name]
        self.clock = clock
        self._folder = folder
        environment = clock.environment if clock is not None else {}
        self.patroni = Daemon(folder, name, [programs.patroni, folder / f"{name}.json"], environment)
        targets = [f"{host}:{settings.ETCD}" for host in addresses.etcd.values()]
        script = Path(__file__).with_name("forwarder.py")
        words = [sys.executable, str(script), self.host, str(settings.ETCD_FORWARDED), *targets]
        self.forwarder = Daemon(folder, f"forwarder-{name}", words, as_server=False)

    def __repr__(self) -> str:
        return f"<Node {self.name} {self.host}>"

    def url(self, driver: str = "psycopg") -> str:
        """Return the SQLAlchemy URL of this node alone."""
        return f"postgresql+{driver}://postgres@{self.host}:{self.port}/postgres"

    # ------------------------------------------------------------ questions

    def ask(self, path: str, data: Mapping[str, Any] | None = None, timeout: float = 1) -> tuple[int, Any]:
        """Send a request to Patroni's REST API, a POST if there is data, and return the status and the content.

        The status is 0 if Patroni does not answer in time.
        """
        body = None if data is None else json.dumps(data)
        with closing(http.client.HTTPConnection(self.host, settings.REST, timeout=timeout)) as connection:
            try:
                connection.request("GET" if data is None else "POST", path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = response.read().decode()
            except (OSError, http.client.HTTPException) as error:
                return 0, str(error)
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def leads(self) -> bool:
        """Return whether Patroni says that this node is the primary and holds the leader key."""
        return self.ask("/primary")[0] == 200

    def view(self) -> View:
        """Return what the node reports about itself."""
        leads, standby = self.leads(), self.ask("/synchronous")[0] == 200
        try:
            with psycopg.connect(
                host=self.host, port=self.port, user="postgres", connect_timeout=2, autocommit=True
            ) as connection:
                in_recovery, timeline = connection.execute(_VIEW).fetchone() or (None, None)
                rows = [] if in_recovery else connection.execute(_SENDERS).fetchall()
        except psycopg.Error:
            return View(leads, standby)
        senders = {name: Sender(state, synchronous, lag) for name, state, synchronous, lag in rows}
        return View(leads, standby, in_recovery, timeline or 0, senders)

    # ------------------------------------------------------------ processes

    @property
    def postmaster_pid(self) -> int | None:
        """The process id of PostgreSQL, None if it is not running."""
        with suppress(OSError, ValueError, IndexError):
            pid = int((self._folder / self.name / "postmaster.pid").read_text().split()[0])
            if (Path("/proc") / str(pid) / "exe").readlink().name == "postgres":
                return pid
        return None

    def list_postgres(self) -> list[int]:
        """Return the process ids of PostgreSQL, the postmaster first."""
        return _list_family(self.postmaster_pid)

    def list_patroni(self) -> list[int]:
        """Return the process ids of Patroni and its children."""
        return _list_family(self.patroni.pid)

    def list_walsenders(self) -> list[int]:
        """Return the process ids of the processes that send WAL to replicas. To be called while the node answers."""
        with psycopg.connect(host=self.host, port=self.port, user="postgres", connect_timeout=2) as connection:
            return [pid for (pid,) in connection.execute("SELECT pid FROM pg_stat_replication").fetchall()]

    def kill_postmaster(self) -> None:
        """End the postmaster with SIGKILL."""
        _send(self.postmaster_pid, signal.SIGKILL)

    def kill(self) -> None:
        """End Patroni and PostgreSQL with SIGKILL, like the death of the machine. `start_patroni` brings both back."""
        pids = [*self.list_patroni(), *self.list_postgres()]
        self.patroni.kill()
        send_signals(pids, signal.SIGKILL)

    def start_patroni(self) -> None:
        """Start Patroni, which starts PostgreSQL."""
        self.patroni.start()

    def stop_patroni(self) -> None:
        """Stop Patroni alone with SIGSTOP. PostgreSQL continues to run as it was."""
        _send(self.patroni.pid, signal.SIGSTOP)

    def pause(self) -> None:
        """Stop Patroni and PostgreSQL with SIGSTOP."""
        send_signals(self.list_patroni(), signal.SIGSTOP)
        postmaster = self.postmaster_pid
        _send(postmaster, signal.SIGSTOP)
        # The stopped postmaster starts no more processes, so this list is complete.
        send_signals(_list_family(postmaster), signal.SIGSTOP)

    def resume(self) -> None:
        """Continue what `pause` and `stop_patroni` have stopped."""
        send_signals([*self.list_postgres(), *self.list_patroni()], signal.SIGCONT)

    # ------------------------------------------------------------ network

    def cut_from_etcd(self) -> None:
        """Cut Patroni off from etcd. Clients and replicas still reach the node."""
        self.forwarder.kill()

    def reconnect_to_etcd(self) -> None:
        """Undo `cut_from_etcd`."""
        self.forwarder.start()

    def cut_off(self) -> None:
        """Cut the node off from etcd, replicas and clients. It lives on, and its connections fall silent. Needs root."""
        self.cut_from_etcd()
        change_route("add", self.host)

    def reconnect(self) -> None:
        """Undo `cut_off`."""
        if find_routes([self.host]):
            change_route("del", self.host)
        self.reconnect_to_etcd()


def _send(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _list_family(pid: int | None) -> list[int]:
    family = [] if pid is None else [pid]
    for each in family:
        # The list grows while it is read: children of children follow.
        with suppress(OSError):
            children = Path(f"/proc/{each}/task/{each}/children").read_text()
            family += map(int, children.split())
    return family
