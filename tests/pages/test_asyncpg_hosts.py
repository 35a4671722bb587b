"""The program for asyncpg on a cluster: it tries one host after another, for the application and for pgfence."""

from __future__ import annotations

import logging
import runpy
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from pgfence import AsyncAdvisoryLock, AsyncLease
from pgfence.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = Path(__file__).parents[2] / "docs" / "examples" / "asyncpg_hosts.py"
connect_to_primary = runpy.run_path(str(PROGRAM))["connect_to_primary"]
HUNG, REFUSING = "127.0.3.251", "127.0.3.252"


@pytest.fixture
def hung(dsn: str) -> Iterator[str]:
    """A host that accepts connections and never responds, on the port of the server."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        try:
            listener.bind((HUNG, urlsplit(dsn).port or 5432))
        except OSError as error:
            pytest.skip(f"needs a second loopback address: {error}")
        listener.listen()
        yield HUNG


def login(dsn: str) -> dict[str, Any]:
    """Return the arguments of `asyncpg.connect` for a DSN, without the host."""
    url = urlsplit(dsn)
    known = {"user": url.username, "password": url.password, "database": url.path.removeprefix("/"), "port": url.port}
    return {name: unquote(value) if isinstance(value, str) else value for name, value in known.items() if value}


async def test_a_hung_and_a_closed_host_are_skipped_on_every_connection(
    dsn: str, name: str, tables: None, hung: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The pool, a session lock and the heartbeat of a lease connect through the creator and reach the third host."""
    threads = set()
    connect = connect_to_primary([hung, REFUSING, urlsplit(dsn).hostname], timeout=0.2, **login(dsn))

    async def create() -> Any:
        threads.add(threading.current_thread())
        return await connect()

    engine = create_async_engine("postgresql+asyncpg:///shop", async_creator=create, pool_pre_ping=True)
    with caplog.at_level(logging.WARNING, "pgfence"):
        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT NOT pg_is_in_recovery()"))
        async with AsyncAdvisoryLock(engine, name).hold(timeout=5), AsyncLease(engine, name, ttl=30).hold() as held:
            await held.renew()
            assert held.state == "held"
    assert len(threads) == 2  # of this test and of the heartbeat
    assert not caplog.records
    await engine.dispose()


async def test_without_a_primary_the_error_says_what_each_host_did(dsn: str, name: str, hung: str) -> None:
    """A call that reaches no host can be retried; after a rejected login, which later hosts would reject too, it cannot."""
    create = connect_to_primary([hung, REFUSING], timeout=0.2, **login(dsn))
    engine = create_async_engine("postgresql+asyncpg:///shop", async_creator=create)
    with pytest.raises(UnreachableError, match=rf"{hung}: TimeoutError.*{REFUSING}: ConnectionRefused") as caught:
        await AsyncLease(engine, name, ttl=30).try_acquire()
    assert caught.value.retryable
    create = connect_to_primary([hung, urlsplit(dsn).hostname, hung], timeout=0.2, **login(dsn) | {"database": "none"})
    engine = create_async_engine("postgresql+asyncpg:///shop", async_creator=create)
    with pytest.raises(UnreachableError, match='database "none" does not exist') as caught:
        await AsyncLease(engine, name, ttl=30).try_acquire()
    assert not caught.value.retryable
