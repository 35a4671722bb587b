"""Versions compared ahead of a flush: one ordered lock for each table, then the ordinary flush.

SQLAlchemy compares a version by the count of one UPDATE, so it sends the rows of a mapper with a version column one by one.
In a batch flush such a mapper says that it has none, rows that change alike go out together, and what takes the place of the
predicate is this: the rows are locked and compared before anything is sent; a row that the flush comes upon later, by a
cascade or a hook, is locked and compared when its turn comes; and after the flush all are read again, because some drivers
cannot count what a batch has written, and a trigger or a policy may have kept a row from it.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sqlalchemy import Delete, event, inspect
from sqlalchemy.orm import Mapper
from sqlalchemy.orm.attributes import flag_modified, instance_state, set_committed_value
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.util import HasMemoized, memoized_property

from pgfence.errors import TransactionStateError, VersionConflict
from pgfence.flushes import sends_update, will_send_update
from pgfence.versions._conflicts import conflict, not_counted, not_written
from pgfence.versions._mapping import ATTRIBUTE, VersionedBase, version_column
from pgfence.versions._rows import Key, lock, versions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sqlalchemy import ColumnElement, Connection
    from sqlalchemy.orm import InstanceState, Session

    State: TypeAlias = "InstanceState[Any]"

_O = TypeVar("_O")


class Batch:
    """One flush of a session.

    Attributes:
        session: whose.
        emitting: rows are being written, and mappers hide their version column.
        locked: the version of each row that was locked and compared.
        written: what is written, in that order.
        deleted: what is deleted.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.emitting = False
        self.locked: dict[State, Any] = {}
        self.written: list[State] = []
        self.deleted: list[State] = []


_NOW: ContextVar[Batch | None] = ContextVar("pgfence_batch", default=None)


def _emitting() -> Batch | None:
    batch = _NOW.get()
    return batch if batch is not None and batch.emitting else None


class CountedDelete(Delete):
    """The DELETE of one row that raises if there was none.

    SQLAlchemy adds the counts of several up, and then trusts the sum only where a driver can count many rows at once.
    """

    inherit_cache = True

    @classmethod
    def of(cls, statement: Delete) -> CountedDelete:
        """Return the same statement, counted."""
        return cls(statement.table).where(*statement._where_criteria)

    def _execute_on_connection(self, connection: Connection, distilled_params: Any, execution_options: Any) -> Any:
        result = super()._execute_on_connection(connection, distilled_params, execution_options)
        if len(distilled_params) == 1 and result.rowcount != 1:
            raise StaleDataError(
                f"A DELETE on table '{self.table.description}' expected to delete 1 row; it is not there."
            )
        return result


class VersionedMapper(Mapper[_O]):
    """A mapper that has no version column while a batch flush writes."""

    @property
    def version_id_col(self) -> ColumnElement[Any] | None:
        batch = _NOW.get()
        return None if batch is not None and batch.emitting and self.batches else self.__dict__["version_id_col"]

    @version_id_col.setter
    def version_id_col(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, given: ColumnElement[Any] | None
    ) -> None:
        self.__dict__["version_id_col"] = given

    @memoized_property
    def batches(self) -> bool:
        """Whether a batch can write this class: it has a column for the version, and its statements are kept as below."""
        found = self.__dict__["version_id_col"]
        return found is not None and not found.system and isinstance(self.base_mapper, VersionedMapper)

    @property
    def confirm_deleted_rows(self) -> bool:
        """Whether SQLAlchemy warns of rows that were not deleted. A batch looks for itself."""
        asked: bool = self.__dict__["confirm_deleted_rows"]
        return asked and not (_emitting() and self.batches)

    @confirm_deleted_rows.setter
    def confirm_deleted_rows(self, given: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.__dict__["confirm_deleted_rows"] = given

    @property
    def _version_id_prop(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.version_id_col is None else self._kept[0]

    @property
    def _version_id_has_server_side_value(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # SQLAlchemy would make each UPDATE anew to add the RETURNING; here it is in the one that is kept.
        return self.version_id_col is not None and self._kept[1] and not self.batches

    @HasMemoized.memoized_attribute
    def _should_undefer_in_wildcard(self) -> set[Any]:
        # Whatever load_only() and defer() leave out: a version that is read after the rest would let a change in between be lost.
        found = self.__dict__["version_id_col"]
        cols: set[Any] = super()._should_undefer_in_wildcard
        return cols if found is None else {*cols, found}

    @memoized_property
    def _kept(self) -> tuple[Any, bool]:
        """What Mapper keeps once it was asked: asked here while there is a version column."""
        return super()._version_id_prop, super()._version_id_has_server_side_value

    def _memo(self, key: Any, callable_: Callable[[], Any]) -> Any:
        # An UPDATE without the version must not be taken from here by a flush that relies on it.
        if _emitting():
            return super()._memo(("batch", key), callable_)
        version = self.__dict__["version_id_col"]
        if version is None or key[1] is not version.table:
            return super()._memo(key, callable_)
        if key[0] == "delete":
            return super()._memo(key, lambda: CountedDelete.of(callable_()))
        if key[0] in {"update", "post_update"} and self.batches and self._kept[1]:
            return super()._memo(key, lambda: callable_().return_defaults(version))
        return super()._memo(key, callable_)


@contextmanager
def flushing(session: Session) -> Iterator[None]:
    """Make the flush in the block a batch flush, if `watch` was called for the session.

    Raises:
        VersionConflictError: rows are not at the version they were read at. Nothing was sent.
        PgfenceError: they are, and were not written.
    """
    batch = Batch(session)
    before = _NOW.set(batch)
    try:
        yield
    except StaleDataError as error:
        tables = {table.description for mapper in {state.mapper for state in batch.locked} for table in mapper.tables}
        if any(f"table '{table}' expected" in str(error) for table in tables):
            raise not_written(str(error)) from error
        raise
    finally:
        batch.emitting = False
        _NOW.reset(before)


def watch(session: Session) -> None:
    """Compare and confirm in the flushes of a session that run inside `flushing`."""
    event.listen(session, "before_flush", _before_flush)
    event.listen(session, "after_flush", _after_flush)


def _before_flush(session: Session, _context: Any, _instances: Any) -> None:
    batch = _NOW.get()
    if batch is None or batch.session is not session:
        return
    deleted = _batched(session.deleted)
    changed = [state for state in _batched(session.dirty) if will_send_update(state)]
    _compare(batch, [*changed, *deleted], deleting=bool(deleted))
    batch.emitting = True


def _after_flush(session: Session, _context: Any) -> None:
    batch = _NOW.get()
    if batch is None or batch.session is not session:
        return
    batch.emitting = False
    _confirm(batch)


def compared(state: State) -> bool:
    """Whether the present flush has locked a row, and found it at the version it was read at."""
    batch = _emitting()
    return batch is not None and state in batch.locked


def _batched(targets: Iterable[Any]) -> list[State]:
    states = [instance_state(target) for target in targets]
    kinds = {
        mapper
        for mapper in {state.mapper for state in states}
        if isinstance(mapper, VersionedMapper) and mapper.batches
    }
    # One without a version cannot be compared, and is refused when its turn comes.
    return [state for state in states if state.mapper in kinds and state.dict.get(ATTRIBUTE, kinds) is not None]


# ------------------------------------------------------------ each row, when its turn comes


def _own(mapper: Mapper[Any], state: State) -> Batch | None:
    batch = _NOW.get()
    if batch is None or not batch.emitting or not isinstance(mapper, VersionedMapper) or not mapper.batches:
        return None
    if state.session is not batch.session:
        raise TransactionStateError(
            'another session flushes versioned rows while a flush with conflict_check="batch" runs: do that after the flush'
        )
    return batch


def _before_insert(mapper: Mapper[Any], _connection: Connection, state: State) -> None:
    if (batch := _own(mapper, state)) is None:
        return
    # Added under the key of a row that the same flush deletes: SQLAlchemy makes one UPDATE of the two.
    key = mapper.identity_key_from_primary_key(mapper.primary_key_from_instance(state.obj()))
    replaced = batch.session.identity_map.get(key)
    if replaced is not None:
        batch.locked[state] = batch.locked[inspect(replaced)]
        batch.written.append(state)
    _raise_version(mapper, state, batch.locked.get(state))


def _before_update(mapper: Mapper[Any], connection: Connection, state: State) -> None:
    if (batch := _own(mapper, state)) is None:
        return
    if state not in batch.locked:
        if not sends_update(state):
            return
        _compare(batch, [state], connection=connection)
    _raise_version(mapper, state, batch.locked[state])
    batch.written.append(state)


def _before_delete(mapper: Mapper[Any], connection: Connection, state: State) -> None:
    if (batch := _own(mapper, state)) is None:
        return
    if state not in batch.locked:
        _compare(batch, [state], deleting=True, connection=connection)
    batch.deleted.append(state)


def _raise_version(mapper: Mapper[Any], state: State, old: Any) -> None:
    if mapper.version_id_generator:
        state.dict[ATTRIBUTE] = mapper.version_id_generator(old)
        flag_modified(state.obj(), ATTRIBUTE)


# ------------------------------------------------------------ the rows in their tables


def _compare(
    batch: Batch, states: list[State], *, deleting: bool = False, connection: Connection | None = None
) -> None:
    """Lock rows, and raise unless each is at the version that its instance was read at."""
    conflicts: list[VersionConflict] = []
    barred: list[str] = []
    for mapper, some in _by_table(states):
        where = connection or batch.session.connection(bind_arguments={"mapper": mapper})
        found, seen = lock(where, mapper, [_key(state) for state in some], deleting=deleting)
        barred += [f"{mapper.class_.__name__} {key}" for key in seen]
        for state, version in zip(some, found, strict=True):
            expected = state.dict.get(ATTRIBUTE)
            if version is None or (expected is not None and expected != version):
                conflicts.append(VersionConflict(state.class_, _key(state), expected, version))
            batch.locked[state] = version
    if conflicts:
        raise conflict(conflicts)
    if barred:
        raise not_written(f"Rows could not be locked: {', '.join(barred)}.")


def _confirm(batch: Batch) -> None:
    """Read what was written, and raise if some of it was not."""
    unwritten: list[State] = []
    for mapper, some in _by_table(batch.written):
        where = batch.session.connection(bind_arguments={"mapper": mapper})
        if mapper.version_id_generator and where.dialect.supports_sane_multi_rowcount:
            continue
        keys = [tuple(mapper.primary_key_from_instance(state.obj())) for state in some]
        for state, version in zip(some, versions_of(where, mapper, keys), strict=True):
            if version == batch.locked[state] and not mapper.version_id_generator:
                raise not_counted(mapper, version)
            if version is None or version == batch.locked[state]:
                unwritten.append(state)
            else:
                set_committed_value(state.obj(), ATTRIBUTE, version)
    for mapper, some in _by_table(batch.deleted):
        where = batch.session.connection(bind_arguments={"mapper": mapper})
        found = versions_of(where, mapper, [_key(state) for state in some])
        unwritten += [state for state, version in zip(some, found, strict=True) if version is not None]
    if unwritten:
        rows = ", ".join(f"{state.class_.__name__} {_key(state)}" for state in unwritten)
        raise not_written(f"Rows were sent and are as they were: {rows}.")


def _key(state: State) -> Key:
    assert state.identity is not None
    return tuple(state.identity)


def _by_table(states: list[State]) -> list[tuple[Mapper[Any], list[State]]]:
    """Return rows by the table of their version, in an order that all sessions share."""
    found: dict[Any, tuple[Mapper[Any], list[State]]] = {}
    for state in states:
        found.setdefault(state.mapper.base_mapper, (state.mapper, []))[1].append(state)
    return sorted(found.values(), key=lambda pair: str(version_column(pair[0]).table))


event.listen(VersionedBase, "before_insert", _before_insert, propagate=True, raw=True)
event.listen(VersionedBase, "before_update", _before_update, propagate=True, raw=True)
event.listen(VersionedBase, "before_delete", _before_delete, propagate=True, raw=True)
