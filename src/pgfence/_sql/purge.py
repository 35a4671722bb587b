"""The statement that deletes a batch of expired idempotency keys in one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pgfence._sql.errors import ErrorContext
from pgfence._sql.idempotency import NEEDED
from pgfence._sql.params import mark, name_of, style_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from pgfence._sql.storage import TableNames

BEGINNING = float("-inf")
CONTEXT = ErrorContext(NEEDED, "SELECT, UPDATE, DELETE", "Purge on the primary")

_EXPIRED = "{k}.expires_at <= {now}() AND ({k}.locked_until IS NULL OR {k}.locked_until <= {now}())"
# The time is stable, so that the index is used. It is never later than the current time.
_FOUND = _EXPIRED.format(k="e", now="pg_catalog.statement_timestamp")
# This condition checks again that the row is expired, because a claim may have renewed it in the meantime. It uses a volatile
# time, so that the index is not used: if the statistics contain no expired key, the planner would scan the whole index for each
# batch instead of visiting the rows that were found.
_STILL = _EXPIRED.format(k="k", now="pg_catalog.clock_timestamp")
# Without current statistics the planner expects few expired keys, and would sort all of them for each batch.
_BY_INDEX = "SELECT pg_catalog.set_config('enable_sort', 'off', true)"
# SKIP LOCKED skips rows that a claim or another purge has locked. Each batch begins where the previous one ended, because deleted
# entries stay in the index while an old snapshot exists, and each batch would scan all of them.
_PURGE = (
    "WITH gone AS (DELETE FROM {table} AS k WHERE k.ctid = ANY (ARRAY(SELECT e.ctid FROM {table} AS e WHERE "
    + _FOUND
    + " AND e.expires_at >= pg_catalog.to_timestamp(CAST({0} AS double precision))"
    " ORDER BY e.expires_at LIMIT CAST({1} AS bigint) FOR UPDATE SKIP LOCKED)) AND "
    + _STILL
    + " RETURNING k.expires_at)"
    " SELECT pg_catalog.count(*), CAST(EXTRACT(epoch FROM pg_catalog.max(gone.expires_at)) AS double precision) FROM gone"
)


class Batch(NamedTuple):
    """The number of keys that were deleted in one transaction."""

    number: int
    end: float
    """When the last of these keys expired, in seconds since 1970. The next batch begins at this time."""


def purge(connection: Connection, place: TableNames, size: int, begin: float) -> Batch:
    """Delete up to `size` expired keys in a separate transaction, on a connection at READ COMMITTED."""
    style = style_of(connection.dialect)
    text = _PURGE.format(mark(style, 1), mark(style, 2), table=name_of(place, "idempotency_key", style))
    with connection.begin():
        connection.exec_driver_sql(_BY_INDEX)
        count, end = connection.exec_driver_sql(text, (begin, size)).one()
    return Batch(count, begin if end is None else end)
