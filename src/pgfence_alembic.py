"""Alembic's plugin, with the directives of `op`, and a comparison for autogenerate that env.py can select.

Alembic loads entry points while it is only half imported, also in programs that never use pgfence. This module is therefore
outside the package, imports nothing from pgfence or Alembic until something is used, and logs errors instead of raising them.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from alembic.autogenerate.api import AutogenContext
    from alembic.operations import Operations
    from alembic.operations.ops import UpgradeOps
    from alembic.runtime.plugins import Plugin
    from alembic.util import PriorityDispatchResult

__all__ = ["Directives", "setup"]

_log = logging.getLogger("pgfence.migrations")

_UNASKED = "alembic.autogenerate.pgfence"
"""A name that matches the pattern that Alembic uses if env.py lists no plugins."""


class Directives:
    """The operations `op.<name>(...)` of a migration.

    Each of them raises ValueError if a schema is empty, or if the prefix is longer than 40 bytes, and TypeError if an argument has
    the wrong type. In autocommit, for example in `autocommit_block()`, all of them except those on indexes raise
    TransactionStateError. On a server older than PostgreSQL 14, these operations raise UnsupportedServerError.
    """

    @classmethod
    def create_pgfence(
        cls, operations: Operations, *, schema: str | None = None, prefix: str = "pgfence_", version: int | None = None
    ) -> None:
        """Create pgfence's tables and functions if they do not exist, in the transaction of the migration.

        Args:
            operations: `op` itself.
            schema: the schema, which is created if it does not exist. None means the schema in which the search path finds an
                installation, or otherwise the first schema of the search path.
            prefix: prefix of the names of tables and functions.
            version: the version of the tables and functions, so that the migration does the same with a later release. None
                means the newest version.

        Raises:
            ValueError: this release does not know the version.
            SchemaError: this role may not create them, or existing ones differ from what pgfence creates.
        """
        ours = _operations()
        operations.invoke(ours.CreatePgfence(schema, prefix, ours.VERSION if version is None else version))

    @classmethod
    def drop_pgfence(cls, operations: Operations, *, schema: str | None = None, prefix: str = "pgfence_") -> None:
        """Drop pgfence's tables and functions with all their rows. Missing tables or functions are not an error.

        If they are created again, tokens start at 1, and idempotency keys and finished slots are forgotten.

        Args:
            operations: `op` itself.
            schema: their schema; None means the first schema of the search path.
            prefix: prefix of their names.

        Raises:
            SchemaError: a table is still fenced, a lease or a key is held, this role does not own them, or, without `schema`,
                the search path finds them in a schema other than its first one.
        """
        operations.invoke(_operations().DropPgfence(schema, prefix))

    @classmethod
    def upgrade_pgfence(
        cls, operations: Operations, from_: int, to: int, *, schema: str | None = None, prefix: str = "pgfence_"
    ) -> None:
        """Upgrade or downgrade pgfence's tables and functions from one version to another.

        A downgrade drops what the newer version has added, with all its rows.

        Args:
            operations: `op` itself.
            from_: the version before the migration.
            to: the version after the migration.
            schema: their schema.
            prefix: prefix of their names.

        Raises:
            ValueError: this release does not know one of the versions.
            SchemaError: the tables are missing, this role does not own them, or a key that would be dropped has a running
                attempt.
        """
        operations.invoke(_operations().UpgradePgfence(from_, to, schema, prefix))

    @classmethod
    def add_fence(
        cls,
        operations: Operations,
        table: str,
        *,
        resource: str,
        namespace: str = "",
        schema: str | None = None,
        pgfence_schema: str | None = None,
        prefix: str = "pgfence_",
    ) -> None:
        """Make a table reject every write of a transaction that has not entered the gate of its resource.

        This works like `pgfence.schema.add_fence`, with the settings of `configure` as arguments. A fence of another resource
        is replaced. The separate fence of a partition is merged with that of its parent, and is dropped with it.

        The table and its partitions (in a repeated call, only those whose fence is incomplete) are locked in SHARE ROW
        EXCLUSIVE mode. The lock waits for the transactions that have written to them, and new writers wait behind it, for at
        most the session's `lock_timeout` (`DDL_WAIT` in pgfence's templates). The mode is ACCESS EXCLUSIVE, which also blocks
        readers, if a resource for the whole table replaces one for each row, and in a script (`--sql`) if a fence exists.

        Args:
            operations: `op` itself.
            table: name of the table.
            resource: the fenced resource; with columns in braces ("close:{book}") each row has its own.
            namespace: the namespace that the programs that write to the table pass to `configure`.
            schema: schema of the table.
            pgfence_schema: schema of pgfence's functions.
            prefix: prefix of their names.

        Raises:
            ValueError: the table or a column does not exist, the table is a view, the resource cannot be used, a partitioned
                table and one of its partitions would have different resources, or the table has another trigger with the
                fence's name.
            SchemaError: pgfence's functions are missing, or this role may not create a trigger.
        """
        made = _operations().AddFence(
            table, resource=resource, namespace=namespace, schema=schema, pgfence_schema=pgfence_schema, prefix=prefix
        )
        operations.invoke(made)

    @classmethod
    def drop_fence(
        cls,
        operations: Operations,
        table: str,
        *,
        schema: str | None = None,
        pgfence_schema: str | None = None,
        prefix: str = "pgfence_",
    ) -> None:
        """Drop the fence of a table. A missing fence is not an error. A partition keeps the fence of its parent.

        The table and its partitions are locked in ACCESS EXCLUSIVE mode: the lock waits for the transactions that have read or
        written them, and new readers and writers wait behind it, for at most the session's `lock_timeout` (`DDL_WAIT` in
        pgfence's templates).

        Args:
            operations: `op` itself.
            table: name of the table.
            schema: schema of the table.
            pgfence_schema: schema of pgfence's functions.
            prefix: prefix of their names.

        Raises:
            ValueError: the table does not exist or is a view, or its trigger of that name is not a fence of pgfence.
            SchemaError: this role does not own the table.
        """
        made = _operations().DropFence(table, schema=schema, pgfence_schema=pgfence_schema, prefix=prefix)
        operations.invoke(made)

    @classmethod
    def add_version_trigger(
        cls,
        operations: Operations,
        table: str,
        *,
        column: str = "version",
        schema: str | None = None,
        pgfence_schema: str | None = None,
        prefix: str = "pgfence_",
    ) -> None:
        """Make the server increment the version of each row on every UPDATE, whichever program sends it.

        This works like `pgfence.schema.add_version_trigger`, with the settings of `configure` as arguments. pgfence's tables
        are not needed. Partitions are covered. Tables that inherit from this one with INHERITS are not covered. Each of them
        needs a separate trigger. Without it, an UPDATE of that table's rows, even through the parent table, does not change
        their version.

        Unless the trigger exists, the table and its partitions are locked in SHARE ROW EXCLUSIVE mode: the lock waits for the
        transactions that have written to them, and new writers wait behind it, for at most the session's `lock_timeout`
        (`DDL_WAIT` in pgfence's templates). The mode is ACCESS EXCLUSIVE, which also blocks readers, if the trigger replaces
        one for another column or a disabled one.

        Args:
            operations: `op` itself.
            table: name of the table.
            column: name of the version column.
            schema: schema of the table.
            pgfence_schema: schema in which the trigger's function is created.
            prefix: prefix of its name.

        Raises:
            ValueError: the table or the column does not exist, the column is not an integer, the table is a partition whose
                parent counts in another column, or the table has another trigger with that name.
            SchemaError: the column is nullable, this role does not own the table, or it may not create the function.
        """
        options = {"column": column, "schema": schema, "pgfence_schema": pgfence_schema, "prefix": prefix}
        operations.invoke(_operations().AddVersionTrigger(table, **options))

    @classmethod
    def drop_version_trigger(
        cls,
        operations: Operations,
        table: str,
        *,
        column: str = "version",
        schema: str | None = None,
        pgfence_schema: str | None = None,
        prefix: str = "pgfence_",
    ) -> None:
        """Drop the version trigger of a table.

        A missing trigger is not an error. A partition keeps the trigger of its parent. The trigger's function is kept, because
        other tables may use it.

        The table and its partitions are locked in ACCESS EXCLUSIVE mode: the lock waits for the transactions that have read or
        written them, and new readers and writers wait behind it, for at most the session's `lock_timeout` (`DDL_WAIT` in
        pgfence's templates).

        Args:
            operations: `op` itself.
            table: name of the table.
            column: name of the version column.
            schema: schema of the table.
            pgfence_schema: schema of the trigger's function.
            prefix: prefix of its name.

        Raises:
            ValueError: the table does not exist, or its trigger of that name is not a version trigger of pgfence.
            SchemaError: this role does not own the table.
        """
        options = {"column": column, "schema": schema, "pgfence_schema": pgfence_schema, "prefix": prefix}
        operations.invoke(_operations().DropVersionTrigger(table, **options))

    @classmethod
    def create_index_safely(
        cls,
        operations: Operations,
        index_name: str,
        table_name: str,
        columns: Sequence[Any],
        *,
        schema: str | None = None,
        unique: bool = False,
        **kw: Any,
    ) -> None:
        """Create an index with CONCURRENTLY, without blocking writers. It can be repeated after an interrupted build.

        An INVALID index of that name, which a failed or killed build leaves behind, is dropped first. A valid index is kept if
        it is the same as the wanted one. To compare the two, PostgreSQL describes the wanted index on an empty temporary table
        of the same name and columns, with method, columns, expressions, order, predicate and options, but not the tablespace.
        An index whose text also contains the schema (`shop.entry.id`), or passes the row to a function of the table's type,
        cannot be created on that table. It counts as the same only if it is written exactly as PostgreSQL writes it, which the
        error quotes.

        A script (`--sql`) drops an invalid index without CONCURRENTLY, so readers and writers wait for a moment, and accepts
        any other index of that name as the wanted index.

        Earlier steps of the migration are committed first, because CONCURRENTLY runs outside a transaction. The build waits for
        older transactions without a limit, regardless of `lock_timeout`, because no reader or writer waits behind it.
        `statement_timeout` does end it.

        Args:
            operations: `op` itself.
            index_name: the name of the index.
            table_name: the name of the table.
            columns: column names, or `sqlalchemy.text` for expressions.
            schema: schema of table and index.
            unique: whether to create a unique index.
            **kw: further arguments of `op.create_index`, such as postgresql_where.

        Raises:
            ValueError: another object, or an index that differs or cannot be compared, has that name; `columns` is empty; or the
                table is partitioned, where PostgreSQL does not support CONCURRENTLY.
            TransactionStateError: Alembic did not start the transaction, for example because the Connection was already in one.
        """
        made = _operations().CreateIndexSafely(index_name, table_name, columns, schema=schema, unique=unique, **kw)
        operations.invoke(made)

    @classmethod
    def drop_index_safely(
        cls, operations: Operations, index_name: str, table_name: str | None = None, *, schema: str | None = None
    ) -> None:
        """Drop an index with CONCURRENTLY, without blocking writers. A missing index is not an error.

        Args:
            operations: `op` itself.
            index_name: the name of the index.
            table_name: the name of the table.
            schema: schema of the index.

        Raises:
            TransactionStateError: Alembic did not start the transaction.
        """
        operations.invoke(_operations().DropIndexSafely(index_name, table_name, schema=schema))


def setup(plugin: Plugin) -> None:
    """Register the directives and the comparison. Alembic calls this."""
    try:
        _register(plugin)
    except Exception:  # noqa: BLE001
        _log.warning("pgfence's operations could not be registered", exc_info=True)


def _register(plugin: Plugin) -> None:
    from alembic.operations import Operations
    from alembic.util import DispatchPriority

    for name in vars(Directives):
        if not name.startswith("_"):
            Operations.register_operation(name)(Directives)
    unasked = type(plugin)(_UNASKED)
    for wanted, compare, dialect in ((plugin, _compare, "default"), (unasked, _remind, "postgresql")):
        wanted.add_autogenerate_comparator(
            compare, "schema", "pgfence", qualifier=dialect, priority=DispatchPriority.LAST
        )


def _operations() -> Any:
    _enable_log()
    from pgfence._alembic import implementations, operations, renderers  # noqa: F401

    return operations


def _enable_log() -> None:
    # The env.py of `alembic init` calls fileConfig(), which disables every logger that alembic.ini does not list.
    _log.disabled = False


def _compare(context: AutogenContext, ops: UpgradeOps, _schemas: set[str | None]) -> PriorityDispatchResult:
    _operations()
    from pgfence._alembic.comparison import compare

    return compare(context, ops)


def _remind(context: AutogenContext, ops: UpgradeOps, _schemas: set[str | None]) -> PriorityDispatchResult:
    from alembic.util import PriorityDispatchResult

    named = context.opts.get("autogenerate_plugins") or ()
    ours = _includes_our_tables({str(getattr(op, "table_name", "")) for op in ops.ops})
    if "pgfence" not in named and (ours or any(_concerns_us(table) for table in context.sorted_tables)):
        _enable_log()
        _log.warning(
            "pgfence's tables and triggers are not compared correctly: add"
            ' autogenerate_plugins=["alembic.autogenerate.*", "pgfence"] to context.configure() in env.py'
        )
    return PriorityDispatchResult.CONTINUE


def _includes_our_tables(tables: set[str]) -> bool:
    """Return whether these include pgfence's tables: by the default prefix, or as a complete installation with another one."""
    if any(table.startswith("pgfence_") for table in tables):
        return True
    prefixes = [table.removesuffix("schema_version") for table in tables if table.endswith("schema_version")]
    return any({f"{prefix}gate", f"{prefix}lease"} <= tables for prefix in prefixes)


def _concerns_us(table: Any) -> bool:
    marks = (table.info, *(column.info for column in table.columns))
    return any(str(key).startswith("pgfence") for mark in marks for key in mark)


class _Module(ModuleType):
    """This module, which Alembic 1.18.0 to 1.20.0 iterates over before it calls `setup` of each module that it gets."""

    def __iter__(self) -> Iterator[ModuleType]:
        return iter((self,))


sys.modules[__name__].__class__ = _Module
