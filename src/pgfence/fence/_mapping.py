"""What cannot be fenced, found when classes are mapped and configured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import event
from sqlalchemy.orm import Mapper, RelationshipDirection

from pgfence.fence._flush import forget_token
from pgfence.fence._rows import ATTRIBUTE, MODEL, Guarded, column_of, has_single_resource

if TYPE_CHECKING:
    from sqlalchemy.orm import RelationshipProperty

_SETTINGS = ("__fence__", "__fence_resource__", "__fence_column__")


def check_mapping(mapper: Mapper[object], cls: type[Guarded]) -> None:
    """Raise unless a table has the mixin's column, and all classes of its rows are fenced alike.

    Raises:
        TypeError: it has not, or they are not.
    """
    base = None if mapper.concrete else mapper.inherits
    if base is not None and issubclass(base.class_, Guarded):
        _check_same_settings(cls, base.class_)
        return
    if base is not None and base.local_table is mapper.local_table:
        raise TypeError(
            f"{cls.__name__} is fenced and {base.class_.__name__}, whose table it shares, is not, so that a write through"
            f" {base.class_.__name__} would need no token: put the mixin on the class at the base"
        )
    column = mapper.local_table.c.get(cls.__fence_column__)
    if column is None or MODEL not in column.info:
        raise TypeError(
            f"{cls.__name__} has a fencing column that is not the mixin's, or none: leave the attribute {ATTRIBUTE!r} to the"
            " mixin; with concrete inheritance put the mixin on each class, and what"
            " they share on a base that is not mapped"
        )


def _check_same_settings(cls: type[Guarded], base: type[Guarded]) -> None:
    for name in _SETTINGS:
        if getattr(cls, name) != getattr(base, name):
            raise TypeError(
                f"{cls.__name__} has another {name} than {base.__name__}, and both write the same rows: set it on"
                f" {base.__name__}; a function of the row can tell subclasses apart by the discriminator's column"
            )


def _check_relationships(mapper: Mapper[object], _cls: type[object]) -> None:
    for prop in mapper.relationships:
        if prop.viewonly:
            continue
        if prop.secondary is not None:
            _reject_fenced_secondary(prop)
        elif prop.post_update:
            _check_post_update(prop)


def _reject_fenced_secondary(prop: RelationshipProperty[object]) -> None:
    """Raise for rows that a flush deletes by a DELETE of the table, which asks for no token."""
    for mapper in prop.parent.registry.mappers:
        if issubclass(mapper.class_, Guarded) and prop.secondary in mapper.tables:
            raise TypeError(
                f"{prop} writes rows of {mapper.class_.__name__} as its secondary table, without their tokens: pass"
                f" viewonly=True, and write the rows as objects of {mapper.class_.__name__}"
            )


def _check_post_update(prop: RelationshipProperty[object]) -> None:
    """Raise for an UPDATE of `post_update` that does not come to the table of the token."""
    to_many = prop.direction is RelationshipDirection.ONETOMANY
    written = prop.mapper if to_many else prop.parent
    if not issubclass(written.class_, Guarded):
        return
    columns = [remote if to_many else local for local, remote in prop.local_remote_pairs or ()]
    if any(column.table is not column_of(written).table for column in columns):
        raise TypeError(
            f"{prop} has post_update and writes a table of {written.class_.__name__} without the fencing column, so that the"
            " UPDATE would need no token: leave post_update out, or put the foreign key into the table of the base class"
        )
    if not has_single_resource(written.class_):
        # The UPDATE may move a row to another resource after the flush has written it.
        event.listen(written.class_, "after_insert", forget_token, propagate=True)
        event.listen(written.class_, "after_update", forget_token, propagate=True)


event.listen(Mapper, "mapper_configured", _check_relationships)
