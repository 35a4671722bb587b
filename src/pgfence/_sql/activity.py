"""Query the holders of an advisory key, and how full the lock table is. These queries take no advisory lock.

The texts are separate from the functions that send them, so that callers with a driver's own connection can use the texts too:
`TEXTS[style]`, `build_arguments(keys)`, `decode(rows, keys)`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pgfence._sql.params import from_microseconds, microseconds_sql, style_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection

    from pgfence._sql.params import ParamStyle, Row
    from pgfence.keys import LockKey
    from pgfence.types import Holder

# pg_locks shows the halves of a key as unsigned oids. Combined into one signed number, they are `LockKey.value`.
_VALUE = "((l.classid::bigint << 32) | l.objid::bigint)"

# {0} is the array of bigint keys, and {1} is the array of pairs. The whole key, its space and the database are compared: half of
# a key, or the same number in another key space or database, is a different lock.
_MATCH = (
    "l.locktype = 'advisory' AND l.granted"
    " AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())"
    f" AND (l.objsubid = 1 AND {_VALUE} = ANY (CAST({{0}} AS bigint[]))"
    f" OR l.objsubid = 2 AND {_VALUE} = ANY (CAST({{1}} AS bigint[])))"
)
_HELD = "SELECT EXISTS (SELECT FROM pg_catalog.pg_locks AS l WHERE " + _MATCH + ")"
_MINE = _HELD.replace("l.granted", "l.granted AND l.pid = pg_catalog.pg_backend_pid()")

# A prepared transaction has no process. It is found by its lock on its own transaction id.
_HOLDERS = (
    f"SELECT {_VALUE}, l.objsubid, l.mode, l.pid, a.application_name, pg_catalog.host(a.client_addr),"
    f" {microseconds_sql('COALESCE(a.xact_start, a.state_change, p.prepared)')}, p.gid"
    " FROM pg_catalog.pg_locks AS l"
    " LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid"
    " LEFT JOIN LATERAL (SELECT x.gid, x.prepared FROM pg_catalog.pg_locks AS t"
    " JOIN pg_catalog.pg_prepared_xacts AS x ON x.transaction = t.transactionid"
    " WHERE l.pid IS NULL AND t.pid IS NULL AND t.virtualtransaction = l.virtualtransaction) AS p ON true"
    " WHERE " + _MATCH + " ORDER BY l.objsubid, 1, l.mode, l.pid"
)
_TABLE_USE = (
    "SELECT (SELECT count(*) FROM pg_catalog.pg_locks), pg_catalog.current_setting('max_locks_per_transaction')::bigint"
    " * (pg_catalog.current_setting('max_connections')::bigint"
    " + pg_catalog.current_setting('max_prepared_transactions')::bigint)"
)


class HolderTexts(NamedTuple):
    """The texts of the queries, for one parameter style. All of them take the parameters from `build_arguments(keys)`."""

    holders: str
    held: str
    mine: str


TEXTS: dict[ParamStyle, HolderTexts] = {
    "format": HolderTexts(*(text.format("%s", "%s") for text in (_HOLDERS, _HELD, _MINE))),
    "numeric": HolderTexts(*(text.format("$1", "$2") for text in (_HOLDERS, _HELD, _MINE))),
}


def build_arguments(keys: Iterable[LockKey]) -> tuple[list[int], list[int]]:
    """Return the parameters of the texts for these keys."""
    whole: list[int] = []
    pairs: list[int] = []
    for key in keys:
        (whole if key.space == "bigint" else pairs).append(key.value)
    return whole, pairs


def decode(rows: Iterable[Row], keys: Iterable[LockKey]) -> list[Holder]:
    """Return the holders that the rows of `HolderTexts.holders` describe. `keys` are the requested keys."""
    known = {(key.value, 1 if key.space == "bigint" else 2): key for key in keys}
    return [_build_holder(row, known[row[0], row[1]]) for row in rows]


# `Holder` is imported where it is used, because creating the classes of its module takes longer than acquiring a lock, and a
# holder is described only if the lock is held.
def _build_holder(row: Row, key: LockKey) -> Holder:
    from pgfence.types import Holder

    _, _, mode, backend_pid, application_name, host, since, gid = row
    return Holder(
        name=key.name,
        key=key,
        kind="advisory",
        mode="shared" if mode == "ShareLock" else "exclusive",
        owner=None if gid is None else f"prepared transaction {gid!r}",
        host=host,
        backend_pid=backend_pid,
        application_name=application_name or None,
        since=None if since is None else from_microseconds(since),
    )


def build_lease_holder(name: str, row: Row) -> Holder:
    """Return the holder that a row of `lease_sql(...).look` describes. `name` is without the namespace."""
    from pgfence.types import Holder

    kind, owner, host, pid, backend_pid, application_name, purpose, token, since, expires_at = row
    return Holder(
        name=name,
        key=None,
        kind=kind,
        owner=owner,
        host=host,
        pid=pid,
        backend_pid=backend_pid,
        application_name=application_name or None,
        purpose=purpose or "",
        token=token,
        since=since,
        expires_at=expires_at,
    )


def describe_kind(kind: str) -> str:
    """Return the kind of a holder with its article, for messages such as "it is held by a lease"."""
    noun = "advisory lock" if kind == "advisory" else kind
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def with_token(sessions: Iterable[Holder], rows: Iterable[Holder]) -> list[Holder]:
    """Return the holders of a key. The holder with a token also gets the kind, token, client and time of its lease row."""
    known = {row.backend_pid: row for row in rows if row.kind == "session lock"}
    return [
        replace(one, kind=row.kind, token=row.token, host=row.host, pid=row.pid, since=row.since)
        if (row := known.get(one.backend_pid)) is not None
        else one
        for one in sessions
    ]


def find_holders(connection: Connection, keys: Sequence[LockKey]) -> list[Holder]:
    """Return the sessions and transactions that hold these keys in the connection's database, in one round trip.

    Attributes of other roles' sessions that the role may not see are None. A session that holds a key in both modes is listed
    twice.
    """
    text = TEXTS[style_of(connection.dialect)].holders
    return decode(connection.exec_driver_sql(text, build_arguments(keys)).all(), keys)


def is_held(connection: Connection, keys: Sequence[LockKey]) -> bool:
    """Return whether any session holds one of these keys in the connection's database, in one round trip."""
    text = TEXTS[style_of(connection.dialect)].held
    answer: bool = connection.exec_driver_sql(text, build_arguments(keys)).scalar_one()
    return answer


def is_mine(connection: Connection, keys: Sequence[LockKey]) -> bool:
    """Return whether this connection's session holds one of these keys, in one round trip."""
    text = TEXTS[style_of(connection.dialect)].mine
    answer: bool = connection.exec_driver_sql(text, build_arguments(keys)).scalar_one()
    return answer


def read_lock_table_use(connection: Connection) -> tuple[int, int]:
    """Return the number of locks in the server's lock table and the capacity of the table, in one round trip.

    The capacity is a minimum, because PostgreSQL lets the table use spare memory.
    """
    used, limit = connection.exec_driver_sql(_TABLE_USE).one()
    return used, limit
