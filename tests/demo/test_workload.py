"""What acts are judged by: percentiles, verdicts, and the faults with their take-overs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pgfence._demo.bank import Accounts
from pgfence._demo.faults import Faults
from pgfence._demo.workload import Fault, Figures, TakeOver, Verdict, keeps_every_cent, loses_money
from pgfence._demo.workloads import ACTS
from pgfence._process.clock import clock
from support.rows import every_row

FINE = Figures(act="a", title="A", seconds=2.0, transfers=10)


@every_row(
    ("count", "percent", "rank"),
    [(1, 50, 1), (1, 99, 1), (2, 50, 1), (100, 50, 50), (100, 99, 99), (100, 100, 100), (3, 99, 3), (1000, 99, 990)],
)
def test_a_percentile_is_a_wait_that_was_measured(count: int, percent: float, rank: int) -> None:
    """The nearest rank: so many of a hundred waits were not longer."""
    waits = [float(number) for number in range(1, count + 1)]
    assert Figures(act="a", title="A", waits=waits).wait(percent) == float(rank)


def test_without_waits_there_are_no_percentiles() -> None:
    """The percentile is None, not 0."""
    assert FINE.wait(50) is None


@every_row(
    ("figures", "verdict"),
    [
        (FINE, Verdict.OK),
        (Figures(act="a", title="A", transfers=0), Verdict.GUARD_FAILED),
        (Figures(act="a", title="A", transfers=1, cents_lost=1, accounts_off=1), Verdict.GUARD_FAILED),
        (Figures(act="a", title="A", transfers=1, takeovers=(TakeOver(Fault.KILL, "x", 0.1),)), Verdict.OK),
        (Figures(act="a", title="A", transfers=1, takeovers=(TakeOver(Fault.KILL, "x", None),)), Verdict.GUARD_FAILED),
    ],
)
def test_a_guarded_workload_may_lose_no_money_and_no_worker(figures: Figures, verdict: Verdict) -> None:
    """One cent lost, no transfer at all, or one lock that no process took over is a failure."""
    assert keeps_every_cent(figures) is verdict


def test_the_control_has_to_lose_something() -> None:
    """One cent is enough."""
    assert loses_money(FINE) is Verdict.CONTROL_FAILED
    assert loses_money(Figures(act="a", title="A", transfers=1, cents_lost=1, accounts_off=1)) is Verdict.OK


def test_act_names_are_unique_and_one_act_is_the_control() -> None:
    """Acts have different names, by which processes get their orders."""
    assert len({act.name for act in ACTS}) == len({act.title for act in ACTS}) == len(ACTS)
    assert [act.name for act in ACTS if act.check is loses_money] == ["unguarded"]


def test_a_pair_is_two_accounts_of_the_act_and_some_are_busy() -> None:
    """Never one account twice; the first is chosen far more often than the last."""
    accounts, chance = Accounts(1001), random.Random(7)
    pairs = [accounts.pair(chance) for _ in range(5000)]
    chosen = [aid for pair in pairs for aid in pair]
    assert all(one != other for one, other in pairs)
    assert accounts.first <= min(chosen) <= max(chosen) <= accounts.last
    assert chosen.count(accounts.first) > 10 * chosen.count(accounts.last)
    till = accounts.till(chance)
    assert all(set(accounts.pair_of(till, chance)) <= set(till) for _ in range(100))


class FakePool:
    """Records which workers it was asked to kill."""

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def kill(self, member: Any) -> None:
        self.killed.append(member)


@pytest.fixture
def faults() -> Faults:
    """One SIGKILL, due at once."""
    return Faults([Fault.KILL], FakePool(), None, start=clock() - 2, seconds=1)  # type: ignore[arg-type]


def killed(faults: Faults) -> list[Any]:
    pool: Any = faults._pool
    return pool.killed


def test_a_fault_hits_a_holder_when_another_process_waits(faults: Faults) -> None:
    """Without a waiter no process could take over."""
    faults.note("one", {"granted": "x", "at": clock()})  # type: ignore[arg-type]
    faults.note("two", {"asks": "y"})  # type: ignore[arg-type]
    faults.note("one", {"granted": "x", "at": clock()})  # type: ignore[arg-type]
    assert killed(faults) == []
    faults.note("two", {"asks": "x"})  # type: ignore[arg-type]
    faults.note("one", {"granted": "x", "at": clock()})  # type: ignore[arg-type]
    assert killed(faults) == ["one"]
    assert not faults.done
    assert faults.takeovers == ((Fault.KILL, "x", None),)


def test_a_take_over_is_the_next_grant_to_another_process(faults: Faults) -> None:
    """Grants of other locks, and grants to the killed process itself, do not count."""
    began = clock()
    faults.note("two", {"asks": "x"})  # type: ignore[arg-type]
    faults.note("one", {"granted": "x", "at": began})  # type: ignore[arg-type]
    faults.note("two", {"granted": "y", "at": began + 100})  # type: ignore[arg-type]
    faults.note("one", {"granted": "x", "at": began + 100})  # type: ignore[arg-type]
    assert not faults.done
    faults.note("two", {"granted": "x", "at": began + 200})  # type: ignore[arg-type]
    assert faults.done
    (takeover,) = faults.takeovers
    assert takeover.seconds is not None and 150 < takeover.seconds <= 200


def test_a_fault_that_came_too_late_is_injected_again(faults: Faults) -> None:
    """If another process had the lock before the fault, no holder was hit."""
    faults.note("two", {"asks": "x"})  # type: ignore[arg-type]
    granted = clock()
    faults.note("one", {"granted": "x", "at": granted - 1})  # type: ignore[arg-type]
    faults.note("two", {"granted": "x", "at": granted - 0.5})  # type: ignore[arg-type]
    assert not faults.done
    assert faults.takeovers == ((Fault.KILL, "", None),)
    faults.note("three", {"asks": "x"})  # type: ignore[arg-type]
    faults.note("two", {"granted": "x", "at": clock()})  # type: ignore[arg-type]
    assert killed(faults) == ["one", "two"]
