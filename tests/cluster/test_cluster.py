"""The cluster itself: it becomes ready, each kind of fault leads to a new leader and back to calm, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from cluster import wanted
from cluster.cleanup import find_processes, find_routes, remove
from cluster.cluster import WAYS, make_folder
from cluster.strikes import FAILOVERS, Strike, StrikeRecord, find_obstacle, strike
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.cluster import Cluster

QUICK = (Strike.SWITCHOVER, Strike.KILL_POSTMASTER, Strike.HANG_STANDBY, Strike.ETCD_NODE_LOST)
"""The usual run has all kinds in test_failover.py."""
PRIMARY = text("SELECT NOT pg_is_in_recovery()")
PROGRAM = """
import sys
from pathlib import Path
from cluster.cluster import Cluster

with Cluster(Path(sys.argv[1]), synchronous=True) as cluster:
    node = cluster.find_leader()
    # What is hardest to clean up: a node without its postmaster, and a node that is stopped.
    node.kill()
    next(other for other in cluster.nodes.values() if other is not node).pause()
    if sys.argv[2] == "cut off":
        next(other for other in reversed(cluster.nodes.values()) if other is not node).cut_off()
    print("struck", flush=True)
    sys.stdin.read()
"""


async def ask_each_way(cluster: Cluster) -> None:
    for way in WAYS:
        if way == "asyncpg":
            async_engine = create_async_engine(cluster.url(way))
            async with async_engine.connect() as async_connection:
                assert (await async_connection.execute(PRIMARY)).scalar_one()
            await async_engine.dispose()
        else:
            engine = create_engine(cluster.url(way))
            with engine.connect() as connection:
                assert connection.execute(PRIMARY).scalar_one()
            engine.dispose()


@pytest.mark.parametrize(
    "synchronous", [True, pytest.param(False, marks=wanted.LONG)], ids=["synchronous", "asynchronous"]
)
async def test_each_fault_leads_back_to_a_ready_cluster(
    make_cluster: Callable[..., Cluster], synchronous: bool
) -> None:
    """The faults of a primary lead to a new one, which every client finds, and the others do not. Each one heals."""
    cluster = make_cluster(synchronous=synchronous, etcd_nodes=3)
    await ask_each_way(cluster)
    for kind in Strike if wanted.is_long() else QUICK:
        if reason := find_obstacle(cluster, kind):
            print(f"left out {kind.name}: {reason}")
            continue
        record = strike(cluster, kind)
        print(record.to_json())
        assert StrikeRecord.from_json(record.to_json()) == record
        if kind in FAILOVERS:
            assert record.new not in {None, record.old}
            assert record.target == record.old
        elif kind is Strike.HANG_STANDBY:
            assert record.new is None
            assert record.target != record.old
        await ask_each_way(cluster)


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder of a cluster in another process, removed in case that process did not do it."""
    folder = make_folder()
    yield folder
    remove(folder)


@pytest.mark.usefixtures("make_cluster")
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=wanted.LONG), pytest.param(signal.SIGKILL, marks=wanted.LONG)],
    ids=lambda number: number.name,
)
def test_an_interrupted_run_leaves_nothing_behind(number: signal.Signals, folder: Path) -> None:
    """Processes, routes, shared memory and the folder are removed, however the process that started the cluster ends."""
    cut_off = "cut off" if os.geteuid() == 0 else ""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), cut_off],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "struck\n"
        assert len(find_processes(folder)) > 10
        segments = {file.read_text().split("\n")[6].split()[1] for file in folder.glob("*/postmaster.pid")}
        assert len(segments) == 3
        process.send_signal(number)
        process.wait()
    eventually(lambda: not folder.exists(), 30)
    assert not find_processes(folder)
    assert not find_routes([f"127.0.1.1{place}" for place in (1, 2, 3)])
    present = {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()}
    assert not present & segments
