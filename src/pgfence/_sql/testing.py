"""The statements of `pgfence.testing`: histories, leaked locks, and faults that change rows or end sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import text

from pgfence._sql.storage import quote

if TYPE_CHECKING:
    from sqlalchemy import TextClause

    from pgfence._sql.storage import TableNames

HISTORY = "pgfence_test_history"

CREATE_HISTORY = text(
    f"CREATE TABLE {HISTORY} (id bigserial PRIMARY KEY, resource text NOT NULL, holder text NOT NULL,"
    " what text NOT NULL, token bigint)"
)
# A worker that was still writing would keep the table locked.
LIMIT_WAIT = text("SET LOCAL lock_timeout = '10s'")
DROP_HISTORY = text(f"DROP TABLE IF EXISTS {HISTORY}")
RECORD = text(
    f"INSERT INTO {HISTORY} (resource, holder, what, token) VALUES (:resource, :holder, :what, CAST(:token AS bigint))"
)
READ_HISTORY = text(f"SELECT resource, holder, what, token FROM {HISTORY} ORDER BY id")
COUNT_HISTORY = text(f"SELECT count(*) FROM {HISTORY}")


def build_create_database(name: str) -> str:
    return f"CREATE DATABASE {quote(name)}"


def build_drop_database(name: str) -> str:
    """Return the statement that drops a database and ends the sessions in it."""
    return f"DROP DATABASE {quote(name)} WITH (FORCE)"


# ------------------------------------------------------------ faults

TERMINATE = text("SELECT pg_catalog.pg_terminate_backend(:pid, 5000)")
READ_CLOCK = text("SELECT extract(epoch FROM pg_catalog.clock_timestamp())::double precision")


def build_expiry(place: TableNames) -> TextClause:
    """Return the statement that backdates leases, as if they had expired a second ago.

    The statement takes the names of the leases, and for each the token, or NULL for any token.

    It also moves the time before which no other holder gets the lease, so a `lock_delay` lasts as long as after a real expiry.
    """
    return text(
        f"UPDATE {place.name('lease')} AS l SET expires_at = l.expires_at - n.passed, free_at = l.free_at - n.passed"
        f" FROM (SELECT h.name, h.expires_at - pg_catalog.clock_timestamp() + interval '1 second' AS passed"
        f" FROM {place.name('lease')} AS h"
        " JOIN unnest(CAST(:names AS text[]), CAST(:tokens AS bigint[])) AS w (name, token) ON h.name = w.name"
        " WHERE h.token = COALESCE(w.token, h.token) AND h.released_at IS NULL"
        " AND h.expires_at > pg_catalog.clock_timestamp() FOR UPDATE OF h) AS n WHERE l.name = n.name"
    )


# ------------------------------------------------------------ leaked locks

READ_LOCKS = text(
    "SELECT (l.classid::bigint << 32) | l.objid::bigint, l.objsubid, l.mode, l.granted, l.pid, a.application_name,"
    " pg_catalog.host(a.client_addr), COALESCE(a.xact_start, a.state_change), a.state, a.query"
    " FROM pg_catalog.pg_locks AS l LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid"
    " WHERE l.locktype = 'advisory'"
    " AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())"
    " ORDER BY l.granted DESC, 2, 1"
)
HAS_TABLE = text("SELECT pg_catalog.to_regclass(:table) IS NOT NULL")


def build_name_query(place: TableNames) -> TextClause:
    return text(f"SELECT key, name FROM {place.name('lock_name')}")


def build_lease_query(place: TableNames) -> TextClause:
    return text(
        "SELECT name, kind, owner, host, pid, backend_pid, purpose, token, acquired_at, expires_at"
        f" FROM {place.name('lease')} WHERE released_at IS NULL AND expires_at > pg_catalog.clock_timestamp() ORDER BY name"
    )
