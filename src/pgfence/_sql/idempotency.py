"""The statements of an idempotency key in the caller's transaction, which claim the key and finish it.

Each statement takes one round trip. The claim can share it with BEGIN, and the end with COMMIT.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import event

from pgfence._sql.errors import message_of, read_detail
from pgfence._sql.params import call, mark, name_of, style_of
from pgfence._sql.postponed import postpone
from pgfence._sql.savepoints import read_along
from pgfence._sql.sqlstate import sqlstate_of
from pgfence._sql.storage import KEYS
from pgfence._sql.transaction import is_observed, send, send_quick
from pgfence.errors import IdempotencyMisuseError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.engine import ExceptionContext
    from sqlalchemy.exc import DBAPIError

    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames
    from pgfence.errors import PgfenceError

NEEDED = KEYS

UNIQUE_VIOLATION = "23505"
UNFINISHED = "PF004"
"""The SQLSTATE of a COMMIT in a transaction that has claimed a key and not finished it."""

_TRANSLATING = "_pgfence_keys_translating"

_COLUMNS = re.compile(r"\((.*?)\)=\(")
_COLUMN = re.compile(r'"((?:[^"]|"")+)"|([^\s,"]+)')
_LONGEST = 1e9
_LIFT = "SELECT pg_catalog.current_setting('statement_timeout'), pg_catalog.set_config('statement_timeout', '0', true)"
_PUT_BACK = "SELECT pg_catalog.set_config('statement_timeout', {}, true)"


class KeyRow(NamedTuple):
    """A key and the values with which it is claimed."""

    scope: str
    key: str
    fingerprint: bytes | None
    keep: float


class ClaimResult(NamedTuple):
    """The result of a claim, with the stored text if the outcome is "done" or "failed"."""

    outcome: str
    """Either "fresh" (claimed now), "done", "failed", "reused" (for another payload), "busy" (claimed by another open transaction),
    "own" (claimed by this transaction before), "snapshot" (committed after this transaction's snapshot) or "deadlock".
    """
    text: str


def claim(connection: Connection, place: TableNames, row: KeyRow, wait: float) -> ClaimResult:
    """Claim a key, waiting up to `wait` seconds for its current owner. None of the results aborts the transaction."""
    style = style_of(connection.dialect)
    values = (*row, min(wait, _LONGEST))
    if not wait:
        return _decode_claim(send_quick(connection, _claim(place, style), values))
    # The limit is set by a separate statement, because a statement cannot change its own time limit.
    limit = send(connection, _LIFT).one()[0]
    answer = _decode_claim(send(connection, _claim(place, style), values).scalar_one())
    if limit != "0":
        send(connection, _PUT_BACK.format("$1" if style == "numeric" else "%s"), (limit,))
    return answer


class EffectAttempt(NamedTuple):
    """The attempt of an effect that has claimed a key."""

    number: int
    remaining: float
    """The seconds until the claim of the attempt ends."""
    kept: float
    """The seconds until a transaction can claim the key in any case."""
    ended: str | None
    """The error with which the attempt ended, if any."""


def find_attempt(connection: Connection, place: TableNames, row: KeyRow) -> EffectAttempt | None:
    """Return the attempt of the effect that has claimed a key, or None if a transaction has claimed it."""
    style = style_of(connection.dialect)
    found = send(connection, _select_attempt(place, style), (row.scope, row.key)).one_or_none()
    return None if found is None else EffectAttempt._make(found)


def finish(connection: Connection, place: TableNames, row: KeyRow, status: str, text: str) -> bool:
    """Store the outcome of the work under a key.

    Return False if this transaction has not claimed the key, or has rolled the claim back.
    """
    style = style_of(connection.dialect)
    done: bool = send_quick(connection, _finish(place, style), (row.scope, row.key, status, text))
    return done


def finish_at_commit(
    connection: Connection,
    place: TableNames,
    row: KeyRow,
    status: str,
    text: str,
    build_error: Callable[[], PgfenceError],
) -> bool:
    """Store the outcome in the round trip of COMMIT. Return False if this is not possible, so that the caller must store it now.

    `build_error` builds the error of the COMMIT if the key is no longer claimed.
    """
    # Listeners must see each statement separately.
    if is_observed(connection):
        return False
    # From now on, the statements are observed, so that the postponed statement is sent before any statement that must come after
    # it.
    read_along(connection)
    finish_or_fail = _finish_or_fail(place, style_of(connection.dialect))
    return postpone(connection, finish_or_fail, (row.scope, row.key, status, text), build_error)


def translate(connection: Connection) -> None:
    """Raise pgfence's exception when a commit on this engine is rejected because of an unfinished key."""
    dialect = vars(connection.dialect)
    if _TRANSLATING not in dialect:
        event.listen(connection.engine, "handle_error", _translate_unfinished)
        dialect[_TRANSLATING] = True


def _translate_unfinished(context: ExceptionContext) -> BaseException | None:
    error = context.original_exception
    if sqlstate_of(error) != UNFINISHED:
        return None
    return IdempotencyMisuseError(
        f"{message_of(error)}. Nothing was committed. Most likely an exception was swallowed, COMMIT ran inside the block, or SET"
        " CONSTRAINTS ALL IMMEDIATE ran before its end. Let the exception leave the transaction, wrap the call in a savepoint, or"
        " name the constraints in SET CONSTRAINTS",
        sqlstate=UNFINISHED,
    )


def _decode_claim(told: str) -> ClaimResult:
    outcome, _, text = told.partition(" ")
    return ClaimResult(outcome, text)


@cache
def _claim(place: TableNames, style: ParamStyle) -> str:
    kinds = "text, text, bytea, double precision, double precision"
    return f"SELECT {call(place, style, 'claim_key_v1', kinds)}"


@cache
def _select_attempt(place: TableNames, style: ParamStyle) -> str:
    now = "pg_catalog.clock_timestamp()"
    return (
        f"SELECT k.attempt, GREATEST(0, EXTRACT(epoch FROM k.locked_until - {now}))::double precision,"
        f" GREATEST(0, EXTRACT(epoch FROM k.expires_at - {now}))::double precision, k.result ->> 'ended'"
        f" FROM {name_of(place, 'idempotency_key', style)} AS k WHERE k.scope = CAST({mark(style, 1)} AS text)"
        f" AND k.key = CAST({mark(style, 2)} AS text) AND k.status = 'in_progress' AND k.locked_until IS NOT NULL"
    )


@cache
def _finish(place: TableNames, style: ParamStyle) -> str:
    return f"SELECT {call(place, style, 'finish_key_v1', 'text, text, text, text')}"


@cache
def _finish_or_fail(place: TableNames, style: ParamStyle) -> str:
    # The statement divides by zero if the key is no longer claimed, because only an error keeps the COMMIT from being executed.
    return f"SELECT 1 / CAST({call(place, style, 'finish_key_v1', 'text, text, text, text')} AS integer)"


def find_duplicate_columns(error: DBAPIError) -> frozenset[str] | None:
    """Return the columns of the unique key that an INSERT violated (empty if unknown), or None for any other error."""
    if sqlstate_of(error) != UNIQUE_VIOLATION:
        return None
    if found := _COLUMNS.search(read_detail(error)):
        return frozenset(plain or quoted.replace('""', '"') for quoted, plain in _COLUMN.findall(found[1]))
    return frozenset()
