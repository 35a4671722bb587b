"""Run the migrations of each tenant's schema, all of them under one lock, in one process at a time.

The database URL is the first of these that is set: the environment variables MIGRATION_URL and DATABASE_URL, and sqlalchemy.url
in the ini file. It must not point to a pooler in transaction mode. If it has no driver, the driver of the URL in the ini file is
used. The exit code is 75 if another process has been migrating for longer than LOCK_WAIT.
"""

import asyncio
import logging
import os
import sys
import time
from logging.config import fileConfig

from alembic import context
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, pool, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from pgfence import LockKey, LockTimeoutError
from pgfence.migrations import migration_lock

# The MetaData of your models without a schema, for --autogenerate and check:
# from myapp.models import Base
# target_metadata = Base.metadata
target_metadata = None

KEY = LockKey.of("tenants", namespace="migrations")

LOCK_WAIT = 600  # seconds to wait for another process that is migrating
DDL_WAIT = "5s"  # how long DDL waits for a table that is in use, because all other sessions wait behind it
DDL_ATTEMPTS = 5
EX_TEMPFAIL = 75

OPTIONS = {
    "target_metadata": target_metadata,
    "transaction_per_migration": True,
    "autogenerate_plugins": ["alembic.autogenerate.*", "pgfence"],
}

log = logging.getLogger("alembic.env")
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


def tenants(connection: Connection) -> list[str]:
    """Return the schemas to migrate: those of `alembic -x tenants=a,b`, or all whose names begin with tenant_."""
    schemas = connection.scalars(text("SELECT nspname FROM pg_catalog.pg_namespace ORDER BY nspname")).all()
    connection.rollback()
    options = context.get_x_argument(as_dictionary=True)
    if others := options.keys() - {"tenants"}:
        raise CommandError(f"-x {', '.join(others)}: this env.py supports only -x tenants=a,b")
    if "tenants" not in options:
        found = [schema for schema in schemas if schema.startswith("tenant_")]
        if not found:
            log.warning("there are no tenants: no schema has a name that begins with tenant_")
        return found
    asked = options["tenants"].split(",")
    if missing := [schema for schema in asked if schema not in schemas]:
        raise CommandError(f"-x tenants: there is no schema {' or '.join(map(repr, missing))}")
    return asked


def migrate(connection: Connection) -> None:
    settings = {"lock_timeout": f"'{DDL_WAIT}'"}

    @event.listens_for(connection, "begin")
    def set_up(connection: Connection) -> None:
        # Set for each transaction, because a pooler may give the session to another client afterwards. autocommit_block() has no
        # transaction, and is not used through a pooler.
        autocommit = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
        cursor = connection.connection.cursor()
        for name, value in settings.items():
            cursor.execute(f"SET {'SESSION' if autocommit else 'LOCAL'} {name} TO {value}")
        cursor.close()

    with migration_lock(connection, timeout=LOCK_WAIT, key=KEY):
        for schema in tenants(connection):
            # Names without a schema, such as that of the version table, refer to the tenant's schema.
            settings["search_path"] = connection.dialect.identifier_preparer.quote(schema)
            connection.dialect.default_schema_name = schema
            context.configure(connection=connection, **OPTIONS)
            with context.begin_transaction():
                context.run_migrations()
            connection.commit()  # so that the next tenant begins a new transaction


def migrate_once(engine: Engine) -> None:
    with engine.connect() as connection:
        migrate(connection)


async def migrate_once_async(engine: Engine) -> None:
    async with AsyncEngine(engine).connect() as connection:
        await connection.run_sync(migrate)


def is_lock_timeout(error: DBAPIError) -> bool:
    return (getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)) == "55P03"


def online() -> None:
    engine = create_engine(url(), poolclass=pool.NullPool)
    for attempt in range(1, DDL_ATTEMPTS + 1):
        try:
            asyncio.run(migrate_once_async(engine)) if engine.dialect.is_async else migrate_once(engine)
            return
        except DBAPIError as error:
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
