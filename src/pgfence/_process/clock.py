"""The monotonic clock, deadlines and jitter."""

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
"""A number of seconds. As a timeout, None means the configured default, math.inf means no limit, and 0 means no wait."""

# On macOS, unlike Linux, CLOCK_MONOTONIC includes the time asleep, and `time.monotonic()` does not.
_CLOCK: int | None = getattr(time, "CLOCK_MONOTONIC" if sys.platform == "darwin" else "CLOCK_BOOTTIME", None)


# The clock is a partial of a C function and not a Python function, because an acquire reads the clock ten times.
clock: Callable[[], float] = time.monotonic if _CLOCK is None else partial(time.clock_gettime, _CLOCK)
"""Return the seconds of a monotonic clock that cannot be set and that, where available, includes suspended time.

With a clock that stops during a suspend, a laptop that wakes up would still trust the leases that it held before the suspend.
"""

# This generator is separate from that of the module `random`. If a program seeded a shared generator, the pauses of all its
# processes would be equal, and pgfence's threads would change the sequence that the program gets.
between = random.SystemRandom().uniform


def seconds(value: Seconds, what: str = "timeout") -> float:
    """Return `value` as a number of seconds.

    Raises:
        TypeError: the value is neither a number nor a timedelta.
        ValueError: the value is negative or not a number.
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
        return cls(now + timeout, timeout)

    def left(self, now: float) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self.at - now)
