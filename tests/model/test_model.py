"""Random schedules against the model alone: what is promised follows from the rules."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from model.machine import Model, Row
from model.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH = 1_000
SCHEDULES = 150
_ONLY_GENERATE = (Phase.generate,)
BYTES = st.binary(min_size=3 * LENGTH, max_size=3 * LENGTH)


def run(schedule: Schedule, steps: bytes) -> None:
    """Take every step of a schedule: each is three bytes."""
    for at in range(0, len(steps), 3):
        schedule.step(*steps[at : at + 3])


@pytest.mark.timeout(360)  # a schedule that fails is made shorter, which takes its time
@settings(max_examples=SCHEDULES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(BYTES)
def test_every_schedule_keeps_every_promise(steps: bytes) -> None:
    """150,000 steps: one holder at a time, tokens that only grow, no stale write, no holder told that it lost."""
    run(Schedule(Model()), steps)


class _RenewsAnybody(Model):
    def _is(self, lease: str, token: int) -> bool:
        return self.row is not None and self.row.released_at is None and self.row.expires_at > self.clock


class _DeletesOnRelease(Model):
    def release(self, lease: str, token: int) -> str:
        answer = super().release(lease, token)
        self.row = None if answer == "released" else self.row
        return answer


class _GateIsNotAsked(Model):
    def enter(self, token: int) -> int | None:
        self.gate = token
        return None


class _EvictsWithoutToken(Model):
    def evict(self) -> tuple[int, int] | None:
        ended = super().evict()
        if ended is not None and self.row is not None:
            self.row.token = self.gate = ended[0]
        return ended


class _KeepsTheId(Model):
    def adopt(self, lease: str, token: int, new: str) -> tuple[str, float]:
        return super().adopt(lease, token, lease)


class _FreeAtOnce(Model):
    def _extend(self, row: object) -> float:
        left = super()._extend(self.row or row)  # type: ignore[arg-type]
        if self.row is not None:
            self.row = replace(self.row, free_at=-math.inf)
        return left


class _LockRobs(Model):
    def lock(self) -> int | None:
        if self.row is not None and not self.locked:
            self.row.free_at = -math.inf
        return super().lock()


class _NoJump(Model):
    def _jump(self, timeline: int) -> int:
        return 0


class _JumpsFromRenewals(Model):
    def renew(self, lease: str, token: int, ttl: float) -> tuple[str, float]:
        answer = super().renew(lease, token, ttl)
        if self.row is not None and answer[0] == "ok":
            self.row.timeline = self.timeline
        return answer


class _NoRebase(Model):
    def _rebase(self, row: Row) -> None:
        pass


class _CountsFromEachQuestion(Model):
    def _rebase(self, row: Row) -> None:
        row.expires_at, row.free_at = self.clock + row.ttl, self.clock + row.ttl + row.lock_delay


class _LooksForNoSession(Model):
    def _session_holds(self, row: Row) -> bool:
        return False


@pytest.mark.parametrize(
    "kind",
    [
        _RenewsAnybody,
        _DeletesOnRelease,
        _GateIsNotAsked,
        _EvictsWithoutToken,
        _KeepsTheId,
        _FreeAtOnce,
        _LockRobs,
        _NoJump,
        _JumpsFromRenewals,
        _NoRebase,
        _CountsFromEachQuestion,
        _LooksForNoSession,
    ],
)
def test_a_wrong_rule_is_found(kind: Callable[[], Model]) -> None:
    """The schedules see a rule that is broken; else they would prove nothing."""

    def broken(steps: bytes) -> bool:
        try:
            run(Schedule(kind()), steps)
        except AssertionError:
            return True
        return False

    try:
        find(BYTES, broken, settings=settings(max_examples=100, database=None, phases=_ONLY_GENERATE))
    except NoSuchExample:
        pytest.fail("no schedule breaks a promise")
