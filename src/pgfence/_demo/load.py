"""Create pgbench's tables in a separate schema, with pgbench itself or, if that is not possible, with SQL."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from pgfence._demo.bank import SCHEMA
from pgfence._demo.errors import DemoError
from pgfence.embedded import _binaries
from pgfence.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import URL, Engine

_PATIENCE = 120.0
_SECRETS = {"password", "sslpassword"}

# The tables of pgbench at scale 1.
_TABLES = f"""
    CREATE TABLE {SCHEMA}.pgbench_branches (bid int PRIMARY KEY, bbalance int, filler char(88));
    CREATE TABLE {SCHEMA}.pgbench_tellers (tid int PRIMARY KEY, bid int, tbalance int, filler char(84));
    CREATE TABLE {SCHEMA}.pgbench_accounts (aid int PRIMARY KEY, bid int, abalance int, filler char(84));
    CREATE TABLE {SCHEMA}.pgbench_history (tid int, bid int, aid int, delta int, mtime timestamp, filler char(22));
    INSERT INTO {SCHEMA}.pgbench_branches VALUES (1, 0);
    INSERT INTO {SCHEMA}.pgbench_tellers SELECT number, 1, 0 FROM generate_series(1, 10) AS number;
    INSERT INTO {SCHEMA}.pgbench_accounts SELECT number, 1, 0, '' FROM generate_series(1, 100000) AS number;
"""


@contextmanager
def create_tables(engine: Engine, *, keep: bool = False) -> Iterator[str]:
    """Create the schema with pgbench's tables at scale 1, and yield how they were filled.

    The schema is dropped at the end, unless `keep` is true and the block succeeds.

    Raises:
        DemoError: the schema already exists or cannot be created.
    """
    _create_schema(engine)
    try:
        yield _fill(engine)
        if not keep:
            _drop_schema(engine)
    except BaseException:
        # The original error says more than a failure to drop the schema on a server that is no longer running.
        with suppress(DBAPIError):
            _drop_schema(engine)
        raise


def find_program(name: str) -> Path | None:
    """Return the path of a PostgreSQL client program next to the server's binaries or on PATH, or None."""
    try:
        beside = _binaries.find() / name
    except UnreachableError:
        beside = None
    if beside is not None and os.access(beside, os.X_OK):
        return beside
    found = shutil.which(name)
    return Path(found) if found else None


def build_psql_command(engine: Engine) -> str:
    """Return a psql command for looking at the tables on an embedded server. It uses the socket, which needs no password."""
    with engine.connect() as connection:
        folder = str(connection.scalar(text("SHOW unix_socket_directories"))).strip('"')
    url = engine.url
    place = f"host={folder} port={url.port} user={url.username} dbname={url.database} options=-csearch_path={SCHEMA}"
    return f"{find_program('psql') or 'psql'} '{place}'"


def _fill(engine: Engine) -> str:
    pgbench = find_program("pgbench")
    if pgbench is not None and _reaches_schema(engine.url) and _run_pgbench(pgbench, engine.url):
        told = subprocess.run([pgbench, "--version"], capture_output=True, text=True, check=True)
        return f"pgbench {told.stdout.split()[2]}"
    _drop_schema(engine)
    _create_schema(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(_TABLES)
    return "SQL"


def _drop_schema(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")


def _create_schema(engine: Engine) -> None:
    try:
        with engine.begin() as connection:
            if connection.scalar(text("SELECT 1 FROM pg_namespace WHERE nspname = :name"), {"name": SCHEMA}):
                raise DemoError(
                    f"the schema {SCHEMA} already exists in this database. If an earlier demo left it behind,"
                    f" drop it: DROP SCHEMA {SCHEMA} CASCADE"
                )
            connection.exec_driver_sql(f"CREATE SCHEMA {SCHEMA}")
    except DBAPIError as error:
        raise DemoError(f"cannot create the schema {SCHEMA} in this database: {error.orig}") from error


def _add_search_path(url: URL) -> URL:
    options = url.query.get("options", "")
    given = " ".join(options) if isinstance(options, tuple) else options
    return url.update_query_dict({"options": f"{given} -csearch_path={SCHEMA}".strip()})


def _reaches_schema(url: URL) -> bool:
    """Return whether a session that sets the search path at its start gets it. A pooler may reject or ignore the setting.

    pgbench has no option for a schema, and must not find tables of other programs with the same names.
    """
    engine = create_engine(_add_search_path(url))
    try:
        with engine.connect() as connection:
            return bool(connection.scalar(text("SELECT current_schema()")) == SCHEMA)
    except DBAPIError:
        return False
    finally:
        engine.dispose()


def _run_pgbench(pgbench: Path, url: URL) -> bool:
    """Run pgbench to create the tables (t), generate the rows (g), vacuum (v) and add the keys (p); it drops nothing.

    Its arguments are visible in the process list, so a password is passed in the environment or not at all.
    """
    if _SECRETS & url.query.keys():
        return False
    asked = _add_search_path(url)._replace(drivername="postgresql", password=None)
    environment = os.environ | ({"PGPASSWORD": str(url.password)} if url.password else {})
    words = [str(pgbench), "-i", "-q", "-s", "1", "-I", "tgvp", asked.render_as_string(hide_password=False)]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, check=False, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
