"""The client processes of a campaign."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.clients.halves import GRACE
from cluster.records import Probe, read_records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.cluster import Cluster

ROOT = Path(__file__).parents[3]
_START = 180.0


class Clients:
    """One process for each way of connecting.

    Attributes:
        faults: what was wrong with the processes themselves.
    """

    def __init__(self, cluster: Cluster, folder: Path, ways: tuple[str, ...]) -> None:
        self._folder = folder
        self._processes = {way: self._start(way, cluster.url(way)) for way in ways}
        self.faults: list[str] = []

    def _start(self, way: str, url: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tests.cluster.clients", "--url", url, "--way", way]
        words += ["--record", str(self._folder / f"{way}.jsonl")]
        with (self._folder / f"{way}.out").open("ab") as output:
            return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)

    def list_records(self) -> list[Path]:
        """Return the files with the records."""
        return [path for way in self._processes if (path := self._folder / f"{way}.jsonl").exists()]

    def wait_until_working(self) -> None:
        """Wait until each client has used each primitive.

        Raises:
            AssertionError: one has not after three minutes; its output is in the folder.
        """
        end = time.monotonic() + _START
        wanted = {(way, primitive) for way in self._processes for primitive in PRIMITIVES}
        while wanted:
            if time.monotonic() > end:
                raise AssertionError(f"the clients do not work, see {self._folder}: {sorted(wanted)}")
            time.sleep(0.5)
            for record in read_records(self.list_records()):
                if isinstance(record, Probe) and record.failure is None:
                    wanted.discard((record.way, record.primitive))

    def stop(self) -> None:
        """Tell all of them to end, and wait until they have."""
        for way, process in self._processes.items():
            if process.poll() is not None:
                self.faults.append(f"the client {way} has ended early with {process.returncode}")
            if process.stdin is not None:
                process.stdin.close()
        for way, process in self._processes.items():
            try:
                process.wait(2 * GRACE)
            except subprocess.TimeoutExpired:
                self.faults.append(f"the client {way} did not end")
                process.kill()
                process.wait()


PRIMITIVES = ("sql", "key", "lease", "lock", "slot", "permit")


@contextmanager
def run_clients(cluster: Cluster, folder: Path, ways: tuple[str, ...]) -> Iterator[Clients]:
    """Run the clients during a block."""
    clients = Clients(cluster, folder, ways)
    try:
        clients.wait_until_working()
        yield clients
    finally:
        clients.stop()
