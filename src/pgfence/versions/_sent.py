"""The statements of a flush that write the table of a version: counted, and noted for the flush, row by row.

SQLAlchemy has no event for an UPDATE by `post_update`, and an event ahead of a write cannot tell whether it will be sent. The
parameters of the statement that is executed say both: which row is written, and at which version it is expected.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import Delete, Update
from sqlalchemy.orm.attributes import flag_modified
from sqlalchemy.orm.exc import StaleDataError

from pgfence._orm import identity_of
from pgfence.versions._batch import NOW, compare
from pgfence.versions._conflicts import not_counted, without
from pgfence.versions._mapping import ATTRIBUTE, mode_of, version_column

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Column, Connection, CursorResult
    from sqlalchemy.engine.interfaces import CoreExecuteOptionsParameter
    from sqlalchemy.orm import Mapper

    from pgfence._orm import Key, State
    from pgfence.versions._batch import Flush
    from pgfence.versions._rows import Row

    Parameters = Mapping[Any, Any]


class SentUpdate(Update):
    """The UPDATE of one row, at the version it was read at."""

    inherit_cache = True
    mapper: Mapper[object]
    batches: bool
    version: Column[object]

    @classmethod
    def of(cls, statement: Update, mapper: Mapper[object], *, batches: bool) -> Self:
        """Return the same statement for a base mapper, whose rows a batch can write or not."""
        made = cls(statement.table).where(*statement._where_criteria)
        made.mapper, made.batches, made.version = mapper, batches, version_column(mapper)
        return made

    def _execute_on_connection(
        self,
        connection: Connection,
        distilled_params: Sequence[Parameters],
        execution_options: CoreExecuteOptionsParameter,
    ) -> Any:
        result = super()._execute_on_connection(connection, distilled_params, execution_options)
        if len(distilled_params) == 1:
            self._written(distilled_params[0], result)
        return result

    def _written(self, parameters: Parameters, result: CursorResult[Any]) -> object:
        """Note a row that was written, and return its version where the server has made it."""
        if result.rowcount != 1:
            # SQLAlchemy counts after it has put the next version into memory, where the one that was expected is lost.
            raise StaleDataError(
                f"An UPDATE on table '{self.table.description}' expected to update 1 row(s); {result.rowcount} were matched."
            )
        if (flush := NOW.get()) is not None:
            flush.sent.append((self.keys, (parameters,), True))
        mapper = self.mapper
        if mapper.version_id_generator is not False or (row := result.returned_defaults) is None:
            return None
        version = row[0] if len(row) == 1 else row._mapping[self.version]
        if version == parameters.get(self.version._label) and mode_of(mapper) == "server":
            raise not_counted(mapper, version)
        return version

    def keys(self, parameters: Sequence[Parameters]) -> list[Row]:
        """Return the rows of a statement, each as its base mapper and its key."""
        return [(self.mapper, _updated(self.mapper, each)) for each in parameters]


class SentPostUpdate(SentUpdate):
    """The UPDATE that a relationship with `post_update` sends after those of the rows themselves, or ahead of their DELETE."""

    inherit_cache = True

    def _execute_on_connection(
        self,
        connection: Connection,
        distilled_params: Sequence[Parameters],
        execution_options: CoreExecuteOptionsParameter,
    ) -> Any:
        flush = NOW.get()
        if flush is not None and flush.emitting and self.batches:
            _raise_versions(flush, self.mapper, distilled_params, connection)
            return Update._execute_on_connection(self, connection, distilled_params, execution_options)
        column = self.version
        sent: list[Parameters] = []
        context = None
        for parameters in distilled_params:
            if parameters.get(column._label) is None:
                raise without(self.mapper, _updated(self.mapper, parameters))
            # One by one: several cannot return their versions, and their count does not say which was not written.
            result = Update._execute_on_connection(self, connection, [parameters], execution_options)
            version = self._written(parameters, result)
            context = result.context
            found = context.compiled_parameters[0]
            # SQLAlchemy takes the new version from the parameters.
            sent.append(found if version is None else {**found, column.key: version})
        compiled = None if context is None else context.compiled
        return SimpleNamespace(rowcount=len(sent), context=SimpleNamespace(compiled=compiled, compiled_parameters=sent))


class SentDelete(Delete):
    """The DELETE of rows at the versions they were read at, which raises if one was not there.

    SQLAlchemy adds the counts of several up, and then trusts the sum only where a driver can count many rows at once, and the
    mapper has not switched `confirm_deleted_rows` off.
    """

    inherit_cache = True
    mapper: Mapper[object]
    batches: bool

    @classmethod
    def of(cls, statement: Delete, mapper: Mapper[object], *, batches: bool) -> Self:
        """Return the same statement for a base mapper, whose rows a batch can write or not."""
        made = cls(statement.table).where(*statement._where_criteria)
        made.mapper, made.batches = mapper, batches
        return made

    def _execute_on_connection(
        self,
        connection: Connection,
        distilled_params: Sequence[Parameters],
        execution_options: CoreExecuteOptionsParameter,
    ) -> Any:
        flush, mapper = NOW.get(), self.mapper
        if len(distilled_params) > 1 and flush is not None and flush.shares_connection(mapper):
            # A rollback brings back rows that another session has deleted through the same connection, so each is counted now.
            results = [self._execute_on_connection(connection, [each], execution_options) for each in distilled_params]
            return SimpleNamespace(rowcount=len(results))
        result = super()._execute_on_connection(connection, distilled_params, execution_options)
        several = len(distilled_params) > 1
        # A batch reads the rows after the flush: some drivers cannot count several at once.
        uncounted = several and flush is not None and flush.emitting and self.batches
        written = uncounted or result.rowcount == len(distilled_params)
        if flush is not None and (written or several):
            flush.sent.append((self.keys, distilled_params, written))
        if not written:
            raise StaleDataError(
                f"A DELETE on table '{self.table.description}' expected to delete {len(distilled_params)} row(s);"
                f" {result.rowcount} were matched."
            )
        return result

    def keys(self, parameters: Sequence[Parameters]) -> list[Row]:
        """Return the rows of a statement, each as its base mapper and its key."""
        return [(self.mapper, tuple(each[column.key] for column in self.mapper.primary_key)) for each in parameters]


def _updated(mapper: Mapper[object], parameters: Parameters) -> Key:
    return tuple(parameters[column._label] for column in mapper.primary_key)


def _raise_versions(
    flush: Flush, mapper: Mapper[object], parameters: Sequence[Parameters], connection: Connection
) -> None:
    """Lock and compare the rows that a batch has not come upon yet, and raise the versions in the parameters of an UPDATE."""
    assert flush.context is not None
    # By the keys in memory, of which SQLAlchemy has made the parameters: a row that was added has no identity yet.
    states = {
        tuple(state.mapper.primary_key_from_instance(state.obj())): state
        for state in flush.context.post_update_states[mapper][0]
    }
    some = [states[_updated(mapper, each)] for each in parameters]
    unlocked = [each for each in some if each.key and each not in flush.locked]
    for state in unlocked:
        expect_version(state.mapper, state)
    compare(flush, unlocked, connection=connection)
    for state, each in zip(some, parameters, strict=True):
        if not flush.deletes(state):
            flush.written[state] = None
        if mapper.version_id_generator and state.key is not None:
            assert isinstance(each, dict)
            each[version_column(mapper).key] = state.dict[ATTRIBUTE] = mapper.version_id_generator(
                state.dict.get(ATTRIBUTE, flush.locked[state])
            )


def raise_version(mapper: Mapper[object], state: State, old: object) -> None:
    """Let the UPDATE of a batch write the next version."""
    if mapper.version_id_generator:
        state.dict[ATTRIBUTE] = mapper.version_id_generator(old)
        flag_modified(state.obj(), ATTRIBUTE)


def expect_version(mapper: Mapper[object], state: State) -> None:
    """Raise unless a row that is about to be written has a version; read it if it is not loaded."""
    if state.dict.get(ATTRIBUTE) is None and getattr(state.obj(), ATTRIBUTE) is None:
        raise without(mapper, identity_of(state))
