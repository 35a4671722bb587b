"""Retry whole transactions after conflicts: serialization failures, deadlocks and version conflicts.

Guarantees: each attempt has a separate Session and transaction and reads everything again, so it uses no stale data of the
previous attempt. A returned result is that of a committed attempt. Another attempt follows only if the previous one cannot have
committed anything, and only after one of these errors:

- `VersionConflictError` from a flush, and SQLAlchemy's own StaleDataError;
- SQLSTATE 40001 (serialization failure) and 40P01 (deadlock), wherever they arise, including at COMMIT; also `DeadlockError`,
  and an `IdempotencyInProgressError` with SQLSTATE 40001.

The number of attempts is bounded, and so is the time until the last one begins. Then the last error is raised. Attempts are
separated by a random backoff whose upper limit is 5 ms at first and doubles each time, up to 500 ms, so that conflicting
transactions rarely collide again.

Limitations: nothing is guaranteed about effects outside the transaction. An email that the function sends is sent again in each
attempt. Return what must be done, and do it after the commit. A running attempt is never interrupted.

All other errors are raised immediately, for example a lost connection (during COMMIT as `CommitOutcomeUnknownError`, because the
server may have committed), a conflict with the version that a client sent (`VersionConflictError` with `retryable` False), and
errors of the caller's own code.

A transaction that is already open is never retried. Under REPEATABLE READ and SERIALIZABLE, a savepoint keeps the snapshot of the
surrounding transaction, so every attempt in a savepoint would end with the same 40001.
"""

from __future__ import annotations

from pgfence.retrying._functions import in_transaction, run_transaction
from pgfence.retrying._rules import TransactionAttempt

__all__ = ["TransactionAttempt", "in_transaction", "run_transaction"]
