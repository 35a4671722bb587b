"""What Alembic loads of pgfence in every command: the directives of `op`, and a comparison that env.py may ask for.

Entry points are loaded while `alembic` is half imported, in programs that may never use pgfence. So this module stands beside
the package, imports nothing of it or of Alembic until something is used, and whatever goes wrong is logged and not raised.
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
"""Within the pattern that Alembic takes where env.py names no plugins."""


class Directives:
    """What stands in a migration as `op.<name>(...)`."""

    @classmethod
    def create_pgfence(
        cls, operations: Operations, *, schema: str | None = None, prefix: str = "pgfence_", version: int | None = None
    ) -> None:
        """Make pgfence's tables and functions, where they are not there yet; part of the transaction of the migration.

        Args:
            operations: `op` itself.
            schema: made if it is missing; None takes the one where the search path finds an installation, which is then
                left as it is, and otherwise the first one of the search path.
            prefix: of the names of tables and functions.
            version: of tables and functions, so that the migration does the same with a later release; None: the newest.

        Raises:
            ValueError: this release knows no such version, the schema is empty or the prefix too long.
            SchemaError: this role may not make them, or what is there is not as pgfence made it.
        """
        ours = _operations()
        operations.invoke(ours.CreatePgfence(schema, prefix, ours.VERSION if version is None else version))

    @classmethod
    def drop_pgfence(cls, operations: Operations, *, schema: str | None = None, prefix: str = "pgfence_") -> None:
        """Drop pgfence's tables and functions with all that is in them; what is not there is no error.

        Tokens start again at 1 after that, and idempotency keys and finished slots are forgotten.

        Args:
            operations: `op` itself.
            schema: where they are; None takes the first one of the search path.
            prefix: of their names.

        Raises:
            SchemaError: a table is still fenced, a lease or a key is held, this role does not own them, or without a schema
                the search path finds them in another than its first one.
        """
        operations.invoke(_operations().DropPgfence(schema, prefix))

    @classmethod
    def upgrade_pgfence(
        cls, operations: Operations, from_: int, to: int, *, schema: str | None = None, prefix: str = "pgfence_"
    ) -> None:
        """Bring pgfence's tables and functions from one version to another, in either direction.

        On the way down what the newer version has added is dropped with all that is in it.

        Args:
            operations: `op` itself.
            from_: the version they have.
            to: the version they shall have.
            schema: where they are.
            prefix: of their names.

        Raises:
            ValueError: this release does not know one of the versions.
            SchemaError: there are none, or what would be dropped is in use: an attempt is at work under a key.
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
        """Let a table refuse every write of a transaction that has not entered the gate of its resource.

        As `pgfence.schema.add_fence`, with what `configure` says written out. A fence of another resource is replaced. The
        fence that a partition had by itself becomes one with that of its parent, and goes with it.

        The table and its partitions, called again only those that lack something, are locked in SHARE ROW EXCLUSIVE mode:
        this waits for the transactions that have written there, and who writes waits behind it, as long as the session's
        `lock_timeout` lets it (`DDL_WAIT` in pgfence's templates). In ACCESS EXCLUSIVE mode, which readers feel too, where a
        resource for the whole table takes the place of one for each row, and in a script (`--sql`) where a fence is there.

        Args:
            operations: `op` itself.
            table: its name.
            resource: what is fenced; with columns in braces ("close:{book}") each row has its own.
            namespace: what programs that write there give to `configure`.
            schema: of the table.
            pgfence_schema: of pgfence's functions.
            prefix: of their names.

        Raises:
            ValueError: there is no such table or column, the resource cannot be used, a table of partitions and one of
                these would have different ones, or the table has a trigger of somebody else's with the fence's name.
            SchemaError: pgfence's functions are missing, or this role may not make a trigger.
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
        """Take the fence off a table; none there is no error, and a partition keeps the one of its parent.

        The table and its partitions are locked in ACCESS EXCLUSIVE mode: this waits for the transactions that have read or
        written there, and who reads or writes waits behind it, as long as the session's `lock_timeout` lets it (`DDL_WAIT` in
        pgfence's templates).

        Args:
            operations: `op` itself.
            table: its name.
            schema: of the table.
            pgfence_schema: of pgfence's functions.
            prefix: of their names.

        Raises:
            ValueError: there is no such table, or its trigger of that name is somebody else's.
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
        """Let the server count the version of each row of a table, whoever updates it.

        As `pgfence.schema.add_version_trigger`, with what `configure` says written out. None of pgfence's tables is needed.
        Partitions are covered. Tables that inherit from this one by INHERITS are not: each wants a trigger of its own, or an
        UPDATE of their rows, also by this table's name, counts nothing.

        Unless the trigger is there, the table and its partitions are locked in SHARE ROW EXCLUSIVE mode: this waits for the
        transactions that have written there, and who writes waits behind it, as long as the session's `lock_timeout` lets it
        (`DDL_WAIT` in pgfence's templates). In ACCESS EXCLUSIVE mode, which readers feel too, where it takes the place of one
        of another column or of one switched off.

        Args:
            operations: `op` itself.
            table: its name.
            column: that holds the version.
            schema: of the table.
            pgfence_schema: where the trigger's function is made.
            prefix: of its name.

        Raises:
            ValueError: there is no such table or column, the column holds no integers, or the table has a trigger of
                somebody else's with that name.
            SchemaError: the column takes NULL, or this role may not make function or trigger.
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
        """Take the version trigger off a table; none there is no error. Its function stays: other tables may use it.

        The table and its partitions are locked in ACCESS EXCLUSIVE mode: this waits for the transactions that have read or
        written there, and who reads or writes waits behind it, as long as the session's `lock_timeout` lets it (`DDL_WAIT` in
        pgfence's templates).

        Args:
            operations: `op` itself.
            table: its name.
            column: that held the version.
            schema: of the table.
            pgfence_schema: where the trigger's function is.
            prefix: of its name.

        Raises:
            ValueError: there is no such table, or its trigger of that name is somebody else's.
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
        """Build an index with CONCURRENTLY, beside running writers. It may be repeated after a build that was cut off.

        An INVALID index of that name, which a build leaves behind that failed or was killed, is dropped first. A valid one stays
        if it is the same: an empty temporary table of the same name and columns shows how PostgreSQL describes the wanted index,
        with method, columns, expressions, order, predicate and options, but not the tablespace. An index whose text also names
        the schema (`shop.entry.id`), or passes the row to a function of the table's type, cannot be built there. It is the same
        only if it is written in PostgreSQL's own words, which the error quotes.

        A script (`--sql`) drops an invalid one too, and takes any other of that name for the wanted one. What the migration did
        before is committed: CONCURRENTLY runs outside of a transaction. It waits for older transactions as long as it takes,
        whatever `lock_timeout` says: nobody who reads or writes waits behind it. `statement_timeout` does end it.

        Args:
            operations: `op` itself.
            index_name: the name of the index.
            table_name: the name of the table.
            columns: names, or `sqlalchemy.text` for expressions.
            schema: of both.
            unique: a unique index.
            **kw: as for `op.create_index`, e.g. postgresql_where.

        Raises:
            ValueError: something else has that name, or an index that differs or cannot be compared; or the table is one of
                partitions, where PostgreSQL has no CONCURRENTLY.
            TransactionStateError: the transaction is none of Alembic's, as with a Connection that is in one already.
        """
        made = _operations().CreateIndexSafely(index_name, table_name, columns, schema=schema, unique=unique, **kw)
        operations.invoke(made)

    @classmethod
    def drop_index_safely(
        cls, operations: Operations, index_name: str, table_name: str | None = None, *, schema: str | None = None
    ) -> None:
        """Drop an index with CONCURRENTLY, beside running writers; none there is no error.

        Args:
            operations: `op` itself.
            index_name: the name of the index.
            table_name: the name of the table.
            schema: of the index.

        Raises:
            TransactionStateError: the transaction is none of Alembic's.
        """
        operations.invoke(_operations().DropIndexSafely(index_name, table_name, schema=schema))


def setup(plugin: Plugin) -> None:
    """Register the directives and the comparison; called by Alembic."""
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
    from pgfence._alembic import implementations, operations, renderers  # noqa: F401

    return operations


def _compare(context: AutogenContext, ops: UpgradeOps, _schemas: set[str | None]) -> PriorityDispatchResult:
    _operations()
    from pgfence._alembic.comparison import compare

    return compare(context, ops)


def _remind(context: AutogenContext, ops: UpgradeOps, _schemas: set[str | None]) -> PriorityDispatchResult:
    from alembic.util import PriorityDispatchResult

    named = context.opts.get("autogenerate_plugins") or ()
    ours = _has_ours({str(getattr(op, "table_name", "")) for op in ops.ops})
    if "pgfence" not in named and (ours or any(_concerns_us(table) for table in context.sorted_tables)):
        _log.warning(
            "tables and triggers of pgfence are compared wrongly or not at all: add"
            ' autogenerate_plugins=["alembic.autogenerate.*", "pgfence"] to context.configure() in env.py'
        )
    return PriorityDispatchResult.CONTINUE


def _has_ours(tables: set[str]) -> bool:
    """Return whether there are tables of ours: by the usual prefix, or those of a whole installation with another one."""
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
