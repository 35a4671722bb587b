"""The guard of a flush: each row that is about to be written is asked for its resource, before and after the change."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from sqlalchemy import inspect, select, tuple_
from sqlalchemy.orm import object_session
from sqlalchemy.orm.attributes import flag_modified, set_attribute
from sqlalchemy.orm.exc import StaleDataError

from pgfence.fence._rows import ATTRIBUTE, Guarded, View, column_of, constant, refuse_stale, resource_of, token_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sqlalchemy import Column, Connection
    from sqlalchemy.orm import InstanceState, Mapper, Session

Key = tuple[Any, ...]

CHUNK = 1000

_AHEAD: weakref.WeakKeyDictionary[Session, dict[tuple[Any, Key], int]] = weakref.WeakKeyDictionary()
"""The tokens of rows that the present flush of a Session has locked."""


def before_insert(_mapper: Mapper[Any], connection: Connection, target: Any) -> None:
    """Let a new row pass under its token, and write it into the row."""
    cls = type(target)
    set_attribute(target, ATTRIBUTE, token_for(cls, resource_of(cls, target), connection))


def before_update(mapper: Mapper[Any], connection: Connection, target: Any) -> None:
    """Let a changed row pass if its resource allows, and the one it had before."""
    session = _session(target)
    if not session.is_modified(target, include_collections=False):
        return
    cls = type(target)
    new = resource_of(cls, target)
    token = token_for(cls, new, connection)
    _pass_old(mapper, connection, target)
    set_attribute(target, ATTRIBUTE, token)
    flag_modified(target, ATTRIBUTE)  # a column that goes out unchanged is asked for a value of its own


def before_delete(mapper: Mapper[Any], connection: Connection, target: Any) -> None:
    """Let a row go if its resource allows."""
    _pass_old(mapper, connection, target)


def _pass_old(mapper: Mapper[Any], connection: Connection, target: Any) -> None:
    """Raise unless this transaction may write the row as it stands in the table."""
    cls = type(target)
    row = None if constant(cls) else View(cls, lambda name: _loaded(mapper, connection, target, name))
    resource = resource_of(cls, row)
    token = token_for(cls, resource, connection)
    if cls.__fence__ == "row":
        newest = _newest(mapper, connection, target)
        if newest > token:
            refuse_stale(connection, resource, token, newest)


def _loaded(mapper: Mapper[Any], connection: Connection, target: Any, name: str) -> Any:
    """Return the value of a column before the change that is being flushed."""
    history = inspect(target).attrs[name].history
    if history.deleted:
        return history.deleted[0]
    if not history.added:
        return getattr(target, name)
    # Assigned without having been loaded.
    column = mapper.column_attrs[name].columns[0]
    keys = zip(mapper.primary_key, _identity(target), strict=True)
    found = select(column).select_from(mapper.selectable).where(*[key == value for key, value in keys])
    return connection.execute(found).scalar_one()


# ------------------------------------------------------------ mode "row"


def lock_ahead(session: Session, _context: Any, _instances: Any) -> None:
    """Lock the rows of a flush that are compared by their column, with few statements and in one order."""
    _AHEAD.pop(session, None)
    rows: dict[Mapper[Any], list[Any]] = {}
    for target in (*session.dirty, *session.deleted):
        if not isinstance(target, Guarded) or target.__fence__ != "row":
            continue
        if target in session.deleted or session.is_modified(target, include_collections=False):
            rows.setdefault(inspect(type(target)), []).append(target)
    for mapper, targets in rows.items():
        connection = session.connection(bind_arguments={"mapper": mapper})
        locked = _AHEAD.setdefault(session, {})
        locked.update(_lock(connection, mapper, [_identity(target) for target in targets]))


def _newest(mapper: Mapper[Any], connection: Connection, target: Any) -> int:
    """Return the token in a row, which is locked from now on; most were locked by `lock_ahead`.

    Raises:
        StaleDataError: the row is gone. Whoever wrote it again since might have been the newer holder.
    """
    key = column_of(mapper), _identity(target)
    found = _AHEAD.get(_session(target), {}).get(key)
    if found is None:
        found = _lock(connection, mapper, [key[1]]).get(key)
    if found is None:
        raise StaleDataError(
            f"the row {key[1]!r} of {type(target).__name__} that was to be written is not there any more"
        )
    return found


def _lock(connection: Connection, mapper: Mapper[Any], keys: list[Key]) -> dict[tuple[Any, Key], int]:
    token = column_of(mapper)
    columns = keys_in(mapper, token.table)
    found: dict[tuple[Any, Key], int] = {}
    for some in _chunks(sorted(keys, key=repr)):
        query = select(*columns, token).where(tuple_(*columns).in_(some)).order_by(*columns).with_for_update()
        found.update({(token, tuple(row[:-1])): row[-1] for row in connection.execute(query)})
    return found


def keys_in(mapper: Mapper[Any], table: Any) -> list[Column[Any]]:
    """Return the primary key of a mapper as columns of one of its tables."""
    props = [mapper.get_property_by_column(column) for column in mapper.primary_key]
    return [next(column for column in prop.columns if column.table is table) for prop in props]


def _chunks(keys: list[Key]) -> Iterator[Iterable[Key]]:
    for start in range(0, len(keys), CHUNK):
        yield keys[start : start + CHUNK]


def _identity(target: Any) -> Key:
    state: InstanceState[Any] = inspect(target)
    assert state.identity is not None
    return tuple(state.identity)


def _session(target: Any) -> Session:
    session = object_session(target)
    assert session is not None
    return session
