"""Locks that belong to the caller's transaction and end with it.

A free lock costs one round trip. With psycopg, BEGIN shares that round trip if the lock is the first statement of its
transaction, `echo` is off, and no listener for statements or for `begin` is registered. Several names cost three round trips,
because they need a savepoint, unless the lock is the first statement and no hook listens for `before_cursor_execute`. Acquiring
the same lock again in one transaction costs no round trip.
"""

from __future__ import annotations

from pgfence.transaction._aio import AsyncTransactionLock
from pgfence.transaction._sync import TransactionLock

__all__ = ["AsyncTransactionLock", "TransactionLock"]
