"""The statement that deletes expired idempotency keys, one batch of them in a transaction."""

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
# A stable time, so that the index is used; it is never later than the real one.
_FOUND = _EXPIRED.format(k="e", now="pg_catalog.statement_timestamp")
# The row that is deleted is the row that was looked at: both are asked again, since a claim may have renewed it meanwhile. By a
# volatile time, so that the index is not used: where the statistics know of no expired key, the planner would go through all
# of them for each batch instead of to the rows that were found.
_STILL = _EXPIRED.format(k="k", now="pg_catalog.clock_timestamp")
# Without statistics, or with old ones, the planner takes the expired keys for few, and would sort all of them for each batch.
_BY_INDEX = "SELECT pg_catalog.set_config('enable_sort', 'off', true)"
# SKIP LOCKED: what a claim or another purge has locked is left to it. Each batch begins where the one before has ended, because
# an old snapshot anywhere keeps the deleted entries in the index, and each batch would walk past all of them.
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
    """What one statement has deleted.

    Attributes:
        number: of keys.
        end: when the last of them expired, in seconds since 1970; where the next batch begins.
    """

    number: int
    end: float


def purge(connection: Connection, place: TableNames, size: int, begin: float) -> Batch:
    """Delete at most so many expired keys, in a transaction of its own on a connection at READ COMMITTED."""
    style = style_of(connection.dialect)
    text = _PURGE.format(mark(style, 1), mark(style, 2), table=name_of(place, "idempotency_key", style))
    with connection.begin():
        connection.exec_driver_sql(_BY_INDEX)
        count, end = connection.exec_driver_sql(text, (begin, size)).one()
    return Batch(count, begin if end is None else end)
