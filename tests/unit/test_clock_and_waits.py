"""Rules about time, tested with a fake clock."""

from __future__ import annotations

import math
import random
import sys
import time
from datetime import timedelta
from decimal import Decimal
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgfence._holds.wait_plan import (
    LONGEST_SLEEP,
    NESTED_LIMIT,
    choose_first_slice,
    choose_sleep,
    pause,
    slice_for,
    to_milliseconds,
)
from pgfence._leases.terms import retry_after
from pgfence._process.clock import Deadline, clock, seconds
from pgfence.retrying._rules import pick_pause
from support.rows import every_row

moments = st.floats(0, 1e9)
spans = st.one_of(st.floats(0, 1e9), st.just(math.inf))


@every_row(
    ("value", "number"),
    [
        (0, 0.0),
        (2, 2.0),
        (0.25, 0.25),
        (math.inf, math.inf),
        (timedelta(minutes=1, milliseconds=5), 60.005),
        (timedelta(0), 0.0),
    ],
)
def test_seconds_are_numbers_or_timedeltas(value: float | timedelta, number: float) -> None:
    """A timeout is passed as seconds or a timedelta and becomes a float."""
    result = seconds(value)
    assert result == number
    assert type(result) is float


@every_row("value", ["1", None, True, False, Decimal(1), [1], 1j])
def test_a_timeout_that_is_not_a_time_is_rejected(value: object) -> None:
    """Text, None, a bool or a Decimal is a TypeError that names the argument."""
    with pytest.raises(TypeError, match="ttl"):
        seconds(value, "ttl")  # type: ignore[arg-type]


@every_row("value", [-1, -0.001, math.nan, -math.inf, timedelta(seconds=-1)])
def test_a_negative_or_undefined_timeout_is_rejected(value: float | timedelta) -> None:
    """A negative time or NaN is a ValueError that names the argument."""
    with pytest.raises(ValueError, match="ttl"):
        seconds(value, "ttl")


def test_the_clock_never_goes_back_and_measures_seconds() -> None:
    """Readings never decrease, and their differences equal those of the monotonic clock."""
    readings = [clock() for _ in range(10_000)]
    assert readings == sorted(readings)
    before, start = time.monotonic(), clock()
    while clock() == start:
        pass
    passed = clock() - start
    assert 0 < passed <= time.monotonic() - before + 0.001


@pytest.mark.skipif(sys.platform not in {"linux", "darwin"}, reason="no clock here that counts a suspend")
def test_the_clock_counts_a_suspend() -> None:
    """The clock read is the one of the system that runs on through a suspend: its name differs by system."""
    counts = time.CLOCK_MONOTONIC if sys.platform == "darwin" else time.CLOCK_BOOTTIME
    assert isinstance(clock, partial)
    assert (clock.func, clock.args) == (time.clock_gettime, (counts,))


@given(spans, moments, st.floats(0, 1e9))
def test_a_deadline_counts_down_to_nothing(timeout: float, now: float, later: float) -> None:
    """What is left starts at the timeout, never grows as time passes and never falls below 0."""
    deadline = Deadline.after(timeout, now)
    assert deadline.timeout == timeout
    assert deadline.left(now) == pytest.approx(timeout, abs=1e-6)
    assert 0 <= deadline.left(now + later) <= deadline.left(now)
    if math.isfinite(timeout):
        assert deadline.left(deadline.at) == deadline.left(deadline.at + later) == 0


def test_a_deadline_without_end_never_comes_nearer() -> None:
    """With math.inf the time left is always infinite."""
    assert Deadline.after(math.inf, 5.0).left(1e300) == math.inf


@every_row(
    ("deadlock_timeout", "length"),
    [(1.0, 0.5), (60.0, 0.5), (0.8, 0.4), (0.2, 0.1), (0.199, 0.0), (0.001, 0.0)],
)
def test_a_slice_is_half_a_deadlock_timeout_and_at_most_half_a_second(deadlock_timeout: float, length: float) -> None:
    """A wait in the server ends before the look for deadlocks; under 100 ms there is none, and 0 says poll."""
    assert slice_for(deadlock_timeout) == length


@given(st.floats(0.001, 2147483.647))
def test_a_waiter_is_never_there_when_deadlocks_are_looked_for(deadlock_timeout: float) -> None:
    """For every setting of deadlock_timeout a slice is 0 or lies between 100 ms and half of the setting."""
    length = slice_for(deadlock_timeout)
    assert length == 0 or 0.1 <= length <= min(0.5, deadlock_timeout / 2)


@given(st.floats(0.1, 0.5), spans)
def test_the_first_wait_leaves_time_to_name_the_holder(length: float, left: float) -> None:
    """The first wait never exceeds a slice or what is left, and from 200 ms on it leaves at least half."""
    first = choose_first_slice(length, left)
    assert 0 <= first <= min(length, left)
    if left >= 0.2:
        assert first <= left / 2
        assert first >= 0.1


@given(spans, st.integers(1, 100_000))
def test_lock_timeout_is_never_0_nor_more_than_the_server_takes(length: float, keys: int) -> None:
    """0 would mean no limit, and the server rejects 2**31. All keys together wait as long as requested at most, each at least 1 ms."""
    limit = to_milliseconds(length, keys)
    assert 1 <= limit <= 2**31 - 1
    assert type(limit) is int
    assert limit == 1 or limit * keys <= length * 1000


@every_row(("length", "keys", "limit"), [(0.5, 1, 500), (0.5, 2, 250), (0.5, 1000, 1), (0, 1, 1), (0.0004, 1, 1)])
def test_lock_timeout_counts_per_key(length: float, keys: int, limit: int) -> None:
    """The server counts lock_timeout for each lock, so several keys share the slice."""
    assert to_milliseconds(length, keys) == limit


def test_a_wait_for_ever_is_cut_to_what_the_server_takes() -> None:
    """math.inf becomes 24.8 days, the largest lock_timeout there is."""
    assert to_milliseconds(math.inf) == 2_147_483_647


@every_row(("ahead", "seconds"), [(3, 0.6), (8, 1.5), (18, 3.4), (10**6, 3.4)])
def test_a_waiter_that_sleeps_queries_less_often_the_longer_its_queue(ahead: int, seconds: float) -> None:
    """The fourth process sleeps for about 0.6 s, those from the nineteenth on for about 3.4 s, and none for more than 3.8 s."""
    sleeps = [choose_sleep(ahead) for _ in range(1000)]
    assert 0.8 * seconds < min(sleeps) < max(sleeps) < min(1.2 * seconds, LONGEST_SLEEP)
    assert LONGEST_SLEEP <= 3.8


def test_a_nested_wait_lasts_a_minute_by_default() -> None:
    """The documented limit of a wait under another lock."""
    assert NESTED_LIMIT == 60


@given(spans)
def test_a_pause_is_short_jittered_and_within_what_is_left(left: float) -> None:
    """The pause between two polls is 20 to 60 ms, or the time left if that is shorter."""
    length = pause(left)
    assert min(left, 0.02) <= length <= min(left, 0.06)


def test_pauses_differ() -> None:
    """Waiters that started together do not stay together."""
    assert len({pause(1.0) for _ in range(20)}) > 1


def test_seeding_random_neither_aligns_pauses_nor_changes_numbers() -> None:
    """Pauses between polls, renewals and attempts differ after the same seed, and draw nothing from that generator."""

    def drawn() -> list[float]:
        random.seed(7)
        pauses = [pause(1.0), retry_after(1, 10.0), pick_pause(3)]
        assert random.random() == first
        return pauses

    random.seed(7)
    first = random.random()
    assert all(one != other for one, other in zip(drawn(), drawn(), strict=True))
