"""List everything that is held and waited for, in one statement that takes no advisory lock.

The statement reads only what the role may read, as `probe` has found out. Holds are filtered, sorted and limited in the server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pgfence._sql.encoding import translate_text_errors
from pgfence._sql.errors import ErrorContext
from pgfence._sql.params import mark, microseconds_sql, name_of, style_of
from pgfence._sql.storage import is_in_place_sql, quote_literal
from pgfence._sql.ticket_queue import END_OF_QUEUE, IS_SIGN, IS_TICKET, WAITED
from pgfence.keys import SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from pgfence._sql.storage import TableNames
    from pgfence.keys import LockKey

MANY_KEYS = 200_000
"""If the planner estimates more rows than this, idempotency keys are listed only if they are requested."""

_TABLES = {"lease": "kind", "gate": "resource", "idempotency_key": "locked_until", "lock_name": "key"}
"""The tables that are read if they exist and may be read, each with a column by which the needed version is recognized."""
MISSING, DENIED = -2, -1
# These settings last until the transaction ends. The planner cannot estimate the size of pg_locks: nested loops over it would take
# minutes, and their high estimated cost would trigger JIT compilation.
_SETTINGS = "pg_catalog.set_config('enable_nestloop', 'off', true), pg_catalog.set_config('jit', 'off', true)"
_PROBE = (
    f"SELECT {_SETTINGS}, pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE'), pg_catalog.current_database(),"
    f" {microseconds_sql('pg_catalog.clock_timestamp()')}, pg_catalog.json_object_agg(w.name, CASE"
    f" WHEN c.oid IS NULL THEN {MISSING} WHEN NOT pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE')"
    f" OR NOT pg_catalog.has_table_privilege(c.oid, 'SELECT') THEN {DENIED} ELSE GREATEST(c.reltuples, 0) END)::text"
    " FROM (VALUES {values}) AS w(name, relation, field) LEFT JOIN pg_catalog.pg_class AS c ON c.oid = (SELECT t.oid"
    " FROM pg_catalog.pg_class AS t JOIN pg_catalog.pg_attribute AS a ON a.attrelid = t.oid"
    " WHERE t.relname = w.relation AND a.attname = w.field AND {schema} ORDER BY t.oid LIMIT 1)"
)

# Everything about advisory locks comes from one reading of pg_locks. Waits for other kinds of locks are read too, because they
# show which holders wait.
_LOCKS = (
    "locks AS MATERIALIZED (SELECT ((l.classid::bigint << 32) | l.objid::bigint) AS value, l.objsubid AS space, l.classid,"
    " l.pid, l.mode, l.granted, l.locktype = 'advisory' AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d"
    " WHERE d.datname = pg_catalog.current_database()) AS ours, l.virtualtransaction AS vx, l.transactionid AS xid, l.waitstart"
    " FROM pg_catalog.pg_locks AS l WHERE l.locktype = 'advisory' OR NOT l.granted OR l.pid IS NULL),"
    " activity AS MATERIALIZED (SELECT a.pid, a.application_name, pg_catalog.host(a.client_addr) AS host, a.usename, a.state,"
    " a.state_change, a.xact_start FROM pg_catalog.pg_stat_activity AS a),"
    f" tickets AS MATERIALIZED (SELECT o.pid, o.vx, o.value AS ticket, c.value AS clock, {WAITED} AS waited"
    f" FROM locks AS o JOIN locks AS c ON {IS_TICKET} WHERE o.ours AND c.ours),"
    # A claim of an idempotency key holds a pair and a number, which have the first half in common.
    " claims AS MATERIALIZED (SELECT n.vx, n.value, p.value AS pair FROM locks AS n JOIN locks AS p ON p.vx = n.vx"
    " AND p.classid = n.classid WHERE n.ours AND p.ours AND n.granted AND p.granted AND n.space = 1 AND p.space = 2"
    " AND n.mode = 'ExclusiveLock' AND p.mode = 'ExclusiveLock' AND n.classid::bigint <> 0),"
    " parts AS (SELECT t.vx, 1 AS space, t.ticket AS value FROM tickets AS t UNION ALL SELECT t.vx, 1, t.clock"
    f" FROM tickets AS t UNION ALL SELECT t.vx, 1, t.ticket | {END_OF_QUEUE} FROM tickets AS t"
    f" UNION ALL SELECT t.vx, 1, k.value FROM tickets AS t JOIN locks AS k ON {IS_SIGN} WHERE k.ours"
    " UNION ALL SELECT c.vx, 2, c.pair FROM claims AS c),"
    " wanted AS (SELECT k.value, k.space FROM locks AS k WHERE k.ours AND NOT k.granted UNION SELECT c.value, 1"
    " FROM claims AS c JOIN locks AS k ON k.ours AND NOT k.granted AND k.space = 2 AND k.value = c.pair),"
    " prepared AS (SELECT k.vx, x.gid, x.prepared, x.owner FROM locks AS k JOIN pg_catalog.pg_prepared_xacts AS x"
    " ON x.transaction = k.xid WHERE k.pid IS NULL)"
)
# A session that is outside a transaction has no local transaction id, so its lock is a session lock. If a session is inside a
# transaction, the server does not show whether its lock is a session lock or a transaction lock.
_OUTSIDE = "pg_catalog.right(h.vx, 2) = '/0'"
_MINE = "s.backend_pid = h.pid AND s.kind = 'session lock'"
_HELD = (
    f"SELECT CASE WHEN c.vx IS NOT NULL THEN 'idempotency' WHEN {_MINE} THEN 'session' WHEN g.name IS NOT NULL THEN 'gate'"
    f" ELSE COALESCE(known.kind, CASE WHEN {_OUTSIDE} THEN 'session' ELSE 'transaction' END) END AS kind,"
    " COALESCE(n.name, s.name, g.name, known.name) AS name, NULL::text AS scope, h.value, h.space, c.pair,"
    " CASE h.mode WHEN 'ShareLock' THEN 'shared' ELSE 'exclusive' END AS mode,"
    " CASE WHEN h.gid IS NOT NULL THEN pg_catalog.concat('prepared transaction ', h.gid) END AS owner,"
    f" COALESCE(CASE WHEN {_MINE} THEN s.host END, h.host) AS host, CASE WHEN {_MINE} THEN s.pid END AS pid,"
    " h.pid AS backend_pid, h.application_name, h.usename::text AS usename, NULL::text AS purpose,"
    f" CASE WHEN {_MINE} THEN s.token END AS token,"
    f" COALESCE(CASE WHEN {_MINE} THEN s.acquired_at END, h.since) AS since,"
    " NULL::timestamptz AS expires_at, CASE WHEN h.pid IS NULL THEN 'prepared' WHEN b.pid IS NOT NULL THEN 'waiting'"
    f" ELSE COALESCE(h.state, CASE WHEN {_OUTSIDE} THEN 'idle' ELSE 'in transaction' END) END AS state,"
    " h.waited FROM (SELECT h.*, a.application_name, a.host, COALESCE(a.usename, p.owner) AS usename, a.state, p.gid,"
    " COALESCE(a.xact_start, a.state_change, p.prepared) AS since, w.value IS NOT NULL AS waited FROM locks AS h"
    " LEFT JOIN activity AS a ON a.pid = h.pid"
    " LEFT JOIN prepared AS p ON h.pid IS NULL AND p.vx = h.vx"
    " LEFT JOIN wanted AS w ON w.value = h.value AND w.space = h.space"
    " WHERE h.ours AND h.granted"
    " AND NOT EXISTS (SELECT FROM parts AS x WHERE x.vx = h.vx AND x.space = h.space AND x.value = h.value){first}) AS h"
    " LEFT JOIN claims AS c ON c.vx = h.vx AND c.value = h.value AND h.space = 1"
    " LEFT JOIN (SELECT DISTINCT k.pid FROM locks AS k WHERE NOT k.granted) AS b ON b.pid = h.pid"
    " LEFT JOIN known ON known.value = h.value AND known.space = h.space"
    " LEFT JOIN {lock_name} AS n ON n.key = h.value AND h.space = 1"
    " LEFT JOIN {session_locks} AS s ON s.lock_key = h.value AND h.space = 1"
    " LEFT JOIN {gates} AS g ON g.value = h.value AND h.space = 1 AND n.name IS NULL"
)
# Without filters, the first rows of the query are enough, because the other joins only add columns to these rows.
_FIRST = " ORDER BY waited DESC, since NULLS LAST, h.value LIMIT (SELECT q.rows FROM q)"
_AT = "(SELECT q.at FROM q)"
# The oldest rows of each branch are enough for the limit, so the others are not passed on.
_OLDEST = ' ORDER BY {since}, {name} COLLATE "C" LIMIT (SELECT q.rows FROM q)) AS {table}'
_LEASE_KIND = "COALESCE(NULLIF(l.kind, 'session lock'), 'lease')"
_LEASE_STATE = (
    f"CASE WHEN l.released_at IS NOT NULL THEN 'min_hold' WHEN l.expires_at > {_AT} THEN 'held' ELSE 'lock_delay' END"
)
_LEASES = (
    f"SELECT {_LEASE_KIND}, l.name, NULL, NULL, NULL, NULL, 'exclusive', l.owner, l.host,"
    " l.pid, l.backend_pid, NULL, NULL, l.purpose, l.token, l.acquired_at,"
    f" CASE WHEN l.released_at IS NULL AND l.expires_at > {_AT} THEN LEAST(l.expires_at,"
    f" {_AT} + pg_catalog.make_interval(secs => l.ttl)) ELSE l.free_at END, {_LEASE_STATE}, false"
    f" FROM (SELECT * FROM {{lease}} AS l WHERE (l.free_at > {_AT} OR l.released_at IS NULL AND l.expires_at > {_AT})"
)
_ATTEMPT_STATE = f"CASE WHEN k.locked_until > {_AT} THEN 'running' ELSE 'lost' END"
_ATTEMPTS = (
    "SELECT 'idempotency', k.key, k.scope, NULL, NULL, NULL, 'exclusive', k.owner, k.host, k.pid, NULL, NULL, NULL, NULL,"
    f" k.attempt, k.created_at, k.locked_until, {_ATTEMPT_STATE}, false"
    " FROM (SELECT * FROM {idempotency_key} AS k WHERE k.status = 'in_progress' AND k.locked_until IS NOT NULL"
)
_SESSION_LOCKS = (
    "(SELECT l.lock_key, l.name, l.kind, l.backend_pid, l.host, l.pid, l.token, l.acquired_at"
    " FROM {lease} AS l WHERE l.lock_key IS NOT NULL)"
)
_NO_SESSION_LOCKS = (
    "(SELECT NULL::bigint AS lock_key, NULL::text AS name, NULL::text AS kind, NULL::integer AS backend_pid,"
    " NULL::text AS host, NULL::integer AS pid, NULL::bigint AS token, NULL::timestamptz AS acquired_at WHERE false)"
)
# A gate is locked in shared mode, so without a shared lock no transaction is inside any gate, and the table need not be
# read.
_GATES = (
    "(SELECT r.resource AS name, pg_catalog.hashtextextended(r.resource, CAST({gate_text} AS regclass)::oid::bigint) AS value"
    " FROM {gate} AS r WHERE EXISTS (SELECT FROM locks AS k WHERE k.ours AND k.mode = 'ShareLock'))"
)
_NO_GATES = "(SELECT NULL::text AS name, NULL::bigint AS value WHERE false)"
_NO_NAMES = "(SELECT NULL::bigint AS key, NULL::text AS name WHERE false)"
_QUERY = (
    "WITH RECURSIVE q AS MATERIALIZED (SELECT pg_catalog.clock_timestamp() AS at, CAST({1} AS text) AS namespace,"
    " CAST({2} AS text) AS prefix, CAST({3} AS text[]) AS kinds, CAST({4} AS text[]) AS states, CAST({5} AS bigint) AS rows),"
    " known AS (SELECT * FROM ROWS FROM (pg_catalog.unnest(CAST({6} AS bigint[])), pg_catalog.unnest(CAST({7} AS integer[])),"
    " pg_catalog.unnest(CAST({8} AS text[])), pg_catalog.unnest(CAST({9} AS text[]))) AS k(value, space, name, kind)), "
    + _LOCKS
    + ", holds AS ({parts}), top AS MATERIALIZED (SELECT t.*, {label} AS label, {label_scope} AS label_scope FROM holds AS t{where}"
    ' ORDER BY t.waited DESC, t.since NULLS LAST, t.scope COLLATE "C", t.name COLLATE "C", t.value, t.backend_pid LIMIT (SELECT q.rows FROM q)),'
    " chain(root, pid, depth) AS (SELECT r.backend_pid, b.pid, 1 FROM (SELECT DISTINCT t.backend_pid FROM top AS t"
    " WHERE t.state = 'waiting') AS r, pg_catalog.unnest(pg_catalog.pg_blocking_pids(r.backend_pid)) AS b(pid)"
    " UNION SELECT c.root, b.pid, c.depth + 1 FROM chain AS c, pg_catalog.unnest(pg_catalog.pg_blocking_pids(c.pid)) AS b(pid)"
    " WHERE c.depth < 8)"
    " SELECT (SELECT pg_catalog.json_agg(pg_catalog.json_build_array(t.kind, t.label, t.label_scope, t.value, t.space, t.pair,"
    f" t.mode, t.owner, t.host, t.pid, t.backend_pid, t.application_name, t.usename, t.purpose, t.token, {microseconds_sql('t.since')},"
    f" {microseconds_sql('t.expires_at')}, t.state, (SELECT pg_catalog.json_agg(c.pid ORDER BY c.depth, c.pid) FROM"
    " (SELECT c.pid, pg_catalog.min(c.depth) AS depth FROM chain AS c WHERE c.root = t.backend_pid AND c.pid <> c.root"
    " GROUP BY c.pid) AS c))"
    ' ORDER BY t.waited DESC, t.since NULLS LAST, t.scope COLLATE "C", t.name COLLATE "C", t.value, t.backend_pid) FROM top AS t)::text,'
    " (SELECT pg_catalog.json_agg(pg_catalog.json_build_array(COALESCE(k.pid, t.pid), k.value, k.space, t.ticket,"
    f" CASE WHEN t.ticket IS NULL THEN {microseconds_sql('(q.at - k.waitstart)')} ELSE t.waited * 1e6 END, k.mode,"
    " a.application_name, a.host, a.usename)) FROM (SELECT * FROM locks AS w WHERE w.ours AND NOT w.granted) AS k"
    " FULL JOIN tickets AS t ON t.pid = k.pid LEFT JOIN activity AS a ON a.pid = COALESCE(k.pid, t.pid), q)::text"
)


class Access(NamedTuple):
    """What a role can see.

    Attributes:
        all_stats: whether the role sees the activity of other roles' sessions.
        now: the time by the server's clock, in microseconds since 1970.
        tables: the estimated number of rows of each table, or MISSING or DENIED.
    """

    all_stats: bool
    database: str
    now: float
    tables: dict[str, float]

    def is_readable(self, table: str) -> bool:
        return self.tables[table] >= 0

    def is_denied(self, table: str) -> bool:
        return self.tables[table] == DENIED


class HoldRow(NamedTuple):
    """A hold, as the server returns it. Times are in microseconds since 1970."""

    kind: str
    name: str | None
    scope: str | None
    value: int | None
    space: int | None
    pair: int | None
    mode: str
    owner: str | None
    host: str | None
    pid: int | None
    backend_pid: int | None
    application_name: str | None
    user: str | None
    purpose: str | None
    token: int | None
    since: float | None
    expires_at: float | None
    state: str
    blocked_by: Sequence[int] | None


class WaitRow(NamedTuple):
    """A session that waits for an advisory lock, or has a ticket for one. `value` is None between two slices of its wait."""

    pid: int
    value: int | None
    space: int | None
    ticket: int | None
    waited: float | None
    mode: str | None
    application_name: str | None
    host: str | None
    user: str | None


@dataclass(frozen=True, slots=True)
class HoldQuery:
    """What to list. None means all kinds or states, or no limit."""

    place: TableNames
    namespace: str
    """The configured namespace, which is removed from the names that are shown."""
    prefix: str
    """The beginning of the names, as they are shown."""
    kinds: tuple[str, ...] | None
    states: tuple[str, ...] | None
    limit: int | None
    known: tuple[tuple[LockKey, str, str | None], ...] = ()
    """Keys of this and of other programs, each with a name and a kind (None if the kind is not known)."""

    context: ClassVar[ErrorContext] = ErrorContext()


def probe(connection: Connection, place: TableNames) -> Access:
    """Return what the role can see, in one round trip."""
    values = ", ".join(
        f"({quote_literal(name)}, {quote_literal(place.prefix + name)}, {quote_literal(field)})"
        for name, field in _TABLES.items()
    )
    text = _PROBE.format(values=values, schema=is_in_place_sql(place, "t"))
    _, _, all_stats, database, now, tables = connection.exec_driver_sql(
        text, execution_options={"no_parameters": True}
    ).one()
    return Access(all_stats, database, now, json.loads(tables))


def look(connection: Connection, query: HoldQuery, access: Access) -> tuple[list[HoldRow], list[WaitRow]]:
    """Return the holds and all waits, in one round trip. Holds with waiters come first, and otherwise older holds come first."""
    style = style_of(connection.dialect)
    names = {name: name_of(query.place, name, style) for name in _TABLES}
    names["gate_text"] = quote_literal(names["gate"])
    parts = [
        _HELD.format(
            lock_name=names["lock_name"] if access.is_readable("lock_name") else _NO_NAMES,
            session_locks=(_SESSION_LOCKS if access.is_readable("lease") else _NO_SESSION_LOCKS).format(**names),
            first="" if query.kinds or query.states or query.prefix else _FIRST,
            gates=(_GATES if access.is_readable("gate") else _NO_GATES).format(**names),
        )
    ]
    if access.is_readable("lease"):
        filters = _build_filters(query, _LEASE_KIND, _LEASE_STATE, _label_sql("l.name"))
        parts.append(
            f"{_LEASES.format(**names)}{filters}{_OLDEST.format(since='l.acquired_at', name='l.name', table='l')}"
        )
    if should_list_attempts(query, access):
        scoped = f"pg_catalog.concat({_label_sql('k.scope')}, ':', k.key)"
        filters = _build_filters(query, "'idempotency'", _ATTEMPT_STATE, scoped)
        parts.append(
            f"{_ATTEMPTS.format(**names)}{filters}{_OLDEST.format(since='k.created_at', name='k.key', table='k')}"
        )
    shown = f"pg_catalog.concat({_label_sql('t.scope')} || ':', {_label_sql('t.name')})"
    text = _QUERY.format(
        *[mark(style, n) for n in range(10)],
        parts=" UNION ALL ".join(parts),
        label=f"CASE WHEN t.scope IS NULL THEN {_label_sql('t.name')} ELSE t.name END",
        label_scope=_label_sql("t.scope"),
        where=_build_filters(query, "t.kind", "t.state", shown).replace(" AND ", " WHERE ", 1),
    )
    args = _build_arguments(query)
    with translate_text_errors(connection, args):
        holds, waits = connection.exec_driver_sql(text, args).one()
    return (
        [HoldRow(*row) for row in json.loads(holds or "[]")],
        [WaitRow(*row) for row in json.loads(waits or "[]")],
    )


def _label_sql(name: str) -> str:
    """Return the SQL expression for a stored name as the list shows it: without the configured namespace."""
    bare = (
        f"CASE WHEN pg_catalog.starts_with({name}, (SELECT q.namespace FROM q))"
        f" THEN pg_catalog.substr({name}, (SELECT pg_catalog.length(q.namespace) + 1 FROM q)) ELSE {name} END"
    )
    return f"pg_catalog.replace({bare}, pg_catalog.chr(31), ':')"


def _build_filters(query: HoldQuery, kind: str, state: str, label: str) -> str:
    """Return the conditions of the query that are needed to choose rows, each with AND before it."""
    conditions = []
    if query.kinds is not None:
        conditions.append(f"{kind} = ANY (CAST((SELECT q.kinds FROM q) AS text[]))")
    if query.states is not None:
        conditions.append(f"{state} = ANY (CAST((SELECT q.states FROM q) AS text[]))")
    if query.prefix:
        conditions.append(f"pg_catalog.starts_with({label}, (SELECT q.prefix FROM q))")
    return "".join(f" AND {condition}" for condition in conditions)


def should_list_attempts(query: HoldQuery, access: Access) -> bool:
    """Return whether the attempts of idempotency keys are listed. A large table is read only if the caller requests them."""
    asked = query.kinds is not None and "idempotency" in query.kinds
    return access.is_readable("idempotency_key") and (asked or access.tables["idempotency_key"] <= MANY_KEYS)


def _build_arguments(query: HoldQuery) -> tuple[Any, ...]:
    known = query.known
    return (
        query.namespace + SEPARATOR if query.namespace else "",
        query.prefix,
        None if query.kinds is None else list(query.kinds),
        None if query.states is None else list(query.states),
        query.limit,
        [key.value for key, _, _ in known],
        [1 if key.space == "bigint" else 2 for key, _, _ in known],
        [name for _, name, _ in known],
        [kind for _, _, kind in known],
    )
