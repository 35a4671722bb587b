"""Measure how long a renewal takes on a server, without renewing a lease."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pgfence._sql.lease import lease_sql
from pgfence._sql.params import style_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from pgfence._sql.storage import TableNames

_NOWHERE = "00000000-0000-0000-0000-000000000000"
# A renewal waits until its commit is on disk, and on a synchronous standby. The statement below waits in the same way, because it
# writes a message to the WAL. It changes no table. The server function raises synchronous_commit, as for a renewal.
_FLUSH = "SELECT pg_catalog.pg_logical_emit_message(true, 'pgfence', '') IS NOT NULL"
_ROW = (
    "SELECT COALESCE(l.kind, 'lease'), l.ttl, l.released_at IS NULL AND l.expires_at > pg_catalog.clock_timestamp(),"
    " CAST(EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - GREATEST(l.acquired_at, l.renewed_at)) AS double precision)"
    " FROM {lease} AS l WHERE l.name = {name}"
)


class RenewalHistory(NamedTuple):
    """What a lease's row says about its renewals.

    Attributes:
        kind: the kind of the holder.
        ttl: the TTL of the last grant or renewal, in seconds, or None if the grant has none.
        held: whether the lease is held.
        age: the seconds since the last grant or renewal.
    """

    kind: str
    ttl: float | None
    held: bool
    age: float


@dataclass(frozen=True, slots=True)
class RenewalSample:
    """The statement that a measurement repeats, with its parameters."""

    text: str
    arguments: tuple[object, ...]

    def run(self, connection: Connection) -> None:
        """Execute the statement once, on a connection in autocommit."""
        connection.exec_driver_sql(self.text, self.arguments).all()


def build_sample(connection: Connection, place: TableNames) -> RenewalSample:
    """Return a statement that renews a lease that does not exist, and commits as durably as a real renewal."""
    renew = lease_sql(place, style_of(connection.dialect)).renew
    return RenewalSample(f"{_FLUSH}, ({renew})", ([""], [_NOWHERE], [0], [1.0]))


def read_lease(connection: Connection, place: TableNames, name: str) -> RenewalHistory | None:
    """Return what the lease's row says about renewals, by the stored name, or None if the lease was never acquired."""
    style = style_of(connection.dialect)
    mark, table = ("$1", place.name("lease")) if style == "numeric" else ("%s", place.name("lease").replace("%", "%%"))
    row = connection.exec_driver_sql(_ROW.format(lease=table, name=mark), (name,)).one_or_none()
    return None if row is None else RenewalHistory._make(row)
