"""The statements of slots. Texts only; `_runtime` sends them. The end of a slot is among the statements of leases."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from pgfence._sql.lease import _escaped, _mark

if TYPE_CHECKING:
    from pgfence._sql.advisory import Style
    from pgfence._sql.storage import Place

_ACQUIRE = (
    "text",
    "timestamptz",
    "timestamptz",
    "text",
    "double precision",
    "double precision",
    "text",
    "text",
    "integer",
    "text",
    "text",
)


@dataclass(frozen=True, slots=True)
class SlotSql:
    """The texts for one place and one way of marking parameters.

    Attributes:
        read: name. One row: the server's clock, the newest slot done, the newest tried; None where there is none.
        acquire: name, slot, until when it counts or None, lease id, ttl, max_hold or None, owner, host, pid, purpose, metadata
            as JSON or None. One row: the outcome ("granted", "busy", "done", "moved"), then as the `acquire` of a lease, and
            how many attempts the slot has seen.
    """

    read: str
    acquire: str


@cache
def slot_sql(place: Place, style: Style) -> SlotSql:
    """Return the texts for one place."""
    table, function = (_escaped(place.name(name), style) for name in ("slot", "acquire_slot_v1"))
    arguments = ", ".join(f"CAST({_mark(style, n)} AS {kind})" for n, kind in enumerate(_ACQUIRE, 1))
    return SlotSql(
        read=(
            "SELECT pg_catalog.clock_timestamp(), s.done, s.tried FROM (SELECT) AS one"
            f" LEFT JOIN {table} AS s ON s.name = CAST({_mark(style, 1)} AS text)"
        ),
        acquire=f"SELECT r.* FROM {function}({arguments}) AS r",
    )
