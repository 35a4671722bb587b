"""The one mapper that overrides private attributes of SQLAlchemy, and why.

A flush sends the UPDATEs of a mapper with a version column one by one (`_emit_update_statements` in
`sqlalchemy/orm/persistence.py`), whatever the dialect supports, and no event, option or Session hook changes that. A bulk
UPDATE in `before_flush` would run before `before_update` listeners, before relationships copy foreign keys, and before the
INSERTs that it depends on. Therefore a flush of several rows hides the version column while it writes. `_batch` has already
compared the versions, or the classes below add them to the statements again.

Private attributes that are overridden, as of SQLAlchemy 2.0.40, 2.0.58 and 2.1.9 (`nox -s sqlalchemy_next` runs the tests on
newer ones):

- `_version_id_prop`, `_version_id_has_server_side_value`: follow the hidden column
- `_memo`: caches the UPDATE, post-UPDATE and DELETE of each table, which are replaced by the classes below
- `_validate_polymorphic_identity`: called for each row after all `before_insert` and `before_update` listeners
- `_should_undefer_in_wildcard`: columns that are loaded in spite of `load_only()` and `defer()`
- `Update._execute_on_connection`, `Delete._execute_on_connection`: count each row, and record it for the flush
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from sqlalchemy import Delete, Update, bindparam
from sqlalchemy.orm import Mapper
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.util import HasMemoized, memoized_property

from pgfence.versions._batch import NOW, compare, find_way
from pgfence.versions._conflicts import missing_version_error, not_counted_error
from pgfence.versions._flush import check_version, prepare_row
from pgfence.versions._mapping import ATTRIBUTE, get_version_column, mode_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sqlalchemy import Column, ColumnElement, Connection, CursorResult
    from sqlalchemy.engine.interfaces import CoreExecuteOptionsParameter

    from pgfence._orm import Key, State
    from pgfence.versions._batch import Flush
    from pgfence.versions._rows import Row, Way

    Parameters = Mapping[Any, Any]
    RowCheck: TypeAlias = Callable[..., None] | None


class SentUpdate(Update):
    """An UPDATE that writes rows only if they still have the versions at which they were read.

    `way` is how the rows are written together, or None if they are written one by one.
    """

    inherit_cache = True
    mapper: Mapper[object]
    way: Way | None
    version: Column[object]

    @classmethod
    def of(cls, statement: Update, mapper: Mapper[object], way: Way | None) -> Self:
        """Return a statement of SQLAlchemy as an instance of this class."""
        made = cls(statement.table).where(*statement._where_criteria)
        made.mapper, made.way, made.version = mapper, way, get_version_column(mapper)
        return made

    def compare_versions(self) -> Self:
        """Return the statement with a parameter for the version of each row."""
        return self.where(self.version == bindparam(self.version._label, type_=self.version.type))

    def _execute_on_connection(
        self,
        connection: Connection,
        distilled_params: Sequence[Parameters],
        execution_options: CoreExecuteOptionsParameter,
    ) -> Any:
        flush = NOW.get() if self.way == "counted" else None
        rows: list[Row] = []
        if flush is not None:
            rows = self.rows_of(distilled_params)
            _add_versions(flush, rows, distilled_params, str(self.version._label))
        result = super()._execute_on_connection(connection, distilled_params, execution_options)
        if len(distilled_params) == 1:
            self._record_written(distilled_params[0], result)
        elif flush is not None:
            self._record_counted(flush, distilled_params, result)
        if flush is not None:
            flush.note_compared(rows)
        return result

    def _record_counted(self, flush: Flush, parameters: Sequence[Parameters], result: CursorResult[Any]) -> None:
        """Record rows that were written at the versions at which they were read, or raise an error if some were not."""
        written = result.rowcount == len(parameters)
        flush.sent.append((self.rows_of, parameters, "written" if written else "some updated"))
        if not written:
            raise StaleDataError(
                f"An UPDATE on table '{self.table.description}' expected to update {len(parameters)} row(s);"
                f" {result.rowcount} were matched."
            )

    def _record_written(self, parameters: Parameters, result: CursorResult[Any]) -> object:
        """Record a row that was written, and return its version if the server has set it."""
        if result.rowcount != 1:
            # The error is raised here, before SQLAlchemy sets the next version in memory, which would lose the expected one.
            raise StaleDataError(
                f"An UPDATE on table '{self.table.description}' expected to update 1 row(s); {result.rowcount} were matched."
            )
        if (flush := NOW.get()) is not None:
            flush.sent.append((self.rows_of, (parameters,), "written"))
        mapper = self.mapper
        if mapper.version_id_generator is not False or (row := result.returned_defaults) is None:
            return None
        version = row[0] if len(row) == 1 else row._mapping[self.version]
        if version == parameters.get(self.version._label) and mode_of(mapper) == "server":
            raise not_counted_error(mapper, version)
        return version

    def rows_of(self, parameters: Sequence[Parameters]) -> list[Row]:
        """Return the rows of a statement, each as its base mapper and its key."""
        return [(self.mapper, _get_key_in(self.mapper, each)) for each in parameters]


class SentPostUpdate(SentUpdate):
    """The UPDATE that a relationship with `post_update` sends after the INSERT or UPDATE of the rows, or before their DELETE."""

    inherit_cache = True

    def _execute_on_connection(
        self,
        connection: Connection,
        distilled_params: Sequence[Parameters],
        execution_options: CoreExecuteOptionsParameter,
    ) -> Any:
        if self.way is not None and (flush := NOW.get()) is not None:
            _raise_versions(flush, self.mapper, distilled_params, connection)
            return Update._execute_on_connection(self, connection, distilled_params, execution_options)
        column = self.version
        sent: list[Parameters] = []
        context = None
        for parameters in distilled_params:
            if parameters.get(column._label) is None:
                raise missing_version_error(self.mapper, _get_key_in(self.mapper, parameters))
            # The rows are written one by one, because executemany returns no versions, and its count does not show which row was
            # not written.
            result = Update._execute_on_connection(self, connection, [parameters], execution_options)
            version = self._record_written(parameters, result)
            context = result.context
            found = context.compiled_parameters[0]
            # SQLAlchemy takes the new version from the parameters.
            sent.append(found if version is None else {**found, column.key: version})
        compiled = None if context is None else context.compiled
        return SimpleNamespace(rowcount=len(sent), context=SimpleNamespace(compiled=compiled, compiled_parameters=sent))


class SentDelete(Delete):
    """The DELETE of rows at the versions at which they were read. It raises an error if a row was not at its version.

    SQLAlchemy itself checks the count only if the driver can count several rows at once and `confirm_deleted_rows` is on.
    """

    inherit_cache = True
    mapper: Mapper[object]
    way: Way | None
    version: Column[object]

    @classmethod
    def of(cls, statement: Delete, mapper: Mapper[object], way: Way | None) -> Self:
        """Return a statement of SQLAlchemy as an instance of this class."""
        made = cls(statement.table).where(*statement._where_criteria)
        made.mapper, made.way, made.version = mapper, way, get_version_column(mapper)
        return made

    def compare_versions(self) -> Self:
        """Return the statement with a parameter for the version of each row."""
        return self.where(self.version == bindparam(self.version.key, type_=self.version.type))

    def _execute_on_connection(
        self,
        connection: Connection,
        distilled_params: Sequence[Parameters],
        execution_options: CoreExecuteOptionsParameter,
    ) -> Any:
        flush, mapper = NOW.get(), self.mapper
        if len(distilled_params) > 1 and flush is not None and flush.shares_connection(mapper):
            # Each row is counted immediately, because the rollback would restore rows that another session deleted on this
            # connection.
            results = [self._execute_on_connection(connection, [each], execution_options) for each in distilled_params]
            return SimpleNamespace(rowcount=len(results))
        if flush is not None and self.way == "counted":
            _add_versions(flush, self.rows_of(distilled_params), distilled_params, self.version.key)
        result = super()._execute_on_connection(connection, distilled_params, execution_options)
        several = len(distilled_params) > 1
        # Some drivers cannot count several rows at once. After the flush, `_confirm` reads the rows that were locked.
        uncounted = several and self.way == "locked"
        written = uncounted or result.rowcount == len(distilled_params)
        if flush is not None and (written or several):
            flush.sent.append((self.rows_of, distilled_params, "written" if written else "some deleted"))
        if not written:
            raise StaleDataError(
                f"A DELETE on table '{self.table.description}' expected to delete {len(distilled_params)} row(s);"
                f" {result.rowcount} were matched."
            )
        return result

    def rows_of(self, parameters: Sequence[Parameters]) -> list[Row]:
        """Return the rows of a statement, each as its base mapper and its key."""
        return [(self.mapper, tuple(each[column.key] for column in self.mapper.primary_key)) for each in parameters]


def _get_key_in(mapper: Mapper[object], parameters: Parameters) -> Key:
    return tuple(parameters[column._label] for column in mapper.primary_key)


def _add_versions(flush: Flush, rows: Sequence[Row], parameters: Sequence[Parameters], name: str) -> None:
    for row, each in zip(rows, parameters, strict=True):
        assert isinstance(each, dict)
        each[name] = flush.expected[row][1]


def _raise_versions(
    flush: Flush, mapper: Mapper[object], parameters: Sequence[Parameters], connection: Connection
) -> None:
    """Lock and compare rows that are not locked yet, and increment the versions in the parameters of their UPDATE."""
    assert flush.context is not None
    # The keys in memory are used, as in SQLAlchemy's parameters, because a row that was added has no identity yet.
    states = {
        tuple(state.mapper.primary_key_from_instance(state.obj())): state
        for state in flush.context.post_update_states[mapper][0]
    }
    some = [states[_get_key_in(mapper, each)] for each in parameters]
    unlocked = [each for each in some if each.key and each not in flush.locked]
    for state in unlocked:
        check_version(state.mapper, state)
    compare(flush, unlocked, connection=connection)
    for state, each in zip(some, parameters, strict=True):
        if not flush.deletes(state):
            flush.written[state] = None
        if mapper.version_id_generator and state.key is not None:
            assert isinstance(each, dict)
            each[get_version_column(mapper).key] = state.dict[ATTRIBUTE] = mapper.version_id_generator(
                state.dict.get(ATTRIBUTE, flush.locked[state])
            )


_SENT: dict[str, type[SentUpdate | SentDelete]] = {
    "update": SentUpdate,
    "post_update": SentPostUpdate,
    "delete": SentDelete,
}


class VersionedMapper(Mapper[object]):
    """A mapper that has no version column while a flush writes its rows together."""

    @property
    def version_id_col(self) -> ColumnElement[object] | None:
        # SQLAlchemy reads this several times for each row of a flush, so it must stay cheap.
        flush = NOW.get()
        return None if flush is not None and flush.emitting and flush.way_of(self) else self.__dict__["version_id_col"]

    @version_id_col.setter
    def version_id_col(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, given: ColumnElement[object] | None
    ) -> None:
        self.__dict__["version_id_col"] = given

    @memoized_property
    def batches(self) -> bool:
        """Whether rows can be written together, which requires a version column other than xmin and this mapper in the base class."""
        found = self.__dict__["version_id_col"]
        return found is not None and not found.system and isinstance(self.base_mapper, VersionedMapper)

    @property
    def confirm_deleted_rows(self) -> bool:
        """Whether SQLAlchemy itself counts the rows that it deletes.

        It does not for versioned rows: `SentDelete` counts those in the table that has the version, and each row in the table of a
        subclass belongs to one of them.
        """
        asked: bool = self.__dict__["confirm_deleted_rows"]
        return asked and self.__dict__["version_id_col"] is None

    @confirm_deleted_rows.setter
    def confirm_deleted_rows(self, given: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.__dict__["confirm_deleted_rows"] = given

    @property
    def _version_id_prop(self) -> object:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.version_id_col is None else self._kept[0]

    @property
    def _version_id_has_server_side_value(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # True would make SQLAlchemy build each UPDATE again to add RETURNING. `_memo` adds it to the cached one.
        return self.version_id_col is not None and self._kept[1] and not self.batches

    @HasMemoized.memoized_attribute
    def _should_undefer_in_wildcard(self) -> set[ColumnElement[Any]]:
        # A version read after the other columns could belong to a later state, and the change in between would be lost.
        found = self.__dict__["version_id_col"]
        cols: set[ColumnElement[Any]] = super()._should_undefer_in_wildcard
        return cols if found is None else {*cols, found}

    @memoized_property
    def _kept(self) -> tuple[object, bool]:
        """The values that Mapper caches on first access, read here while the version column is visible."""
        return super()._version_id_prop, super()._version_id_has_server_side_value

    @property
    def _validate_polymorphic_identity(self) -> RowCheck:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The function that SQLAlchemy calls for each row to insert or update, after all before_update listeners."""
        return _prepare_row

    @_validate_polymorphic_identity.setter
    def _validate_polymorphic_identity(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, given: RowCheck
    ) -> None:
        # The mapper of a subclass assigns the value that its base returns, which is this property's own value.
        if given is not _prepare_row:
            self.__dict__["_check"] = given

    @memoized_property
    def identity_check(self) -> RowCheck:
        """SQLAlchemy's own check of the polymorphic identity of a row that is about to be written."""
        return next(
            (mapper.__dict__["_check"] for mapper in self.iterate_to_root() if "_check" in mapper.__dict__), None
        )

    def _memo(self, key: Any, callable_: Callable[[], Any]) -> Any:
        version, way = self.__dict__["version_id_col"], find_way(self)
        kind = _SENT.get(key[0])
        if version is None or kind is None or key[1] is not version.table:
            # The key is separate, because an UPDATE that was built without the version must not be reused for one with it.
            return super()._memo((way, key) if way else key, callable_)

        def make() -> Any:
            return kind.of(callable_(), self, way)

        if way == "counted" and key[0] != "post_update":
            return super()._memo((way, key), lambda: make().compare_versions())
        if way is not None:
            return super()._memo((way, key), make)
        if key[0] != "delete" and self.batches and self._kept[1]:
            return super()._memo(key, lambda: make().return_defaults(version))
        return super()._memo(key, make)


def _prepare_row(mapper: Mapper[object], state: State, values: dict[str, object]) -> None:
    assert isinstance(mapper, VersionedMapper)
    if (check := mapper.identity_check) is not None:
        check(mapper, state, values)
    prepare_row(mapper, state)
