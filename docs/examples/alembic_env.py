"""The online part of an existing env.py, with the migration lock added."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, MetaData, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from pgfence import LockKey
from pgfence.migrations import migration_lock

target_metadata = MetaData()  # replace this with your models' MetaData
engine = create_engine("postgresql+psycopg://")
async_engine = create_async_engine("postgresql+asyncpg://")

# The number that your older releases lock. If there are no such releases, omit `key=`.
OLD = LockKey.raw(1346918401)


def migrate(connection: Connection) -> None:
    with migration_lock(connection, timeout=600, key=OLD):
        context.configure(connection=connection, target_metadata=target_metadata)
        with context.begin_transaction():
            context.run_migrations()


def run_migrations_online() -> None:
    with engine.connect() as connection:
        migrate(connection)


async def run_async_migrations() -> None:
    async with async_engine.connect() as connection:
        await connection.run_sync(migrate)
