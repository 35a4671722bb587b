"""Open a connection like an engine's, wrap one, and judge its server.

This is the one place that makes "a connection like this engine's, unpooled", sync and async, for SQLAlchemy 2.0 and 2.1.
"""

from __future__ import annotations

import contextlib
import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import Connection
from sqlalchemy.pool import StaticPool

from pgfence._holds.carriers import run_in_greenlet
from pgfence._sql import server
from pgfence._sql.addresses import describe_server, warn_of_slow_hosts
from pgfence._sql.errors import translate_connect_error
from pgfence._sql.params import style_of
from pgfence.errors import PgfenceError, PoolerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine
    from sqlalchemy.engine.interfaces import DBAPIConnection
    from sqlalchemy.pool import PoolProxiedConnection

    from pgfence._sql.params import RawConnection
    from pgfence.config import PoolerSetting

R = TypeVar("R")

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


def open_connection(
    engine: Engine, pooler: PoolerSetting, *, any_pooler: bool = False
) -> tuple[DBAPIConnection, RawConnection, server.ServerInfo]:
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
    fairy = _connect_like(engine)
    try:
        connection = Connection(engine, connection=fairy)
        connection.execution_options(isolation_level="AUTOCOMMIT")  # SQLAlchemy cannot do it after detach()
        dbapi_connection = fairy.dbapi_connection
        assert dbapi_connection is not None
        driver = engine.dialect.get_driver_connection(dbapi_connection)
        # One round trip sets it up and tells what is to be judged. Behind a declared pooler nothing is set: it would stay there.
        facts = server.read_facts(connection, _get_driver_pid(driver), set_up=pooler in {"auto", "direct"})
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
        if isinstance(error, Exception) and (told := translate_connect_error(engine, error)):
            raise told from error
        raise
    return dbapi_connection, driver, facts


def _connect_like(engine: Engine) -> PoolProxiedConnection:
    # A pool of its own, with the creator, arguments and connect events of the user's engine (tokens of cloud logins live
    # there): a full QueuePool, a StaticPool, a pre-ping or a patched engine.connect cannot get in the way.
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
        if told := translate_connect_error(engine, error):
            raise told from error
        raise


def judge_server(engine: Engine, facts: server.ServerInfo) -> None:
    """Raise what is to be said against the server itself: it is none that pgfence knows, or a standby."""
    if refusal := server.judge_session(facts, facts.backend_pid, "session", None):
        raise _locate(engine, refusal)


def _locate(engine: Engine, refusal: PgfenceError) -> PgfenceError:
    refusal.args = (f"{describe_server(engine)}: {refusal}",)
    return refusal


def judge(engine: Engine, facts: server.ServerInfo, driver: RawConnection, pooler: PoolerSetting) -> None:
    """Raise what is to be said against a session lock on this connection, which is idle at this moment."""
    driver_pid = _get_driver_pid(driver)
    other_pid = None
    if driver_pid != facts.backend_pid and pooler != "transaction":
        # Only a pooler in transaction mode serves a second client on the same backend.
        fairy = _connect_like(engine)
        try:
            other = Connection(engine, connection=fairy)
            other.execution_options(isolation_level="AUTOCOMMIT")
            other_pid = server.read_backend_pid(other)
        finally:
            if fairy.dbapi_connection is not None:
                fairy.invalidate()
    if refusal := server.judge_session(facts, driver_pid, pooler, other_pid):
        raise _locate(engine, refusal)


def _get_driver_pid(driver: RawConnection) -> int:
    pid: int = driver.get_server_pid() if hasattr(driver, "get_server_pid") else driver.info.backend_pid
    return pid


def wrap_dbapi(engine: Engine, dbapi_connection: DBAPIConnection, *, reconnects: bool = True) -> Connection:
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
def open_sqlalchemy_connection(engine: Engine, dbapi_connection: DBAPIConnection) -> Iterator[Connection]:
    """Yield a Connection over a session of ours for a moment; an exception is never replaced by one of the clean-up."""
    connection = wrap_dbapi(engine, dbapi_connection)
    try:
        yield connection
    except BaseException:
        with contextlib.suppress(Exception):
            connection.close()
        raise
    connection.close()


def run_without_loop(call: Callable[[], object]) -> None:
    """Run sync code of SQLAlchemy's that awaits an async driver only in form, here and now, without a loop's turn."""
    running = run_in_greenlet(call)
    try:
        running.send(None)
    except StopIteration:
        return
    running.close()


def keep_alive(fd: int) -> None:
    """Have the kernel give up on a silent server after 20 s, by the socket: no driver's arguments are touched."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
        if ours.family not in (socket.AF_INET, socket.AF_INET6):
            return
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                with contextlib.suppress(OSError):
                    ours.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
