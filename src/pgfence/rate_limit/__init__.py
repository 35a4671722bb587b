"""Rate limits: at most a given number of units in any window of time, across processes."""

from __future__ import annotations

from pgfence.rate_limit._aio import AsyncRateLimit
from pgfence.rate_limit._sync import RateLimit

__all__ = ["AsyncRateLimit", "RateLimit"]
