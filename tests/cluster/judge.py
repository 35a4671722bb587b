"""Says which guarantees were broken, from the records of the clients and the rows of the database after a run.

`judge` needs neither a cluster nor a server.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from cluster.records import Answer, Belief, Grant, Record, Step, Write
from pgfence.testing._history import Entry, judge_history

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from cluster.tables import Rows

R = TypeVar("R", bound=Record)
K = TypeVar("K", bound="Hashable")

LEASES = ("lease", "slot", "term", "permit", "partition")
"""Kinds of which never more than allowed may be held."""
LOCKS = ("lock", "token lock")
"""Kinds that are held on one primary, and can overlap if a former primary does not end."""
CLEAN = frozenset({"SWITCHOVER", "KILL_POSTMASTER", "KILL_MACHINE"})
"""Outages in which the sessions of the old primary end before the promotion."""
NOTICE = 1.0
"""Seconds for which two holders can overlap on a primary that ends: it ends sessions one by one, and a holder is notified a
little later than the next one gets the lock."""
UNKNOWN = "pgfence.CommitOutcomeUnknownError"

TOKEN_TWICE = "tokens given out twice"
TOKEN_FELL = "tokens below an earlier one"
STALE = "stale fenced writes"
GAPS = "numbers with gaps"
SLOT_TWICE = "slots done twice"
SLOT_AGAIN = "slots begun after they were done"
TWO_ANSWERS = "keys with two answers"
KEY_ROWS = "keys whose rows do not match the answer"
VERSION_TWICE = "versions written twice"
COUNTERS = "counters that do not match"
JOB_TWICE = "jobs done twice"
FATAL_IF_ASYNCHRONOUS = frozenset({STALE, GAPS, VERSION_TWICE, COUNTERS, JOB_TWICE})
"""With asynchronous replication an acknowledged commit can be lost. These rules hold on the surviving timeline all the same."""


def name_overlaps(kind: str) -> str:
    """Return the rule about holders at the same time."""
    return f"overlaps of {kind}"


def name_clean_overlaps(kind: str) -> str:
    """Return the rule about holders at the same time though the old primary ended."""
    return f"overlaps of {kind} after a clean end"


def name_lost(table: str) -> str:
    """Return the rule about acknowledged rows that are missing."""
    return f"acknowledged and lost: {table}"


def name_committed(table: str) -> str:
    """Return the rule about rows whose transaction has raised an error."""
    return f"committed in spite of an error: {table}"


@dataclass(frozen=True, slots=True)
class Outage:
    """A strike at the cluster, with moments of CLOCK_MONOTONIC.

    Attributes:
        kind: the name of the strike.
        leader_at: when there was a new leader; None if there was no failover.
        calm_at: when all members were well again; None if that was not seen.
    """

    kind: str
    struck_at: float
    leader_at: float | None = None
    calm_at: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A guarantee that was broken, or an overlap of advisory locks.

    Attributes:
        rule: which one.
        text: what happened.
        at: when, if that is known.
        outage: the kind of the last strike before it.
        seconds: how long it lasted, for an overlap.
    """

    rule: str
    text: str
    at: float | None = None
    outage: str | None = None
    seconds: float | None = None


@dataclass(slots=True)
class Verdict:
    """The findings, and how much was looked at."""

    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def list_violations(self, *, synchronous: bool) -> list[Finding]:
        """Return the findings that must not exist."""
        counted = {name_overlaps(kind) for kind in LOCKS}
        return [
            each
            for each in self.findings
            if each.rule not in counted and (synchronous or each.rule in FATAL_IF_ASYNCHRONOUS)
        ]


def judge(records: Sequence[Record], rows: Rows | None, outages: Sequence[Outage]) -> Verdict:
    """Return what was broken. Without rows only what the clients believed is judged."""
    verdict = Verdict()
    found = check_tokens(pick(records, Grant), verdict.counts)
    found += check_beliefs(pick(records, Belief), outages, verdict.counts)
    found += check_slots(pick(records, Grant), pick(records, Belief), verdict.counts)
    if rows is not None:
        found += check_fenced_rows(rows, verdict.counts)
        found += check_writes(pick(records, Write), rows, verdict.counts)
        found += check_answers(pick(records, Answer), rows, verdict.counts)
        found += check_versions(rows, verdict.counts)
    verdict.findings = [
        each if each.at is None else replace(each, outage=find_outage(outages, each.at)) for each in found
    ]
    steps = Counter(step.key for step in pick(records, Step))
    verdict.counts["steps"] = len(steps)
    verdict.counts["steps called twice"] = sum(number > 1 for number in steps.values())
    return verdict


def pick(records: Iterable[Record], kind: type[R]) -> list[R]:
    """Return the records of one type."""
    return [record for record in records if isinstance(record, kind)]


def find_outage(outages: Iterable[Outage], at: float) -> str | None:
    """Return the kind of the last strike before a moment."""
    return max(((each.struck_at, each.kind) for each in outages if each.struck_at <= at), default=(0.0, None))[1]


def is_unexplained(outages: Iterable[Outage], at: float, seconds: float) -> bool:
    """Return whether an overlap of advisory locks cannot be explained by the last strike before it."""
    last = max((each for each in outages if each.struck_at <= at), key=lambda each: each.struck_at, default=None)
    if last is None or (last.kind in CLEAN and (last.leader_at is None or at >= last.leader_at)):
        return True
    return last.kind in CLEAN and seconds > NOTICE


def group(items: Iterable[tuple[K, R]]) -> dict[K, list[R]]:
    """Return the values of each key."""
    found: dict[K, list[R]] = defaultdict(list)
    for key, value in items:
        found[key].append(value)
    return found


def check_tokens(grants: Sequence[Grant], counts: Counter[str]) -> list[Finding]:
    """Find tokens that were given out twice, or are not above one that was granted before they were requested."""
    found = []
    tokens = group((grant.resource, grant) for grant in grants if grant.token is not None)
    for resource, series in tokens.items():
        counts["tokens"] += len(series)
        for token, same in group((grant.token, grant) for grant in series).items():
            if len(same) > 1:
                owners = ", ".join(grant.who for grant in same)
                found.append(Finding(TOKEN_TWICE, f"token {token} of {resource!r} was given to {owners}", same[-1].at))
        highest: Grant | None = None
        for grant in series:
            if highest is not None and (grant.token or 0) < (highest.token or 0):
                text = f"{grant.who} got token {grant.token} of {resource!r} after {highest.who} had {highest.token}"
                found.append(Finding(TOKEN_FELL, text, grant.at))
            else:
                highest = grant
    return found


def check_beliefs(beliefs: Sequence[Belief], outages: Sequence[Outage], counts: Counter[str]) -> list[Finding]:
    """Find moments at which more handles than allowed said that they are held."""
    found = []
    for (kind, name), holds in group(((each.kind, each.name), each) for each in beliefs).items():
        counts[f"holds: {kind}"] += len(holds)
        present: list[Belief] = []
        # A hold that was lost before the first sample never said that it is held.
        for each in sorted((hold for hold in holds if hold.end > hold.start), key=lambda hold: hold.start):
            present = [other for other in present if other.end > each.start]
            if len(present) >= each.limit:
                seconds = min(each.end, *sorted(other.end for other in present)[-each.limit :]) - each.start
                others = ", ".join(f"{other.who} ({other.token})" for other in present)
                is_wrong = kind in LOCKS and is_unexplained(outages, each.start, seconds)
                rule = name_clean_overlaps(kind) if is_wrong else name_overlaps(kind)
                text = f"{name!r}: {each.who} ({each.token}) beside {others} for {seconds:.3f} s at {each.start:.3f}"
                found.append(Finding(rule, text, each.start, seconds=round(seconds, 3)))
            present.append(each)
    return found


def check_fenced_rows(rows: Rows, counts: Counter[str]) -> list[Finding]:
    """Find writes under an older token after a newer one, tokens with two writers, and missing numbers."""
    found = []
    counts["fenced rows"] = len(rows.fenced)
    names: dict[str, list[int]] = defaultdict(list)
    ordered = sorted(rows.fenced, key=lambda row: (row.name, row.number))
    for row in ordered:
        names[row.name].append(row.number)
    wrong, _ = judge_history(Entry(row.name, row.who, "enter", row.token) for row in ordered)
    found = [Finding(STALE, text) for text in wrong]
    for name, numbers in names.items():
        if numbers != list(range(1, len(numbers) + 1)):
            gap = next((a, b) for a, b in pairwise([0, *numbers]) if b != a + 1)
            found.append(Finding(GAPS, f"{name!r}: number {gap[1]} follows {gap[0]}"))
    return found


def check_writes(writes: Sequence[Write], rows: Rows, counts: Counter[str]) -> list[Finding]:
    """Find acknowledged rows that are missing, and rows whose transaction has raised an error."""
    found = []
    for table in ("fenced", "transaction", "key", "version", "claim"):
        present = rows.list_ids(table)
        for write in writes:
            if write.table != table or not write.ran:
                continue
            text = f"{write.who}, row {write.id}"
            if write.failure is None:
                counts[f"acknowledged: {table}"] += 1
                if write.id not in present:
                    found.append(Finding(name_lost(table), text, write.at))
            elif is_doubtful(write):
                counts[f"in doubt: {table}"] += 1
                counts[f"in doubt and committed: {table}"] += write.id in present
            else:
                counts[f"failed: {table}"] += 1
                if write.id in present:
                    found.append(Finding(name_committed(table), f"{text}: {write.failure}", write.at))
    return found


def is_doubtful(write: Write) -> bool:
    """Return whether the error leaves open whether the transaction was committed.

    A write after a loss commits with SQLAlchemy alone, whose errors do not distinguish a COMMIT without a response.
    """
    assert write.failure is not None
    return write.failure.error == UNKNOWN or (write.after_loss and not write.failure.error.startswith("pgfence."))


def check_slots(grants: Sequence[Grant], beliefs: Sequence[Belief], counts: Counter[str]) -> list[Finding]:
    """Find slots that were done twice, or begun after they were done."""
    found = []
    begun = group((grant.slot, grant) for grant in grants if grant.slot is not None)
    done = group((each.slot, each) for each in beliefs if each.slot is not None and each.how == "released")
    counts["slots"] = len(begun)
    counts["slots with several attempts"] = sum(len(attempts) > 1 for attempts in begun.values())
    for slot, ends in done.items():
        if len(ends) > 1:
            found.append(Finding(SLOT_TWICE, f"{slot} was done by {', '.join(each.who for each in ends)}", ends[-1].at))
        first = min(each.at for each in ends)
        found += [
            Finding(SLOT_AGAIN, f"{grant.who} began {slot} {grant.at - first:.3f} s after it was done", grant.at)
            for grant in begun[slot]
            if grant.at > first
        ]
    return found


def check_answers(answers: Sequence[Answer], rows: Rows, counts: Counter[str]) -> list[Finding]:
    """Find keys with two answers, and idempotency keys whose work was committed twice or is not what was returned."""
    found = []
    values: dict[tuple[str, str], set[int]] = defaultdict(set)
    for answer in answers:
        values[answer.table, answer.key].add(answer.value)
    for (table, key), different in values.items():
        counts[f"answered: {table}"] += 1
        if len(different) > 1:
            found.append(Finding(TWO_ANSWERS, f"{table} {key}: {sorted(different)}"))
    stored: dict[str, list[int]] = defaultdict(list)
    for row in rows.keys:
        stored[row.key].append(row.value)
    for key, inserted in stored.items():
        given = values.get(("key", key), set())
        if len(inserted) > 1 or not given <= {*inserted}:
            found.append(Finding(KEY_ROWS, f"{key}: rows {inserted}, answers {sorted(given)}"))
    return found


def check_versions(rows: Rows, counts: Counter[str]) -> list[Finding]:
    """Find versions that were written twice or never, counters that do not match, and jobs that were claimed twice."""
    counts["versions"] = len(rows.versions)
    counts["jobs"] = len(rows.done)
    found = [Finding(JOB_TWICE, f"job {job} by {ids}") for job, ids in rows.done.items() if len(ids) > 1]
    written: dict[str, list[int]] = defaultdict(list)
    for row in rows.versions:
        written[row.name].append(row.version)
    for name, versions in written.items():
        if sorted(versions) != list(range(2, rows.pages[name] + 1)):
            found.append(Finding(VERSION_TWICE, f"{name} is at {rows.pages[name]}, written were {sorted(versions)}"))
    found += [
        Finding(COUNTERS, f"{name} is {number} after {count} transactions")
        for name, (number, count) in rows.counters.items()
        if number != count
    ]
    return found
