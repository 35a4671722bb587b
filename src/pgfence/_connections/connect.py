"""Open connections outside the engine's pool, wrap them for SQLAlchemy, and check their servers.

This module opens all of pgfence's own connections, sync and async, with SQLAlchemy 2.0 and 2.1.
"""

from __future__ import annotations

import contextlib
import os
import socket
from contextlib import contextmanager
from logging import INFO
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from sqlalchemy import Connection
from sqlalchemy.pool import StaticPool

from pgfence._holds.carriers import run_in_greenlet
from pgfence._sql import server
from pgfence._sql.addresses import describe_server, warn_of_slow_hosts
from pgfence._sql.errors import translate_connect_error
from pgfence._sql.params import style_of
from pgfence._sql.storage import table_names_of
from pgfence.errors import PgfenceError, PoolerError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from sqlalchemy import Engine
    from sqlalchemy.engine.interfaces import DBAPIConnection
    from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

    from pgfence._sql.params import RawConnection
    from pgfence.config import PoolerSetting

R = TypeVar("R")
PoolerMode: TypeAlias = Literal["none", "unknown", "transaction"]
"""The pooler that was detected, if any: none, one whose mode is unknown, or one in transaction mode."""

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


def open_connection(
    engine: Engine, pooler: PoolerSetting, *, any_pooler: bool = False, in_use: Collection[object] = ()
) -> tuple[DBAPIConnection, RawConnection, server.ServerInfo]:
    """Open a connection with the engine's settings, outside of any pool and in autocommit, and check its server.

    Return the DBAPI connection, the driver's own connection, and the facts about the server. For async engines, call it inside a
    greenlet. With `any_pooler`, any pooler is accepted, because leases are rows and do not depend on the session. If the engine's
    creator returns one of the connections `in_use` by the application, that connection is left unchanged.

    Raises:
        UnreachableError: the server did not respond or rejected the connection.
        PoolerError, StandbyError, UnsupportedServerError: a session lock would not be safe on this server.
        PgfenceError: the engine's creator returned a connection that is in use.
    """
    style_of(engine.dialect)
    warn_of_slow_hosts(engine)
    fairy = _connect_like(engine, in_use)
    try:
        connection = Connection(engine, connection=fairy)
        connection.execution_options(isolation_level="AUTOCOMMIT")  # SQLAlchemy cannot set the level after detach()
        dbapi_connection = fairy.dbapi_connection
        assert dbapi_connection is not None
        driver = engine.dialect.get_driver_connection(dbapi_connection)
        # One round trip sets up the session and reads the facts. Through a declared pooler nothing is set, because the settings
        # would stay on the pooled server connection.
        place = table_names_of(engine)
        facts = server.read_facts(connection, _get_driver_pid(driver), place, set_up=pooler in {"auto", "direct"})
        if any_pooler:
            judge_server(engine, facts)
        else:
            judge(engine, facts, driver, pooler)
        connection.commit()
        fairy.detach()
    except BaseException as error:
        if fairy.dbapi_connection is not None:  # SQLAlchemy may have invalidated the connection already, and would warn
            with contextlib.suppress(Exception):
                fairy.invalidate()
        if isinstance(error, Exception) and (told := translate_connect_error(engine, error)):
            raise told from error
        raise
    return dbapi_connection, driver, facts


def _connect_like(engine: Engine, in_use: Collection[object] = ()) -> PoolProxiedConnection:
    # The connection comes from a copy of the engine's pool, with its creator, arguments and connect events (which provide tokens
    # for cloud logins): a full QueuePool, a StaticPool, a pre-ping or a patched engine.connect cannot interfere.
    pool = engine.pool.recreate()
    for name in ("checkout", "detach"):
        # Listeners that count or check the application's checkouts would never see this connection returned.
        listeners = getattr(pool.dispatch, name)
        if listeners:
            # Not clear(), which would also remove them from SQLAlchemy's registry for the application's pool.
            listeners.for_modify(pool.dispatch).listeners.clear()
    create = pool._invoke_creator

    def create_new(rec: ConnectionPoolEntry) -> DBAPIConnection:
        opened = create(rec)
        driver = engine.dialect.get_driver_connection(opened)
        if any(used is driver for used in in_use):
            raise PgfenceError(
                "the engine's creator returned a connection that the application is using. The creator must open a new connection"
                " for each call"
            )
        return opened

    if in_use:
        pool._invoke_creator = create_new
    try:
        return pool.connect()
    except Exception as error:
        if told := translate_connect_error(engine, error):
            raise told from error
        raise


def judge_server(engine: Engine, facts: server.ServerInfo) -> None:
    """Raise an error if the server is a standby or not a supported PostgreSQL server."""
    if refusal := server.judge_session(facts, facts.backend_pid, "session", None):
        raise _locate(engine, refusal)


def _locate(engine: Engine, refusal: PgfenceError) -> PgfenceError:
    refusal.args = (f"{describe_server(engine)}: {refusal}",)
    return refusal


def judge(engine: Engine, facts: server.ServerInfo, driver: RawConnection, pooler: PoolerSetting) -> None:
    """Raise an error if a session lock would not be safe on this connection, which must be idle."""
    driver_pid = _get_driver_pid(driver)
    other_pid = None
    if driver_pid != facts.backend_pid and pooler != "transaction":
        other_pid = _read_second_pid(engine)
    if refusal := server.judge_session(facts, driver_pid, pooler, other_pid):
        raise _locate(engine, refusal)


def detect_pooler(engine: Engine) -> PoolerMode:
    """Return the kind of pooler between a client and its server, or "none". For async engines, call it inside a greenlet."""
    fairy = _connect_like(engine)
    try:
        connection = Connection(engine, connection=fairy)
        connection.execution_options(isolation_level="AUTOCOMMIT")
        pid = server.read_backend_pid(connection)
        assert fairy.dbapi_connection is not None
        driver = engine.dialect.get_driver_connection(fairy.dbapi_connection)
        if _get_driver_pid(driver) == pid:
            return "none"
        return "transaction" if _read_second_pid(engine) == pid else "unknown"
    finally:
        if fairy.dbapi_connection is not None:
            fairy.invalidate()


def _read_second_pid(engine: Engine) -> int:
    """Return the process id of the server process that serves a second client while the first client is idle."""
    # Only a pooler in transaction mode serves a second client with the same backend.
    fairy = _connect_like(engine)
    try:
        other = Connection(engine, connection=fairy)
        other.execution_options(isolation_level="AUTOCOMMIT")
        return server.read_backend_pid(other)
    finally:
        if fairy.dbapi_connection is not None:
            fairy.invalidate()


def _get_driver_pid(driver: RawConnection) -> int:
    pid: int = driver.get_server_pid() if hasattr(driver, "get_server_pid") else driver.info.backend_pid
    return pid


def wrap_dbapi(engine: Engine, dbapi_connection: DBAPIConnection, *, reconnects: bool = True) -> Connection:
    """Return a SQLAlchemy Connection over a DBAPI connection, from a pool that contains only this connection and never closes it.

    With `reconnects=False`, SQLAlchemy does not silently replace a lost connection with a new one, which would not hold the lock.
    """
    pool = StaticPool(lambda: dbapi_connection, dialect=engine.dialect, reset_on_return=None)
    return Connection(engine, connection=pool.connect(), _allow_revalidate=reconnects)


def wrong_backend_error(engine: Engine) -> PoolerError:
    """Return the error for a connection that was switched to another server process. Nothing was locked there."""
    return PoolerError(
        f"{describe_server(engine)}: the server process changed within one connection, which shows that the connection goes"
        " through a pooler in transaction mode. Pass an engine with a direct URL as configure(engine, lock_engine=...)",
        mode="transaction",
    )


@contextmanager
def open_sqlalchemy_connection(engine: Engine, dbapi_connection: DBAPIConnection) -> Iterator[Connection]:
    """Yield a temporary Connection over a DBAPI connection. Closing it never replaces an exception of the block."""
    connection = wrap_dbapi(engine, dbapi_connection)
    try:
        yield connection
    except BaseException:
        with contextlib.suppress(Exception):
            connection.close()
        raise
    connection.close()


def run_without_loop(call: Callable[[], object]) -> None:
    """Run SQLAlchemy code immediately, without the event loop. The code may await an async driver but never suspends."""
    running = run_in_greenlet(call)
    try:
        running.send(None)
    except StopIteration:
        return
    running.close()


def keep_alive(fd: int) -> None:
    """Set the socket options that make the kernel give up on a silent server after 20 s."""
    # Set on the socket, so that the driver's connection arguments stay unchanged.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
        if ours.family not in (socket.AF_INET, socket.AF_INET6):
            return
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                with contextlib.suppress(OSError):
                    ours.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def has_listeners(engine: Engine) -> bool:
    """Return whether event hooks, tracing or echo must see the statements of pgfence."""
    if engine.logger.isEnabledFor(INFO):
        return True
    if not engine._has_events:
        return False
    dispatch = engine.dispatch
    return bool(dispatch.before_cursor_execute or dispatch.after_cursor_execute)
