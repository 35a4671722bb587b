"""One key in the caller's transaction, on a sync Session; the async class calls this through `run_sync`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from sqlalchemy import table, update
from sqlalchemy.exc import DBAPIError, ResourceClosedError, UnboundExecutionError

from pgfence._api.contexts import attach
from pgfence._api.transactions import open_connection
from pgfence._holds.wait_plan import WARN_AFTER
from pgfence._process.clock import clock
from pgfence._process.events import emit_event
from pgfence._sql import idempotency as sql
from pgfence._sql.errors import ErrorContext, raise_translated
from pgfence._sql.params import style_of
from pgfence._sql.sqlstate import DEADLOCK_DETECTED, SERIALIZATION_FAILURE
from pgfence._sql.storage import table_names_of
from pgfence._sql.transaction import read_driver_state
from pgfence._values import errors
from pgfence.config import config_of
from pgfence.errors import (
    DeadlockError,
    IdempotencyInProgressError,
    IdempotencyKeyReusedError,
    IdempotencyMisuseError,
    PgfenceError,
    TransactionStateError,
)
from pgfence.keys import qualify_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, SessionTransaction

    from pgfence._sql.storage import TableNames
    from pgfence._values.codec import Codec

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger("pgfence.idempotency")

# This statement only selects the engine of a routing Session, and is never executed. A Session that routes reads must route it to
# the primary.
_WRITE = update(table("pgfence_idempotency_key"))
_CONTEXT = ErrorContext(
    sql.NEEDED,
    on_primary="An idempotency key is claimed on the primary",
    fewer_locks="PostgreSQL has aborted this transaction. Claim fewer keys in one transaction",
)


_EVENTS = {"fresh": "acquired", "done": "replayed", "failed": "replayed", "busy": "timeout", "reused": "reused"}
"""The event of each outcome. The other outcomes are mistakes of the caller, or require a retry of the transaction."""


@dataclass(frozen=True, slots=True)
class KeyName:
    """A key and its scope."""

    scope: str
    key: str

    def __str__(self) -> str:
        return f"the idempotency key {self.key!r} of scope {self.scope!r}"


@dataclass(frozen=True, slots=True)
class KeyCall(KeyName, Generic[T]):
    """The arguments of one call of `idempotent`."""

    fingerprint: bytes | None
    codec: Codec[T]
    timeout: float | None
    keep: float
    record: tuple[type[Exception], ...]


@dataclass(frozen=True, slots=True)
class Claim(Generic[T]):
    """The outcome of a request for a key, which was either claimed, or found with its result."""

    row: sql.KeyRow
    replayed: bool
    result: T | None = None
    savepoint: SessionTransaction | None = None


def claim(session: Session, call: KeyCall[T]) -> Claim[T]:
    """Claim the key in the session's transaction, which is begun if necessary, or return the result stored under it."""
    connection = connection_of(session)
    place, config = table_names_of(connection), config_of(connection)
    events = config.events
    row = sql.KeyRow(qualify_name(call.scope, config.namespace, "the scope"), call.key, call.fingerprint, call.keep)
    limit = config.default_timeout if call.timeout is None else call.timeout
    began, waits = clock(), False
    answer = _send(connection, place, lambda: sql.claim(connection, place, row, 0))
    if answer.outcome == "busy" and limit:
        answer, waits = _wait(connection, place, row, call, limit), True
    if events.active and answer.outcome in _EVENTS:
        event = "refused" if answer.outcome == "busy" and not limit else _EVENTS[answer.outcome]
        contended = waits or event == "refused"
        emit_event(
            events, event, f"{call.scope}:{call.key}", "idempotency key", waited=clock() - began, contended=contended
        )
    match answer.outcome:
        case "fresh":
            # The savepoint lets a recorded error roll back the work and keep the claim.
            return Claim(row, replayed=False, savepoint=session.begin_nested() if call.record else None)
        case "done":
            return Claim(row, replayed=True, result=call.codec.decode(answer.text))
        case "failed":
            raise errors.decode(answer.text, call.record, call.codec, str(call))
    if answer.outcome == "busy":
        raise _busy_error(call, _send(connection, place, lambda: sql.find_attempt(connection, place, row)), limit)
    raise _claim_error(call, answer.outcome)


def _wait(
    connection: Connection, place: TableNames, row: sql.KeyRow, call: KeyCall[T], limit: float
) -> sql.ClaimResult:
    began = clock()
    answer = _send(connection, place, lambda: sql.claim(connection, place, row, limit))
    if (waited := clock() - began) > WARN_AFTER:
        how = "unsuccessfully" if answer.outcome == "busy" else "until another transaction had finished"
        log.warning("waited %.0f s for %s %s", waited, call, how)
    return answer


def complete(session: Session, call: KeyCall[T], claimed: Claim[T], value: T) -> None:
    """Store the result now, or together with the COMMIT, which then raises the errors."""
    text = call.codec.encode(value)
    if claimed.savepoint is not None:
        _release(session, call, claimed, claimed.savepoint)
    _finish(session, call, claimed, "done", text)


def _release(session: Session, call: KeyCall[T], claimed: Claim[T], savepoint: SessionTransaction) -> None:
    """Flush the pending changes of the work, and release the savepoint."""
    # This comes before the release, so that an error of the flush counts as an error of the work and can be recorded.
    try:
        session.flush()
    except Exception as error:
        if errors.is_among(error, call.record):
            try:
                record(session, call, claimed, error)
            except Exception as failure:
                attach(error, failure, "while this error was being recorded")
        raise
    try:
        savepoint.commit()
    except ResourceClosedError as error:
        raise _claim_gone_error(call) from error


def record(session: Session, call: KeyCall[T], claimed: Claim[T], error: Exception) -> None:
    """Roll back the work that was done since the claim, and store the error instead."""
    text = errors.encode(error, call.codec)
    if claimed.savepoint is not None:
        claimed.savepoint.rollback()
    _finish(session, call, claimed, "failed", text)


def _finish(session: Session, call: KeyCall[T], claimed: Claim[T], status: str, text: str) -> None:
    connection = connection_of(session)
    place = table_names_of(connection)
    if sql.finish_at_commit(connection, place, claimed.row, status, text, partial(_claim_gone_error, call)):
        return
    if not _send(connection, place, lambda: sql.finish(connection, place, claimed.row, status, text)):
        raise _claim_gone_error(call)


def _claim_gone_error(call: KeyName) -> IdempotencyMisuseError:
    return IdempotencyMisuseError(
        f"{call} is no longer claimed: its transaction, or a savepoint around the claim, has ended inside the block."
        " Commit and roll back outside the block"
    )


def connection_of(session: Session) -> Connection:
    """Return the connection of the session's transaction, which is begun if necessary."""
    try:
        connection = open_connection(session, {"clause": _WRITE})
    except UnboundExecutionError as error:
        error.add_note("An idempotency key has no mapped class: create the Session with bind= for its engine")
        raise
    style_of(connection.dialect)
    sql.translate(connection)
    state = read_driver_state(connection)
    if state.autocommit or state.pipeline:
        where, way = (
            ("in autocommit", "use a connection without AUTOCOMMIT")
            if state.autocommit
            else ("in psycopg's pipeline mode", "leave the pipeline before you request a key")
        )
        raise TransactionStateError(
            f"the connection is {where}, but an idempotency key needs a transaction that commits it together with the work: {way}"
        )
    return connection


def _send(connection: Connection, place: TableNames, send: Callable[[], R]) -> R:
    try:
        return send()
    except DBAPIError as error:
        raise_translated(error, place, _CONTEXT, connection.engine)
        raise


def _claim_error(call: KeyName, outcome: str) -> PgfenceError:
    match outcome:
        case "reused":
            return IdempotencyKeyReusedError(
                f"{call} belongs to a request with another payload: use a new key for a new request",
                scope=call.scope,
                key=call.key,
            )
        case "own":
            return IdempotencyMisuseError(
                f"this transaction has already claimed {call} and has not finished it: roll back before you retry"
            )
        case "deadlock":
            return DeadlockError(
                f"waiting for {call} caused a deadlock: claim keys in the same order everywhere, or one per transaction",
                sqlstate=DEADLOCK_DETECTED,
            )
    return IdempotencyInProgressError(  # "snapshot"
        f"{call} was claimed by a transaction that committed after this one's snapshot (REPEATABLE READ, SERIALIZABLE):"
        " only a new transaction can see its result, so roll back and retry in a new one",
        scope=call.scope,
        key=call.key,
        sqlstate=SERIALIZATION_FAILURE,
    )


def _busy_error(call: KeyName, attempt: sql.EffectAttempt | None, limit: float) -> IdempotencyInProgressError:
    """Return the error for a key that is claimed by another transaction, or by an attempt at an effect."""
    if attempt is None:
        waited = f", which did not end within {limit:g} s" if limit else ""
        message = f"{call} is in use by another transaction{waited}"
        return IdempotencyInProgressError(message, scope=call.scope, key=call.key)
    over = attempt.ended is not None or not attempt.remaining
    how = f"ended with {attempt.ended}" if attempt.ended else "was lost" if over else "is running"
    then = f"; a transaction can claim the key in {attempt.kept:.0f} s" if over else ""
    return IdempotencyInProgressError(
        f"{call} is claimed by attempt {attempt.number} of an IdempotentEffect, which {how}, and transactions do not wait for"
        f" it{then}. Use separate scopes for idempotent() and IdempotentEffect",
        scope=call.scope,
        key=call.key,
        retry_after=attempt.kept if over else None,
        ended_with=attempt.ended,
    )
