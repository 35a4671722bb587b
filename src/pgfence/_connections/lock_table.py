"""How full the server's lock table is, as far as this process knows."""

from __future__ import annotations

import time

from pgfence._process.callbacks import log
from pgfence._sql import server
from pgfence.errors import CapacityError

MANY_KEYS = 100
"""From how many keys on a request is judged by a new count."""
COUNT_EVERY = 1.0


class LockTable:
    """What was counted last, and what this process has taken since."""

    def __init__(self) -> None:
        self._counted_at = 0.0
        self._used = 0
        self._limit = 0
        self._warned = False

    def needs_count(self, keys: int) -> bool:
        """Say whether the table must be counted before a large request is judged."""
        # The last count may be old, and what this process has given back since is not in it: nothing is rejected by that.
        return time.monotonic() - self._counted_at > COUNT_EVERY or (
            self._limit > 0 and server.judge_capacity(self._used, keys, self._limit) != "fine"
        )

    def note_count(self, used: int, limit: int | None = None) -> None:
        self._counted_at = time.monotonic()
        self._used = used
        if limit is not None:
            self._limit = limit

    def note_taken(self, keys: int) -> None:
        """Add what this process took since the last count."""
        self._used += keys

    def check_room(self, keys: int) -> None:
        """Raise CapacityError when the request would fill the server's lock table; warn once when it comes near."""
        if not self._limit:
            return
        judged = server.judge_capacity(self._used, keys, self._limit)
        if isinstance(judged, CapacityError):
            raise judged
        if judged == "warn" and not self._warned:
            log.warning("%d of at least %d places in the server's lock table are taken", self._used, self._limit)
        self._warned = judged == "warn"
