"""Evict a holder: find who holds a name, and end the hold in one transaction."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy.exc import DBAPIError

from pgfence._sql import activity
from pgfence._sql.encoding import translate_text_errors
from pgfence._sql.errors import ErrorContext, message_of
from pgfence._sql.params import from_microseconds, microseconds_sql, style_of
from pgfence._sql.sqlstate import (
    LOCK_NOT_AVAILABLE,
    NO_RIGHT,
    SERIALIZATION_FAILURE,
    sqlstate_of,
)
from pgfence._sql.storage import LEASES, VERSION
from pgfence.errors import LockTimeoutError, SchemaError
from pgfence.keys import unqualify_name
from pgfence.types import Holder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection, CursorResult

    from pgfence._sql.params import Row
    from pgfence._sql.storage import TableNames
    from pgfence.keys import LockKey

_ROW = (
    "SELECT l.released_at IS NULL, CASE WHEN l.released_at IS NULL THEN COALESCE(NULLIF(l.kind, 'session lock'), 'lease')"
    " ELSE l.kind END, l.owner, l.host, l.pid, l.backend_pid, NULL, l.purpose, l.token,"
    f" NULLIF({microseconds_sql('l.acquired_at')}, 0), NULLIF({microseconds_sql('l.expires_at')}, 0)"
    " FROM {lease} AS l WHERE l.name = {0}"
)
# The query returns the first permit of a semaphore, or the first partition of a set, with that name.
_PART = "SELECT l.name, l.kind FROM {lease} AS l WHERE l.name IN ({0}, {1}) AND l.kind IN ('permit', 'partition')"
_EVICT = "SELECT r.evicted, r.newest FROM {evict_lease_v2}({0}, {1}, {2}, {3}) AS r"
_NOTIFY = "SELECT pg_catalog.pg_notify({0}, {1})"
_AUDIT = (
    "INSERT INTO {audit} (action, resource, actor, reason, at, detail)"
    " VALUES ('evict', {0}, {1}, {2}, pg_catalog.clock_timestamp(), CAST({3} AS jsonb))"
)
# The statement queries the holder of the lock again, because the process id may have been reused.
_END = (
    "SELECT pg_catalog.count(pg_catalog.pg_terminate_backend(s.pid, 5000)) FROM (SELECT DISTINCT l.pid FROM pg_catalog.pg_locks AS l"
    " WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.pid <> pg_catalog.pg_backend_pid()"
    " AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())"
    " AND ((l.classid::bigint << 32) | l.objid::bigint) = CAST({0} AS bigint) AND l.pid = ANY (CAST({1} AS integer[]))) AS s"
)
# PostgreSQL does not show who locked a row. A transaction inside a gate holds one of these locks until it ends: the gate's advisory
# lock, or a lock on the gate table, which does not show which gate is meant.
_INSIDE = (
    f"SELECT DISTINCT l.pid, a.application_name, pg_catalog.host(a.client_addr), {microseconds_sql('a.xact_start')}"
    " FROM pg_catalog.pg_locks AS l"
    " LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid"
    " WHERE l.granted AND l.pid <> pg_catalog.pg_backend_pid() AND (l.locktype = 'relation'"
    " AND l.relation = pg_catalog.to_regclass({0}) AND l.mode IN ('RowShareLock', 'RowExclusiveLock')"
    " OR l.locktype = 'advisory' AND l.objsubid = 1"
    " AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())"
    " AND ((l.classid::bigint << 32) | l.objid::bigint)"
    " = pg_catalog.hashtextextended({1}, pg_catalog.to_regclass({2})::oid::bigint)) ORDER BY l.pid"
)
_RETRIES = 10


@dataclass(frozen=True, slots=True)
class EvictionRequest:
    """A request to evict the holder of a stored name. The reason and the actor are for the audit table."""

    name: str
    key: LockKey
    place: TableNames
    reason: str
    actor: str
    only: Found | None = None
    """The holder to evict; if the holder has changed, nothing is done. None evicts any holder."""

    context: ClassVar[ErrorContext] = ErrorContext(LEASES, on_primary="Evict on the primary")


@dataclass(frozen=True, slots=True)
class Found:
    """The holders of a name's lease and of its advisory lock."""

    holders: tuple[Holder, ...]
    token: int | None
    """The newest token, or None if the name never had one."""
    newest: int | None = None
    """The token after an eviction. All older tokens are rejected."""

    def matches(self, other: Found) -> bool:
        """Return whether both results have the same grants.

        The activity of a session is ignored, because it changes all the time.
        """
        return self.token == other.token and self._identify() == other._identify()

    def _identify(self) -> set[tuple[str, int | None, int | None]]:
        return {(holder.kind, holder.token, holder.backend_pid) for holder in self.holders}


def look(connection: Connection, order: EvictionRequest) -> Found:
    """Return the lease's last holder, unless it was released, and the sessions that hold the name's key.

    Raises:
        ValueError: the name belongs to a semaphore or to partitions, whose permits and partitions are held under their own names.
    """
    row = _run(connection, order.place, _ROW, order.name).one_or_none()
    held = [] if row is None else [_build_lease_holder(order, row)]
    # Prepared transactions are omitted, because they have no session that could be ended.
    sessions = [one for one in activity.find_holders(connection, (order.key,)) if one.backend_pid is not None]
    if row is None and not sessions:
        _reject_name_of_parts(connection, order)
    leases = held if row is not None and row[0] else []
    return Found((*leases, *activity.with_token(sessions, held)), None if row is None else row.token)


def _reject_name_of_parts(connection: Connection, order: EvictionRequest) -> None:
    for part, kind in _run(connection, order.place, _PART, f"{order.name}#1", f"{order.name}/0"):
        name, one = unqualify_name(order.name), unqualify_name(part)
        what, source = ("semaphore", "holders()") if kind == "permit" else ("set of partitions", "owner_of()")
        raise ValueError(
            f"{name!r} is a {what}, and each {kind} is held under its own name, such as {one!r}: to end a hold, evict"
            f" one of these names. `pgfence ps` and {source} show which of them are held"
        )


def _build_lease_holder(order: EvictionRequest, row: Row) -> Holder:
    _, *known, since, expires_at = row
    times = (None if at is None else from_microseconds(at) for at in (since, expires_at))
    return activity.build_lease_holder(unqualify_name(order.name), (*known, *times))


def evict(connection: Connection, order: EvictionRequest) -> Found:
    """Evict the holders of the name, in a separate transaction on a connection at READ COMMITTED.

    The function does nothing if the name has no lease row and no session holds its key.

    Returns:
        The evicted holders. If `only` was given and the holder has changed, nothing was done, and the result is the new holder
        without `newest`.

    Raises:
        LockTimeoutError: a writer stayed inside the gate, or the name was acquired faster than it could be evicted; nothing was
            done.
        SchemaError: the role may not end the holder's session; nothing was done.
    """
    failures = 0
    while True:
        try:
            with connection.begin():
                return _try_evict(connection, order)
        except _Changed:
            failures += 1
            if failures > _RETRIES:
                raise LockTimeoutError(
                    f"{unqualify_name(order.name)!r} is acquired faster than it can be evicted, and nothing was done: try again",
                    names=(unqualify_name(order.name),),
                ) from None
        except DBAPIError as error:
            failures += 1
            if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
                with connection.begin():
                    raise _occupied_error(connection, order) from error
            if sqlstate_of(error) != SERIALIZATION_FAILURE or failures > _RETRIES:
                raise


class _Changed(Exception):
    """Raised if another grant was made between query and eviction. This exception never leaves the module."""


def _try_evict(connection: Connection, order: EvictionRequest) -> Found:
    found = look(connection, order)
    if order.only is not None and not found.matches(order.only):
        return found
    pids = [holder.backend_pid for holder in found.holders if holder.kind in ("advisory", "session lock")]
    told = json.dumps({"token": found.token, "holders": [to_data(holder) for holder in found.holders]})
    words = (order.name, order.actor, order.reason, told)
    newest = 0
    if found.token is not None:
        evicted, newest = _run(connection, order.place, _EVICT, *words).one()
        if evicted != found.token:
            raise _Changed
        # The process that holds the lease is notified. The server function itself notifies the waiters.
        _run(connection, order.place, _NOTIFY, order.place.evictions, order.name)
    elif pids:
        _run(connection, order.place, _AUDIT, *words)
    else:
        return found
    # Sessions are ended after the token was raised and the audit row was written, and before COMMIT. So every session that is
    # ended is fenced off (if it has a token) and recorded, and an error before this point leaves everything unchanged.
    if pids:
        _end_sessions(connection, order, pids)
    return Found(found.holders, found.token, newest)


def _end_sessions(connection: Connection, order: EvictionRequest, pids: list[int | None]) -> None:
    try:
        _run(connection, order.place, _END, order.key.value, pids)
    except DBAPIError as error:
        if sqlstate_of(error) != NO_RIGHT:
            raise
        command = "GRANT pg_signal_backend TO <role>"
        raise SchemaError(
            f"this role may not end the session that holds {unqualify_name(order.name)!r}: {message_of(error)}. Run {command}, or"
            " evict as the holder's own role (only a superuser can end the session of a superuser). Nothing was done",
            needed=VERSION,
            command=command,
            sqlstate=NO_RIGHT,
        ) from error


def _occupied_error(connection: Connection, order: EvictionRequest) -> LockTimeoutError:
    gate = order.place.name("gate")
    rows = _run(connection, order.place, _INSIDE, gate, order.name, gate).all()
    writers = [
        Holder(
            name=None,
            key=None,
            kind="transaction",
            host=host,
            backend_pid=pid,
            application_name=application or None,
            since=None if since is None else from_microseconds(since),
        )
        for pid, application, host, since in rows
    ]
    listed = "; ".join(map(str, writers))
    inside = f" ({'probably' if len(writers) == 1 else 'one of'} {listed})" if writers else ""
    return LockTimeoutError(
        f"{unqualify_name(order.name)!r} was not evicted, and nothing was done: a transaction that writes with its token was still"
        f" open after 2 s{inside}. End it (SELECT pg_terminate_backend(...)), then evict again",
        names=(unqualify_name(order.name),),
        timeout=2.0,
        holders=writers,
    )


def to_data(holder: Holder) -> Mapping[str, object]:
    known = ("kind", "owner", "host", "pid", "backend_pid", "application_name", "purpose", "token")
    times = {name: at and at.isoformat() for name, at in (("since", holder.since), ("expires_at", holder.expires_at))}
    return {name: getattr(holder, name) for name in known} | times


def _run(connection: Connection, place: TableNames, text: str, *args: object) -> CursorResult[*tuple[Any, ...]]:
    """Execute a text, after inserting the table names and the parameters in the driver's style."""
    style = style_of(connection.dialect)
    names = {what: place.name(what) for what in ("lease", "audit", "evict_lease_v2")}
    if style == "format":
        names = {what: name.replace("%", "%%") for what, name in names.items()}
    marks = [f"${n}" if style == "numeric" else "%s" for n in range(1, len(args) + 1)]
    with translate_text_errors(connection, args):
        return connection.exec_driver_sql(text.format(*marks, **names), args)
