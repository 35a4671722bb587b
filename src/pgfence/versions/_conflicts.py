"""From SQLAlchemy's StaleDataError, which has a text only, to the rows that it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm.attributes import instance_state

from pgfence._sql.fences import Target
from pgfence._sql.versions import backfill
from pgfence.errors import PgfenceError, SchemaError, VersionConflict, VersionConflictError
from pgfence.flushes import will_send_update
from pgfence.versions._mapping import is_versioned, version_column, version_in
from pgfence.versions._rows import Key, versions_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from sqlalchemy import Connection
    from sqlalchemy.orm import InstanceState, Mapper

    from pgfence.versions._batch import Flush

    State: TypeAlias = "InstanceState[Any]"

_SHOWN = 5


class Row(NamedTuple):
    """A row that a failed flush was to write, as it was when the flush failed.

    `settled` is False for a row that is gone and that this flush may have deleted itself: several were deleted by one
    statement, and their number was wrong. Only after the rollback does the row show whether another process has.
    """

    mapper: Mapper[Any]
    key: Key
    expected: Any
    found: Any
    connection: Connection
    settled: bool


def look(flush: Flush) -> list[Row]:
    """Return the rows of a flush that has just failed, without those that it has locked or written.

    In its transaction, which no other process's later write can reach: what it has written itself is at the version that
    is in memory.
    """
    found: list[Row] = []
    done, unclear = flush.sent_rows()
    by_mapper: dict[Mapper[Any], list[State]] = {}
    for state in _to_be_written(flush):
        if (state.mapper.base_mapper, _key(state)) not in done:
            by_mapper.setdefault(state.mapper, []).append(state)
    for mapper, states in by_mapper.items():
        connection = flush.connection(mapper, states[0])
        keys = [_key(state) for state in states]
        for state, key, version in zip(states, keys, versions_of(connection, mapper, keys), strict=True):
            settled = (mapper.base_mapper, key) not in unclear
            if settled or version is not None or not flush.added(state):
                found.append(Row(mapper, key, version_in(state.obj()), version, connection, settled))
    return found


def _to_be_written(flush: Flush) -> list[State]:
    """Return the versioned rows that a flush changes or deletes, as far as it has come to them."""
    session, context = flush.session, flush.context
    if context is None:
        # A listener of before_flush has failed: of the rows that may have been its reason.
        return [state for state in map(instance_state, session.dirty) if state.key and is_versioned(state.mapper)]
    switched = {state.mapper._identity_key_from_state(state) for state in context.states if state.key is None}
    return [
        state
        for state, (deleted, listed) in context.states.items()
        if state.key is not None
        and is_versioned(state.mapper)
        and state not in flush.locked
        and (
            (deleted and (not listed or state.key in switched))
            or (not deleted and not listed and will_send_update(state))
        )
    ]


def meant(flush: Flush, error: Exception) -> Exception:
    """Return what it means that a flush has failed by a row that was not there to be written, after its rollback.

    The error itself, where it is about other classes, or where the rows could not be looked at.
    """
    try:
        items = [
            VersionConflict(row.mapper.class_, row.key, row.expected, row.found)
            for row in flush.looked
            if (_gone(row) if row.found is None else row.expected not in (None, row.found))
        ]
    except DBAPIError:
        return error
    if items:
        return conflict(items)
    if any(f"table '{table}' expected" in str(error) for table in flush.tables()):
        return not_written(str(error))
    return error


def _gone(row: Row) -> bool:
    """Return whether another process has deleted a row that is gone."""
    if row.settled:
        return True
    connection = row.connection
    # Of the session, after its rollback: in a transaction only if it was back to a savepoint.
    transaction = connection.begin_nested() if connection.in_transaction() else connection.begin()
    try:
        return versions_of(connection, row.mapper, [row.key]) == [None]
    finally:
        transaction.rollback()


def _key(state: State) -> Key:
    assert state.key is not None
    return tuple(state.key[1])


def conflict(items: Sequence[VersionConflict], *, precondition: bool = False) -> VersionConflictError:
    """Return the error for rows that somebody else has written."""
    named = ", ".join(map(_told, items[:_SHOWN])) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
    way = "show it as it is to whoever asked" if precondition else "roll back, and read again before another attempt"
    return VersionConflictError(
        f"somebody else has written in between: {named}. Nothing of this is kept: {way}",
        items=items,
        precondition=precondition,
    )


def not_written(what: str) -> PgfenceError:
    """Return the error for rows that nobody else has written and that were not written all the same."""
    return PgfenceError(
        f"{what} Nobody else has written the rows, so this is no conflict, and another attempt would end the same way: a BEFORE"
        " trigger that returns NULL or a row-level security policy keeps rows from being written, or this transaction has"
        " written them by SQL beside the session, which should then refresh() them"
    )


def not_counted(mapper: Mapper[Any], version: Any) -> SchemaError:
    """Return the error for rows that were written, and whose version a trigger should have raised."""
    table: Any = version_column(mapper).table
    command = f"pgfence.schema.add_version_trigger(engine, {mapper.base_mapper.class_.__name__})"
    return SchemaError(
        f"a row of {table.fullname} was updated and its version stayed {version}: no trigger has counted. Nothing of this"
        f" flush is kept: {command}",
        command=command,
    )


def _told(item: VersionConflict) -> str:
    key = ", ".join(map(repr, item.pk))
    now = "is gone, or hidden from this role" if item.found is None else f"is at {item.found}"
    return f"{item.model.__name__} {key} was read at version {item.expected} and {now}"


def switched(state: State, replaced: State) -> PgfenceError:
    """Return the error for an instance of another class under the key of one that the same flush deletes."""
    name, other = state.class_.__name__, replaced.class_.__name__
    return PgfenceError(
        f"{name} {_key(replaced)} was added under the key of a row of class {other} that the same flush deletes. SQLAlchemy makes"
        f" one UPDATE of the two, which cannot exchange the rows in the tables of their own classes: call flush() after the"
        f" delete, and add the {name} then"
    )


def without(mapper: Mapper[Any], key: Key) -> SchemaError:
    """Return the error for a row that is about to be written and whose version is NULL."""
    column: Any = version_column(mapper)
    command = backfill(Target(column.table.name, column.table.schema).quoted, column.name)
    return SchemaError(
        f"{mapper.class_.__name__} {key} has no version, and without one it cannot be guarded: {command}",
        command=command,
    )
