"""Find the fence and the version trigger that models declare for a table, and recognize pgfence's own tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

from alembic.util import CommandError
from sqlalchemy import Date, Enum, Integer, String, Uuid, inspect
from sqlalchemy.types import TypeDecorator

from pgfence._sql.columns import OWN
from pgfence._sql.storage import TableNames
from pgfence.fence._rows import MODEL, View, column_of, has_single_resource

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Column, Table

COUNTED = "pgfence_version"
"""The key in the `info` of a version column, or in the `info` of a table, where its value is the column's name or None."""

_MARK = "\0"
"""The character around a column's name in the result of a resource function. Resources cannot contain it."""


def place_of_own(table: Table) -> TableNames | None:
    """Return the installation that a table belongs to, or None if it is not one of pgfence's tables."""
    prefix = table.info.get(OWN)
    return None if prefix is None else TableNames(table.schema, prefix)


def fence_of(table: Table) -> str | None:
    """Return the resource of a table's fence, as `add_fence` takes it, or None if no fence is declared.

    Raises:
        CommandError: the class of the table computes the resource in a way that a trigger cannot.
    """
    if MODEL in table.info:
        declared: str | None = table.info[MODEL]
        return declared
    for column in table.columns:
        if (model := column.info.get(MODEL)) is not None:
            return _read_resource(model) if model.__fence__ == "gate" else None
    return None


def version_of(table: Table) -> str | None:
    """Return the name of the column in which a trigger counts versions, or None if no such trigger is declared."""
    if COUNTED in table.info:
        declared: str | None = table.info[COUNTED]
        return declared
    for column in table.columns:
        if COUNTED in column.info and column.server_onupdate is not None and not column.system:
            return column.name
    return None


def _read_resource(model: Any) -> str:
    if has_single_resource(model):
        return _escape_braces(model.__fence_resource__)
    attributes = inspect(model).column_attrs

    def look(name: str) -> _Symbol:
        for column in attributes[name].columns:
            if column.table is column_of(inspect(model)).table:
                return _Symbol(column)
        raise TypeError(f"the column of {name!r} is in another table")

    try:
        text = model.__fence_resource__(View(model, look))
        if not isinstance(text, str | _Symbol):
            raise TypeError(f"it must return a str, not {type(text).__name__}")
    except Exception as error:
        raise CommandError(
            f"{model.__name__}.__fence_resource__ cannot be converted for a trigger: {error}. Declare the resource in the"
            f" model's __table_args__:"
            f' {{"info": {{"{MODEL}": "close:{{column}}"}}}}, or set None there for a table without a trigger'
        ) from error
    return _join_template(str(text).split(_MARK))


def _join_template(pieces: Iterable[str]) -> str:
    return "".join(f"{{{piece}}}" if i % 2 else _escape_braces(piece) for i, piece in enumerate(pieces))


def join_resource(parts: tuple[str, ...]) -> str:
    """Return the `resource` argument of `add_fence` for the parts that a trigger has."""
    return _join_template(parts)


def _escape_braces(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


class _Symbol:
    """A stand-in for a column of a row. It can become part of a text, and supports no other operation."""

    def __init__(self, column: Column[Any]) -> None:
        kind: Any = column.type
        if isinstance(kind, TypeDecorator) and type(kind).process_bind_param is TypeDecorator.process_bind_param:
            kind = kind.impl_instance
        if not isinstance(kind, String | Integer | Uuid | Date) or isinstance(kind, Enum):
            raise TypeError(
                f"the column {column.name!r} has a type whose values Python and PostgreSQL may format differently"
            )
        self._text = f"{_MARK}{column.name}{_MARK}"

    def __str__(self) -> str:
        return self._text

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(f"it formats a column with the format spec {spec!r}")
        return self._text

    def __add__(self, other: object) -> str:
        return self._text + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + self._text

    def _refuse(self, *_: object) -> Never:
        raise TypeError(
            "it compares, tests, slices or iterates over a column, but may only insert columns into the text"
        )

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __len__ = __iter__ = __getitem__ = _refuse
    __hash__ = None  # type: ignore[assignment]
