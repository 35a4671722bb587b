"""Find the rows that a StaleDataError is about, because SQLAlchemy's error has only a text, and build the errors that list them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from sqlalchemy import Uuid
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm.attributes import instance_state

from pgfence._ddl.fences import Target
from pgfence._ddl.versions import backfill
from pgfence._orm import identity_of, will_send_update
from pgfence._process.events import emit_event
from pgfence.config import events_of
from pgfence.errors import PgfenceError, SchemaError, VersionConflict, VersionConflictError
from pgfence.versions._mapping import get_version_column, get_version_table, is_versioned, name_row, version_of
from pgfence.versions._own_writes import find_overtaken
from pgfence.versions._rows import find_written_here, versions_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from sqlalchemy import Connection
    from sqlalchemy.orm import Mapper, Session
    from sqlalchemy.orm.unitofwork import UOWTransaction

    from pgfence._orm import Key, State
    from pgfence.versions._rows import Outcome, Row

_SHOWN = 5


class WrittenRow(NamedTuple):
    """A row that a failed flush was going to write, as it was when the flush failed.

    `settled` is False for a row that no longer exists and that this transaction may have deleted itself. Only the rollback shows
    whether another process has deleted it. `flushed` is True if this flush may have written or deleted it, because one statement
    was sent for several rows and their count was wrong. `ours` is True for a row that this transaction was the last to write.
    """

    mapper: Mapper[object]
    key: Key
    expected: object
    found: object
    connection: Connection
    settled: bool
    flushed: bool = False
    ours: bool = False

    @property
    def differs(self) -> bool:
        """Whether the row is not at the version that was read."""
        return self.found is None or self.expected not in (None, self.found)


class FailedFlush(Protocol):
    """The part of `_batch.Flush` that is used here, after the flush has failed."""

    session: Session
    context: UOWTransaction | None
    started: bool
    failed_rows: list[WrittenRow]

    @property
    def locked(self) -> Collection[State]: ...
    def find_connection(self, mapper: Mapper[object], state: State) -> Connection: ...
    def shares_connection(self, mapper: Mapper[object]) -> bool: ...
    def collect_sent_rows(self, outcome: Outcome) -> set[Row]: ...
    def has_added(self, state: State) -> bool: ...
    def collect_tables(self) -> set[str]: ...


def read_failed_rows(flush: FailedFlush) -> list[WrittenRow]:
    """Return the rows of a flush that has just failed, without those that it has locked or written.

    Call this before the rollback, in the transaction of the flush.
    """
    found: list[WrittenRow] = []
    done, updated = flush.collect_sent_rows("written"), flush.collect_sent_rows("some updated")
    deleted = flush.collect_sent_rows("some deleted")
    by_mapper: dict[Mapper[object], list[State]] = {}
    for state in _find_to_be_written(flush):
        if (state.mapper.base_mapper, identity_of(state)) not in done:
            by_mapper.setdefault(state.mapper, []).append(state)
    for mapper, states in by_mapper.items():
        connection = flush.find_connection(mapper, states[0])
        now = versions_of(connection, mapper, list(map(identity_of, states)))
        rows = [(state, version_of(state), version) for state, version in zip(states, now, strict=True)]
        for row, (state, _, _) in zip(identify(flush, connection, mapper, rows), rows, strict=True):
            here = (mapper.base_mapper, row.key)
            gone = row.found is None and here in deleted
            if not (gone and flush.has_added(state)):
                found.append(row._replace(flushed=gone or (row.ours and here in updated)))
    return found if flush.started else [row for row in found if row.found is None]


def identify(
    flush: FailedFlush, connection: Connection, mapper: Mapper[object], rows: Iterable[tuple[State, object, object]]
) -> list[WrittenRow]:
    """Return a `WrittenRow` for each row, given the version that was read and the version that was found."""
    # Sessions that share a connection write in one transaction, so xmin does not tell which of them wrote a row.
    shared = flush.shares_connection(mapper)
    found: list[WrittenRow] = []
    unknown: list[int] = []
    for place, (state, expected, version) in enumerate(rows):
        row = WrittenRow(
            mapper, identity_of(state), expected, version, connection, settled=shared or version is not None
        )
        other = find_overtaken(state, expected) if row.differs else None
        if other is not None:
            row = row._replace(found=other[0], settled=True)
        elif row.differs and version is not None and not shared:
            unknown.append(place)
        found.append(row)
    here = find_written_here(connection, mapper, [found[place].key for place in unknown]) if unknown else []
    for place, ours in zip(unknown, here, strict=True):
        found[place] = found[place]._replace(ours=ours)
    return found


def _find_to_be_written(flush: FailedFlush) -> list[State]:
    """Return the versioned rows that a flush changes or deletes, as far as it knows them."""
    context = flush.context
    if not flush.started or context is None:
        # A listener of before_flush has failed, because a row that it refreshed no longer exists.
        return [state for state in map(instance_state, flush.session.dirty) if state.key and is_versioned(state.mapper)]
    switched = {state.mapper._identity_key_from_state(state) for state in context.states if state.key is None}
    return [
        state
        for state, (deleted, listed) in context.states.items()
        if state.key is not None
        and is_versioned(state.mapper)
        and state not in flush.locked
        and (
            (deleted and (not listed or state.key in switched))
            or (not deleted and not listed and will_send_update(state))
        )
    ]


def explain_failure(flush: FailedFlush, error: Exception) -> Exception:
    """Return the error to raise for a flush that did not find a row to write. Call this after the rollback.

    The given error is returned if it is about other classes, or if the rows could not be read.
    """
    others: list[VersionConflict] = []
    own: list[VersionConflict] = []
    try:
        for row in flush.failed_rows:
            if row.differs:
                item = VersionConflict(row.mapper.class_, row.key, row.expected, row.found)
                if not row.ours and (row.settled or _is_gone(row)):
                    others.append(item)
                elif not row.flushed:
                    own.append(item)
    except DBAPIError:
        return error
    if others:
        return conflict_error(flush.session, others)
    if own:
        return own_statement_error(own)
    if any(f"table '{table}' expected" in str(error) for table in flush.collect_tables()):
        return not_written_error(str(error))
    return error


def _is_gone(row: WrittenRow) -> bool:
    """Return whether a row is still missing after the rollback, which means that another process has deleted it."""
    connection = row.connection
    # The session has rolled back. Its connection is still in a transaction only if that was a rollback to a savepoint.
    transaction = connection.begin_nested() if connection.in_transaction() else connection.begin()
    try:
        return versions_of(connection, row.mapper, [row.key]) == [None]
    finally:
        transaction.rollback()


def emit_conflicts(session: Session, items: Iterable[VersionConflict]) -> None:
    """Emit an event for each row of a conflict, with the name of its class and without its key."""
    for item in items:
        reason = "deleted" if item.found is None else "written"
        emit_event(events_of(session.get_bind(item.model)), "conflict", item.model.__name__, "version", reason=reason)


def conflict_error(
    session: Session, items: Sequence[VersionConflict], *, precondition: bool = False
) -> VersionConflictError:
    """Return the error for rows that another process has written, and emit the events."""
    emit_conflicts(session, items)
    rows, were = ("the row", "it was") if len(items) == 1 else ("the rows", "they were")
    way = "show the client what is stored now" if precondition else f"roll back, and read {rows} again before you retry"
    return VersionConflictError(
        f"another transaction has written {rows} since {were} read: {_describe_all(items)}. No change of this transaction was"
        f" committed: {way}",
        items=items,
        precondition=precondition,
    )


def own_statement_error(items: Sequence[VersionConflict]) -> PgfenceError:
    """Return the error for rows that this session's own statement has written in a way that the session cannot track."""
    rows = "this row" if len(items) == 1 else "these rows"
    return PgfenceError(
        f"{_describe_all(items)}: a statement or flush of this session has written {rows} since. This is not a conflict with"
        " another process, and retrying would fail the same way. The session tracks update(), insert() and synchronized"
        " delete() through session.execute(), but not SQL text, statements sent through session.connection(), or rows that a trigger"
        " changes: call session.refresh() after such a statement, before you change the instance or pass its version"
    )


def not_written_error(what: str) -> PgfenceError:
    """Return the error for rows that were not written although no other process has changed them."""
    return PgfenceError(
        f"{what} This is not a conflict with another process, and retrying would fail the same way. Either a BEFORE trigger that"
        " returns NULL or a row-level security policy prevents the write: change it, or write with another role. Or this"
        " session's own statement has changed or deleted rows without synchronizing the session: call session.refresh() after such a"
        " statement"
    )


def not_locked_error(rows: Sequence[str]) -> PgfenceError:
    """Return the error for rows that could not be locked although this role can read them."""
    them = "it" if len(rows) == 1 else "them"
    return PgfenceError(
        f"could not lock {', '.join(rows)}, because a row-level security policy allows this role only to read {them}. This is not a"
        " conflict with another process, and retrying would fail the same way: change the policy, or write with another role"
    )


def not_counted_error(mapper: Mapper[object], version: object) -> SchemaError:
    """Return the error for a row that was written and whose version no trigger has incremented."""
    table = get_version_table(mapper)
    command = f"pgfence.schema.add_version_trigger(engine, {mapper.base_mapper.class_.__name__})"
    return SchemaError(
        f"a row of the table {table.fullname!r} was updated, but its version is still {version}: the trigger that increments the"
        " version is missing or disabled."
        f" No change of this flush was committed. To create the trigger, call {command}",
        command=command,
    )


def _describe_all(items: Sequence[VersionConflict]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(_describe, items[:_SHOWN])) + more


def _describe(item: VersionConflict) -> str:
    now = "has been deleted, or is hidden from this role" if item.found is None else f"is at version {item.found}"
    # The version is unknown if the instance was expired when the row was deleted.
    read = "" if item.expected is None else f"was read at version {item.expected} and "
    return f"{name_row(item.model, item.pk)} {read}{now}"


def switched_class_error(state: State, replaced: State) -> PgfenceError:
    """Return the error for a new instance that has the key of a deleted instance of another class."""
    name, other = state.class_.__name__, replaced.class_.__name__
    return PgfenceError(
        f"{name_row(state.class_, identity_of(replaced))} was added with the key of a row of class {other} that the same"
        " flush deletes. SQLAlchemy sends one UPDATE for both, which cannot move the row to the tables of another class: call flush() after the"
        f" delete, and then add the {name}"
    )


def missing_version_error(mapper: Mapper[object], key: Key) -> SchemaError:
    """Return the error for a row that is to be written and whose version is NULL."""
    table = get_version_table(mapper)
    column = get_version_column(mapper)
    version = "gen_random_uuid()" if isinstance(column.type, Uuid) else "1"
    command = backfill(Target(table.name, table.schema).quoted, column.name, version)
    return SchemaError(
        f"{name_row(mapper.class_, key)} has no version, so a write cannot be checked. To fill the column"
        f" {column.name!r}, run: {command}",
        command=command,
    )
