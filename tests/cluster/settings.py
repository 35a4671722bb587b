"""Addresses of a cluster, and the configuration of its programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.programs import Programs

NAMES = ("n1", "n2", "n3")
POSTGRESQL, REST, ETCD, ETCD_PEER, ETCD_FORWARDED, HAPROXY, PGBOUNCER = 5460, 8008, 2379, 2380, 2389, 5000, 6432
LOOP_WAIT, RETRY_TIMEOUT = 2, 3


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of one cluster in 127.0.<block>.0/24. Clusters with different blocks run side by side."""

    block: int
    etcd_nodes: int

    def __post_init__(self) -> None:
        if not 1 <= self.block <= 254:
            raise ValueError(f"block must be between 1 and 254, not {self.block}")
        if self.etcd_nodes not in {1, 3}:
            raise ValueError(f"etcd_nodes must be 1 or 3, not {self.etcd_nodes}")

    @property
    def nodes(self) -> dict[str, str]:
        """The addresses of the PostgreSQL nodes, by name."""
        return {name: f"127.0.{self.block}.1{place}" for place, name in enumerate(NAMES, 1)}

    @property
    def etcd(self) -> dict[str, str]:
        """The addresses of the etcd nodes, by name."""
        return {f"etcd{place}": f"127.0.{self.block}.{place}" for place in range(1, self.etcd_nodes + 1)}

    @property
    def haproxy(self) -> str:
        """The address of HAProxy."""
        return f"127.0.{self.block}.20"

    @property
    def pgbouncer(self) -> str:
        """The address of PgBouncer."""
        return f"127.0.{self.block}.21"


def build_patroni(
    name: str, addresses: Addresses, folder: Path, programs: Programs, *, ttl: int, synchronous: bool
) -> str:
    """Return the configuration of one node. JSON is valid YAML."""
    host = addresses.nodes[name]
    etcd = [f"{host}:{ETCD_FORWARDED + place}" for place in range(addresses.etcd_nodes)]
    trusted = [
        f"{place} {database} all {address} trust"
        for place, address in (("local", ""), ("host", "127.0.0.0/8"))
        for database in ("all", "replication")
    ]
    settings = {
        "scope": "pgfence",
        "name": name,
        "restapi": {"listen": f"{host}:{REST}", "connect_address": f"{host}:{REST}"},
        # use_proxies: Patroni uses the forwarder, and not the address that etcd announces.
        "etcd3": {"hosts": etcd, "use_proxies": True},
        "watchdog": {"mode": "off"},
        "bootstrap": {
            "dcs": {
                "ttl": ttl,
                "loop_wait": LOOP_WAIT,
                "retry_timeout": RETRY_TIMEOUT,
                "maximum_lag_on_failover": 1048576,
                # A killed postmaster leads to a failover instead of a restart.
                "primary_start_timeout": 0,
                "synchronous_mode": synchronous,
                "postgresql": {"use_pg_rewind": True, "use_slots": True, "parameters": _PARAMETERS},
            },
            "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, {"auth": "trust"}, "no-sync"],
        },
        "postgresql": {
            "listen": f"{host}:{POSTGRESQL}",
            "connect_address": f"{host}:{POSTGRESQL}",
            "data_dir": str(folder / name),
            "bin_dir": str(programs.postgresql),
            "pgpass": str(folder / f"{name}.pgpass"),
            # Patroni reaches its own server also on a node that is cut off.
            "use_unix_socket": True,
            "use_unix_socket_repl": True,
            "remove_data_directory_on_rewind_failure": True,
            "remove_data_directory_on_diverged_timelines": True,
            "authentication": {
                "superuser": {"username": "postgres"},
                "replication": {"username": "replicator"},
                "rewind": {"username": "postgres"},
            },
            "pg_hba": trusted,
            "basebackup": [{"checkpoint": "fast"}, "no-sync"],
            "parameters": {"unix_socket_directories": str(folder / "run" / name)},
        },
    }
    return json.dumps(settings, indent=2)


_PARAMETERS = {
    # Strikes kill processes, never the kernel, so what was written is there without fsync.
    "fsync": False,
    "shared_buffers": "24MB",
    "max_connections": 200,
    "max_worker_processes": 4,
    "max_wal_size": "256MB",
    "min_wal_size": "64MB",
    "wal_keep_size": "64MB",
    "wal_log_hints": True,
    "hot_standby_feedback": True,
    "wal_receiver_timeout": "5s",
    "wal_sender_timeout": "5s",
    # Files in the data folder, so that a killed server leaves nothing in /dev/shm.
    "dynamic_shared_memory_type": "mmap",
    "log_line_prefix": "%m [%p] %r ",
}


def build_haproxy(addresses: Addresses) -> str:
    """Return the configuration of HAProxy, which follows the primary and ends the sessions on a former one."""
    servers = [
        f"  server {name} {host}:{POSTGRESQL} maxconn 200 check port {REST}" for name, host in addresses.nodes.items()
    ]
    return "\n".join(
        [
            "global",
            "  maxconn 500",
            "defaults",
            "  mode tcp",
            "  timeout connect 2s",
            "  timeout client 30m",
            "  timeout server 30m",
            "  timeout check 2s",
            "listen primary",
            f"  bind {addresses.haproxy}:{HAPROXY}",
            "  option httpchk GET /primary",
            "  option redispatch 1",
            "  http-check expect status 200",
            "  default-server inter 1s downinter 500ms fall 2 rise 1 on-marked-down shutdown-sessions",
            *servers,
            "",
        ]
    )


def build_pgbouncer(addresses: Addresses, folder: Path) -> str:
    """Return the configuration of PgBouncer: session mode, through HAProxy."""
    return "\n".join(
        [
            "[databases]",
            f"* = host={addresses.haproxy} port={HAPROXY}",
            "[pgbouncer]",
            f"listen_addr = {addresses.pgbouncer}",
            f"listen_port = {PGBOUNCER}",
            "unix_socket_dir =",
            "auth_type = trust",
            f"auth_file = {folder / 'users.txt'}",
            "pool_mode = session",
            "max_client_conn = 200",
            "default_pool_size = 60",
            "server_login_retry = 1",
            "ignore_startup_parameters = extra_float_digits",
            "",
        ]
    )


def build_etcd(name: str, addresses: Addresses, folder: Path) -> list[str]:
    """Return the arguments of one etcd node."""
    host = addresses.etcd[name]
    client, peer = f"http://{host}:{ETCD}", f"http://{host}:{ETCD_PEER}"
    peers = ",".join(f"{other}=http://{there}:{ETCD_PEER}" for other, there in addresses.etcd.items())
    return [
        *("--name", name, "--data-dir", str(folder / name), "--enable-v2=false"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", peers),
        *("--initial-cluster-token", f"pgfence-{addresses.block}"),
        *("--heartbeat-interval", "100", "--election-timeout", "1000"),
    ]
