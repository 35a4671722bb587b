"""Rules about time. Pure: every function takes `now`, nothing here sleeps."""

from __future__ import annotations

import math
import random
import sys
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

Seconds: TypeAlias = float | timedelta
"""Seconds. As a timeout: None = the configured default, math.inf = for ever, 0 = do not wait."""

# On macOS, unlike Linux, CLOCK_MONOTONIC counts the time asleep and `time.monotonic()` does not.
_CLOCK: int | None = getattr(time, "CLOCK_MONOTONIC" if sys.platform == "darwin" else "CLOCK_BOOTTIME", None)


# No function of Python's: an acquire asks ten times.
clock: Callable[[], float] = time.monotonic if _CLOCK is None else partial(time.clock_gettime, _CLOCK)
"""Return seconds on a clock that nobody can set and that runs on through a suspend where there is one.

A clock that stands still during suspend would let a laptop believe, on waking, in what it held when it fell asleep.
"""

# Not the generator of the module: what a program seeds for itself would keep the pauses of all its processes in step, and our
# threads would disturb it.
between = random.SystemRandom().uniform


def seconds(value: Seconds, what: str = "timeout") -> float:
    """Return `value` as a number of seconds.

    Raises:
        TypeError: it is neither a number nor a timedelta.
        ValueError: it is negative or not a number.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} must be seconds (a number) or a timedelta, not {type(value).__name__}")
    if math.isnan(value) or value < 0:
        raise ValueError(f"{what} must be 0 or more seconds, not {value!r}")
    return float(value)


class Deadline(NamedTuple):
    """The instant until which a call may wait, on the clock of this process."""

    at: float
    timeout: float

    @classmethod
    def after(cls, timeout: float, now: float) -> Deadline:
        """Return the deadline `timeout` seconds after `now`."""
        return cls(now + timeout, timeout)

    def left(self, now: float) -> float:
        """Return the seconds that are left, never below 0."""
        return max(0.0, self.at - now)
