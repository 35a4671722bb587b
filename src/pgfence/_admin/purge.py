"""Delete expired idempotency keys in batches, on one connection of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

from pgfence._admin.connection import run_on_engine
from pgfence._sql import purge as statements
from pgfence._sql.errors import translate_connect_error, translate_error
from pgfence._sql.lock_names import forget_old_names
from pgfence._sql.sqlstate import sqlstate_of
from pgfence._sql.storage import table_names_of
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence._process.coroutines import Coro

LARGEST_BATCH = 100_000
# Prefixes of the SQLSTATEs for connections that were lost or rejected, and for too many connections. Other errors are
# raised unchanged.
_NO_SESSION = ("08", "28", "3D", "533", "57P")


@overload
def purge(engine: AsyncEngine, batch: int) -> Coro[int]: ...
@overload
def purge(engine: Engine, batch: int) -> int: ...
def purge(engine: Engine | AsyncEngine, batch: int) -> object:
    """Delete expired keys and return their number. For an AsyncEngine, return a coroutine."""
    place = table_names_of(engine)

    def delete_batches(connection: Connection) -> int:
        done, end = 0, statements.BEGINNING
        while True:
            count, end = statements.purge(connection, place, batch, end)
            if not count:
                break
            done += count
        forget_old_names(connection, place, batch)
        return done

    return run_on_engine(engine, delete_batches, _translate)


def _translate(engine: Engine, error: Exception) -> PgfenceError | None:
    if isinstance(error, PgfenceError):
        return None
    if told := translate_error(error, table_names_of(engine), statements.CONTEXT, engine):
        return told
    state = sqlstate_of(error)
    if state is not None and not state.startswith(_NO_SESSION):
        return None
    return translate_connect_error(engine, error, "Keys that were already purged stay deleted")
