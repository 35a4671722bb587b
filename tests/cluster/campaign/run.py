"""Strikes at a cluster while the clients work, and the judgement."""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from cluster import recovery, tables
from cluster.campaign.clients import run_clients
from cluster.campaign.result import Result, collect_versions
from cluster.cluster import WAYS, NotReadyError
from cluster.judge import Outage, judge, pick
from cluster.records import Belief, Probe, Stop, read_records
from cluster.strikes import FAILOVERS, Strike, find_obstacle, strike

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cluster.cluster import Cluster

REST = (3.0, 6.0)
"""Seconds between two strikes."""
SECOND_CHANCE = 120.0
"""Seconds that a cluster has to become ready after a strike that has failed."""


def strike_clients(
    cluster: Cluster,
    folder: Path,
    plan: Sequence[Strike],
    *,
    failovers: int,
    seed: int = 0,
    report: Callable[[str], object] = print,
) -> Result:
    """Strike at a cluster while clients work, and judge what they have recorded.

    Args:
        cluster: a cluster that is ready and whose database is empty.
        folder: where the records are kept.
        plan: the strikes. Further switchovers and kills follow until there were enough failovers.
        failovers: how many there should be.
        seed: for the pauses between the strikes.
        report: is called with one line for each strike.
    """
    tables.install(cluster.admin_url())
    campaign = _Campaign(cluster, random.Random(seed), report)
    with run_clients(cluster, folder, WAYS) as clients:
        campaign.run(plan, failovers)
    rows = campaign.read_rows()
    records = read_records(clients.list_records())
    (folder / "rows.json").write_text(json.dumps(asdict(rows) if rows else None, default=list))
    (folder / "outages.json").write_text(json.dumps([asdict(outage) for outage in campaign.outages]))
    verdict = judge(records, rows, campaign.outages)
    result = Result.build(
        synchronous=cluster.synchronous,
        seed=seed,
        versions=collect_versions(cluster.versions),
        outages=campaign.outages,
        verdict=verdict,
        recoveries=recovery.measure_recovery(pick(records, Probe), campaign.outages),
        kept=recovery.count_kept(pick(records, Belief), campaign.outages),
    )
    result.violations += clients.faults
    result.violations += ["the rows were not judged"] if rows is None else []
    result.notes += campaign.notes
    result.notes += [f"{each.way}: {each.alive} jobs had not ended" for each in pick(records, Stop) if each.alive]
    return result


class _Campaign:
    """The strikes of one campaign.

    Attributes:
        outages: what has happened.
        notes: strikes that have failed.
    """

    def __init__(self, cluster: Cluster, chance: random.Random, report: Callable[[str], object]) -> None:
        self.outages: list[Outage] = []
        self.notes: list[str] = []
        self._cluster = cluster
        self._random = chance
        self._report = report

    @property
    def failovers(self) -> int:
        """How many failovers there were."""
        return sum(outage.leader_at is not None for outage in self.outages)

    def run(self, plan: Sequence[Strike], failovers: int) -> None:
        """Carry out the plan, and strikes in addition if some of it did not lead to a failover."""
        spare = [kind for kind in (Strike.SWITCHOVER, Strike.KILL_POSTMASTER) for _ in range(failovers // 10 + 1)]
        for number, kind in enumerate([*plan, *spare]):
            if number >= len(plan) and self.failovers >= failovers:
                return
            if reason := find_obstacle(self._cluster, kind):
                self._note(f"{kind.name} is not possible: {reason}")
                continue
            time.sleep(self._random.uniform(*REST))
            if not self._strike(kind):
                return

    def _strike(self, kind: Strike) -> bool:
        """Strike once, and return whether the cluster is ready again."""
        started = time.monotonic()
        try:
            record = strike(self._cluster, kind)
        except Exception as error:
            self.outages.append(Outage(kind.name, started))
            self._note(f"{kind.name} failed after {time.monotonic() - started:.0f} s: {error}")
            return self._wait_again()
        outage = Outage(kind.name, record.struck_at, record.leader_at, record.calm_at)
        self.outages.append(outage)
        leader = f"new leader after {record.leader_at - record.struck_at:.1f} s" if record.leader_at else "no failover"
        if kind not in FAILOVERS and record.new is not None:
            self._note(f"{kind.name} led to a failover from {record.old} to {record.new}")
        self._report(
            f"{self.failovers:3} {kind.name}: {record.old} to {record.new}, {leader},"
            f" calm after {record.calm_at - record.struck_at:.1f} s"
        )
        return True

    def read_rows(self) -> tables.Rows | None:
        """Return the rows, or None if the cluster does not return them."""
        end = time.monotonic() + SECOND_CHANCE
        while True:
            try:
                return tables.read_rows(self._cluster.admin_url())
            except SQLAlchemyError as error:
                if time.monotonic() > end:
                    self._note(f"the rows cannot be read and are not judged: {error}")
                    return None
                time.sleep(1)

    def _wait_again(self) -> bool:
        try:
            self._cluster.wait_until_ready(SECOND_CHANCE)
        except NotReadyError as error:
            self._note(f"the campaign ends early: {error}")
            return False
        return True

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._report(text)
