"""Open a connection like an engine's, wrap one, and say what an error from one means.

This is the one place that makes "a connection like this engine's, unpooled", sync and async, for SQLAlchemy 2.0 and 2.1.
"""

from __future__ import annotations

import contextlib
import re
import socket
from contextlib import contextmanager
from logging import INFO
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from pgfence._connections.addresses import describe_server, warn_of_slow_hosts
from pgfence._sql import server
from pgfence._sql.encoding import TextError
from pgfence._sql.params import style_of
from pgfence._sql.sqlstate import sqlstate
from pgfence.errors import PgfenceError, PoolerError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

    from pgfence._connections.connection import LockConnection
    from pgfence.config import PoolerSetting

R = TypeVar("R")

UNKNOWN = "Nothing is known about the lock"


def open_connection(
    engine: Engine, pooler: PoolerSetting, *, any_pooler: bool = False
) -> tuple[Any, Any, server.ServerInfo]:
    """Open a connection like the engine's, outside every pool, in autocommit; judge its server.

    This is the one place that makes "a connection like this engine's". Async engines run it inside a greenlet.

    Args:
        engine: the engine.
        pooler: what the configuration says.
        any_pooler: it is for leases, which live in rows and not in the session: no pooler is refused.

    Returns:
        The DBAPI connection, the driver's own connection, and the facts of the server.

    Raises:
        UnreachableError: the server did not answer or did not let us in.
        PoolerError, StandbyError, UnsupportedServerError: it did, and it is not safe there.
    """
    style_of(engine.dialect)
    warn_of_slow_hosts(engine)
    fairy = _fresh(engine)
    try:
        connection = Connection(engine, connection=fairy)
        connection.execution_options(isolation_level="AUTOCOMMIT")  # SQLAlchemy cannot do it after detach()
        dbapi_connection = fairy.dbapi_connection
        driver = engine.dialect.get_driver_connection(dbapi_connection)
        facts = server.read_facts(connection, _driver_pid(driver), set_up=pooler in {"auto", "direct"})
        if any_pooler:
            judge_server(engine, facts)
        else:
            judge(engine, facts, driver, pooler)
        connection.commit()
        fairy.detach()
    except BaseException as error:
        if fairy.dbapi_connection is not None:  # SQLAlchemy itself may have given it up already, and would warn
            with contextlib.suppress(Exception):
                fairy.invalidate()
        if isinstance(error, Exception) and (told := unreachable(engine, error)):
            raise told from error
        raise
    return dbapi_connection, driver, facts


def _fresh(engine: Engine) -> Any:
    pool = engine.pool.recreate()
    for name in ("checkout", "detach"):
        # Hooks that count or judge what the user checks out: they would never see ours come back.
        listeners = getattr(pool.dispatch, name)
        if listeners:
            # Not clear(): that takes them out of SQLAlchemy's registry of the user's pool too.
            listeners.for_modify(pool.dispatch).listeners.clear()
    try:
        return pool.connect()
    except Exception as error:
        if told := unreachable(engine, error):
            raise told from error
        raise


def judge_server(engine: Engine, facts: server.ServerInfo) -> None:
    """Raise what is to be said against the server itself: it is none that pgfence knows, or a standby."""
    if refusal := server.verdict(facts, facts.backend_pid, "session", None):
        raise _located(engine, refusal)


def _located(engine: Engine, refusal: PgfenceError) -> PgfenceError:
    refusal.args = (f"{describe_server(engine)}: {refusal}",)
    return refusal


def judge(engine: Engine, facts: server.ServerInfo, driver: Any, pooler: PoolerSetting) -> None:
    """Raise what is to be said against a session lock on this connection, which is idle at this moment."""
    driver_pid = _driver_pid(driver)
    other_pid = None
    if driver_pid != facts.backend_pid and pooler != "transaction":
        # Only a pooler in transaction mode serves a second client on the same backend.
        fairy = _fresh(engine)
        try:
            other = Connection(engine, connection=fairy)
            other.execution_options(isolation_level="AUTOCOMMIT")
            other_pid = server.backend_pid(other)
        finally:
            if fairy.dbapi_connection is not None:
                fairy.invalidate()
    if refusal := server.verdict(facts, driver_pid, pooler, other_pid):
        raise _located(engine, refusal)


def _driver_pid(driver: Any) -> int:
    pid: int = driver.get_server_pid() if hasattr(driver, "get_server_pid") else driver.info.backend_pid
    return pid


def unreachable(engine: Engine, error: Exception, otherwise: str = UNKNOWN) -> UnreachableError | None:
    """Return what an error from connecting means: no server; None when it is something else, e.g. a fault in a creator."""
    if isinstance(error, (PgfenceError, TextError)):
        return None
    state = sqlstate(error)
    dbapi: Any = engine.dialect.loaded_dbapi
    if state is None and not (isinstance(error, (OSError, DBAPIError, dbapi.Error)) or _from_dbapi(error)):
        return None
    # libpq's lines, the last of which may be a question.
    reason = " ".join(str(getattr(error, "orig", None) or error).split()) or type(error).__name__
    reason = reason if reason.endswith("?") else f"{reason.rstrip('.')}."
    where = describe_server(engine)
    told = f"no session at {where}: {reason}"
    # In a list of hosts another one may respond.
    if rejected(state, reason) or (unresolved(error, reason) and "," not in where):
        advice = "Check host, user, password, database and pg_hba.conf"
        return UnreachableError(f"{told} {advice}", sqlstate=state, retryable=False)
    return UnreachableError(f"{told} {otherwise}", sqlstate=state)


_REJECTED = re.compile(
    r"server does not support SSL|rejected SSL upgrade|certificate verify failed|certificate file|bouncer config error|"
    r"authentication failed|no password supplied|no pg_hba\.conf entry|is not permitted to log in"
    r"|(?:role|database) \".*\" does not exist|no such (?:user|database)|permission denied for database"
)
_UNRESOLVED = re.compile(
    "Name or service not known|nodename nor servname provided|No address associated with hostname|No such host is known"
)
_NO_SUCH_HOST = {getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)}


def rejected(state: str | None, reason: str) -> bool:
    """Say whether the server rejected the login, the encryption or the database, which no retry cures.

    libpq passes no SQLSTATE on, so its text decides; that of a server with messages in another language is not recognized.
    """
    if state in (None, "08P01"):  # the latter is all that older releases of PgBouncer say
        return _REJECTED.search(reason) is not None
    return state[:2] in ("28", "3D", "42")


def unresolved(error: BaseException, reason: str) -> bool:
    """Say whether the host does not exist; a name server that does not respond does not prove that."""
    if isinstance(error, socket.gaierror):
        return error.errno in _NO_SUCH_HOST
    return _UNRESOLVED.search(reason) is not None


def _from_dbapi(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in ("asyncpg", "psycopg", "psycopg2")


def connecting_error(engine: Engine, error: Exception, otherwise: str) -> UnreachableError | None:
    """Return what an error means that came out of SQLAlchemy's code or the caller's; None unless it is from connecting.

    Drivers raise OSError, TimeoutError and their own classes while they connect, and which of these SQLAlchemy wraps depends on
    its version. The caller's own code may raise the same classes: the traceback tells where it comes from.
    """
    pool = engine.pool
    for each in (error, getattr(error, "orig", None)):
        trace = each.__traceback__ if isinstance(each, BaseException) else None
        while trace is not None:
            frame = trace.tb_frame
            if frame.f_globals.get("__name__") == "sqlalchemy.pool.base" and frame.f_locals.get("self") is pool:
                return unreachable(engine, error, otherwise)
            trace = trace.tb_next
    return None


def lost_connection(session: LockConnection, error: BaseException) -> bool:
    """Say whether a statement failed because its connection ended."""
    if session.dead:
        return True
    state = sqlstate(error)
    if state is not None:
        return state[:3] == "57P" or state[:2] == "08"
    cause = getattr(error, "orig", None) or error
    # Whatever a driver says without the server's word can prove nothing: asyncpg alone has four ways to say "closed".
    return isinstance(cause, OSError) or (from_driver(cause) and type(cause).__name__ != "ProgrammingError")


def from_driver(error: BaseException) -> bool:
    """Say whether a driver or SQLAlchemy raised it."""
    return _from_dbapi(error) or type(error).__module__.partition(".")[0] == "sqlalchemy"


def has_listeners(engine: Engine) -> bool:
    """Say whether anybody wants to see our statements: hooks, tracing, echo."""
    if engine.logger.isEnabledFor(INFO):
        return True
    if not engine._has_events:
        return False
    dispatch = engine.dispatch
    return bool(dispatch.before_cursor_execute or dispatch.after_cursor_execute)


def wrap_dbapi(engine: Engine, dbapi_connection: Any, *, reconnects: bool = True) -> Connection:
    """Return a SQLAlchemy Connection over a session of ours, by a pool that knows this one connection and closes nothing.

    `reconnects=False`: after a lost connection SQLAlchemy would otherwise go on, silently, with a new one without the lock.
    """
    pool = StaticPool(lambda: dbapi_connection, dialect=engine.dialect, reset_on_return=None)
    return Connection(engine, connection=pool.connect(), _allow_revalidate=reconnects)


def wrong_backend_error(engine: Engine) -> PoolerError:
    """Another server process answered than the one the connection began with; nothing was taken there."""
    return PoolerError(
        f"{describe_server(engine)}: another server process responded than the one this connection began with, so a pooler in transaction"
        " mode is in between. Pass an engine with a direct URL as configure(engine, lock_engine=...)",
        mode="transaction",
    )


@contextmanager
def sqlalchemy_connection(engine: Engine, dbapi_connection: Any) -> Iterator[Connection]:
    """Yield a Connection over a session of ours for a moment; an exception is never replaced by one of the clean-up."""
    connection = wrap_dbapi(engine, dbapi_connection)
    try:
        yield connection
    except BaseException:
        with contextlib.suppress(Exception):
            connection.close()
        raise
    connection.close()


def at_once(call: Callable[[], object]) -> None:
    """Run sync code of SQLAlchemy's that awaits an async driver only in form, here and now, without a loop's turn."""
    running = in_greenlet(call)
    try:
        running.send(None)
    except StopIteration:
        return
    running.close()


async def in_greenlet(call: Callable[[], R]) -> R:
    """Run sync code of SQLAlchemy's over an async driver, on the calling task."""
    from sqlalchemy.util import greenlet_spawn

    result: R = await greenlet_spawn(call)
    return result
