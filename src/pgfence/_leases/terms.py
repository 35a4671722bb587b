"""Compute how long a lease is trusted and when it is renewed, without I/O or clocks."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from pgfence._process.clock import between, seconds

if TYPE_CHECKING:
    from pgfence._process.clock import Seconds


SHORTEST_TTL = 0.3
"""The time of three heartbeats of 0.1 s."""
LONGEST_TTL = 86_400.0
"""The limit for a TTL given as a number. A longer one must be a timedelta, because a large number may mean milliseconds."""
LONGEST = 100 * 365 * 86_400.0
MARGIN = 5.0
FIRST_RETRY = 0.05
LONGEST_RETRY = 1.0
"""The longest pause between two failed renewals, in seconds. A lease may lose this much time after an outage has ended."""
LONGEST_STATEMENT = 30.0
SHORTEST_PATIENCE = 0.5
NOTABLE_STEP = 1.0
"""The smallest step back of the server's clock, in seconds, that is logged. Time services make smaller corrections every day."""


def compute_interval(ttl: float) -> float:
    """Return the seconds between renewals."""
    # The interval is a third of the TTL, so two renewals in a row may fail, and the third renewal can still be in time.
    return ttl / 3


def compute_margin(ttl: float) -> float:
    """Return the safety margin: the seconds before the server's deadline at which a holder stops trusting its lease."""
    return min(MARGIN, ttl / 10)


def compute_shortest_ttl(pause: float, renewal: float) -> float:
    """Return the shortest TTL that survives `pause` seconds after a renewal is due and then a renewal of `renewal` seconds."""
    late = pause + renewal
    # The margin is a share of the TTL, up to a maximum. The share is used unless the margin would exceed the maximum.
    ttl = late / (1 - 1 / 3 - 1 / 10)
    return max(SHORTEST_TTL, ttl if ttl / 10 <= MARGIN else (late + MARGIN) / (1 - 1 / 3))


def compute_deadline(started: float, remaining: float, ttl: float) -> float:
    """Return the time until which a grant is trusted, on the clock from which `started` was read when the statement was sent.

    `remaining` are the seconds that the server granted, counted from some moment after `started`. The margin is a share of `ttl`.
    """
    # The time counts from the moment of sending, not of the response. However long the response takes, the server's deadline is
    # never earlier. The margin covers the drift between the two clocks, and lets a step that has just begun finish.
    return started + remaining - compute_margin(ttl)


def retry_after(failures: int, ttl: float) -> float:
    """Return the jittered pause in seconds after the n-th failed renewal in a row: at most 1 s, and at most a tenth of the TTL."""
    longest = min(ttl / 10, LONGEST_RETRY, FIRST_RETRY * 2.0 ** min(failures, 20))
    return longest * between(0.5, 1.0)


def compute_statement_budget(left: float) -> float:
    """Return the seconds that a renewal may take if `left` seconds remain until the deadline."""
    # A renewal gets half of the seconds left, so that a second try on a new connection is possible. If each half were shorter
    # than 0.5 s, it gets all of them.
    return min(left if left < 2 * SHORTEST_PATIENCE else left / 2, LONGEST_STATEMENT)


class LeaseTerms(NamedTuple):
    """The times with which a lease is requested, in seconds."""

    ttl: float
    min_hold: float = 0.0
    lock_delay: float = 0.0
    max_hold: float | None = None

    @property
    def first(self) -> float:
        """The length of the first grant, in seconds."""
        return self.ttl if self.max_hold is None else min(self.ttl, self.max_hold)


def ttl_of(value: Seconds) -> float:
    """Return a TTL in seconds.

    Raises:
        TypeError: the TTL is neither a number nor a timedelta.
        ValueError: the TTL is shorter than three heartbeats, or longer than a day and not a timedelta.
    """
    ttl = seconds(value, "ttl")
    if ttl < SHORTEST_TTL:
        raise ValueError(
            f"ttl must be at least {SHORTEST_TTL:g} s, not {ttl:g} s: the lease is renewed every ttl/3, and even a short pause"
            " would lose it. A ttl of 30 to 60 s suits most jobs"
        )
    if ttl > LONGEST_TTL and not isinstance(value, timedelta):
        raise ValueError(
            f"ttl={ttl:g} is more than a day, and the unit is seconds: a crashed holder would block the name for that long."
            " Use a short ttl, which the heartbeat renews, or pass timedelta(seconds=...) if you mean it"
        )
    return _check_finite(ttl, "ttl")


def build_terms(ttl: Seconds, *, max_hold: Seconds | None, min_hold: Seconds, lock_delay: Seconds) -> LeaseTerms:
    """Validate the times of a lease and return them in seconds.

    Raises:
        TypeError: a value is neither a number nor a timedelta.
        ValueError: a value is out of range, or contradicts another one.
    """
    length = ttl_of(ttl)
    least = seconds(min_hold, "min_hold")
    delay = _check_finite(seconds(lock_delay, "lock_delay"), "lock_delay")
    if least > length:
        raise ValueError(
            f"min_hold={least:g} is longer than ttl={length:g}: after a crash, the name would be free earlier than after a "
            f"release. Increase the ttl to at least min_hold"
        )
    most = None if max_hold is None or seconds(max_hold, "max_hold") == math.inf else seconds(max_hold, "max_hold")
    if most is not None:
        if most <= 0:
            raise ValueError("max_hold must be more than 0 seconds; pass None for an unlimited hold")
        if least > most:
            raise ValueError(
                f"min_hold={least:g} is longer than max_hold={most:g}: decrease min_hold, or increase max_hold"
            )
        _check_finite(most, "max_hold")
    return LeaseTerms(length, least, delay, most)


def _check_finite(value: float, what: str) -> float:
    if value > LONGEST:
        raise ValueError(f"{what} must be finite and less than a hundred years, not {value:g} s")
    return value


LeaseKind: TypeAlias = Literal["lease", "effect"]
"""Which statements renew and end a grant."""


Heartbeat: TypeAlias = Literal["auto", "progress", "manual"]
