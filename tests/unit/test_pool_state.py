"""How many connections there are, whose turn it is, and which are kept."""

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
    """What a roster needs of a session."""

    cold = LockConnection.cold
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def session() -> Any:
    return Stub(dead=None, close_after_use=False, idle_since=0.0, closed=False)


def opened(roster: PoolState[Any]) -> Any:
    assert roster.take(PoolWaiter()).may_open
    return session()


def test_a_warm_session_is_used_before_a_new_one_is_opened() -> None:
    """What was given back is taken again, and nothing more is open."""
    roster: PoolState[Any] = PoolState(2)
    one = opened(roster)
    assert roster.give(one)
    assert roster.take(PoolWaiter()).session is one
    assert roster.open == 1


def test_at_the_limit_turns_are_served_in_order() -> None:
    """First come first served, by a session given back or by a place that came free."""
    roster: PoolState[Any] = PoolState(2)
    one, two = opened(roster), opened(roster)
    woken: list[int] = []
    turns = [roster.take(PoolWaiter()) for _ in range(3)]
    for number, turn in enumerate(turns):
        turn.wake = lambda number=number: woken.append(number)
    assert not any(turn.served for turn in turns)
    roster.give(one)
    roster.gone()
    assert (turns[0].session, turns[1].may_open, turns[2].served) == (one, True, False)
    assert woken == [0, 1]
    roster.give(two)
    assert turns[2].session is two


def test_a_cancelled_waiter_is_passed_over() -> None:
    """The next one gets the session, and forgoing twice is no error."""
    roster: PoolState[Any] = PoolState(1)
    one = opened(roster)
    quitter, patient = roster.take(PoolWaiter()), roster.take(PoolWaiter())
    roster.forgo(quitter)
    roster.forgo(quitter)
    roster.give(one)
    assert (quitter.served, patient.session) == (False, one)


def test_a_newcomer_does_not_jump_the_queue() -> None:
    """While somebody waits for a turn, a place that is free for a moment is not taken by whoever comes later."""
    roster: PoolState[Any] = PoolState(1)
    opened(roster)
    first = roster.take(PoolWaiter())
    roster.gone()
    late = roster.take(PoolWaiter())
    assert (first.may_open, late.served) == (True, False)


def test_only_a_few_are_kept_warm() -> None:
    """One more than the warm ones goes back to the caller to be closed."""
    roster: PoolState[Any] = PoolState(WARM + 1)
    sessions = [opened(roster) for _ in range(WARM + 1)]
    assert [roster.give(one) for one in sessions] == [True] * WARM + [False]


def test_dead_and_single_use_connections_are_not_kept() -> None:
    """Their owner closes them, and says that they are gone."""
    roster: PoolState[Any] = PoolState(2)
    dead, close_after_use = opened(roster), opened(roster)
    dead.dead, close_after_use.close_after_use = "killed", True
    assert not roster.give(dead)
    assert not roster.give(close_after_use)


def test_the_cold_and_the_dead_are_taken_out() -> None:
    """What was idle for too long, or died meanwhile, is handed out to be closed; the others stay."""
    roster: PoolState[Any] = PoolState(3)
    cold, dead, warm = (opened(roster) for _ in range(3))
    for one in (cold, dead, warm):
        roster.give(one)
    dead.dead = "killed"
    cold.idle_since = time.monotonic() - WARM_FOR - 1
    assert sorted(map(id, roster.cold(time.monotonic()))) == sorted(map(id, (cold, dead)))
    assert roster.idle == [warm]


def test_retiring_empties_the_warm_ones() -> None:
    """They are handed out to be closed, once."""
    roster: PoolState[Any] = PoolState(2)
    one, two = opened(roster), opened(roster)
    roster.give(one)
    roster.give(two)
    assert roster.take_all_idle() == [one, two]
    assert roster.take_all_idle() == []


def test_an_idle_connection_that_died_frees_its_slot() -> None:
    """Its place comes free: by the one who finds it dead, or by the one who clears it away."""
    roster: PoolState[Any] = PoolState(1)
    one = opened(roster)
    roster.give(one)
    one.dead = "killed"
    turn = roster.take(PoolWaiter())
    for _ in roster.cold(time.monotonic()):
        roster.gone()
    assert turn.may_open
    assert roster.open == 1


class Connections(RuleBasedStateMachine):
    """A roster beside plain lists of who has what."""

    LIMIT = 3

    def __init__(self) -> None:
        super().__init__()
        self.roster: PoolState[Any] = PoolState(self.LIMIT)
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
            self.roster.gone()

    @rule()
    def take(self) -> None:
        self.waiting.append(self.roster.take(PoolWaiter()))
        self.close(self.roster.cold(0.0))
        self.serve()

    @precondition(lambda self: self.opening)
    @rule(works=st.booleans())
    def open(self, works: bool) -> None:
        self.opening -= 1
        if works:
            self.used.append(session())
        else:
            self.roster.gone()
        self.serve()

    @precondition(lambda self: self.used)
    @rule(data=st.data(), close_after_use=st.booleans())
    def give(self, data: Any, close_after_use: bool) -> None:
        one = data.draw(st.sampled_from(self.used))
        self.used.remove(one)
        one.close_after_use = close_after_use
        if not self.roster.give(one):
            self.close([one])
        self.serve()

    @precondition(lambda self: self.roster.idle)
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        data.draw(st.sampled_from(self.roster.idle)).dead = "killed"

    @rule()
    def reap(self) -> None:
        self.close(self.roster.cold(0.0))
        self.serve()

    @rule()
    def dispose(self) -> None:
        self.close(self.roster.take_all_idle())
        self.serve()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        turn = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(turn)
        self.roster.forgo(turn)

    @invariant()
    def the_count_is_true_and_within_the_limit(self) -> None:
        assert self.roster.open == self.opening + len(self.used) + len(self.roster.idle)
        assert self.roster.open <= self.LIMIT

    @invariant()
    def nobody_waits_beside_a_free_place(self) -> None:
        live = [one for one in self.roster.idle if not one.dead]
        assert not self.waiting or (self.roster.open == self.LIMIT and not live)


def test_connection_slots_are_neither_lost_nor_invented() -> None:
    """Whatever comes and goes, the count is the truth, the limit holds, and nobody waits beside a free place."""
    run_state_machine_as_test(Connections, settings=settings(max_examples=80, stateful_step_count=40, deadline=None))
