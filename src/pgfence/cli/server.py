"""Which server a command talks to: `--dsn`, `--engine`, `DATABASE_URL`, or what libpq finds (PGSERVICE, PGHOST, ...).

No message from here holds a URL: it may hold a password.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import socket
import sys
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from pgfence.cli.codes import MisuseError
from pgfence.config import config_of, configure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sqlalchemy.engine.interfaces import Dialect

DRIVERS = ("psycopg", "psycopg2")
# Those of libpq's variables that say where to go, and not only as whom.
WHERE = ("PGDATABASE", "PGHOST", "PGHOSTADDR", "PGPORT", "PGSERVICE")
INSTALL = 'pip install "psycopg[binary]"'


@contextmanager
def open_engine(dsn: str | None, path: str | None, **given: str | None) -> Iterator[Engine]:
    """Yield the engine that the user means, settled; see `find_engine` and `settle`. Its connections are closed at the end."""
    engine = find_engine(dsn=dsn, path=path, environ=os.environ)
    try:
        settle(engine, **given)
        yield engine
    finally:
        engine.dispose()


def settle(engine: Engine, **given: str | None) -> None:
    """Set what options say about an engine; the rest is left as the application has it.

    Args:
        engine: from `engine_from`.
        **given: arguments of `configure`; None was not given.

    Raises:
        MisuseError: a value cannot be used, or the application has configured its engine otherwise.
    """
    said: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not said:
        return
    known = config_of(engine)
    try:
        configure(engine, **{each.name: getattr(known, each.name) for each in fields(known)} | said)
    except ValueError as error:
        raise MisuseError(f"{', '.join(f'--{name}' for name in said)}: {error}") from None


def find_engine(*, dsn: str | None, path: str | None, environ: Mapping[str, str]) -> Engine:
    """Return the engine that the user means: the first of the four ways that is given.

    Args:
        dsn: a database URL.
        path: `package.module:attribute`, an Engine or a function without arguments that returns one.
        environ: where DATABASE_URL and libpq's variables are looked for.

    Raises:
        MisuseError: it cannot be used; the message says why and what to do.
    """
    if dsn is not None and path is not None:
        raise MisuseError("give --dsn or --engine, not both")
    if path is not None:
        return _import(path)
    for text, source in ((dsn, "--dsn"), (environ.get("DATABASE_URL"), "DATABASE_URL")):
        if text:
            return _create(_parse(text, source), source)
    if any(map(environ.get, WHERE)):
        return _create(URL.create("postgresql"), "the environment")
    if "DATABASE_URL" in environ:
        raise MisuseError("DATABASE_URL is empty: set it, or PGSERVICE or PGHOST, or give --dsn or --engine")
    return _create_unnamed()


def _create_unnamed() -> Engine:
    """Return an engine for libpq's own default, which says so when nobody answers there."""
    engine = _create(URL.create("postgresql"), "the environment")

    @event.listens_for(engine, "do_connect")
    def connect(dialect: Dialect, _record: object, words: list[Any], options: dict[str, Any]) -> object:
        failure = dialect.loaded_dbapi.OperationalError
        try:
            return dialect.connect(*words, **options)
        except failure as error:
            way = "give --dsn or --engine, or set DATABASE_URL, PGSERVICE or PGHOST"
            raise failure(f"no server was named: {way}. The default was tried, and {error}") from error

    return engine


def _parse(text: str, source: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise MisuseError(
            f"{source} is not a database URL that can be read: its form is postgresql://user@host:port/database"
        ) from None
    if url.get_backend_name() not in {"postgresql", "postgres"}:
        raise MisuseError(f"{source} names {url.get_backend_name()}: pgfence needs PostgreSQL")
    return url


def _create(url: URL, source: str) -> Engine:
    driver = url.drivername.partition("+")[2]
    if driver in {"asyncpg", "psycopg_async"}:
        raise MisuseError(
            f"{source} names the async driver {driver}, and a command waits without an event loop:"
            " write postgresql://... or postgresql+psycopg://..."
        )
    if driver and driver not in DRIVERS:
        raise MisuseError(f"{source} names the driver {driver}: pgfence works with {' and '.join(DRIVERS)}")
    url = url.set(drivername=f"postgresql+{_find_driver(driver)}")
    # How others see us when they ask who holds a lock, unless the user has given a name.
    called = f"pgfence (pid {os.getpid()} on {socket.gethostname()})"
    arguments = {"fallback_application_name": called}
    if "client_encoding" not in url.query and not os.environ.get("PGCLIENTENCODING"):
        # psycopg takes the encoding of the database, and SQLAlchemy cannot work with what it returns in SQL_ASCII.
        arguments["client_encoding"] = "utf8"
    try:
        # To ask the server for the hstore type would take three round trips, and no command reads one.
        return create_engine(url, connect_args=arguments, use_native_hstore=False)
    except (ArgumentError, TypeError):
        raise MisuseError(f"{source} has an option that SQLAlchemy does not know") from None


def _find_driver(wanted: str) -> str:
    for driver in (wanted,) if wanted else DRIVERS:
        try:
            importlib.import_module(driver)
        except ImportError:
            continue
        return driver
    missing = f"the driver {wanted} is not installed" if wanted else "no PostgreSQL driver is installed"
    raise MisuseError(f"{missing}: {INSTALL}")


def _import(path: str) -> Engine:
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise MisuseError(f"--engine {path}: its form is package.module:attribute")
    # As `python -m` does: a console script has its own folder there, not the one it was called in.
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = operator.attrgetter(attribute)(importlib.import_module(module))
        if callable(found) and not inspect.iscoroutinefunction(found):
            found = found()
    except Exception as error:
        raise MisuseError(f"--engine {path}: {type(error).__name__}: {error}") from error
    if hasattr(found, "sync_engine"):
        raise MisuseError(
            f"--engine {path} is an AsyncEngine, and a command waits without an event loop: name an Engine,"
            " or the server by DATABASE_URL"
        )
    if not isinstance(found, Engine):
        raise MisuseError(
            f"--engine {path} is neither an Engine nor a function that returns one: {type(found).__name__}"
        )
    return found
