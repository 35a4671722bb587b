"""The statements of slots. Texts only; `_runtime` sends them. The end of a slot is among the statements of leases."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from pgfence._sql.calls import call, mark, name_of

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
    return SlotSql(
        read=(
            "SELECT pg_catalog.clock_timestamp(), s.done, s.tried FROM (SELECT) AS one"
            f" LEFT JOIN {name_of(place, 'slot', style)} AS s ON s.name = CAST({mark(style, 1)} AS text)"
        ),
        acquire=f"SELECT r.* FROM {call(place, style, 'acquire_slot_v1', _ACQUIRE)} AS r",
    )
