"""List the keys of unfinished effects, and free one of them in one transaction.

Results, payloads and saved steps are not read, because they may be personal data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from sqlalchemy.exc import DBAPIError

from pgfence._sql.encoding import translate_text_errors
from pgfence._sql.errors import ErrorContext
from pgfence._sql.idempotency import NEEDED
from pgfence._sql.params import from_microseconds, mark, microseconds_sql, name_of, style_of
from pgfence._sql.sqlstate import LOCK_NOT_AVAILABLE, sqlstate_of
from pgfence.errors import LockTimeoutError
from pgfence.keys import SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection, CursorResult

    from pgfence._sql.params import Row
    from pgfence._sql.storage import TableNames

_TIMES = ", ".join(map(microseconds_sql, ("k.created_at", "k.locked_until", "k.expires_at")))
_ROW = (
    "SELECT k.scope, k.key, k.attempt, COALESCE((SELECT pg_catalog.array_agg(s.name ORDER BY s.name)"
    " FROM pg_catalog.jsonb_object_keys(k.step) AS s(name)), CAST(ARRAY[] AS text[])), k.owner, k.host, k.pid, k.claim_id,"
    f" {_TIMES}, k.locked_until > pg_catalog.clock_timestamp()"
    " FROM {idempotency_key} AS k WHERE k.status = 'in_progress' AND k.locked_until IS NOT NULL"
)
# {0} is the prefix of the scope, and from position {1} on it must not contain another namespace.
_LOOK = (
    " AND pg_catalog.starts_with(k.scope, CAST({0} AS text))"
    " AND pg_catalog.strpos(pg_catalog.substr(k.scope, CAST({1} AS integer)), pg_catalog.chr(31)) = 0"
    " AND k.created_at <= pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => CAST({2} AS double precision))"
    " ORDER BY k.created_at, k.scope, k.key"
)
_ONE = " AND k.scope = CAST({0} AS text) AND k.key = CAST({1} AS text)"
# The freed key must survive a crash, even if the role's default for synchronous_commit does not guarantee durability.
_SETTINGS = (
    "SELECT pg_catalog.set_config('lock_timeout', '2s', true),"
    " CASE WHEN pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply')"
    " THEN pg_catalog.set_config('synchronous_commit', 'on', true) END"
)
# A running attempt passes its claim id in each statement, so none of its statements finds a row without a claim id.
_FREE = (
    "UPDATE {idempotency_key} AS k SET status = 'free', claim_id = NULL, locked_until = NULL,"
    " expires_at = GREATEST(k.expires_at, pg_catalog.clock_timestamp() + (k.expires_at - k.locked_until))"
    " WHERE k.scope = CAST({0} AS text) AND k.key = CAST({1} AS text)"
)
_AUDIT = (
    "INSERT INTO {audit} (action, resource, actor, reason, at, detail)"
    " VALUES ('free key', {0}, {1}, {2}, pg_catalog.clock_timestamp(), CAST({3} AS jsonb))"
)


class StuckKeyRow(NamedTuple):
    """A row of the table of keys, without the values stored under the key."""

    scope: str
    key: str
    attempt: int
    steps: Sequence[str]
    owner: str | None
    host: str | None
    pid: int | None
    claim_id: UUID | None
    since: datetime
    locked_until: datetime
    expires_at: datetime
    running: bool


@dataclass(frozen=True, slots=True)
class StuckKeyQuery:
    """A search for stuck keys."""

    place: TableNames
    namespace: str
    prefix: str
    """The beginning of the scopes, without the namespace."""
    older: float
    """The minimum age of the first claim, in seconds."""

    context: ClassVar[ErrorContext] = ErrorContext(NEEDED, "SELECT")


@dataclass(frozen=True, slots=True)
class FreeKeyRequest:
    """A request to free a key, by its stored scope and name. The reason and the actor are for the audit table."""

    place: TableNames
    scope: str
    key: str
    reason: str
    actor: str
    only: StuckKeyRow | None = None
    """The attempt to free; if it is no longer the newest, nothing is done. None frees any attempt."""

    context: ClassVar[ErrorContext] = ErrorContext(NEEDED, "SELECT, UPDATE", "Free the key on the primary")

    def __str__(self) -> str:
        return f"the idempotency key {self.key!r} of scope {self.scope.rpartition(SEPARATOR)[2]!r}"


def look(connection: Connection, wanted: StuckKeyQuery) -> list[StuckKeyRow]:
    """Return the matching keys, oldest first."""
    begin = wanted.namespace + SEPARATOR if wanted.namespace else ""
    values = (begin + wanted.prefix, len(begin) + 1, wanted.older)
    return [_read(row) for row in _run(connection, wanted.place, _ROW + _LOOK, *values)]


def find(connection: Connection, order: FreeKeyRequest) -> StuckKeyRow | None:
    """Return one key, or None if it does not exist, or is finished or free."""
    row = _run(connection, order.place, _ROW + _ONE, order.scope, order.key).one_or_none()
    return None if row is None else _read(row)


def free(connection: Connection, order: FreeKeyRequest) -> StuckKeyRow | None:
    """Free a key and record this in the audit table, in a separate transaction on a connection at READ COMMITTED.

    Returns:
        The key that was found, or None. If `only` was given and a newer attempt exists, nothing was done, and the result is the
        newer attempt.

    Raises:
        LockTimeoutError: a transaction that stores the key's result is open; nothing was done.
    """
    try:
        with connection.begin():
            _run(connection, order.place, _SETTINGS)
            found = _lock_row(connection, order)
            if found is None or (order.only is not None and found.claim_id != order.only.claim_id):
                return found
            _run(connection, order.place, _FREE, order.scope, order.key)
            stored = order.scope + SEPARATOR + order.key
            _run(connection, order.place, _AUDIT, stored, order.actor, order.reason, _build_detail(found))
            return found
    except DBAPIError as error:
        if sqlstate_of(error) != LOCK_NOT_AVAILABLE:
            raise
        raise LockTimeoutError(
            f"{order} was not freed, and nothing was done: a transaction that is about to store its result did not end within"
            " 2 s. Try again when it has ended",
            names=(order.key,),
            timeout=2.0,
        ) from error


def _lock_row(connection: Connection, order: FreeKeyRequest) -> StuckKeyRow | None:
    row = _run(connection, order.place, _ROW + _ONE + " FOR NO KEY UPDATE", order.scope, order.key).one_or_none()
    return None if row is None else _read(row)


def _read(row: Row) -> StuckKeyRow:
    *known, since, locked_until, expires_at, running = row
    return StuckKeyRow._make(
        (*known, from_microseconds(since), from_microseconds(locked_until), from_microseconds(expires_at), running)
    )


def _build_detail(found: StuckKeyRow) -> str:
    known = ("attempt", "steps", "owner", "host", "pid", "running")
    times = {name: getattr(found, name).isoformat() for name in ("since", "locked_until", "expires_at")}
    return json.dumps({name: getattr(found, name) for name in known} | times)


def _run(connection: Connection, place: TableNames, text: str, *args: object) -> CursorResult[Any]:
    """Execute a text, after inserting the table names and the parameters in the driver's style."""
    style = style_of(connection.dialect)
    names = {what: name_of(place, what, style) for what in ("idempotency_key", "audit")}
    with translate_text_errors(connection, args):
        return connection.exec_driver_sql(
            text.format(*(mark(style, n) for n in range(1, len(args) + 1)), **names), args
        )
