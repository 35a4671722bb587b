"""Run the migrations of each tenant's schema, all of them under one lock, one process at a time.

The database is that of MIGRATION_URL, or sqlalchemy.url of the ini file; it must be reached without a pooler in
transaction mode. Exit code 75: somebody else has been migrating for longer than LOCK_WAIT.
"""

import asyncio
import os
import sys
import time
from collections.abc import Iterable
from logging.config import fileConfig

from alembic import context
from sqlalchemy import Connection, Engine, create_engine, event, pool, text
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

config = context.config
if config.config_file_name is not None:
    fileConfig(config.config_file_name, disable_existing_loggers=False)


def url() -> str:
    return os.environ.get("MIGRATION_URL") or config.get_main_option("sqlalchemy.url") or ""


def tenants(connection: Connection) -> Iterable[str]:
    """Return the schemas to migrate: those of `alembic -x tenants=a,b`, or all whose names begin with tenant_."""
    asked = context.get_x_argument(as_dictionary=True).get("tenants")
    if asked:
        return asked.split(",")
    found = text(r"SELECT nspname FROM pg_catalog.pg_namespace WHERE nspname LIKE 'tenant\_%' ORDER BY nspname")
    schemas = connection.scalars(found).all()
    connection.rollback()
    return schemas


def migrate(connection: Connection) -> None:
    with migration_lock(connection, timeout=LOCK_WAIT, key=KEY):
        for schema in tenants(connection):
            quoted = connection.dialect.identifier_preparer.quote(schema)
            # Every name without a schema is the tenant's, the version table's too. Committed, or the search path would be back
            # at the first rollback.
            connection.execute(text(f"SET search_path TO {quoted}"))
            connection.commit()
            connection.dialect.default_schema_name = schema
            context.configure(connection=connection, **OPTIONS)
            with context.begin_transaction():
                context.run_migrations()


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

    @event.listens_for(engine, "connect")
    def set_lock_timeout(dbapi_connection, _record):
        if engine.dialect.name == "postgresql":
            cursor = dbapi_connection.cursor()
            cursor.execute(f"SET lock_timeout = '{DDL_WAIT}'")
            cursor.close()
            dbapi_connection.commit()

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
