"""The queue of one process: first come first served, no waiter forgotten, deadlocks found."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pgfence._holds.queue import Contender, LocalQueue, QueueEntry, is_deadlock
from pgfence.keys import LockKey

KEYS = tuple(sorted([*(LockKey.raw(n) for n in range(3)), LockKey.pair(0, 1)]))
key_sets = st.sets(st.sampled_from(KEYS), min_size=1, max_size=3).map(lambda keys: tuple(sorted(keys)))
A, B, C = (LockKey.raw(n) for n in (10, 11, 12))


class Queue(RuleBasedStateMachine):
    """Lines beside a plain list of tickets in the order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = LocalQueue()
        self.order: list[QueueEntry] = []
        self.woken: list[QueueEntry] = []

    def before(self, ticket: QueueEntry, key: LockKey) -> list[QueueEntry]:
        return [other for other in self.order[: self.order.index(ticket)] if key in other.places]

    def blocked(self, ticket: QueueEntry) -> int:
        return sum(bool(self.before(ticket, key)) for key in ticket.places)

    @rule(keys=key_sets)
    def arrive(self, keys: tuple[LockKey, ...]) -> None:
        ticket = QueueEntry(keys, Contender("thread"), self.queue)
        first = self.queue.enqueue(ticket)
        self.order.append(ticket)
        assert first == (self.blocked(ticket) == 0)
        if not first:
            ticket.wake = lambda: self.woken.append(ticket)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        ticket = data.draw(st.sampled_from(self.order))
        stuck = [other for other in self.order if self.blocked(other)]
        self.woken.clear()
        self.queue.dequeue(ticket)
        self.order.remove(ticket)
        freed = [other for other in stuck if other is not ticket and not self.blocked(other)]
        assert sorted(map(id, self.woken)) == sorted(map(id, freed))

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def heir(self, data: Any) -> None:
        ticket = data.draw(st.sampled_from([t for t in self.order if not self.blocked(t)]))
        behind = [t for t in self.order if t is not ticket and set(t.places) & set(ticket.places)]
        heir = self.queue.find_successor(ticket)
        if heir is None:
            return
        assert heir.places == ticket.places
        assert all(self.before(heir, key) == [ticket] for key in heir.places)
        assert heir is behind[0]

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def no_heir_is_overlooked(self, data: Any) -> None:
        ticket = data.draw(st.sampled_from([t for t in self.order if not self.blocked(t)]))
        heirs = [t for t in self.order if t.places == ticket.places and t is not ticket]
        if heirs and all(self.before(heirs[0], key) == [ticket] for key in ticket.places):
            assert self.queue.find_successor(ticket) is heirs[0]

    @invariant()
    def counts_agree(self) -> None:
        assert [self.queue.is_first(ticket) for ticket in self.order] == [
            not self.blocked(ticket) for ticket in self.order
        ]
        assert all(ticket in self.queue.get_line(place) for ticket in self.order for place in ticket.places)
        assert len(self.queue) == len({key for ticket in self.order for key in ticket.places})

    @invariant()
    def somebody_can_go_on(self) -> None:
        assert not self.order or any(self.queue.is_first(ticket) for ticket in self.order)

    @invariant()
    def owners_at_the_front_are_known(self) -> None:
        for ticket in self.order:
            for key in ticket.places:
                assert self.queue.is_held_by(ticket.owner, [key]) == (not self.before(ticket, key))


class Circles(RuleBasedStateMachine):
    """Contenders that hold and wait over two engines, beside a plain graph search."""

    def __init__(self) -> None:
        super().__init__()
        self.engines = [LocalQueue(), LocalQueue()]
        self.owners = [Contender("task") for _ in range(4)]
        self.tickets: list[QueueEntry] = []

    def blockers(self, ticket: QueueEntry) -> set[Contender]:
        found: set[Contender] = set()
        for key in ticket.places:
            for other in self.tickets:
                if other is ticket:
                    break
                if other.queue is ticket.queue and key in other.places:
                    found.add(other.owner)
        return found

    def reaches(self, ticket: QueueEntry, goal: Contender) -> bool:
        seen: set[Contender] = set()
        todo = self.blockers(ticket)
        while todo:
            owner = todo.pop()
            if owner is goal:
                return True
            if owner not in seen and owner.waits is not None:
                todo |= self.blockers(owner.waits)
            seen.add(owner)
        return False

    def granted(self, ticket: QueueEntry) -> None:
        ticket.owner.waits = None
        ticket.owner.holds.append(ticket)  # type: ignore[arg-type]

    @rule(who=st.integers(0, 3), where=st.integers(0, 1), keys=key_sets)
    def take(self, who: int, where: int, keys: tuple[LockKey, ...]) -> None:
        owner, queue = self.owners[who], self.engines[where]
        if owner.waits is not None or queue.is_held_by(owner, keys):
            return
        ticket = QueueEntry(keys, owner, queue)
        first = queue.enqueue(ticket)
        self.tickets.append(ticket)
        if first:
            self.granted(ticket)
            return
        circle = is_deadlock(ticket)
        assert circle == self.reaches(ticket, owner)
        if circle:
            self.tickets.remove(ticket)
            queue.dequeue(ticket)
            return
        owner.waits = ticket
        ticket.wake = lambda: self.granted(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        """A release, or a wait that is given up."""
        ticket = data.draw(st.sampled_from(self.tickets))
        self.tickets.remove(ticket)
        if ticket.owner.waits is ticket:
            ticket.owner.waits = None
        else:
            ticket.owner.holds.remove(ticket)  # type: ignore[arg-type]
        ticket.queue.dequeue(ticket)

    @invariant()
    def no_contender_waits_forever(self) -> None:
        """While one contender waits, another holds and does not wait."""
        waiting = [owner for owner in self.owners if owner.waits is not None]
        assert not waiting or any(owner.holds and owner.waits is None for owner in self.owners)


calm = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("machine", [Queue, Circles], ids=lambda machine: machine.__name__)
def test_lines_agree_with_a_plain_model(machine: type[RuleBasedStateMachine]) -> None:
    """For any sequence of events: order of arrival, one wake-up each, no deadlock missed or invented."""
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=calm)


def stand(queue: LocalQueue, *keys: LockKey, owner: Contender | None = None) -> QueueEntry:
    ticket = QueueEntry(keys, owner or Contender("thread"), queue)
    queue.enqueue(ticket)
    return ticket


def test_an_entry_for_several_keys_must_be_first_for_all() -> None:
    """It is woken once, when it becomes first in the last of its queues."""
    queue, told = LocalQueue(), []
    one, two = stand(queue, A), stand(queue, B)
    both = stand(queue, A, B)
    both.wake = lambda: told.append("woken")
    queue.dequeue(one)
    assert (queue.is_first(both), told) == (False, [])
    queue.dequeue(two)
    assert (queue.is_first(both), told) == (True, ["woken"])


def test_the_successor_wants_exactly_the_same_keys() -> None:
    """A lock is handed over without the server only to a contender for exactly its keys."""
    queue = LocalQueue()
    holder = stand(queue, A, B)
    assert queue.find_successor(holder) is None
    stand(queue, A)
    stand(queue, A, B)
    assert queue.find_successor(holder) is None


def test_a_waiter_that_gives_up_leaves_the_others_waiting() -> None:
    """Leaving from the middle of a line wakes no waiter and keeps the order."""
    queue, told = LocalQueue(), []
    holder, quitter, last = stand(queue, A), stand(queue, A), stand(queue, A)
    last.wake = lambda: told.append("last")
    queue.dequeue(quitter)
    assert told == []
    assert quitter not in queue.get_line(A)
    queue.dequeue(holder)
    assert told == ["last"]


def test_a_deadlock_over_two_engines_is_found() -> None:
    """C032: one contender holds A on one engine and waits for B on another; a second contender holds B and waits for A."""
    here, there = LocalQueue(), LocalQueue()
    one, two = Contender("task"), Contender("thread")
    one.holds.append(stand(here, A, owner=one))  # type: ignore[arg-type]
    two.holds.append(stand(there, B, owner=two))  # type: ignore[arg-type]
    one.waits = stand(there, B, owner=one)
    assert not is_deadlock(one.waits)
    assert is_deadlock(stand(here, A, owner=two))


def test_a_contender_that_has_left_waits_for_nothing() -> None:
    """A wait that ended by a cancel or an interrupt takes no part in deadlock detection."""
    queue, owner = LocalQueue(), Contender("thread")
    stand(queue, A)
    owner.waits = stand(queue, A, owner=owner)
    queue.dequeue(owner.waits)
    assert owner.waits is None


def test_the_deadlock_check_stays_cheap_with_many_waiters() -> None:
    """A thousand contenders, each with one hold, join one line."""
    queue = LocalQueue()
    stand(queue, A)
    for number in range(1000):
        owner = Contender("task")
        owner.holds.append(stand(queue, LockKey.raw(1000 + number), owner=owner))  # type: ignore[arg-type]
        owner.waits = stand(queue, A, owner=owner)
        assert not is_deadlock(owner.waits)


def test_a_chain_of_waits_is_walked_once() -> None:
    """If many paths lead through the same contenders, each place is visited only once."""
    queue = LocalQueue()
    layers = [[Contender("task") for _ in range(2)] for _ in range(64)]  # 2**64 ways
    keys = [(LockKey.raw(2 * n), LockKey.raw(2 * n + 1)) for n in range(len(layers))]
    for layer, pair in zip(layers, keys, strict=True):
        for owner, key in zip(layer, pair, strict=True):
            owner.holds.append(stand(queue, key, owner=owner))  # type: ignore[arg-type]
    for layer, pair in zip(layers[1:], keys, strict=False):
        for owner in layer:
            owner.waits = stand(queue, *pair, owner=owner)
    goal = Contender("task")
    goal.holds.append(stand(queue, LockKey.raw(-1), owner=goal))  # type: ignore[arg-type]
    assert not is_deadlock(stand(queue, *keys[-1], owner=goal))
