"""Whole transactions that are done again when PostgreSQL, or a version, says that somebody else was first.

Promised: each attempt has a Session and a transaction of its own and reads everything anew, so nothing stale survives from
the one before. What is returned was committed. An attempt is followed by another one only if nothing of it can have been
committed, and only for the errors that another attempt can cure:

- `VersionConflictError` from a flush, and SQLAlchemy's own StaleDataError;
- SQLSTATE 40001, serialization failure, and 40P01, deadlock, wherever they arise, at COMMIT too; `DeadlockError` as well.

Attempts and total time are bounded, and the last error is the one that is raised. Between two attempts lies a random pause
between 0 and 5 ms, doubled with each attempt up to 500 ms, so that those who met do not meet again.

Not promised: anything about effects outside the transaction. A mail sent by the function is sent again with each attempt:
return what has to be done and do it after the commit. Nothing interrupts an attempt that is running.

Never tried again: a connection that was lost, at any moment (during COMMIT that is `CommitOutcomeUnknownError`, because the
server may have committed); the version that a client sent (`VersionConflictError` with `retryable` False), which no attempt
makes right; and any error of the caller's own.

Never inside a transaction that is open already. Under REPEATABLE READ and SERIALIZABLE a savepoint keeps the snapshot of the
transaction around it, so an attempt in a savepoint meets the same 40001 again, however often.
"""

from __future__ import annotations

from pgfence.retrying._functions import in_transaction, run_transaction
from pgfence.retrying._rules import TransactionAttempt

__all__ = ["TransactionAttempt", "in_transaction", "run_transaction"]
