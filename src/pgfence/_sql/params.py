"""What statements carry: parameters in the style of each driver, calls of our server functions, times as numbers.

Every argument is cast, so that each driver's idea of a number, a list or nothing fits the function's. Times are sent as numbers,
because how a session writes times and how a driver reads them is for the application to set.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pgfence.errors import UnsupportedServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine.interfaces import Dialect

    from pgfence._sql.storage import TableNames


Row: TypeAlias = "Sequence[Any]"
"""A row as the driver returns it."""

RawConnection: TypeAlias = Any
"""A driver's own connection: psycopg's, psycopg2's or asyncpg's. None of them is installed for certain."""

ParamStyle: TypeAlias = Literal["format", "numeric"]
"""How a driver marks parameters: %s, or $1, $2, ..."""


DRIVERS: dict[str, ParamStyle] = {
    "psycopg": "format",
    "psycopg_async": "format",
    "psycopg2": "format",
    "asyncpg": "numeric",
}


def style_of(dialect: Dialect) -> ParamStyle:
    """Return how the dialect's driver marks parameters.

    Raises:
        UnsupportedServerError: the dialect is not PostgreSQL's, or its driver is none that pgfence knows.
    """
    if dialect.name != "postgresql":
        raise UnsupportedServerError(f"pgfence needs PostgreSQL; this engine speaks to {dialect.name}")
    if dialect.driver not in DRIVERS:
        known = ", ".join(sorted(DRIVERS))
        raise UnsupportedServerError(f"pgfence does not know the driver {dialect.driver}; use one of {known}")
    return DRIVERS[dialect.driver]


def mark(style: ParamStyle, n: int) -> str:
    """Return the mark of the n-th parameter, from 1 on."""
    return f"${n}" if style == "numeric" else "%s"


def name_of(place: TableNames, what: str, style: ParamStyle) -> str:
    """Return the name of a table or function for a statement with parameters, where a per cent sign means something."""
    name = place.name(what)
    return name if style == "numeric" else name.replace("%", "%%")


def call(place: TableNames, style: ParamStyle, function: str, kinds: str, start: int = 1) -> str:
    """Return a call whose parameters are of these kinds, "text, bigint", the first of them the `start`-th of the statement."""
    arguments = ", ".join(f"CAST({mark(style, n)} AS {kind})" for n, kind in enumerate(kinds.split(", "), start))
    return f"{name_of(place, function, style)}({arguments})"


_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
_END = (datetime.max.replace(tzinfo=UTC) - _BEGINNING) // timedelta(microseconds=1)


def microseconds_sql(time: str) -> str:
    """Return the expression for a time as microseconds since 1970; infinity stays infinity."""
    return f"CAST(EXTRACT(EPOCH FROM {time}) * 1000000 AS double precision)"


def from_microseconds(microseconds_sql: float) -> datetime:
    """Return the time that such a number means, in UTC; the last one that there is for what is later."""
    return _BEGINNING + timedelta(microseconds=int(min(microseconds_sql, _END)))
