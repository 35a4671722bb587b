"""Prepare each versioned row that a flush writes: check that its version was read, and increment it where SQLAlchemy does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Column, event, inspect
from sqlalchemy.orm.attributes import flag_modified
from sqlalchemy.orm.base import NO_VALUE

from pgfence._orm import identity_of, sends_update
from pgfence.errors import VersionRequiredError
from pgfence.versions._batch import NOW, batch_of, compare
from pgfence.versions._conflicts import missing_version_error, switched_class_error
from pgfence.versions._mapping import ATTRIBUTE, VersionedBase, get_version_column, mode_of, name_row, version_of
from pgfence.versions._rows import versions_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection
    from sqlalchemy.orm import Mapper, QueryContext

    from pgfence._orm import State
    from pgfence.versions._batch import Flush


def prepare_row(mapper: Mapper[object], state: State) -> None:
    """Prepare a row that is about to be inserted or updated, after all listeners that may change it have run."""
    if state.key is None:
        _insert(mapper, state)
    elif sends_update(state):
        _update(mapper, state)
    elif mode_of(mapper) == "server" and state.dict.get(ATTRIBUTE, state) is None:
        # SQLAlchemy would reject a NULL version as well, but without saying how to fill the column.
        check_version(mapper, state)


def _insert(mapper: Mapper[object], state: State) -> None:
    flush, batch = NOW.get(), batch_of(state)
    if flush is None or flush.session is not state.session:
        # In a plain Session, SQLAlchemy compares the version, but in mode "server" it would send an UPDATE with an empty SET.
        if mapper.version_id_generator is False and (replaced := _find_deleted(mapper, state)) is not None:
            _touch_switched(state, replaced)
        return
    replaced = flush.find_replaced(state)
    if replaced is not None and set(replaced.mapper.tables) != set(mapper.tables):
        compare(flush, [replaced])
        raise switched_class_error(state, replaced)
    if replaced is not None and mapper.version_id_generator is False:
        _touch_switched(state, replaced)
    if batch is not None:
        old = None if replaced is None else _compare(batch, mapper, replaced, by=state)
        if replaced is not None or not _returns_version(mapper):
            batch.written[state] = None  # `_confirm` reads the version after the flush.
        raise_version(mapper, state, old)


def _returns_version(mapper: Mapper[object]) -> bool:
    """Return whether the version of a new row is known after its INSERT."""
    if mapper.version_id_generator is not False:
        return True
    asked = mapper.base_mapper.eager_defaults
    return bool(get_version_column(mapper).table.implicit_returning if asked == "auto" else asked)


def _find_deleted(mapper: Mapper[object], state: State) -> State | None:
    session = state.session
    found = None if session is None else session.identity_map.get(mapper._identity_key_from_state(state))
    if session is None or found is None:
        return None
    existing: State = inspect(found)
    return existing if existing in session._deleted or existing.mapper._is_orphan(existing) else None


def _update(mapper: Mapper[object], state: State) -> None:
    batch = batch_of(state)
    if ATTRIBUTE not in state.dict:
        check_read(mapper, state)
    if batch is None or state not in batch.locked:
        check_version(mapper, state)
    if mode_of(mapper) == "server" and get_version_column(mapper).table is not mapper.local_table:
        touch(state.obj())
    if batch is not None:
        raise_version(mapper, state, _compare(batch, mapper, state, by=state))
        batch.written[state] = None


def _compare(batch: Flush, mapper: Mapper[object], state: State, *, by: State) -> object:
    """Return the version that was compared with a row, or that the UPDATE of an instance will compare."""
    if batch.way_of(mapper) == "counted":
        version = version_of(state)
        batch.expect(by, version)
        return version
    if state not in batch.locked:
        compare(batch, [state])
    batch.locked[by] = batch.locked[state]
    return batch.locked[state]


def _before_delete(mapper: Mapper[object], connection: Connection, state: State) -> None:
    batch = batch_of(state)
    if ATTRIBUTE not in state.dict:
        check_read(mapper, state)
    if batch is None or state not in batch.locked:
        check_version(mapper, state)
    if batch is None:
        return
    if batch.way_of(mapper) == "counted":
        version = version_of(state)
        if state in batch.locked:
            # post_update has already written the row.
            generated = mapper.version_id_generator
            version = state.dict[ATTRIBUTE] if generated else versions_of(connection, mapper, [identity_of(state)])[0]
        batch.expect(state, version)
        return
    if state not in batch.locked:
        compare(batch, [state], deleting=True)
    batch.deleted.append(state)


def touch(target: object) -> None:
    """Make a flush write the row that has the version, although none of its columns has changed."""
    flag_modified(target, _column_of(target))


def _touch_switched(state: State, replaced: State) -> None:
    """Make the UPDATE that replaces a deleted row write a column, because no trigger would run without one."""
    columns = {column for column in get_version_column(state.mapper).table.c if not column.primary_key}
    attributes = state.mapper.column_attrs
    if any(key in attributes and attributes[key].columns[0] in columns for key in state.committed_state):
        return
    name = _find_spare_column(replaced.obj())
    if name is None:
        if mode_of(state.mapper) != "server":
            raise TypeError(
                f"{name_row(state.class_, identity_of(replaced))} was deleted and added again in one flush, which cannot be sent as"
                f" an UPDATE, because the table {get_version_column(state.mapper).table.name!r} has only key columns: call flush() after"
                " the delete"
            )
        name = ATTRIBUTE
    # The value is the column itself, because the new instance does not have the value that is in the table.
    state.dict[name] = attributes[name].columns[0]
    flag_modified(state.obj(), name)


def _column_of(target: object) -> str:
    """Return the attribute of a column that can be written again unchanged, and load it."""
    mapper = inspect(target).mapper
    name = _find_spare_column(target)
    if name is not None:
        getattr(target, name)
        return name
    if mode_of(mapper) == "server":
        raise TypeError(
            f"the version of {mapper.class_.__name__} cannot be incremented: the table {get_version_column(mapper).table.name!r} has"
            " only the key and the version, so no UPDATE could make the trigger run. Add another column to the table"
        )
    return str(mapper.get_property_by_column(mapper.primary_key[0]).key)


def _find_spare_column(target: object) -> str | None:
    """Return the attribute of a column, other than key and version, that can be written unchanged. A loaded one is preferred."""
    state: State = inspect(target)
    mapper, found = state.mapper, None
    table = get_version_column(mapper).table
    for name, prop in mapper.column_attrs.items():
        column = prop.columns[0]
        if not isinstance(column, Column) or name == ATTRIBUTE or column not in table.c.values() or column.primary_key:
            continue
        # Writing a column that has an `onupdate` would suppress it. PostgreSQL rejects values for GENERATED ALWAYS.
        if column.onupdate is not None or column.server_onupdate is not None or column.computed is not None:
            continue
        if column.identity is not None and column.identity.always:
            continue
        if name in state.dict:
            return str(name)
        found = found or str(name)
    return found


# ------------------------------------------------------------ the version that was read


def raise_version(mapper: Mapper[object], state: State, old: object) -> None:
    """Set the next version of a row that is written together with others."""
    if mapper.version_id_generator:
        state.dict[ATTRIBUTE] = mapper.version_id_generator(old)
        flag_modified(state.obj(), ATTRIBUTE)
        if old is not None:
            # flag_modified() has replaced the version that was read, which is compared with the row if the flush fails.
            state.committed_state[ATTRIBUTE] = old


def check_version(mapper: Mapper[object], state: State) -> None:
    """Raise an error unless a row to be written has a version, which is loaded if necessary."""
    if state.dict.get(ATTRIBUTE) is None and getattr(state.obj(), ATTRIBUTE) is None:
        raise missing_version_error(mapper, identity_of(state))


def _load_version(state: State, _context: QueryContext, names: Iterable[str] | None) -> None:
    """Load columns of an expired instance together with the version, which a refresh of some columns leaves out."""
    session, target = state.session, state.obj()
    if ATTRIBUTE in state.dict or names is None or session is None or target is None:
        return
    # A version read after the columns could belong to a later state of the row, and the change in between would be lost.
    loaded = [name for name in names if name in state.mapper.column_attrs]
    if loaded:
        with session.no_autoflush:
            session.refresh(target, [*loaded, ATTRIBUTE])


def check_read(mapper: Mapper[object], state: State) -> None:
    """Raise an error if columns of a row to be written were read without its version."""
    keys = {prop.key for prop in mapper._identity_key_props}
    for name in set(mapper.column_attrs.keys()) - keys:
        if name in state.dict and state.committed_state.get(name) is not NO_VALUE:
            raise VersionRequiredError(
                f"{name_row(mapper.class_, tuple(state.identity or ()))} was read without its version, so changes that other"
                f" sessions have made since would be lost: select {mapper.class_.__name__}.{ATTRIBUTE} as well, or call"
                " session.refresh() before you change the instance"
            )


event.listen(VersionedBase, "before_delete", _before_delete, propagate=True, raw=True, insert=True)
event.listen(VersionedBase, "refresh", _load_version, propagate=True, raw=True, restore_load_context=True)
