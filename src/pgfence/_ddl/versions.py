"""The trigger that counts the version of a row, whoever updates it; and what makes a version column fit."""

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
    """Return what the trigger is called, not quoted."""
    return place.prefix + "version"


def name_function(place: TableNames, column: str) -> str:
    """Return the quoted name of the function: one for each name of a column, since plpgsql wants it spelled out."""
    name = "version_v1" if column == "version" else f"version_v1_{column}"
    if len((place.prefix + name).encode()) > _LONGEST:
        name = f"version_v1_{hashlib.sha256(column.encode()).hexdigest()[:16]}"
    return place.name(name)


def build_creation(place: TableNames, table: str, column: str) -> tuple[str, ...]:
    """Return the statements that make function and trigger; run twice they change nothing.

    Args:
        place: of the function.
        table: quoted.
        column: not quoted.
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
    """Return the statement that drops the trigger. Its function stays: other tables may use it."""
    return f"DROP TRIGGER IF EXISTS {quote(trigger_name(place))} ON {table}"


def backfill(table: str, column: str) -> str:
    """Return the statements that make a nullable version column of a table with rows fit, for an error to name."""
    return (
        f"UPDATE {table} SET {quote(column)} = 1 WHERE {quote(column)} IS NULL;"
        f" ALTER TABLE {table} ALTER {quote(column)} SET DEFAULT 1, ALTER {quote(column)} SET NOT NULL"
    )


def add(connection: Connection, place: TableNames, target: Target, column: str) -> None:
    """Put the trigger on a table, unless it is there.

    Raises:
        ValueError: there is no such table or column, the column holds no integers, or a trigger there has our name and is
            somebody else's, or a partition's parent counts in another column.
        SchemaError: the column takes NULL.
    """
    # Two that replace one function at the same time end in an error.
    execute_plain(connection, f"SELECT pg_catalog.pg_advisory_xact_lock({_LOCK.value})")
    _expect_column(connection, target, column)
    found = _find_trigger(connection, place, target)
    same: bool = found is not None and found.function == name_function(place, column)
    if found is not None and same and found.enabled in {"O", "A"}:
        return
    if found is not None and found.copied:
        if not same:
            raise ValueError(f"{target} is a partition of a table that counts in another column than {column!r}")
        execute_plain(connection, f"ALTER TABLE {target.quoted} ENABLE TRIGGER {quote(trigger_name(place))}")
        return
    execute_plain(connection, build_removal(place, target.quoted))
    function, *trigger = build_creation(place, target.quoted, column)
    for statement in trigger if _is_made(connection, place, column) else (function, *trigger):
        execute_plain(connection, statement)


def _is_made(connection: Connection, place: TableNames, column: str) -> bool:
    """Return whether the function is there as it would be made: only its owner could make it again."""
    found = execute_plain(
        connection,
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_proc AS p"
        f" WHERE p.oid = pg_catalog.to_regprocedure({quote_literal(name_function(place, column) + '()')})"
        f" AND p.prosrc = {quote_literal(_build_body(quote(column)))})",
    )
    return bool(found.scalar_one())


def drop(connection: Connection, place: TableNames, target: Target) -> None:
    """Take the trigger off a table; none there is no error, and a partition keeps that of its parent.

    Raises:
        ValueError: there is no such table, or a trigger there has our name and is somebody else's.
    """
    _expect_table(connection, target)
    found = _find_trigger(connection, place, target)
    if found is not None and found.copied:
        _log.warning("%s goes on counting, for the table whose partition it is", target)
        return
    execute_plain(connection, build_removal(place, target.quoted))


def _find_trigger(connection: Connection, place: TableNames, target: Target) -> Row[*tuple[Any, ...]] | None:
    """Return the function of the trigger that has our name, quoted, and whether it is switched on; None if there is none."""
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
            f"{target} has a trigger {trigger_name(place)!r} that is none of pgfence's: rename it, or take another prefix"
        )
    return found


def _expect_table(connection: Connection, target: Target) -> None:
    there = f"SELECT pg_catalog.to_regclass({quote_literal(target.quoted)}) IS NOT NULL"
    if not execute_plain(connection, there).scalar_one():
        raise ValueError(f"there is no table {target} here")


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
            f"{target} has no column {column!r}: ALTER TABLE {target.quoted} ADD {quote(column)} bigint NOT NULL DEFAULT 1."
            " With joined inheritance the trigger belongs on the table of the base class, which has the version"
        )
    if found.kind not in _INTEGERS:
        raise ValueError(
            f"the column {column!r} of {target} is {found.kind}, and the trigger counts: it takes an integer"
        )
    if not found.attnotnull:
        command = backfill(target.quoted, column)
        raise SchemaError(
            f"the column {column!r} of {target} takes NULL, and a row without a version cannot be guarded: {command}",
            needed=1,
            command=command,
        )
