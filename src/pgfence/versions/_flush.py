"""What is looked at when a flush comes to a versioned row: the version it was read at, and whether it can be guarded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sqlalchemy import event, inspect
from sqlalchemy.orm.attributes import flag_modified
from sqlalchemy.orm.exc import ObjectDeletedError

from pgfence._sql.fences import Target
from pgfence._sql.versions import backfill
from pgfence.errors import SchemaError
from pgfence.flushes import sends_update
from pgfence.versions._batch import compared
from pgfence.versions._conflicts import journal_of, not_counted
from pgfence.versions._mapping import ATTRIBUTE, VersionedBase, mode_of, version_column, version_in

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import InstanceState, Mapper, Session

    State = InstanceState[Any]

_COUNTED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The version before the UPDATE, of rows that a trigger counts."""


def _before_insert(mapper: Mapper[Any], connection: Connection, state: State) -> None:
    session = _session(state)
    if (journal := journal_of(session)) is None:
        return
    replaced = None
    if session.deleted:
        # Under the key of a row that the same flush deletes: SQLAlchemy makes one UPDATE of the two.
        key = mapper.identity_key_from_primary_key(tuple(mapper.primary_key_from_instance(state.obj())))
        replaced = session.identity_map.get(key)
    if replaced is None:
        journal.inserted(state)
    else:
        journal.note(connection, mapper, inspect(replaced), version_in(replaced))


def _before_update(mapper: Mapper[Any], connection: Connection, state: State) -> None:
    if compared(state):
        if mode_of(mapper) == "server" and version_column(mapper).table is not mapper.local_table:
            touch(state.obj())
        return
    session = _session(state)
    if not sends_update(state):
        return
    version = _note(mapper, connection, state)
    if mode_of(mapper) == "server":
        if version_column(mapper).table is not mapper.local_table:
            touch(state.obj())
        if getattr(session, "conflict_check", None) != "batch":
            _COUNTED[state] = version


def _before_delete(mapper: Mapper[Any], connection: Connection, state: State) -> None:
    if not compared(state):
        _note(mapper, connection, state)


def _note(mapper: Mapper[Any], connection: Connection, state: State) -> Any:
    journal = journal_of(_session(state))
    if ATTRIBUTE not in state.dict:
        try:
            getattr(state.obj(), ATTRIBUTE)
        except ObjectDeletedError:
            if journal is not None:
                journal.note(connection, mapper, state, None)
            raise
    version = version_in(state.obj())
    if version is None:
        raise _without(mapper, state)
    if journal is not None:
        journal.note(connection, mapper, state, version)
    return version


def _after_update(mapper: Mapper[Any], _connection: Connection, state: State) -> None:
    if mode_of(mapper) != "server":
        return
    before = _COUNTED.pop(state, None)
    if before is not None and state.dict.get(ATTRIBUTE) == before:
        raise not_counted(mapper, before)


def touch(target: Any) -> None:
    """Make a flush write the row that has the version, though none of its columns has changed."""
    flag_modified(target, _column_of(target))


def _column_of(target: Any) -> str:
    """Return the attribute of a column that may be written once more as it is, loaded."""
    mapper = inspect(target).mapper
    table = version_column(mapper).table
    for name, prop in mapper.column_attrs.items():
        column: Any = prop.columns[0]
        if name == ATTRIBUTE or column not in table.c.values() or column.primary_key:
            continue
        # A column that changes by itself has to be left to do so.
        if column.onupdate is None and column.server_onupdate is None and column.computed is None:
            getattr(target, name)
            return str(name)
    if mode_of(mapper) == "server":
        raise TypeError(
            f"{mapper.class_.__name__}: there is nothing in {table} that could be written so that the trigger counts: it needs"
            " a column beside its key and its version"
        )
    return str(mapper.get_property_by_column(mapper.primary_key[0]).key)


def _without(mapper: Mapper[Any], state: State) -> SchemaError:
    column: Any = version_column(mapper)
    command = backfill(Target(column.table.name, column.table.schema).quoted, column.name)
    return SchemaError(
        f"{mapper.class_.__name__} {state.identity} has no version, and without one it cannot be guarded: {command}",
        command=command,
    )


def _session(state: State) -> Session:
    session = state.session
    assert session is not None
    return session


# Ahead of what the batch check does to the version.
event.listen(VersionedBase, "before_insert", _before_insert, propagate=True, raw=True, insert=True)
event.listen(VersionedBase, "before_update", _before_update, propagate=True, raw=True, insert=True)
event.listen(VersionedBase, "before_delete", _before_delete, propagate=True, raw=True, insert=True)
event.listen(VersionedBase, "after_update", _after_update, propagate=True, raw=True)
