"""An env.py that was there before: the lock around what it does, in an application with a sync or an async engine."""

from __future__ import annotations

from alembic import context
from app import Base, async_engine, engine
from sqlalchemy import Connection

from pgfence import LockKey
from pgfence.migrations import migration_lock

OLD = LockKey.raw(1346918401)  # the number that older releases lock with


def migrate(connection: Connection) -> None:
    with migration_lock(connection, timeout=600, key=OLD):
        context.configure(connection=connection, target_metadata=Base.metadata)
        with context.begin_transaction():
            context.run_migrations()


def online() -> None:
    with engine.connect() as connection:
        migrate(connection)


async def online_async() -> None:
    async with async_engine.connect() as connection:
        await connection.run_sync(migrate)
