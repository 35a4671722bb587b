"""Find out how rows refer to their owner, for each relationship in `__version_relationships__`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, and_, literal, null
from sqlalchemy.orm import RelationshipDirection
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.orm.base import LoaderCallableStatus, PassiveFlag
from sqlalchemy.orm.exc import UnmappedColumnError
from sqlalchemy.sql import ClauseElement, visitors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.orm import Mapper, RelationshipProperty
    from sqlalchemy.sql.visitors import ExternallyTraversible

    from pgfence._orm import State

    Values = tuple[object, ...]

_INFO = "pgfence_joins"
_UNKNOWN = object()
"""A placeholder for a value that the database computes."""


class Join:
    """The condition that relates rows to their owner.

    In a many-to-many relationship, the rows do not refer to their owners, so deleting a row counts as a change of its
    owners, but changing the row does not.

    Attributes:
        shared: whether it is many-to-many.
        names: the attributes of the rows that occur in the condition.
        key: the positions among `names` of the owner's primary key, if the condition compares nothing else.
    """

    def __init__(self, prop: RelationshipProperty[object]) -> None:
        self.prop = prop
        self.shared = prop.direction is RelationshipDirection.MANYTOMANY
        self.names: tuple[str, ...] = ()
        self.key: tuple[int, ...] | None = None
        self._pairs: dict[str, ColumnElement[object]] = {}
        if not self.shared:
            parts = visitors.iterate(prop.primaryjoin)
            remote = [each for each in parts if isinstance(each, ColumnElement) and "remote" in each._annotations]
            self.names = tuple(dict.fromkeys(_name(prop.mapper, each) for each in remote))
            self._pairs = {_name(prop.mapper, theirs): ours for ours, theirs in prop.local_remote_pairs or ()}
            self.key = self._find_key()

    def _find_key(self) -> tuple[int, ...] | None:
        pairs, owner = self.prop.local_remote_pairs or [], self.prop.parent
        if not and_(*[ours == theirs for ours, theirs in pairs]).compare(self.prop.primaryjoin):
            return None
        places = {_name(owner, ours): self.names.index(name) for name, ours in self._pairs.items()}
        key = [_name(owner, each) for each in owner.primary_key]
        return tuple(places[each] for each in key) if set(key) == set(places) else None

    def get_before(self, state: State) -> Values | None:
        """Return the values of a row as they are stored, or None if not all of them are in memory."""
        values = tuple(
            state.committed_state[name] if name in state.committed_state else state.dict.get(name, _UNKNOWN)
            for name in self.names
        )
        unknown = any(each is _UNKNOWN or isinstance(each, LoaderCallableStatus) for each in values)
        return None if unknown else values

    def get_after(self, state: State, coming: Mapping[str, object]) -> Values:
        """Return the values of a row as the flush will write them."""
        values = tuple(coming[name] if name in coming else _read_assigned(state, name) for name in self.names)
        for name, value in zip(self.names, values, strict=True):
            if value is _UNKNOWN and name in self._pairs:
                cls = state.class_.__name__
                raise TypeError(
                    f"a change of {cls} counts as a change of its {self.prop.parent.class_.__name__}, but {cls}.{name}, which"
                    " determines the owner, is known only after the row has been written, because its value is a SQL expression or the"
                    f" column's default: assign the value, or add the row through {self.prop}"
                )
        return values

    def may_move(self, state: State, coming: Mapping[str, object]) -> bool:
        """Return whether a row may refer to another owner after the flush."""
        return any(name in coming or name in state.committed_state for name in self.names)

    def has_owner(self, values: Values) -> bool:
        """Return whether a row with these values can have an owner. A row with NULL as the foreign key has none."""
        return all(value is not None for name, value in zip(self.names, values, strict=True) if name in self._pairs)

    def owner_of(self, values: Values) -> ColumnElement[bool]:
        """Return the condition for the owners of rows with these values."""
        named = dict(zip(self.names, values, strict=True))
        if _UNKNOWN in values:
            # The rest of the condition is omitted, because counting one owner too many is safe, and counting one too few
            # loses a conflict.
            return and_(*[ours == named[name] for name, ours in self._pairs.items()])

        def replace(element: ExternallyTraversible, **_: object) -> ExternallyTraversible | None:
            if not isinstance(element, ColumnElement) or "remote" not in element._annotations:
                return None
            found = named[_name(self.prop.mapper, element)]
            return null() if found is None else literal(found, element.type)

        return visitors.replacement_traverse(self.prop.primaryjoin, {}, replace)


def register_join(prop: RelationshipProperty[object]) -> None:
    """Record in the class of the related rows that changes of a relationship count as changes of its owner."""
    joins: dict[object, Join] = prop.mapper.class_manager.info.setdefault(_INFO, {})
    if prop not in joins:
        way = "map the columns that the join uses"
        try:
            if prop.entity.is_aliased_class:
                way = f"use {prop.mapper.class_.__name__} itself as the target"
                raise UnmappedColumnError("the target of the relationship is an aliased class")
            joins[prop] = Join(prop)
        except UnmappedColumnError as error:
            raise ValueError(
                f"changes of {prop} cannot count as changes of the {prop.parent.class_.__name__}, because the owner of a changed"
                f" {prop.mapper.class_.__name__} cannot be found by the columns of the {prop.mapper.class_.__name__} ({error}): {way},"
                f" or remove {prop.key!r} from __version_relationships__"
            ) from error


def joins_of(mapper: Mapper[object]) -> list[Join]:
    """Return how rows of a class refer to the owners whose version they increment."""
    return [join for each in mapper.iterate_to_root() for join in each.class_manager.info.get(_INFO, {}).values()]


def collect_incoming(state: State) -> dict[str, object]:
    """Return the foreign keys that a flush copies into a row from many-to-one relationships that were assigned."""
    found: dict[str, object] = {}
    relationships = state.mapper.relationships
    for key in state.committed_state:
        prop = relationships.get(key)
        if prop is None or prop.direction is not RelationshipDirection.MANYTOONE or prop.viewonly:
            continue
        history = state.get_history(key, PassiveFlag.PASSIVE_NO_INITIALIZE)
        if history.has_changes():
            related = history.added[0] if history.added else None
            found |= collect_copied(prop, None if related is None else instance_state(related), state.mapper)
    return found


def collect_copied(
    prop: RelationshipProperty[object], source: State | None, target: Mapper[object]
) -> dict[str, object]:
    """Return the foreign keys that a flush copies from one row into another; each is None if there is no source row."""
    return {
        _name(target, theirs): None if source is None else getattr(source.obj(), _name(source.mapper, ours))
        for ours, theirs in prop.synchronize_pairs
    }


def _read_assigned(state: State, name: str) -> object:
    if name in state.dict:
        value = state.dict[name]
        return _UNKNOWN if isinstance(value, ClauseElement) or hasattr(value, "__clause_element__") else value
    if state.key is not None:
        return None if name in state.committed_state else getattr(state.obj(), name)
    for column in state.mapper.column_attrs[name].columns:
        if column.default is not None:
            return column.default.arg if column.default.is_scalar else _UNKNOWN
        if column.server_default is not None:
            return _UNKNOWN
    return None


def _name(mapper: Mapper[object], column: ColumnElement[object]) -> str:
    return str(mapper.get_property_by_column(column).key)
