"""The trigger that increments a row's version on every update, and checks for the version column."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any

from pgfence._sql.storage import TableNames, quote, quote_literal
from pgfence._sql.tables import execute_plain
from pgfence.errors import SchemaError
from pgfence.keys import LockKey

if TYPE_CHECKING:
    from sqlalchemy import Connection, Row

    from pgfence._ddl.fences import Target

COMMENT = "pgfence:version:v1"

_log = logging.getLogger("pgfence.migrations")

_LOCK = LockKey.of("version trigger", namespace="pgfence")
_LONGEST = 63
_INTEGERS = ("smallint", "integer", "bigint")


def trigger_name(place: TableNames) -> str:
    """Return the unquoted name of the trigger."""
    return place.prefix + "version"


def name_function(place: TableNames, column: str) -> str:
    """Return the quoted name of the trigger function."""
    # There is one function for each column name, because a plpgsql function must contain the name.
    name = "version_v1" if column == "version" else f"version_v1_{column}"
    if len((place.prefix + name).encode()) > _LONGEST:
        name = f"version_v1_{hashlib.sha256(column.encode()).hexdigest()[:16]}"
    return place.name(name)


def build_creation(place: TableNames, table: str, column: str) -> tuple[str, ...]:
    """Return the statements that create the function and the trigger. Running them again changes nothing.

    `table` is a quoted name, and `column` an unquoted name.
    """
    name, counted, function = quote(trigger_name(place)), quote(column), name_function(place, column)
    body = _build_body(counted)
    return (
        f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $pgfence${body}$pgfence$",
        f"CREATE OR REPLACE TRIGGER {name} BEFORE UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION {function}()",
        f"COMMENT ON TRIGGER {name} ON {table} IS {quote_literal(COMMENT)}",
    )


def _build_body(counted: str) -> str:
    return f"BEGIN NEW.{counted} := COALESCE(OLD.{counted}, 0) + 1; RETURN NEW; END"


def build_removal(place: TableNames, table: str) -> str:
    """Return the statement that drops the trigger. Its function is kept, because other tables may use it."""
    return f"DROP TRIGGER IF EXISTS {quote(trigger_name(place))} ON {table}"


def backfill(table: str, column: str, version: str = "1") -> str:
    """Return statements, for an error message, that turn a nullable column into a version column."""
    return (
        f"UPDATE {table} SET {quote(column)} = {version} WHERE {quote(column)} IS NULL;"
        f" ALTER TABLE {table} ALTER {quote(column)} SET DEFAULT {version}, ALTER {quote(column)} SET NOT NULL"
    )


def add(connection: Connection, place: TableNames, target: Target, column: str) -> None:
    """Add the version trigger to a table, unless the table has it.

    Raises:
        ValueError: the table or column does not exist, the column is not an integer, an unrelated trigger has the same name,
            or the trigger of the partitioned table uses another column.
        SchemaError: the column allows NULL.
    """
    # Concurrent CREATE OR REPLACE of one function fails with an error in PostgreSQL.
    execute_plain(connection, f"SELECT pg_catalog.pg_advisory_xact_lock({_LOCK.value})")
    _expect_column(connection, target, column)
    found = _find_trigger(connection, place, target)
    same: bool = found is not None and found.function == name_function(place, column)
    if found is not None and same and found.enabled in {"O", "A"}:
        return
    if found is not None and found.copied:
        if not same:
            raise ValueError(
                f"table '{target}' is a partition, and the version trigger of the partitioned table uses a column other than {column!r}:"
                " pass that column as column="
            )
        execute_plain(connection, f"ALTER TABLE {target.quoted} ENABLE TRIGGER {quote(trigger_name(place))}")
        return
    execute_plain(connection, build_removal(place, target.quoted))
    function, *trigger = build_creation(place, target.quoted, column)
    for statement in trigger if _is_made(connection, place, column) else (function, *trigger):
        execute_plain(connection, statement)


def _is_made(connection: Connection, place: TableNames, column: str) -> bool:
    """Return whether the function exists with the expected body."""
    # A function that exists is not created again, because only its owner could replace it.
    found = execute_plain(
        connection,
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_proc AS p"
        f" WHERE p.oid = pg_catalog.to_regprocedure({quote_literal(name_function(place, column) + '()')})"
        f" AND p.prosrc = {quote_literal(_build_body(quote(column)))})",
    )
    return bool(found.scalar_one())


def drop(connection: Connection, place: TableNames, target: Target) -> None:
    """Drop the version trigger from a table. A missing trigger is ignored, and a partition keeps that of its parent.

    Raises:
        ValueError: the table does not exist, or an unrelated trigger has the same name.
    """
    _expect_table(connection, target)
    found = _find_trigger(connection, place, target)
    if found is not None and found.copied:
        _log.warning("table '%s' keeps its version trigger, which belongs to the partitioned table", target)
        return
    execute_plain(connection, build_removal(place, target.quoted))


def _find_trigger(connection: Connection, place: TableNames, target: Target) -> Row[*tuple[Any, ...]] | None:
    """Return the trigger's `tgenabled`, whether it is inherited, and its function's quoted name; None if it does not exist."""
    found = execute_plain(
        connection,
        "SELECT t.tgenabled::text AS enabled, t.tgparentid <> 0 AS copied, p.proname, '\"' || pg_catalog.replace(n.nspname, '\"', '\"\"') || '\".\"'"
        " || pg_catalog.replace(p.proname, '\"', '\"\"') || '\"' AS function"
        " FROM pg_catalog.pg_trigger AS t JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace"
        f" WHERE t.tgrelid = pg_catalog.to_regclass({quote_literal(target.quoted)})"
        f" AND t.tgname = {quote_literal(trigger_name(place))}",
    ).one_or_none()
    if found is not None and not found.proname.startswith(f"{place.prefix}version_v"):
        raise ValueError(
            f"table '{target}' has an unrelated trigger named {trigger_name(place)!r}: rename it, or use another prefix for"
            " pgfence"
        )
    return found


def _expect_table(connection: Connection, target: Target) -> None:
    there = f"SELECT pg_catalog.to_regclass({quote_literal(target.quoted)}) IS NOT NULL"
    if not execute_plain(connection, there).scalar_one():
        raise ValueError(f"table '{target}' does not exist")


def _expect_column(connection: Connection, target: Target, column: str) -> None:
    _expect_table(connection, target)
    found = execute_plain(
        connection,
        "SELECT a.attnotnull, pg_catalog.format_type(a.atttypid, NULL) AS kind FROM pg_catalog.pg_attribute AS a"
        f" WHERE a.attrelid = pg_catalog.to_regclass({quote_literal(target.quoted)}) AND a.attname = {quote_literal(column)}"
        " AND a.attnum > 0 AND NOT a.attisdropped",
    ).one_or_none()
    if found is None:
        raise ValueError(
            f"table '{target}' has no column {column!r}: run ALTER TABLE {target.quoted} ADD {quote(column)} bigint NOT NULL"
            " DEFAULT 1. With joined inheritance, the trigger belongs on the table of the base class, which has the version"
        )
    if found.kind not in _INTEGERS:
        raise ValueError(
            f"the column {column!r} of table '{target}' is {found.kind}, but the trigger needs an integer column"
        )
    if not found.attnotnull:
        command = backfill(target.quoted, column)
        raise SchemaError(
            f"the column {column!r} of table '{target}' allows NULL, and a row without a version cannot be guarded. Run: {command}",
            needed=1,
            command=command,
        )
