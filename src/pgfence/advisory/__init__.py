"""`AdvisoryLock` and `AsyncAdvisoryLock`: session-level advisory locks.

The lock is held until it is released, or until the database session of its connection ends.

Sources: PostgreSQL manual, "Explicit Locking" (advisory locks) and "Advisory Lock Functions".
"""

from __future__ import annotations

from pgfence.advisory._aio import AsyncAdvisoryLock
from pgfence.advisory._sync import AdvisoryLock

__all__ = ["AdvisoryLock", "AsyncAdvisoryLock"]
