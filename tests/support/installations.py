"""pgfence's tables under any schema and prefix, and of older versions: what tests of an installation need and no caller does."""

from __future__ import annotations

from pgfence._ddl.fences import COMMENT
from pgfence._sql.errors import translate_error
from pgfence._sql.purge import _PURGE as PURGE
from pgfence._sql.rights import build_grants
from pgfence._sql.storage import LEASES, VERSION, TableNames, table_names_of
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
    "build_removal",
    "is_installed",
    "list_functions",
    "table_names_of",
    "translate_error",
    "verify",
]
