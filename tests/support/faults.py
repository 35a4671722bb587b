"""Fixtures that break things: connections, networks, poolers, processes, servers."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Literal

import pytest

from pgfence.testing import PgfenceFaults
from pgfence.testing._elsewhere import Engines
from pgfence.testing._proxy import Proxy
from support import network, poolers
from support import standby as standbys
from support.processes import Script
from support.servers import own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.servers import OwnServer

    Pair = tuple[OwnServer, standbys.Standby]


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    """A fault proxy in front of the test database: connect to `proxy.dsn`, then `proxy.cut()` and the like."""
    with closing(Proxy(dsn)) as running:
        yield running


@pytest.fixture
def make_proxy() -> Iterator[Callable[[str], Proxy]]:
    """A function that puts a fault proxy in front of any DSN, e.g. of a private server."""
    with ExitStack() as stack:
        yield lambda dsn: stack.enter_context(closing(Proxy(dsn)))


@pytest.fixture
def make_faults() -> Iterator[Callable[[str], PgfenceFaults]]:
    """A function that returns the faults of `pgfence.testing` for another DSN, e.g. that of a role."""
    with closing(Engines()) as engines:
        yield lambda dsn: PgfenceFaults(lambda: dsn, "", engines)


@pytest.fixture
def far_server() -> Iterator[network.FarServer]:
    """A private server behind its own cable: `far_server.network.cut()`. Skips where that needs rights we lack."""
    with network.far_server() as server:
        yield server


@pytest.fixture
def pgbouncer(dsn: str) -> Iterator[Callable[..., str]]:
    """A function that runs PgBouncer and returns the DSN through it: `pgbouncer("transaction")`. Skips where there is none."""

    def start(mode: Literal["session", "transaction"] = "session", database: str = dsn) -> str:
        return stack.enter_context(poolers.pgbouncer(database, mode))

    with ExitStack() as stack:
        yield start


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """A primary and its hot standby, for all tests that leave them so."""
    with own(fsync=False) as primary, standbys.standby(primary, fsync=False) as copy:
        yield primary, copy


@pytest.fixture
def standby(pair: Pair) -> standbys.Standby:
    """The hot standby of that pair, to be refused."""
    return pair[1]


@pytest.fixture
def script() -> Iterator[Callable[..., Script]]:
    """A function that runs a Python script in a separate process: `script(code, *arguments)`; see support/processes.py."""
    with ExitStack() as stack:
        yield lambda code, *arguments: stack.enter_context(closing(Script(code, *arguments)))
