"""The statements of partitions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from pgfence._sql.lease import read_unreleased
from pgfence._sql.params import call, mark, name_of

if TYPE_CHECKING:
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames

_JOIN = "text, integer, text, text, double precision"
_ACQUIRE = (
    "text, integer, integer, text, text, double precision, double precision, double precision, "
    "double precision, text, text, integer, text, text, text"
)


@dataclass(frozen=True, slots=True)
class PartitionSql:
    """The statement texts of partitions, for one set of tables and one parameter style.

    Attributes:
        join: name, number of partitions, hash, member id, ttl. One row: outcome ("joined", "mismatch"), the number of partitions
            and the hash stored, the number of members that are alive, how many of these joined earlier, the numbers of the free
            partitions.
        leave: name, member id. One value: whether the member existed.
        acquire: row name, name, partition, number of partitions, hash, then as for the `acquire` of a lease from the lease id on. One
            row, as for a lease.
        resize: name, number of partitions, hash. One row: whether it was resized; if not, an owned partition and its owner: number,
            kind, owner, host, pid, backend_pid, purpose, token, since, expires_at. If another hash is stored: NULL, the number of
            partitions and the hash stored, NULLs.
        find_owner: row name, name. One row if the set exists: the number of partitions and the hash stored, the owner as for the `look`
            of a lease, or NULLs, and its address.
    """

    join: str
    leave: str
    acquire: str
    resize: str
    find_owner: str


@cache
def partition_sql(place: TableNames, style: ParamStyle) -> PartitionSql:

    def ask(function: str, kinds: str, columns: str = "r.*") -> str:
        return f"SELECT {columns} FROM {call(place, style, function, kinds)} AS r"

    return PartitionSql(
        join=ask("join_partitions_v1", _JOIN),
        leave=ask("leave_partitions_v1", "text, text", "r"),
        acquire=(
            f"SELECT {read_unreleased(place, style)}, r.* FROM {call(place, style, 'acquire_partition_v1', _ACQUIRE, 2)} AS r"
        ),
        resize=ask("resize_partitions_v1", "text, integer, text"),
        find_owner=(
            "SELECT s.partitions, s.hash, l.kind, l.owner, l.host, l.pid, l.backend_pid, NULL, l.purpose, l.token, l.acquired_at,"
            " l.expires_at, CASE WHEN l.kind = 'partition' THEN l.metadata ->> 'address' END"
            f" FROM {name_of(place, 'partition_set', style)} AS s LEFT JOIN {name_of(place, 'lease', style)} AS l"
            f" ON l.name = CAST({mark(style, 1)} AS text)"
            " AND l.released_at IS NULL AND l.expires_at > pg_catalog.clock_timestamp()"
            f" WHERE s.name = CAST({mark(style, 2)} AS text)"
        ),
    )
