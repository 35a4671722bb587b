"""Which rows a flush of the ORM writes, decided as SQLAlchemy decides it.

`Session.is_modified` does not answer that: it is also True for a relationship whose foreign key is in the other table or is
written by a later UPDATE (`post_update`), and for an assigned expression. No UPDATE of the row is sent for those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from sqlalchemy.orm import Mapper, RelationshipDirection
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.orm.base import PassiveFlag
from sqlalchemy.sql import ClauseElement

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement
    from sqlalchemy.orm import InstanceState, RelationshipProperty

    State: TypeAlias = "InstanceState[Any]"

_WRITABLE: WeakKeyDictionary[Mapper[Any], frozenset[str]] = WeakKeyDictionary()
_MISSING = object()


def sends_update(state: State) -> bool:
    """Return whether an UPDATE of a persistent row is sent when its turn in the flush comes, with the columns as they are now."""
    values, attributes = state.dict, state.manager
    writable = _WRITABLE.get(state.mapper) or _writable(state.mapper)
    for key, old in state.committed_state.items():
        if key in writable:
            value = values.get(key, _MISSING)
            if hasattr(value, "__clause_element__") or isinstance(value, ClauseElement):
                return True
            if attributes[key].impl.is_equal(value, old) is not True:
                return True
    return False


def will_send_update(state: State) -> bool:
    """Return the same ahead of the flush, which copies the keys of related rows into foreign keys.

    A row that only a change of another row writes, such as a child that is taken out of a collection without a back
    reference, is not found by this.
    """
    if sends_update(state):
        return True
    relationships = state.mapper.relationships
    return any(key in relationships and _moves(state, relationships[key]) for key in state.committed_state)


def _writable(mapper: Mapper[Any]) -> frozenset[str]:
    """Return the attributes of a class whose columns are in tables that a flush writes."""
    named = mapper._propkey_to_col
    found = frozenset(key for table in mapper._pks_by_table for key in named.get(table, ()))
    _WRITABLE[mapper] = found
    return found


def _moves(state: State, prop: RelationshipProperty[Any]) -> bool:
    """Return whether an assigned many-to-one relationship changes a foreign key of its row."""
    if prop.direction is not RelationshipDirection.MANYTOONE or prop.viewonly or prop.post_update:
        return False
    history = state.get_history(prop.key, PassiveFlag.PASSIVE_NO_INITIALIZE)
    if not history.added and not history.deleted:
        return False
    target = history.added[0] if history.added else None
    related = None if target is None else instance_state(target)
    return any(
        _value(state, local) != (None if related is None else _value(related, remote))
        or (related is not None and related.key is None)
        for local, remote in prop.local_remote_pairs or ()
    )


def _value(state: State, column: ColumnElement[Any]) -> Any:
    key = state.mapper.get_property_by_column(column).key
    # What is not loaded differs from everything: a lock too many is better than one too late.
    return state.dict.get(key, object())
