"""How expired idempotency keys are taken away: batch by batch, on one connection of the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._sql import purge as statements
from pgfence._sql.errors import translate_connect_error, translate_error
from pgfence._sql.sqlstate import sqlstate_of
from pgfence._sql.storage import table_names
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

LARGEST_BATCH = 100_000
_NO_SESSION = ("08", "28", "3D", "533", "57P")


def purge(engine: Engine, batch: int) -> int:
    """Take all expired keys away, and return how many they were."""
    place, done, end = table_names(engine), 0, statements.BEGINNING
    try:
        # Whatever the engine's own default is: what somebody else has just renewed is to be seen, not an error.
        with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            while True:
                count, end = statements.purge(connection, place, batch, end)
                if not count:
                    return done
                done += count
    except Exception as error:
        if (told := _told(engine, error)) is None:
            raise
        raise told from error


async def purge_async(engine: AsyncEngine, batch: int) -> int:
    """As `purge`, on a connection of an async engine's."""
    place, done, end = table_names(engine), 0, statements.BEGINNING
    try:
        async with engine.connect() as connection:
            await connection.execution_options(isolation_level="READ COMMITTED")
            while True:
                count, end = await connection.run_sync(statements.purge, place, batch, end)
                if not count:
                    return done
                done += count
    except Exception as error:
        if (told := _told(engine.sync_engine, error)) is None:
            raise
        raise told from error


def _told(engine: Engine, error: Exception) -> PgfenceError | None:
    if isinstance(error, PgfenceError):
        return None
    if told := translate_error(error, table_names(engine), statements.CONTEXT, engine):
        return told
    state = sqlstate_of(error)
    if state is not None and not state.startswith(_NO_SESSION):
        return None
    return translate_connect_error(engine, error, "What was purged before stays so")
