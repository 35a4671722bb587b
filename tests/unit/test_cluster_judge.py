"""The judge of the cluster tests: it sees each planted violation, and none in a correct history."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cluster import judge, recovery
from cluster.campaign.result import Result, merge_results
from cluster.judge import Finding, Outage, Verdict
from cluster.records import (
    Answer,
    Belief,
    Failure,
    Grant,
    Probe,
    Record,
    Recorder,
    Step,
    Stop,
    Write,
    describe_error,
    read_records,
)
from cluster.tables import FencedRow, KeyRow, Rows, VersionRow

if TYPE_CHECKING:
    from pathlib import Path

OUTAGES = [Outage("SWITCHOVER", 100, 102, 110), Outage("PAUSE", 200, 222, 240)]
LOST = Failure("pgfence.UnreachableError")
DOUBT = Failure(judge.UNKNOWN)


def grant(at: float, token: int | None, who: str = "a", *, kind: str = "lease", slot: str | None = None) -> Grant:
    return Grant(way="psycopg", at=at, kind=kind, name="x", who=who, resource="x", token=token, asked=at, slot=slot)


def belief(
    start: float, end: float, who: str = "a", *, kind: str = "lease", limit: int = 1, how: str = "released"
) -> Belief:
    return Belief(
        way="psycopg", at=end + 0.01, kind=kind, name="x", who=who, start=start, end=end, how=how, limit=limit
    )


def write(table: str, row: str, failure: Failure | None = None, *, after_loss: bool = False) -> Write:
    return Write(
        way="psycopg", at=10, table=table, id=row, name="x", who="a", started=9, failure=failure, after_loss=after_loss
    )


def fenced(number: int, token: int, who: str = "a", name: str = "x") -> FencedRow:
    return FencedRow(f"{name}-{number}", name, number, token, who, "00000001")


CORRECT: tuple[list[Record], Rows] = (
    [
        grant(1, 1),
        belief(1, 2),
        grant(2.1, 2, "b"),
        belief(2.1, 3, "b"),
        grant(4, 7, kind="slot", slot="noon"),
        Belief(way="w", at=5, kind="slot", name="s", who="a", start=4, end=5, how="lost", slot="noon"),
        grant(12, 8, "b", kind="slot", slot="noon"),
        Belief(way="w", at=13, kind="slot", name="s", who="b", start=12, end=13, how="released", slot="noon"),
        belief(1, 3, "a", kind="permit", limit=2),
        belief(2, 4, "b", kind="permit", limit=2),
        belief(3.5, 5, "c", kind="permit", limit=2),
        belief(1.5, 1.5, "c", how="lost"),
        write("fenced", "x-1"),
        write("fenced", "x-2", DOUBT),
        write("fenced", "gone", LOST),
        write("fenced", "x-3", Failure("sqlalchemy.OperationalError"), after_loss=True),
        write("transaction", "t"),
        write("version", "v2"),
        write("claim", "c1"),
        write("key", "k1"),
        Answer(way="w", at=11, table="key", key="k", value=5),
        Answer(way="w", at=12, table="key", key="k", value=5),
        Answer(way="w", at=12, table="effect", key="e", value=6),
        Step(way="w", at=11, key="e"),
        Step(way="w", at=12, key="e"),
        Stop(way="w", at=30, alive=0),
    ],
    Rows(
        fenced=[fenced(1, 1), fenced(2, 1), fenced(3, 2, "b"), fenced(1, 9, "c", "y")],
        transactions={"t"},
        keys=[KeyRow("k", "k1", 5)],
        versions=[VersionRow("v2", "p", 2)],
        counters={"a": (1, 1)},
        pages={"p": 2, "q": 1},
        done={7: ["c1"], 8: ["c1"]},
    ),
)


def test_a_correct_history_has_no_findings() -> None:
    """Lost leases, permits within their number, doubtful commits and a slot with a second attempt are no violations."""
    verdict = judge.judge(*CORRECT, OUTAGES)
    assert verdict.findings == []
    expected = {"tokens": 4, "holds: lease": 3, "holds: permit": 3, "acknowledged: fenced": 1, "in doubt: fenced": 2}
    expected |= {"in doubt and committed: fenced": 2, "failed: fenced": 1, "steps called twice": 1, "slots": 1}
    assert {name: verdict.counts[name] for name in expected} == expected


BASE_RECORDS, BASE_ROWS = CORRECT
PLANTED: dict[str, tuple[str, list[Record], Rows]] = {
    "twice": (judge.TOKEN_TWICE, [grant(50, 8, "c")], BASE_ROWS),
    "fell": (judge.TOKEN_FELL, [grant(50, 9), grant(51, 3, "c")], BASE_ROWS),
    "lease": ("overlaps of lease", [belief(2.5, 2.6, "c")], BASE_ROWS),
    "term": ("overlaps of term", [belief(1, 5, kind="term"), belief(2, 3, "b", kind="term")], BASE_ROWS),
    "permits": ("overlaps of permit", [belief(2.5, 2.8, "d", kind="permit", limit=2)], BASE_ROWS),
    "stale": (judge.STALE, [], replace(BASE_ROWS, fenced=[*BASE_ROWS.fenced, fenced(4, 1)])),
    "two writers": (judge.STALE, [], replace(BASE_ROWS, fenced=[*BASE_ROWS.fenced, fenced(4, 2, "c")])),
    "gap": (judge.GAPS, [], replace(BASE_ROWS, fenced=[*BASE_ROWS.fenced, fenced(5, 3, "c")])),
    "lost write": ("acknowledged and lost: fenced", [write("fenced", "gone")], BASE_ROWS),
    "lost transaction": ("acknowledged and lost: transaction", [write("transaction", "gone")], BASE_ROWS),
    "lost key": ("acknowledged and lost: key", [write("key", "gone")], BASE_ROWS),
    "lost version": ("acknowledged and lost: version", [write("version", "gone")], BASE_ROWS),
    "committed": ("committed in spite of an error: fenced", [write("fenced", "x-1", LOST)], BASE_ROWS),
    "committed after a loss": (
        "committed in spite of an error: fenced",
        [write("fenced", "x-1", Failure("pgfence.StaleFencingTokenError"), after_loss=True)],
        BASE_ROWS,
    ),
    "slot done twice": (
        judge.SLOT_TWICE,
        [Belief(way="w", at=13, kind="slot", name="z", who="c", start=12, end=13, how="released", slot="noon")],
        BASE_ROWS,
    ),
    "slot begun again": (judge.SLOT_AGAIN, [grant(20, 9, kind="slot", slot="noon")], BASE_ROWS),
    "two answers": (judge.TWO_ANSWERS, [Answer(way="w", at=15, table="effect", key="e", value=7)], BASE_ROWS),
    "key twice": (judge.KEY_ROWS, [], replace(BASE_ROWS, keys=[*BASE_ROWS.keys, KeyRow("k", "k2", 5)])),
    "other answer": (judge.KEY_ROWS, [], replace(BASE_ROWS, keys=[KeyRow("k", "k1", 4)])),
    "version twice": (
        judge.VERSION_TWICE,
        [],
        replace(BASE_ROWS, versions=[*BASE_ROWS.versions, VersionRow("v3", "p", 2)]),
    ),
    "lost claim": ("acknowledged and lost: claim", [write("claim", "gone")], BASE_ROWS),
    "job twice": (judge.JOB_TWICE, [], replace(BASE_ROWS, done={7: ["c1"], 8: ["c1", "c2"]})),
    "counter": (judge.COUNTERS, [], replace(BASE_ROWS, counters={"a": (2, 1)})),
}


@pytest.mark.parametrize("case", PLANTED)
def test_the_judge_sees_a_planted_violation(case: str) -> None:
    """Each violation is found under its own rule, and no other rule is broken by it."""
    rule, records, rows = PLANTED[case]
    verdict = judge.judge(sorted([*BASE_RECORDS, *records], key=lambda each: each.at), rows, OUTAGES)
    assert {each.rule for each in verdict.findings} == {rule}
    assert verdict.list_violations(synchronous=True) == verdict.findings


@pytest.mark.parametrize(
    ("at", "seconds", "kind", "rule"),
    [
        (50, 0.5, "lock", "overlaps of lock after a clean end"),
        (100.5, 0.5, "lock", "overlaps of lock"),
        (100.5, 1.5, "lock", "overlaps of lock after a clean end"),
        (105, 0.5, "token lock", "overlaps of token lock after a clean end"),
        (225, 2, "lock", "overlaps of lock"),
    ],
)
def test_overlaps_of_advisory_locks_are_counted(at: float, seconds: float, kind: str, rule: str) -> None:
    """They are violations unless the last outage has left the old primary running, or it is ending at this moment."""
    beliefs = [belief(at - 1, at + seconds, kind=kind), belief(at, at + 5, "b", kind=kind)]
    (found,) = judge.judge(beliefs, None, OUTAGES).findings
    assert (found.rule, found.seconds) == (rule, seconds)
    assert found.outage == (None if at < 100 else "SWITCHOVER" if at < 200 else "PAUSE")
    assert len(Verdict([found]).list_violations(synchronous=True)) == ("clean" in rule)


def test_asynchronous_replication_may_lose_commits() -> None:
    """Without synchronous replication only rules about the surviving timeline must hold."""
    verdict = Verdict([Finding("acknowledged and lost: fenced", ""), Finding(judge.STALE, ""), Finding(judge.GAPS, "")])
    assert [each.rule for each in verdict.list_violations(synchronous=False)] == [judge.STALE, judge.GAPS]


def test_recovery_is_measured_from_the_new_leader() -> None:
    """The first success after the new leader counts; a later failure moves only the second figure."""

    def probe(started: float, at: float, failure: Failure | None = None) -> Probe:
        return Probe(way="haproxy", at=at, primitive="lease", started=started, failure=failure)

    probes = [
        probe(99, 99.1),
        probe(101, 101.5, LOST),
        probe(102.1, 102.5),
        probe(102.7, 103, LOST),
        probe(103, 104),
        probe(210, 220, LOST),
        probe(221, 221.9),
        probe(190, 223, LOST),
    ]
    first, second = recovery.measure_recovery(probes, OUTAGES)
    assert (first.first, first.settled, first.failures, first.longest) == (0.5, 2, 2, 1)
    assert (second.outage, second.first) == ("PAUSE", float("inf"))
    assert recovery.summarize([first.first, 2.5, 1]) == {"number": 3, "median": 1, "longest": 2.5}
    assert recovery.summarize([second.first])["longest"] is None


def test_long_leases_are_kept_or_lost() -> None:
    """A lease counts as kept if it is held until the cluster is calm, or is released."""
    kept, lost = (replace(belief(90, end, how=how), name="long-0") for end, how in ((150, "unfinished"), (101, "lost")))
    assert recovery.count_kept([kept, lost, belief(90, 150)], OUTAGES) == {"SWITCHOVER": (1, 1), "PAUSE": (0, 0)}


def test_results_of_campaigns_are_merged(tmp_path: Path) -> None:
    """Lists of times are joined and numbers added; results in different modes are rejected."""
    verdict = Verdict(
        [Finding("overlaps of lock", "", outage="PAUSE", seconds=4.0), Finding(judge.STALE, "x")], Counter(tokens=3)
    )
    times = recovery.measure_recovery([Probe(way="asyncpg", at=103, primitive="sql", started=102)], OUTAGES)
    result = Result.build(
        synchronous=True,
        seed=1,
        versions={"pgfence": "1"},
        outages=OUTAGES,
        verdict=verdict,
        recoveries=times,
        kept={"PAUSE": (2, 1)},
    )
    path = tmp_path / "result.json"
    result.write(path)
    merged = merge_results([result, replace(Result.read(path), seeds=[2])])
    assert (merged.seeds, merged.failovers, merged.counts) == ([1, 2], 4, {"tokens": 6})
    assert merged.strikes == {"SWITCHOVER": 2, "PAUSE": 2}
    assert merged.kept == {"PAUSE": [4, 2]}
    assert merged.findings == {"overlaps of lock": 2, judge.STALE: 2}
    assert merged.findings_by_kind == {"overlaps of lock": {"PAUSE": 2}, judge.STALE: {"unknown": 2}}
    assert merged.overlaps == {"lock": {"PAUSE": [4.0, 4.0]}}
    assert merged.recovery["SWITCHOVER"]["asyncpg"]["sql"]["first"] == [1, 1]
    assert merged.recovery["PAUSE"]["asyncpg"]["sql"]["first"] == [None, None]
    assert merged.summarize()["above the bar"] == {"asyncpg": 2}
    assert len(merged.violations) == 2
    with pytest.raises(ValueError, match="cannot be merged"):
        merge_results([result, replace(result, mode="asynchronous")])


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    """All fields of a record survive the file, and an incomplete last line is left out."""
    path = tmp_path / "records"
    recorder = Recorder(path, "asyncpg")
    failure = describe_error(ValueError("no\n  such value"))
    recorder.write(Probe, primitive="sql", started=1.5, failure=failure)
    recorder.write(Stop, alive=2)
    recorder.close()
    with path.open("a") as file:
        file.write('{"type":"Sto')
    probe, stop = read_records([path])
    assert isinstance(probe, Probe)
    assert probe.failure == Failure("builtins.ValueError", message="no such value")
    assert (probe.way, probe.primitive, probe.started) == ("asyncpg", "sql", 1.5)
    assert isinstance(stop, Stop)
    assert stop.alive == 2
