"""`insert_once` on a sync Session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from sqlalchemy import Table, UniqueConstraint, inspect, select
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import InstanceState, QueryableAttribute

from pgfence._api.transactions import open_connection
from pgfence._sql.idempotency import find_duplicate_columns
from pgfence._sql.sqlstate import SERIALIZATION_FAILURE, sqlstate_of
from pgfence.errors import IdempotencyInProgressError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import ColumnElement, Select
    from sqlalchemy.orm import Mapper, Session

T = TypeVar("T")

_TRIES = 2
"""The number of tries. The second try is for a row that was deleted between the INSERT and the SELECT."""


class _UniqueKey(NamedTuple, Generic[T]):
    query: Select[T]
    columns: frozenset[str]
    shown: str


def insert(session: Session, instance: T, key: Sequence[str | QueryableAttribute[Any]]) -> T:
    """Insert an instance, or return the instance that has its key; see `insert_once`."""
    state: InstanceState[T] | None = inspect(instance, raiseerr=False)
    if not isinstance(state, InstanceState):
        raise TypeError(
            f"insert_once() takes a new instance of a mapped class, not an instance of {type(instance).__name__}"
        )
    if state.key is not None:
        raise ValueError(f"this {type(instance).__name__} is already in the database: pass a new instance")
    mapper = state.mapper
    wanted = _build_query(mapper, instance, key)
    if state.session is session:
        session.expunge(instance)
    open_connection(session, {"mapper": mapper, "clause": wanted.query})
    refused: IntegrityError | None = None
    for _ in range(_TRIES):
        # The SELECT comes first, because the server logs a failed INSERT as an ERROR.
        if (found := session.scalars(wanted.query).one_or_none()) is not None:
            return found
        # Pending changes are flushed here, because their errors must not count as errors of this row.
        savepoint = session.begin_nested()
        try:
            with savepoint:
                session.add(instance)
                session.flush()
        except IntegrityError as error:
            # Under row-level security, the server does not say which constraint was violated.
            if (met := find_duplicate_columns(error)) is None or (met and met != wanted.columns):
                raise
            refused = error
        except DBAPIError as error:
            if sqlstate_of(error) != SERIALIZATION_FAILURE:
                raise
            # This happens in SERIALIZABLE for a row that was committed while this INSERT waited for it, because the snapshot does
            # not contain the row.
            raise _invisible_row_error("there may be", mapper, instance, wanted) from error
        else:
            return instance
    if (found := session.scalars(wanted.query).one_or_none()) is not None:
        return found
    assert refused is not None
    if not find_duplicate_columns(refused):
        raise refused
    if session.connection(bind_arguments={"mapper": mapper}).get_isolation_level() == "READ COMMITTED":
        refused.add_note(
            f"a row with {wanted.shown} exists, but a query of {type(instance).__name__} does not find it: the row belongs to"
            " another class of the table, a filter or a policy hides it, or the server rounds the value"
        )
        raise refused
    raise _invisible_row_error("there is", mapper, instance, wanted)


def _invisible_row_error(
    there_is: str, mapper: Mapper[T], instance: T, wanted: _UniqueKey[T]
) -> IdempotencyInProgressError:
    return IdempotencyInProgressError(
        f"{there_is} a row of {type(instance).__name__} with {wanted.shown}, but this transaction cannot see it because"
        " its snapshot is older than the row. Retry in a new transaction",
        scope=mapper.local_table.description,
        key=wanted.shown,
        sqlstate=SERIALIZATION_FAILURE,
    )


def _build_query(
    mapper: Mapper[T], instance: T, key: Sequence[str | QueryableAttribute[Any]] | QueryableAttribute[Any]
) -> _UniqueKey[T]:
    if isinstance(key, (str, QueryableAttribute)):
        raise TypeError(f"key must be a list of attributes, such as [{repr(key) if isinstance(key, str) else key}]")
    if strange := [one for one in key if not issubclass(mapper.class_, getattr(one, "class_", object))]:
        raise ValueError(f"{strange[0]} is not an attribute of {mapper.class_.__name__}")
    names = [one if isinstance(one, str) else one.key for one in key]
    if unknown := [name for name in names if name not in mapper.column_attrs]:
        raise ValueError(f"{mapper.class_.__name__} has no column attribute {unknown[0]!r}")
    columns = [mapper.column_attrs[name].columns[0] for name in names]
    if not any(set(columns) == unique for unique in _find_unique(columns)):
        raise ValueError(
            f"{mapper.class_.__name__} declares no primary key, unique constraint or non-partial unique index on"
            f" ({', '.join(names)}), and without one of these PostgreSQL would insert a duplicate: add a unique constraint"
        )
    values = {name: getattr(instance, name) for name in names}
    if empty := [name for name, value in values.items() if value is None]:
        raise ValueError(
            f"{mapper.class_.__name__}.{empty[0]} is None, and NULL is never equal to another value: set it first"
        )
    criteria = [getattr(mapper.class_, name) == value for name, value in values.items()]
    return _UniqueKey(
        select(mapper.class_).where(*criteria),
        frozenset(column.name for column in columns),
        ", ".join(f"{name} {value!r}" for name, value in values.items()),
    )


def _find_unique(columns: Sequence[ColumnElement[Any]]) -> Iterator[set[object]]:
    for table in {column.table for column in columns}:
        if isinstance(table, Table):
            yield set(table.primary_key.columns)
            for one in table.constraints:
                if isinstance(one, UniqueConstraint) and str(one.initially).upper() != "DEFERRED":
                    yield set(one.columns)
            for index in table.indexes:
                if index.unique and index.dialect_options["postgresql"]["where"] is None:
                    yield {_strip_order(one) for one in index.expressions}


def _strip_order(expression: object) -> object:
    """Return the column of `column.desc()`. Return any other object unchanged."""
    return getattr(expression, "element", expression) if getattr(expression, "modifier", None) else expression
