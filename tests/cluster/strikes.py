"""The faults of the cluster: each one strikes the primary, waits for the new one, heals, and waits until the cluster is calm."""

from __future__ import annotations

import enum
import http.client
import json
import os
import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from cluster import settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.cluster import Cluster
    from cluster.node import Node

RECORD = "strikes.jsonl"
"""The file in the folder of a cluster with a line for each strike."""


class Strike(enum.Enum):
    """The kinds of faults."""

    SWITCHOVER = "switchover"
    KILL_POSTMASTER = "kill of the postmaster"
    KILL_MACHINE = "death of the machine"
    PAUSE = "pause of Patroni and PostgreSQL"
    CUT_FROM_ETCD = "primary cut off from etcd"
    CUT_OFF = "primary cut off from etcd, replicas and clients"
    STOP_PATRONI = "Patroni stopped alone"
    ETCD_NODE_LOST = "one of three etcd nodes lost"
    HANG_STANDBY = "synchronous standby hangs"


FAILOVERS = (
    Strike.SWITCHOVER,
    Strike.KILL_POSTMASTER,
    Strike.KILL_MACHINE,
    Strike.PAUSE,
    Strike.CUT_FROM_ETCD,
    Strike.CUT_OFF,
    Strike.STOP_PATRONI,
)
"""The kinds that lead to a new leader."""


class StrikeError(AssertionError):
    """A strike did not lead to what it should lead to."""


@dataclass(frozen=True, slots=True)
class StrikeRecord:
    """What happened, with moments of CLOCK_MONOTONIC, which all processes of a machine share.

    Attributes:
        kind: the kind of the fault.
        target: the name of the node that was struck.
        old: the name of the leader before.
        new: the name of the leader that followed, None if the leader did not change.
        struck_at: immediately before the fault.
        leader_at: when the new leader was there, None if the leader did not change.
        healed_at: when the fault was over.
        calm_at: when the cluster was ready again.
    """

    kind: Strike
    target: str
    old: str
    new: str | None
    struck_at: float
    leader_at: float | None
    healed_at: float
    calm_at: float

    def to_json(self) -> str:
        """Return the record as a line of JSON."""
        return json.dumps({**asdict(self), "kind": self.kind.name})

    @classmethod
    def from_json(cls, line: str) -> StrikeRecord:
        """Return the record that `to_json` has written."""
        fields = json.loads(line)
        return cls(**{**fields, "kind": Strike[fields["kind"]]})


def find_obstacle(cluster: Cluster, kind: Strike) -> str | None:
    """Return why a kind is not possible on this machine or cluster, or None if it is possible."""
    if kind is Strike.CUT_OFF and os.geteuid() != 0:
        return "only root can add a route that makes a node unreachable"
    if kind is Strike.ETCD_NODE_LOST and cluster.addresses.etcd_nodes < 3:
        return "the cluster needs three etcd nodes"
    if kind is Strike.HANG_STANDBY and not cluster.synchronous:
        return "the cluster has no synchronous standby"
    return None


def strike(cluster: Cluster, kind: Strike, *, heal_after: float = 4, limit: float = 90) -> StrikeRecord:
    """Inject a fault, heal it and return when the cluster is ready again. Adds a line to `strikes.jsonl` of the cluster's folder.

    Args:
        cluster: a cluster that is ready.
        kind: the fault.
        heal_after: seconds from the new leader until the fault is healed; from the fault, if no new leader is expected.
        limit: seconds to wait for the new leader, and again until the cluster is ready.

    Raises:
        StrikeError: the kind is not possible, or no node became the leader in time.
        NotReadyError: the cluster is not ready in time.
    """
    if reason := find_obstacle(cluster, kind):
        raise StrikeError(f"{kind.name} is not possible: {reason}")
    old = cluster.find_leader()
    if old is None:
        raise StrikeError("the cluster has no leader")
    record = _inject(cluster, kind, old, heal_after, limit)
    cluster.wait_until_ready(limit)
    record = replace(record, calm_at=time.monotonic())
    if kind not in FAILOVERS and (now := cluster.find_leader()) is not None and now is not old:
        record = replace(record, new=now.name)
    with (cluster.folder / RECORD).open("a") as file:
        file.write(record.to_json() + "\n")
    return record


def _inject(cluster: Cluster, kind: Strike, old: Node, heal_after: float, limit: float) -> StrikeRecord:
    target, hit, heal = _build(cluster, kind, old)
    struck_at = time.monotonic()
    new, leader_at = None, None
    try:
        hit()
        if kind in FAILOVERS:
            new = _wait_for_leader(cluster, old, limit)
            leader_at = time.monotonic()
        if heal is not None:
            time.sleep(heal_after)
    finally:
        if heal is not None:
            heal()
    return StrikeRecord(kind, target, old.name, new.name if new else None, struck_at, leader_at, time.monotonic(), 0.0)


def _build(cluster: Cluster, kind: Strike, old: Node) -> tuple[str, Callable[[], None], Callable[[], None] | None]:
    """Return the name of what is struck, the fault, and the cure if the cluster does not heal without one."""
    match kind:
        case Strike.SWITCHOVER:
            return old.name, lambda: switch_over(old), None
        case Strike.KILL_POSTMASTER:
            return old.name, old.kill_postmaster, None
        case Strike.KILL_MACHINE:
            return old.name, old.kill, old.start_patroni
        case Strike.PAUSE:
            return old.name, old.pause, old.resume
        case Strike.CUT_FROM_ETCD:
            return old.name, old.cut_from_etcd, old.reconnect_to_etcd
        case Strike.CUT_OFF:
            return old.name, old.cut_off, old.reconnect
        case Strike.STOP_PATRONI:
            return old.name, old.stop_patroni, old.resume
        case Strike.ETCD_NODE_LOST:
            daemon = cluster.etcd[find_etcd_leader(cluster)]
            return daemon.name, daemon.kill, daemon.start
        case Strike.HANG_STANDBY:
            standby = next(node for node in cluster.nodes.values() if node.ask("/synchronous")[0] == 200)
            return standby.name, standby.pause, standby.resume


def switch_over(old: Node, candidate: str | None = None) -> None:
    """Ask Patroni for a switchover, without waiting for its response, which comes when the new leader is there.

    Args:
        old: the leader.
        candidate: the name of the new leader. Patroni chooses it by default.
    """
    data = {"leader": old.name} | ({"candidate": candidate} if candidate else {})
    threading.Thread(target=old.ask, args=("/switchover", data, 60), daemon=True).start()


def find_etcd_leader(cluster: Cluster) -> str:
    """Return the name of the etcd node that leads the others, which is the worst one to lose."""
    for name, host in cluster.addresses.etcd.items():
        with closing(http.client.HTTPConnection(host, settings.ETCD, timeout=2)) as connection:
            connection.request("POST", "/v3/maintenance/status", "{}")
            status = json.loads(connection.getresponse().read())
        if status["leader"] == status["header"]["member_id"]:
            return name
    raise StrikeError("etcd has no leader")


def _wait_for_leader(cluster: Cluster, old: Node, limit: float) -> Node:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if (new := cluster.find_leader(besides=[old.name])) is not None:
            return new
        time.sleep(0.1)
    raise StrikeError(f"no node took over from {old.name} within {limit:.0f} s")
