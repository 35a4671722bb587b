"""Find the server of a command, from `--dsn`, `--engine`, `DATABASE_URL` or libpq's variables (PGSERVICE, PGHOST, ...).

No message contains a URL, because a URL may contain a password.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import socket
import sys
from contextlib import contextmanager, suppress
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from pgfence._sql.addresses import describe_server
from pgfence.cli.codes import MisuseError
from pgfence.config import DEFAULT, config_of, configure, expect_place
from pgfence.errors import PoolerError
from pgfence.keys import LockKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sqlalchemy.engine.interfaces import Dialect

DRIVERS = ("psycopg", "psycopg2")
# The variables of libpq that select a server. PGUSER, for example, does not.
WHERE = ("PGDATABASE", "PGHOST", "PGHOSTADDR", "PGPORT", "PGSERVICE")


class Pooler(StrEnum):
    """The kind of pooler in front of the server, as the user declares it."""

    AUTO = "auto"
    DIRECT = "direct"
    SESSION = "session"
    TRANSACTION = "transaction"


@contextmanager
def open_engine(dsn: str | None, path: str | None, *, name: str | None = None, **given: str | None) -> Iterator[Engine]:
    """Yield the user's engine, configured with the options, and close its connections at the end."""
    engine = find_engine(dsn=dsn, path=path, environ=os.environ, name=name or "")
    try:
        settle(engine, **given)
        yield engine
    finally:
        engine.dispose()


def settle(engine: Engine, **given: str | None) -> None:
    """Configure an engine with the options that were given. The application's other settings are kept.

    Args:
        engine: the engine from `find_engine`.
        **given: the arguments of `configure`. Options that were not given are None.

    Raises:
        MisuseError: a value cannot be used, or contradicts the application's own settings.
    """
    said: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not said:
        return
    check_names(**{name: said[name] for name in ("namespace", "schema", "prefix") if name in said})
    known = config_of(engine)
    # `events` is not compared, because it is not an argument of configure().
    try:
        configure(engine, **{each.name: getattr(known, each.name) for each in fields(known) if each.compare} | said)
    except ValueError:  # the values were checked, so the engine has other ones
        options = [f"--{name}" for name in said if getattr(known, name) != said[name]]
        verb, them = ("contradicts", "it") if len(options) == 1 else ("contradict", "them")
        raise MisuseError(
            f"{' and '.join(options)} {verb} the settings of the application's engine: omit {them}, or change the application's"
            " call of configure()"
        ) from None


def check_names(*, namespace: str = "", schema: str | None = None, prefix: str = DEFAULT.prefix) -> None:
    """Raise MisuseError if --namespace, --schema or --prefix cannot be used."""
    if schema == "":
        raise MisuseError("--schema is empty: give a name, or omit --schema to use the search path")
    try:
        expect_place(schema, prefix)
    except ValueError as error:
        raise MisuseError(f"--{error}") from None
    try:
        LockKey.of("any", namespace=namespace)
    except ValueError as error:
        raise MisuseError(f"--namespace: {error}") from None


def find_engine(*, dsn: str | None, path: str | None, environ: Mapping[str, str], name: str = "") -> Engine:
    """Return the user's engine, from `path`, `dsn`, DATABASE_URL, libpq's variables or libpq's default server, in this order.

    Args:
        dsn: a database URL.
        path: `package.module:attribute`, an Engine or a function without arguments that returns one.
        environ: the environment, with DATABASE_URL and libpq's variables.
        name: the name of the lock that the command is for, shown in the application name.

    Raises:
        MisuseError: the engine cannot be used; the message says why and what to do.
    """
    if dsn is not None and path is not None:
        raise MisuseError("give --dsn or --engine, not both")
    if dsn == "":
        raise MisuseError("--dsn is empty: give a database URL, or omit --dsn")
    if path is not None:
        return _import(path)
    for text, source in ((dsn, "--dsn"), (environ.get("DATABASE_URL"), "DATABASE_URL")):
        if text:
            return _create(_parse(text, source), source, name)
    if any(map(environ.get, WHERE)):
        return _create(URL.create("postgresql"), "the environment", name)
    if "DATABASE_URL" in environ:
        raise MisuseError("DATABASE_URL is empty: set it, or PGSERVICE or PGHOST, or give --dsn or --engine")
    return _create_unnamed(name)


def describe_pooler(engine: Engine, error: PoolerError) -> PoolerError:
    """Return the error for a pooler, with advice that names command-line options."""
    session = "" if error.mode == "transaction" else "; or add --pooler session if the pooler is in session mode"
    return PoolerError(
        f"{describe_server(engine)}: session locks are not safe here, because a connection pooler"
        f"{' in transaction mode' if not session else ''} is between pgfence and PostgreSQL. Pass the URL of the server itself as"
        " --dsn; or use --lease, which also works through a pooler in transaction mode and needs the tables of"
        f" `pgfence install`{session}",
        mode=error.mode,
    )


def _create_unnamed(name: str) -> Engine:
    """Return an engine for libpq's default server. If that server cannot be reached, the error says how to choose another one."""
    engine = _create(URL.create("postgresql"), "the environment", name)

    @event.listens_for(engine, "do_connect")
    def connect(dialect: Dialect, _record: object, words: list[Any], options: dict[str, Any]) -> object:
        failure = dialect.loaded_dbapi.OperationalError
        try:
            return dialect.connect(*words, **options)
        except failure as error:
            way = "give --dsn or --engine, or set DATABASE_URL, PGSERVICE or PGHOST"
            raise failure(
                f"no server was given: {way}. Connecting to libpq's default server failed: {error}"
            ) from error

    return engine


def _parse(text: str, source: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise MisuseError(f"{source} is not a database URL: write it as postgresql://user@host:port/database") from None
    if url.get_backend_name() not in {"postgresql", "postgres"}:
        raise MisuseError(f"{source} is a URL for {url.get_backend_name()}: pgfence needs PostgreSQL")
    return url


def _create(url: URL, source: str, name: str) -> Engine:
    driver = url.drivername.partition("+")[2]
    if driver in {"asyncpg", "psycopg_async"}:
        raise MisuseError(
            f"{source} selects the async driver {driver}, and the command line has no event loop:"
            " write postgresql://... or postgresql+psycopg://..."
        )
    if driver and driver not in DRIVERS:
        raise MisuseError(
            f"{source} selects the driver {driver}, but the command line supports only {' and '.join(DRIVERS)}"
        )
    url = url.set(drivername=f"postgresql+{_find_driver(driver)}")
    # Other processes see this text as the holder of the lock, unless the user has set an application name.
    arguments = {"fallback_application_name": _build_application_name(name)}
    if "client_encoding" not in url.query and not os.environ.get("PGCLIENTENCODING"):
        # Otherwise, psycopg uses the encoding of the database and, with SQL_ASCII, returns bytes that SQLAlchemy cannot handle.
        arguments["client_encoding"] = "utf8"
    try:
        # Looking up the hstore type would take three round trips, and no command reads one.
        return create_engine(url, connect_args=arguments, use_native_hstore=False)
    except (ArgumentError, TypeError):
        raise MisuseError(f"{source} contains an option that SQLAlchemy does not accept: remove the option") from None


def _build_application_name(name: str) -> str:
    """Return `pgfence NAME (pid 7 on host)`. The name is cut, because the server keeps only 63 bytes."""
    process = f"(pid {os.getpid()} on {socket.gethostname()})"
    room = max(8, 63 - len(f"pgfence  {process}"))
    shown = name if len(name) <= room else f"{name[: room - 3]}..."
    return " ".join(filter(None, ("pgfence", shown, process)))


def _find_driver(wanted: str) -> str:
    missing = f"the driver {wanted} is not installed" if wanted else "no PostgreSQL driver is installed"
    for driver in (wanted,) if wanted else DRIVERS:
        try:
            importlib.import_module(driver)
        except ImportError as error:
            if not (
                isinstance(error, ModuleNotFoundError) and error.name == driver
            ):  # for example, psycopg without libpq
                missing = f"the driver {driver} cannot be imported ({error})"
            continue
        return driver
    raise MisuseError(f"{missing}: run pip install 'pgfence[{wanted or DRIVERS[0]}]'")


def _import(path: str) -> Engine:
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise MisuseError(f"--engine must be written as package.module:attribute, not {path!r}")
    # `python -m` does this, too. In a console script, the first entry of the path is the directory of the script.
    with suppress(FileNotFoundError):  # the directory has been deleted
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = operator.attrgetter(attribute)(importlib.import_module(module))
        if returned := callable(found) and not inspect.iscoroutinefunction(found):
            found = found()
    except (Exception, SystemExit) as error:  # a script may call sys.exit() at its end
        raise MisuseError(f"cannot load --engine {path!r}: {type(error).__name__}: {error}") from error
    if hasattr(found, "sync_engine"):
        raise MisuseError(
            f"--engine {path!r} is an AsyncEngine, and the command line has no event loop: give an Engine, or use --dsn"
            " or DATABASE_URL"
        )
    if inspect.iscoroutinefunction(found):
        raise MisuseError(
            f"--engine {path!r} is a coroutine function, and the command line has no event loop: give an Engine, or a function"
            " that returns one"
        )
    if not isinstance(found, Engine):
        kind = type(found).__name__
        raise MisuseError(
            f"the function of --engine {path!r} must return an Engine, not {kind}"
            if returned
            else f"--engine {path!r} is neither an Engine nor a function that returns one, but of the type {kind}"
        )
    return found
