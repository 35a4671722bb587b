"""Count changes of related rows as changes of a versioned row, for the relationships in `__version_relationships__`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from sqlalchemy import event, or_, select, tuple_
from sqlalchemy.orm import RelationshipDirection, Session
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.orm.base import PassiveFlag

from pgfence._orm import sends_update
from pgfence.versions import _joins
from pgfence.versions._batch import NOW
from pgfence.versions._flush import touch
from pgfence.versions._mapping import ATTRIBUTE, VersionedBase, find_versioned_class, is_versioned

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sqlalchemy import ColumnElement
    from sqlalchemy.orm import Mapper, RelationshipProperty
    from sqlalchemy.orm.attributes import History
    from sqlalchemy.orm.unitofwork import UOWTransaction

    from pgfence._orm import State
    from pgfence.versions._joins import Join, Values


# The values that are known without reading, including unloaded collections that were changed from the other side.
_KNOWN = PassiveFlag.PASSIVE_NO_INITIALIZE | PassiveFlag.INCLUDE_PENDING_MUTATIONS

_KEYS, _CONDITIONS = 1000, 100
"""The maximum number of keys, and of conditions, in one SELECT of owners."""

_USED: set[str] = set()
"""The names that count in any class. If there are none, flushes are left unchanged."""


def _check_names(_mapper: Mapper[object], cls: type[VersionedBase]) -> None:
    names: Iterable[object] = cls.__version_relationships__
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{cls.__name__}.__version_relationships__ must be a tuple of names, not {names!r}")


def _register_joins(mapper: Mapper[object], cls: type[VersionedBase]) -> None:
    for name in cls.__version_relationships__:
        prop = mapper.relationships.get(name)
        if prop is None:
            raise ValueError(
                f"{cls.__name__}.__version_relationships__ contains {name!r}, which is not a relationship of the class"
            )
        if prop.direction is RelationshipDirection.MANYTOONE or prop.viewonly:
            raise ValueError(
                f"{cls.__name__}.__version_relationships__ contains {name!r}, which is many-to-one or viewonly: only one-to-many"
                " and many-to-many relationships that a flush writes can count"
            )
        _joins.register_join(prop)
        _USED.add(name)


def _before_flush(session: Session, context: UOWTransaction, _instances: object) -> None:
    if not _USED:
        return
    flush = NOW.get()
    if flush is not None and flush.session is session:
        flush.ahead = _count
        return

    def execute() -> None:
        # All listeners of before_flush have been called, and nothing has been written yet.
        del context.execute
        _count(context)
        context.execute()

    context.execute = execute  # type: ignore[method-assign]


def _count(context: UOWTransaction) -> None:
    """Make a flush also write the owners of the rows that it writes."""
    # Cascades may add rows to the flush. SQLAlchemy does not repeat this step.
    while True in [action.execute(context) for action in list(context.presort_actions.values())]:
        pass
    owners = {state: state.obj() for state in _find_changed_collections(context)}
    values: dict[Join, dict[Values, None]] = defaultdict(dict)
    stored: dict[Join, list[State]] = defaultdict(list)
    moved = _find_moved(context)
    for mapper, states in context.mappers.items():
        if joins := _joins.joins_of(mapper):
            for state in states:
                _note_owners(context, state, joins, moved, values, stored)
    for join in {**values, **stored}:
        owners |= {
            instance_state(owner): owner for owner in _find_owners(context.session, join, values[join], stored[join])
        }
    for state, owner in owners.items():
        if state.key is not None and not _deletes(context, state) and not sends_update(state):
            touch(owner)
            context.register_object(state)


def _find_changed_collections(context: UOWTransaction) -> Iterator[State]:
    for mapper, states in context.mappers.items():
        if is_versioned(mapper) and (names := find_versioned_class(mapper).__version_relationships__):
            for state in states:
                if any(state.get_history(name, _KNOWN).has_changes() for name in names):
                    yield state


def _find_moved(context: UOWTransaction) -> dict[State, dict[str, object]]:
    """Return the rows that enter or leave a collection, with the foreign keys that the flush copies into them."""
    found: dict[State, dict[str, object]] = {}
    for mapper, states in context.mappers.items():
        for prop in mapper.relationships:
            if prop.direction is not RelationshipDirection.ONETOMANY or prop.viewonly:
                continue
            if not any(_joins.joins_of(each) for each in prop.mapper.self_and_descendants):
                continue
            for state in states:
                history: History = context.get_attribute_history(state, prop.key, _KNOWN)  # type: ignore[no-untyped-call]
                deleted = _deletes(context, state)
                for child in history.sum() if deleted else history.deleted:
                    if child is not None:
                        found.setdefault(child, {})
                for child in () if deleted else history.added:
                    if child is not None:
                        found.setdefault(child, {}).update(_joins.collect_copied(prop, state, child.mapper))
    return found


def _note_owners(
    context: UOWTransaction,
    state: State,
    joins: list[Join],
    moved: dict[State, dict[str, object]],
    values: dict[Join, dict[Values, None]],
    stored: dict[Join, list[State]],
) -> None:
    """Record the owners that a row has before and after the flush, if the flush writes it."""
    deleted, listed = context.states[state]
    if listed and state not in moved:
        return
    coming = {} if deleted else {**_joins.collect_incoming(state), **moved.get(state, {})}
    assigned = any(state.dict.get(name, state) != value for name, value in coming.items())
    if not (deleted or state.key is None or state in moved or assigned or sends_update(state)):
        return
    for join in joins:
        if join.shared:
            if deleted:
                stored[join].append(state)
            continue
        if state.key is not None:
            before = join.get_before(state)
            if before is None:
                stored[join].append(state)
            else:
                values[join][before] = None
        if not deleted and (state.key is None or join.may_move(state, coming)):
            values[join][join.get_after(state, coming)] = None


def _find_owners(session: Session, join: Join, values: dict[Values, None], stored: list[State]) -> Iterator[object]:
    """Yield the owners of rows, with their versions loaded."""
    wanted = [each for each in values if join.has_owner(each)]
    owner, rows = join.prop.parent, join.prop.mapper
    conditions: list[ColumnElement[bool]] = []
    if join.key is None:
        conditions = [or_(*map(join.owner_of, some)) for some in _split(wanted, _CONDITIONS)]
    else:
        missing: list[Values] = []
        for key in dict.fromkeys(tuple(each[place] for place in join.key) for each in wanted):
            found = session.identity_map.get(owner.identity_key_from_primary_key(key))
            if found is not None and ATTRIBUTE in instance_state(found).dict:
                if _counts(found, join.prop):
                    yield found
            else:
                missing.append(key)
        conditions = [_match_keys(owner, some) for some in _split(missing, _KEYS)]
    identities = [tuple(state.identity or ()) for state in stored]
    conditions += [
        getattr(owner.class_, join.prop.key).any(_match_keys(rows, some)) for some in _split(identities, _KEYS)
    ]
    for condition in conditions:
        for found in session.scalars(select(owner.class_).where(condition)).unique():
            if _counts(found, join.prop):
                yield found


def _deletes(context: UOWTransaction, state: State) -> bool:
    return bool(context.states.get(state, (False,))[0])


def _counts(owner: object, prop: RelationshipProperty[object]) -> bool:
    """Return whether a relationship counts for a row, whose class may be a subclass with its own list."""
    mapper = instance_state(owner).mapper
    return (
        prop.key in find_versioned_class(mapper).__version_relationships__
        and mapper.relationships.get(prop.key) is prop
    )


def _match_keys(mapper: Mapper[object], keys: list[Values]) -> ColumnElement[bool]:
    columns = [mapper.get_property_by_column(each).class_attribute for each in mapper.primary_key]
    return columns[0].in_([key[0] for key in keys]) if len(columns) == 1 else tuple_(*columns).in_(keys)


def _split(found: list[Values], size: int) -> Iterator[list[Values]]:
    for start in range(0, len(found), size):
        yield found[start : start + size]


event.listen(VersionedBase, "instrument_class", _check_names, propagate=True)
event.listen(VersionedBase, "mapper_configured", _register_joins, propagate=True)
event.listen(Session, "before_flush", _before_flush)
