"""How the operations are done: on the connection of the migration, or as a script (`--sql`), which asks no server."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from alembic.ddl.impl import DefaultImpl
from alembic.operations import Operations
from alembic.operations.ops import CreateIndexOp, DropIndexOp

from pgfence import altering
from pgfence._sql import fences, migrating, versions
from pgfence._sql import tables as texts
from pgfence._sql.fences import Target
from pgfence._sql.storage import VERSION, Place
from pgfence.alembic_plugin.operations import (
    AddFence,
    AddVersionTrigger,
    CreateIndexSafely,
    CreatePgfence,
    DropFence,
    DropIndexSafely,
    DropPgfence,
    DropVersionTrigger,
    UpgradePgfence,
)
from pgfence.errors import SchemaError, TransactionStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sqlalchemy import Connection

_log = logging.getLogger("pgfence.migrations")


def _perform(
    operations: Operations, place: Place, work: Callable[[Connection, Place], None], script: Iterable[str]
) -> None:
    context = operations.migration_context
    if not _is_postgresql(operations):
        _log.info("skipped on %s: pgfence's tables and triggers are for PostgreSQL", context.dialect.name)
    elif context.as_sql:
        _write(operations, script)
    else:
        altering.perform_on(operations.get_bind(), place, work)


def _write(operations: Operations, script: Iterable[str]) -> None:
    assert isinstance(operations.impl, DefaultImpl)
    for statement in script:
        operations.impl.static_output(f"{statement};")


@Operations.implementation_for(CreatePgfence)
def _create(operations: Operations, operation: CreatePgfence) -> None:
    _raise(operations, operation.place, operation.version)


@Operations.implementation_for(DropPgfence)
def _drop(operations: Operations, operation: DropPgfence) -> None:
    def work(connection: Connection, place: Place) -> None:
        _refuse_while_used(migrating.used(connection, place))
        altering.drop_unless_fenced(connection, place)

    place = operation.place
    _perform(operations, place, work, [migrating.expecting_unused(place), *texts.removal(place)])


def _refuse_while_used(used: Sequence[str]) -> None:
    if used:
        raise SchemaError(
            f"{used[0]} is held: its holder would go on with a token that the next one gets as well, or with an effect of"
            f" which nobody knows. Stop whoever holds a lease or a key ({len(used)} held), or wait until they have expired,"
            " and run this again",
            needed=VERSION,
            command="pgfence ps",
        )


@Operations.implementation_for(UpgradePgfence)
def _upgrade(operations: Operations, operation: UpgradePgfence) -> None:
    if operation.to < operation.from_:
        _lower(operations, operation.place, operation.to)
    else:
        _raise(operations, operation.place, operation.to)


def _raise(operations: Operations, place: Place, version: int) -> None:
    def work(connection: Connection, settled: Place) -> None:
        texts.create(connection, settled, version)

    _perform(operations, place, work, texts.creation(place, version))


def _lower(operations: Operations, place: Place, version: int) -> None:
    def work(connection: Connection, settled: Place) -> None:
        _refuse_while_used(migrating.used(connection, settled, version))
        texts.lower(connection, settled, version)

    _perform(operations, place, work, [migrating.expecting_unused(place, version), *texts.lowering(place, version)])


@Operations.implementation_for(AddFence)
def _add_fence(operations: Operations, operation: AddFence) -> None:
    target, parts = operation.target, operation.parts
    _perform(
        operations,
        operation.place,
        lambda connection, place: fences.add(connection, place, target, parts),
        [migrating.adding(operation.place, target, parts)],
    )


@Operations.implementation_for(DropFence)
def _drop_fence(operations: Operations, operation: DropFence) -> None:
    target = operation.target
    _perform(
        operations,
        operation.place,
        lambda connection, place: fences.drop(connection, place, target),
        [migrating.removing(operation.place, target)],
    )


@Operations.implementation_for(AddVersionTrigger)
def _add_version_trigger(operations: Operations, operation: AddVersionTrigger) -> None:
    target, column = operation.target, operation.column
    _perform(
        operations,
        operation.place,
        lambda connection, place: versions.add(connection, place, target, column),
        migrating.adding_version(operation.place, target, column),
    )


@Operations.implementation_for(DropVersionTrigger)
def _drop_version_trigger(operations: Operations, operation: DropVersionTrigger) -> None:
    target = operation.target
    _perform(
        operations,
        operation.place,
        lambda connection, place: versions.drop(connection, place, target),
        migrating.removing_version(operation.place, target),
    )


@Operations.implementation_for(CreateIndexSafely)
def _create_index(operations: Operations, operation: CreateIndexSafely) -> None:
    ordinary = CreateIndexOp(
        operation.index_name,
        operation.table_name,
        operation.columns,
        schema=operation.schema,
        unique=operation.unique,
        if_not_exists=True,
        **operation.kw,
    )
    if not _is_postgresql(operations):
        operations.invoke(ordinary)
        return
    table, name = Target(operation.table_name, operation.schema), str(operation.index_name)
    with _concurrently(operations):
        if operations.migration_context.as_sql:
            _write(operations, [migrating.clearing(table, name)])
        elif _there(operations.get_bind(), table, operation):
            return
        operations.invoke(ordinary)


@Operations.implementation_for(DropIndexSafely)
def _drop_index(operations: Operations, operation: DropIndexSafely) -> None:
    ordinary = DropIndexOp(
        operation.index_name, operation.table_name, schema=operation.schema, if_exists=True, **operation.kw
    )
    with _concurrently(operations) if _is_postgresql(operations) else nullcontext():
        operations.invoke(ordinary)


def _there(connection: Connection, table: Target, operation: CreateIndexSafely) -> bool:
    """Return whether that index is there already; drop it if its build was interrupted."""
    found = migrating.index(connection, table, str(operation.index_name))
    if found is None:
        return False
    if not found.valid and found.of_this_table:
        _log.warning(
            "the index %s is invalid, left by an interrupted build: it is dropped and built again", found.called
        )
        migrating.drop_index(connection, found.called)
        return False
    plain = all(isinstance(column, str) for column in operation.columns)
    same = not plain or [_plain(column) for column in found.columns] == list(operation.columns)
    if not (same and found.of_this_table and found.unique == operation.unique):
        raise ValueError(
            f"there is an index {found.called} already, of other columns or another table: rename one of them"
        )
    _log.info("the index %s is there already", found.called)
    return True


def _plain(column: str) -> str:
    return column[1:-1].replace('""', '"') if column.startswith('"') else column


@contextmanager
def _concurrently(operations: Operations) -> Iterator[None]:
    """Leave the transaction of the migration for a while, unless somebody has.

    A build waits for every older transaction, and nobody who reads or writes waits behind it: lock_timeout, which is there
    for other DDL, would end it for nothing.
    """
    context = operations.migration_context
    if context.as_sql:
        with context.autocommit_block():
            yield
        return
    connection = operations.get_bind()
    in_autocommit = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
    if not in_autocommit and context._in_external_transaction:
        raise TransactionStateError(
            "an index is built beside running writers outside of a transaction, and this one was begun by env.py or by who"
            " called it: let Alembic begin it (context.begin_transaction()), or use op.create_index()"
        )
    with nullcontext() if in_autocommit else context.autocommit_block(), migrating.patient(connection):
        yield


def _is_postgresql(operations: Operations) -> bool:
    return operations.migration_context.dialect.name == "postgresql"
