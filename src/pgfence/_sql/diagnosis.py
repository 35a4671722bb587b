"""Read what `pgfence doctor` judges: settings, sessions, tables and privileges. Nothing is changed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pgfence._sql import tables
from pgfence._sql.columns import list_column_types
from pgfence._sql.leaks import ELSEWHERE, IDLE_SECONDS, QUERY
from pgfence._sql.params import microseconds_sql
from pgfence._sql.storage import quote_literal, read_functions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection

    from pgfence._sql.storage import TableNames
    from pgfence.errors import SchemaError

SETTINGS = (
    "client_connection_check_interval",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
    "max_locks_per_transaction",
    "statement_timeout",
    "synchronous_commit",
    "synchronous_standby_names",
    "tcp_keepalives_count",
    "tcp_keepalives_idle",
    "tcp_keepalives_interval",
    "tcp_user_timeout",
    "wal_sender_timeout",
)
PRIVILEGES = ("SELECT", "INSERT", "UPDATE", "DELETE")
MOST_ROWS = 100
"""The maximum number of sessions, of waits and of indexes that are read."""

_HERE = "(SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())"
_VERSION = "SELECT pg_catalog.version(), pg_catalog.current_setting('server_version_num')::integer, current_user::text"
_SERVER = (
    "SELECT pg_catalog.pg_is_in_recovery() AS standby, current_user::text AS role, pg_catalog.current_database()::text AS database,"
    " pg_catalog.current_setting('search_path') AS search_path,"
    f" {microseconds_sql('pg_catalog.clock_timestamp()')} AS clock, pg_catalog.inet_client_addr() IS NOT NULL AS tcp,"
    " pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE') AS sees_all,"
    " (SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks AS l"
    " WHERE l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()) AS locks_used,"
    " pg_catalog.current_setting('max_locks_per_transaction')::bigint"
    " * (pg_catalog.current_setting('max_connections')::bigint"
    " + pg_catalog.current_setting('max_prepared_transactions')::bigint) AS lock_limit"
)
_SETTINGS = (
    "SELECT pg_catalog.json_object_agg(s.name, s.setting) FROM pg_catalog.pg_settings AS s"
    f" WHERE s.name IN ({', '.join(map(quote_literal, SETTINGS))})"
)
# An idle session has no transaction, so its advisory locks are session-level. `state` is null if the role may not see it.
_HOLDERS = (
    f"SELECT l.pid, pg_catalog.count(*) AS locks, a.state, a.application_name AS application, {IDLE_SECONDS} AS idle,"
    f" {QUERY} AS query{ELSEWHERE} AND (a.state IS NULL OR a.state = 'idle')"
    f" GROUP BY l.pid, a.state, a.application_name, a.state_change, a.query ORDER BY a.state_change LIMIT {MOST_ROWS}"
)
_WAITS = (
    "SELECT w.pid, w.waited, w.application, pg_catalog.pg_blocking_pids(w.pid) AS blockers FROM ("
    "SELECT l.pid, a.application_name AS application,"
    " CAST(EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - l.waitstart) AS double precision) AS waited"
    " FROM pg_catalog.pg_locks AS l LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid"
    " LEFT JOIN pg_catalog.pg_class AS c ON l.locktype = 'relation' AND c.oid = l.relation"
    f" WHERE NOT l.granted AND l.database = {_HERE}"
    " AND (l.locktype = 'advisory' OR c.relname IN ({names}))"
    f" ORDER BY l.waitstart LIMIT {MOST_ROWS}) AS w"
)
# CREATE INDEX CONCURRENTLY holds this lock on the table while its index is still invalid.
_INVALID_INDEXES = (
    "SELECT pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(c.relname) AS name,"
    " i.indrelid::regclass::text AS on_table, c.relname ~ '_cc(new|old)[0-9]*$' AS copy"
    " FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid"
    " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
    " WHERE NOT i.indisvalid AND c.relkind = 'i' AND n.nspname !~ '^pg_'"
    " AND NOT EXISTS (SELECT FROM pg_catalog.pg_locks AS l WHERE l.relation = i.indrelid AND l.granted"
    f" AND l.mode = 'ShareUpdateExclusiveLock' AND l.database = {_HERE})"
    f" ORDER BY 1 LIMIT {MOST_ROWS}"
)
# Without pg_read_all_stats the columns of other roles' sessions are null. `reply_time` is the standby's clock, read when its last
# reply was sent, which may have been some seconds ago.
_STANDBYS = (
    "SELECT r.sync_state AS sync, r.application_name AS application,"
    " CAST(EXTRACT(EPOCH FROM r.reply_time - pg_catalog.clock_timestamp()) AS double precision) AS ahead"
    " FROM pg_catalog.pg_stat_replication AS r"
    " WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_replication_slots AS s"
    " WHERE s.active_pid = r.pid AND s.slot_type = 'logical')"
    " AND (r.state IS NULL OR r.state IN ('streaming', 'catchup'))"
)
# to_regclass() is not used, because it needs USAGE on the schema.
_TABLES = (
    "SELECT pg_catalog.substr(c.relname, {skip}) AS name, n.nspname AS schema, pg_catalog.pg_table_is_visible(c.oid) AS visible,"
    " pg_catalog.has_schema_privilege(n.oid, 'USAGE') AS usable,"
    " (SELECT pg_catalog.json_agg(p.name) FROM pg_catalog.unnest(ARRAY[{privileges}]) AS p(name)"
    " WHERE pg_catalog.has_table_privilege(c.oid, p.name)) AS rights"
    " FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
    " WHERE c.relname IN ({names}) AND c.relkind IN ('r', 'p')"
)
_FUNCTIONS = (
    "SELECT pg_catalog.substr(f.proname, {skip}) AS name, n.nspname AS schema,"
    " pg_catalog.has_function_privilege(f.oid, 'EXECUTE') AS allowed"
    " FROM pg_catalog.pg_proc AS f JOIN pg_catalog.pg_namespace AS n ON n.oid = f.pronamespace"
    " WHERE f.proname IN ({functions})"
)
_SHORTEST_LEASE = "SELECT min(ttl) FROM {table} WHERE released_at IS NULL AND expires_at > pg_catalog.clock_timestamp() AND ttl < 'Infinity'"
_LISTS = ("holders", "waits", "invalid_indexes", "standbys", "tables", "functions")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a server as one role sees it.

    Attributes:
        tcp: whether the connection uses TCP, and not a Unix socket.
        sees_all: whether the role sees the activity of all sessions.
        locks_used, lock_limit: the entries of other sessions in the lock table, and its minimum capacity.
        settings: settings of the session, in the units of pg_settings.
        holders: the other sessions that hold advisory locks and are idle or whose state is hidden.
        waits: the sessions that wait for an advisory lock or for a table of pgfence.
        invalid_indexes: indexes that are not valid and not being built.
        standbys: the standbys that receive WAL from this server.
        tables, functions: the tables and functions in any schema that have the names of pgfence's tables and functions.
        schema: the schema of the installation, or None if there is none.
        problem: why the installed tables cannot be used.
        shortest_ttl: the shortest TTL of the leases that are held, or None. It is read only if the primary has synchronous
            standbys and the role may read the leases.
        clock_difference: the server's clock minus this host's, in seconds.
        clock_doubt: the maximum error of the difference, in seconds.
    """

    standby: bool
    role: str
    database: str
    search_path: str
    tcp: bool
    sees_all: bool
    locks_used: int
    lock_limit: int
    settings: Mapping[str, str]
    holders: list[dict[str, Any]]
    waits: list[dict[str, Any]]
    invalid_indexes: list[dict[str, Any]]
    standbys: list[dict[str, Any]]
    tables: list[dict[str, Any]]
    functions: list[dict[str, Any]]
    schema: str | None = None
    problem: SchemaError | None = None
    shortest_ttl: float | None = None
    clock_difference: float = 0.0
    clock_doubt: float = 0.0

    def read_milliseconds(self, name: str) -> int:
        """Return a setting that pg_settings shows in milliseconds, or 0 if the server does not have it."""
        return int(self.settings.get(name, "0"))


def build_query(place: TableNames) -> str:
    """Return the statement that reads the snapshot. Its only value is the snapshot as JSON."""
    words = {
        "names": ", ".join(quote_literal(place.prefix + name) for name in list_column_types()),
        "functions": ", ".join(quote_literal(place.prefix + name) for name in read_functions(place)),
        "privileges": ", ".join(map(quote_literal, PRIVILEGES)),
        "skip": str(len(place.prefix) + 1),
    }
    parts = {
        "holders": _HOLDERS,
        "waits": _replace(_WAITS, words),
        "invalid_indexes": _INVALID_INDEXES,
        "standbys": _STANDBYS,
        "tables": _replace(_TABLES, words),
        "functions": _replace(_FUNCTIONS, words),
    }
    lists = ", ".join(
        f"'{name}', (SELECT COALESCE(pg_catalog.json_agg(pg_catalog.row_to_json(x)), '[]') FROM ({text}) AS x)"
        for name, text in parts.items()
    )
    return (
        f"SELECT pg_catalog.json_build_object('server', (SELECT pg_catalog.row_to_json(x) FROM ({_SERVER}) AS x),"
        f" 'settings', ({_SETTINGS}), {lists})::text"
    )


def _replace(text: str, words: Mapping[str, str]) -> str:
    for name, value in words.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def read_version(connection: Connection) -> tuple[str, int, str]:
    """Return the server's version as text and as a number, and the role. The round trip begins the transaction."""
    version, number, role = connection.exec_driver_sql(_VERSION).one()
    return version.partition(" (")[0].partition(" on ")[0], number, role


def read_snapshot(connection: Connection, place: TableNames) -> Snapshot:
    """Read and return the snapshot, inside a transaction that has begun.

    This takes one round trip, a further one if there are tables to check, and a further one on a primary with synchronous
    standbys.
    """
    before = datetime.now(UTC).timestamp()
    found = json.loads(tables.execute_plain(connection, build_query(place)).scalar_one())
    after = datetime.now(UTC).timestamp()
    lists = {name: found[name] for name in _LISTS}
    schema = _find_schema(lists["tables"], place)
    problem = None
    if schema is not None and _is_readable(lists["tables"], schema):
        problem = tables.verify(connection, place._replace(schema=schema))
    shortest = None
    replicates = found["settings"].get("synchronous_standby_names") and not found["server"]["standby"]
    if replicates and problem is None and schema is not None and _may_read(lists["tables"], schema, "lease"):
        query = _SHORTEST_LEASE.format(table=place._replace(schema=schema).name("lease"))
        shortest = connection.exec_driver_sql(query).scalar()
    clock = found["server"].pop("clock") / 1e6
    return Snapshot(
        **found["server"],
        **lists,
        settings=found["settings"],
        schema=schema,
        problem=problem,
        shortest_ttl=shortest,
        clock_difference=clock - (before + after) / 2,
        clock_doubt=(after - before) / 2,
    )


def _find_schema(found: list[dict[str, Any]], place: TableNames) -> str | None:
    """Return the schema of the installation that pgfence uses with this configuration."""
    for table in found:
        here = table["visible"] if place.schema is None else table["schema"] == place.schema
        if table["name"] == "schema_version" and here:
            schema: str = table["schema"]
            return schema
    return None


def _may_read(found: list[dict[str, Any]], schema: str, name: str) -> bool:
    return any(
        table["name"] == name and table["schema"] == schema and table["usable"] and "SELECT" in (table["rights"] or ())
        for table in found
    )


def _is_readable(found: list[dict[str, Any]], schema: str) -> bool:
    return any(
        table["name"] == "schema_version" and table["schema"] == schema and table["usable"] and table["rights"]
        for table in found
    )
