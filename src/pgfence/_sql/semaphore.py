"""The statements of semaphores."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from pgfence._sql.params import call, mark, name_of

if TYPE_CHECKING:
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames

_ACQUIRE = (
    "text, integer, integer, boolean, text, double precision, "
    "double precision, text, text, integer, text, text, double precision"
)
_RELEASE = "text[], text, bigint[]"
_BY_ID = "text, text"


class PermitSql(NamedTuple):
    """The statement texts of semaphores, for one set of tables and one parameter style.

    Attributes:
        acquire: name, permits, weight, whether the stored number of permits counts, lease id, ttl, max_hold or None, owner, host,
            pid, purpose, waiter id or None, seconds waited so far. One row: outcome, permits stored, row names, tokens,
            expires_at, remaining, hold_remaining, checkpoint as JSON, set_back, then the holder of the permit that is free
            first: kind, owner, host, pid, backend_pid, application_name, purpose, token, since, expires_at.
        release: row names, lease id, tokens. One value: "released", or why the permits were not held any more.
        release_late: row names, their number, and then as for `release`; for the heartbeat, which must not wait for a row while
            other leases need renewal. NULL if another session has locked one of the rows.
        forget_late: name, name, name, lease id. One value: whether it ended a grant; NULL as above.
        leave_late: name, name, name, waiter id. One value: whether the waiter was in the queue; NULL as above.
        resize: name, permits. One value: the number stored before, or NULL if there was none.
        look: name. One row with one value: JSON, a list of the holders: kind, owner, host, pid, backend_pid, purpose, token,
            since and expires_at in seconds since 1970, row name.
    """

    acquire: str
    release: str
    release_late: str
    forget_late: str
    leave_late: str
    resize: str
    look: str


@cache
def permit_sql(place: TableNames, style: ParamStyle) -> PermitSql:
    lease, semaphore = name_of(place, "lease", style), name_of(place, "semaphore", style)
    first = mark(style, 1)

    def ask(function: str, kinds: str, columns: str) -> str:
        return f"SELECT {columns} FROM {call(place, style, function, kinds)} AS r"

    def build_late(function: str) -> str:
        return (
            f"WITH f AS MATERIALIZED (SELECT 1 FROM {semaphore} AS s WHERE s.name = CAST({first} AS text)"
            " FOR NO KEY UPDATE SKIP LOCKED) SELECT CASE WHEN EXISTS (SELECT FROM f)"
            f" OR NOT EXISTS (SELECT FROM {semaphore} AS s WHERE s.name = CAST({mark(style, 2)} AS text))"
            f" THEN {call(place, style, function, _BY_ID, 3)} END"
        )

    names = f"CAST({first} AS text[])"
    return PermitSql(
        acquire=ask("acquire_permits_v1", _ACQUIRE, "r.*"),
        release=ask("release_permits_v1", _RELEASE, "r"),
        release_late=(
            f"WITH f AS MATERIALIZED (SELECT 1 FROM {lease} AS l WHERE l.name = ANY ({names})"
            " FOR NO KEY UPDATE SKIP LOCKED)"
            f" SELECT CASE WHEN (SELECT pg_catalog.count(*) FROM f) = CAST({mark(style, 2)} AS bigint)"
            f" THEN {call(place, style, 'release_permits_v1', _RELEASE, 3)} END"
        ),
        forget_late=build_late("forget_permits_v1"),
        leave_late=build_late("leave_permits_v1"),
        resize=ask("resize_semaphore_v1", "text, integer", "r"),
        look=(
            "SELECT COALESCE(pg_catalog.json_agg(pg_catalog.json_build_array(l.kind, l.owner, l.host, l.pid, l.backend_pid,"
            " l.purpose, l.token, EXTRACT(EPOCH FROM l.acquired_at), EXTRACT(EPOCH FROM l.expires_at), l.name) ORDER BY l.acquired_at),"
            f" '[]')::text FROM {semaphore} AS s, pg_catalog.generate_series(1, s.highest) AS i, {lease} AS l"
            f" WHERE s.name = CAST({first} AS text) AND l.name = s.name || '#' || i"
            " AND l.released_at IS NULL AND l.expires_at > pg_catalog.clock_timestamp()"
        ),
    )
