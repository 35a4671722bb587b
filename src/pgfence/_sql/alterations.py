"""Alter tables that are in use, during an upgrade or a downgrade, and limit how long each statement waits for locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pgfence._sql.storage import GATE_TRIGGER, block, quote, quote_literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pgfence._sql.storage import TableNames


class Change(NamedTuple):
    """A statement that locks tables in use, and the condition under which it is needed."""

    needed: str
    statement: str


def add_columns(place: TableNames, columns: Mapping[str, Sequence[str]]) -> list[Change]:
    """Return the change that adds missing columns. If any of the tables lacks a column, the change alters all of them."""
    needed = [
        f"NOT {_has_column(place, name, each.partition(' ')[0])}" for name, some in columns.items() for each in some
    ]
    return _change_columns(
        place, needed, {name: [f"ADD COLUMN IF NOT EXISTS {each}" for each in some] for name, some in columns.items()}
    )


def drop_columns(place: TableNames, columns: Mapping[str, Sequence[str]]) -> list[Change]:
    """Return the change that drops columns. It is needed if any of the columns exists."""
    needed = [_has_column(place, name, each) for name, some in columns.items() for each in some]
    return _change_columns(
        place,
        needed,
        {name: [f"DROP COLUMN IF EXISTS {each}" for each in some] for name, some in columns.items() if some},
    )


def _change_columns(place: TableNames, needed: Sequence[str], changes: Mapping[str, Sequence[str]]) -> list[Change]:
    if not changes:
        return []
    altered = (f"ALTER TABLE {place.name(name)} {', '.join(parts)}" for name, parts in changes.items())
    return [Change(" OR ".join(needed), "; ".join(altered))]


def add_gate_trigger(place: TableNames, version: int) -> list[Change]:
    """Return the change that creates the trigger on the gate table, which the functions of this version rely on."""
    # CREATE TRIGGER waits for every transaction that has raised a gate, and no gate can be raised until the commit. When other
    # sessions can use these functions for the first time, no transaction is open that the trigger has not seen.
    if version < GATE_TRIGGER:
        return []
    made = (
        f"CREATE TRIGGER {name_gate_trigger(place)} BEFORE UPDATE OR DELETE ON {place.name('gate')}"
        f" FOR EACH ROW EXECUTE FUNCTION {place.name('lock_gate_v1')}()"
    )
    return [Change(f"NOT {_has_gate_trigger(place)}", made)]


def drop_gate_trigger(place: TableNames, version: int) -> list[Change]:
    """Return the change that drops the gate trigger. DROP TRIGGER waits for every transaction that is inside a gate."""
    if version >= GATE_TRIGGER:
        return []
    return [Change(_has_gate_trigger(place), f"DROP TRIGGER {name_gate_trigger(place)} ON {place.name('gate')}")]


def name_gate_trigger(place: TableNames) -> str:
    return quote(place.prefix + "lock_gate")


def _has_gate_trigger(place: TableNames) -> str:
    return has_trigger(place, "gate", "lock_gate")


def has_trigger(place: TableNames, table: str, name: str) -> str:
    return (
        "EXISTS (SELECT FROM pg_catalog.pg_trigger AS t WHERE t.tgrelid ="
        f" {quote_literal(place.name(table))}::pg_catalog.regclass"
        f" AND t.tgname = {quote_literal(place.prefix + name)}::pg_catalog.name)"
    )


def _has_column(place: TableNames, table: str, column: str) -> str:
    return (
        "EXISTS (SELECT FROM pg_catalog.pg_attribute AS a WHERE a.attrelid ="
        f" pg_catalog.to_regclass({quote_literal(place.name(table))}) AND a.attname = {quote_literal(column)} AND NOT a.attisdropped)"
    )


def alter_tables(changes: Sequence[Change]) -> tuple[str, ...]:
    """Return a tuple with the statement that makes the needed changes. The tuple is empty if `changes` is empty."""
    if not changes:
        return ()
    # ALTER TABLE waits for every open transaction that has used the table, and all later statements wait behind it, including the
    # renewals of held leases. So each attempt waits for at most 200 ms and makes all changes or none: no table stays locked while
    # another table is not available.
    steps = "".join(
        f"                IF {each.needed} THEN\n                    {each.statement};\n                END IF;\n"
        for each in changes
    )
    altering = block(
        "DECLARE\n    before text := pg_catalog.current_setting('lock_timeout');\n"
        f"BEGIN\n    IF {' OR '.join(each.needed for each in changes)} THEN\n"
        "        FOR attempt IN 1..100 LOOP\n            BEGIN\n"
        "                PERFORM pg_catalog.set_config('lock_timeout', '200ms', true);\n"
        f"{steps}                EXIT;\n"
        "            EXCEPTION WHEN lock_not_available THEN\n"
        "                IF attempt = 100 THEN\n                    RAISE;\n                END IF;\n"
        "            END;\n            PERFORM pg_catalog.pg_sleep(0.4);\n"
        "        END LOOP;\n"
        "        PERFORM pg_catalog.set_config('lock_timeout', before, true);\n    END IF;\nEND"
    )
    return (altering,)
