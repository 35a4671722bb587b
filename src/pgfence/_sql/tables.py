"""Create, upgrade, check and drop pgfence's tables and functions."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import Index, MetaData
from sqlalchemy.schema import CreateIndex, CreateTable

from pgfence._sql.alterations import (
    add_columns,
    add_gate_trigger,
    alter_tables,
    drop_columns,
    drop_gate_trigger,
    has_trigger,
    name_gate_trigger,
)
from pgfence._sql.columns import define, get_dialect, list_added_columns, list_column_types
from pgfence._sql.encoding import translate_text_errors
from pgfence._sql.storage import KEYS, VERSION, WHERE, TableNames, block, quote, quote_literal, read_functions
from pgfence.errors import SchemaError
from pgfence.keys import LockKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection, CursorResult

    from pgfence._sql.params import Row

_LOCK = LockKey.of("schema", namespace="pgfence")

_PLAIN: Mapping[str, bool | None] = {"no_parameters": True, "stream_results": False, "yield_per": None}

LOSES = "fencing tokens would start again at 1, and idempotency keys and finished slots would be forgotten"
"""The consequences of dropping the tables, for error messages."""

_HOLDS = {
    "lease": "fencing tokens, so the tokens start again at 1",
    "gate": "the newest token of each fenced resource",
    "slot": "the record of finished slots, so these slots may run again",
    "idempotency_key": "the results of requests, so the requests may run again",
    "checkpoint": "the checkpoints of leases",
    "audit": "the record of evictions",
    "semaphore": "the number of permits of each semaphore",
    "rate_take": "the units taken from each rate limit, so these may be taken again",
    "partition_set": "the number of partitions and the hash of each set of partitions",
}

_HALF_FULL = ("lease", "gate", "slot", "semaphore", "permit_waiter", "rate_limit", "rate_take", "partition_member")
"""Tables whose rows are updated often. Free space on each page allows HOT updates, which need no new index entry."""


@cache
def build_creation(place: TableNames, version: int = VERSION) -> tuple[str, ...]:
    """Return the statements, in order, that create the missing tables and functions of a version.

    Running them again changes nothing. An older version is upgraded.
    """
    tables = define(MetaData(), place, version)
    return (
        *([] if place.schema is None else [_create_schema(place.schema)]),
        *(str(CreateTable(table, if_not_exists=True).compile(dialect=get_dialect())).strip() for table in tables),
        *(_create_index(place, index) for table in tables for index in table.indexes),
        *(
            f"ALTER TABLE {place.name(name)} SET (fillfactor = 50)"
            for name in _HALF_FULL
            if name in list_column_types(version)
        ),
        *(_create_function(place, name, version) for name in read_functions(place, version)),
        *(() if version < KEYS else (_create_trigger(place),)),
        # The tables are altered near the end, because ALTER TABLE locks them until the transaction commits.
        *alter_tables([*add_gate_trigger(place, version), *add_columns(place, list_added_columns(version))]),
        f"INSERT INTO {place.name('schema_version')} (version) VALUES ({version}) ON CONFLICT DO NOTHING",
    )


def _create_function(place: TableNames, function: str, version: int) -> str:
    """Return the statement that creates a function, unless a newer version's body is already installed."""
    body = read_functions(place, version)[function]
    if body == read_functions(place)[function]:
        return _replace_function(body)
    newer = f"EXISTS (SELECT FROM {place.name('schema_version')} AS v WHERE v.version > {version})"
    return _run_unless(newer, f"EXECUTE {quote_literal(_replace_function(body))}")


def _replace_function(body: str) -> str:
    return f"CREATE OR REPLACE {body.removeprefix('CREATE ')}"


def _run_unless(there: str, made: str, end: str = "END") -> str:
    # Existence is tested first, because IF NOT EXISTS would still require the privilege to create a schema, and would still lock
    # the table of an existing index or trigger.
    return block(f"BEGIN\n    IF NOT ({there}) THEN\n        {made};\n    END IF;\n{end}")


def _create_schema(name: str) -> str:
    called = quote(name)
    there = f"pg_catalog.to_regnamespace({quote_literal(called)}) IS NOT NULL"
    return _run_unless(there, f"CREATE SCHEMA IF NOT EXISTS {called}")


def _create_index(place: TableNames, index: Index) -> str:
    name = place.name(str(index.name).removeprefix(place.prefix))
    made = str(CreateIndex(index, if_not_exists=True).compile(dialect=get_dialect())).strip()
    return _run_unless(f"pg_catalog.to_regclass({quote_literal(name)}) IS NOT NULL", made)


def _create_trigger(place: TableNames) -> str:
    """Return the statement for the trigger that rejects COMMIT while a key claimed in the transaction has no result."""
    table, name = place.name("idempotency_key"), place.prefix + "unfinished_key"
    return _run_unless(
        has_trigger(place, "idempotency_key", "unfinished_key"),
        f"CREATE CONSTRAINT TRIGGER {quote(name)} AFTER INSERT OR UPDATE ON {table}"
        " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.status = 'in_progress' AND NEW.locked_until IS NULL)"
        f" EXECUTE FUNCTION {place.name('check_key_v1')}()",
        "EXCEPTION WHEN duplicate_object THEN NULL;\nEND",
    )


def build_script(place: TableNames) -> str:
    """Return the statements of `build_creation` as a script for psql, in one transaction."""
    return "".join(f"{statement};\n\n" for statement in ("BEGIN", *build_creation(place), "COMMIT"))


def build_removal(place: TableNames) -> tuple[str, ...]:
    """Return the statements, in order, that drop the triggers, functions and tables."""
    return (
        f"DROP TRIGGER IF EXISTS {quote(place.prefix + 'unfinished_key')} ON {place.name('idempotency_key')}",
        f"DROP TRIGGER IF EXISTS {name_gate_trigger(place)} ON {place.name('gate')}",
        *(f"DROP FUNCTION IF EXISTS {name}" for name in list_functions(place)),
        *(f"DROP TABLE IF EXISTS {place.name(name)}" for name in list_column_types()),
    )


def build_downgrade(place: TableNames, version: int) -> tuple[str, ...]:
    """Return the statements that drop everything newer than a version, including its data, in order."""
    kept, older = list_column_types(version), read_functions(place, version)
    tables = [name for name in list_column_types() if name not in kept]
    columns = {name: [each for each in list_column_types()[name] if each not in kept[name]] for name in kept}
    return (
        *(f"DROP TABLE IF EXISTS {place.name(name)}" for name in tables),
        *(_replace_function(body) for name, body in older.items() if body != read_functions(place)[name]),
        *alter_tables([*drop_gate_trigger(place, version), *drop_columns(place, columns)]),
        # The functions are dropped after the triggers, because a function cannot be dropped while a trigger depends on it.
        *(f"DROP FUNCTION IF EXISTS {name}" for name in list_functions(place, version)),
        f"DELETE FROM {place.name('schema_version')} WHERE version > {version}",
        f"INSERT INTO {place.name('schema_version')} (version) VALUES ({version}) ON CONFLICT DO NOTHING",
    )


@cache
def list_functions(place: TableNames, above: int = 0) -> tuple[str, ...]:
    """Return the quoted names of pgfence's functions. With `above`, return only those that were added after that version."""
    older = read_functions(place, above)
    return tuple(place.name(name) for name in read_functions(place) if name not in older)


@cache
def build_check(place: TableNames, version: int = 1) -> str:
    """Return the query that checks whether all tables and columns of a version exist.

    Pass its row to `judge`, and an error that it raises to `translate_error`.
    """
    wanted = ", ".join(
        f"({quote_literal(table)}, {quote_literal(place.name(table))}, {quote_literal(column)}, {quote_literal(kind)})"
        for table, columns in list_column_types(version).items()
        for column, kind in columns.items()
    )
    return (
        f"SELECT (SELECT pg_catalog.max(v.version) FROM {place.name('schema_version')} AS v),"
        " (SELECT pg_catalog.string_agg(DISTINCT CASE WHEN w.place IS NULL THEN w.t || ' is missing'"
        " ELSE w.t || '.' || w.c || COALESCE(' is ' || pg_catalog.format_type(a.atttypid, NULL), ' is missing') END, ', ')"
        " FROM (SELECT v.t, pg_catalog.to_regclass(v.place), v.c, v.kind"
        f" FROM (VALUES {wanted}) AS v(t, place, c, kind)) AS w(t, place, c, kind)"
        " LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = w.place AND a.attname = w.c AND NOT a.attisdropped"
        " WHERE pg_catalog.format_type(a.atttypid, NULL) IS DISTINCT FROM w.kind),"
        f" pg_catalog.current_database(), pg_catalog.current_setting('search_path'), {_schema_of(place)}"
    )


def _schema_of(place: TableNames) -> str:
    """Return the SQL expression for the schema that contains the installation, or NULL."""
    return (
        "(SELECT n.nspname::text FROM pg_catalog.pg_class AS c"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        f" WHERE c.oid = pg_catalog.to_regclass({quote_literal(place.name('schema_version'))}))"
    )


def judge(row: Row, place: TableNames, version: int = 1) -> SchemaError | None:
    """Return the error that the row of `build_check` describes, or None if the tables can be used."""
    found, wrong, *there = row
    where = place.describe(*there)
    if found is None or found < version:
        return SchemaError(
            f"pgfence's tables {where} have version {found or 0}, but version {version} is needed: run"
            f" `{place.command}` or"
            " call pgfence.schema.create_all(engine)",
            found=found,
            needed=version,
            command=place.command,
        )
    return None if wrong is None else _difference_error(wrong, where, place, found, version)


def _difference_error(wrong: str, where: str, place: TableNames, found: int, version: int) -> SchemaError:
    """Return the error for tables that are incomplete or altered. The message says whether `pgfence install` repairs them."""
    parts = [re.fullmatch(r"(\w+)(?:\.(\w+))? is (.+)", part) for part in wrong.split(", ")]
    tables = [part[1] for part in parts if part and part[2] is None]
    columns = [part for part in parts if part and part[2] is not None and not _is_added(part, version)]
    if not columns:
        rows = [f"{table} loses {_HOLDS[table]}" for table in tables if table in _HOLDS]
        lost = f". A table that is created again is empty: {'; '.join(rows)}" if rows else ""
        return SchemaError(
            f"pgfence's tables {where} are incomplete: {wrong}. Running `{place.command}` or calling"
            f" pgfence.schema.create_all(engine) creates what is missing{lost}",
            found=found,
            needed=version,
            command=place.command,
        )
    alter = "; ".join(_restore_column(place, part[1], part[2], part[3], version) for part in columns)
    naive = (
        " (without a time zone, each session would interpret it in its own zone)"
        if "without time zone" in wrong
        else ""
    )
    return SchemaError(
        f"pgfence's tables {where} differ from what pgfence created: {wrong}{naive}. `pgfence install` does not alter"
        f" existing columns. As the owner of the tables, run: {alter}. Do not drop them instead: {LOSES}",
        found=found,
        needed=version,
        command=alter,
    )


def _is_added(part: re.Match[str], version: int) -> bool:
    """Return whether a missing column is one that an upgrade adds."""
    added = {column.partition(" ")[0] for column in list_added_columns(version).get(part[1], ())}
    return part[3] == "missing" and part[2] in added


def _restore_column(place: TableNames, table: str, column: str, found: str, version: int) -> str:
    kind = list_column_types(version)[table][column]
    how = f"ADD COLUMN {column} {kind}" if found == "missing" else f"ALTER COLUMN {column} TYPE {kind}"
    return f"ALTER TABLE {place.name(table)} {how}"


def verify(connection: Connection, place: TableNames, version: int = VERSION) -> SchemaError | None:
    """Check the installed tables and their version in one round trip, and return the error if they cannot be used.

    Raises:
        sqlalchemy.exc.DBAPIError: the tables could not be read; see `errors.translate_error`.
    """
    return judge(execute_plain(connection, build_check(place, version)).one(), place, version)


def is_installed(connection: Connection, place: TableNames, version: int = VERSION) -> bool:
    """Return whether the tables and functions of a version exist. A missing object does not abort the caller's transaction."""
    newer = list_functions(place, version)
    names = ", ".join(quote_literal(name) for name in list_functions(place) if name not in newer)
    there = execute_plain(
        connection,
        f"SELECT pg_catalog.to_regclass({quote_literal(place.name('schema_version'))}) IS NOT NULL AND NOT EXISTS"
        f" (SELECT FROM pg_catalog.unnest(ARRAY[{names}]) AS f(name) WHERE pg_catalog.to_regproc(f.name) IS NULL)",
    ).scalar_one()
    return bool(there) and verify(connection, place, version) is None


def resolve_schema(connection: Connection, place: TableNames) -> TableNames:
    """Return the names with their schema: that of the installation on the search path, or else the current schema.

    Triggers call functions qualified with this schema, so that writers with a different search path use the same gate.
    """
    if place.schema is not None:
        return place
    schema = execute_plain(
        connection, f"SELECT COALESCE({_schema_of(place)}, pg_catalog.current_schema()::text)"
    ).scalar_one()
    if schema is None:
        row: tuple[str | None, ...] = tuple(execute_plain(connection, WHERE).one())
        raise SchemaError(
            f"database {row[0]!r} has no usable schema on the search path {row[1]!r}: none of these schemas exists, or this role lacks"
            " the USAGE privilege on them. Select a schema with pgfence.configure(engine, schema=...) or, on the command line, with"
            " --schema",
            needed=VERSION,
            command=f"{place.command} --schema <schema>",
        )
    return TableNames(schema, place.prefix)


def create(connection: Connection, place: TableNames, version: int = VERSION) -> None:
    """Create missing tables and functions, or upgrade an older version. Concurrent callers wait until this transaction ends."""
    execute_plain(connection, f"SELECT pg_catalog.pg_advisory_xact_lock({_LOCK.value})")
    if not is_installed(connection, place, version):
        _execute(connection, place, build_creation(place, version), version)


def lower(connection: Connection, place: TableNames, version: int) -> None:
    """Downgrade the tables to an older version. Concurrent callers wait until this transaction ends."""
    execute_plain(connection, f"SELECT pg_catalog.pg_advisory_xact_lock({_LOCK.value})")
    _execute(connection, place, build_downgrade(place, version), version)


def _execute(connection: Connection, place: TableNames, statements: Sequence[str], version: int) -> None:
    for statement in statements:
        execute_plain(connection, statement)
    if (error := verify(connection, place, version)) is not None:
        raise error


def drop(connection: Connection, place: TableNames) -> None:
    """Drop all tables and functions of the installation that exist."""
    execute_plain(connection, f"SELECT pg_catalog.pg_advisory_xact_lock({_LOCK.value})")
    for statement in build_removal(place):
        execute_plain(connection, statement)


def execute_plain(connection: Connection, statement: str) -> CursorResult[*tuple[Any, ...]]:
    """Execute a statement verbatim, so that percent signs and colons are not parameter markers."""
    with translate_text_errors(connection, statement):
        return connection.exec_driver_sql(statement, execution_options=_PLAIN)
