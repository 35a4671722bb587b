"""What a mapper says about the version of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal
from uuid import UUID

from sqlalchemy import inspect, text
from sqlalchemy.orm.base import NO_VALUE

if TYPE_CHECKING:
    from sqlalchemy import Column
    from sqlalchemy.orm import InstanceState, Mapper

    Mode = Literal["client", "server", "xmin"]

ATTRIBUTE = "version"
"""The attribute that holds the version, whatever its column is called."""

MODES = ("client", "server", "xmin")


class VersionedBase:
    """What both mixins have in common."""

    __version_column__: ClassVar[str] = ATTRIBUTE
    __version_mode__: ClassVar[Mode] = "client"
    __version_relationships__: ClassVar[tuple[str, ...]] = ()


def is_versioned(mapper: Mapper[Any]) -> bool:
    """Whether rows of a class have a version."""
    return issubclass(mapper.class_, VersionedBase)


def mode_of(mapper: Mapper[Any]) -> Mode:
    """Return who counts: this program, a trigger, or PostgreSQL itself."""
    mode: Mode = mapper.class_.__version_mode__
    return mode


def version_column(mapper: Mapper[Any]) -> Column[Any]:
    """Return the column; with joined inheritance it is in the table of the class at the base."""
    found: Any = mapper.column_attrs[ATTRIBUTE].columns[0]
    column: Column[Any] = found
    return column


def is_local(mapper: Mapper[Any]) -> bool:
    """Whether a statement on the class's own table reaches the column."""
    return version_column(mapper).table is mapper.local_table


def next_version(mapper: Mapper[Any]) -> Any:
    """Return what an UPDATE writes: an expression, evaluated for each row."""
    column = version_column(mapper)
    return text("gen_random_uuid()") if column.type.python_type is UUID else column + 1


def version_in(instance: Any) -> Any:
    """Return the version that an instance was loaded at; None if it was not loaded."""
    state: InstanceState[Any] = inspect(instance)
    value = state.committed_state.get(ATTRIBUTE, state.dict.get(ATTRIBUTE))
    return None if value is NO_VALUE else value
