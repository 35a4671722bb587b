"""From SQLAlchemy's StaleDataError, which has a text only, to the rows that it is about."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import inspect, select, tuple_

from pgfence.errors import VersionConflict, VersionConflictError
from pgfence.versions._mapping import is_versioned, version_column, version_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection
    from sqlalchemy.orm import Mapper, Session
    from sqlalchemy.orm.exc import StaleDataError


class Expected(NamedTuple):
    """A row that a flush is about to write."""

    connection: Connection
    mapper: Mapper[Any]
    key: tuple[Any, ...]
    version: Any


def remember(session: Session) -> list[Expected]:
    """Note what a flush will compare: after it has failed the instances do not know any more."""
    found = []
    for target in (*session.dirty, *session.deleted):
        state = inspect(target)
        if is_versioned(state.mapper):
            connection = session.connection(bind_arguments={"mapper": state.mapper})
            found.append(Expected(connection, state.mapper, tuple(state.identity), version_in(target)))
    return found


def told(session: Session, expected: Iterable[Expected], error: StaleDataError) -> Exception:
    """Return what a StaleDataError means, after a look at the rows."""
    items = []
    for each in expected:
        found = _version(each)
        if found != each.version:
            items.append(VersionConflict(each.mapper.class_, each.key, each.version, found))
    if not items:
        return error
    return conflict(items)


def conflict(items: list[VersionConflict]) -> VersionConflictError:
    """Return the error for rows that somebody else has written."""
    named = ", ".join(
        f"{each.model.__name__} {each.pk} was read at {each.expected} and is {'gone' if each.found is None else f'at {each.found}'}"
        for each in items
    )
    return VersionConflictError(
        f"somebody else has written meanwhile: {named}. Nothing of this flush is kept", items=items
    )


def _version(each: Expected) -> Any:
    column = version_column(each.mapper)
    keys = each.mapper.base_mapper.primary_key
    query = select(column).where(tuple_(*keys) == each.key)
    connection = each.connection
    with nullcontext() if connection.in_transaction() else connection.begin():
        return connection.scalar(query)
