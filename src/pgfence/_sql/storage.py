"""Where our tables and functions are: schema and prefix, as quoted names. And what a server says when they are not there."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from pgfence._sql.sqlstate import sqlstate
from pgfence.config import config_of
from pgfence.errors import FenceRequiredError, LockTimeoutError, SchemaError, StaleFencingTokenError
from pgfence.keys import display_name
from pgfence.types import Holder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION = 3
"""The version of the tables and functions that this release creates. Fences and guards need only version 1."""
KEYS = 2
"""The version that idempotency keys and effects need."""
LEASES = 3
"""The version that leases, token locks and slots need."""

# A function that looks for rows does so with `enable_seqscan = off`: a session plans it once, maybe while its table is tiny, and
# would go on reading the whole of it until the table is analyzed again.
FILES = {
    1: ("gate", "lease", "token", "slot"),
    2: ("idempotency", "effects"),
    3: ("gate", "lease", "token", "slot", "effects"),
}
_CREATED = re.compile(r"^CREATE FUNCTION @(\w+)@", re.MULTILINE)
STALE_TOKEN = "PF001"  # noqa: S105
NO_TOKEN = "PF002"  # noqa: S105
GATE_TIMEOUT = "PF003"
WHERE = "SELECT pg_catalog.current_database(), pg_catalog.current_setting('search_path')"
"""Its row is for `missing`."""


def quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def block(body: str) -> str:
    """Return a statement that runs a body, whatever names are in it."""
    tag = "pgfence"
    while f"${tag}$" in body:
        tag += "_"
    return f"DO ${tag}$\n{body}\n${tag}$"


@dataclass(frozen=True, slots=True)
class TableNames:
    """One set of tables and functions."""

    schema: str | None = None
    prefix: str = "pgfence_"

    def __hash__(self) -> int:
        # Asked for ten times by each acquire.
        return hash(self.prefix)

    def name(self, what: str) -> str:
        """Return the quoted name of a table or function, ready to stand in a statement."""
        name = quoted(self.prefix + what)
        return name if self.schema is None else f"{quoted(self.schema)}.{name}"

    def contradicts(self, other: TableNames) -> bool:
        """Return whether these are certainly two sets of tables. One without a schema may be any that the search path finds."""
        schemas = {self.schema, other.schema} - {None}
        return self.prefix != other.prefix or len(schemas) > 1

    @property
    def channel(self) -> str:
        """Where releases are told of (LISTEN, NOTIFY)."""
        return self.prefix + "released"

    def where(self, database: str | None = None, search_path: str | None = None, schema: str | None = None) -> str:
        """Return where this is, in words, as far as it is known."""
        schema = self.schema or schema
        there = "" if schema is None else f"schema {schema!r}"
        if self.schema is None:
            path = "the search path" if search_path is None else f"search path {search_path!r}"
            there = f"{there} ({path})" if there else path
        return f"in database {database!r}, {there}" if database else f"in {there}"

    @property
    def evictions(self) -> str:
        """The channel of evictions. The payload is the name; schemas with the same prefix share the channel."""
        return self.prefix + "evicted"

    @property
    def command(self) -> str:
        """What makes the tables."""
        schema = "" if self.schema is None else f" --schema {shlex.quote(self.schema)}"
        prefix = "" if self.prefix == "pgfence_" else f" --prefix {shlex.quote(self.prefix)}"
        return f"pgfence install{schema}{prefix}"


def table_names(thing: Any) -> TableNames:
    """Return the place for an Engine, AsyncEngine, Connection or AsyncConnection.

    It is what was configured, and a `schema_translate_map` on top of it, so that each tenant's schema may have its own.
    """
    config = config_of(thing)
    return _place(translated_schema(thing, config.schema), config.prefix)


@lru_cache(maxsize=1024)
def _place(schema: str | None, prefix: str) -> TableNames:
    return TableNames(schema, prefix)


def translated_schema(thing: Any, schema: str | None) -> str | None:
    """Return what a schema is called in statements of this Engine or Connection, sync or async."""
    # An AsyncConnection has options of its own on top of its engine's.
    real = getattr(thing, "sync_connection", None) or getattr(thing, "sync_engine", thing)
    options: Mapping[str, Any] = real.get_execution_options()
    found: str | None = (options.get("schema_translate_map") or {}).get(schema, schema)
    return found


@cache
def function_texts(place: TableNames, version: int = VERSION) -> dict[str, str]:
    """Return the statements that create the functions of a version, by name without the prefix, in order.

    A later version may replace the body of a function of an earlier one: then the later body counts.
    """
    return {
        function: text
        for since, names in FILES.items()
        if since <= version
        for name in names
        for function, text in _statements(name, since, place)
    }


def _statements(name: str, since: int, place: TableNames) -> list[tuple[str, str]]:
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
    return list(zip(_CREATED.findall(text), created, strict=True))


def translated(
    error: BaseException,
    place: TableNames,
    needed: int = 1,
    key_rights: str = "SELECT, INSERT, UPDATE",
    *,
    database: str | None = None,
) -> SchemaError | StaleFencingTokenError | FenceRequiredError | LockTimeoutError | None:
    """Return what the server meant by an error about our tables, functions or gates; None when it is none of those."""
    state = sqlstate(error)
    if state in ("42883", "42P01", "3F000", "42703", "42804"):
        return missing(place, needed, state, (database, None))
    if state == "42501":
        evict = place.prefix + "audit" in primary(error)
        rights = grants(place, "<role>", evict=evict) if needed != KEYS else key_grants(place, "<role>", key_rights)
        command = "; ".join(rights)
        return SchemaError(
            f"this role may not use pgfence's tables: {primary(error)}. As their owner: {command}",
            needed=needed,
            command=command,
            sqlstate=state,
        )
    told = detail_of(error) if state in (STALE_TOKEN, NO_TOKEN, GATE_TIMEOUT) else {}
    if state == STALE_TOKEN and "token" in told:  # another program may use the SQLSTATE too
        resource, token, newest = display_name(str(told.get("resource"))), int(told["token"]), int(told["newest"])
        why = (
            "a newer holder has taken over"
            if token < newest
            else "it was never issued here, or the lease's row was set back (a restore, a fail-over). If this connection leads to a"
            " former primary, close it (engine.dispose()) and try again on a new one"
        )
        return StaleFencingTokenError(
            f"token {token} for {resource!r} is refused, the newest is {newest}: {why}. Nothing of this transaction is"
            " committed: roll back",
            resource=resource,
            token=token,
            newest=newest,
            sqlstate=state,
        )
    if state == NO_TOKEN:
        name = told.get("resource")
        return FenceRequiredError(
            f"{primary(error)}. Write inside lease.begin(...), or fenced(session, resource, token)",
            resource=None if name is None else display_name(str(name)),
            sqlstate=state,
        )
    if state == GATE_TIMEOUT and "inside" in told:
        return _timed_out(told)
    return None


def missing(place: TableNames, needed: int, state: str | None, row: Sequence[Any]) -> SchemaError:
    """Return the error of a place where tables or functions are not there.

    Args:
        place: of the tables.
        needed: the version that was needed.
        state: the SQLSTATE.
        row: the result of `WHERE`, as far as it is known.
    """
    return SchemaError(
        f"pgfence's tables or functions are missing or too old {place.where(*row)}: run `{place.command}`, or"
        " pgfence.schema.create_all(engine). If they are elsewhere, pgfence.configure(engine, schema=..., prefix=...)"
        " says where",
        needed=needed,
        command=place.command,
        sqlstate=state,
    )


def _timed_out(told: Mapping[str, Any]) -> LockTimeoutError:
    name, seconds = display_name(str(told["resource"])), told["milliseconds"] / 1000
    holders = [
        Holder(
            name=name,
            key=None,
            kind="fence",
            mode="shared",
            owner=None,
            host=one["host"],
            pid=None,
            backend_pid=one["pid"],
            application_name=one["application_name"] or None,
            purpose="",
            token=None,
            since=datetime.fromtimestamp(one["since"], UTC),
            expires_at=None,
        )
        for one in told["inside"]
    ]
    who = [f"{who}, {one['state']}: {one['query']}" for who, one in zip(holders, told["inside"], strict=True)]
    return LockTimeoutError(
        f"the gate of {name!r} was not free within {seconds:g} s: a transaction of an older holder is still inside"
        f" ({'; or '.join(who) or 'its session cannot be seen'}). Roll back and try again; pg_terminate_backend ends a"
        " session whose client is gone",
        names=(name,),
        timeout=seconds,
        holders=holders,
    )


def grants(place: TableNames, role: str, *, evict: bool = False) -> list[str]:
    """Return the rights that a role needs for leases, tokens and fences; with `evict` also for ending those of others."""
    tables = ", ".join(place.name(table) for table in ("lease", "gate", "checkpoint", "slot"))
    asked = [f"GRANT SELECT, INSERT, UPDATE ON {tables} TO {role}"]
    asked.append(f"GRANT SELECT ON {place.name('schema_version')} TO {role}")
    if place.schema is not None:
        asked.append(f"GRANT USAGE ON SCHEMA {quoted(place.schema)} TO {role}")
    if evict:
        asked.append(f"GRANT INSERT ON {place.name('audit')} TO {role}")
    return asked


def key_grants(place: TableNames, role: str, rights: str) -> list[str]:
    """Return the rights that a role needs for something it does with idempotency keys."""
    asked = [f"GRANT {rights} ON {place.name('idempotency_key')} TO {role}"]
    asked.append(f"GRANT SELECT ON {place.name('schema_version')} TO {role}")
    if place.schema is not None:
        asked.append(f"GRANT USAGE ON SCHEMA {quoted(place.schema)} TO {role}")
    return asked


def _driver_error(error: BaseException) -> Any:
    original = getattr(error, "orig", None) or error
    return getattr(original, "driver_exception", None) or getattr(original, "__cause__", None) or original


def detail_of(error: BaseException) -> dict[str, Any]:
    """Return the JSON detail of a refusal, whatever wraps the driver's error."""
    for one in (_driver_error(error), getattr(error, "orig", None), error):
        detail = getattr(getattr(one, "diag", None), "message_detail", None) or getattr(one, "detail", None)
        if isinstance(detail, str) and detail.startswith("{"):
            with contextlib.suppress(ValueError):
                found: dict[str, Any] = json.loads(detail)
                return found
    return {}


def primary(error: BaseException) -> str:
    """Return the server's own words, without position and context."""
    for one in (_driver_error(error), getattr(error, "orig", None), error):
        told = getattr(getattr(one, "diag", None), "message_primary", None) or getattr(one, "message", None)
        if isinstance(told, str):
            return told
    return str(error)
