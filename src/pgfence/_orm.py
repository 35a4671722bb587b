"""Find out which rows a flush of SQLAlchemy's ORM writes, and what a statement assigns, for `fence` and `versions`."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from sqlalchemy.orm import Mapper, RelationshipDirection
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.orm.base import PassiveFlag
from sqlalchemy.sql import ClauseElement

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import Column, ColumnElement, FromClause, Insert, Result, Row, Select
    from sqlalchemy.dialects.postgresql.dml import OnConflictDoUpdate
    from sqlalchemy.orm import InstanceState, RelationshipProperty
    from sqlalchemy.orm.unitofwork import UOWTransaction

    State: TypeAlias = InstanceState[object]
    AnyResult: TypeAlias = Result[*tuple[Any, ...]]
    AnyRow: TypeAlias = Row[*tuple[Any, ...]]
    AnySelect: TypeAlias = Select[*tuple[Any, ...]]

Key: TypeAlias = tuple[object, ...]

_WRITABLE: WeakKeyDictionary[Mapper[object], frozenset[str]] = WeakKeyDictionary()
_MISSING = object()


def sends_update(state: State) -> bool:
    """Return whether the current values of a persistent row would make a flush send an UPDATE."""
    # Session.is_modified() is not used: it is also True for relationships whose foreign key is in another row, or is written by
    # a later UPDATE (`post_update`), and for attributes that are mapped to an expression. SQLAlchemy sends no UPDATE of the row
    # for those.
    values, attributes = state.dict, state.manager
    writable = _WRITABLE.get(state.mapper) or _find_writable(state.mapper)
    for key, old in state.committed_state.items():
        if key in writable:
            value = values.get(key, _MISSING)
            if hasattr(value, "__clause_element__") or isinstance(value, ClauseElement):
                return True
            if attributes[key].impl.is_equal(value, old) is not True:
                return True
    return False


def will_send_update(state: State) -> bool:
    """Return whether a flush that has not yet copied the keys of related rows into foreign keys will send an UPDATE.

    A row that is written only because another row changes, such as a child that is removed from a collection without a back
    reference, is not detected.
    """
    if sends_update(state):
        return True
    relationships = state.mapper.relationships
    return any(key in relationships and _moves(state, relationships[key]) for key in state.committed_state)


def _find_writable(mapper: Mapper[object]) -> frozenset[str]:
    """Return the attributes that are mapped to columns of tables that a flush writes."""
    named = mapper._propkey_to_col
    found = frozenset(key for table in mapper._pks_by_table for key in named.get(table, ()))
    _WRITABLE[mapper] = found
    return found


def _moves(state: State, prop: RelationshipProperty[object]) -> bool:
    """Return whether an assigned many-to-one relationship changes a foreign key of its row."""
    if prop.direction is not RelationshipDirection.MANYTOONE or prop.viewonly or prop.post_update:
        return False
    history = state.get_history(prop.key, PassiveFlag.PASSIVE_NO_INITIALIZE)
    if not history.added and not history.deleted:
        return False
    target = history.added[0] if history.added else None
    related = None if target is None else instance_state(target)
    return any(
        _get_value(state, local) != (None if related is None else _get_value(related, remote))
        or (related is not None and related.key is None)
        for local, remote in prop.local_remote_pairs or ()
    )


def _get_value(state: State, column: ColumnElement[object]) -> object:
    key = state.mapper.get_property_by_column(column).key
    # An unloaded value counts as different from every other value, because an unnecessary lock is better than a late one.
    return state.dict.get(key, object())


def identity_of(state: State) -> Key:
    """Return the primary key of a persistent row."""
    assert state.key is not None
    return tuple(state.key[1])


def find_key_in_update(context: UOWTransaction, state: State) -> Key:
    """Return the key by which a flush finds the row of an instance whose primary key may have changed."""
    mapper = state.mapper
    if state.key is not None and state.committed_state.keys().isdisjoint(mapper._primary_key_propkeys):
        return identity_of(state)
    cascaded: Collection[object] = context.attributes
    found: list[object] = []
    for column in mapper.primary_key:
        added, unchanged, deleted = state.get_history(
            mapper.get_property_by_column(column).key, PassiveFlag.PASSIVE_OFF
        )
        moved = added and (not deleted or ("pk_cascaded", state, column) in cascaded)
        found += added if moved else deleted or unchanged or ()
    return tuple(found)


def get_key_columns(mapper: Mapper[object], table: FromClause) -> list[Column[object]]:
    """Return the columns of `table`, one of the mapper's tables, that contain the primary key."""
    props = [mapper.get_property_by_column(each) for each in mapper.primary_key]
    return [next(each for each in prop.columns if each.table is table) for prop in props]


# ------------------------------------------------------------ what a statement assigns


def upsert_of(statement: object) -> OnConflictDoUpdate | None:
    """Return the ON CONFLICT DO UPDATE clause of a statement, or None if it has none."""
    clause = getattr(statement, "_post_values_clause", None)
    return clause if hasattr(clause, "update_values_to_set") else None


def set_on_conflict(
    statement: Insert, upsert: OnConflictDoUpdate, names: Collection[str], column: str, value: ColumnElement[object]
) -> Insert:
    """Return a copy of an upsert that sets `column` of the conflicting row, instead of what it assigns to `names`."""
    changed, clause = statement._generate(), copy(upsert)
    given = upsert.update_values_to_set
    kept = {key: each for key, each in dict(given).items() if find_value_name(key) not in names} | {column: value}
    # This is a list of pairs in SQLAlchemy 2.0, and a dict in later versions.
    clause.update_values_to_set = type(given)(kept.items())
    changed._post_values_clause = clause
    return changed


def find_value_name(key: object) -> str:
    """Return the name of the attribute, or of the column, that a key of `values()` refers to."""
    if isinstance(key, str):
        return key
    found = getattr(key, "_annotations", {}).get("proxy_key") or getattr(key, "key", None)
    assert isinstance(found, str)
    return found
