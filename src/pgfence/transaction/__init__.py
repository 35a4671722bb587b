"""Locks that belong to the caller's transaction and end with it.

Promised: per key and database one transaction at a time, or several that all asked for it shared, among all who use
PostgreSQL's advisory locks on that key. A lock that was granted is held until COMMIT or ROLLBACK, or until a ROLLBACK TO a
savepoint older than it; no crash, cancel or lost connection leaves it behind. What is read *after* it was granted is as new
as the last holder's commit.

Not promised: anything after COMMIT or ROLLBACK; freshness of what was read before the lock; anything under REPEATABLE READ
and SERIALIZABLE, whose snapshot is always older than the lock (refused, unless `stale_snapshot_ok=True`); an order among
those who wait. A lock is per database and per server: a failover ends it with its transaction.

The wait happens once, in the server, so that its deadlock detector protects the caller. The site's `statement_timeout` and
`lock_timeout` do not cut it short; a limit on the whole transaction (`transaction_timeout`) or of the driver (asyncpg's
`command_timeout`) does. A timeout of ours leaves the transaction as it was before. A deadlock or a cancelled statement aborts
it, as PostgreSQL does for every statement. A lost connection and every other error of the database reach the caller as
SQLAlchemy's own, for the transaction is the caller's. A task that is cancelled during the wait loses its connection, and with
it the transaction, as with any statement of an AsyncSession.

A free lock costs one round trip, which it shares with BEGIN where it is the first statement of its transaction, the driver is
psycopg, and nothing listens for statements. So do several names where the lock is the first statement, as it should be, and no
hook listens for `before_cursor_execute`; elsewhere a savepoint makes it three. The same lock again in one transaction costs none.
"""

from __future__ import annotations

from pgfence.transaction._aio import AsyncTransactionLock
from pgfence.transaction._sync import TransactionLock

__all__ = ["AsyncTransactionLock", "TransactionLock"]
