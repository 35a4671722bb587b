"""Query what the sessions that hold a migration lock are doing, and whether a transaction has written anything."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy.exc import DBAPIError

from pgfence._sql import server
from pgfence._sql.params import style_of
from pgfence._sql.sqlstate import sqlstate_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import Connection

_DOING = (
    "SELECT a.pid, a.state, a.query_start, a.query FROM pg_catalog.pg_stat_activity AS a"
    " WHERE a.pid = ANY (CAST({0} AS integer[]))"
)
# Settings that would end an idle session that holds the lock, e.g. while a script computes, and settings that let the server
# notice a lost client, also during a statement. The server's limits for statements are not changed, because the migration's own
# code relies on them.
_OURS = dict.fromkeys(server.OURS) | {
    "idle_session_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
    "tcp_user_timeout": "30000",
    "client_connection_check_interval": "1000",
}
# Through a pooler, the next statement may reach a session of another client, whose settings must not change. A session that has
# an application_name keeps it.
_SET_UP = "SELECT " + server.SETTINGS.format(
    values=", ".join(f"('{name}', {'NULL' if value is None else repr(value)})" for name, value in _OURS.items())
    + ", ('application_name', CAST({1} AS text))",
    action="CASE WHEN o.value IS NULL THEN true WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.<>) CAST({0} AS integer)"
    " OR s.name = 'application_name' AND s.setting <> '' THEN s.name <> 'application_name'"
    " ELSE pg_catalog.set_config(s.name, o.value, false) IS NOT NULL END",
)
_MARKS = {"format": ("%s", "%s"), "numeric": ("$1", "$2")}
_HAS_WRITTEN = "SELECT pg_catalog.pg_current_xact_id_if_assigned() IS NOT NULL"
_LOCKING = (
    "SELECT l.pid, MAX(a.application_name), pg_catalog.string_agg(DISTINCT c.oid::pg_catalog.regclass::text, ', ')"
    " FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_class AS c ON c.oid = l.relation AND c.relkind IN ('r', 'p', 'm')"
    " LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid"
    " WHERE l.locktype = 'relation' AND l.granted AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid() AND l.relation >= 16384"
    " AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())"
    " GROUP BY l.pid, l.virtualtransaction ORDER BY MIN(a.xact_start) LIMIT 5"
)
"""The oldest transactions with locks on tables of the application. Prepared transactions have no process."""
_LONGEST_QUERY = 200

UNSEEN = "activity not visible to this role"
ENDED = "its session has ended"


class Doing(NamedTuple):
    pid: int
    state: str | None
    since: datetime | None
    query: str

    def __str__(self) -> str:
        if self.query and self.state == "active":
            return f"running {self.query!r} since {self.since:%Y-%m-%d %H:%M:%S%z}"
        if not self.state:
            return UNSEEN
        return f"{self.state}, last statement {self.query!r}" if self.query else self.state


def describe_sessions(connection: Connection, pids: Sequence[int]) -> dict[int, Doing]:
    """Return a dict from process ids to what their sessions do. Sessions that have ended are omitted."""
    text = _DOING.format(*_MARKS[style_of(connection.dialect)])
    rows = connection.exec_driver_sql(text, (list(pids),)).all()
    return {row[0]: Doing(row[0], row[1], row[2], " ".join((row[3] or "").split())[:_LONGEST_QUERY]) for row in rows}


def describe_lockers(connection: Connection) -> list[str]:
    """Return descriptions of the five oldest transactions that hold locks on tables of the application."""
    rows = connection.exec_driver_sql(_LOCKING).all()
    known = describe_sessions(connection, [row[0] for row in rows if row[0]])
    return [
        f"{row[1] or 'a session without a name'} (backend {row[0]}) on {row[2]}: {known.get(row[0], ENDED)}"
        if row[0]
        else f"a prepared transaction on {row[2]}"
        for row in rows
    ]


def set_up(connection: Connection, backend_pid: int, application_name: str) -> dict[str, str]:
    """Prepare a session in autocommit for holding the lock, and return its previous settings for `server.restore`.

    Nothing is set unless the server process `backend_pid`, which granted the lock, executes the statement. Waiters see
    `application_name` as the holder if the session has none of its own.
    """
    text = _SET_UP.format(*_MARKS[style_of(connection.dialect)])
    row = connection.exec_driver_sql(text, (backend_pid, application_name)).one()
    settings: dict[str, str] = json.loads(row[0])
    return settings


def has_written(connection: Connection) -> bool:
    """Return whether the connection's transaction has written anything.

    The result is False for a failed transaction, which cannot commit.
    """
    try:
        written: bool = connection.exec_driver_sql(_HAS_WRITTEN).scalar_one()
    except DBAPIError as error:
        if sqlstate_of(error) == "25P02":
            return False
        raise
    return written
