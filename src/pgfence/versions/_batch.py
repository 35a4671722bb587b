"""One flush of a VersionedSession, and how it writes the rows of each table.

SQLAlchemy sends the UPDATEs of a mapper with a version column one by one. If rows are to be written together, `_mapper` hides
the column, and the versions are compared in another way:

- "locked": the rows are locked and compared before the flush sends them.
- "counted": `_mapper` adds the versions to the statements, and the driver counts the rows that they match.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm.attributes import instance_state, set_committed_value
from sqlalchemy.orm.exc import ObjectDeletedError, StaleDataError

from pgfence._orm import find_key_in_update, identity_of, will_send_update
from pgfence._sql.transaction import read_driver_state
from pgfence.errors import TransactionStateError
from pgfence.versions._conflicts import (
    WrittenRow,
    identify,
    not_counted_error,
    not_locked_error,
    not_written_error,
    read_failed_rows,
)
from pgfence.versions._mapping import ATTRIBUTE, get_version_column, is_versioned, name_row
from pgfence.versions._rows import check_transaction, lock_rows, versions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sqlalchemy.orm import Mapper, Session
    from sqlalchemy.orm.unitofwork import UOWTransaction

    from pgfence._orm import State
    from pgfence.versions._rows import Outcome, Row, Way

    Sent: TypeAlias = tuple[Callable[[Sequence[Mapping[Any, Any]]], list[Row]], Sequence[Mapping[Any, Any]], Outcome]

LOCK_FROM = 4
"""From this number of rows on, locking them first costs less than one round trip for each row."""


class Flush:
    """One flush of a VersionedSession.

    Attributes:
        started: whether all listeners of before_flush, and `ahead`, have been called.
        ahead: a function that is called after these listeners, before any row is compared or written.
        emitting: whether rows are being written together, so that mappers hide their version column.
        locked: the version of each row that was compared and has been locked since.
        expected: for each row whose version is compared by the statement that writes it, the instance and the expected version,
            by the key of the row in that statement.
        written: the rows that are written together and whose version is read after the flush, in order.
        deleted: the rows that are deleted together after they were locked.
        sent: a tuple for each executed statement: a function that computes its rows, its parameters, and the outcome.
        failed_rows: the rows as they were when the flush failed.
    """

    def __init__(self, session: Session, check: Literal["auto", "row", "batch"]) -> None:
        self.session = session
        self.context: UOWTransaction | None = None
        self.started = False
        self.ahead: Callable[[UOWTransaction], None] | None = None
        self.emitting = False
        self.locked: dict[State, object] = {}
        self.expected: dict[Row, tuple[State, object]] = {}
        self.written: dict[State, None] = {}
        self.deleted: list[State] = []
        self.sent: list[Sent] = []
        self.failed_rows: list[WrittenRow] = []
        self._check = check
        self._ways: dict[Mapper[object], Way] = {}
        self._other_way: Way | None = "locked" if check == "batch" else None
        self._recorded = False
        self._deletes: bool | None = None

    def run(self) -> None:
        """Execute the flush; if it fails, read its rows before its transaction is rolled back."""
        context = self.context
        assert context is not None
        # Remove this method, which `_session` has set, because it would be a reference cycle on the context.
        del context.execute
        try:
            if self.ahead is not None:
                self.ahead(context)
            self.started = True
            if self._check == "auto":
                self._ways = _choose_ways(self, context)
            if not self._ways and self._other_way is None:
                context.execute()
                return
            # The rows are locked before the first write, in an order that all sessions share, so two flushes cannot deadlock.
            self._compare(context)
            self.emitting = True
            context.execute()
            self.emitting = False
            # Some drivers cannot count what a batch has written, and a trigger or a policy may have kept a row from being written.
            _confirm(self)
            # A statement in a listener for after_flush finds the version that was written, not the one that was read.
            for state in self.written:
                state.committed_state.pop(ATTRIBUTE, None)
        except (StaleDataError, ObjectDeletedError):
            self.emitting = False
            # The rows are read before the rollback, because afterwards they show what other processes have written since.
            self.record_failed_rows()
            raise
        finally:
            self.emitting = False

    def record_failed_rows(self) -> None:
        """Read the rows of a flush that has failed, unless they were already read."""
        if self._recorded:
            return
        self._recorded = True
        with suppress(DBAPIError):
            # The comparison found some of these rows, and had not yet reached those of other tables.
            self.failed_rows += read_failed_rows(self)

    def way_of(self, mapper: Mapper[object]) -> Way | None:
        """Return how rows of a mapper are written together, or None if each has its own statement."""
        if not getattr(mapper, "batches", False):
            return None
        found: Way | None = self._ways.get(mapper.base_mapper)
        return self._other_way if found is None else found

    def _compare(self, context: UOWTransaction) -> None:
        changed, deleted = collect_written(context, lambda state: self.way_of(state.mapper) == "locked")
        compare(self, [*changed, *deleted], deleting=bool(deleted))

    def expect(self, state: State, version: object) -> None:
        """Record the version that a row must have when its statement writes it."""
        assert self.context is not None
        key = find_key_in_update(self.context, state)
        self.expected[state.mapper.base_mapper, key] = state, version

    def note_compared(self, rows: Iterable[Row]) -> None:
        """Record that statements have compared and written rows, which are now locked."""
        for row in rows:
            state, version = self.expected[row]
            self.locked[state] = version

    def find_connection(self, mapper: Mapper[object], state: State) -> Connection:
        """Return the connection on which a flush writes a row."""
        if self.session.connection_callable is not None:
            return self.session.connection_callable(mapper, state.obj())
        return self.session.connection(bind_arguments={"mapper": mapper})

    def shares_connection(self, mapper: Mapper[object]) -> bool:
        """Return whether the session is bound to a Connection, whose rollback may undo writes of other sessions."""
        return isinstance(self.session.bind or self.session.get_bind(mapper), Connection)

    def collect_sent_rows(self, outcome: Outcome) -> set[Row]:
        """Return the rows of this flush's statements that had a given outcome."""
        return {row for rows_of, parameters, found in self.sent if found == outcome for row in rows_of(parameters)}

    def has_added(self, state: State) -> bool:
        """Return whether this row was added in the transaction or savepoint that is about to be rolled back."""
        return self.context is not None and state in self.context.transaction._new

    def collect_tables(self) -> set[str]:
        """Return the names of the tables of versioned classes that are in this flush."""
        states = self.context.states if self.context else ()
        mappers = {state.mapper for state in states if is_versioned(state.mapper)}
        return {str(table.description) for mapper in mappers for table in mapper.tables}

    def find_replaced(self, state: State) -> State | None:
        """Return the row that the flush deletes and whose key a new row takes; SQLAlchemy sends one UPDATE for both."""
        if self._deletes is None:
            # The value is computed once, at the first new row, when all rows that cascades delete are known.
            self._deletes = any(deleted for deleted, _ in self.context.states.values()) if self.context else False
        if not self._deletes:
            return None
        instance = self.session.identity_map.get(state.mapper._identity_key_from_state(state))
        found: State | None = None if instance is None else instance_state(instance)
        return found if found is not None and self.deletes(found) else None

    def deletes(self, state: State) -> bool:
        """Return whether the flush deletes a row."""
        return bool(self.context and self.context.states.get(state, (False,))[0])


NOW: ContextVar[Flush | None] = ContextVar("pgfence_flush", default=None)


def find_way(mapper: Mapper[object]) -> Way | None:
    """Return how the running flush writes rows of a mapper together; None without a flush, or if each has its own statement."""
    flush = NOW.get()
    return flush.way_of(mapper) if flush is not None and flush.emitting else None


def batch_of(state: State) -> Flush | None:
    """Return the flush that is writing a row in a batch, or None if the row is written by its own statement."""
    flush = NOW.get()
    if flush is None or not flush.emitting or flush.way_of(state.mapper) is None:
        return None
    if state.session is not flush.session:
        raise TransactionStateError(
            "another session is flushing versioned rows of a table while a VersionedSession writes a batch of rows of that table:"
            ' flush the other session before or after the VersionedSession, or pass conflict_check="row" to the VersionedSession'
        )
    return flush


def collect_written(context: UOWTransaction, chosen: Callable[[State], bool]) -> tuple[list[State], list[State]]:
    """Return the versioned rows that a flush is known to change, and those that it deletes."""
    changed: list[State] = []
    deleted: list[State] = []
    for state, (gone, listed) in context.states.items():
        # A row without a version cannot be compared; `check_version` rejects it before it is written.
        if state.key and not listed and chosen(state) and state.dict.get(ATTRIBUTE, state) is not None:
            if gone:
                deleted.append(state)
            elif will_send_update(state):
                changed.append(state)
    return changed, deleted


def _choose_ways(flush: Flush, context: UOWTransaction) -> dict[Mapper[object], Way]:
    """Choose how to write the rows of each table.

    Tables with too few rows are omitted, because separate statements cost less there.
    """
    # The flush itself does this first, so that relationships add the rows that they change. A second run finds nothing left to
    # do.
    while any(action.execute(context) for action in list(context.presort_actions.values())):
        pass
    counts: dict[Mapper[object], int] = {}
    for state in context.states:
        if state.key and getattr(state.mapper, "batches", False):
            counts[state.mapper.base_mapper] = counts.get(state.mapper.base_mapper, 0) + 1
    # If the rows are written together, the versions that a trigger sets must be read by one more statement.
    several = [mapper for mapper, count in counts.items() if count > (1 if mapper.version_id_generator else 2)]
    ways: dict[Mapper[object], Way] = {}
    for mapper in several:
        if (way := _choose_way(flush, context, mapper)) is not None:
            ways[mapper] = way
    return ways


def _choose_way(flush: Flush, context: UOWTransaction, mapper: Mapper[object]) -> Way | None:
    # If several sessions write in one transaction, only a count for a single row tells which row was not written.
    if flush.session.connection_callable is not None or flush.shares_connection(mapper):
        return None
    connection = flush.session.connection(bind_arguments={"mapper": mapper})
    # In AUTOCOMMIT, no rollback would undo the rows that a statement has written.
    if read_driver_state(connection).autocommit:
        return None
    if connection.dialect.supports_sane_multi_rowcount:
        return "counted"
    changed, deleted = collect_written(context, lambda state: state.mapper.base_mapper is mapper)
    return "locked" if len(changed) + len(deleted) >= LOCK_FROM else None


# ------------------------------------------------------------ the rows in their tables


def compare(flush: Flush, states: list[State], *, deleting: bool = False, connection: Connection | None = None) -> None:
    """Lock rows, and raise an error unless each is at the version at which its instance was read."""
    barred: list[str] = []
    for mapper, some in _group_by_table(states):
        where = connection or flush.session.connection(bind_arguments={"mapper": mapper})
        check_transaction(where, 'pass conflict_check="row" to the VersionedSession')
        found, seen = lock_rows(where, mapper, [identity_of(state) for state in some], deleting=deleting)
        barred += [name_row(mapper.class_, key) for key in seen]
        flush.locked.update(zip(some, found, strict=True))
        rows = [(state, state.dict.get(ATTRIBUTE), version) for state, version in zip(some, found, strict=True)]
        differing = [row for row in rows if row[2] is None or row[1] not in (None, row[2])]
        flush.failed_rows += identify(flush, where, mapper, differing) if differing else []
    if flush.failed_rows:
        raise StaleDataError("rows are not at the versions at which their instances were read")
    if barred:
        raise not_locked_error(barred)


def _confirm(flush: Flush) -> None:
    """Read the rows that a batch should have written, and raise an error if one of them was not written."""
    unwritten: list[str] = []
    for mapper, some in _group_by_table(list(flush.written)):
        where = flush.session.connection(bind_arguments={"mapper": mapper})
        if mapper.version_id_generator and where.dialect.supports_sane_multi_rowcount:
            continue
        keys = [tuple(mapper.primary_key_from_instance(state.obj())) for state in some]
        for state, key, version in zip(some, keys, versions_of(where, mapper, keys), strict=True):
            # The version is None for a row that this flush has added and then written by post_update, because it was not locked.
            before = flush.locked.get(state)
            if version == before and not mapper.version_id_generator:
                raise not_counted_error(mapper, version)
            if version is None or version == before:
                unwritten.append(name_row(state.class_, key))
            else:
                set_committed_value(state.obj(), ATTRIBUTE, version)
    for mapper, some in _group_by_table(flush.deleted):
        where = flush.session.connection(bind_arguments={"mapper": mapper})
        found = versions_of(where, mapper, [identity_of(state) for state in some])
        left = [state for state, version in zip(some, found, strict=True) if version is not None]
        unwritten += [name_row(state.class_, identity_of(state)) for state in left]
    if unwritten:
        raise not_written_error(f"The flush sent an UPDATE or DELETE that changed nothing in {', '.join(unwritten)}.")


def _group_by_table(states: list[State]) -> list[tuple[Mapper[object], list[State]]]:
    """Return rows by the table of their version, in an order that all sessions share."""
    found: dict[object, tuple[Mapper[object], list[State]]] = {}
    for state in states:
        found.setdefault(state.mapper.base_mapper, (state.mapper, []))[1].append(state)
    return sorted(found.values(), key=lambda pair: str(get_version_column(pair[0]).table))
