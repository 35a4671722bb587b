"""Estimate how full the server's lock table is, and reject requests that would fill it."""

from __future__ import annotations

import time

from pgfence._process.callbacks import log
from pgfence._sql import server
from pgfence.errors import CapacityError

MANY_KEYS = 100
"""Requests for more keys than this are checked against a recent count."""
COUNT_EVERY = 1.0


class LockTable:
    """The last count of the server's locks, and the number of locks that this process has acquired since."""

    def __init__(self) -> None:
        self._counted_at = 0.0
        self._used = 0
        self._limit = 0
        self._warned = False

    @property
    def use(self) -> tuple[int, int]:
        """The entries in use at the last count and those added since, and the capacity, which is 0 if it is not known."""
        return self._used, self._limit

    def needs_count(self, keys: int) -> bool:
        """Return whether the locks must be counted before a large request is checked."""
        # The last count may be old and does not include what this process has released since, so a request is never rejected
        # without a new count.
        return time.monotonic() - self._counted_at > COUNT_EVERY or (
            self._limit > 0 and server.judge_capacity(self._used, keys, self._limit) != "fine"
        )

    def note_count(self, used: int, limit: int | None = None) -> None:
        self._counted_at = time.monotonic()
        self._used = used
        if limit is not None:
            self._limit = limit

    def note_taken(self, keys: int) -> None:
        """Add locks that this process has acquired to the last count."""
        self._used += keys

    def check_room(self, keys: int) -> None:
        """Raise CapacityError if the request would fill the server's lock table. Log a warning when it becomes nearly full."""
        if not self._limit:
            return
        judged = server.judge_capacity(self._used, keys, self._limit)
        if isinstance(judged, CapacityError):
            raise judged
        if judged == "warn" and not self._warned:
            log.warning(
                "the server's lock table is nearly full: %d of at least %d entries are used. Hold fewer locks at a time, or increase"
                " max_locks_per_transaction",
                self._used,
                self._limit,
            )
        self._warned = judged == "warn"
