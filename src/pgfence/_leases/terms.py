"""How long a grant is trusted, and when to renew it. Pure: numbers in, numbers out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeAlias

from pgfence._process.clock import between, seconds

if TYPE_CHECKING:
    from pgfence._process.clock import Seconds


SHORTEST_TTL = 0.3
"""Three heartbeats of 0.1 s."""
LONGEST_TTL = 86_400.0
"""As a number of seconds; a longer one is asked for as a timedelta, so that milliseconds are not taken for seconds."""
LONGEST = 100 * 365 * 86_400.0
MARGIN = 5.0
FIRST_RETRY = 0.05
LONGEST_STATEMENT = 30.0
SHORTEST_PATIENCE = 0.5
NOTABLE_STEP = 1.0
"""Seconds by which the server's clock must have been set back to be logged: time services correct by less every day."""


def compute_interval(ttl: float) -> float:
    """Return the seconds from one renewal to the next: two may fail before the third decides."""
    return ttl / 3


def compute_margin(ttl: float) -> float:
    """Return by how many seconds a holder gives up before the server gives the lease away."""
    return min(MARGIN, ttl / 10)


def compute_deadline(started: float, remaining: float, ttl: float) -> float:
    """Return until when a grant is trusted, on the clock that `started` was read from.

    Args:
        started: when the statement was sent.
        remaining: seconds the server gave, counted from some moment after that.
        ttl: what the margin is a share of: the TTL, or max_hold where that is shorter.
    """
    # From the sending, not from the answer: however long the answer takes, the server's deadline is never earlier than this.
    # The margin covers the drift between both clocks, and gives a step that was just begun the time to end.
    return started + remaining - compute_margin(ttl)


def retry_after(failures: int, ttl: float) -> float:
    """Return the seconds to wait after the n-th renewal in a row without an answer, jittered; never above a tenth of the TTL."""
    longest = min(ttl / 10, FIRST_RETRY * 2.0 ** min(failures, 20))
    return longest * between(0.5, 1.0)


def compute_statement_budget(left: float) -> float:
    """Return the seconds that a renewal may take with `left` seconds to the deadline."""
    # Half leaves time for a second try on a new connection. Below half a second for each try, a second one has no chance.
    return min(left if left < 2 * SHORTEST_PATIENCE else left / 2, LONGEST_STATEMENT)


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What a lease is asked for, in seconds."""

    ttl: float
    min_hold: float = 0.0
    lock_delay: float = 0.0
    max_hold: float | None = None

    @property
    def first(self) -> float:
        """The seconds that the first grant is good for."""
        return self.ttl if self.max_hold is None else min(self.ttl, self.max_hold)


def ttl_of(value: Seconds) -> float:
    """Return a TTL in seconds.

    Raises:
        TypeError: it is neither a number nor a timedelta.
        ValueError: it is shorter than three heartbeats; or above a day, and not a timedelta.
    """
    ttl = seconds(value, "ttl")
    if ttl < SHORTEST_TTL:
        raise ValueError(
            f"ttl must be {SHORTEST_TTL:g} s or more, not {ttl:g}: it is renewed every ttl/3, and a pause of that length"
            " would lose it. 30 to 60 s suit most work"
        )
    if ttl > LONGEST_TTL and not isinstance(value, timedelta):
        raise ValueError(
            f"ttl={ttl:g} is more than a day, and the unit is seconds: whoever crashes blocks the name for that long. Take a"
            " short one, the heartbeat renews it; or say timedelta(seconds=...) if you mean it"
        )
    return _check_finite(ttl, "ttl")


def build_terms(ttl: Seconds, *, max_hold: Seconds | None, min_hold: Seconds, lock_delay: Seconds) -> LeaseTerms:
    """Return what a lease is asked for.

    Raises:
        TypeError: a value is neither a number nor a timedelta.
        ValueError: a value is out of range, or does not go with the TTL.
    """
    length = ttl_of(ttl)
    least = seconds(min_hold, "min_hold")
    delay = _check_finite(seconds(lock_delay, "lock_delay"), "lock_delay")
    if least > length:
        raise ValueError(
            f"min_hold={least:g} is longer than ttl={length:g}: a crash would free the name earlier than a release."
            " Raise the ttl to at least min_hold"
        )
    most = None if max_hold is None or seconds(max_hold, "max_hold") == math.inf else seconds(max_hold, "max_hold")
    if most is not None:
        if most <= 0:
            raise ValueError("max_hold must be above 0 seconds; None does not limit the hold")
        if least > most:
            raise ValueError(f"min_hold={least:g} is longer than max_hold={most:g}")
        _check_finite(most, "max_hold")
    return LeaseTerms(length, least, delay, most)


def _check_finite(value: float, what: str) -> float:
    if value > LONGEST:
        raise ValueError(f"{what} must be finite and below a hundred years, not {value:g} s")
    return value


LeaseKind: TypeAlias = Literal["lease", "effect"]
"""Whose statements renew and end a grant."""


Heartbeat: TypeAlias = Literal["auto", "progress", "manual"]
