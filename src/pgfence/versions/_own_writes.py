"""Keep instances free of false conflicts when a statement of their own session writes their rows.

A pending change that is based on the current row gets the version that the statement has set. A pending change that was out
of date before the statement keeps its version, so that the flush rejects it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from sqlalchemy import event
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from pgfence._orm import identity_of
from pgfence.versions._mapping import ATTRIBUTE, find_versioned_class, is_versioned, version_of
from pgfence.versions._rows import check_transaction, find_written_here, lock_rows, versions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sqlalchemy import Connection
    from sqlalchemy.orm import Mapper, ORMExecuteState, SessionTransaction
    from sqlalchemy.orm.unitofwork import UOWTransaction

    from pgfence._orm import State

_OVERTAKEN: WeakKeyDictionary[State, tuple[object, object]] = WeakKeyDictionary()
"""The version of each pending change that was out of date before a statement of its session, and the version of its row."""

_IN_SAVEPOINT: WeakKeyDictionary[SessionTransaction, set[Mapper[object]]] = WeakKeyDictionary()
"""The base classes whose rows were written by statements inside a savepoint."""

_FLUSHED_IN_SAVEPOINT: WeakKeyDictionary[SessionTransaction, set[object]] = WeakKeyDictionary()
"""The identity keys of rows that were flushed inside a savepoint."""


def collect_instances(state: ORMExecuteState, mapper: Mapper[object]) -> dict[State, object]:
    """Return the instances of a class and the versions at which they were read. Call this before a statement writes their rows."""
    session, base = state.session, mapper.base_mapper
    for transaction in _iterate_savepoints(session):
        _IN_SAVEPOINT.setdefault(transaction, set()).add(base)
    if state.execution_options.get("autoflush", True):
        session._autoflush()  # The statement would flush anyway, but the flush must happen before rows are locked.
    return {each: version_of(each) for each in session.identity_map.all_states() if each.mapper.base_mapper is base}


def follow(state: ORMExecuteState, mapper: Mapper[object], loaded: dict[State, object]) -> Callable[[], None]:
    """Remove instances with pending changes from `loaded`. Return a function that sets their versions after a statement."""
    session, base = state.session, mapper.base_mapper
    if session._is_clean():
        return lambda: None
    pending = {each: loaded.pop(each) for each in list(loaded) if _is_pending(session, each)}
    known = {each: version for each, version in pending.items() if version is not None}
    if not known:
        return lambda: None
    connection = session.connection(bind_arguments=dict(state.bind_arguments))
    # This is read before the statement, because afterwards a version of another session looks like one of the statement.
    current = _lock_current(connection, base, known)

    def move() -> None:
        now = versions_of(connection, base, list(map(identity_of, current))) if current else []
        found = dict(zip(current, now, strict=True))
        for each, version in known.items():
            if each.persistent and _is_pending(session, each):
                made = found.get(each)
                _move(each, version if made is None else made)

    return move


def find_overtaken(state: State, expected: object) -> tuple[object] | None:
    """Return the version that another session wrote to the row of a pending change before this session executed a statement.

    It is the only element of a tuple, because a version may be None. Without such a write, the result is None.
    """
    version, found = _OVERTAKEN.get(state, (None, None))
    return (found,) if version is not None and version == expected else None


def find_deleted_here(session: Session) -> set[object]:
    """Return the identity keys of instances that the session has deleted in its transaction."""
    found: set[object] = set()
    transaction = session._transaction
    while transaction is not None:
        found |= {each.key for each in transaction._deleted}
        transaction = transaction.parent
    return found


def expire(session: Session, states: Iterable[State]) -> None:
    """Expire instances that are still in the session."""
    for each in states:
        if each.persistent and (target := each.obj()) is not None:
            session.expire(target)


def expire_written(state: ORMExecuteState, mapper: Mapper[object], loaded: dict[State, object]) -> None:
    """Expire instances whose rows this transaction has written since they were read."""
    rows = [(each, version) for each, version in loaded.items() if version is not None and each.persistent]
    if not rows:
        return
    connection, base = state.session.connection(bind_arguments=dict(state.bind_arguments)), mapper.base_mapper
    found = versions_of(connection, base, [identity_of(each) for each, _ in rows])
    changed = [each for (each, version), now in zip(rows, found, strict=True) if now not in (None, version)]
    if changed:
        here = find_written_here(connection, base, list(map(identity_of, changed)))
        expire(state.session, [each for each, ours in zip(changed, here, strict=True) if ours])


def _is_pending(session: Session, state: State) -> bool:
    # A change of related rows makes the flush write this row as well.
    return (
        state.modified
        or state in session._deleted
        or bool(find_versioned_class(state.mapper).__version_relationships__)
    )


def _lock_current(connection: Connection, base: Mapper[object], known: dict[State, object]) -> list[State]:
    """Lock rows, and return the instances that were read at the version that their row has now."""
    check_transaction(connection, "call flush() before the statement")
    found, barred = lock_rows(connection, base, list(map(identity_of, known)))
    now = dict(zip(known, found, strict=True))
    differing = [each for each, version in known.items() if now[each] not in (None, version)]
    if differing:
        here = find_written_here(connection, base, list(map(identity_of, differing)))
        for each, ours in zip(differing, here, strict=True):
            # Only the first of several statements can detect this, because afterwards the row has the version of that statement.
            if not ours and find_overtaken(each, known[each]) is None:
                _OVERTAKEN[each] = known[each], now[each]
    return [each for each, version in known.items() if now[each] == version and identity_of(each) not in barred]


def _move(state: State, version: object) -> None:
    """Set the version of an instance with a pending change, and expire the columns that SQLAlchemy has not synchronized."""
    values = state.dict
    synchronized = ATTRIBUTE not in values or values[ATTRIBUTE] == version
    set_committed_value(state.obj(), ATTRIBUTE, version)
    if not synchronized:
        keys = {prop.key for prop in state.mapper._identity_key_props}
        older = values.keys() & state.mapper.column_attrs.keys() - state.committed_state.keys() - keys - {ATTRIBUTE}
        state._expire_attributes(values, older)


# ------------------------------------------------------------ savepoints


def _iterate_savepoints(session: Session) -> Iterator[SessionTransaction]:
    transaction = session.get_nested_transaction()
    while transaction is not None:
        if transaction.nested:
            yield transaction
        transaction = transaction.parent


@event.listens_for(Session, "after_flush")
def _note_flushed(session: Session, context: UOWTransaction) -> None:
    """Record the keys of the rows that a flush in a savepoint has written."""
    for transaction in _iterate_savepoints(session):
        # The keys are stored, because the instance may be garbage-collected, and another one loaded for the row.
        states = [each for each in context.states if is_versioned(each.mapper)]
        keys = {each.key or each.mapper._identity_key_from_state(each) for each in states}
        _FLUSHED_IN_SAVEPOINT.setdefault(transaction, set()).update(keys)


@event.listens_for(Session, "after_soft_rollback")
def _expire_rolled_back(session: Session, transaction: SessionTransaction) -> None:
    """Expire instances whose version the rollback may have undone, because another session could write the same number again."""
    while not transaction.nested and transaction.parent is not None:
        transaction = transaction.parent
    written, flushed = _IN_SAVEPOINT.pop(transaction, ()), _FLUSHED_IN_SAVEPOINT.pop(transaction, ())
    if written or flushed:
        states = session.identity_map.all_states()
        expire(session, [each for each in states if each.mapper.base_mapper in written or each.key in flushed])
