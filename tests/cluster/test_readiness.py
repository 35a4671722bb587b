"""When a cluster counts as ready; without a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.readiness import LARGEST_LAG, Sender, View, Views, find_fault

STREAMING = Sender("streaming", synchronous=False, lag=0)
LEADER = View(
    leads=True,
    in_recovery=False,
    timeline=4,
    senders={"n2": replace(STREAMING, synchronous=True), "n3": STREAMING},
)
STANDBY = View(standby=True, in_recovery=True, timeline=4)
REPLICA = View(in_recovery=True, timeline=4)
READY: Views = {"n1": LEADER, "n2": STANDBY, "n3": REPLICA}


def build_views(node: str, **changes: Any) -> Views:
    return {**READY, node: replace(READY[node], **changes)}


def build_sender(node: str, **changes: Any) -> Views:
    senders = {**LEADER.senders, node: replace(LEADER.senders[node], **changes)}
    return build_views("n1", senders=senders)


def test_a_leader_with_two_streaming_replicas_is_ready() -> None:
    """A cluster whose replicas stream on the leader's timeline is ready, also with a small lag."""
    assert find_fault(READY, synchronous=True) is None
    assert find_fault(build_sender("n3", lag=LARGEST_LAG), synchronous=True) is None
    assert find_fault(build_views("n2", standby=False), synchronous=False) is None


@pytest.mark.parametrize(
    ("views", "fault"),
    [
        pytest.param(build_views("n1", leads=False), "leader keys: []", id="no leader key"),
        pytest.param(build_views("n2", leads=True), "leader keys: ['n1', 'n2']", id="two leader keys"),
        pytest.param(build_views("n1", in_recovery=True), "primaries: []", id="leader in recovery"),
        pytest.param(build_views("n3", in_recovery=False), "primaries: ['n1', 'n3']", id="two primaries"),
        pytest.param(build_views("n3", in_recovery=None), "n3 does not answer", id="replica hangs"),
        pytest.param(build_views("n3", timeline=3), "n3 is on timeline 3", id="replica on an older timeline"),
        pytest.param(build_views("n3", timeline=0), "n3 is on timeline 0", id="replica receives nothing"),
        pytest.param(build_sender("n3", state="catchup"), "n3 does not stream", id="replica catches up"),
        pytest.param(build_views("n1", senders={"n2": STREAMING}), "n3 does not stream", id="replica not connected"),
        pytest.param(build_sender("n3", lag=LARGEST_LAG + 1), "n3 is 1048577 bytes behind", id="replica behind"),
        pytest.param(build_views("n2", standby=False), "synchronous standbys: []", id="no standby in Patroni"),
        pytest.param(build_sender("n2", synchronous=False), "synchronous standbys: []", id="no standby in PostgreSQL"),
    ],
)
def test_a_cluster_that_misses_something_is_not_ready(views: Views, fault: str) -> None:
    """Each condition is necessary, and the reason names the node."""
    assert fault in (find_fault(views, synchronous=True) or "")
