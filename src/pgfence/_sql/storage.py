"""Name pgfence's tables and functions: schema and prefix, quoted for use in statements."""

from __future__ import annotations

import re
import shlex
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from pgfence.config import config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pgfence.config import HasDialect

VERSION = 6
"""The version of the tables and functions that this release creates. Fences and guards need only version 1."""
KEYS = 2
"""The version that idempotency keys and effects need."""
LEASES = 3
"""The version that leases, token locks and slots need."""
GATE_TRIGGER = 4
"""The first version with a trigger on the gate table."""
LIMITS = 5
"""The version that semaphores, rate limits, partitions and requests to resign need."""
NAMES = 6
"""The first version with the names of advisory locks. The names are for operators, and no feature needs them."""

# Functions that look up rows set `enable_seqscan = off`, because a session caches a function's plan. Otherwise, a plan that was
# created while the table was tiny would scan the whole table until the next ANALYZE.
FILES = {
    1: ("gate", "lease", "token", "slot"),
    2: ("idempotency", "effects"),
    3: ("lease", "token", "slot", "effects"),
    4: ("gate",),
    5: ("lease", "semaphore", "rate_limit", "partitions"),
    6: ("names",),
}
_CREATED = r"(?m)^CREATE FUNCTION @(\w+)@"
WHERE = "SELECT pg_catalog.current_database(), pg_catalog.current_setting('search_path')"
"""The query that returns the `row` argument of `errors.missing_tables_error`."""


def quote(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def quote_literal(value: str) -> str:
    """Return a string as an SQL literal that is valid for either setting of standard_conforming_strings."""
    inner = value.replace("'", "''")
    return f"E'{inner.replace(chr(92), chr(92) * 2)}'" if "\\" in inner else f"'{inner}'"


def block(body: str) -> str:
    """Return a DO statement that runs a body, with a dollar-quote tag that the body does not contain."""
    tag = "pgfence"
    while f"${tag}$" in body:
        tag += "_"
    return f"DO ${tag}$\n{body}\n${tag}$"


class TableNames(NamedTuple):
    """The schema and prefix of one installation of tables and functions."""

    schema: str | None = None
    prefix: str = "pgfence_"

    def name(self, what: str) -> str:
        """Return the quoted, schema-qualified name of a table or function."""
        name = quote(self.prefix + what)
        return name if self.schema is None else f"{quote(self.schema)}.{name}"

    def contradicts(self, other: TableNames) -> bool:
        """Return whether two installations certainly have different tables.

        If one installation has no schema, the search path may find the tables of the other installation.
        """
        schemas = {self.schema, other.schema} - {None}
        return self.prefix != other.prefix or len(schemas) > 1

    @property
    def channel(self) -> str:
        """The LISTEN/NOTIFY channel that announces releases."""
        return self.prefix + "released"

    def describe(self, database: str | None = None, search_path: str | None = None, schema: str | None = None) -> str:
        """Return a description of the location for error messages, with the parts that are known."""
        path = "" if search_path is None else f" {search_path!r}"
        if self.schema is not None:
            there = f"schema {self.schema!r}"
        elif schema is not None:
            there = f"schema {schema!r} (search path{path})" if path else f"schema {schema!r}"
        else:
            return f"in database {database!r}, on the search path{path}" if database else f"on the search path{path}"
        return f"in database {database!r}, {there}" if database else f"in {there}"

    @property
    def evictions(self) -> str:
        """The channel that announces evictions. The payload of a notification is the name.

        Schemas with the same prefix share the channel.
        """
        return self.prefix + "evicted"

    @property
    def command(self) -> str:
        """The shell command that creates the tables."""
        schema = "" if self.schema is None else f" --schema {shlex.quote(self.schema)}"
        prefix = "" if self.prefix == "pgfence_" else f" --prefix {shlex.quote(self.prefix)}"
        return f"pgfence install{schema}{prefix}"


def table_names_of(thing: HasDialect) -> TableNames:
    """Return the table names for an Engine, AsyncEngine, Connection or AsyncConnection.

    A `schema_translate_map` applies to the configured schema, so that each tenant's schema can have its own tables.
    """
    config = config_of(thing)
    return _place(translate_schema(thing, config.schema), config.prefix)


@lru_cache(maxsize=1024)
def _place(schema: str | None, prefix: str) -> TableNames:
    return TableNames(schema, prefix)


def is_in_place_sql(place: TableNames, relation: str) -> str:
    """Return the condition that `relation`, an alias of pg_class, is in the schema, or on the search path if none is configured."""
    if place.schema is None:
        return f"pg_catalog.pg_table_is_visible({relation}.oid)"
    return (
        f"{relation}.relnamespace = (SELECT s.oid FROM pg_catalog.pg_namespace AS s WHERE s.nspname ="
        f" {quote_literal(place.schema)})"
    )


def translate_schema(thing: HasDialect, schema: str | None) -> str | None:
    """Apply the `schema_translate_map` of an Engine or Connection, sync or async, to a schema name."""
    # An AsyncConnection can have execution options in addition to those of its engine.
    real: Any = getattr(thing, "sync_connection", None) or getattr(thing, "sync_engine", thing)
    options: Mapping[str, Any] = real.get_execution_options()
    found: str | None = (options.get("schema_translate_map") or {}).get(schema, schema)
    return found


@cache
def read_functions(place: TableNames, version: int = VERSION) -> dict[str, str]:
    """Return the statements that create the functions of a version, in order, by the functions' names without the prefix.

    If a later version replaces the body of a function, the later body is returned.
    """
    return {
        function: text
        for since, names in FILES.items()
        if since <= version
        for name in names
        for function, text in _read_statements(name, since, place)
    }


def _read_statements(name: str, since: int, place: TableNames) -> list[tuple[str, str]]:
    source = files("pgfence._sql").joinpath(f"v{since}", f"{name}.sql")
    if not source.is_file():
        return []
    text = source.read_text(encoding="utf-8")
    pieces = text.split("@")
    for i in range(1, len(pieces), 2):
        match pieces[i]:
            case "channel":
                pieces[i] = place.channel.replace("'", "''")
            case "prefix":
                pieces[i] = place.prefix.replace("'", "''")
            case "gate_text":
                pieces[i] = place.name("gate").replace("'", "''")
            case what:
                pieces[i] = place.name(what)
    whole = "".join(pieces)
    created = ["CREATE " + part.rstrip() for part in whole.split("\nCREATE ")[1:]]
    return list(zip(re.findall(_CREATED, text), created, strict=True))
