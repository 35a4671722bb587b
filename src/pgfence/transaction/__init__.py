"""Locks that belong to the caller's transaction and end with it.

A free lock costs one round trip. If it is the first statement of its transaction, the driver is psycopg and no event listener
for statements is registered, it shares that round trip with BEGIN. Several names also cost one round trip if the lock is the
first statement, as it should be, and no hook listens for `before_cursor_execute`. Otherwise a savepoint is needed, and they
cost three. Acquiring the same lock again in one transaction costs no round trip.
"""

from __future__ import annotations

from pgfence.transaction._aio import AsyncTransactionLock
from pgfence.transaction._sync import TransactionLock

__all__ = ["AsyncTransactionLock", "TransactionLock"]
