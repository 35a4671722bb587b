"""Measures how long each primitive was out of use, and which leases survived."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.judge import Outage
    from cluster.records import Belief, Probe

BARS = {"psycopg": 2.0, "haproxy": 2.0, "pgbouncer": math.inf, "asyncpg": 5.0}
"""Seconds from the new leader to the first success, at most."""
TWO_PRIMARIES = frozenset({"STOP_PATRONI"})
"""Outages in which the old primary goes on, without a watchdog. A client that reaches it first waits there until it ends."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What one primitive did in one failover.

    Attributes:
        outage: the kind of the strike.
        first: seconds from the new leader to the end of the first success; infinite if there was none until the next strike.
        settled: seconds from the new leader to the first success after the last failure.
        failures: how many probes failed.
        longest: seconds of the longest probe.
    """

    outage: str
    way: str
    primitive: str
    first: float
    settled: float
    failures: int
    longest: float


def measure_recovery(probes: Iterable[Probe], outages: Sequence[Outage]) -> list[Recovery]:
    """Return the times of all failovers."""
    series: dict[tuple[str, str], list[Probe]] = defaultdict(list)
    for probe in probes:
        series[probe.way, probe.primitive].append(probe)
    found = []
    for number, outage in enumerate(outages):
        if outage.leader_at is None:
            continue
        end = outages[number + 1].struck_at if number + 1 < len(outages) else math.inf
        # A probe that runs when the next strike comes belongs to that one.
        for (way, primitive), all_probes in sorted(series.items()):
            during = [probe for probe in all_probes if outage.struck_at < probe.at < end]
            found.append(_measure(outage, outage.leader_at, way, primitive, during))
    return found


def _measure(outage: Outage, leader_at: float, way: str, primitive: str, probes: list[Probe]) -> Recovery:
    failed = [probe.at for probe in probes if probe.failure is not None]
    last = max([*failed, leader_at])
    successes = [probe.at for probe in probes if probe.failure is None and probe.at > leader_at]
    settled = [at for at in successes if at >= last]
    return Recovery(
        outage=outage.kind,
        way=way,
        primitive=primitive,
        first=round(min(successes, default=math.inf) - leader_at, 2),
        settled=round(min(settled, default=math.inf) - leader_at, 2),
        failures=len(failed),
        longest=round(max((probe.at - probe.started for probe in probes), default=0.0), 2),
    )


def count_kept(beliefs: Iterable[Belief], outages: Iterable[Outage]) -> dict[str, tuple[int, int]]:
    """Return for each kind of strike how many long leases were kept over the failover, and how many were lost."""
    long = [each for each in beliefs if each.kind == "lease" and each.name.startswith("long-")]
    found: dict[str, tuple[int, int]] = {}
    for outage in outages:
        if outage.leader_at is None:
            continue
        end = outage.calm_at or outage.leader_at
        held = [each for each in long if each.start < outage.struck_at < each.end]
        kept = sum(each.how != "lost" or each.end > end for each in held)
        before = found.get(outage.kind, (0, 0))
        found[outage.kind] = (before[0] + kept, before[1] + len(held) - kept)
    return found


def summarize(values: Iterable[float]) -> dict[str, float | int | None]:
    """Return the number of values, their median and the longest; None if it is infinite."""
    ordered = sorted(values)
    if not ordered:
        return {"number": 0, "median": None, "longest": None}
    middle, longest = statistics.median(ordered), ordered[-1]
    return {
        "number": len(ordered),
        "median": round(middle, 2) if math.isfinite(middle) else None,
        "longest": round(longest, 2) if math.isfinite(longest) else None,
    }
