"""Read from a mapper how the version of its rows is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from sqlalchemy import Column, Table
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.orm.base import NO_VALUE

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapper

    from pgfence._orm import Key, State

    Mode = Literal["client", "server", "xmin"]

ATTRIBUTE = "version"
"""The attribute that holds the version, whatever its column is called."""

MODES = ("client", "server", "xmin")


class VersionedBase:
    """The attributes that both mixins have."""

    __version_column__: ClassVar[str] = ATTRIBUTE
    __version_mode__: ClassVar[Mode] = "client"
    __version_relationships__: ClassVar[tuple[str, ...]] = ()


def name_row(cls: type, key: Key) -> str:
    """Return the class and the key of a row, for messages."""
    return f"{cls.__name__} {', '.join(map(repr, key))}"


def is_versioned(mapper: Mapper[object]) -> bool:
    return issubclass(mapper.class_, VersionedBase)


def find_versioned_class(mapper: Mapper[object]) -> type[VersionedBase]:
    """Return the versioned class of a mapper, which the caller has checked with `is_versioned`."""
    cls: type = mapper.class_
    assert issubclass(cls, VersionedBase)
    return cls


def mode_of(mapper: Mapper[object]) -> Mode:
    """Return whether this program, a trigger or PostgreSQL itself increments the version."""
    return find_versioned_class(mapper).__version_mode__


def get_version_column(mapper: Mapper[object]) -> Column[object]:
    """Return the version column; with joined inheritance, it is in the table of the base class."""
    column = mapper.column_attrs[ATTRIBUTE].columns[0]
    assert isinstance(column, Column)
    return column


def get_version_table(mapper: Mapper[object]) -> Table:
    table = get_version_column(mapper).table
    assert isinstance(table, Table)
    return table


def is_local(mapper: Mapper[object]) -> bool:
    """Return whether a statement on the class's own table reaches the version column."""
    return get_version_column(mapper).table is mapper.local_table


def get_version_in(instance: object) -> object:
    """Return the version at which an instance was loaded, or None if the version was not loaded."""
    return version_of(instance_state(instance))


def version_of(state: State) -> object:
    """Return the version at which an instance was loaded, or None if the version was not loaded."""
    value = state.committed_state.get(ATTRIBUTE, state.dict.get(ATTRIBUTE))
    return None if value is NO_VALUE else value
