"""Query the server for the current holders of a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._connections.connection import STATEMENT_BUDGET, WAIT_GRACE
from pgfence._process.callbacks import log
from pgfence._process.lifecycle import MUTEX
from pgfence._sql.errors import translate_connect_error

if TYPE_CHECKING:
    from pgfence._connections.connection import LockConnection
    from pgfence._connections.pool import LockPool
    from pgfence._sql.advisory import LockSql
    from pgfence.types import Holder


async def look(pool: LockPool, sql: LockSql) -> list[Holder]:
    """Return the current holders of the requested keys, queried on an idle or a new connection.

    Raises:
        UnreachableError: the server cannot be reached.
        PoolerError, StandbyError, UnsupportedServerError: a session lock would not be safe on this server.
    """
    session = await pool.checkout_for_query()
    try:
        found = await session.run_with_sqlalchemy(pool.engine, sql.holders, limit=STATEMENT_BUDGET)
    except BaseException as error:
        pool.discard(session)
        if isinstance(error, Exception) and (told := translate_connect_error(pool.engine, error)):
            raise told from error
        raise
    pool.checkin(session)
    return found


async def look_on(pool: LockPool, session: LockConnection, sql: LockSql) -> list[Holder]:
    """Query the holders on a given connection, for a message. Errors are logged and ignored."""
    try:
        return await session.run_with_sqlalchemy(pool.engine, sql.holders, limit=WAIT_GRACE)
    except Exception:
        log.debug("could not query the holders of a lock", exc_info=True)
        session.close_after_use = True
        return []


async def look_quietly(pool: LockPool, sql: LockSql) -> list[Holder]:
    """Query the holders for a message, if a connection is idle. Errors are logged and ignored."""
    with MUTEX:
        idle = pool.state.idle.pop() if pool.state.idle else None
    if idle is None:
        return []
    try:
        found = await look_on(pool, idle, sql)
    except BaseException:
        pool.discard(idle)
        raise
    pool.checkin(idle)
    return found
