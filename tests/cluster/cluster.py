"""The cluster: etcd, three nodes with Patroni and PostgreSQL, HAProxy and PgBouncer, all on loopback."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import queue
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from cluster import cleanup, settings
from cluster.node import Daemon, Node
from cluster.programs import find_programs
from cluster.readiness import find_fault
from pgfence.embedded import _cluster
from pgfence.testing._clock import ServerClock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from cluster.readiness import Views

WAYS = ("psycopg", "asyncpg", "haproxy", "pgbouncer")
"""The ways in which clients connect: lists of hosts with two drivers, and psycopg through HAProxy and through PgBouncer."""
LOGS = "PGFENCE_TEST_CLUSTER_LOGS"
"""The variable that names a folder to which the logs of a cluster are copied when it stops."""
_LONGEST_FOLDER = 80
_START = 120.0


class NotReadyError(AssertionError):
    """A cluster did not become ready in time. The message says what was missing last."""


def make_folder() -> Path:
    """Make up the path of a folder for a cluster, short enough for the sockets in it. `Cluster.start` creates the folder."""
    return Path("/tmp") / f"pgfence-cluster-{secrets.token_hex(4)}"


class Cluster:
    """Three PostgreSQL servers with automatic failover. A context manager that starts and stops them.

    Attributes:
        folder: the data, logs and sockets; removed by `stop`.
        synchronous: whether commits wait for a synchronous standby.
        ttl: seconds after which Patroni's leader key expires.
        nodes: the nodes, by name: "n1" to "n3".
        etcd: the processes of etcd, by name: "etcd1", and "etcd2" and "etcd3" if there are three.
        versions: the version of each program.
    """

    def __init__(
        self,
        folder: Path,
        *,
        synchronous: bool,
        block: int = 1,
        etcd_nodes: int = 1,
        ttl: int = 20,
        clocks: Mapping[str, float] | None = None,
    ) -> None:
        """Describe a cluster. Nothing is started yet.

        Args:
            folder: a folder that is empty or does not exist.
            synchronous: whether replication is synchronous.
            block: the cluster uses 127.0.<block>.0/24. Clusters with different blocks run side by side.
            etcd_nodes: 1 or 3.
            ttl: Patroni's `ttl` in seconds, at least 20.
            clocks: seconds by which the clocks of nodes are ahead, by name of the node. Needs libfaketime.

        Raises:
            ProgramsMissingError: programs are missing.
        """
        if len(os.fsencode(folder.resolve())) > _LONGEST_FOLDER:
            raise ValueError(f"the path of the folder is too long for sockets: {folder}")
        self.folder = folder.resolve()
        self.synchronous = synchronous
        self.ttl = ttl
        self.addresses = settings.Addresses(block, etcd_nodes)
        self._programs = find_programs()
        self._clocks = dict(clocks or {})
        self._rotations = itertools.count(1)
        self._guard: subprocess.Popen[bytes] | None = None
        self.versions = self._programs.versions
        self.nodes: Mapping[str, Node] = {}
        self.etcd: Mapping[str, Daemon] = {}
        self._proxies: list[Daemon] = []

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Return a cluster that another process has started."""
        description = json.loads((folder / cleanup.DESCRIPTION).read_text())
        del description["hosts"]
        cluster = cls(folder, **description)
        cluster._describe_processes()
        return cluster

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # ------------------------------------------------------------ start and stop

    def start(self, *, guarded: bool = True) -> None:
        """Start everything and wait until the cluster is ready.

        Args:
            guarded: whether the cluster ends with this process, however that ends.

        Raises:
            NotReadyError: the cluster did not become ready.
            FileExistsError: the folder is not empty.
            OSError: another cluster uses the same block.
        """
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        if any(self.folder.iterdir()):
            raise FileExistsError(f"the folder of a new cluster must be empty: {self.folder}")
        try:
            self._check_addresses()
            if guarded:
                script = Path(cleanup.__file__)
                words = [sys.executable, str(script), str(self.folder), str(os.getpid())]
                self._guard = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, cwd="/")
            self._prepare()
            for each in [*self.etcd.values(), *(node.forwarder for node in self.nodes.values())]:
                each.start()
            self._wait_for_etcd()
            for each in [*(node.patroni for node in self.nodes.values()), *self._proxies]:
                each.start()
            self.wait_until_ready(_START)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop everything and remove the folder. The call does nothing if nothing is left."""
        if (logs := os.environ.get(LOGS)) and (self.folder / "log").is_dir():
            shutil.copytree(self.folder / "log", Path(logs) / self.folder.name, dirs_exist_ok=True)
        cleanup.remove(self.folder)
        for each in self._list_daemons():
            each.kill()
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None

    def _list_daemons(self) -> list[Daemon]:
        of_nodes = [each for node in self.nodes.values() for each in (node.patroni, node.forwarder)]
        return [*of_nodes, *self._proxies, *self.etcd.values()]

    def _check_addresses(self) -> None:
        for host in [*self.addresses.etcd.values(), *self.addresses.nodes.values(), self.addresses.haproxy]:
            with socket.socket() as probe:
                probe.settimeout(2)
                for port in (settings.ETCD, settings.ETCD_FORWARDED, settings.POSTGRESQL, settings.HAPROXY):
                    if probe.connect_ex((host, port)) == 0:
                        raise OSError(f"{host}:{port} is in use: is there another cluster with the same block?")

    def _prepare(self) -> None:
        for name in ("log", "run", *(f"run/{name}" for name in self.addresses.nodes)):
            (self.folder / name).mkdir()
        hosts = list(self.addresses.nodes.values())
        description = {
            "hosts": hosts,
            "synchronous": self.synchronous,
            "block": self.addresses.block,
            "etcd_nodes": self.addresses.etcd_nodes,
            "ttl": self.ttl,
            "clocks": self._clocks,
        }
        (self.folder / cleanup.DESCRIPTION).write_text(json.dumps(description))
        for name in self.addresses.nodes:
            text = settings.build_patroni(
                name, self.addresses, self.folder, self._programs, ttl=self.ttl, synchronous=self.synchronous
            )
            (self.folder / f"{name}.json").write_text(text)
        (self.folder / "haproxy.cfg").write_text(settings.build_haproxy(self.addresses))
        (self.folder / "pgbouncer.ini").write_text(settings.build_pgbouncer(self.addresses, self.folder))
        (self.folder / "users.txt").write_text('"postgres" ""\n')
        self._describe_processes()
        _cluster.give(self.folder)

    def _describe_processes(self) -> None:
        clocks = {name: self._make_clock(name, ahead) for name, ahead in self._clocks.items()}
        self.nodes = {
            name: Node(name, self.addresses, self.folder, self._programs, clocks.get(name))
            for name in self.addresses.nodes
        }
        self.etcd = {
            name: Daemon(
                self.folder, name, [self._programs.etcd, *settings.build_etcd(name, self.addresses, self.folder)]
            )
            for name in self.addresses.etcd
        }
        haproxy: list[str | Path] = [self._programs.haproxy, "-db", "-f", self.folder / "haproxy.cfg"]
        pgbouncer = [self._programs.pgbouncer, self.folder / "pgbouncer.ini"]
        self._proxies = [Daemon(self.folder, "haproxy", haproxy), Daemon(self.folder, "pgbouncer", pgbouncer)]

    def _make_clock(self, name: str, ahead: float) -> ServerClock:
        clock = ServerClock(self.folder / f"{name}.clock")
        clock._set(ahead)
        return clock

    def _wait_for_etcd(self) -> None:
        addresses = [
            (host, settings.ETCD_FORWARDED + place)
            for host in self.addresses.nodes.values()
            for place in range(self.addresses.etcd_nodes)
        ]
        end = time.monotonic() + _START
        for host, port in addresses:
            while not is_etcd_ready(host, port):
                self._check_daemons()
                if time.monotonic() > end:
                    raise NotReadyError(f"etcd does not answer on {host}:{port}")
                time.sleep(0.1)

    def _check_daemons(self) -> None:
        for each in self._list_daemons():
            if each.has_failed():
                raise NotReadyError(f"{each.name} has ended. The end of its log:\n{each.read_log()[-3000:]}")

    # ------------------------------------------------------------ questions

    def find_leader(self, besides: Collection[str] = ()) -> Node | None:
        """Return the node that is the primary and holds the leader key, or None during a failover.

        Args:
            besides: names of nodes that are not asked. A node that hangs delays the result by a second.
        """
        answers: queue.SimpleQueue[Node | None] = queue.SimpleQueue()
        asked = [node for name, node in self.nodes.items() if name not in besides]

        def ask(node: Node) -> None:
            answers.put(node if node.leads() else None)

        for node in asked:
            threading.Thread(target=ask, args=(node,), daemon=True).start()
        return next((leader for _ in asked if (leader := answers.get()) is not None), None)

    def view(self) -> Views:
        """Return what each node reports about itself."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            return dict(zip(self.nodes, pool.map(Node.view, self.nodes.values()), strict=True))

    def wait_until_ready(self, limit: float = 90) -> None:
        """Wait until there is a primary with two replicas that stream on its timeline, and the proxies reach it.

        With synchronous replication one of the replicas must be the synchronous standby.

        Raises:
            NotReadyError: the cluster did not become ready within `limit` seconds.
        """
        end = time.monotonic() + limit
        while fault := find_fault(self.view(), synchronous=self.synchronous) or self._find_fault_of_helpers():
            self._check_daemons()
            if time.monotonic() > end:
                raise NotReadyError(f"the cluster was not ready after {limit:.0f} s: {fault}")
            time.sleep(0.2)

    def _find_fault_of_helpers(self) -> str | None:
        for name, host in self.addresses.etcd.items():
            if not is_etcd_ready(host, settings.ETCD):
                return f"{name} does not answer"
        for name, host, port in (
            ("HAProxy", self.addresses.haproxy, settings.HAPROXY),
            ("PgBouncer", self.addresses.pgbouncer, settings.PGBOUNCER),
        ):
            try:
                with psycopg.connect(
                    host=host, port=port, user="postgres", dbname="postgres", connect_timeout=3
                ) as connection:
                    row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
            except psycopg.Error as error:
                return f"{name}: {error}"
            if row != (False,):
                return f"{name} leads to a replica"
        return None

    # ------------------------------------------------------------ URLs

    def url(self, way: str) -> str:
        """Return a SQLAlchemy URL for one of `WAYS`. Each call starts the list of hosts with another node."""
        if way == "haproxy":
            return f"postgresql+psycopg://postgres@{self.addresses.haproxy}:{settings.HAPROXY}/postgres"
        if way == "pgbouncer":
            return f"postgresql+psycopg://postgres@{self.addresses.pgbouncer}:{settings.PGBOUNCER}/postgres"
        hosts = list(self._rotate(next(self._rotations)))
        if way == "asyncpg":
            places = "&".join(f"host={host}:{settings.POSTGRESQL}" for host in hosts)
            return f"postgresql+asyncpg://postgres@/postgres?{places}&target_session_attrs=read-write"
        if way == "psycopg":
            return self._build_list(hosts)
        raise ValueError(f"way must be one of {', '.join(WAYS)}, not {way!r}")

    def admin_url(self) -> str:
        """Return the URL for set-up and checks: the list of hosts, always in the same order, with psycopg."""
        return self._build_list(list(self._rotate(0)))

    def _rotate(self, places: int) -> Iterator[str]:
        hosts = list(self.addresses.nodes.values())
        for place in range(len(hosts)):
            yield hosts[(place + places) % len(hosts)]

    @staticmethod
    def _build_list(hosts: list[str]) -> str:
        ports = ",".join([str(settings.POSTGRESQL)] * len(hosts))
        options = f"port={ports}&target_session_attrs=read-write&connect_timeout=2"
        return f"postgresql+psycopg://postgres@/postgres?host={','.join(hosts)}&{options}"


def is_etcd_ready(host: str, port: int) -> bool:
    """Return whether an etcd node has a leader, and knows the version of its cluster, without which Patroni does not start."""
    with closing(http.client.HTTPConnection(host, port, timeout=2)) as connection:
        try:
            answers = []
            for path in ("/health", "/version"):
                connection.request("GET", path)
                answers.append(json.loads(connection.getresponse().read()))
        except (OSError, http.client.HTTPException, ValueError):
            return False
    health, version = answers
    return bool(health["health"] == "true" and version["etcdcluster"] != "not_decided")
