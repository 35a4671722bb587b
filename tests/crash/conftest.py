"""A server to be maltreated, and budgets to be shortened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from pgfence._connections import connection, connection_async, connection_sync, pool
from pgfence._locks import acquisition
from support.servers import own
from support.waiting import eventually as _eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import OwnServer

_ROWS = "SELECT pid, mode, granted FROM pg_locks WHERE locktype = 'advisory'"


@pytest.fixture(scope="session")
def _shared_server() -> Iterator[OwnServer]:
    with own() as server:
        yield server


@pytest.fixture
def private_server(_shared_server: OwnServer) -> Iterator[OwnServer]:
    """A server that the crash tests of a worker share: to be crashed and frozen, and to be left running without locks."""
    with psycopg.connect(_shared_server.dsn, autocommit=True) as connection:
        assert connection.execute(_ROWS).fetchall() == []
    yield _shared_server
    if _shared_server._process is None:
        _shared_server.start()
    with psycopg.connect(_shared_server.dsn, autocommit=True) as connection:
        _eventually(lambda: not connection.execute(_ROWS).fetchall())


@pytest.fixture
def short_statements(monkeypatch: pytest.MonkeyPatch) -> float:
    """What a statement may take beyond its caller's deadline, 5 s, cut to 1 s; the limit of 30 s for any statement stays.

    Returns what a call may take until it is given up: that and the tick.
    """
    for module in (acquisition, connection, connection_sync, connection_async):
        monkeypatch.setattr(module, "RELEASE_BUDGET", 1.0)
    return 1.0 + 2 * 1.0 + 1.0


@pytest.fixture
def short_opening(monkeypatch: pytest.MonkeyPatch) -> float:
    """The budget for opening a connection, 5 s, cut to 1 s."""
    monkeypatch.setattr(pool, "OPEN_BUDGET", 1.0)
    return 1.0
