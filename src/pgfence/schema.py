"""Create and drop pgfence's tables and server functions, fences and version triggers.

Schema and prefix come from `configure()`, and the engine's `schema_translate_map` is applied to the schema. Without a schema,
pgfence uses the schema in which the search path finds an installation, or otherwise the first schema of the search path.

All functions that take an engine raise `StandbyError` if the server accepts no writes, `UnreachableError` if it did not respond,
and `UnsupportedServerError` if it is not PostgreSQL or is older than PostgreSQL 14, or if the driver is not supported. If the
session's `lock_timeout` ends a wait, they raise SQLAlchemy's own error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, overload

from sqlalchemy import Table, inspect

from pgfence._admin.ddl import drop_unless_fenced, perform
from pgfence._ddl import fences, versions
from pgfence._sql import columns
from pgfence._sql import tables as texts
from pgfence._sql.storage import TableNames, translate_schema
from pgfence.config import config_of, expect_place

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from sqlalchemy import Connection, Engine, MetaData
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    AnyEngine: TypeAlias = Engine | Connection | AsyncEngine | AsyncConnection

__all__ = [
    "add_fence",
    "add_version_trigger",
    "create_all",
    "drop_all",
    "drop_fence",
    "drop_version_trigger",
    "sql",
    "tables",
]


def tables(metadata: MetaData, *, schema: str | None = None, prefix: str = "pgfence_") -> Sequence[Table]:
    """Add pgfence's tables to a MetaData and return them, for migrations that compare it with the database.

    A second call adds nothing. `metadata.create_all()` alone is not sufficient, because it creates neither the functions nor the
    row that contains the version of the tables. Use `create_all` of this module.

    Args:
        metadata: the MetaData to which the tables are added.
        schema: the schema of the tables; None means the schema of the MetaData.
        prefix: the prefix of the tables' names, at most 40 bytes.

    Raises:
        ValueError: the schema is empty, the prefix is too long, or one of them contains NUL.
    """
    expect_place(schema, prefix)
    return columns.define(metadata, TableNames(schema, prefix))


def sql(*, schema: str | None = None, prefix: str = "pgfence_") -> str:
    """Return the SQL script that creates pgfence's tables and functions in one transaction. Running it again changes nothing.

    Without a schema, the tables and functions are created in the first schema of the search path. The functions find the tables
    by the caller's search path, so every writer needs the same search path.

    Args:
        schema: the schema of the tables, which is created if it does not exist.
        prefix: the prefix of the tables' names, at most 40 bytes.

    Raises:
        ValueError: the schema is empty, the prefix is too long, or one of them contains NUL.
    """
    expect_place(schema, prefix)
    return texts.build_script(TableNames(schema, prefix))


@overload
def create_all(engine: AsyncEngine | AsyncConnection) -> Coroutine[Any, Any, None]: ...
@overload
def create_all(engine: Engine | Connection) -> None: ...
def create_all(engine: AnyEngine) -> object:
    """Create the tables and functions that do not exist yet, or upgrade those of an older version.

    A second call changes nothing and needs no CREATE privilege. Several processes may call it at the same time. On a Connection,
    the call is part of the caller's transaction. Existing columns are not altered.

    Args:
        engine: an Engine or Connection, or the async counterpart of either, in which case the result must be awaited.

    Raises:
        SchemaError: this role may not create the tables or functions, or an existing table differs from what pgfence creates.
        TransactionStateError: the Connection is in autocommit.
    """
    return perform(engine, texts.create)


@overload
def drop_all(engine: AsyncEngine | AsyncConnection) -> Coroutine[Any, Any, None]: ...
@overload
def drop_all(engine: Engine | Connection) -> None: ...
def drop_all(engine: AnyEngine) -> object:
    """Drop the tables and functions with all their data. It is not an error if they do not exist.

    Tokens start at 1 again afterwards, so all writers that hold older tokens must have ended. Idempotency keys and finished slots
    are lost, so their work may run again. The schema itself is not dropped.

    Args:
        engine: an Engine or Connection, or the async counterpart of either, in which case the result must be awaited.

    Raises:
        SchemaError: this role does not own the tables or functions, or a table is still fenced. Call `drop_fence` first.
        TransactionStateError: the Connection is in autocommit.
    """
    return perform(engine, drop_unless_fenced)


@overload
def add_fence(
    engine: AsyncEngine | AsyncConnection, table: str | Table | type[object], *, resource: str
) -> Coroutine[Any, Any, None]: ...
@overload
def add_fence(engine: Engine | Connection, table: str | Table | type[object], *, resource: str) -> None: ...
def add_fence(engine: AnyEngine, table: object, *, resource: str) -> object:
    """Make PostgreSQL reject each write to a table if its transaction has not entered the gate of the table's resource.

    A rejected write raises `FenceRequiredError`, or, on an engine through which pgfence has entered no gate yet, SQLAlchemy's own
    error with SQLSTATE PF002. A repeated call changes nothing. A call with another resource replaces the fence.

    Limitations: the fence does not stop a superuser who disables triggers, or the apply process of logical replication. Tables
    that inherit from this one with INHERITS need separate fences. Partitions are covered, but a new partition can be truncated
    until `add_fence` is called again.

    The table and its partitions (in a repeated call, only those whose fence is incomplete) are locked in SHARE ROW EXCLUSIVE
    mode. The call waits for transactions that have written to them, at most for the session's `lock_timeout` (by default, without
    limit), and new writers wait for the call. The mode is ACCESS EXCLUSIVE, which also blocks readers, only if a resource for the
    whole table replaces one for each row.

    Args:
        engine: an Engine or Connection, or the async counterpart of either, in which case the result must be awaited. The role
            must own the table.
        table: a name (or schema.name), a Table, or a mapped class; with joined inheritance, the class's own table.
        resource: the name that is fenced, in the configured namespace, like the name of a lease. With columns in braces
            ("close:{book}"), each row has its own resource, and TRUNCATE is always rejected. The columns may be text, integer,
            uuid, date or enum; a row with NULL in one of them is rejected.

    Raises:
        ValueError: the table or a column does not exist, the table is a view, the resource cannot be used, a partitioned table and
            one of its partitions would have different resources, or the table has an unrelated trigger with the fence's name.
        TypeError: the table or the resource has the wrong type.
        SchemaError: pgfence's functions are missing, or this role does not own the table.
        TransactionStateError: the Connection is in autocommit.
    """
    parts = fences.parts_of(resource, config_of(engine).namespace)
    target = _resolve_target(engine, table)
    return perform(engine, lambda connection, place: fences.add(connection, place, target, parts), triggers=True)


@overload
def drop_fence(
    engine: AsyncEngine | AsyncConnection, table: str | Table | type[object]
) -> Coroutine[Any, Any, None]: ...
@overload
def drop_fence(engine: Engine | Connection, table: str | Table | type[object]) -> None: ...
def drop_fence(engine: AnyEngine, table: object) -> object:
    """Remove the fence from a table. It is not an error if there is no fence. A partition keeps the fence of its parent.

    The table and its partitions are locked in ACCESS EXCLUSIVE mode. The call waits for transactions that have read or written
    them, at most for the session's `lock_timeout` (by default, without limit), and new readers and writers wait for the call.

    Args:
        engine: an Engine or Connection, or the async counterpart of either, in which case the result must be awaited.
        table: the same as for `add_fence`.

    Raises:
        ValueError: the table does not exist or is a view, or it has an unrelated trigger with the fence's name.
        TypeError: `table` is not a name, a Table or a mapped class.
        SchemaError: this role does not own the table.
        TransactionStateError: the Connection is in autocommit.
    """
    target = _resolve_target(engine, table)
    return perform(engine, lambda connection, place: fences.drop(connection, place, target), triggers=True)


@overload
def add_version_trigger(
    engine: AsyncEngine | AsyncConnection, table: str | Table | type[object]
) -> Coroutine[Any, Any, None]: ...
@overload
def add_version_trigger(engine: Engine | Connection, table: str | Table | type[object]) -> None: ...
def add_version_trigger(engine: AnyEngine, table: object) -> object:
    """Add the trigger that increments the version of each row of a table, for `__version_mode__ = "server"`.

    Every UPDATE of a row adds 1, including those of upserts, of plain SQL and of other programs. A value that a statement assigns
    to the column is ignored. A repeated call changes nothing. The trigger needs none of pgfence's tables, only a function, which
    this call creates in the schema that `create_all` uses.

    Limitations: the trigger does not count changes by a superuser who disables triggers, or by the apply process of logical
    replication. Tables that inherit from this one with INHERITS need separate triggers. Partitions are covered.

    Unless the trigger exists, the table and its partitions are locked in SHARE ROW EXCLUSIVE mode. The call waits for
    transactions that have written to them, at most for the session's `lock_timeout` (by default, without limit), and new writers
    wait for the call. The mode is ACCESS EXCLUSIVE, which also blocks readers, if the call replaces a trigger for another column or
    a disabled one.

    Args:
        engine: an Engine or Connection, or the async counterpart of either, in which case the result must be awaited. The role
            must own the table. Unless the function exists, the role also needs the CREATE privilege on the schema of pgfence's
            tables, or on the first schema of the search path.
        table: a name (or schema.name), a Table, or a mapped class. With joined inheritance, pass the base class, whose table has
            the version. An UPDATE of another table alone does not increment the version. If `table` is a name, or a Table that
            does not belong to a class with the mixin, it must have a column `version`.

    Raises:
        ValueError: the table or the column does not exist, the column is not an integer, the table is a partition whose parent
            counts in another column, or the table has an unrelated trigger of the same name.
        TypeError: `table` is not a name, a Table or a mapped class.
        SchemaError: the column is nullable, and `command` contains the statements that fix it; or this role does not own the
            table, or may not create the function.
        TransactionStateError: the Connection is in autocommit.
    """
    target, column = _resolve_target(engine, table), _find_version_column(table)
    return perform(engine, lambda connection, place: versions.add(connection, place, target, column), triggers=True)


@overload
def drop_version_trigger(
    engine: AsyncEngine | AsyncConnection, table: str | Table | type[object]
) -> Coroutine[Any, Any, None]: ...
@overload
def drop_version_trigger(engine: Engine | Connection, table: str | Table | type[object]) -> None: ...
def drop_version_trigger(engine: AnyEngine, table: object) -> object:
    """Drop the version trigger of a table. A missing trigger is not an error. A partition keeps the trigger of its parent.

    The function remains, because other tables may use it. The table and its partitions are locked in ACCESS EXCLUSIVE mode. The
    call waits for transactions that have read or written them, at most for the session's `lock_timeout` (by default, without
    limit), and new readers and writers wait for the call.

    Args:
        engine: an Engine or Connection, or the async counterpart of either, in which case the result must be awaited.
        table: the same as for `add_version_trigger`.

    Raises:
        ValueError: the table does not exist, or it has an unrelated trigger of the same name.
        TypeError: `table` is not a name, a Table or a mapped class.
        SchemaError: this role does not own the table.
        TransactionStateError: the Connection is in autocommit.
    """
    target = _resolve_target(engine, table)
    return perform(engine, lambda connection, place: versions.drop(connection, place, target), triggers=True)


def _table_of(given: object) -> Table | None:
    found = given if isinstance(given, Table) else getattr(inspect(given, raiseerr=False), "local_table", None)
    return found if isinstance(found, Table) else None


def _find_version_column(table: object) -> str:
    """Return the name of the column that the mixin created, or else "version"."""
    found = _table_of(table)
    columns = () if found is None else found.columns
    return next((column.name for column in columns if "pgfence_version" in column.info), "version")


def _resolve_target(engine: AnyEngine, table: object) -> fences.Target:
    if isinstance(table, str):
        before, _, name = table.rpartition(".")
        return fences.Target(name, translate_schema(engine, before or None))
    found = _table_of(table)
    if found is None:
        raise TypeError(f"the table must be a name, a Table or a mapped class, not {table!r}")
    return fences.Target(found.name, translate_schema(engine, found.schema))
