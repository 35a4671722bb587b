"""Create and drop pgfence's tables and server functions, or print them as a script.

Schema and prefix are those of `configure()`, with the engine's `schema_translate_map` on top. Without a schema, pgfence uses
the one where the search path finds an installation, or else the first one of the search path.
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

    A second call adds nothing. `metadata.create_all()` creates these tables without the functions and the version, so it is
    not enough. `create_all` of this module creates the rest.

    Args:
        metadata: the MetaData to which they are added.
        schema: of the tables; None takes the one of the MetaData.
        prefix: of their names.

    Raises:
        ValueError: the schema is empty or the prefix too long.
    """
    expect_place(schema, prefix)
    return columns.define(metadata, TableNames(schema, prefix))


def sql(*, schema: str | None = None, prefix: str = "pgfence_") -> str:
    """Return the script that creates tables and functions in one transaction; running it again changes nothing.

    Without a schema both are created in the first schema of the search path, and the functions find the tables by the
    caller's search path: every writer needs the same one.

    Args:
        schema: created if it is missing.
        prefix: of the names.

    Raises:
        ValueError: the schema is empty or the prefix too long.
    """
    expect_place(schema, prefix)
    return texts.build_script(TableNames(schema, prefix))


@overload
def create_all(engine: AsyncEngine | AsyncConnection) -> Coroutine[Any, Any, None]: ...
@overload
def create_all(engine: Engine | Connection) -> None: ...
def create_all(engine: AnyEngine) -> object:
    """Create tables and functions that do not exist yet.

    A second call changes nothing and needs no CREATE privilege; several processes may call it at the same time. On a
    Connection it is part of the caller's transaction. Existing tables that differ are not altered.

    Args:
        engine: an Engine or Connection, or an async one: then await it.

    Raises:
        SchemaError: this role may not create them, or an existing table is not as pgfence creates it.
        TransactionStateError: the Connection is in autocommit.
        StandbyError: the server accepts no writes.
        UnreachableError: the server did not respond.
        UnsupportedServerError: it is not PostgreSQL, older than 14, or the driver is unknown.
    """
    return perform(engine, texts.create)


@overload
def drop_all(engine: AsyncEngine | AsyncConnection) -> Coroutine[Any, Any, None]: ...
@overload
def drop_all(engine: Engine | Connection) -> None: ...
def drop_all(engine: AnyEngine) -> object:
    """Drop tables and functions with all their data. It is not an error if they do not exist.

    Tokens start at 1 again after that, so all writers that hold older ones must have ended. Idempotency keys and finished
    slots are lost, so their work may run again. The schema itself is not dropped.

    Args:
        engine: an Engine or Connection, or an async one: then await it.

    Raises:
        SchemaError: this role does not own them, or a table is still fenced: `drop_fence` first.
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
    """Make PostgreSQL reject every write to a table in a transaction that has not entered the gate of its resource.

    The same call again changes nothing; a call with another resource replaces the fence. Not covered: a superuser who disables
    triggers, the apply process of a logical replication, and tables that inherit from this one by INHERITS, each of which
    needs a separate fence. Partitions are covered; a new one is open to TRUNCATE until this is called again.

    The table and its partitions (in a repeated call only those that lack something) are locked in SHARE ROW EXCLUSIVE mode:
    this waits for transactions that have written there, and new writers wait for it, up to the session's `lock_timeout`; by
    default there is no limit. The mode is ACCESS EXCLUSIVE, which also blocks readers, only when a resource for the whole
    table replaces one for each row.

    Args:
        engine: an Engine or Connection, or an async one: then await it. Only the owner of the table may do it.
        table: a name (or schema.name), a Table, or a mapped class: of one with joined inheritance, the table of its own.
        resource: the name that is fenced; in the configured namespace, as the name of a lease. With columns in braces
            ("close:{book}") each row has its own, and TRUNCATE is always rejected. They may be text, integer, uuid, date
            or enum columns; a row with NULL in one of them is rejected.

    Raises:
        ValueError: there is no such table or column, or the resource cannot be used.
        TypeError: the table or the resource has the wrong type.
        SchemaError: pgfence's functions are missing, or this role may not create a trigger.
        TransactionStateError: the Connection is in autocommit.
    """
    parts = fences.parts_of(resource, config_of(engine).namespace)
    target = _resolve_target(engine, table)
    return perform(engine, lambda connection, place: fences.add(connection, place, target, parts))


@overload
def drop_fence(
    engine: AsyncEngine | AsyncConnection, table: str | Table | type[object]
) -> Coroutine[Any, Any, None]: ...
@overload
def drop_fence(engine: Engine | Connection, table: str | Table | type[object]) -> None: ...
def drop_fence(engine: AnyEngine, table: object) -> object:
    """Remove the fence from a table: after this transaction every writer may write. It is not an error if there is none.

    The table and its partitions are locked in ACCESS EXCLUSIVE mode: this waits for transactions that have read or written
    there, and new readers and writers wait for it, up to the session's `lock_timeout`; by default there is no limit.

    Args:
        engine: an Engine or Connection, or an async one: then await it.
        table: as in `add_fence`.

    Raises:
        ValueError: there is no such table.
        TypeError: the table has the wrong type.
        SchemaError: this role does not own the table.
        TransactionStateError: the Connection is in autocommit.
    """
    target = _resolve_target(engine, table)
    return perform(engine, lambda connection, place: fences.drop(connection, place, target))


@overload
def add_version_trigger(
    engine: AsyncEngine | AsyncConnection, table: str | Table | type[object]
) -> Coroutine[Any, Any, None]: ...
@overload
def add_version_trigger(engine: Engine | Connection, table: str | Table | type[object]) -> None: ...
def add_version_trigger(engine: AnyEngine, table: object) -> object:
    """Add the trigger that counts the version of each row of a table: for `__version_mode__ = "server"`.

    Every UPDATE of a row adds 1, including upserts, plain SQL and other programs; what a statement assigns to the column is
    ignored. The same call again changes nothing. It needs none of pgfence's tables, only a function that it creates in the
    same schema. Not covered: a superuser who disables triggers, the apply process of a logical replication, and tables that
    inherit from this one by INHERITS, each of which needs a separate trigger. Partitions are covered.

    Unless the trigger exists, the table and its partitions are locked in SHARE ROW EXCLUSIVE mode: this waits for transactions
    that have written there, and new writers wait for it, up to the session's `lock_timeout`; by default there is no limit.
    The mode is ACCESS EXCLUSIVE, which also blocks readers, when it replaces a trigger for another column or a disabled one.

    Args:
        engine: an Engine or Connection, or an async one: then await it. Creating the trigger needs TRIGGER on the table, and
            CREATE on the schema of pgfence's tables, or on the first one of the search path.
        table: a name (or schema.name), a Table, or a mapped class. With joined inheritance the class at the base, whose table
            has the version: an UPDATE of another table alone does not count. By its name or as a Table without the mixin, it
            must have a column `version`.

    Raises:
        ValueError: there is no such table or column; the column holds no integers; or a trigger there has the same name and
            is not pgfence's.
        TypeError: the table has the wrong type.
        SchemaError: the column is nullable, and `command` fills it; or this role may not create the function or trigger.
        TransactionStateError: the Connection is in autocommit.
    """
    target, column = _resolve_target(engine, table), _find_version_column(table)
    return perform(engine, lambda connection, place: versions.add(connection, place, target, column))


@overload
def drop_version_trigger(
    engine: AsyncEngine | AsyncConnection, table: str | Table | type[object]
) -> Coroutine[Any, Any, None]: ...
@overload
def drop_version_trigger(engine: Engine | Connection, table: str | Table | type[object]) -> None: ...
def drop_version_trigger(engine: AnyEngine, table: object) -> object:
    """Drop the trigger of a table: after this transaction versions are not counted. It is not an error if there is none.

    The function stays, because other tables may use it. The table and its partitions are locked in ACCESS EXCLUSIVE mode:
    this waits for transactions that have read or written there, and new readers and writers wait for it, up to the session's
    `lock_timeout`; by default there is no limit.

    Args:
        engine: an Engine or Connection, or an async one: then await it.
        table: as in `add_version_trigger`.

    Raises:
        ValueError: there is no such table; or a trigger there has the same name and is not pgfence's.
        TypeError: the table has the wrong type.
        SchemaError: this role does not own the table.
        TransactionStateError: the Connection is in autocommit.
    """
    target = _resolve_target(engine, table)
    return perform(engine, lambda connection, place: versions.drop(connection, place, target))


def _table_of(given: object) -> Table | None:
    found = given if isinstance(given, Table) else getattr(inspect(given, raiseerr=False), "local_table", None)
    return found if isinstance(found, Table) else None


def _find_version_column(table: object) -> str:
    """Return the name of the column that the mixin made, else the usual one."""
    found = _table_of(table)
    columns = () if found is None else found.columns
    return next((column.name for column in columns if "pgfence_version" in column.info), "version")


def _resolve_target(engine: AnyEngine, table: object) -> fences.Target:
    if isinstance(table, str):
        before, _, name = table.rpartition(".")
        return fences.Target(name, translate_schema(engine, before or None))
    found = _table_of(table)
    if found is None:
        raise TypeError(f"a table is its name, a Table or a mapped class, not {table!r}")
    return fences.Target(found.name, translate_schema(engine, found.schema))
