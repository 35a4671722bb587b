"""Check that the transaction has the token for each row that a flush writes, before and after the change.

Mapper events cover most rows. An UPDATE that a flush sends without an event is checked in `_updates`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from sqlalchemy import inspect, select, tuple_
from sqlalchemy.orm.attributes import flag_modified, instance_state, set_attribute, set_committed_value
from sqlalchemy.orm.exc import StaleDataError

from pgfence._orm import get_key_columns, identity_of, sends_update, will_send_update
from pgfence.fence._rows import (
    ATTRIBUTE,
    Guarded,
    View,
    choose_token,
    column_of,
    find_flushed_resource,
    has_single_resource,
    reject_stale,
    resource_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sqlalchemy import Connection
    from sqlalchemy.orm import Mapper, Session, UOWTransaction

    from pgfence._orm import AnySelect, Key

CHUNK = 1000


class _Flush:
    """The current flush of a Session."""

    def __init__(self, context: UOWTransaction) -> None:
        # The reference is weak, because the context refers to the Session, which is the key of this object in _FLUSHES.
        self._context = weakref.ref(context)
        self.locked: dict[tuple[object, Key], int] = {}
        """The tokens of rows that were locked in this flush."""
        self._tokens: dict[tuple[object, str, Connection], int] = {}
        self._deleting: set[Mapper[object]] | None = None

    def choose_token(self, cls: type[Guarded], resource: str, connection: Connection) -> int:
        """Return the token that this transaction has for a resource. It stays the same during a flush."""
        key = cls, resource, connection
        # The token is cached, so that the gate is looked up once for thousands of rows of one resource.
        token = self._tokens.get(key)
        if token is None:
            token = self._tokens[key] = choose_token(cls, resource, connection)
        return token

    def find_replaced(self, mapper: Mapper[object], target: Guarded) -> object:
        """Return the deleted object whose row a new object takes over, or None."""
        # SQLAlchemy sends one UPDATE for a DELETE and an INSERT of the same key, and calls no hook for the deleted object.
        context = self._context()
        if context is None:
            return None
        if self._deleting is None:
            # The classes of deleted objects are collected late, because orphans are registered after before_flush and before the
            # first mapper event.
            deleted = (state for state, (is_delete, _) in context.states.items() if is_delete)
            self._deleting = {state.mapper.base_mapper for state in deleted}
        if mapper.base_mapper not in self._deleting:
            return None
        key = mapper.identity_key_from_instance(target)
        existing = context.session.identity_map.get(key)
        if existing is None:
            return None
        is_delete, _ = context.states.get(instance_state(existing), (False, False))
        return existing if is_delete else None


_FLUSHES: weakref.WeakKeyDictionary[Session, _Flush] = weakref.WeakKeyDictionary()


def before_insert(mapper: Mapper[object], connection: Connection, target: Guarded) -> None:
    """Check the token for a new row, and for the row it replaces, and write the token into the new row."""
    cls, flush = type(target), _flush_of(target)
    token = flush.choose_token(cls, find_flushed_resource(cls, target), connection)
    replaced = flush.find_replaced(mapper, target)
    # No event is called for the deleted object, although its row may belong to another resource.
    if isinstance(replaced, Guarded):
        check_old_row(flush, inspect(type(replaced)), connection, replaced)
    set_attribute(target, ATTRIBUTE, token)


def before_update(mapper: Mapper[object], connection: Connection, target: Guarded) -> None:
    """Check the tokens for a changed row's resource, and for the resource that the row had before."""
    if not sends_update(instance_state(target)):
        return
    cls, flush = type(target), _flush_of(target)
    token = flush.choose_token(cls, find_flushed_resource(cls, target), connection)
    check_old_row(flush, mapper, connection, target)
    set_attribute(target, ATTRIBUTE, token)
    flag_modified(target, ATTRIBUTE)  # otherwise SQLAlchemy calls the column's `onupdate` if the value stays the same


def before_delete(mapper: Mapper[object], connection: Connection, target: Guarded) -> None:
    """Check the token for a row that is deleted."""
    check_old_row(_flush_of(target), mapper, connection, target)


def forget_token(_mapper: Mapper[object], _connection: Connection, target: object) -> None:
    """Make a later UPDATE of the row in the same flush check its token again."""
    # By then, the row may have moved to another resource.
    written = instance_state(target).dict
    if ATTRIBUTE in written:
        set_committed_value(target, ATTRIBUTE, written[ATTRIBUTE])


def check_old_row(flush: _Flush, mapper: Mapper[object], connection: Connection, target: Guarded) -> None:
    """Raise an error unless this transaction may write the row in its stored state."""
    cls = type(target)
    row = (
        None if has_single_resource(cls) else View(cls, lambda name: _read_old_value(mapper, connection, target, name))
    )
    resource = resource_of(cls, row)
    token = flush.choose_token(cls, resource, connection)
    if cls.__fence__ == "row":
        # The row is locked first, so that no newer holder can write it between the comparison and the UPDATE.
        newest = _read_newest(flush, mapper, connection, target)
        if newest > token:
            reject_stale(connection, resource, token, newest)


def _read_old_value(mapper: Mapper[object], connection: Connection, target: object, name: str) -> object:
    """Return the value of a column before the change that is being flushed."""
    history = instance_state(target).attrs[name].history
    if history.deleted:
        return history.deleted[0]
    if not history.added:
        return getattr(target, name)
    # The attribute was assigned without being loaded, so the old value must be read.
    column = mapper.column_attrs[name].columns[0]
    keys = zip(mapper.primary_key, identity_of(instance_state(target)), strict=True)
    found = select(column).select_from(mapper.selectable).where(*[key == value for key, value in keys])
    return connection.execute(found).scalar_one()


# ------------------------------------------------------------ mode "row"


def prelock_rows(session: Session, context: UOWTransaction, _instances: object) -> None:
    """Lock the rows of a flush whose classes have the mode "row", with few statements, in an order that all sessions share."""
    _FLUSHES[session] = flush = _Flush(context)
    rows: dict[Mapper[object], list[Guarded]] = {}
    for target in (*session.dirty, *session.deleted):
        if not isinstance(target, Guarded) or target.__fence__ != "row":
            continue
        if target in session.deleted or will_send_update(instance_state(target)):
            rows.setdefault(inspect(type(target)), []).append(target)
    for mapper, targets in rows.items():
        connection = session.connection(bind_arguments={"mapper": mapper})
        flush.locked.update(_lock_rows(connection, mapper, [identity_of(instance_state(target)) for target in targets]))


def _read_newest(flush: _Flush, mapper: Mapper[object], connection: Connection, target: object) -> int:
    """Return the token in a row, and lock the row unless `prelock_rows` has already locked it."""
    key = column_of(mapper), identity_of(instance_state(target))
    found = flush.locked.get(key)
    if found is None:
        found = _lock_rows(connection, mapper, [key[1]]).get(key)
    if found is None:  # a newer holder may have deleted and re-created the row
        raise StaleDataError(
            f"cannot write the row {key[1]!r} of {type(target).__name__}, because it no longer exists, or is hidden from this role"
        )
    return found


def _lock_rows(connection: Connection, mapper: Mapper[object], keys: list[Key]) -> dict[tuple[object, Key], int]:
    token = column_of(mapper)
    columns = get_key_columns(mapper, token.table)
    found: dict[tuple[object, Key], int] = {}
    # The keys are sorted, so that two flushes of the same rows cannot deadlock, whatever order their objects have.
    for some in _split(sorted(keys, key=repr)):
        query: AnySelect = (
            select(*columns, token).where(tuple_(*columns).in_(some)).order_by(*columns).with_for_update()
        )
        found.update({(token, tuple(key)): newest for *key, newest in connection.execute(query)})
    return found


def _split(keys: list[Key]) -> Iterator[Iterable[Key]]:
    for start in range(0, len(keys), CHUNK):
        yield keys[start : start + CHUNK]


def _flush_of(target: object) -> _Flush:
    session = instance_state(target).session
    assert session is not None
    return _FLUSHES[session]
