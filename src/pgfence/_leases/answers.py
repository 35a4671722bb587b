"""What the server's word, or its silence, means to whoever asked for a lease."""

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
    """The manager that asked."""

    noun: ClassVar[str]
    needed: ClassVar[int]
    engine: Engine


def translate_failure(asker: Asker, error: Exception, claim: AcquireRequest, *, server_spoke: bool) -> Exception:
    """Return what an error of an attempt means to the caller."""
    if told := _translate(asker, error, claim.place):
        return told
    if server_spoke and not isinstance(error, UnreachableError):
        return error
    told_unreachable = translate_connect_error(asker.engine, error, "")
    if told_unreachable is None and not isinstance(error, PgfenceError) and not is_driver_error(error):
        return error  # a signal handler's
    reason = str(told_unreachable or error).strip()
    return UnreachableError(
        f"the server gave no answer for {asker.noun} {format_names(claim.names)} ({reason or describe_server(asker.engine)}): whether it was"
        " granted is unknown. A grant is given back as soon as the server answers, at the latest its TTL ends it"
    )


def _translate(asker: Asker, error: Exception, place: TableNames) -> PgfenceError | None:
    # Behind a pooler a session of ours outlives the switchover that made a standby of its server.
    context = ErrorContext(asker.needed, on_primary="pgfence writes its rows on the primary")
    return translate_error(error, place, context, asker.engine)


def statement_error(asker: Asker, error: Exception, place: TableNames, *, server_spoke: bool) -> Exception | None:
    """Return what an error of a statement means that could have granted nothing; None: what it says itself."""
    if told := _translate(asker, error, place):
        return told
    return None if server_spoke else translate_connect_error(asker.engine, error, "Nothing is known")


def is_rejection(session: LockConnection, error: BaseException) -> bool:
    """Say whether the server itself refused: then nothing was granted, and the session is as it was."""
    if isinstance(error, TextError):
        return True  # the driver itself rejects some texts, before anything is sent
    return (
        sqlstate_of(error) is not None
        and isinstance(error, Exception)
        and not (session.dead or is_connection_lost(error))
    )


def is_conflict(error: BaseException) -> bool:
    """Say whether to ask again at once: the transaction met another one."""
    return sqlstate_of(error) == SERIALIZATION_FAILURE


def is_row_locked(error: BaseException) -> bool:
    """Say whether somebody keeps the row locked: neither free nor held, so ask again."""
    return sqlstate_of(error) == LOCK_NOT_AVAILABLE


def is_retryable(error: BaseException) -> bool:
    """Say whether to ask for an adoption again: if its answer was lost, the same new id is granted once more."""
    return isinstance(error, UnreachableError) or is_conflict(error) or is_row_locked(error)


def build_adoption_error(claim: AcquireRequest, token: int, outcome: str) -> LockLostError:
    """Return why a reference cannot be adopted."""
    why = {
        "superseded": "it was adopted already, or somebody else has it by now",
        "evicted": "it was evicted",
        "overdue": "its max_hold is over",
    }.get(outcome, "it has expired: nobody adopted it within its TTL")
    return LockLostError(
        f"the lease {format_names(claim.names)} cannot be adopted: {why}",
        names=claim.names,
        reason=outcome,  # type: ignore[arg-type]
        token=token,
    )
