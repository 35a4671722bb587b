"""The statements of slots. Texts only. The end of a slot is among the statements of leases."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from pgfence._sql.params import call, mark, name_of
from pgfence._sql.tables import literal

if TYPE_CHECKING:
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames

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
    "text",
    "integer",
    "timestamptz",
)


@dataclass(frozen=True, slots=True)
class SlotSql:
    """The texts for one place and one way of marking parameters.

    Attributes:
        read: name. One row: the server's clock, the newest slot done, the newest tried; None where there is none.
        read_zone: zone, name. One row: the same; how many seconds local time is ahead of UTC there, None for an unknown zone;
            and how many it was at the newest slot done by the host that ran it, None if that is not known.
        offset: instant, zone. One row: how many seconds local time was ahead of UTC then; None for an unknown zone.
        home: the quoted name of the table of slots. One row: the schema in which it is.
        acquire: name, slot, until when it counts or None, lease id, ttl, max_hold or None, owner, host, pid, purpose, metadata
            as JSON or None, zone or None, how many seconds local time is ahead of UTC at the slot or None, the newest slot
            done as it was read. One row: the outcome ("granted", "busy", "done", "moved", "zone"), then as the `acquire` of a lease,
            and how many attempts the slot has seen.
    """

    read: str
    read_zone: str
    offset: str
    home: str
    acquire: str


def repair(place: TableNames, stored: str) -> str:
    """Return the statement with which a person lets a job run again whose slot was finished by a clock that was ahead.

    It may be pasted into psql, and does nothing once the server's clock has passed the slot.
    """
    return (
        f"UPDATE {place.name('slot')} SET done = NULL, tried = NULL WHERE name = {_pasteable(stored)}"
        " AND done > pg_catalog.clock_timestamp();"
    )


def _pasteable(value: str) -> str:
    """Return a text as a constant that survives a log line, a terminal and a mail: all on one line, every space alone."""
    if value.isprintable() and "  " not in value:
        return literal(value)
    parts = []
    for before, char in zip(f"x{value}", value, strict=False):
        if char.isprintable() and char not in "'\\" and not before == char == " ":
            parts.append(char)
        else:
            code = ord(char)
            parts.append(f"\\x{code:02x}" if code < 0x80 else f"\\U{code:08x}")
    return f"E'{''.join(parts)}'"


@cache
def slot_sql(place: TableNames, style: ParamStyle) -> SlotSql:
    """Return the texts for one place."""
    return SlotSql(
        read=(
            "SELECT pg_catalog.clock_timestamp(), s.done, s.tried FROM (SELECT) AS one"
            f" LEFT JOIN {name_of(place, 'slot', style)} AS s ON s.name = CAST({mark(style, 1)} AS text)"
        ),
        read_zone=(
            f"SELECT one.at, s.done, s.tried, {name_of(place, 'zone_offset_v1', style)}(one.at, CAST({mark(style, 1)} AS text)),"
            " CASE WHEN s.done = s.tried THEN s.tried_offset ELSE s.done_offset END"
            " FROM (SELECT pg_catalog.clock_timestamp() AS at OFFSET 0) AS one"
            f" LEFT JOIN {name_of(place, 'slot', style)} AS s ON s.name = CAST({mark(style, 2)} AS text)"
        ),
        offset=f"SELECT {call(place, style, 'zone_offset_v1', ('timestamptz', 'text'))}",
        home=(
            "SELECT n.nspname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
            f" WHERE c.oid = pg_catalog.to_regclass(CAST({mark(style, 1)} AS text))"
        ),
        acquire=f"SELECT r.* FROM {call(place, style, 'acquire_slot_v2', _ACQUIRE)} AS r",
    )
