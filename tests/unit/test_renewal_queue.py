"""What the heartbeat does when, without a clock or a server: one queue, and a time that the test moves."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pgfence._holds.queue import Contender, LocalQueue, QueueEntry
from pgfence._leases import grant as grants
from pgfence._leases import terms
from pgfence._leases.heartbeat.queue import LISTEN_AFTER, RenewalQueue
from pgfence._leases.heartbeat.tasks import LINGER, CheckTask, ListenTask, NotifyListeners, ReleaseTask, RenewTask
from pgfence._leases.request import Granted, LeaseRequest
from pgfence._leases.terms import LeaseTerms
from pgfence._sql.lease import BATCH, LeaseResult
from pgfence._sql.storage import TableNames
from pgfence.config import Config

HERE, THERE = TableNames(), TableNames("tenant")
EXPIRES = datetime(2030, 1, 1, tzinfo=UTC)


class Clock:
    """The time of one test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that grants look at."""
    clock = Clock()
    monkeypatch.setattr(grants, "clock", clock)
    return clock


def make(now: float, ttl: float, *, heartbeat: Any = "auto", place: TableNames = HERE, name: str = "n") -> grants.Grant:
    """Return a grant that the server gave at this moment."""
    claim = LeaseRequest(stored=name, place=place, terms=LeaseTerms(ttl), heartbeat=heartbeat)
    ticket = QueueEntry((name,), Contender("thread"), LocalQueue())
    return grants.Grant(
        claim, Granted(7, EXPIRES, ttl, None, None), ticket, lease_id=UUID(int=1), started=now, config=Config()
    )


def renewals(queue: RenewalQueue, now: float) -> list[RenewTask]:
    """Return all renewals that are due."""
    queue.take(now)
    found: list[RenewTask] = []
    while isinstance(task := queue.pick(now), RenewTask):
        found.append(task)
    assert task is None or isinstance(task, ListenTask)
    return found


def test_thousands_of_leases_become_few_statements(now: Clock) -> None:
    """Leases acquired within a quarter of an interval are renewed together, 500 at a time."""
    queue = RenewalQueue()
    for n in range(2 * BATCH + 1):
        queue.schedule.plan(make(now.now + n / 1000, 30, name=str(n)))
    assert renewals(queue, now.now + 9.9) == []
    assert [len(task.requests) for task in renewals(queue, now.now + 10)] == [BATCH, BATCH, 1]
    assert renewals(queue, now.now + 11) == []


def test_each_set_of_tables_has_its_own_statements(now: Clock) -> None:
    """Tenants share the connection, not the statement, and none waits for all grants of another."""
    queue = RenewalQueue()
    for n in range(BATCH + 1):
        queue.schedule.plan(make(now.now, 30, name=str(n)))
    queue.schedule.plan(make(now.now, 30, place=THERE))
    assert [(c.place, len(c.requests)) for c in renewals(queue, now.now + 10)] == [(HERE, BATCH), (THERE, 1), (HERE, 1)]


def test_a_failure_is_tried_again_with_everything_that_waits(now: Clock) -> None:
    """C082: no grant is lost by it; all are in doubt, and the pause is short for the shortest TTL."""
    queue = RenewalQueue()
    short, long = make(now.now, 0.3, name="short"), make(now.now, 30, name="long")
    answers: list[Exception | None] = []
    queue.schedule.plan(short)
    queue.schedule.plan(long)
    assert queue.request_renewal(long, None, answers.append)
    now.now += 0.1
    [task] = renewals(queue, now.now)
    requests = queue.note_failure(task, now.now)
    assert [short.state, long.state] == ["unknown", "unknown"]
    assert len(requests) == 1
    assert now.now < queue.retry_at <= now.now + 0.03
    [again] = renewals(queue, queue.retry_at)
    assert set(again.requests) == {short, long}
    again.started = now.now
    for grant in again.requests:
        queue.note_answer(again, grant, LeaseResult("ok", grant.ttl, EXPIRES), now.now)
    assert [short.state, long.state] == ["held", "held"]


def test_a_locked_row_is_asked_for_again_without_a_loss(now: Clock) -> None:
    """The caller that requested a renewal keeps waiting, and later requests are not lost either."""
    queue = RenewalQueue()
    grant = make(now.now, 30, heartbeat="progress")
    queue.schedule.plan(grant)
    first: list[Exception | None] = []
    second: list[Exception | None] = []
    queue.request_renewal(grant, 40.0, first.append)
    [task] = renewals(queue, now.now)
    queue.request_renewal(grant, None, second.append)
    assert queue.note_answer(task, grant, LeaseResult("busy"), now.now) is None
    now.now += 1
    [again] = renewals(queue, now.now)
    assert again.get_ttl(grant) == 40.0
    again.started = now.now
    request = queue.note_answer(again, grant, LeaseResult("ok", 40.0, EXPIRES), now.now)
    assert request is not None
    request.finish(None)
    assert (first, second) == ([None], [None])
    assert grant.ttl == 40.0


def test_an_ending_is_tried_until_the_ttl_is_over(now: Clock) -> None:
    """A release without a response is repeated with growing pauses, and then left to the TTL."""
    queue = RenewalQueue()
    queue.releases.append(ReleaseTask(HERE, lambda sql: sql.release, (), now.now + 60))
    tries = 0
    while (task := queue.pick(now.now)) is not None or queue.releases:
        if task is not None:
            tries += 1
            queue.note_failure(task, now.now)
        now.now += 0.5
    assert 40 < tries < 140
    assert now.now <= 1000 + 61


def test_a_channel_is_listened_to_as_long_as_it_has_waiters() -> None:
    """Waiters that come and go do not cause a statement each."""
    listeners, woken = NotifyListeners(), []
    assert listeners.add(HERE, "a", lambda: woken.append("a"))
    on = listeners.choose_change(0.0)
    assert isinstance(on, ListenTask) and on.on
    assert len(listeners.note_change(on)) == 1
    assert listeners.choose_change(0.0) is None
    wake = listeners.waiters_of(HERE.channel, "a")[0]
    listeners.remove(HERE, "a", wake, 5.0)
    listeners.remove(HERE, "a", wake, 5.0)
    assert not listeners
    assert listeners.choose_change(5.0 + LINGER) is None
    assert not listeners.add(HERE, "b", lambda: None)
    assert listeners.choose_change(6.0 + LINGER) is None
    listeners.remove(HERE, "b", listeners.waiters_of(HERE.channel, "b")[0], 20.0)
    off = listeners.choose_change(20.1 + LINGER)
    assert off is not None and not off.on
    assert listeners.note_change(off) == []
    assert listeners.choose_change(99.0) is None


def test_a_term_is_listened_for_immediately(now: Clock) -> None:
    """A leader that was elected just now can be asked to resign; other leases are listened for after a second."""
    queue = RenewalQueue()
    queue.keep(make(now.now, 3600), now.now)
    assert not queue.needs_listening(now.now)
    term = make(now.now, 3600)
    term.kind = "term"
    queue.keep(term, now.now)
    assert queue.needs_listening(now.now)


def test_evictions_are_listened_to_once_for_all_leases(now: Clock) -> None:
    """After a second with leases, by one LISTEN for each prefix; then all are checked, later those that are named."""
    queue = RenewalQueue()
    leases = [make(now.now, 3600, heartbeat="manual", name=name) for name in "abc"]
    leases += [make(now.now, 3600, heartbeat="manual", place=THERE), make(now.now, 3600, name="renewed")]
    for each in leases:
        queue.keep(each, now.now)
    assert not queue.needs_listening(now.now)
    now.now += LISTEN_AFTER
    assert queue.needs_listening(now.now)
    task = queue.pick(now.now)
    assert isinstance(task, ListenTask) and task.on
    queue.note_listening(task)
    renewal = queue.pick(now.now)
    checks = [queue.pick(now.now), queue.pick(now.now)]
    assert isinstance(renewal, RenewTask) and list(renewal.requests) == leases[4:]
    found = [isinstance(check, CheckTask) and sorted(each.stored for each in check.grants) for check in checks]
    assert sorted(found) == [["a", "b", "c"], ["n"]]
    assert queue.pick(now.now) is None
    assert not queue.needs_listening(now.now)
    assert queue.check_later(HERE.evictions, "b") and not queue.check_later(HERE.evictions, "x")
    check = queue.pick(now.now)
    assert isinstance(check, CheckTask) and check.grants == [leases[1]]
    for each in leases:
        queue.drop(each)
    assert queue.pick(now.now) is None
    off = queue.pick(now.now + 2 * LINGER)
    assert isinstance(off, ListenTask) and not off.on


def test_a_flood_of_notifications_does_not_keep_a_renewal_waiting(now: Clock) -> None:
    """Leases without a heartbeat are checked for each notification, but after the renewals that are due."""
    queue = RenewalQueue()
    queue.keep(make(now.now, 3600, heartbeat="manual", name="flooded"), now.now)
    renewed = make(now.now, 3600, name="renewed")
    queue.keep(renewed, now.now)
    queue.check_later(HERE.evictions, "flooded")
    assert isinstance(queue.pick(now.now), CheckTask)
    queue.check_later(HERE.evictions, "flooded")
    queue.request_renewal(renewed, None, lambda _: None)
    assert isinstance(queue.pick(now.now), RenewTask)
    assert isinstance(queue.pick(now.now), CheckTask)


def test_nothing_is_listened_to_where_no_notification_comes_through(now: Clock) -> None:
    """If a pooler was declared or detected, neither a connection nor a LISTEN is needed."""
    declared, found = RenewalQueue(listens=False), RenewalQueue()
    found.listeners.deaf = True
    for queue in (declared, found):
        queue.keep(make(now.now, 3600), now.now)
        assert not queue.needs_listening(now.now + 60)
    assert declared.pick(now.now + 60) is None


def test_the_server_says_when_max_hold_ends_a_lease(now: Clock) -> None:
    """C083: fewer seconds than the TTL mean that no renewal helps any more: no beat follows, and the reason is "overdue"."""
    grant = make(now.now, 10)
    assert grant.note_renewed(now.now, 10, EXPIRES, 10)
    assert grant.next_renewal < math.inf
    assert grant.note_renewed(now.now, 4, EXPIRES, 10)
    assert grant.next_renewal == math.inf
    now.now += 3.6
    assert grant.loss_reason == "overdue"


class Schedules(RuleBasedStateMachine):
    """Any order of keeping, dropping, renewals, responses, failures and passing time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.before = grants.clock
        grants.clock = self.clock
        self.queue = RenewalQueue()
        self.kept: list[grants.Grant] = []
        self.at_work: list[RenewTask] = []
        self.answered = 0
        self.wished = 0

    def teardown(self) -> None:
        grants.clock = self.before

    def told(self, request: Any) -> None:
        if request is not None:
            self.answered += len(request.done)

    @rule(ttl=st.floats(0.3, 60), heartbeat=st.sampled_from(["auto", "progress", "manual"]))
    def keep(self, ttl: float, heartbeat: str) -> None:
        grant = make(self.clock.now, ttl, heartbeat=heartbeat)
        self.kept.append(grant)
        self.queue.schedule.plan(grant)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.kept:
            grant = data.draw(st.sampled_from(self.kept))
            self.kept.remove(grant)
            self.told(self.queue.drop(grant))

    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        if self.kept:
            grant = data.draw(st.sampled_from(self.kept))
            grant.progress()
            self.queue.make_up(grant, self.clock.now)

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        if self.kept and self.queue.request_renewal(data.draw(st.sampled_from(self.kept)), None, lambda _: None):
            self.wished += 1

    @rule(seconds=st.floats(0, 20))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        _, over = self.queue.take(self.clock.now)
        for grant, request in over:
            assert self.clock.now >= grant.deadline
            assert grant.state == "lost"
            self.kept.remove(grant)
            self.told(request)

    @rule()
    def send(self) -> None:
        if not self.at_work and isinstance(task := self.queue.pick(self.clock.now), RenewTask):
            task.started = self.clock.now
            self.at_work.append(task)

    @rule(verdict=st.sampled_from(["ok", "busy", "lost", "silence"]))
    def answer(self, verdict: Any) -> None:
        if not self.at_work:
            return
        task = self.at_work.pop()
        if verdict == "silence":
            for request in self.queue.note_failure(task, self.clock.now):
                self.told(request)
            return
        for grant in task.requests:
            if verdict == "lost":
                grant.lose("superseded")
            granted = LeaseResult("ok", task.get_ttl(grant), EXPIRES)
            self.told(
                self.queue.note_answer(
                    task, grant, granted if verdict == "ok" else LeaseResult(verdict), self.clock.now
                )
            )
            if grant.state == "lost" and grant in self.kept:
                self.told(self.queue.drop(grant))
                self.kept.remove(grant)

    @invariant()
    def kept_grants_are_looked_at_in_time(self) -> None:
        """The schedule never sleeps past a deadline, and each grant is being renewed or has a renewal planned."""
        assert set(self.queue.schedule) == set(self.kept)
        assert self.queue.schedule.next() <= min((grant.deadline for grant in self.kept), default=math.inf)
        for grant in self.kept:
            if grant.heartbeat == "auto":
                in_time = grant.deadline - terms.compute_margin(grant.ttl)
                # A renewal that was late and found the row locked is repeated later still.
                assert grant.renewal_pending or grant.next_renewal <= in_time or self.clock.now >= in_time

    @invariant()
    def every_request_is_answered_or_waits(self) -> None:
        """Each requested renewal is finished or still waits."""
        waiting = sum(len(request.done) for request in self.queue._requests.values())
        sent = sum(
            len(request.done) for task in self.at_work for request in task.requests.values() if request is not None
        )
        assert self.answered + waiting + sent == self.wished


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
