"""Translate the outcome of a lease statement, or a missing response, into the error that the caller sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from pgfence._holds.hold import format_names
from pgfence._sql.addresses import describe_server
from pgfence._sql.encoding import TextError
from pgfence._sql.errors import (
    ErrorContext,
    is_connection_lost,
    is_driver_error,
    translate_connect_error,
    translate_error,
)
from pgfence._sql.sqlstate import LOCK_NOT_AVAILABLE, SERIALIZATION_FAILURE, sqlstate_of
from pgfence.errors import LockLostError, PgfenceError, UnreachableError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from pgfence._connections.connection import LockConnection
    from pgfence._leases.request import AcquireRequest
    from pgfence._sql.storage import TableNames


class Asker(Protocol):
    """The part of a lease manager that the translations need."""

    noun: ClassVar[str]
    needed: ClassVar[int]
    engine: Engine


def translate_failure(asker: Asker, error: Exception, claim: AcquireRequest, *, server_spoke: bool) -> Exception:
    """Return the exception to raise for an error of an attempt to acquire."""
    if told := _translate(asker, error, claim.place, claim.needed):
        return told
    if server_spoke and not isinstance(error, UnreachableError):
        return error
    told_unreachable = translate_connect_error(asker.engine, error, "")
    if told_unreachable is None and not isinstance(error, PgfenceError) and not is_driver_error(error):
        return error  # raised by a signal handler, not by the database: propagate unchanged
    reason = str(told_unreachable or error).strip()
    return UnreachableError(
        f"no response from the server for {asker.noun} {format_names(claim.names)} "
        f"({reason or describe_server(asker.engine)}): it is unknown whether it was granted. If it was granted, it is released "
        f"as soon as the server responds, or expires after its TTL"
    )


def _translate(asker: Asker, error: Exception, place: TableNames, needed: int | None) -> PgfenceError | None:
    # A pooled connection can survive a switch-over that has turned its server into a standby.
    context = ErrorContext(
        needed or asker.needed, on_primary="Connect to the primary, where pgfence can write its rows"
    )
    return translate_error(error, place, context, asker.engine)


def statement_error(
    asker: Asker, error: Exception, place: TableNames, *, server_spoke: bool, needed: int | None = None
) -> Exception | None:
    """Return the exception to raise for an error of a statement that grants nothing; None to re-raise the error itself."""
    if told := _translate(asker, error, place, needed):
        return told
    return (
        None if server_spoke else translate_connect_error(asker.engine, error, f"The state of {asker.noun} is unknown")
    )


def is_rejection(session: LockConnection, error: BaseException) -> bool:
    """Return whether the server or the driver rejected the statement, so that nothing was granted and the connection is usable."""
    if isinstance(error, TextError):
        return True  # The driver raised this error before anything was sent.
    return (
        sqlstate_of(error) is not None
        and isinstance(error, Exception)
        and not (session.dead or is_connection_lost(error))
    )


def is_conflict(error: BaseException) -> bool:
    """Return whether to retry immediately, because a concurrent transaction caused a serialization failure."""
    return sqlstate_of(error) == SERIALIZATION_FAILURE


def is_row_locked(error: BaseException) -> bool:
    """Return whether another session has locked the row.

    The lease then counts neither as free nor as held, so the caller retries.
    """
    return sqlstate_of(error) == LOCK_NOT_AVAILABLE


def is_retryable(error: BaseException) -> bool:
    """Return whether to retry an idempotent statement, such as an adoption, which grants the same new id again."""
    return isinstance(error, UnreachableError) or is_conflict(error) or is_row_locked(error)


def build_adoption_error(claim: AcquireRequest, token: int, outcome: str) -> LockLostError:
    """Return the error for a reference that cannot be adopted."""
    why = {
        "superseded": "it was already adopted, or another process has acquired it",
        "evicted": "it was evicted",
        "overdue": "its max_hold is over",
    }.get(outcome, "it has expired, because no process adopted it within its TTL")
    return LockLostError(
        f"lease {format_names(claim.names)} cannot be adopted: {why}",
        names=claim.names,
        reason=outcome,  # type: ignore[arg-type]
        token=token,
    )
