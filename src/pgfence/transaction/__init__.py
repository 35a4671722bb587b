"""Locks that belong to the caller's transaction and end with it.

Promised: of all transactions that ask for a key through pgfence, exclusive or shared, only those run at a time that may. A
lock that was granted is held until COMMIT or ROLLBACK, or until a ROLLBACK TO a savepoint that is older than it; no crash,
cancel or lost connection can leave it behind. What is read *after* it is granted is as new as the last holder's commit.

Not promised: anything after COMMIT or ROLLBACK; freshness of what was read before the lock; anything under REPEATABLE READ
and SERIALIZABLE, whose snapshot is always older than the lock (refused, unless `stale_snapshot_ok=True`); an order among
those who wait.

The wait happens once, in the server, so that its deadlock detector protects the caller. A timeout leaves the transaction as
it was before. A deadlock or a cancelled statement aborts it, as PostgreSQL does for every statement; a lost connection and
every other database error reach the caller as SQLAlchemy's own exceptions, for the transaction is the caller's. A task that
is cancelled during the wait loses its connection, and with it the transaction, as with any statement of an AsyncSession.

A lock costs one round trip when it is free. Several names cost one when the lock is the first thing its transaction does, as
it should be; later on, two more for a savepoint. The same lock again in one transaction costs none.
"""

from __future__ import annotations

from pgfence.transaction._aio import AsyncTransactionLock
from pgfence.transaction._sync import TransactionLock

__all__ = ["AsyncTransactionLock", "TransactionLock"]
