"""One flush of a VersionedSession. In mode "batch" its rows are locked and compared before the ordinary flush sends them.

`_mapper` hides the version column meanwhile, so that SQLAlchemy sends rows with the same columns as one statement.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm.attributes import instance_state, set_committed_value
from sqlalchemy.orm.exc import ObjectDeletedError, StaleDataError

from pgfence._orm import identity_of, will_send_update
from pgfence.errors import TransactionStateError
from pgfence.versions._conflicts import WrittenRow, identify, not_counted_error, not_written_error, read_failed_rows
from pgfence.versions._mapping import ATTRIBUTE, get_version_column, is_versioned
from pgfence.versions._rows import check_transaction, lock_rows, versions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sqlalchemy.orm import Mapper, Session
    from sqlalchemy.orm.unitofwork import UOWTransaction

    from pgfence._orm import State
    from pgfence.versions._rows import Row

    Sent: TypeAlias = tuple[Callable[[Sequence[Mapping[Any, Any]]], list[Row]], Sequence[Mapping[Any, Any]], bool]


class Flush:
    """One flush of a VersionedSession.

    Attributes:
        session: the session that flushes.
        context: SQLAlchemy's record of the flush.
        started: all listeners of before_flush, and `ahead`, have been called.
        ahead: called after these listeners, before any row is compared or written.
        emitting: rows are being written by a batch, and mappers hide their version column.
        locked: the version of each row that was locked and compared.
        written: the rows that a batch writes, in that order.
        deleted: the rows that a batch deletes.
        sent: the statements that were executed: a function that returns their rows, their parameters, and whether all of
            these rows were written.
        failed_rows: the rows as they were when the flush failed.
    """

    def __init__(self, session: Session, *, batch: bool) -> None:
        self.session = session
        self.context: UOWTransaction | None = None
        self.started = False
        self.ahead: Callable[[UOWTransaction], None] | None = None
        self.emitting = False
        self.locked: dict[State, object] = {}
        self.written: dict[State, None] = {}
        self.deleted: list[State] = []
        self.sent: list[Sent] = []
        self.failed_rows: list[WrittenRow] = []
        self._batch = batch
        self._deletes: bool | None = None

    def run(self) -> None:
        """Execute the flush; if it fails, read its rows before its transaction is rolled back."""
        context = self.context
        assert context is not None
        # Remove this method, which `_session` has put there: as an attribute of the context it would be a reference cycle.
        del context.execute
        try:
            if self.ahead is not None:
                self.ahead(context)
            self.started = True
            if not self._batch:
                context.execute()
                return
            # Locked in one order by all sessions, before the first write: two flushes of the same rows cannot deadlock.
            self._compare(context)
            self.emitting = True
            context.execute()
            self.emitting = False
            # Some drivers cannot count what a batch has written, and a trigger or a policy may have kept a row from it.
            _confirm(self)
        except (StaleDataError, ObjectDeletedError):
            self.emitting = False
            # Now: after the rollback the rows show what other processes have written since.
            self.record_failed_rows()
            raise
        finally:
            self.emitting = False

    def record_failed_rows(self) -> None:
        """Read the rows of a flush that has failed, unless that was done."""
        with suppress(DBAPIError):
            self.failed_rows = self.failed_rows or read_failed_rows(self)

    def _compare(self, context: UOWTransaction) -> None:
        states = [(state, deleted) for state, (deleted, listed) in context.states.items() if state.key and not listed]
        deleted = _select_batched(state for state, gone in states if gone)
        changed = _select_batched(state for state, gone in states if not gone and will_send_update(state))
        compare(self, [*changed, *deleted], deleting=bool(deleted))

    def find_connection(self, mapper: Mapper[object], state: State) -> Connection:
        """Return the connection on which a flush writes a row."""
        if self.session.connection_callable is not None:
            return self.session.connection_callable(mapper, state.obj())
        return self.session.connection(bind_arguments={"mapper": mapper})

    def shares_connection(self, mapper: Mapper[object]) -> bool:
        """Return whether the session is bound to a Connection, whose rollback may undo what other sessions have written."""
        return isinstance(self.session.bind or self.session.get_bind(mapper), Connection)

    def collect_sent_rows(self) -> tuple[set[Row], set[Row]]:
        """Return the rows that this flush has written, and those that it may have deleted."""
        done: set[Row] = set()
        unclear: set[Row] = set()
        for keys, parameters, written in self.sent:
            (done if written else unclear).update(keys(parameters))
        return done, unclear

    def has_added(self, state: State) -> bool:
        """Return whether the transaction, or the savepoint, that is about to be rolled back has added a row."""
        return self.context is not None and state in self.context.transaction._new

    def collect_tables(self) -> set[str]:
        """Return the names of the tables of versioned classes that are in this flush."""
        states = self.context.states if self.context else ()
        mappers = {state.mapper for state in states if is_versioned(state.mapper)}
        return {str(table.description) for mapper in mappers for table in mapper.tables}

    def find_replaced(self, state: State) -> State | None:
        """Return the row that the flush deletes and whose key a new row takes over; SQLAlchemy sends one UPDATE for both."""
        if self._deletes is None:
            # Computed once, at the first new row: by then all rows that cascades delete are known.
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


def get_emitting() -> Flush | None:
    """Return the batch that is writing rows now, if there is one."""
    flush = NOW.get()
    return flush if flush is not None and flush.emitting else None


def batch_of(state: State) -> Flush | None:
    """Return the batch that is writing a row now; None: the row is compared by its own UPDATE.

    Raises:
        TransactionStateError: a batch is writing, and the row belongs to another session.
    """
    flush = get_emitting()
    if flush is None or not getattr(state.mapper, "batches", False):
        return None
    if state.session is not flush.session:
        raise TransactionStateError(
            'another session flushes versioned rows while a flush with conflict_check="batch" runs: do that after the flush'
        )
    return flush


def _select_batched(states: Iterable[State]) -> list[State]:
    # A row without a version cannot be compared; `check_version` rejects it when its turn comes.
    return [
        state
        for state in states
        if getattr(state.mapper, "batches", False) and state.dict.get(ATTRIBUTE, state) is not None
    ]


# ------------------------------------------------------------ the rows in their tables


def compare(flush: Flush, states: list[State], *, deleting: bool = False, connection: Connection | None = None) -> None:
    """Lock rows, and raise unless each is at the version at which its instance was read."""
    barred: list[str] = []
    for mapper, some in _group_by_table(states):
        where = connection or flush.session.connection(bind_arguments={"mapper": mapper})
        check_transaction(where, 'conflict_check="row"')
        found, seen = lock_rows(where, mapper, [identity_of(state) for state in some], deleting=deleting)
        barred += [f"{mapper.class_.__name__} {key}" for key in seen]
        flush.locked.update(zip(some, found, strict=True))
        rows = [(state, state.dict.get(ATTRIBUTE), version) for state, version in zip(some, found, strict=True)]
        differing = [row for row in rows if row[2] is None or row[1] not in (None, row[2])]
        flush.failed_rows += identify(flush, where, mapper, differing) if differing else []
    if flush.failed_rows:
        raise StaleDataError("rows are not at the versions that their instances were read at")
    if barred:
        raise not_written_error(f"Rows could not be locked: {', '.join(barred)}.")


def _confirm(flush: Flush) -> None:
    """Read the rows that a batch has sent, and raise if one was not written."""
    unwritten: list[str] = []
    for mapper, some in _group_by_table(list(flush.written)):
        where = flush.session.connection(bind_arguments={"mapper": mapper})
        if mapper.version_id_generator and where.dialect.supports_sane_multi_rowcount:
            continue
        keys = [tuple(mapper.primary_key_from_instance(state.obj())) for state in some]
        for state, key, version in zip(some, keys, versions_of(where, mapper, keys), strict=True):
            # None for a row that this flush has added and then written by post_update: it was not locked.
            before = flush.locked.get(state)
            if version == before and not mapper.version_id_generator:
                raise not_counted_error(mapper, version)
            if version is None or version == before:
                unwritten.append(f"{state.class_.__name__} {key}")
            else:
                set_committed_value(state.obj(), ATTRIBUTE, version)
    for mapper, some in _group_by_table(flush.deleted):
        where = flush.session.connection(bind_arguments={"mapper": mapper})
        found = versions_of(where, mapper, [identity_of(state) for state in some])
        left = [state for state, version in zip(some, found, strict=True) if version is not None]
        unwritten += [f"{state.class_.__name__} {identity_of(state)}" for state in left]
    if unwritten:
        raise not_written_error(f"Rows were sent and are as they were: {', '.join(unwritten)}.")


def _group_by_table(states: list[State]) -> list[tuple[Mapper[object], list[State]]]:
    """Return rows by the table of their version, in an order that all sessions share."""
    found: dict[object, tuple[Mapper[object], list[State]]] = {}
    for state in states:
        found.setdefault(state.mapper.base_mapper, (state.mapper, []))[1].append(state)
    return sorted(found.values(), key=lambda pair: str(get_version_column(pair[0]).table))
