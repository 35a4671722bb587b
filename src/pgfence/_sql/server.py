"""Read what kind of server a connection leads to, and decide whether session locks are safe on it.

One round trip on each new connection reads the facts and, unless a pooler is declared, changes the settings that would end or
mislead an idle holder. `judge_session` evaluates the facts without I/O.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal, NamedTuple

from pgfence._sql.errors import standby_error
from pgfence._sql.lock_names import has_names_sql
from pgfence._sql.params import style_of
from pgfence.errors import (
    CapacityError,
    PgfenceError,
    PoolerError,
    UnsupportedServerError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection
    from sqlalchemy.engine.interfaces import Dialect

    from pgfence._sql.params import ParamStyle, Row
    from pgfence._sql.storage import TableNames
    from pgfence.config import PoolerSetting

OLDEST = 14

OURS = {
    # A limit that is set for the role would end waits early, and a statement cannot lift its own limit.
    "statement_timeout": "0",
    "lock_timeout": "0",
    # These settings would end the session of an idle holder.
    "idle_session_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "transaction_timeout": "0",
    # These settings would change the effect of pgfence's statements.
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "DateStyle": "ISO",  # psycopg parses no other interval style
    # The server notices a lost client after 30 s, and the client notices a lost server after 20 s, so a holder is notified before
    # the server releases its lock.
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
    "tcp_user_timeout": "30000",
    "client_connection_check_interval": "5000",
}

_FACTS = (
    "WITH probe AS MATERIALIZED (SELECT pg_catalog.pg_try_advisory_xact_lock((pg_catalog.random() * 9e18)::bigint) AS got)"
    " SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_is_in_recovery(), pg_catalog.version(),"
    " pg_catalog.current_setting('server_version_num')::integer,"
    " (SELECT setting::integer FROM pg_catalog.pg_settings WHERE name = 'deadlock_timeout'),"
    " pg_catalog.current_setting('max_locks_per_transaction')::bigint"
    " * (pg_catalog.current_setting('max_connections')::bigint"
    " + pg_catalog.current_setting('max_prepared_transactions')::bigint),"
    " (SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks),"
    " (SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks WHERE probe.got AND locktype = 'advisory'"
    " AND pid = pg_catalog.pg_backend_pid()), EXTRACT(epoch FROM pg_catalog.pg_postmaster_start_time())::text,"
    " {settings}, {names} FROM probe"
)
# The previous values come from the view's own snapshot, so the filter can change the settings in the same query.
SETTINGS = (
    "(SELECT pg_catalog.json_object_agg(s.name, s.setting) FILTER (WHERE {action})::text"
    " FROM (VALUES {values}) AS o(name, value) JOIN pg_catalog.pg_settings AS s ON s.name = o.name"
    " WHERE s.name <> 'client_connection_check_interval' OR pg_catalog.strpos(pg_catalog.version(), 'linux') > 0)"
)
_VALUES = ", ".join(f"('{name}', '{value}')" for name, value in OURS.items())
_READ_FACTS = _FACTS.format(settings=SETTINGS.format(values=_VALUES, action="true"), names="{names}")
READ_FACTS = _READ_FACTS.format(names="false")
# Nothing is set if the driver connected to a different server process, because the session then belongs to a pooler, which may
# give it to another client next.
_SET_UP = _FACTS.format(
    settings=SETTINGS.format(
        values=_VALUES,
        action="CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) CAST({0} AS integer)"
        " THEN pg_catalog.set_config(s.name, o.value, false) IS NOT NULL ELSE true END",
    ),
    names="{names}",
)

BACKEND_PID = "SELECT pg_catalog.pg_backend_pid()"
STARTED = "SELECT EXTRACT(epoch FROM pg_catalog.pg_postmaster_start_time())::text"
LOCK_TABLE_USE = "SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks"


class ServerInfo(NamedTuple):
    """The facts about a server and the session on it, read in one round trip."""

    backend_pid: int
    standby: bool
    version: str
    number: int
    deadlock_timeout: float
    lock_limit: int
    locks_used: int
    locks_seen: int
    started: str
    """The time when the server was started. Together with a process id, it identifies a session across servers."""
    settings: dict[str, str]
    """The settings before pgfence changed any of them, in the units of pg_settings."""
    set_up: bool
    """Whether pgfence's own settings are in force."""
    has_names: bool = False
    """Whether the names of locks can be stored."""

    @property
    def statement_timeout(self) -> float:
        """The time after which the server ends statements, in seconds; 0 for no limit."""
        return 0.0 if self.set_up else int(self.settings.get("statement_timeout", "0")) / 1000

    @classmethod
    def of(cls, row: Row, *, set_up: bool) -> ServerInfo:
        pid, standby, version, number, deadlock_ms, limit, used, seen, started, settings, names = row
        deadlock, found = deadlock_ms / 1000, json.loads(settings)
        return cls(pid, standby, version, number, deadlock, limit, used, seen, started, found, set_up, names)


UNKNOWN = ServerInfo(0, False, "", 0, 1.0, 0, 0, 0, "", {}, False)
"""The facts of a connection from which nothing has been read yet."""


def build_set_up(place: TableNames, style: ParamStyle) -> str:
    """Return the statement that sets up a session and reads the facts.

    The only parameter of the statement is the backend process id that the driver received when it connected.
    """
    return _SET_UP.format("%s" if style == "format" else "$1", names=has_names_sql(place, style))


def read_facts(connection: Connection, driver_pid: int, place: TableNames, *, set_up: bool) -> ServerInfo:
    """Return the facts for a connection in autocommit. With `set_up`, also prepare the session for holding locks."""
    if not set_up:
        text = _READ_FACTS.format(names=has_names_sql(place, None))
        return ServerInfo.of(
            connection.exec_driver_sql(text, execution_options={"no_parameters": True}).one(), set_up=False
        )
    row = connection.exec_driver_sql(build_set_up(place, style_of(connection.dialect)), (driver_pid,)).one()
    return ServerInfo.of(row, set_up=True)


_THEIRS = (
    "statement_timeout",
    "lock_timeout",
    "transaction_timeout",
    "default_transaction_isolation",
    "default_transaction_read_only",
    "DateStyle",
)


def put_back(connection: Connection, facts: ServerInfo) -> None:
    """Restore the session's previous settings, for statements of the application on a connection of pgfence."""
    # The idle timeouts are not restored, because they would end the session that holds the lock.
    restore(connection, {name: value for name, value in facts.settings.items() if name in _THEIRS})


def restore(connection: Connection, settings: Mapping[str, str]) -> None:
    values = {name: value.replace("'", "''") for name, value in settings.items()}
    if values:
        asked = ", ".join(f"pg_catalog.set_config('{name}', '{value}', false)" for name, value in values.items())
        connection.exec_driver_sql(f"SELECT {asked}")


def read_backend_pid(connection: Connection) -> int:
    """Return the process id of the server process that executes the query."""
    pid: int = connection.exec_driver_sql(BACKEND_PID).scalar_one()
    return pid


def read_start_time(connection: Connection) -> str:
    """Return when the server was started, as in `ServerInfo`."""
    moment: str = connection.exec_driver_sql(STARTED).scalar_one()
    return moment


def judge_session(
    facts: ServerInfo, driver_pid: int, pooler: PoolerSetting, other_pid: int | None
) -> PgfenceError | None:
    """Return the error if a session lock would not be safe here, or None.

    `other_pid` is the id of the server process that served a second client while this session was idle, if that was tested.
    """
    if refused := judge_version(facts):
        return refused
    if facts.standby:
        return standby_error(
            "a lock",
            " (target_session_attrs=read-write in the URL), or pass its engine as configure(engine, lock_engine=...)",
        )
    direct = "Pass an engine with a direct URL as configure(engine, lock_engine=...)"
    if pooler == "transaction" or other_pid == facts.backend_pid:
        seen = (
            "two clients were served by one backend"
            if other_pid == facts.backend_pid
            else "the configuration declares it"
        )
        return PoolerError(
            f"session locks cannot work behind a pooler in transaction mode ({seen}): lock and unlock could reach"
            f" different backends. {direct}, or use a Lease, which works through such a pooler",
            mode="transaction",
        )
    if driver_pid != facts.backend_pid and pooler != "session":
        return PoolerError(
            "a connection pooler whose mode is unknown is between this client and PostgreSQL, and session locks are"
            f" safe only in session mode. {direct}, or, if the pooler gives each client a dedicated server session, declare it:"
            ' configure(engine, pooler="session")',
            mode="unknown",
        )
    return None


def judge_version(facts: ServerInfo) -> UnsupportedServerError | None:
    """Return the error if this is not a PostgreSQL server that pgfence supports, or None."""
    if not facts.version.startswith("PostgreSQL ") or "-YB-" in facts.version:
        return UnsupportedServerError(
            f"pgfence needs PostgreSQL, but this server identifies itself as {facts.version[:60]!r}"
        )
    if facts.number < OLDEST * 10000:
        return _too_old_error(repr(facts.version[:40]))
    if facts.locks_seen < 1:
        return UnsupportedServerError(
            f"this server grants advisory locks without keeping them ({facts.version[:60]!r}), so they exclude no other session"
        )
    return None


def check_version(dialect: Dialect) -> None:
    """Raise UnsupportedServerError if SQLAlchemy's dialect is connected to a server that is too old."""
    version = dialect.server_version_info
    if version is not None and version < (OLDEST,):
        raise _too_old_error(".".join(map(str, version)))


def _too_old_error(version: str) -> UnsupportedServerError:
    return UnsupportedServerError(f"pgfence needs PostgreSQL {OLDEST} or later, but this server is {version}")


WARN, REFUSE = 0.8, 0.9


def judge_capacity(used: int, wanted: int, limit: int) -> Literal["fine", "warn"] | CapacityError:
    """Return whether `wanted` more locks fit ("fine"), nearly fill the lock table ("warn"), or are too many (the error)."""
    share = (used + wanted) / limit
    if share >= REFUSE:
        return CapacityError(
            f"lock request rejected: {used} of at least {limit} entries in the server's lock table are used, and {wanted} more"
            f" would reach the limit of {REFUSE:.0%}. When the table is full, no client can log in. Hold fewer locks at a time,"
            " use leases for thousands of names, or increase max_locks_per_transaction",
            used=used,
            limit=limit,
        )
    return "warn" if share >= WARN else "fine"
