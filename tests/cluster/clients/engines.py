"""The engine of a client, with the settings that the documentation recommends for a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from cluster.clients.halves import AsyncHalf, Half, SyncHalf
from pgfence import VersionedSession
from pgfence.config import configure

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Literal

    Pooler = Literal["auto", "session"]

WAYS = ("psycopg", "haproxy", "pgbouncer", "asyncpg")
_POOL = {"pool_pre_ping": True, "pool_size": 15, "max_overflow": 15, "pool_timeout": 10}
_CONNECT_TIMEOUT = 2.0
_USER_TIMEOUT = 5000
"""Milliseconds after which libpq gives up a connection whose data is not acknowledged, because the server is cut off."""
_COMMAND_TIMEOUT = 15.0
"""asyncpg sends no keepalives, and a statement on a server that hangs would wait indefinitely. A wait at a gate is shorter."""


def open_half(url: str, way: str) -> Half:
    """Return the engine for a way of connecting, with its half of pgfence."""
    pooler: Pooler = "session" if way == "pgbouncer" else "auto"
    if make_url(url).get_driver_name() == "asyncpg":
        engine = create_async_engine(url, **_POOL, async_creator=build_creator(url))
        configure(engine, max_lock_connections=40, default_timeout=10, pooler=pooler)
        return AsyncHalf(engine, async_sessionmaker(engine, sync_session_class=VersionedSession))
    sync_engine = create_engine(url, **_POOL, connect_args={"tcp_user_timeout": _USER_TIMEOUT})
    configure(sync_engine, max_lock_connections=40, default_timeout=10, pooler=pooler)
    return SyncHalf(sync_engine, sessionmaker(sync_engine, class_=VersionedSession))


def list_hosts(url: str) -> list[tuple[str, int]]:
    """Return the hosts and ports of a URL, which has them in its query if there are several."""
    parsed = make_url(url)
    if parsed.host is not None:
        return [(parsed.host, parsed.port or 5432)]
    hosts = parsed.normalized_query["host"]
    found = []
    for each in hosts:
        host, _, port = each.partition(":")
        found.append((host, int(port or 5432)))
    return found


def build_creator(url: str) -> Callable[[], Coroutine[Any, Any, Any]]:
    """Return a function that connects to one host after another, each with a timeout, until one of them accepts writes."""
    import asyncpg

    parsed, hosts = make_url(url), list_hosts(url)
    next_host = (
        OSError,
        asyncpg.CannotConnectNowError,
        asyncpg.PostgresConnectionError,
        asyncpg.TargetServerAttributeNotMatched,
    )

    async def connect() -> Any:
        reasons = []
        for host, port in hosts:
            try:
                return await asyncpg.connect(
                    host=host,
                    port=port,
                    user=parsed.username,
                    password=parsed.password,
                    database=parsed.database,
                    timeout=_CONNECT_TIMEOUT,
                    command_timeout=_COMMAND_TIMEOUT,
                    target_session_attrs="read-write",
                )
            except next_host as error:
                reasons.append(f"{host}: {error!r}")
        raise ConnectionError(f"none is a primary: {'; '.join(reasons)}")

    return connect
