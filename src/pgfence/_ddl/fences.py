"""The triggers that make a table reject writes without a token, for one resource per table or per row."""

from __future__ import annotations

import logging
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgfence._sql.storage import TableNames, block, quote, quote_literal
from pgfence._sql.tables import execute_plain
from pgfence.keys import qualify_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

COMMENT = "pgfence:fence:v1"

_log = logging.getLogger("pgfence.migrations")

_KINDS = "'text', 'character varying', 'smallint', 'integer', 'bigint', 'uuid', 'date'"
"""The types whose values have the same text form in Python and in the server. Enums can identify a resource too."""


@dataclass(frozen=True, slots=True)
class Target:
    """A table of the application, as the caller named it."""

    name: str
    schema: str | None = None

    @property
    def quoted(self) -> str:
        """The quoted name, with the schema if the caller named one."""
        return quote(self.name) if self.schema is None else f"{quote(self.schema)}.{quote(self.name)}"

    def __str__(self) -> str:
        return self.name if self.schema is None else f"{self.schema}.{self.name}"


def parts_of(resource: str, namespace: str) -> tuple[str, ...]:
    """Split a resource into text, column, text, column, ..., text. A resource that does not depend on the row is a single text.

    Raises:
        TypeError: the resource is not a str.
        ValueError: the resource is empty or too long, or a field in it is not the name of a column.
    """
    whole = qualify_name(resource, namespace, "a resource")
    try:
        fields = list(string.Formatter().parse(whole))
    except ValueError as error:
        raise ValueError(
            f"the resource {resource!r} cannot be parsed: {error}. Write each literal brace twice"
        ) from None
    parts = [""]
    for text, field, spec, conversion in fields:
        parts[-1] += text
        if field is None:
            continue
        if spec or conversion or not field.isidentifier():
            raise ValueError(f"each pair of braces in the resource {resource!r} may contain only a column name")
        parts += [field, ""]
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class _Trigger:
    name: str
    table: str
    events: str
    level: str
    function: str
    args: tuple[str, ...]
    bits: int
    """The bits of pg_trigger.tgtype: 1 for each row, 2 before, 4 insert, 8 delete, 16 update, 32 truncate."""

    def build_creation(self) -> str:
        before, after = self._split_creation()
        return f"{before}{self.table}{after}"

    def build_comment(self) -> str:
        return f"COMMENT ON TRIGGER {quote(self.name)} ON {self.table} IS {quote_literal(COMMENT)}"

    def select_lacking(self, target: Target) -> str:
        """Return the query for the quoted names of the table and its partitions that lack this trigger."""
        return _select_tables(target, f"NOT {self.is_there('c.oid')}")

    def build_completion(self, target: Target) -> str:
        """Return the statement that creates the trigger on the table and the partitions that lack it."""
        before, after = self._split_creation()
        comment = f"COMMENT ON TRIGGER {quote(self.name)} ON "
        return block(
            f"DECLARE\n    part text;\nBEGIN\n    FOR part IN {self.select_lacking(target)} LOOP\n"
            f"        EXECUTE {quote_literal(before)} || part || {quote_literal(after)};\n"
            f"        EXECUTE {quote_literal(comment)} || part || {quote_literal(f' IS {quote_literal(COMMENT)}')};\n"
            "    END LOOP;\nEND"
        )

    def is_there(self, table: str) -> str:
        """Return the condition that the trigger exists on the table with this oid, and is enabled."""
        return (
            f"EXISTS (SELECT FROM pg_catalog.pg_trigger AS t WHERE t.tgrelid = {table} AND t.tgtype = {self.bits}"
            f" AND t.tgname = {quote_literal(self.name)}"
            f" AND t.tgfoid = pg_catalog.to_regproc({quote_literal(self.function)}) AND t.tgenabled IN ('O', 'A')"
            f" AND {_match_arguments(self.args)})"
        )

    def _split_creation(self) -> tuple[str, str]:
        args = ", ".join(map(quote_literal, self.args))
        # Replacing a trigger blocks writers for a moment; dropping it would block readers too. A partition may have its own
        # fence, which thereby becomes a copy of its parent's.
        return (
            f"CREATE OR REPLACE TRIGGER {quote(self.name)} {self.events} ON ",
            f" {self.level} EXECUTE FUNCTION {self.function}({args})",
        )


def _match_arguments(args: tuple[str, ...]) -> str:
    """Return the condition for a trigger with these arguments, which pg_trigger stores in the database encoding."""
    written = "".join(
        f"pg_catalog.convert_to({quote_literal(arg)}, pg_catalog.getdatabaseencoding()) || pg_catalog.decode('00', 'hex') || "
        for arg in args
    )
    return f"t.tgargs = {written}''"


def add(connection: Connection, place: TableNames, target: Target, parts: tuple[str, ...]) -> None:
    """Add the triggers of a fence to a table, unless the table has them.

    Raises:
        ValueError: the table does not exist or is not a table; a column does not exist or cannot identify a resource; an
            unrelated trigger has the name of a fence; or the table and one of its partitions have different fences.
    """
    # A statement-level trigger fires only for the table that a statement names. Rows that can be written through a parent or a
    # partition, or whose resource depends on their columns, need row-level triggers.
    by_row = _is_among_others(connection, target) or len(parts) > 1
    _expect_columns(connection, target, parts[1::2])
    fence, *others = build_triggers(place, target, [target.quoted], parts, by_row=by_row)
    stands = execute_plain(connection, f"SELECT {fence.is_there(_oid_sql(target))}").scalar_one()
    # A partition that was attached later gets the fence from its parent, but not the other triggers.
    lacking = [
        other
        for other in others
        if execute_plain(connection, f"SELECT EXISTS ({other.select_lacking(target)})").scalar_one()
    ]
    if stands and not lacking:
        return
    _expect_own(connection, place, target)
    if (other := execute_plain(connection, select_contradicting(place, target, parts)).scalar()) is not None:
        raise ValueError(
            f"the tables '{target}' and '{other}' would have different fences, although one is a partition of the other: use the same"
            " resource for both, or call drop_fence for the existing fence"
        )
    if not stands:
        _put(connection, place, target, fence, by_row=by_row)
    for trigger in lacking:
        execute_plain(connection, trigger.build_completion(target))


def _put(connection: Connection, place: TableNames, target: Target, fence: _Trigger, *, by_row: bool) -> None:
    if _is_copied(connection, place, target):
        execute_plain(connection, f"ALTER TABLE {target.quoted} ENABLE TRIGGER {quote(fence.name)}")
        return
    execute_plain(connection, fence.build_creation())
    execute_plain(connection, fence.build_comment())
    if not by_row:
        _drop_truncate(connection, place, target)


def _drop_truncate(connection: Connection, place: TableNames, target: Target) -> None:
    """Drop the TRUNCATE trigger from the table and its partitions."""
    name = place.prefix + "fence_truncate"
    has_it = (
        f"EXISTS (SELECT FROM pg_catalog.pg_trigger AS t WHERE t.tgrelid = c.oid AND t.tgname = {quote_literal(name)})"
    )
    for table in execute_plain(connection, _select_tables(target, has_it)).scalars().all():
        execute_plain(connection, f"DROP TRIGGER {quote(name)} ON {table}")


def drop(connection: Connection, place: TableNames, target: Target) -> None:
    """Drop the triggers of a fence from a table. Missing triggers are ignored, and a partition keeps those of its parent.

    Raises:
        ValueError: the table does not exist or is not a table, or it has an unrelated trigger with the name of a fence.
    """
    _is_among_others(connection, target)
    _expect_own(connection, place, target)
    if _is_copied(connection, place, target):
        _log.warning("table '%s' keeps its fence, which belongs to the partitioned table", target)
        return
    execute_plain(connection, f"DROP TRIGGER IF EXISTS {quote(place.prefix + 'fence')} ON {target.quoted}")
    _drop_truncate(connection, place, target)


def select_copied(place: TableNames, target: Target) -> str:
    """Return the query for a fence that a partition inherited from its parent."""
    return (
        f"SELECT FROM pg_catalog.pg_trigger AS t WHERE t.tgname = {quote_literal(place.prefix + 'fence')}"
        f" AND t.tgrelid = pg_catalog.to_regclass({quote_literal(target.quoted)}) AND t.tgparentid <> 0"
    )


def select_contradicting(place: TableNames, target: Target, parts: tuple[str, ...]) -> str:
    """Return the query for a different fence that a parent or partition of the table has."""
    table = f"pg_catalog.to_regclass({quote_literal(target.quoted)})"
    return (
        "SELECT t.tgrelid::pg_catalog.regclass::text FROM pg_catalog.pg_trigger AS t"
        f" WHERE t.tgname = {quote_literal(place.prefix + 'fence')} AND t.tgparentid = 0 AND NOT {_match_arguments(parts)}"
        f" AND t.tgrelid <> {table} AND (t.tgrelid IN (SELECT relid FROM pg_catalog.pg_partition_tree({table}))"
        f" OR (t.tgrelid IN (SELECT relid FROM pg_catalog.pg_partition_ancestors({table}))"
        f" AND EXISTS ({select_copied(place, target)}))) ORDER BY 1 LIMIT 1"
    )


def _is_copied(connection: Connection, place: TableNames, target: Target) -> bool:
    return bool(execute_plain(connection, f"SELECT EXISTS ({select_copied(place, target)})").scalar_one())


def list_fenced(connection: Connection, place: TableNames) -> list[str]:
    """Return the names of the tables with fence triggers, without partitions that inherited theirs."""
    names = ", ".join(
        quote_literal(place.name(name)) for name in ("fence_table_v1", "fence_row_v1", "fence_truncate_v1")
    )
    found = execute_plain(
        connection,
        "SELECT DISTINCT t.tgrelid::pg_catalog.regclass::text FROM pg_catalog.pg_trigger AS t"
        f" WHERE t.tgfoid IN (SELECT pg_catalog.to_regproc(f.name) FROM pg_catalog.unnest(ARRAY[{names}]) AS f(name))"
        " AND t.tgparentid = 0 ORDER BY 1",
    )
    return list(found.scalars())


def select_foreign(place: TableNames, target: Target) -> str:
    """Return the query for unrelated triggers that have the name of a fence, on a table or its partitions."""
    names = ", ".join(quote_literal(place.prefix + name) for name in ("fence", "fence_truncate"))
    ours = ", ".join(
        quote_literal(place.prefix + name) for name in ("fence_table_v1", "fence_row_v1", "fence_truncate_v1")
    )
    table = f"pg_catalog.to_regclass({quote_literal(target.quoted)})"
    return (
        "SELECT t.tgname, t.tgrelid::pg_catalog.regclass::text AS place FROM pg_catalog.pg_trigger AS t"
        " JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid"
        f" WHERE t.tgname IN ({names}) AND p.proname NOT IN ({ours})"
        f" AND (t.tgrelid = {table} OR t.tgrelid IN (SELECT relid FROM pg_catalog.pg_partition_tree({table})))"
    )


def _expect_own(connection: Connection, place: TableNames, target: Target) -> None:
    if (found := execute_plain(connection, select_foreign(place, target)).first()) is not None:
        raise ValueError(
            f"table '{found.place}' has an unrelated trigger named {found.tgname!r}: rename it, or use another prefix for pgfence"
        )


def build_triggers(
    place: TableNames, target: Target, tree: Sequence[str], parts: tuple[str, ...], *, by_row: bool
) -> list[_Trigger]:
    """Return the triggers of a fence.

    A fence is one statement-level trigger, or one row-level trigger plus a TRUNCATE trigger for the table and each partition.
    """
    fence, truncate = place.prefix + "fence", place.prefix + "fence_truncate"
    every, statement = place.name("fence_table_v1"), "FOR EACH STATEMENT"
    if not by_row:
        events = "BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE"
        return [_Trigger(fence, target.quoted, events, statement, every, parts, 62)]
    # AFTER the row operation: other triggers and generated columns may change the row before it.
    events = "AFTER INSERT OR UPDATE OR DELETE"
    first = _Trigger(fence, target.quoted, events, "FOR EACH ROW", place.name("fence_row_v1"), parts, 29)
    one = len(parts) == 1
    function, args = (every, parts) if one else (place.name("fence_truncate_v1"), ())
    return [first, *(_Trigger(truncate, table, "BEFORE TRUNCATE", statement, function, args, 34) for table in tree)]


def _is_among_others(connection: Connection, target: Target) -> bool:
    """Return whether rows of the table can be written through another table, so that statement triggers are not enough."""
    row = execute_plain(
        connection,
        "SELECT c.relkind::text AS kind, c.relkind = 'p' OR c.relispartition OR c.relhassubclass"
        " OR EXISTS (SELECT FROM pg_catalog.pg_inherits AS i WHERE i.inhrelid = c.oid) AS among"
        f" FROM pg_catalog.pg_class AS c WHERE c.oid = pg_catalog.to_regclass({quote_literal(target.quoted)})",
    ).one_or_none()
    if row is None:
        raise ValueError(f"table '{target}' does not exist")
    if row.kind not in {"r", "p"}:
        raise ValueError(f"'{target}' is not a table and cannot be fenced: fence the tables on which it is based")
    among: bool = row.among
    return among


def _oid_sql(target: Target) -> str:
    return f"pg_catalog.to_regclass({quote_literal(target.quoted)})"


def _select_tables(target: Target, condition: str) -> str:
    """Return the query for the quoted names of the table and its partitions, if they satisfy a condition on `c`."""
    return (
        "SELECT pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(c.relname)"
        " FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        f" WHERE (c.oid = {_oid_sql(target)} OR c.oid IN (SELECT relid FROM pg_catalog.pg_partition_tree({_oid_sql(target)})))"
        f" AND {condition} ORDER BY c.oid"
    )


def select_kind(target: Target, column: str) -> str:
    """Return the query for the type of a column and whether the column can identify a resource.

    The query returns no row if the column does not exist.
    """
    return (
        "SELECT pg_catalog.format_type(a.atttypid, NULL) AS name, t.typtype = 'e'"
        f" OR pg_catalog.format_type(COALESCE(NULLIF(t.typbasetype, 0), t.oid), NULL) IN ({_KINDS}) AS usable"
        " FROM pg_catalog.pg_attribute AS a JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid"
        f" WHERE a.attrelid = pg_catalog.to_regclass({quote_literal(target.quoted)})"
        f" AND a.attname = {quote_literal(column)} AND a.attnum > 0 AND NOT a.attisdropped"
    )


def _expect_columns(connection: Connection, target: Target, columns: Sequence[str]) -> None:
    for column in columns:
        kind = execute_plain(connection, select_kind(target, column)).one_or_none()
        if kind is None:
            raise ValueError(f"the resource names the column {column!r}, which table '{target}' does not have")
        if not kind.usable:
            raise ValueError(
                f"the column {column!r} of table '{target}' is {kind.name}, whose values have more than one text form: use text,"
                " integer, uuid, date or enum columns for a resource"
            )
