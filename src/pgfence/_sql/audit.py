"""Read the audit table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pgfence._sql.encoding import translate_text_errors
from pgfence._sql.errors import ErrorContext
from pgfence._sql.params import mark, microseconds_sql, name_of, style_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from pgfence._sql.params import Row
    from pgfence._sql.storage import TableNames

_LOOK = (
    f"SELECT a.id, a.action, a.resource, a.actor, a.reason, {microseconds_sql('a.at')}, a.detail::text FROM {{audit}} AS a"
    " WHERE ({0} IS NULL OR a.at >= pg_catalog.to_timestamp({0}))"
    " AND ({1} IS NULL OR a.at >= pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => {1}))"
    " AND ({2} IS NULL OR a.action = {2}) ORDER BY a.at, a.id"
)


@dataclass(frozen=True, slots=True)
class AuditQuery:
    """A search in the audit table. None means any value."""

    place: TableNames
    since: float | None
    """The time of the earliest row, in seconds since 1970."""
    newest: float | None
    """The maximum age of a row by the server's clock, in seconds."""
    action: str | None

    context: ClassVar[ErrorContext] = ErrorContext(audit_rights="SELECT")


def look(connection: Connection, wanted: AuditQuery) -> Sequence[Row]:
    """Return the matching rows, oldest first."""
    style = style_of(connection.dialect)
    kinds = {"since": "double precision", "newest": "double precision", "action": "text"}
    marks, values = [], []
    for n, (name, kind) in enumerate(kinds.items(), 1):
        marks.append(f"CAST({mark(style, n)} AS {kind})")
        values.append(getattr(wanted, name))
    text = _name_parameters(name_of(wanted.place, "audit", style), marks)
    with translate_text_errors(connection, values):
        rows: Sequence[Any] = connection.exec_driver_sql(text, tuple(values)).all()
    return rows


def _name_parameters(table: str, marks: Sequence[str]) -> str:
    # Each parameter is used twice, which a "format" driver cannot express: the subquery gives each of them a name.
    query = _LOOK.format("p.since", "p.newest", "p.action", audit=table)
    return query.replace(" AS a WHERE", f" AS a, (SELECT {', '.join(marks)}) AS p(since, newest, action) WHERE", 1)
