"""Run the migrations of each tenant's schema, all of them under one lock, one process at a time.

The database is that of MIGRATION_URL, DATABASE_URL or sqlalchemy.url of the ini file: the first that is set. It must be reached
without a pooler in transaction mode. The driver is the ini file's where a URL names none. Exit code 75: somebody else
has been migrating for longer than LOCK_WAIT.
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

LOCK_WAIT = 600  # seconds for whoever migrates at this moment
DDL_WAIT = "5s"  # for a table that others use: they all wait behind a statement that waits
DDL_ATTEMPTS = 5
EX_TEMPFAIL = 75

OPTIONS = {
    "target_metadata": target_metadata,
    "transaction_per_migration": True,
    "autogenerate_plugins": ["alembic.autogenerate.*", "pgfence"],
}

log = logging.getLogger("alembic.env")
config = context.config
if config.config_file_name is not None:
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
        raise CommandError(f"-x {', '.join(others)}: this env.py knows -x tenants=a,b alone")
    if "tenants" not in options:
        found = [schema for schema in schemas if schema.startswith("tenant_")]
        if not found:
            log.warning("there is no tenant: no schema's name begins with tenant_")
        return found
    asked = options["tenants"].split(",")
    if missing := [schema for schema in asked if schema not in schemas]:
        raise CommandError(f"-x tenants: there is no schema {', '.join(map(repr, missing))}")
    return asked


def migrate(connection: Connection) -> None:
    settings = {"lock_timeout": f"'{DDL_WAIT}'"}

    @event.listens_for(connection, "begin")
    def set_up(connection: Connection) -> None:
        # For one transaction at a time: a session behind a pooler is somebody else's afterwards. autocommit_block() has none,
        # and is not reached behind a pooler.
        autocommit = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
        cursor = connection.connection.cursor()
        for name, value in settings.items():
            cursor.execute(f"SET {'SESSION' if autocommit else 'LOCAL'} {name} TO {value}")
        cursor.close()

    with migration_lock(connection, timeout=LOCK_WAIT, key=KEY):
        for schema in tenants(connection):
            # Every name without a schema is the tenant's, the version table's too.
            settings["search_path"] = connection.dialect.identifier_preparer.quote(schema)
            connection.dialect.default_schema_name = schema
            context.configure(connection=connection, **OPTIONS)
            with context.begin_transaction():
                context.run_migrations()
            connection.commit()  # the next tenant begins with a transaction of its own


def migrate_once(engine: Engine) -> None:
    with engine.connect() as connection:
        migrate(connection)


async def migrate_once_async(engine: Engine) -> None:
    async with AsyncEngine(engine).connect() as connection:
        await connection.run_sync(migrate)


def waited_in_vain(error: DBAPIError) -> bool:
    return (getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)) == "55P03"


def online() -> None:
    engine = create_engine(url(), poolclass=pool.NullPool)
    for attempt in range(1, DDL_ATTEMPTS + 1):
        try:
            asyncio.run(migrate_once_async(engine)) if engine.dialect.is_async else migrate_once(engine)
            return
        except DBAPIError as error:
            # What is committed stays, and the next attempt goes on after it.
            if not waited_in_vain(error) or attempt == DDL_ATTEMPTS:
                raise
            time.sleep(attempt)


def offline() -> None:
    context.configure(url=url(), literal_binds=True, dialect_opts={"paramstyle": "named"}, **OPTIONS)
    with context.begin_transaction():
        context.run_migrations()


try:
    offline() if context.is_offline_mode() else online()
except LockTimeoutError as busy:
    if config.cmd_opts is None:  # not from the command line: an application that upgrades itself handles it
        raise
    print(busy, file=sys.stderr)
    sys.exit(EX_TEMPFAIL)
