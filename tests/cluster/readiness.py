"""Judge whether a cluster is ready: one primary, and two replicas that stream from it on its timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

LARGEST_LAG = 1 << 20
"""Bytes of WAL that a replica may be behind. Under load it is never at the same position as the primary."""


@dataclass(frozen=True, slots=True)
class Sender:
    """What a server reports about a replica that is connected to it.

    Attributes:
        state: the state of the replica, "streaming" once it has caught up.
        synchronous: whether commits wait for it.
        lag: bytes of WAL that it has not replayed.
    """

    state: str
    synchronous: bool
    lag: int


@dataclass(frozen=True, slots=True)
class View:
    """What a node reports about itself.

    Attributes:
        leads: whether Patroni says that the node holds the leader key.
        standby: whether Patroni says that the node is the synchronous standby.
        in_recovery: whether PostgreSQL is in recovery; None if it does not answer.
        timeline: of a primary, that of its WAL; of a replica, the one that it receives, 0 if it receives none.
        senders: the replicas that are connected, by name.
    """

    leads: bool = False
    standby: bool = False
    in_recovery: bool | None = None
    timeline: int = 0
    senders: Mapping[str, Sender] = field(default_factory=dict)


Views: TypeAlias = Mapping[str, View]


def find_fault(views: Views, *, synchronous: bool) -> str | None:
    """Return why a cluster is not ready, or None if it is ready."""
    leaders = [name for name, view in views.items() if view.leads]
    primaries = [name for name, view in views.items() if view.in_recovery is False]
    if len(leaders) != 1 or primaries != leaders:
        return f"leader keys: {leaders}, primaries: {primaries}"
    (leader,) = leaders
    for name, view in views.items():
        if name != leader and (fault := _find_fault_of_replica(name, view, views[leader])):
            return fault
    standbys = [name for name, view in views.items() if view.standby and views[leader].senders[name].synchronous]
    if synchronous and len(standbys) != 1:
        return f"synchronous standbys: {standbys}"
    return None


def _find_fault_of_replica(name: str, view: View, leader: View) -> str | None:
    sender = leader.senders.get(name)
    if view.in_recovery is None:
        return f"{name} does not answer"
    if sender is None or sender.state != "streaming":
        return f"{name} does not stream from the leader"
    if view.timeline != leader.timeline:
        return f"{name} is on timeline {view.timeline}, and the leader on {leader.timeline}"
    if sender.lag > LARGEST_LAG:
        return f"{name} is {sender.lag} bytes behind the leader"
    return None
