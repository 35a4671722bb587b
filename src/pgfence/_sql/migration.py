"""The questions of a migration lock: what those who have it are doing, and whether something would be lost with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy.exc import DBAPIError

from pgfence._sql.server import style_of
from pgfence._sql.sqlstate import sqlstate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import Connection

_DOING = (
    "SELECT a.pid, a.state, a.query_start, a.query FROM pg_catalog.pg_stat_activity AS a"
    " WHERE a.pid = ANY (CAST({0} AS integer[]))"
)
_CHECK_CLIENT = (
    "SELECT pg_catalog.set_config(s.name, '1000', false) FROM pg_catalog.pg_settings AS s"
    " WHERE s.name = 'client_connection_check_interval' AND pg_catalog.strpos(pg_catalog.version(), 'linux') > 0"
)
_MARKS = {"format": "%s", "numeric": "$1"}
_HAS_WRITTEN = "SELECT pg_catalog.pg_current_xact_id_if_assigned() IS NOT NULL"
_LONGEST_QUERY = 200

UNSEEN = "doing what this role may not see"


class Doing(NamedTuple):
    """What a session is in the middle of."""

    pid: int
    state: str | None
    since: datetime | None
    query: str

    def __str__(self) -> str:
        if self.query and self.state == "active":
            return f"running {self.query!r} since {self.since:%Y-%m-%d %H:%M:%S%z}"
        return f"{self.state}, last {self.query!r}" if self.query and self.state else UNSEEN


def doing(connection: Connection, pids: Sequence[int]) -> dict[int, Doing]:
    """Return what sessions are doing, by the process of each; what the role may not see of others is left out."""
    text = _DOING.format(_MARKS[style_of(connection.dialect)])
    rows = connection.exec_driver_sql(text, (list(pids),)).all()
    return {row[0]: Doing(row[0], row[1], row[2], " ".join((row[3] or "").split())[:_LONGEST_QUERY]) for row in rows}


def check_client(connection: Connection) -> None:
    """Let the server look each second whether this client is still there, also while a statement of it runs."""
    connection.exec_driver_sql(_CHECK_CLIENT)


def has_written(connection: Connection) -> bool:
    """Return whether the transaction of this connection has written something. One that has failed has not: it cannot commit."""
    try:
        written: bool = connection.exec_driver_sql(_HAS_WRITTEN).scalar_one()
    except DBAPIError as error:
        if sqlstate(error) == "25P02":
            return False
        raise
    return written
