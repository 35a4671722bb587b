"""`pgfence key`: print the key of a name, or find out what a key is for."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import click

from pgfence._admin.connection import run_on_engine, translate_statement_error
from pgfence._admin.known_keys import list_keys_of_libraries, recognize_key
from pgfence._sql.lock_names import find_name
from pgfence._sql.storage import table_names_of
from pgfence.cli import options
from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.parser import Command, Option
from pgfence.cli.report import exit_on_error
from pgfence.cli.server import open_engine
from pgfence.config import config_of
from pgfence.errors import PgfenceError
from pgfence.keys import SEPARATOR, LockKey, unqualify_name

if TYPE_CHECKING:
    from sqlalchemy import Engine

_PAIR = re.compile(r"(-?\d+)\s*,\s*(-?\d+)")


@click.command(
    "key",
    short_help="Print the 64-bit key of a lock name, or what a key is for.",
    cls=Command,
    usage="[OPTIONS] NAME...",
    arguments={"NAME": "Name of a lock. With --who, any number of names to try."},
    examples={
        "pgfence key nightly-billing --namespace shop": "The key of a name in a namespace",
        "pgfence key --who 72707369": "What a number in pg_locks or in the server's log is for",
        "pgfence key --who 3812344,0 nightly-billing": "Whether a pair of numbers is the key that a known library computes from a name",
    },
    codes=[
        ("0", "The key was printed or, with --who, what it is for."),
        ("64", "Misuse: the name, the namespace or the number cannot be used."),
        ("67", "With --who: the key is not known."),
        ("69", "With --who and a database: the server did not respond."),
        ("78", "With --who and a database: the server is not PostgreSQL, or is too old."),
    ],
)
@click.argument("names", metavar="NAME", nargs=-1)
@click.option(
    "--who",
    cls=Option,
    metavar="NUMBER",
    help="Print what this key is for. Give a number or, for a lock whose objsubid is 2, the pair classid,objid.",
)
@options.add_database_options
@options.as_json
def key(
    names: tuple[str, ...],
    who: str | None,
    dsn: str | None,
    engine: str | None,
    namespace: str | None,
    schema: str | None,
    prefix: str | None,
    as_json: bool,
) -> None:
    """Print the 64-bit key of a lock name, how pg_locks shows the key, and a SQL expression that computes it.

    Use it to find a lock in pg_locks or in the server's log. With --who, print what a key is for; a server is contacted only if
    --dsn or --engine is given, to look up stored names and the keys of migration tools.
    """
    if who is None:
        given = {"dsn": dsn, "engine": engine, "schema": schema, "prefix": prefix}
        if unused := [option for option, value in given.items() if value is not None]:
            raise MisuseError(f"--{unused[0]} needs --who: the key depends only on NAME and --namespace")
        _show_key(names, namespace or "", as_json=as_json)
        return
    wanted = _parse_key(who)
    if dsn is None and engine is None:
        found = _recognize(wanted, names, namespace or "", "")
    else:
        with open_engine(dsn, engine, namespace=namespace, schema=schema, prefix=prefix) as target:
            found = _look_up(target, wanted, names, config_of(target).namespace)
    if as_json:
        print(json.dumps({"key": wanted.value, "space": wanted.space, "found": found}))
    else:
        print(f"{wanted.label} is not known." if found is None else f"{wanted.label}: {found}")
    raise CommandExit(Code.NOBODY if found is None else Code.OK)


def _show_key(names: tuple[str, ...], namespace: str, *, as_json: bool) -> None:
    if len(names) != 1:
        several = f"give one NAME, not {len(names)}: only --who accepts several"
        said = several if names else "NAME is missing: give the name of a lock, or --who NUMBER"
        raise MisuseError(f"{said}; see `pgfence key --help`")
    try:
        value = LockKey.of(names[0], namespace=namespace).value
    except ValueError as error:
        raise MisuseError(str(error)) from None
    unsigned = value % (1 << 64)
    shown = {"key": value, "classid": unsigned >> 32, "objid": unsigned & 0xFFFFFFFF, "objsubid": 1}
    sql = _build_sql(names[0], namespace)
    if as_json:
        print(json.dumps({"name": names[0], "namespace": namespace, **shown, "sql": sql}))
    else:
        for what, number in (shown | {"sql": sql}).items():
            print(f"{what:<9}{number}")


def _build_sql(name: str, namespace: str) -> str:
    """Return the SQL expression that computes the key, for psql and for other languages."""
    text = "chr(31) || " + _quote(name) if not namespace else f"{_quote(namespace)} || chr(31) || {_quote(name)}"
    return f"('x' || left(encode(sha256(convert_to({text}, 'UTF8')), 'hex'), 16))::bit(64)::bigint"


def _quote(text: str) -> str:
    doubled = text.replace("'", "''")
    return "E'" + doubled.replace("\\", "\\\\") + "'" if "\\" in text else f"'{doubled}'"


def _parse_key(text: str) -> LockKey:
    if not re.fullmatch(r"-?\d+", text) and not _PAIR.fullmatch(text.strip("() ")):
        raise MisuseError(f"--who must be a number, or a pair of numbers such as 12,34, not {text!r}")
    pair = _PAIR.fullmatch(text.strip("() "))
    try:
        if pair is not None:
            # pg_locks shows the halves of a key as unsigned numbers.
            return LockKey.pair(
                *(int(half) - (1 << 32) if 1 << 31 <= int(half) < 1 << 32 else int(half) for half in pair.groups())
            )
        return LockKey.raw(int(text))
    except ValueError:
        size = "a signed 64-bit integer" if pair is None else "a pair of 32-bit integers"
        raise MisuseError(f"--who {text!r} is not the key of a lock, because it does not fit into {size}") from None


def _recognize(wanted: LockKey, names: tuple[str, ...], namespace: str, database: str) -> str | None:
    where = f" in the namespace {namespace!r}" if namespace else ""
    for name in names:
        try:
            candidates = [
                (LockKey.of(name, namespace=namespace), f"pgfence lock {name!r}{where}"),
                *list_keys_of_libraries(name),
            ]
        except ValueError as error:
            raise MisuseError(str(error)) from None
        for candidate, what in candidates:
            if candidate == wanted:
                return what
    return recognize_key(wanted, database)


def _look_up(engine: Engine, wanted: LockKey, names: tuple[str, ...], namespace: str) -> str | None:
    place = table_names_of(engine)

    def translate(engine: Engine, error: Exception) -> PgfenceError | None:
        return None if isinstance(error, PgfenceError) else translate_statement_error(engine, error)

    with exit_on_error():
        database, name = run_on_engine(engine, lambda connection: find_name(connection, place, wanted), translate)
    if name is None:
        return _recognize(wanted, names, namespace, database)
    space, separator, bare = name.rpartition(SEPARATOR)
    return (
        f"pgfence lock {bare!r} in the namespace {space!r}" if separator else f"pgfence lock {unqualify_name(name)!r}"
    )
