"""Execute the operations on the connection of the migration, or write them into a script (`--sql`) without a server."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from alembic.operations import Operations
from alembic.operations.ops import DropIndexOp

from pgfence._admin import ddl
from pgfence._alembic import indexes
from pgfence._alembic.operations import (
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
from pgfence._ddl import fences, migration_scripts, versions
from pgfence._sql import tables as texts
from pgfence._sql.storage import VERSION, TableNames, translate_schema
from pgfence.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy import Connection

    from pgfence._ddl.fences import Target

_log = logging.getLogger("pgfence.migrations")


def _perform(
    operations: Operations,
    place: TableNames,
    work: Callable[[Connection, TableNames], None],
    script: Iterable[str],
    *,
    triggers: bool = False,
) -> None:
    context = operations.migration_context
    if not _is_postgresql(operations):
        _log.info(
            "the operation was skipped on %s, because pgfence's tables and triggers require PostgreSQL",
            context.dialect.name,
        )
    elif context.as_sql:
        indexes.write(operations, script)
    else:
        connection = operations.get_bind()
        settled = TableNames(translate_schema(connection, place.schema), place.prefix)
        ddl.perform_on(connection, settled, work, triggers=triggers)


def _translate_target(connection: Connection, target: Target) -> Target:
    """Return a table with the schema that the connection's `schema_translate_map` selects, as Alembic's own operations do."""
    return replace(target, schema=translate_schema(connection, target.schema))


@Operations.implementation_for(CreatePgfence)
def _create(operations: Operations, operation: CreatePgfence) -> None:
    place, version = operation.place, operation.version
    _perform(
        operations,
        place,
        lambda connection, settled: texts.create(connection, settled, version),
        texts.build_creation(place, version),
    )


@Operations.implementation_for(DropPgfence)
def _drop(operations: Operations, operation: DropPgfence) -> None:
    place = operation.place

    def work(connection: Connection, settled: TableNames) -> None:
        if translate_schema(connection, place.schema) is None and not migration_scripts.is_first(connection, settled):
            raise SchemaError(
                f"the search path finds pgfence's tables in {settled.schema!r}, which is not its first schema, so other applications"
                f" may use them. To drop them, name the schema: op.drop_pgfence(schema={settled.schema!r})",
                needed=VERSION,
                command=f"op.drop_pgfence(schema={settled.schema!r})",
            )
        _refuse_while_used(migration_scripts.find_used(connection, settled))
        ddl.drop_unless_fenced(connection, settled)

    script = [migration_scripts.build_unused_check(place), *texts.build_removal(place)]
    _perform(
        operations,
        place,
        work,
        script if place.schema else [migration_scripts.build_first_schema_check(place), *script],
    )


def _refuse_while_used(used: Sequence[str]) -> None:
    if used:
        raise SchemaError(
            f"cannot change pgfence's tables while {used[0]} is held, because its holder would continue with a token that the"
            f" next holder gets too, or with an effect that is no longer recorded. Stop the processes that hold leases or"
            f" keys ({len(used)} held), or wait until these have expired, and run the migration again",
            needed=VERSION,
        )


@Operations.implementation_for(UpgradePgfence)
def _change_version(operations: Operations, operation: UpgradePgfence) -> None:
    place, version = operation.place, operation.to
    lowers = version < operation.from_

    def work(connection: Connection, settled: TableNames) -> None:
        if migration_scripts.read_version(connection, settled) == 0:
            raise SchemaError(
                f"there are no pgfence tables in {settled.schema!r} to upgrade or downgrade: create them with"
                " op.create_pgfence()",
                needed=version,
                command="op.create_pgfence()",
            )
        if lowers:
            _refuse_while_used(migration_scripts.find_used(connection, settled, version))
            texts.lower(connection, settled, version)
        else:
            texts.create(connection, settled, version)

    script = texts.build_creation(place, version)
    if lowers:
        script = (migration_scripts.build_unused_check(place, version), *texts.build_downgrade(place, version))
    _perform(operations, place, work, [migration_scripts.build_installed_check(place), *script])


@Operations.implementation_for(AddFence)
def _add_fence(operations: Operations, operation: AddFence) -> None:
    target, parts = operation.target, operation.parts
    _perform(
        operations,
        operation.place,
        lambda connection, place: fences.add(connection, place, _translate_target(connection, target), parts),
        [migration_scripts.build_fence_addition(operation.place, target, parts)],
        triggers=True,
    )


@Operations.implementation_for(DropFence)
def _drop_fence(operations: Operations, operation: DropFence) -> None:
    target = operation.target
    _perform(
        operations,
        operation.place,
        lambda connection, place: fences.drop(connection, place, _translate_target(connection, target)),
        [migration_scripts.build_fence_removal(operation.place, target)],
        triggers=True,
    )


@Operations.implementation_for(AddVersionTrigger)
def _add_version_trigger(operations: Operations, operation: AddVersionTrigger) -> None:
    target, column = operation.target, operation.column
    _perform(
        operations,
        operation.place,
        lambda connection, place: versions.add(connection, place, _translate_target(connection, target), column),
        migration_scripts.build_version_addition(operation.place, target, column),
        triggers=True,
    )


@Operations.implementation_for(DropVersionTrigger)
def _drop_version_trigger(operations: Operations, operation: DropVersionTrigger) -> None:
    target = operation.target
    _perform(
        operations,
        operation.place,
        lambda connection, place: versions.drop(connection, place, _translate_target(connection, target)),
        migration_scripts.build_version_removal(operation.place, target),
        triggers=True,
    )


@Operations.implementation_for(CreateIndexSafely)
def _create_index(operations: Operations, operation: CreateIndexSafely) -> None:
    if _is_postgresql(operations):
        indexes.create(operations, operation)
    else:
        operations.invoke(indexes.build_plain_operation(operation))


@Operations.implementation_for(DropIndexSafely)
def _drop_index(operations: Operations, operation: DropIndexSafely) -> None:
    ordinary = DropIndexOp(
        operation.index_name, operation.table_name, schema=operation.schema, if_exists=True, **operation.kw
    )
    with indexes.leave_transaction(operations) if _is_postgresql(operations) else nullcontext():
        operations.invoke(ordinary)


def _is_postgresql(operations: Operations) -> bool:
    return operations.migration_context.dialect.name == "postgresql"
