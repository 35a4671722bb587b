"""Tables and server functions: made and dropped here, or printed as a script for whoever runs scripts.

Schema and prefix are those of `configure()`, with the engine's `schema_translate_map` on top. Without a schema the first
one of the search path is taken, or the one where the search path finds an installation.
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

    Called twice it adds nothing. `metadata.create_all()` makes these tables without functions and version: with it alone
    nothing works. `create_all` of this module makes the rest.

    Args:
        metadata: where they shall be.
        schema: of the tables; None takes the one of the MetaData.
        prefix: of their names.

    Raises:
        ValueError: the schema is empty or the prefix too long.
    """
    expect_place(schema, prefix)
    return columns.define(metadata, TableNames(schema, prefix))


def sql(*, schema: str | None = None, prefix: str = "pgfence_") -> str:
    """Return the script that makes tables and functions, in one transaction; run twice it changes nothing.

    Without a schema both land in the first schema of the search path, and the functions find the tables by the search path
    of whoever calls them: every writer needs the same one.

    Args:
        schema: made if it is missing.
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
    """Make tables and functions, where they are not there yet.

    A second call changes nothing and needs no right to make anything; several processes may call it at the same time. On a
    Connection it is part of the caller's transaction. Tables that are there and differ are not altered.

    Args:
        engine: an Engine or Connection, or an async one: then await it.

    Raises:
        SchemaError: this role may not make them, or what is there is not as pgfence made it.
        TransactionStateError: the Connection is in autocommit.
        StandbyError: the server takes no writes.
        UnreachableError: the server gave no answer.
        UnsupportedServerError: no PostgreSQL, one before 14, or an unknown driver.
    """
    return perform(engine, texts.create)


@overload
def drop_all(engine: AsyncEngine | AsyncConnection) -> Coroutine[Any, Any, None]: ...
@overload
def drop_all(engine: Engine | Connection) -> None: ...
def drop_all(engine: AnyEngine) -> object:
    """Drop tables and functions with all that is in them; what is not there is no error.

    Tokens start again at 1 after that, so writers who still hold older ones must have ended. Idempotency keys and finished
    slots are forgotten, so their work may run again. The schema stays.

    Args:
        engine: an Engine or Connection, or an async one: then await it.

    Raises:
        SchemaError: this role does not own them, or a table is still fenced: `drop_fence` first.
        TransactionStateError: the Connection is in autocommit.
    """
    return perform(engine, drop_unless_fenced)


@overload
def add_fence(
    engine: AsyncEngine | AsyncConnection, table: str | Table | type[Any], *, resource: str
) -> Coroutine[Any, Any, None]: ...
@overload
def add_fence(engine: Engine | Connection, table: str | Table | type[Any], *, resource: str) -> None: ...
def add_fence(engine: AnyEngine, table: object, *, resource: str) -> object:
    """Let a table refuse every write of a transaction that has not entered the gate of its resource, whoever writes it.

    The same call again changes nothing, one with another resource replaces the fence. Not covered: a superuser who switches
    triggers off, the apply process of a logical replication, and tables that inherit from this one by INHERITS, each of
    which wants a fence of its own. Partitions are covered; a new one is open to TRUNCATE until this is called again.

    The table and its partitions, called again only those that lack something, are locked in SHARE ROW EXCLUSIVE mode: this
    waits for the transactions that have written there, and who writes waits behind it, as long as the session's
    `lock_timeout` lets it; by default there is no limit. In ACCESS EXCLUSIVE mode, which readers feel too, only where a
    resource for the whole table takes the place of one for each row.

    Args:
        engine: an Engine or Connection, or an async one: then await it. Only the owner of the table may do it.
        table: a name (or schema.name), a Table, or a mapped class: of one with joined inheritance, the table of its own.
        resource: the name that is fenced; in the configured namespace, as the name of a lease. With columns in braces
            ("close:{book}") each row has its own, and TRUNCATE is refused to everybody. They may be text, integer, uuid,
            date or enum columns; a row with NULL in one of them is refused.

    Raises:
        ValueError: there is no such table or column, or the resource cannot be used.
        TypeError: the table or the resource has the wrong type.
        SchemaError: pgfence's functions are missing, or this role may not make a trigger.
        TransactionStateError: the Connection is in autocommit.
    """
    parts = fences.parts_of(resource, config_of(engine).namespace)
    target = _target(engine, table)
    return perform(engine, lambda connection, place: fences.add(connection, place, target, parts))


@overload
def drop_fence(engine: AsyncEngine | AsyncConnection, table: str | Table | type[Any]) -> Coroutine[Any, Any, None]: ...
@overload
def drop_fence(engine: Engine | Connection, table: str | Table | type[Any]) -> None: ...
def drop_fence(engine: AnyEngine, table: object) -> object:
    """Take the fence off a table: from the end of this transaction on everybody writes. None there is no error.

    The table and its partitions are locked in ACCESS EXCLUSIVE mode: this waits for the transactions that have read or written
    there, and who reads or writes waits behind it, as long as the session's `lock_timeout` lets it; by default there is no
    limit.

    Args:
        engine: an Engine or Connection, or an async one: then await it.
        table: as in `add_fence`.

    Raises:
        ValueError: there is no such table.
        TypeError: the table has the wrong type.
        SchemaError: this role does not own the table.
        TransactionStateError: the Connection is in autocommit.
    """
    target = _target(engine, table)
    return perform(engine, lambda connection, place: fences.drop(connection, place, target))


@overload
def add_version_trigger(
    engine: AsyncEngine | AsyncConnection, table: str | Table | type[Any]
) -> Coroutine[Any, Any, None]: ...
@overload
def add_version_trigger(engine: Engine | Connection, table: str | Table | type[Any]) -> None: ...
def add_version_trigger(engine: AnyEngine, table: object) -> object:
    """Let the server count the version of each row of a table, whoever updates it: for `__version_mode__ = "server"`.

    Every UPDATE of a row adds 1, also those of upserts, of plain SQL and of other programs; what a statement assigns to the
    column does not count. The same call again changes nothing. It needs none of pgfence's tables, only a function that it
    makes beside them. Not covered: a superuser who switches triggers off, the apply process of a logical replication, and
    tables that inherit from this one by INHERITS, each of which wants a trigger of its own. Partitions are covered.

    Unless the trigger is there, the table and its partitions are locked in SHARE ROW EXCLUSIVE mode: this waits for the
    transactions that have written there, and who writes waits behind it, as long as the session's `lock_timeout` lets it; by
    default there is no limit. In ACCESS EXCLUSIVE mode, which readers feel too, where it takes the place of one of another
    column or of one switched off.

    Args:
        engine: an Engine or Connection, or an async one: then await it. Making the trigger needs TRIGGER on the table, and
            CREATE on the schema of pgfence's tables, or on the first one of the search path.
        table: a name (or schema.name), a Table, or a mapped class. With joined inheritance the class at the base, whose table
            has the version: an UPDATE of another table alone does not count. By its name or as a Table without the mixin, it
            must have a column `version`.

    Raises:
        ValueError: there is no such table or column; the column holds no integers; or a trigger there has the same name and
            is not pgfence's.
        TypeError: the table has the wrong type.
        SchemaError: the column takes NULL, and `command` says how to fill it; or this role may not make function or trigger.
        TransactionStateError: the Connection is in autocommit.
    """
    target, column = _target(engine, table), _version_column(table)
    return perform(engine, lambda connection, place: versions.add(connection, place, target, column))


@overload
def drop_version_trigger(
    engine: AsyncEngine | AsyncConnection, table: str | Table | type[Any]
) -> Coroutine[Any, Any, None]: ...
@overload
def drop_version_trigger(engine: Engine | Connection, table: str | Table | type[Any]) -> None: ...
def drop_version_trigger(engine: AnyEngine, table: object) -> object:
    """Take the trigger off a table: nobody counts from the end of this transaction on. None there is no error.

    The function stays, since other tables may use it. The table and its partitions are locked in ACCESS EXCLUSIVE mode: this
    waits for the transactions that have read or written there, and who reads or writes waits behind it, as long as the
    session's `lock_timeout` lets it; by default there is no limit.

    Args:
        engine: an Engine or Connection, or an async one: then await it.
        table: as in `add_version_trigger`.

    Raises:
        ValueError: there is no such table; or a trigger there has the same name and is not pgfence's.
        TypeError: the table has the wrong type.
        SchemaError: this role does not own the table.
        TransactionStateError: the Connection is in autocommit.
    """
    target = _target(engine, table)
    return perform(engine, lambda connection, place: versions.drop(connection, place, target))


def _table_of(given: object) -> Table | None:
    found = given if isinstance(given, Table) else getattr(inspect(given, raiseerr=False), "local_table", None)
    return found if isinstance(found, Table) else None


def _version_column(table: object) -> str:
    """Return the name of the column that the mixin made, else the usual one."""
    found = _table_of(table)
    columns = () if found is None else found.columns
    return next((column.name for column in columns if "pgfence_version" in column.info), "version")


def _target(engine: AnyEngine, table: object) -> fences.Target:
    if isinstance(table, str):
        before, _, name = table.rpartition(".")
        return fences.Target(name, translate_schema(engine, before or None))
    found = _table_of(table)
    if found is None:
        raise TypeError(f"a table is its name, a Table or a mapped class, not {table!r}")
    return fences.Target(found.name, translate_schema(engine, found.schema))
