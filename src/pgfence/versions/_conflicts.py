"""From SQLAlchemy's StaleDataError, which has a text only, to the rows that it is about."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from pgfence.errors import PgfenceError, VersionConflict, VersionConflictError
from pgfence.versions._mapping import ATTRIBUTE, version_column
from pgfence.versions._rows import versions_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy.orm import InstanceState, Mapper, Session, SessionTransaction

    State = InstanceState[Any]

_SHOWN = 5


class Written(NamedTuple):
    """A row that a flush was about to write. Without a key: one that it was about to add.

    Without a connection: one that a statement may have written, by its criteria.
    """

    state: State
    key: tuple[Any, ...] | None = None
    version: Any = None
    connection: Any = None
    mapper: Any = None


class Journal:
    """What the present transaction of a session has written, in its order, so that a rollback tells what it took back.

    A row that was written before in the same transaction is locked and in no conflict, though after a rollback it is at
    another version than the flush expected: what counts is the version at which it was written first.
    """

    def __init__(self) -> None:
        self._written: list[Written] = []
        self._marks: dict[SessionTransaction, int] = {}
        self.undone: list[Written] = []

    def inserted(self, state: State) -> None:
        """Note a row that is about to be added."""
        self._written.append(Written(state))

    def note(self, connection: Connection, mapper: Mapper[Any], state: State, version: Any) -> None:
        """Note a row that is about to be changed or deleted."""
        assert state.key is not None
        self._written.append(Written(state, tuple(state.key[1]), version, connection, mapper))

    def stated(self, states: Iterable[State]) -> None:
        """Note instances whose rows a statement may write."""
        self._written += [
            Written(state, tuple(state.key[1]), state.dict[ATTRIBUTE])
            for state in states
            if state.key is not None and state.dict.get(ATTRIBUTE) is not None
        ]

    def savepoint(self, transaction: SessionTransaction) -> None:
        """Note where a savepoint was set."""
        self._marks[transaction] = len(self._written)

    def rolled_back(self, transaction: SessionTransaction) -> None:
        """Take back what was written since the savepoint that a transaction belongs to, or since the begin."""
        while not transaction.nested and transaction.parent is not None:
            transaction = transaction.parent
        mark = self._marks.get(transaction, 0)
        self.undone = self._written[mark:]
        del self._written[mark:]

    def ended(self, transaction: SessionTransaction) -> None:
        """Forget a savepoint that was released or rolled back, or all at the end of the transaction."""
        self._marks.pop(transaction, None)
        if transaction.parent is None:
            self._written.clear()


_JOURNALS: WeakKeyDictionary[Session, Journal] = WeakKeyDictionary()


def keep_journal(session: Session) -> None:
    """Keep a journal for a session."""
    _JOURNALS[session] = Journal()


def journal_of(session: Session) -> Journal | None:
    """Return the journal of a session; None for one that keeps none."""
    return _JOURNALS.get(session)


def told(session: Session, error: Exception) -> Exception:
    """Return what it means that a flush has failed by a row that was not there to be written, after a look at the rows.

    The error itself, where it is about other classes, or where the rows cannot be looked at.
    """
    rows: dict[State, Written] = {}
    for each in _JOURNALS[session].undone:
        known = rows.setdefault(each.state, each)
        if known.key is not None and known.connection is None:
            rows[each.state] = each._replace(version=known.version)
    flushed = [each for each in rows.values() if each.connection is not None]
    try:
        items = _conflicts(flushed)
    except DBAPIError:
        return error
    if items:
        return conflict(items)
    tables = {str(version_column(each.mapper).table.description) for each in flushed}
    tables |= {str(each.mapper.local_table.description) for each in flushed}
    if any(f"table '{table}' expected" in str(error) for table in tables):
        return not_written(str(error))
    return error


def conflict(items: Sequence[VersionConflict], *, precondition: bool = False) -> VersionConflictError:
    """Return the error for rows that somebody else has written."""
    named = ", ".join(map(_told, items[:_SHOWN])) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
    way = "show it as it is to whoever asked" if precondition else "roll back, and read again before another attempt"
    return VersionConflictError(
        f"somebody else has written in between: {named}. Nothing of this is kept: {way}",
        items=items,
        precondition=precondition,
    )


def not_written(what: str) -> PgfenceError:
    """Return the error for rows that nobody else has written and that were not written all the same."""
    return PgfenceError(
        f"{what} Every row is at the version it was read at, so this is no conflict: a BEFORE trigger that returns NULL or a"
        " row-level security policy keeps rows from being written, and another attempt would end the same way"
    )


def _told(item: VersionConflict) -> str:
    key = ", ".join(map(repr, item.pk))
    now = "is gone, or hidden from this role" if item.found is None else f"is at {item.found}"
    return f"{item.model.__name__} {key} was read at version {item.expected} and {now}"


def _conflicts(rows: list[Written]) -> list[VersionConflict]:
    groups: dict[tuple[Connection, Mapper[Any]], list[Written]] = {}
    for each in rows:
        groups.setdefault((each.connection, each.mapper), []).append(each)
    items: dict[State, VersionConflict] = {}
    for (connection, mapper), some in groups.items():
        with _looking(connection) as looking:
            found = versions_of(looking, mapper, [each.key or () for each in some])
        for each, version in zip(some, found, strict=True):
            if version is None or version != each.version:
                items[each.state] = VersionConflict(mapper.class_, each.key or (), each.version, version)
    return [items[each.state] for each in rows if each.state in items]


@contextmanager
def _looking(connection: Connection) -> Iterator[Connection]:
    """Yield a connection that may look at rows after the rollback, and leave the session's as it was."""
    if connection.in_transaction():
        with connection.begin_nested():
            yield connection
        return
    # Not the caller's own: inside its block `with connection.begin()` it takes no statement after the rollback.
    own = Connection(connection.engine, connection=connection.connection)
    try:
        yield own
    finally:
        own.rollback()
