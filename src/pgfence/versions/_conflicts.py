"""From SQLAlchemy's StaleDataError, which has a text only, to the rows that it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from pgfence.errors import PgfenceError, SchemaError, VersionConflict, VersionConflictError
from pgfence.versions._mapping import ATTRIBUTE, version_column
from pgfence.versions._rows import versions_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy.orm import InstanceState, Mapper, Session, SessionTransaction

    State = InstanceState[Any]

_SHOWN = 5


class Written(NamedTuple):
    """A row that a flush was about to change or delete. Without a connection: one that a statement may have written.

    Where the connection is shared with its caller, `seen` is the version just before the write.
    """

    state: State
    key: tuple[Any, ...]
    version: Any
    connection: Any = None
    mapper: Any = None
    shared: bool = False
    seen: Any = None


class Journal:
    """What the present transaction of a session has written, in its order, so that a rollback tells what it took back.

    A row that was written before in the same transaction is locked and in no conflict, though after a rollback it is at
    another version than the flush expected: what counts is the version at which it was written first.
    """

    def __init__(self) -> None:
        self._written: list[Written] = []
        # Kept by the session as long as they matter: a million rows that were added and let go leave nothing here.
        self._added: WeakKeyDictionary[State, int] = WeakKeyDictionary()
        self._additions = 0
        # It refers to its session, which would never be let go.
        self._marks: WeakKeyDictionary[SessionTransaction, tuple[int, int]] = WeakKeyDictionary()
        self.undone: list[Written] = []

    def inserted(self, state: State) -> None:
        """Note a row that is about to be added: nobody else can have written it."""
        self._additions += 1
        self._added[state] = self._additions

    def note(self, connection: Connection, mapper: Mapper[Any], state: State, version: Any) -> None:
        """Note a row that is about to be changed or deleted."""
        assert state.key is not None
        written = Written(state, tuple(state.key[1]), version, connection, mapper)
        session = state.session
        if session is not None and isinstance(session.bind or session.get_bind(mapper), Connection):
            # The rollback takes back what others have written through the same connection, so it would be too late to look.
            (seen,) = versions_of(connection, mapper, [tuple(state.key[1])])
            written = written._replace(shared=True, seen=seen)
        self._written.append(written)

    def stated(self, states: Iterable[State]) -> None:
        """Note instances whose rows a statement may write."""
        self._written += [
            Written(state, tuple(state.key[1]), state.dict[ATTRIBUTE])
            for state in states
            if state.key is not None and state.dict.get(ATTRIBUTE) is not None
        ]

    def savepoint(self, transaction: SessionTransaction) -> None:
        """Note where a savepoint was set."""
        self._marks[transaction] = len(self._written), self._additions

    def rolled_back(self, transaction: SessionTransaction) -> None:
        """Take back what was written since the savepoint that a transaction belongs to, or since the begin."""
        while not transaction.nested and transaction.parent is not None:
            transaction = transaction.parent
        mark, additions = self._marks.get(transaction, (0, 0))
        added = {state for state, number in self._added.items() if number > additions}
        self.undone = [each for each in self._written[mark:] if each.state not in added]
        del self._written[mark:]
        for state in added:
            del self._added[state]

    def ended(self, transaction: SessionTransaction) -> None:
        """Forget a savepoint that was released or rolled back, or all at the end of the transaction."""
        self._marks.pop(transaction, None)
        if transaction.parent is None:
            self._written.clear()
            self._added.clear()


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
        if known.connection is None:
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
        f"{what} Nobody else has written the rows, so this is no conflict, and another attempt would end the same way: a BEFORE"
        " trigger that returns NULL or a row-level security policy keeps rows from being written, or this transaction has"
        " written them by SQL beside the session, which should then refresh() them"
    )


def not_counted(mapper: Mapper[Any], version: Any) -> SchemaError:
    """Return the error for rows that were written, and whose version a trigger should have raised."""
    table: Any = version_column(mapper).table
    command = f"pgfence.schema.add_version_trigger(engine, {mapper.base_mapper.class_.__name__})"
    return SchemaError(
        f"a row of {table.fullname} was updated and its version stayed {version}: no trigger has counted. Nothing of this"
        f" flush is kept: {command}",
        command=command,
    )


def _told(item: VersionConflict) -> str:
    key = ", ".join(map(repr, item.pk))
    now = "is gone, or hidden from this role" if item.found is None else f"is at {item.found}"
    return f"{item.model.__name__} {key} was read at version {item.expected} and {now}"


def _conflicts(rows: list[Written]) -> list[VersionConflict]:
    found = {each.state: each.seen for each in rows if each.shared}
    groups: dict[tuple[Connection, Mapper[Any]], list[Written]] = {}
    for each in rows:
        if not each.shared:
            groups.setdefault((each.connection, each.mapper), []).append(each)
    for (connection, mapper), some in groups.items():
        # Of the session, after its rollback: in a transaction only if it was back to a savepoint.
        transaction = connection.begin_nested() if connection.in_transaction() else connection.begin()
        try:
            now = versions_of(connection, mapper, [each.key for each in some])
        finally:
            transaction.rollback()
        found |= {each.state: version for each, version in zip(some, now, strict=True)}
    return [
        VersionConflict(each.mapper.class_, each.key, each.version, found[each.state])
        for each in rows
        if found[each.state] is None or found[each.state] != each.version
    ]
