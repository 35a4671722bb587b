"""Build indexes concurrently, also after an interrupted build, and never in place of a different index of that name."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from alembic.ddl.impl import DefaultImpl
from alembic.operations.ops import CreateIndexOp
from sqlalchemy import Column
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateIndex
from sqlalchemy.types import NULLTYPE

from pgfence._ddl import migration_scripts
from pgfence._ddl.fences import Target
from pgfence._sql import tables as texts
from pgfence._sql.columns import get_dialect
from pgfence._sql.errors import message_of
from pgfence._sql.sqlstate import sqlstate_of
from pgfence._sql.storage import translate_schema
from pgfence.errors import TransactionStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from alembic.operations import Operations
    from sqlalchemy import Connection

    from pgfence._alembic.operations import CreateIndexSafely
    from pgfence._ddl.migration_scripts import Index

_log = logging.getLogger("pgfence.migrations")

_UNRELATED = frozenset({"08", "25", "40", "53", "55", "57", "58", "XX"})
"""The SQLSTATE classes of errors that do not concern an index, but the connection, the transaction, locks or resources."""


def create(operations: Operations, operation: CreateIndexSafely) -> None:
    """Build an index concurrently on PostgreSQL, unless it exists.

    Raises:
        ValueError: the index has no name, another object or a different index has that name, or the table is partitioned.
        TransactionStateError: the transaction was not begun by Alembic.
    """
    table, name = Target(operation.table_name, operation.schema), _name(operations, operation)
    build = build_plain_operation(operation)
    if operations.migration_context.as_sql:
        with leave_transaction(operations):
            write(operations, [migration_scripts.build_index_cleanup(table, name)])
            operations.invoke(build)
        return
    # IF NOT EXISTS would accept a different index with that name, so an existing index is compared first.
    build.if_not_exists = False
    connection = operations.get_bind()
    table = Target(table.name, translate_schema(connection, table.schema))
    if connection.in_transaction():
        # This is checked before leaving the transaction, because leaving it commits what the migration did before.
        _expect_one_table(connection, table, name)
    with leave_transaction(operations):
        _expect_one_table(connection, table, name)
        if not _is_there(operations, operation, table, name):
            operations.invoke(build)


def build_plain_operation(operation: CreateIndexSafely) -> CreateIndexOp:
    """Return Alembic's operation that creates the index."""
    return CreateIndexOp(
        operation.index_name,
        operation.table_name,
        operation.columns,
        schema=operation.schema,
        unique=operation.unique,
        if_not_exists=True,
        **operation.kw,
    )


def write(operations: Operations, script: Iterable[str]) -> None:
    """Write statements into the migration script."""
    assert isinstance(operations.impl, DefaultImpl)
    for statement in script:
        operations.impl.static_output(f"{statement};")


def _name(operations: Operations, operation: CreateIndexSafely) -> str:
    """Return the name of the index, which a naming convention of the MetaData may provide."""
    index = operation.to_index(operations.migration_context)
    called: str | None = get_dialect().identifier_preparer.format_index(index)
    if called is None:
        raise ValueError(
            f"the index of {operation.table_name!r} has no name, and the MetaData has no naming convention for indexes."
            " Pass the name of the index"
        )
    return called[1:-1].replace('""', '"') if called.startswith('"') else called


def _expect_one_table(connection: Connection, table: Target, name: str) -> None:
    found = migration_scripts.find_index(connection, table, name)
    if migration_scripts.is_partitioned(connection, table) and not (found is not None and found.valid):
        raise ValueError(
            f"'{table}' is a partitioned table, and PostgreSQL cannot build an index on all of its partitions concurrently: call"
            " create_index_safely for each partition, and then op.create_index for the table, which attaches these indexes"
        )


def _is_there(operations: Operations, operation: CreateIndexSafely, table: Target, name: str) -> bool:
    """Return whether the index already exists; drop it if its build was interrupted."""
    connection = operations.get_bind()
    found = migration_scripts.find_index(connection, table, name)
    if found is None:
        return False
    if not found.of_this_table:
        what = "an index {} of another table" if found.is_index else "an object named {} that is not an index"
        raise ValueError(f"there is already {what.format(found.called)}: rename one of them")
    if not found.valid:
        _log.warning(
            "the index %s is invalid because its build was interrupted: dropping it and building it again", found.called
        )
        migration_scripts.drop_index(connection, found.called)
        return False
    _expect_same(operations, operation, table, found)
    _log.info("the index %s already exists", found.called)
    return True


def _expect_same(operations: Operations, operation: CreateIndexSafely, table: Target, found: Index) -> None:
    options = {key: value for key, value in operation.kw.items() if key != "postgresql_concurrently"}
    wanted = CreateIndexOp(
        migration_scripts.WANTED, table.name, operation.columns, schema="pg_temp", unique=operation.unique, **options
    )
    index = wanted.to_index(operations.migration_context)
    assert index.table is not None
    for column in index.kwargs.get("postgresql_include") or ():
        if column not in index.table.c:
            index.table.append_column(Column(column, NULLTYPE))
    creation = str(CreateIndex(index).compile(dialect=get_dialect()))
    rest = creation.partition(f" ON {get_dialect().identifier_preparer.format_table(index.table)} ")[2]
    definition = f"{'UNIQUE ' if index.unique else ''}{'' if rest.startswith('USING ') else 'USING btree '}{rest}"
    try:
        texts.execute_plain(
            operations.get_bind(), migration_scripts.build_index_comparison(table, found.called, creation, definition)
        )
    except DBAPIError as error:
        state = sqlstate_of(error)
        if state is None or state[:2] in _UNRELATED:
            raise
        differs, why, advice = "differs", message_of(error), "drop the existing index, or rename one of them"
        if state != migration_scripts.DIFFERS:
            differs, why = "may differ", f"building that one on an empty copy of the table failed: {why}"
            advice = (
                "if the two indexes are the same, write yours exactly as the existing index is described; otherwise, drop the"
                " existing index, or rename one of them"
            )
        raise ValueError(
            f"there is already an index {found.called}, which {differs} from the one to create ({why}): {advice}"
        ) from error


@contextmanager
def leave_transaction(operations: Operations) -> Iterator[None]:
    """Leave the migration's transaction for the duration of the block, unless it was left before.

    A concurrent build waits for all older transactions, but no reader or writer waits for the build. A lock_timeout that is set
    for other DDL would end the build unnecessarily.
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
            "an index can be built concurrently only outside a transaction, but env.py or its caller began one. Let Alembic"
            " begin it"
            " (context.begin_transaction()), or use op.create_index()"
        )
    with nullcontext() if in_autocommit else context.autocommit_block(), migration_scripts.wait_for_locks(connection):
        yield
