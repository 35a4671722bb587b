"""Find idle sessions that hold advisory locks which pgfence did not take, and end them.

PostgreSQL does not record which program took a lock, or whether the program still needs the lock. An idle session with a lock may
be a connection that was returned to a pool with the lock, or the lock connection of a program that works on another connection.
pgfence recognizes its own lock connections by their last statement.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy.exc import DBAPIError

from pgfence._sql.encoding import translate_text_errors
from pgfence._sql.errors import ErrorContext, message_of
from pgfence._sql.evict import to_data
from pgfence._sql.params import from_microseconds, mark, microseconds_sql, name_of, style_of
from pgfence._sql.sqlstate import NO_RIGHT, sqlstate_of
from pgfence._sql.storage import VERSION
from pgfence.errors import SchemaError
from pgfence.keys import LockKey
from pgfence.types import Holder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection, CursorResult

    from pgfence._sql.params import Row
    from pgfence._sql.storage import TableNames

IDLE_FOR = 300.0
"""Seconds after which the lock of an idle session counts as leaked. A holder may be idle between two steps of its work."""
# Parts of the statements that pgfence sends on a lock connection. While the connection holds a lock, its last statement contains
# one of them, unless it was lent by `connect()`.
_OURS = (
    "pg_catalog.pg_advisory_lock",
    "pg_catalog.pg_advisory_xact_lock",
    "pg_catalog.pg_try_advisory_lock",
    "pg_catalog.pg_try_advisory_xact_lock",
    "pg_catalog.pg_advisory_unlock",
    "pgfence.ticket",
    "lock_with_token_v",
    "note_names_v",  # the statement that stores the name on the same connection, after the grant
    "pg_catalog.pg_backend_pid()",  # the statement that probes the connection where the system does not report its loss
)
ELSEWHERE = (
    " FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid"
    " WHERE l.locktype = 'advisory' AND l.granted AND l.pid <> pg_catalog.pg_backend_pid()"
    " AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())"
)
"""The advisory locks of other sessions in this database, as `l`, with their sessions, as `a`."""
IDLE_SECONDS = "CAST(EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - a.state_change) AS double precision)"
QUERY = "pg_catalog.left(a.query, 1000)"

_SEES_OTHER_ROLES = "SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')"
_LOOK = (
    f"SELECT l.pid, ((l.classid::bigint << 32) | l.objid::bigint), l.objsubid, l.mode, a.application_name,"
    f" pg_catalog.host(a.client_addr), {microseconds_sql('a.state_change')}, {microseconds_sql('a.backend_start')},"
    f" {IDLE_SECONDS}, {QUERY}{ELSEWHERE} AND a.state = 'idle' ORDER BY a.state_change, l.pid, 2, 3"
)
_TABLE = "SELECT pg_catalog.to_regclass({0}) IS NOT NULL"
_AUDIT = (
    "INSERT INTO {audit} (action, resource, actor, reason, at, detail)"
    " VALUES ('release leaked', {0}, {1}, {2}, pg_catalog.clock_timestamp(), CAST({3} AS jsonb))"
)
# The session must be the same, and idle since the same moment: its process id may have been reused, or its owner may be using
# it again.
_END = (
    "SELECT pg_catalog.pg_terminate_backend(a.pid, 5000) FROM pg_catalog.pg_stat_activity AS a WHERE a.pid = CAST({0} AS integer)"
    f" AND a.state = 'idle' AND {microseconds_sql('a.backend_start')} = CAST({{1}} AS double precision)"
    f" AND {microseconds_sql('a.state_change')} = CAST({{2}} AS double precision)"
)


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """A request to end the sessions that hold leaked locks. The reason and the actor are for the audit table."""

    place: TableNames
    idle_for: float
    """How long a session must have been idle, in seconds."""
    reason: str
    actor: str
    only: Sequence[LeakedSession] | None = None
    """The sessions to end, if they are still leaked. None ends all."""

    context: ClassVar[ErrorContext] = ErrorContext(on_primary="Release the locks on the primary", audit_rights="INSERT")


@dataclass(frozen=True, slots=True)
class LeakedSession:
    """An idle session that holds advisory locks.

    Attributes:
        holders: one holder for each lock of the session.
        backend_pid: the id of the server process.
        started, since: when the session began and when it became idle, in microseconds since 1970. Together with `backend_pid`,
            they identify the session and show that it was not used in between.
        idle: how long the session has been idle, in seconds.
        query: the beginning of the session's last statement.
    """

    holders: tuple[Holder, ...]
    backend_pid: int
    started: float
    since: float
    idle: float
    query: str

    def is_same(self, other: LeakedSession) -> bool:
        """Return whether `other` is the same session and was not used in the meantime."""
        return (self.backend_pid, self.started, self.since) == (other.backend_pid, other.started, other.since)


@dataclass(frozen=True, slots=True)
class Released:
    """The sessions that a request has ended."""

    sessions: tuple[LeakedSession, ...]
    audited: bool
    """Whether the ends of the sessions were recorded; False if there is no audit table."""


def is_leaked(state: str | None, idle: float | None, query: str, idle_for: float) -> bool:
    """Return whether a session that holds advisory locks has been idle for `idle_for` seconds after a statement of another program."""
    return state == "idle" and (idle or 0) >= idle_for and not any(part in query for part in _OURS)


def look(connection: Connection, order: ReleaseRequest) -> tuple[LeakedSession, ...]:
    """Return the sessions that hold leaked locks, the longest idle first."""
    sessions: dict[int, list[Row]] = {}
    for row in map(tuple, _run(connection, order.place, _LOOK)):
        pid, *_, idle, query = row
        if is_leaked("idle", idle, query, order.idle_for):
            sessions.setdefault(pid, []).append(row)
    return tuple(_build_session(rows) for rows in sessions.values())


def is_reader_of_all_stats(connection: Connection, order: ReleaseRequest) -> bool:
    """Return whether the role sees the state of other roles' sessions, without which `look` does not find them."""
    return bool(_run(connection, order.place, _SEES_OTHER_ROLES).scalar())


def _build_session(rows: Sequence[Row]) -> LeakedSession:
    pid, (since, started, idle, query) = rows[0][0], rows[0][6:]
    return LeakedSession(tuple(map(_build_holder, rows)), pid, started, since, idle, query)


def _build_holder(row: Row) -> Holder:
    pid, value, space, mode, application, host, since, *_ = row
    halves = (value >> 32, (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1))
    return Holder(
        name=None,
        key=LockKey.raw(value) if space == 1 else LockKey.pair(*halves),
        kind="advisory",
        mode="shared" if mode == "ShareLock" else "exclusive",
        host=host,
        backend_pid=pid,
        application_name=application or None,
        since=from_microseconds(since),
    )


def release(connection: Connection, order: ReleaseRequest) -> Released:
    """End the sessions and record this in the audit table, each in a separate transaction, on a connection at READ COMMITTED.

    A session that was used after it was found is not ended.

    Raises:
        SchemaError: the role may not end a session, or may not write to the audit table. That session was not ended, but
            the sessions before it were.
    """
    with connection.begin():
        found = look(connection, order)
        audited = bool(_run(connection, order.place, _TABLE, order.place.name("audit")).scalar_one())
    if order.only is not None:
        found = tuple(one for one in found if any(one.is_same(shown) for shown in order.only))
    ended: list[LeakedSession] = []
    for session in found:
        with connection.begin() as transaction:
            # The end of the session is recorded first, so that no session is ended whose end cannot be recorded.
            if audited:
                _record(connection, order, session)
            if _end(connection, order, session, len(ended)):
                ended.append(session)
            else:
                transaction.rollback()
    return Released(tuple(ended), audited)


def _record(connection: Connection, order: ReleaseRequest, session: LeakedSession) -> None:
    detail = {"idle": round(session.idle, 1), "holders": [_describe(holder) for holder in session.holders[:100]]}
    words = (f"backend {session.backend_pid}", order.actor, order.reason, json.dumps(detail))
    _run(connection, order.place, _AUDIT, *words)


def _describe(holder: Holder) -> Mapping[str, object]:
    key = holder.key
    return {**to_data(holder), "key": None if key is None else key.value, "space": None if key is None else key.space}


def _end(connection: Connection, order: ReleaseRequest, session: LeakedSession, before: int) -> bool:
    try:
        words = (session.backend_pid, session.started, session.since)
        # No row: the session was used again. False: the signal was sent, and the session has not ended yet.
        return _run(connection, order.place, _END, *words).scalar() is not None
    except DBAPIError as error:
        if sqlstate_of(error) != NO_RIGHT:
            raise
        command = "GRANT pg_signal_backend TO <role>"
        raise SchemaError(
            f"this role may not end the session of backend {session.backend_pid}: {message_of(error)}. Run {command}, or release"
            " the lock as the holder's own role (only a superuser can end the session of a superuser)."
            f" {f'Number of sessions ended before this error: {before}' if before else 'Nothing was done'}",
            needed=VERSION,
            command=command,
            sqlstate=NO_RIGHT,
        ) from error


def _run(connection: Connection, place: TableNames, text: str, *args: object) -> CursorResult[Any]:
    """Execute a text, after inserting the table names and the parameters in the driver's style."""
    style = style_of(connection.dialect)
    names = {"audit": name_of(place, "audit", style)}
    with translate_text_errors(connection, args):
        return connection.exec_driver_sql(
            text.format(*(mark(style, n) for n in range(1, len(args) + 1)), **names), args
        )
