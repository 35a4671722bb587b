"""The result of a campaign, as JSON for the documentation."""

from __future__ import annotations

import json
import math
import platform
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from cluster.judge import LOCKS, name_overlaps
from cluster.recovery import BARS, TWO_PRIMARIES, summarize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from cluster.judge import Outage, Verdict
    from cluster.recovery import Recovery

_PACKAGES = ("pgfence", "sqlalchemy", "psycopg", "asyncpg")
_LONGEST_LIST = 100


def collect_versions(programs: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of programs and packages."""
    packages = {name: version(name) for name in _PACKAGES}
    return {**programs, "python": platform.python_version(), **packages}


@dataclass(slots=True)
class Result:
    """The result of one campaign or of several.

    Attributes:
        date: the day of the last one.
        mode: "synchronous" or "asynchronous".
        seeds: of each campaign.
        versions: of programs and packages.
        strikes: for each kind how many there were.
        leaders: for each kind the seconds until there was a new leader. Its length is the number of failovers.
        counts: how much was looked at.
        findings: how often each rule was broken. Overlaps of advisory locks, which are not violations, are included.
        findings_by_kind: the same for each kind of the last strike before, where the moment is known.
        overlaps: for each kind of advisory lock and of strike the seconds for which two handles said that they are held.
        kept: for each kind of strike how many long leases were kept, and how many were lost.
        recovery: for each kind of strike, way and primitive the seconds from the new leader to the first success, and to the
            first success after the last failure; None if there was none.
        violations: what must not happen.
        notes: strikes that failed or were not possible.
    """

    date: str
    mode: str
    seeds: list[int]
    versions: dict[str, str]
    strikes: dict[str, int] = field(default_factory=dict)
    leaders: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    findings: dict[str, int] = field(default_factory=dict)
    findings_by_kind: dict[str, dict[str, int]] = field(default_factory=dict)
    overlaps: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    kept: dict[str, list[int]] = field(default_factory=dict)
    recovery: dict[str, dict[str, dict[str, dict[str, list[float | None]]]]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def build(
        cls,
        *,
        synchronous: bool,
        seed: int,
        versions: dict[str, str],
        outages: Sequence[Outage],
        verdict: Verdict,
        recoveries: Iterable[Recovery],
        kept: Mapping[str, tuple[int, int]],
    ) -> Result:
        """Return the result of one campaign."""
        result = cls(
            datetime.now(UTC).date().isoformat(), "synchronous" if synchronous else "asynchronous", [seed], versions
        )
        result.strikes = dict(Counter(outage.kind for outage in outages))
        for outage in outages:
            if outage.leader_at is not None:
                result.leaders.setdefault(outage.kind, []).append(round(outage.leader_at - outage.struck_at, 2))
        result.counts = dict(verdict.counts)
        for finding in verdict.findings:
            kind_before = finding.outage or "unknown"
            result.findings[finding.rule] = result.findings.get(finding.rule, 0) + 1
            by_kind = result.findings_by_kind.setdefault(finding.rule, {})
            by_kind[kind_before] = by_kind.get(kind_before, 0) + 1
            for kind in LOCKS:
                if finding.rule == name_overlaps(kind):
                    by_outage = result.overlaps.setdefault(kind, {})
                    by_outage.setdefault(kind_before, []).append(finding.seconds or 0.0)
        result.kept = {kind: [*numbers] for kind, numbers in kept.items()}
        for one in recoveries:
            ways = result.recovery.setdefault(one.outage, {}).setdefault(one.way, {})
            times = ways.setdefault(one.primitive, {"first": [], "settled": []})
            times["first"].append(_make_finite(one.first))
            times["settled"].append(_make_finite(one.settled))
        found = verdict.list_violations(synchronous=synchronous)
        result.violations = [f"{each.rule}: {each.text} ({each.outage})" for each in found[:_LONGEST_LIST]]
        return result

    @property
    def failovers(self) -> int:
        """How many failovers there were."""
        return sum(len(times) for times in self.leaders.values())

    def summarize(self) -> dict[str, Any]:
        """Return medians and longest times: until the new leader, and from there to the first success.

        The times for each way and primitive, and those above the bar, are without outages in which the old primary goes on.
        """
        firsts: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        kinds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for kind, ways in self.recovery.items():
            for way, primitives in ways.items():
                for primitive, times in primitives.items():
                    seconds = [math.inf if each is None else each for each in times["first"]]
                    kinds[kind][way] += seconds
                    if kind not in TWO_PRIMARIES:
                        firsts[way][primitive] += seconds
        return {
            "failovers": self.failovers,
            "leader": {kind: summarize(times) for kind, times in self.leaders.items()},
            "recovery": {
                way: {primitive: summarize(times) for primitive, times in primitives.items()}
                for way, primitives in firsts.items()
            },
            "recovery by kind": {
                kind: {way: summarize(times) for way, times in ways.items()} for kind, ways in kinds.items()
            },
            "above the bar": {
                way: sum(each > BARS[way] for times in primitives.values() for each in times)
                for way, primitives in firsts.items()
            },
        }

    def write(self, path: Path) -> None:
        """Write the result and its summary."""
        path.write_text(json.dumps({"summary": self.summarize(), **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        """Return a result that was written before."""
        values = json.loads(path.read_text())
        del values["summary"]
        return cls(**values)


def merge_results(results: Sequence[Result]) -> Result:
    """Return one result for several campaigns in the same mode.

    Raises:
        ValueError: the modes are different.
    """
    if len({result.mode for result in results}) != 1:
        raise ValueError("results with synchronous and with asynchronous replication cannot be merged")
    merged = asdict(results[0])
    for result in results[1:]:
        values = asdict(result)
        values["kept"] = {
            kind: [a + b for a, b in zip(numbers, merged["kept"].get(kind, [0, 0]), strict=True)]
            for kind, numbers in values["kept"].items()
        }
        merged["kept"] = {kind: numbers for kind, numbers in merged["kept"].items() if kind not in values["kept"]}
        merged = _merge(merged, values)
    return Result(**merged)


def _merge(old: Any, new: Any) -> Any:
    """Add numbers, join lists, and keep the newer one of texts."""
    if isinstance(old, dict):
        return {
            key: _merge(old[key], new[key]) if key in old and key in new else old.get(key, new.get(key))
            for key in [*old, *(key for key in new if key not in old)]
        }
    if isinstance(old, int | list):
        return old + new
    return max(old, new)


def _make_finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
