"""`__version_relationships__`: a change of rows that belong to a versioned row counts as a change of that row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import event, inspect
from sqlalchemy.orm import RelationshipDirection, Session
from sqlalchemy.orm.base import PassiveFlag

from pgfence.versions._flush import touch
from pgfence.versions._mapping import VersionedBase, is_versioned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.orm import InstanceState, Mapper, RelationshipProperty

# What is known without a read, also of collections that were not loaded and were changed from the other side.
_KNOWN = PassiveFlag.PASSIVE_NO_INITIALIZE | PassiveFlag.INCLUDE_PENDING_MUTATIONS

_OWNED: dict[type[Any], list[RelationshipProperty[Any]]] = {}
"""The relationships that count, by the class of the rows they lead to."""


def _configured(mapper: Mapper[Any], cls: type[Any]) -> None:
    for name in cls.__version_relationships__:
        prop = mapper.relationships.get(name)
        if prop is None:
            raise ValueError(f"{cls.__name__}.__version_relationships__ names {name!r}, which is no relationship of it")
        if prop.direction is RelationshipDirection.MANYTOONE or prop.viewonly:
            raise ValueError(
                f"{cls.__name__}.__version_relationships__ names {name!r}, which leads to one row that others share, or cannot"
                " be written: only one-to-many and many-to-many can count"
            )
        if prop.parent is mapper:
            _OWNED.setdefault(prop.mapper.class_, []).append(prop)


def _count(session: Session, _context: Any, _instances: Any) -> None:
    if not _OWNED:
        return
    changed: dict[InstanceState[Any], Any] = {}
    for target in (*session.new, *session.dirty, *session.deleted):
        state: InstanceState[Any] = inspect(target)
        if is_versioned(state.mapper) and _has_changed_relationships(state):
            changed[state] = target
        changed |= {inspect(owner): owner for owner in _owners(session, state, target)}
    for state, target in changed.items():
        unchanged = not session.is_modified(target, include_collections=False)
        if state.key is not None and target not in session.deleted and unchanged:
            touch(target)


def _has_changed_relationships(state: InstanceState[Any]) -> bool:
    names = state.class_.__version_relationships__
    return any(state.get_history(name, _KNOWN).has_changes() for name in names)


def _owners(session: Session, state: InstanceState[Any], target: Any) -> Iterator[Any]:
    """Yield the rows that a changed row belongs to, and those that it belonged to before."""
    props = [prop for cls in state.class_.__mro__ for prop in _OWNED.get(cls, ())]
    props = [prop for prop in props if prop.direction is RelationshipDirection.ONETOMANY]
    if (
        state.persistent
        and target not in session.deleted
        and not session.is_modified(target, include_collections=False)
    ):
        return
    for prop in props:
        for key in _keys(state, prop):
            owner = session.get(prop.parent.class_, key)
            if owner is not None:
                yield owner


def _keys(state: InstanceState[Any], prop: RelationshipProperty[Any]) -> list[tuple[Any, ...]]:
    """Return the keys of the owner now and before, as far as the row knows them."""
    remote = dict(prop.local_remote_pairs or ())
    histories = []
    for column in prop.parent.primary_key:
        if column not in remote:
            return []
        name = state.mapper.get_property_by_column(remote[column]).key
        histories.append(state.attrs[name].load_history())
    now = tuple((*history.added, *history.unchanged, None)[0] for history in histories)
    before = tuple((*history.deleted, *history.unchanged, None)[0] for history in histories)
    return [key for key in dict.fromkeys((now, before)) if None not in key]


event.listen(VersionedBase, "mapper_configured", _configured, propagate=True)
event.listen(Session, "before_flush", _count)
