"""The rules of a retry, without I/O: which errors are retried, and the backoff."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sqlalchemy.exc import DBAPIError

from pgfence._api.inputs import find_loaded_classes
from pgfence._process.clock import between
from pgfence._sql.sqlstate import DEADLOCK_DETECTED, SERIALIZATION_FAILURE, sqlstate_of
from pgfence.errors import DeadlockError, IdempotencyInProgressError, PgfenceError, VersionConflictError
from pgfence.types import Event

BASE = 0.005
CAP = 0.5

Outcome: TypeAlias = Literal["committed", "retried", "failed"]

_AGAIN = (SERIALIZATION_FAILURE, DEADLOCK_DETECTED)


@dataclass(frozen=True, slots=True)
class TransactionAttempt(Event):
    """The end of one attempt of `run_transaction`, an event for `configure(on_event=...)`.

    `event` is "committed", "retried" (another attempt follows) or "failed" (the caller gets the error); `name` is the name
    of the function. `owner`, `lease_id` and `token` are None.

    Attributes:
        attempt: the number of the attempt, starting at 1.
        error: the name of the error's class, or None if the attempt was committed.
        sqlstate: the SQLSTATE of the error, if the server reported one.
        seconds: the duration of the attempt.
        pause: seconds until the next attempt begins; 0 if there is none.
    """

    attempt: int
    error: str | None
    sqlstate: str | None
    seconds: float
    pause: float


def pick_pause(attempt: int) -> float:
    """Return the seconds to wait after a failed attempt: random ("full jitter"), up to a limit that doubles each time."""
    return between(0, min(CAP, BASE * 2 ** min(attempt - 1, 10)))


def is_curable(error: Exception) -> bool:
    """Return whether another attempt can succeed after this error. The error that caused it is not considered."""
    if isinstance(error, PgfenceError):
        # With 40001, the key is in progress only in this snapshot, which is older than the other commit. A new snapshot contains
        # the result.
        if isinstance(error, IdempotencyInProgressError):
            return error.sqlstate == SERIALIZATION_FAILURE
        return isinstance(error, (VersionConflictError, DeadlockError)) and error.retryable
    return (
        isinstance(error, find_loaded_classes("sqlalchemy.orm.exc", "StaleDataError")) or find_sqlstate(error) in _AGAIN
    )


def is_snapshot_error(error: Exception) -> bool:
    """Return whether the error comes from the snapshot or the locks of the whole transaction, which a savepoint keeps."""
    return isinstance(error, DeadlockError) or find_sqlstate(error) in _AGAIN


def find_sqlstate(error: Exception) -> str | None:
    """Return the SQLSTATE of an error of SQLAlchemy, of a driver or of pgfence, or None for all others."""
    if isinstance(error, DBAPIError):
        return sqlstate_of(error.orig)
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return state if isinstance(state, str) else None
