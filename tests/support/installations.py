"""pgfence's tables under any schema and prefix, and of older versions: what tests of an installation need and no caller does."""

from __future__ import annotations

from pgfence._sql.errors import translate_error
from pgfence._sql.fences import COMMENT
from pgfence._sql.purge import _PURGE as PURGE
from pgfence._sql.rights import build_grants
from pgfence._sql.storage import LEASES, VERSION, TableNames, table_names
from pgfence._sql.tables import checking, creation, functions, installed, lowering, removal, verify

__all__ = [
    "COMMENT",
    "LEASES",
    "PURGE",
    "VERSION",
    "TableNames",
    "build_grants",
    "checking",
    "creation",
    "functions",
    "installed",
    "lowering",
    "removal",
    "table_names",
    "translate_error",
    "verify",
]
