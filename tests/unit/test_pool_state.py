"""The number of connections, the order of the waiters, and which connections are kept."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pgfence._connections.connection import WARM_FOR, LockConnection
from pgfence._connections.pool import WARM, PoolState, PoolWaiter


class Stub(SimpleNamespace):
    """What a state needs of a session."""

    is_expired = LockConnection.is_expired
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def session() -> Any:
    return Stub(dead=None, close_after_use=False, idle_since=0.0, closed=False)


def opened(state: PoolState) -> Any:
    assert state.serve_or_enqueue(PoolWaiter()).may_open
    return session()


def test_a_warm_session_is_used_before_a_new_one_is_opened() -> None:
    """A returned connection is used again, and no other is open."""
    state: PoolState = PoolState(2)
    one = opened(state)
    assert state.checkin(one)
    assert state.serve_or_enqueue(PoolWaiter()).session is one
    assert state.open == 1


def test_at_the_limit_turns_are_served_in_order() -> None:
    """First come, first served, by a returned connection or by a slot that became free."""
    state: PoolState = PoolState(2)
    one, two = opened(state), opened(state)
    woken: list[int] = []
    turns = [state.serve_or_enqueue(PoolWaiter()) for _ in range(3)]
    for number, turn in enumerate(turns):
        turn.wake = lambda number=number: woken.append(number)
    assert not any(turn.served for turn in turns)
    state.checkin(one)
    state.note_closed()
    assert (turns[0].session, turns[1].may_open, turns[2].served) == (one, True, False)
    assert woken == [0, 1]
    state.checkin(two)
    assert turns[2].session is two


def test_a_cancelled_waiter_is_passed_over() -> None:
    """The next waiter gets the session, and cancelling a wait twice is not an error."""
    state: PoolState = PoolState(1)
    one = opened(state)
    quitter, patient = state.serve_or_enqueue(PoolWaiter()), state.serve_or_enqueue(PoolWaiter())
    state.cancel_wait(quitter)
    state.cancel_wait(quitter)
    state.checkin(one)
    assert (quitter.served, patient.session) == (False, one)


def test_a_newcomer_does_not_jump_the_queue() -> None:
    """A slot that is free for a moment passes to the waiter, not to a later request."""
    state: PoolState = PoolState(1)
    opened(state)
    first = state.serve_or_enqueue(PoolWaiter())
    state.note_closed()
    late = state.serve_or_enqueue(PoolWaiter())
    assert (first.may_open, late.served) == (True, False)


def test_only_a_few_are_kept_warm() -> None:
    """One more than the limit of idle connections is returned to the caller to be closed."""
    state: PoolState = PoolState(WARM + 1)
    sessions = [opened(state) for _ in range(WARM + 1)]
    assert [state.checkin(one) for one in sessions] == [True] * WARM + [False]


def test_dead_and_single_use_connections_are_not_kept() -> None:
    """Their user closes them and reports that."""
    state: PoolState = PoolState(2)
    dead, close_after_use = opened(state), opened(state)
    dead.dead, close_after_use.close_after_use = "killed", True
    assert not state.checkin(dead)
    assert not state.checkin(close_after_use)


def test_the_cold_and_the_dead_are_taken_out() -> None:
    """Sessions that were idle for too long or have died are returned for closing; the others stay."""
    state: PoolState = PoolState(3)
    cold, dead, warm = (opened(state) for _ in range(3))
    for one in (cold, dead, warm):
        state.checkin(one)
    dead.dead = "killed"
    cold.idle_since = time.monotonic() - WARM_FOR - 1
    assert sorted(map(id, state.take_expired(time.monotonic()))) == sorted(map(id, (cold, dead)))
    assert state.idle == [warm]


def test_retiring_empties_the_warm_ones() -> None:
    """The idle connections are returned once, to be closed."""
    state: PoolState = PoolState(2)
    one, two = opened(state), opened(state)
    state.checkin(one)
    state.checkin(two)
    assert state.take_all_idle() == [one, two]
    assert state.take_all_idle() == []


def test_an_idle_connection_that_died_frees_its_slot() -> None:
    """The slot becomes free when a caller finds the connection dead, or when the pool removes expired connections."""
    state: PoolState = PoolState(1)
    one = opened(state)
    state.checkin(one)
    one.dead = "killed"
    turn = state.serve_or_enqueue(PoolWaiter())
    for _ in state.take_expired(time.monotonic()):
        state.note_closed()
    assert turn.may_open
    assert state.open == 1


class Connections(RuleBasedStateMachine):
    """A state beside plain lists of the connections and their users."""

    LIMIT = 3

    def __init__(self) -> None:
        super().__init__()
        self.state: PoolState = PoolState(self.LIMIT)
        self.waiting: list[PoolWaiter[Any]] = []
        self.opening = 0
        self.used: list[Any] = []

    def serve(self) -> None:
        """Those whose turn has come go on; they are the first of the line."""
        served = [turn.served for turn in self.waiting]
        assert served == sorted(served, reverse=True)
        for turn in [turn for turn in self.waiting if turn.served]:
            self.waiting.remove(turn)
            if turn.session is not None:
                assert not turn.session.dead
                self.used.append(turn.session)
            else:
                self.opening += 1

    def close(self, sessions: list[Any]) -> None:
        for one in sessions:
            assert not one.closed
            one.closed = True
            self.state.note_closed()

    @rule()
    def serve_or_enqueue(self) -> None:
        self.waiting.append(self.state.serve_or_enqueue(PoolWaiter()))
        self.close(self.state.take_expired(0.0))
        self.serve()

    @precondition(lambda self: self.opening)
    @rule(works=st.booleans())
    def open(self, works: bool) -> None:
        self.opening -= 1
        if works:
            self.used.append(session())
        else:
            self.state.note_closed()
        self.serve()

    @precondition(lambda self: self.used)
    @rule(data=st.data(), close_after_use=st.booleans())
    def checkin(self, data: Any, close_after_use: bool) -> None:
        one = data.draw(st.sampled_from(self.used))
        self.used.remove(one)
        one.close_after_use = close_after_use
        if not self.state.checkin(one):
            self.close([one])
        self.serve()

    @precondition(lambda self: self.state.idle)
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        data.draw(st.sampled_from(self.state.idle)).dead = "killed"

    @rule()
    def reap(self) -> None:
        self.close(self.state.take_expired(0.0))
        self.serve()

    @rule()
    def dispose(self) -> None:
        self.close(self.state.take_all_idle())
        self.serve()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        turn = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(turn)
        self.state.cancel_wait(turn)

    @invariant()
    def the_count_is_true_and_within_the_limit(self) -> None:
        assert self.state.open == self.opening + len(self.used) + len(self.state.idle)
        assert self.state.open <= self.LIMIT

    @invariant()
    def nobody_waits_beside_a_free_place(self) -> None:
        live = [one for one in self.state.idle if not one.dead]
        assert not self.waiting or (self.state.open == self.LIMIT and not live)


def test_connection_slots_are_neither_lost_nor_invented() -> None:
    """The count is always right, the limit holds, and no waiter waits beside a free slot."""
    run_state_machine_as_test(Connections, settings=settings(max_examples=80, stateful_step_count=40, deadline=None))
