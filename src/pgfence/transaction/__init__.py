"""Locks that belong to the caller's transaction and end with it.

A free lock costs one round trip. If the lock is the first statement of its transaction, the driver is psycopg, no event listener
for statements is registered, and `echo` is off, BEGIN shares that round trip. Several names also cost one round trip if the lock
is the first statement and no hook listens for `before_cursor_execute`. Otherwise, a savepoint is needed, and they cost three.
Acquiring the same lock again in one transaction costs no round trip.
"""

from __future__ import annotations

from pgfence.transaction._aio import AsyncTransactionLock
from pgfence.transaction._sync import TransactionLock

__all__ = ["AsyncTransactionLock", "TransactionLock"]
