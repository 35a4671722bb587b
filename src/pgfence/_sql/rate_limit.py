"""The statements of rate limits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from pgfence._sql.params import call

if TYPE_CHECKING:
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames


@dataclass(frozen=True, slots=True)
class RateSql:
    """The statement texts of rate limits, for one set of tables and one parameter style.

    Attributes:
        take: name, limit, per in seconds, units. One row: outcome ("taken", "busy", "mismatch"), seconds until the units may be
            allowed, the limit and the seconds that are stored.
        change: name, limit, per in seconds. One row, whose content has no meaning.
    """

    take: str
    change: str


@cache
def rate_sql(place: TableNames, style: ParamStyle) -> RateSql:
    return RateSql(
        take=f"SELECT r.* FROM {call(place, style, 'take_v1', 'text, integer, double precision, integer')} AS r",
        change=f"SELECT 1 FROM {call(place, style, 'change_rate_v1', 'text, integer, double precision')} AS r",
    )
