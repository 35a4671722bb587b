"""`AdvisoryLock` and `AsyncAdvisoryLock`: session-level advisory locks.

The server holds the lock for as long as the database session of the lock's own connection lives.

Sources: PostgreSQL manual, "Explicit Locking" (advisory locks) and "Advisory Lock Functions".
"""

from __future__ import annotations

from pgfence.advisory._aio import AsyncAdvisoryLock
from pgfence.advisory._sync import AdvisoryLock

__all__ = ["AdvisoryLock", "AsyncAdvisoryLock"]
