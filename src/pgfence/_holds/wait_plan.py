"""Plan how a waiter divides its wait in the server into slices, and when it logs."""

from __future__ import annotations

from typing import NamedTuple

from pgfence._process.clock import Deadline, between

SLICE = 0.5
SHORTEST_SERVER_WAIT = 0.1
LONGEST_LOCK_TIMEOUT = 2**31 - 1


def slice_for(deadlock_timeout: float) -> float:
    """Return the length of one wait in the server, in seconds, or 0 if the waiter must poll instead."""
    # The wait takes at most half of deadlock_timeout, so that it ends before the server looks for deadlocks. Otherwise the server
    # would choose the waiter as the victim whenever the holder builds an index CONCURRENTLY. Waits below 100 ms cost more log
    # lines and CPU time than polling.
    length = min(SLICE, deadlock_timeout / 2)
    return length if length >= SHORTEST_SERVER_WAIT else 0.0


def choose_first_slice(length: float, left: float) -> float:
    """Return the length of the first wait: at most half the time left, but not less than 100 ms if so much is left."""
    # The other half leaves time to query the holders for the error message.
    return min(length, max(left / 2, min(left, SHORTEST_SERVER_WAIT)))


def to_milliseconds(length: float, keys: int = 1) -> int:
    """Return the `lock_timeout` for a wait of `length` seconds. It applies to each of the `keys` keys separately."""
    # A `lock_timeout` of 0 would mean no limit, and the server accepts at most 24.8 days. A caller that waits longer sends
    # another request.
    return max(1, int(min(length * 1000 / keys, LONGEST_LOCK_TIMEOUT)))


def pause(left: float) -> float:
    """Return the jittered pause between two polls in seconds, at most the time left."""
    return min(left, between(0.02, 0.06))


LONGEST_SLEEP = 3.75


def choose_sleep(ahead: int) -> float:
    """Return the jittered seconds for which a waiter with `ahead` tickets before its own sleeps, at most LONGEST_SLEEP."""
    return min(ahead / 5.3, 3.4) * between(0.9, 1.1)


WARN_AFTER = 30.0
NESTED_LIMIT = 60.0
"""The longest default timeout while another lock is held, because deadlocks between processes are not detected."""


class Wait(NamedTuple):
    """One step of a wait, which is a slice in the server, or a pause before polling."""

    seconds: float
    polls: bool
    queued: bool
    """Whether the contender waits in the order of the tickets, which is so in every slice but the first."""


class WaitPlan:
    """The steps of one contender's wait: slices or polls until the deadline, and when a log line is due."""

    __slots__ = ("_began", "_deadline", "_slice", "_told", "_waits")

    def __init__(self, deadline: Deadline, length: float, now: float) -> None:
        self._deadline = deadline
        self._slice = length
        self._began = now
        self._waits = 0
        self._told = 0

    def next(self, now: float) -> Wait | None:
        """Return the next step, or None if the time is over."""
        left = self._deadline.left(now)
        if left <= 0:
            return None
        if not self._slice:
            return Wait(pause(left), polls=True, queued=False)
        self._waits += 1
        queued = self._waits > 1
        length = min(self._slice, left) if queued else choose_first_slice(self._slice, left)
        return Wait(length, polls=False, queued=queued)

    def take_due_log(self, now: float) -> tuple[int, float] | None:
        """Return the level and the age of the wait for a log line that is due: one after the first step, and one after 30 s."""
        age = now - self._began
        if not self._told:
            self._told = 1
            return 20, age
        if self._told == 1 and age >= WARN_AFTER:
            self._told = 2
            return 30, age
        return None
