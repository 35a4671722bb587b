"""Check UPDATEs without a mapper event, such as those of `post_update`, in the `onupdate` of the column.

The row that a statement identifies by its primary key is read, locked and checked. All other statements are rejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BindParameter, Column, select
from sqlalchemy import inspect as mapped
from sqlalchemy.exc import DontWrapMixin
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.sql import operators
from sqlalchemy.sql.compiler import SQLCompiler

from pgfence._orm import get_key_columns
from pgfence.fence._rows import (
    ATTRIBUTE,
    View,
    choose_token,
    column_of,
    has_single_resource,
    read_schema_options,
    reject_stale,
    resource_of,
    undetermined_error,
)
from pgfence.fence._statements import values_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sqlalchemy.engine.default import DefaultExecutionContext
    from sqlalchemy.orm import Mapper

    from pgfence._orm import AnyRow
    from pgfence.fence._rows import Guarded


class _RowGoneError(StaleDataError, DontWrapMixin):
    """A StaleDataError that SQLAlchemy does not wrap in another error if it is raised inside a statement."""


def on_update(cls: type[Guarded], context: DefaultExecutionContext) -> int:
    """Return the token for a row that is updated without a mapper event, checked before and after the change."""
    connection = context.root_connection
    if has_single_resource(cls) and cls.__fence__ == "gate":
        return choose_token(cls, resource_of(cls, None), connection)
    row = _lock_row(cls, context)
    cls = _class_of(row, mapped(cls))
    resource = resource_of(cls, View(cls, lambda name: row._mapping[_find_column(cls, name)]))
    token = choose_token(cls, resource, connection)
    if cls.__fence__ == "row":
        newest = row._mapping[_find_column(cls, ATTRIBUTE)]
        if newest > token:
            reject_stale(connection, resource, token, newest)
    if has_single_resource(cls):
        return token
    new = View(cls, lambda name: _read_changed(cls, context, row, _find_column(cls, name)))
    return choose_token(cls, resource_of(cls, new), connection)


def _lock_row(cls: type[Guarded], context: DefaultExecutionContext) -> AnyRow:
    """Read and lock the one row that an UPDATE writes."""
    table = column_of(mapped(cls)).table
    named = _find_named_row(context)
    columns = get_key_columns(mapped(cls), table)
    # Without the whole key, the statement may write several rows, of several resources.
    if not named.keys() >= set(columns):
        raise undetermined_error(cls, "the rows of this UPDATE cannot be determined before it runs", _describe_way(cls))
    query = select(*table.c).where(*[column == named[column] for column in columns]).with_for_update()
    options = read_schema_options(context.execution_options)
    row = context.root_connection.execute(query, execution_options=options).one_or_none()
    if row is None:  # a row that appears before the UPDATE runs would be written without a check
        key = tuple(named[column] for column in columns)
        raise _RowGoneError(
            f"cannot write the row {key!r} of {cls.__name__}, because it does not exist, or is hidden from this role"
        )
    return row


def _find_named_row(context: DefaultExecutionContext) -> dict[object, object]:
    """Return the column values that the WHERE clause of a statement requires, from its equalities that are joined by AND."""
    parameters, compiled = context.current_parameters, context.compiled
    assert parameters is not None
    assert isinstance(compiled, SQLCompiler)
    found: dict[object, object] = {}
    for criterion in _iterate_conjuncts(getattr(compiled.statement, "_where_criteria", ())):
        column, value = getattr(criterion, "left", None), getattr(criterion, "right", None)
        if (
            getattr(criterion, "operator", None) is operators.eq
            and isinstance(column, Column)
            and isinstance(value, BindParameter)
        ):
            found[column] = parameters[compiled.bind_names[value]]
    return found


def _iterate_conjuncts(criteria: Iterable[object]) -> Iterator[object]:
    for criterion in criteria:
        if getattr(criterion, "operator", None) is operators.and_:
            yield from _iterate_conjuncts(getattr(criterion, "clauses", ()))
        else:
            yield criterion


def _class_of(row: AnyRow, mapper: Mapper[Guarded]) -> type[Guarded]:
    """Return the class of a row. With inheritance, the discriminator of the row determines the class."""
    if len(list(mapper.self_and_descendants)) == 1:
        return mapper.class_
    discriminator = mapper.polymorphic_on
    if discriminator is None or discriminator not in row._mapping:
        raise undetermined_error(
            mapper.class_,
            "the class of a row cannot be determined from the table with the fencing column",
            _describe_way(mapper.class_),
        )
    return mapper.polymorphic_map.get(row._mapping[discriminator], mapper).class_


def _find_column(cls: type[Guarded], name: str) -> Column[object]:
    """Return the column of an attribute in the table of the token."""
    mapper = mapped(cls)
    table = column_of(mapper).table
    for column in mapper.column_attrs[name].columns:
        if isinstance(column, Column) and column.table is table:
            return column
    raise undetermined_error(
        cls,
        f"the resource of a row depends on {name!r}, which is not in the table of the fencing column",
        _describe_way(cls),
    )


def _describe_way(cls: type[Guarded]) -> str:
    return f"write such rows through a flush without post_update, or with session.execute(update({cls.__name__})...)"


def _read_changed(cls: type[Guarded], context: DefaultExecutionContext, row: AnyRow, column: Column[object]) -> object:
    """Return the value of a column after the UPDATE."""
    parameters = context.current_parameters or {}
    if column.key in parameters:
        return parameters[column.key]
    if column.key in dict(values_of(context.compiled and context.compiled.statement)):
        raise undetermined_error(
            cls, f"the resource of a row depends on {column.key!r}, which an expression computes", _describe_way(cls)
        )
    return row._mapping[column]
