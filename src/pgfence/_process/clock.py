"""The monotonic clock, deadlines and jitter. Nothing here sleeps."""

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
"""Seconds. As a timeout: None = the configured default, math.inf = indefinitely, 0 = do not wait."""

# On macOS, unlike Linux, CLOCK_MONOTONIC includes the time asleep, and `time.monotonic()` does not.
_CLOCK: int | None = getattr(time, "CLOCK_MONOTONIC" if sys.platform == "darwin" else "CLOCK_BOOTTIME", None)


# A partial of a C function, not a Python function: an acquire reads the clock ten times.
clock: Callable[[], float] = time.monotonic if _CLOCK is None else partial(time.clock_gettime, _CLOCK)
"""Return the seconds of a monotonic clock that cannot be set and that, where available, includes suspended time.

A clock that stops during a suspend would let a laptop, on waking up, still trust the leases it held when it was suspended.
"""

# Not the module's generator: a program that seeds it would keep the pauses of all its processes in step, and our threads would
# change the sequence that the program sees.
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
    """The time until which a call may wait, on this process's clock."""

    at: float
    timeout: float

    @classmethod
    def after(cls, timeout: float, now: float) -> Deadline:
        """Return the deadline `timeout` seconds after `now`."""
        return cls(now + timeout, timeout)

    def left(self, now: float) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self.at - now)
