"""Autogenerate: compare the models with the database, and add operations in an order that can be reversed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from alembic.operations.ops import CreateTableOp, DropTableOp, ModifyTableOps
from alembic.util import CommandError, PriorityDispatchResult
from sqlalchemy import MetaData

from pgfence._alembic.models import fence_of, join_resource, place_of_own, version_of
from pgfence._alembic.operations import AddFence, AddVersionTrigger, CreatePgfence, TableOptions, UpgradePgfence
from pgfence._ddl import migration_scripts
from pgfence._sql import columns, tables
from pgfence._sql.storage import VERSION, TableNames, table_names_of
from pgfence.config import config_of
from pgfence.keys import SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import MigrateOperation, UpgradeOps
    from sqlalchemy import Connection

    Key: TypeAlias = tuple[str | None, str]
    Guard: TypeAlias = AddFence | AddVersionTrigger
    Guards: TypeAlias = dict[tuple[str, Key], Guard]


class _Found(NamedTuple):
    """A guard (fence or version trigger) of a table: whether it is effective, and whether the table inherited it."""

    guard: Guard
    holds: bool
    copied: bool


def compare(context: AutogenContext, ops: UpgradeOps) -> PriorityDispatchResult:
    """Add operations that create what is missing and drop guards that no model declares.

    pgfence's own tables are not created or dropped one by one.
    """
    own = {_place(context, place) for table in context.sorted_tables if (place := place_of_own(table)) is not None}
    if context.dialect.name != "postgresql":
        # The operations do nothing on other databases.
        ours = _list_tables(context, own)
        ops.ops[:] = [op for op in ops.ops if _find_table_key(context, op) not in ours]
        return PriorityDispatchResult.CONTINUE
    connection = context.connection
    assert connection is not None
    home = _find_home(_place(context, table_names_of(connection)), own)
    wanted = {_identify(context, guard): guard for guard in _list_wanted(context, connection, home)}
    standing = {
        _identify(context, found.guard): found
        for found in _list_found(context, connection, home)
        if _is_concerned(context, found.guard, ops)
    }
    everywhere = own | {home} | {_place(context, place) for place in migration_scripts.find_installations(connection)}
    _remove_our_tables(context, ops, everywhere)
    for place in sorted(own | {home}, key=str):
        needed = place in own or any(isinstance(guard, AddFence) for guard in wanted.values())
        if needed and (making := _find_creation(connection, place, whole=place in own)) is not None:
            if isinstance(making, UpgradePgfence):
                _remove_changes(context, ops, place)
            # pgfence's tables are created first, because other tables may refer to them.
            ops.ops.insert(0, making)
    # The operations that drop guards come first, and those that add guards come last. A guard is dropped before its table, so the
    # reversed migration creates the table first and then adds the guard.
    for name, found in sorted(standing.items(), key=str):
        if not found.copied and (name not in wanted or wanted[name].definition != found.guard.definition):
            ops.ops.insert(0, found.guard.reverse())
    for name, guard in sorted(wanted.items(), key=str):
        if name not in standing or not standing[name].holds or standing[name].guard.definition != guard.definition:
            ops.ops.append(guard)
    return PriorityDispatchResult.CONTINUE


def _find_home(configured: TableNames, own: set[TableNames]) -> TableNames:
    """Return the installation that guards belong to: the configured one or, by default, the only one among the models."""
    return next(iter(own)) if configured == TableNames() and len(own) == 1 else configured


def _place(context: AutogenContext, place: TableNames) -> TableNames:
    return TableNames(_key_of(context, place.schema, "")[0], place.prefix)


def _key_of(context: AutogenContext, schema: str | None, table: str) -> Key:
    return None if schema == context.dialect.default_schema_name else schema, table


def _identify(context: AutogenContext, guard: Guard) -> tuple[str, Key]:
    """Return the kind of a guard and its table; a table has at most one guard of each kind."""
    return type(guard).__name__, _key_of(context, guard.target.schema, guard.target.name)


def _list_wanted(context: AutogenContext, connection: Connection, home: TableNames) -> Iterator[Guard]:
    namespace = config_of(connection).namespace
    for table in context.sorted_tables:
        if not context.run_object_filters(table, table.name, "table", False, None):
            continue
        schema = _key_of(context, table.schema, table.name)[0]
        where: TableOptions = {"schema": schema, "pgfence_schema": home.schema, "prefix": home.prefix}
        try:
            if (resource := fence_of(table)) is not None:
                yield AddFence(table.name, resource=resource, namespace=namespace, **where)
            if (column := version_of(table)) is not None:
                yield AddVersionTrigger(table.name, column=column, **where)
        except (TypeError, ValueError) as error:
            raise CommandError(
                f"the fence or version trigger that table {str(table)!r} declares cannot be created: {error}"
            ) from error


def _list_found(context: AutogenContext, connection: Connection, home: TableNames) -> Iterator[_Found]:
    settled = tables.resolve_schema(connection, home).schema
    for fence in migration_scripts.list_fences(connection, home.prefix):
        namespace, separator, rest = fence.parts[0].rpartition(SEPARATOR)
        resource = join_resource((rest, *fence.parts[1:]) if separator else fence.parts)
        # A fence of another installation counts as different, and reversing the change restores that fence.
        functions = home.schema if fence.functions == settled else _key_of(context, fence.functions, "")[0]
        where: TableOptions = {"schema": fence.schema, "pgfence_schema": functions, "prefix": home.prefix}
        added = AddFence(fence.table, resource=resource, namespace=namespace, **where)
        yield _Found(added, fence.holds, fence.copied)
    for trigger in migration_scripts.list_version_triggers(connection, home):
        where = {"schema": trigger.schema, "pgfence_schema": home.schema, "prefix": home.prefix}
        counting = AddVersionTrigger(trigger.table, column=trigger.column, **where)
        yield _Found(counting, trigger.holds, trigger.copied)


def _is_concerned(context: AutogenContext, guard: Guard, ops: UpgradeOps) -> bool:
    """Return whether the table of a guard is in the models, or is dropped by this migration."""
    key = _key_of(context, guard.target.schema, guard.target.name)
    # The default schema is None, as in the models, because the guard is compared with those of the models.
    guard.target = type(guard.target)(key[1], key[0])
    for table in context.sorted_tables:
        if _key_of(context, table.schema, table.name) == key:
            return context.run_object_filters(table, table.name, "table", False, None)
    return any(isinstance(op, DropTableOp) and _key_of(context, op.schema, op.table_name) == key for op in ops.ops)


def _find_creation(connection: Connection, place: TableNames, *, whole: bool) -> CreatePgfence | UpgradePgfence | None:
    """Return the operation that creates or upgrades an installation, or None if it is complete.

    For fences, an older version of the tables is sufficient.
    """
    if tables.is_installed(connection, place):
        return None
    version = migration_scripts.read_version(connection, tables.resolve_schema(connection, place))
    if version == 0:
        return CreatePgfence(place.schema, place.prefix, VERSION)
    return UpgradePgfence(min(version, VERSION), VERSION, place.schema, place.prefix) if whole else None


def _remove_our_tables(context: AutogenContext, ops: UpgradeOps, places: set[TableNames]) -> None:
    """Remove operations that would create pgfence's tables one by one, or drop tables of pgfence that no model declares."""
    ours = _list_tables(context, places)
    modelled = {_key_of(context, table.schema, table.name) for table in context.sorted_tables}

    def is_kept(op: MigrateOperation) -> bool:
        key = _find_table_key(context, op)
        return key not in ours or (key in modelled and isinstance(op, ModifyTableOps) and key not in made)

    made = {_key_of(context, op.schema, op.table_name) for op in ops.ops if isinstance(op, CreateTableOp)}
    ops.ops[:] = [op for op in ops.ops if is_kept(op)]


def _remove_changes(context: AutogenContext, ops: UpgradeOps, place: TableNames) -> None:
    """Remove changes to pgfence's tables if another operation upgrades them, because the upgrade adds the columns."""
    ours = _list_tables(context, {place})
    ops.ops[:] = [op for op in ops.ops if not (isinstance(op, ModifyTableOps) and _find_table_key(context, op) in ours)]


def _find_table_key(context: AutogenContext, op: MigrateOperation) -> Key | None:
    """Return the table that an operation creates, drops or alters."""
    if isinstance(op, CreateTableOp | DropTableOp | ModifyTableOps):
        return _key_of(context, op.schema, op.table_name)
    return None


def _list_tables(context: AutogenContext, places: set[TableNames]) -> set[Key]:
    return {
        _key_of(context, place.schema, table.name) for place in places for table in columns.define(MetaData(), place)
    }
