"""One failover of each kind while clients use most primitives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cluster.cluster import Cluster


@pytest.mark.timeout(900)
def test_seven_failovers_break_no_guarantee(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """With synchronous replication no guarantee is broken, whatever happens to the primary."""
    from cluster.campaign.command import describe_result
    from cluster.campaign.run import strike_clients
    from cluster.strikes import FAILOVERS

    result = strike_clients(
        make_cluster(synchronous=True, block=2), tmp_path, FAILOVERS, failovers=len(FAILOVERS), report=print
    )
    print(describe_result(result))
    assert result.violations == []
    assert result.failovers >= len(FAILOVERS)
    wanted = (
        "tokens",
        "slots",
        "holds: lease",
        "holds: term",
        "holds: permit",
        "holds: partition",
        "acknowledged: fenced",
    )
    assert [name for name in wanted if not result.counts.get(name)] == []
