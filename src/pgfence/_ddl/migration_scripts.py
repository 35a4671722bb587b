"""Build statements for migration scripts, which cannot query first, and list the fences and installations of a database."""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from pgfence._ddl import versions
from pgfence._ddl.fences import (
    COMMENT,
    Target,
    build_triggers,
    select_contradicting,
    select_copied,
    select_foreign,
    select_kind,
)
from pgfence._sql.columns import list_column_types
from pgfence._sql.storage import TableNames, block, quote, quote_literal
from pgfence._sql.tables import execute_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection

_COLUMN = re.compile(r'NEW\."((?:[^"]|"")+)" :=')
"""Finds the counted column in the body of a version function."""

_MARK = "\0"
"""A placeholder for the name of a partition. No name can contain NUL."""


class Standing(NamedTuple):
    """A fence of a table, with the schema of its functions."""

    schema: str
    table: str
    parts: tuple[str, ...]
    functions: str
    holds: bool
    copied: bool


_OWN = "t.tgenabled IN ('O', 'A') AS holds, t.tgparentid <> 0 AS copied"
"""Whether a trigger is enabled, and whether a partition inherited the trigger from its parent."""


_PARTS = (
    "ARRAY(SELECT pg_catalog.convert_from(pg_catalog.substr(t.tgargs, a.start + 1, a.stop - a.start),"
    " pg_catalog.getdatabaseencoding()) FROM (SELECT i AS stop, COALESCE(pg_catalog.lag(i) OVER (ORDER BY i) + 1, 0) AS start"
    " FROM pg_catalog.generate_series(0, pg_catalog.length(t.tgargs) - 1) AS i WHERE pg_catalog.get_byte(t.tgargs, i) = 0)"
    " AS a ORDER BY a.stop)"
)
"""The arguments of a trigger, each terminated by NUL, a byte that no database encoding uses inside a character."""


def list_fences(connection: Connection, prefix: str) -> list[Standing]:
    """Return the fences of all installations with a prefix, ordered by table.

    `holds` is False for a disabled fence, and for a statement-level fence on a table whose rows can be written through a parent.
    """
    names = ", ".join(quote_literal(prefix + name) for name in ("fence_table_v1", "fence_row_v1"))
    found = execute_plain(
        connection,
        f"SELECT n.nspname, c.relname, {_PARTS} AS parts, f.nspname AS functions,"
        " t.tgtype & 1 = 1 OR NOT (c.relispartition"
        f" OR EXISTS (SELECT FROM pg_catalog.pg_inherits AS i WHERE i.inhrelid = c.oid)) AS covers, {_OWN}"
        " FROM pg_catalog.pg_trigger AS t"
        " JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid JOIN pg_catalog.pg_namespace AS f ON f.oid = p.pronamespace"
        " JOIN pg_catalog.pg_class AS c ON c.oid = t.tgrelid JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        f" WHERE p.proname IN ({names}) AND t.tgname = {quote_literal(prefix + 'fence')} ORDER BY 1, 2",
    )
    return [
        Standing(row.nspname, row.relname, tuple(row.parts), row.functions, row.covers and row.holds, row.copied)
        for row in found
    ]


class Counting(NamedTuple):
    """A version trigger of a table."""

    schema: str
    table: str
    column: str
    holds: bool
    copied: bool


def list_version_triggers(connection: Connection, place: TableNames) -> list[Counting]:
    """Return the version triggers with a prefix, ordered by table, wherever their functions are."""
    found = execute_plain(
        connection,
        f"SELECT n.nspname, c.relname, p.prosrc, {_OWN} FROM pg_catalog.pg_trigger AS t"
        " JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid"
        " JOIN pg_catalog.pg_class AS c ON c.oid = t.tgrelid JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        f" WHERE t.tgname = {quote_literal(versions.trigger_name(place))}"
        f" AND pg_catalog.starts_with(p.proname, {quote_literal(place.prefix + 'version_v')}) ORDER BY 1, 2",
    )
    columns = ((row, _COLUMN.search(row.prosrc)) for row in found)
    return [
        Counting(row.nspname, row.relname, name[1].replace('""', '"'), row.holds, row.copied)
        for row, name in columns
        if name
    ]


def read_version(connection: Connection, place: TableNames) -> int:
    """Return the version of the tables; 0 if tables or functions are missing."""
    there = execute_plain(
        connection,
        f"SELECT pg_catalog.to_regclass({quote_literal(place.name('schema_version'))}) IS NOT NULL"
        f" AND pg_catalog.to_regproc({quote_literal(place.name('enter_gate_v1'))}) IS NOT NULL",
    ).scalar_one()
    if not there:
        return 0
    found = execute_plain(
        connection, f"SELECT pg_catalog.max(v.version) FROM {place.name('schema_version')} AS v"
    ).scalar()
    return found or 0


def find_installations(connection: Connection) -> set[TableNames]:
    """Return the installations in this database, with any prefix."""
    found = execute_plain(
        connection,
        "SELECT n.nspname, p.proname FROM pg_catalog.pg_proc AS p"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace WHERE p.proname LIKE '%enter\\_gate\\_v1'",
    )
    return {TableNames(row.nspname, row.proname.removesuffix("enter_gate_v1")) for row in found}


def is_first(connection: Connection, place: TableNames) -> bool:
    """Return whether the schema of an installation is the first schema of the search path."""
    query = f"SELECT pg_catalog.current_schema() IS NOT DISTINCT FROM {quote_literal(place.schema or '')}"
    return bool(execute_plain(connection, query).scalar_one())


def build_first_schema_check(place: TableNames) -> str:
    """Return a statement that fails if the search path finds an installation outside its first schema."""
    return block(
        "DECLARE\n    found text;\nBEGIN\n    SELECT n.nspname INTO found FROM pg_catalog.pg_class AS c"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        f" WHERE c.oid = pg_catalog.to_regclass({quote_literal(place.name('schema_version'))})"
        " AND n.nspname IS DISTINCT FROM pg_catalog.current_schema();\n    IF found IS NOT NULL THEN\n"
        "        RAISE EXCEPTION 'pgfence''s tables are in schema %, not in the first schema of the search path:"
        " name the schema', found;\n"
        "    END IF;\nEND"
    )


def build_installed_check(place: TableNames) -> str:
    """Return a statement that fails if pgfence is not installed."""
    return block(
        f"BEGIN\n    IF pg_catalog.to_regproc({quote_literal(place.name('enter_gate_v1'))}) IS NULL THEN\n"
        f"        RAISE EXCEPTION 'pgfence''s tables are not installed: there is no function %. Create the tables first',"
        f" {quote_literal(place.name('enter_gate_v1'))};\n"
        "    END IF;\nEND"
    )


_USE = {
    "idempotency_key": ("the key", "key", "locked_until > pg_catalog.clock_timestamp()"),
    "lease": ("the lease", "name", "released_at IS NULL AND expires_at > pg_catalog.clock_timestamp()"),
}
"""For each table that shows current use: what a row is called, the column with its name, and the condition."""


def find_used(connection: Connection, place: TableNames, read_version: int = 0) -> list[str]:
    """Return the leases and keys in use. With `read_version`, read only tables that do not exist in that version."""
    found: list[str] = []
    for name, (what, column, condition) in _USE.items():
        if read_version and name in list_column_types(read_version):
            continue
        if (
            execute_plain(connection, f"SELECT pg_catalog.to_regclass({quote_literal(place.name(name))})").scalar_one()
            is not None
        ):
            rows = execute_plain(
                connection, f"SELECT {column} FROM {place.name(name)} WHERE {condition} ORDER BY 1"
            ).scalars()
            found += (f"{what} {row!r}" for row in rows)
    return found


def build_unused_check(place: TableNames, read_version: int = 0) -> str:
    """Return a statement that fails if `find_used` would return anything."""
    checks = (
        f"    IF pg_catalog.to_regclass({quote_literal(place.name(name))}) IS NOT NULL THEN\n"
        f"        SELECT {column} INTO found FROM {place.name(name)} WHERE {condition} LIMIT 1;\n"
        "        IF found IS NOT NULL THEN\n"
        f"            RAISE EXCEPTION '{what} ''%'' is held: stop its holder first', found;\n"
        "        END IF;\n    END IF;\n"
        for name, (what, column, condition) in _USE.items()
        if not read_version or name not in list_column_types(read_version)
    )
    return block(f"DECLARE\n    found text;\nBEGIN\n{''.join(checks)}END")


def build_version_addition(place: TableNames, target: Target, column: str) -> list[str]:
    """Return statements that do what `versions.add` does, without queries beforehand."""
    return [_build_ownership_check(place, target), *versions.build_creation(place, target.quoted, column)]


def build_version_removal(place: TableNames, target: Target) -> list[str]:
    """Return statements that do what `versions.drop` does, without queries beforehand."""
    return [_build_ownership_check(place, target), versions.build_removal(place, target.quoted)]


def _build_ownership_check(place: TableNames, target: Target) -> str:
    query = (
        "SELECT FROM pg_catalog.pg_trigger AS t JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid"
        f" WHERE t.tgname = {quote_literal(versions.trigger_name(place))}"
        f" AND t.tgrelid = pg_catalog.to_regclass({quote_literal(target.quoted)})"
        f" AND NOT pg_catalog.starts_with(p.proname, {quote_literal(place.prefix + 'version_v')})"
    )
    return block(f"BEGIN\n{_build_refusal(query, target)}END")


def build_fence_addition(place: TableNames, target: Target, parts: tuple[str, ...]) -> str:
    """Return a statement that does what `fences.add` does, and performs the same checks when it runs."""
    whole, one = build_triggers(place, target, [target.quoted], parts, by_row=False), len(parts) == 1
    first, truncate = build_triggers(place, target, [_MARK], parts, by_row=True)
    before, _, after = truncate.build_creation().partition(_MARK)
    columns = "".join(_build_column_check(target, column) for column in parts[1::2])
    kinds = "c.relkind = 'p' OR c.relispartition OR c.relhassubclass OR EXISTS (SELECT FROM pg_catalog.pg_inherits"
    comment = f"{quote_literal(COMMENT)}"
    whole_comment = f"COMMENT ON TRIGGER {quote(place.prefix + 'fence')} ON {target.quoted} IS {comment};"
    return block(
        "DECLARE\n    part text;\n"
        f"BEGIN\n{_build_refusal(select_foreign(place, target), target)}{columns}"
        f"    IF EXISTS ({select_contradicting(place, target, parts)}) THEN\n"
        f"        RAISE EXCEPTION '% and its parent or one of its partitions would have different fences', {quote_literal(str(target))};\n"
        f"    END IF;\n{_build_condition(place, target)}{_build_trigger_removal(place, target)}"
        f"    IF {'' if one else 'true OR '}(SELECT {kinds} AS i WHERE i.inhrelid = c.oid)"
        f" FROM pg_catalog.pg_class AS c WHERE c.oid = {quote_literal(target.quoted)}::pg_catalog.regclass) THEN\n"
        f"        {first.build_creation()};\n"
        f"        FOR part IN {_tree_sql(target)} LOOP\n"
        f"            EXECUTE {quote_literal(before)} || part || {quote_literal(after)};\n"
        f"            EXECUTE {quote_literal(f'COMMENT ON TRIGGER {quote(truncate.name)} ON ')} || part"
        f" || {quote_literal(f' IS {comment}')};\n"
        "        END LOOP;\n"
        f"    ELSE\n        {whole[0].build_creation()};\n"
        "    END IF;\n"
        f"    {whole_comment}\nEND"
    )


def build_fence_removal(place: TableNames, target: Target) -> str:
    """Return a statement that does what `fences.drop` does, and performs the same checks when it runs."""
    return block(
        f"DECLARE\n    part text;\nBEGIN\n{_build_refusal(select_foreign(place, target), target)}{_build_condition(place, target)}"
        f"{_build_trigger_removal(place, target)}END"
    )


def _build_condition(place: TableNames, target: Target) -> str:
    return f"    IF EXISTS ({select_copied(place, target)}) THEN\n        RETURN;\n    END IF;\n"


def _build_trigger_removal(place: TableNames, target: Target) -> str:
    truncate = f"DROP TRIGGER IF EXISTS {quote(place.prefix + 'fence_truncate')} ON "
    return (
        f"    DROP TRIGGER IF EXISTS {quote(place.prefix + 'fence')} ON {target.quoted};\n"
        f"    FOR part IN {_tree_sql(target)} LOOP\n        EXECUTE {quote_literal(truncate)} || part;\n    END LOOP;\n"
    )


def _build_refusal(query: str, target: Target) -> str:
    return (
        f"    IF EXISTS ({query}) THEN\n"
        f"        RAISE EXCEPTION '% has an unrelated trigger with a name that pgfence needs', {quote_literal(str(target))};\n"
        "    END IF;\n"
    )


def _build_column_check(target: Target, column: str) -> str:
    return (
        f"    IF NOT COALESCE((SELECT k.usable FROM ({select_kind(target, column)}) AS k), false) THEN\n"
        f"        RAISE EXCEPTION 'the resource needs a column % of %, of type text, integer, uuid, date or an enum',"
        f" {quote_literal(column)}, {quote_literal(str(target))};\n"
        "    END IF;\n"
    )


def _tree_sql(target: Target) -> str:
    table = f"{quote_literal(target.quoted)}::pg_catalog.regclass"
    return (
        f"SELECT {table}::text UNION SELECT t.relid::pg_catalog.regclass::text"
        f" FROM pg_catalog.pg_partition_tree({table}) AS t WHERE t.level > 0"
    )


def _indexes_sql(table: Target, find_index: str) -> str:
    return (
        " FROM pg_catalog.pg_class AS t JOIN pg_catalog.pg_class AS x ON x.relnamespace = t.relnamespace"
        f" AND x.relname = {quote_literal(find_index)} JOIN pg_catalog.pg_index AS i ON i.indexrelid = x.oid"
        f" WHERE t.oid = pg_catalog.to_regclass({quote_literal(table.quoted)})"
    )


class Index(NamedTuple):
    """An object that has a given name, in the schema of a table."""

    called: str
    is_index: bool
    valid: bool
    of_this_table: bool


def is_partitioned(connection: Connection, table: Target) -> bool:
    """Return whether a table is partitioned; False if it does not exist."""
    query = f"SELECT c.relkind = 'p' FROM pg_catalog.pg_class AS c WHERE c.oid = pg_catalog.to_regclass({quote_literal(table.quoted)})"
    return bool(execute_plain(connection, query).scalar())


def find_index(connection: Connection, table: Target, name: str) -> Index | None:
    """Return the object that has the name of an index, or None."""
    row = execute_plain(
        connection,
        "SELECT x.oid::pg_catalog.regclass::text, i.indexrelid IS NOT NULL, COALESCE(i.indisvalid, false),"
        " COALESCE(i.indrelid = t.oid, false) FROM pg_catalog.pg_class AS t"
        f" JOIN pg_catalog.pg_class AS x ON x.relnamespace = t.relnamespace AND x.relname = {quote_literal(name)}"
        " LEFT JOIN pg_catalog.pg_index AS i ON i.indexrelid = x.oid"
        f" WHERE t.oid = pg_catalog.to_regclass({quote_literal(table.quoted)})",
    ).one_or_none()
    return None if row is None else Index(*row)


WANTED = "pgfence_wanted_index"
"""The name of an index on an empty table in pg_temp. From it, the server describes the index that is wanted."""

DIFFERS = "42P07"
"""The SQLSTATE that the statement of `build_index_comparison` raises for a different index."""


def build_index_comparison(table: Target, called: str, creation: str, definition: str) -> str:
    """Return a statement that fails unless an index equals the one that `creation` creates on an empty table of the same name.

    Access method, columns, expressions, order, operator classes, collations, predicate and options are compared; the name and
    the tablespace are not. The empty table is not needed if the server's description of the index equals `definition`, because
    a description is a statement that creates the same index.
    """
    described = (
        "(SELECT CASE WHEN i.indisunique THEN 'UNIQUE ' ELSE '' END || CASE WHEN i.indimmediate THEN '' ELSE 'DEFERRABLE ' END"
        " || CASE WHEN i.indisexclusion THEN 'EXCLUDE ' ELSE '' END"
        " || pg_catalog.substr(d.whole, pg_catalog.strpos(d.whole, d.of || ' USING ') + pg_catalog.length(d.of) + 1)"
        " FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS t ON t.oid = i.indrelid, LATERAL (SELECT"
        " pg_catalog.pg_get_indexdef(i.indexrelid) AS whole, pg_catalog.quote_ident(t.relname) AS of) AS d"
        " WHERE i.indexrelid = {}::pg_catalog.regclass)"
    )
    like = f"pg_temp.{quote(table.name)}"
    # The index is described first, while the temporary table does not hide the real one. `creation` is run by EXECUTE, because it
    # may end in a comment.
    return block(
        f"DECLARE\n    found text := {described.format(quote_literal(called))};\n    wanted text;\nBEGIN\n"
        f"    IF found = {quote_literal(definition)} THEN\n        RETURN;\n    END IF;\n"
        f"    BEGIN\n        CREATE TEMPORARY TABLE {like} (LIKE {table.quoted});\n        EXECUTE {quote_literal(creation)};\n"
        "    EXCEPTION WHEN OTHERS THEN\n        RAISE EXCEPTION USING ERRCODE = SQLSTATE,"
        " MESSAGE = SQLERRM || '; the existing index is ' || found;\n"
        "    END;\n"
        f"    wanted := {described.format(quote_literal(f'pg_temp.{WANTED}'))};\n    DROP TABLE {like};\n"
        "    IF found IS DISTINCT FROM wanted THEN\n"
        f"        RAISE EXCEPTION USING ERRCODE = '{DIFFERS}', MESSAGE = found || ', and not ' || wanted;\n"
        "    END IF;\nEND"
    )


@contextmanager
def wait_for_locks(connection: Connection) -> Iterator[None]:
    """Let statements wait indefinitely for locks. The connection must be in autocommit."""
    # CREATE INDEX CONCURRENTLY leaves an invalid index behind if lock_timeout ends it.
    before = execute_plain(
        connection,
        "WITH o AS MATERIALIZED (SELECT pg_catalog.current_setting('lock_timeout') AS v)"
        " SELECT o.v, pg_catalog.set_config('lock_timeout', '0', false) FROM o",
    ).scalar_one()
    try:
        yield
    finally:
        with suppress(Exception):  # the error of the statement itself is more useful
            execute_plain(connection, f"SELECT pg_catalog.set_config('lock_timeout', {quote_literal(before)}, false)")


def drop_index(connection: Connection, called: str) -> None:
    """Drop an index without blocking writers. The connection must be in autocommit."""
    execute_plain(connection, f"DROP INDEX CONCURRENTLY IF EXISTS {called}")


def build_index_cleanup(table: Target, name: str) -> str:
    """Return a statement for scripts that drops the index left behind by an interrupted build. It blocks readers and writers."""
    return block(
        "DECLARE\n    found text;\nBEGIN\n"
        f"    SELECT x.oid::pg_catalog.regclass::text INTO found{_indexes_sql(table, name)} AND NOT i.indisvalid;\n"
        "    IF found IS NOT NULL THEN\n        EXECUTE 'DROP INDEX ' || found;\n    END IF;\nEND"
    )
