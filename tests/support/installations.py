"""pgfence's tables under any schema and prefix, and of older versions: what tests of an installation need and no caller does."""

from __future__ import annotations

from pgfence._ddl.fences import COMMENT
from pgfence._sql.errors import translate_error
from pgfence._sql.purge import _PURGE as PURGE
from pgfence._sql.rights import build_grants
from pgfence._sql.storage import LEASES, VERSION, TableNames, read_functions, table_names_of
from pgfence._sql.tables import (
    build_check,
    build_creation,
    build_downgrade,
    build_removal,
    is_installed,
    list_functions,
    verify,
)

__all__ = [
    "COMMENT",
    "LEASES",
    "PURGE",
    "VERSION",
    "TableNames",
    "build_check",
    "build_creation",
    "build_downgrade",
    "build_grants",
    "build_old_gate",
    "build_removal",
    "is_installed",
    "list_functions",
    "table_names_of",
    "translate_error",
    "verify",
]


def build_old_gate(place: TableNames) -> tuple[str, ...]:
    """Return the statements that create the functions of fences as version 3 had them, under names that begin with "old_".

    They use the same tables, as a session does that has not noticed an upgrade yet.
    """
    old = TableNames(place.schema, "old_")
    names = ("enter_gate_v1", "check_gate_v1", "fence_table_v1")
    functions = [read_functions(place, 3)[name] for name in names]
    for name in names:
        functions = [text.replace(place.name(name), old.name(name)) for text in functions]
    return tuple(functions)
