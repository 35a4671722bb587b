"""The jobs of one client."""

from __future__ import annotations

import argparse
import logging
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.clients.beliefs import Beliefs
from cluster.clients.engines import WAYS, open_half
from cluster.clients.holders import FOREVER, Holders
from cluster.clients.probes import Probes
from cluster.clients.writers import Writers
from cluster.records import Recorder, Stop

if TYPE_CHECKING:
    from cluster.clients.halves import Job

SHORT = 6.0
"""TTL of leases that end in most failovers."""
LONG = 45.0
"""TTL of leases that survive a failover: 1.8 times the time until there is a new leader."""


def main() -> None:
    """Start all jobs, and run until the standard input is closed."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.clients")
    parser.add_argument("--url", required=True)
    parser.add_argument("--way", required=True, choices=WAYS)
    parser.add_argument("--record", required=True, type=Path)
    options = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    half = open_half(options.url, options.way)
    recorder = Recorder(options.record, options.way)
    beliefs = Beliefs(recorder)
    holders = Holders(half, recorder, beliefs, options.way)
    writers = Writers(half, recorder, options.way)
    probes = Probes(half, recorder, options.way)

    async def start() -> None:
        jobs: list[Job] = [
            partial(holders.hold_lease, "long-0", LONG, FOREVER),
            partial(holders.hold_lease, "long-1", LONG, FOREVER),
            partial(holders.hold_lease, "middle", SHORT, FOREVER),
            partial(holders.hold_lease, "short-0", SHORT, 2),
            partial(holders.hold_lease, "short-1", SHORT, 2),
            partial(holders.hold_lock, "token-0", 3, token=True),
            partial(holders.hold_lock, "token-1", FOREVER, token=True),
            partial(holders.hold_lock, "lock-0", FOREVER, token=False),
            partial(holders.hold_lock, "lock-1", 1.5, token=False),
            partial(holders.hold_permit, "permits", SHORT, 3),
            partial(holders.run_slots, "slots", 2),
            partial(holders.lead, "leader", SHORT, 8),
            partial(holders.serve_partitions, "parts", SHORT),
            writers.count,
            writers.change_pages,
            writers.send_keys,
            writers.claim_jobs,
            writers.run_effects,
            *(partial(probes.run, primitive) for primitive in probes.primitives),
        ]
        for job in jobs:
            half.start(job)
            await half.sleep(0.1)  # opening many connections at once takes long on a machine with few cores

    def stop(alive: int) -> None:
        beliefs.close()
        recorder.write(Stop, alive=alive)

    half.run(start, stop)
