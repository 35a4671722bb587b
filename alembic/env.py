"""Run migrations in one process at a time, however many start them.

The database URL is the first of these that is set: the environment variables MIGRATION_URL and DATABASE_URL, and sqlalchemy.url
in the ini file. It must not point to a pooler in transaction mode. If it has no driver, the driver of the URL in the ini file is
used. The exit code is 75 if another process has been migrating for longer than LOCK_WAIT.
"""
# ruff: noqa: D103, I002, T201

import logging
import os
import sys
import time
from logging.config import fileConfig

from alembic import context
from sqlalchemy import URL, Connection, MetaData, create_engine, event, make_url, pool
from sqlalchemy.exc import OperationalError

from pgfence import LockTimeoutError, schema
from pgfence.migrations import migration_lock

target_metadata = MetaData()
schema.tables(target_metadata)

LOCK_WAIT = 600  # seconds to wait for another process that is migrating
DDL_WAIT = "5s"  # how long DDL waits for a table that is in use, because all other sessions wait behind it
DDL_ATTEMPTS = 5
EX_TEMPFAIL = 75

OPTIONS = {
    "target_metadata": target_metadata,
    "transaction_per_migration": True,
    "autogenerate_plugins": ["alembic.autogenerate.*", "pgfence"],
}

config = context.config
# An application that upgrades its database itself keeps its own configuration of logging.
if config.config_file_name is not None and not logging.root.handlers:
    fileConfig(config.config_file_name, disable_existing_loggers=False)


def url() -> URL:
    own = make_url(config.get_main_option("sqlalchemy.url") or "postgresql+psycopg://")
    given = os.environ.get("MIGRATION_URL") or os.environ.get("DATABASE_URL")
    if not given:
        return own
    found = make_url(given)
    return found.set(drivername=own.drivername) if found.drivername in {"postgres", "postgresql"} else found


def limit_waits(connection: Connection) -> None:
    # Set for each transaction, because a pooler may give the session to another client afterwards. autocommit_block() has no
    # transaction, and is not used through a pooler.
    if connection.dialect.name == "postgresql":
        autocommit = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
        cursor = connection.connection.cursor()
        cursor.execute(f"SET {'SESSION' if autocommit else 'LOCAL'} lock_timeout = '{DDL_WAIT}'")
        cursor.close()


def migrate(connection: Connection) -> None:
    event.listen(connection, "begin", limit_waits)
    with migration_lock(connection, timeout=LOCK_WAIT):
        context.configure(connection=connection, **OPTIONS)
        with context.begin_transaction():
            context.run_migrations()


def is_lock_timeout(error: OperationalError) -> bool:
    return (getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)) == "55P03"


def online() -> None:
    engine = create_engine(url(), poolclass=pool.NullPool)
    for attempt in range(1, DDL_ATTEMPTS + 1):
        try:
            with engine.connect() as connection:
                migrate(connection)
            return
        except OperationalError as error:
            # Committed migrations remain, and the next attempt continues after them.
            if not is_lock_timeout(error) or attempt == DDL_ATTEMPTS:
                raise
            time.sleep(attempt)


def offline() -> None:
    context.configure(url=url(), literal_binds=True, dialect_opts={"paramstyle": "named"}, **OPTIONS)
    with context.begin_transaction():
        context.run_migrations()


try:
    offline() if context.is_offline_mode() else online()
except LockTimeoutError as busy:
    if config.cmd_opts is None:  # run by an application that upgrades itself and handles the error
        raise
    print(busy, file=sys.stderr)
    sys.exit(EX_TEMPFAIL)
