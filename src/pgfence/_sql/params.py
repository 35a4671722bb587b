"""Build parameters in each driver's style, calls of server functions, and times as numbers.

Every argument is cast, so that each driver's type for a number, a list or NULL fits the function. Times are sent as numbers,
because the application controls how a session formats times and how a driver parses them.
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
"""The connection of psycopg, psycopg2 or asyncpg. Its type is Any, because no driver is certain to be installed."""

ParamStyle: TypeAlias = Literal["format", "numeric"]
"""The way in which a driver marks parameters: %s, or $1, $2, ..."""


DRIVERS: dict[str, ParamStyle] = {
    "psycopg": "format",
    "psycopg_async": "format",
    "psycopg2": "format",
    "asyncpg": "numeric",
}


def style_of(dialect: Dialect) -> ParamStyle:
    """Return the parameter style of the dialect's driver.

    Raises:
        UnsupportedServerError: the dialect is not PostgreSQL, or its driver is not supported.
    """
    if dialect.name != "postgresql":
        raise UnsupportedServerError(f"pgfence needs PostgreSQL, but this engine uses {dialect.name}")
    if dialect.driver not in DRIVERS:
        known = ", ".join(sorted(DRIVERS))
        raise UnsupportedServerError(f"pgfence does not support the driver {dialect.driver}; use one of {known}")
    return DRIVERS[dialect.driver]


def mark(style: ParamStyle, n: int) -> str:
    """Return the marker of the n-th parameter, counted from 1."""
    return f"${n}" if style == "numeric" else "%s"


def name_of(place: TableNames, what: str, style: ParamStyle) -> str:
    """Return the name of a table or function for a statement with parameters, where percent signs must be doubled."""
    name = place.name(what)
    return name if style == "numeric" else name.replace("%", "%%")


def call(place: TableNames, style: ParamStyle, function: str, kinds: str, start: int = 1) -> str:
    """Return a function call with parameters of the types in `kinds`, e.g. "text, bigint".

    The first of these is the `start`-th parameter of the statement.
    """
    arguments = ", ".join(f"CAST({mark(style, n)} AS {kind})" for n, kind in enumerate(kinds.split(", "), start))
    return f"{name_of(place, function, style)}({arguments})"


_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
_END = (datetime.max.replace(tzinfo=UTC) - _BEGINNING) // timedelta(microseconds=1)


def microseconds_sql(time: str) -> str:
    """Return the SQL expression for a time as microseconds since 1970; infinity stays infinity."""
    return f"CAST(EXTRACT(EPOCH FROM {time}) * 1000000 AS double precision)"


def from_microseconds(microseconds_sql: float) -> datetime:
    """Return the time for microseconds since 1970, in UTC. Times after datetime.max become datetime.max."""
    return _BEGINNING + timedelta(microseconds=int(min(microseconds_sql, _END)))
