"""Provide the database of a test run, on a temporary server or on the server that `PGFENCE_TEST_DSN` selects."""

from __future__ import annotations

import os
import secrets
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from sqlalchemy import create_engine, make_url

from pgfence._sql import testing as statements
from pgfence.embedded._server import Server
from pgfence.testing._clock import CLOCKS, ServerClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import URL, Engine

VARIABLE = "PGFENCE_TEST_DSN"
_SYNC = {"psycopg", "psycopg2"}


def build_sync_url(url: str | URL) -> URL:
    """Return the URL for a sync driver: psycopg, unless the URL names psycopg2."""
    parsed = make_url(url)
    driver = parsed.drivername.partition("+")[2]
    return parsed.set(drivername=f"postgresql+{driver if driver in _SYNC else 'psycopg'}")


def open_engine(url: str | URL, label: str = "pgfence_testing") -> Engine:
    """Return an engine for the helpers of a test run, with `label` as the application_name."""
    try:
        return create_engine(
            build_sync_url(url), pool_pre_ping=True, pool_size=2, connect_args={"application_name": label}
        )
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the fixtures of pgfence connect with {error.name}, which is not installed: pip install 'pgfence[psycopg]'"
        ) from error


@contextmanager
def open_database(worker: str, *, movable_clock: bool = False) -> Iterator[str]:
    """Yield the URL of a database that exists until the end of the block.

    With `movable_clock`, the temporary server is started with libfaketime.
    """
    if dsn := os.environ.get(VARIABLE):
        with create_database(dsn, worker) as url:
            yield url
        return
    with closing(Server(fsync=False)) as server:
        clock = ServerClock(server.folder / "clock") if movable_clock else None
        if clock is not None:
            server.environment = clock.environment
        server.start()
        if clock is not None:
            CLOCKS[server.url] = clock
        yield server.url


@contextmanager
def create_database(dsn: str, label: str) -> Iterator[str]:
    """Create a database with a new name on a server, yield its URL for a sync driver, and drop it."""
    name = f"pgfence_test_{secrets.token_hex(4)}_{label}"
    # CREATE DATABASE is not allowed in a transaction.
    engine = open_engine(dsn)
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    try:
        with autocommit.connect() as connection:
            connection.exec_driver_sql(statements.build_create_database(name))
        try:
            yield build_sync_url(dsn).set(database=name).render_as_string(hide_password=False)
        finally:
            with autocommit.connect() as connection:
                connection.exec_driver_sql(statements.build_drop_database(name))
    finally:
        engine.dispose()
