"""Fixtures of every test.

One server serves the whole run; each worker has a database of its own. A test that crashes, restarts or misconfigures a
server starts a private one with `own_server` or `make_server`.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any

import hypothesis
import psycopg
import pytest
from sqlalchemy import create_engine

from pgfence import schema
from pgfence.errors import UnreachableError
from pgfence.testing._leaks import find_locks, find_names
from pgfence.testing._server import open_engine
from support import servers
from support.waiting import eventually as _eventually
from support.worlds import NAMES, World, choose

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator

    from sqlalchemy import Connection

    from support.servers import OwnServer

# The first is an entry point, too; an environment that was installed before it existed does not have it.
pytest_plugins = ["pgfence_pytest", "pytester", "support.faults", "support.retrying"]

_SERVER = pytest.StashKey[servers.TestServer]()

_ADVISORY = """
    SELECT l.pid, l.classid, l.objid, l.objsubid, l.mode, l.granted, a.application_name, a.state, a.query
    FROM pg_locks l JOIN pg_database d ON d.oid = l.database LEFT JOIN pg_stat_activity a USING (pid)
    WHERE l.locktype = 'advisory' AND d.datname = current_database() AND a.query NOT LIKE 'WITH probe %%'
"""
# The set-up of a new connection takes a random key for a moment; an opening that a test gave up may still be at it in the next test.

# A busy machine must not turn a slow example into a failure.
hypothesis.settings.register_profile("calm", deadline=None)
hypothesis.settings.load_profile("calm")


def pytest_configure() -> None:
    """Hear Ctrl-C and the like, and let programs under test hear them: a run in the background ignores some from the start.

    Programs under test also keep their bytecode.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGQUIT: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    # The workers and about a thousand programs under test inherit it: without bytecode, each compiles what it imports.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run two workers for each core: most of a test is a wait for a server, a lease or a process."""
    return 2 * (os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker consecutive tests, so that most modules start their servers once, unless `--dist` says otherwise."""
    if config.option.dist != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the server in the process that every worker has in common, and only there."""
    if hasattr(session.config, "workerinput") or session.config.option.collectonly:
        return
    try:
        session.config.stash[_SERVER] = servers.choose()
    except UnreachableError as error:
        pytest.exit(f"there is no PostgreSQL to test on: {error}", returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Keep what was collected, thousands of tests, out of the sight of the garbage collector: each look would take 0.2 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Make no items for drivers that a test does not need; see support/worlds.py."""
    made = yield
    return choose(made) if isinstance(made, list) else made


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where the server is."""
    if server := node.config.stash.get(_SERVER, None):
        node.workerinput["pgfence_dsn"] = server.dsn


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which server it is, and its version."""
    server = config.stash.get(_SERVER, None)
    return [server.describe()] if server else []


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the server."""
    if server := config.stash.get(_SERVER, None):
        server.close()


@pytest.fixture(scope="session")
def dsn(request: pytest.FixtureRequest) -> Iterator[str]:
    """The database of this worker, without a driver's name: postgresql://user:password@host:port/database."""
    workerinput = getattr(request.config, "workerinput", None)
    server = workerinput["pgfence_dsn"] if workerinput else request.config.stash[_SERVER].dsn
    with servers.database(server, workerinput["workerid"] if workerinput else "main") as name:
        yield name


@pytest.fixture(scope="session")
def pgfence_server(dsn: str) -> str:
    """The database of this worker, for the fixtures of `pgfence.testing`."""
    return f"postgresql+psycopg://{dsn.split('://', 1)[1]}"


@pytest.fixture(scope="session")
def tables(dsn: str) -> None:
    """Tables and functions of pgfence in this worker's database, with default schema and prefix."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    schema.create_all(engine)
    engine.dispose()


@pytest.fixture(scope="session")
def _monitor(pgfence_server: str) -> Iterator[Connection]:
    engine = open_engine(pgfence_server, "monitor")
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        yield connection
    engine.dispose()


@pytest.fixture(autouse=True)
def no_leaked_locks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Assert that a test which uses the server leaves no advisory lock behind, in any session."""
    monitor = request.getfixturevalue("_monitor") if "dsn" in request.fixturenames else None
    yield
    if monitor is None:
        return
    try:
        _eventually(lambda: not find_locks(monitor))
    except AssertionError:
        names = find_names(monitor)
        left = [row.describe(names) for row in find_locks(monitor)]
        monitor.exec_driver_sql(f"SELECT pg_terminate_backend(pid) FROM ({_ADVISORY}) AS leaked")
        pytest.fail("advisory locks were left behind:\n" + "\n".join(left))


@pytest.fixture
def admin(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A superuser's connection in autocommit that is never the one under test."""
    with psycopg.connect(dsn, autocommit=True, application_name="admin") as connection:
        yield connection


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """An AsyncExitStack that is left after the test, in its event loop."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def advisory_rows(admin: psycopg.Connection[Any]) -> Callable[[], list[Any]]:
    """A function that returns who holds or waits for advisory locks in this database, as named tuples."""
    return lambda: admin.cursor(row_factory=psycopg.rows.namedtuple_row).execute(_ADVISORY).fetchall()


@pytest.fixture(params=NAMES)
async def world(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[World]:
    """A driver with the half of the package that goes with it; see support/worlds.py."""
    here = World(request.param, dsn)
    yield here
    await here.close()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The name of a lock that no other test uses."""
    return f"{request.node.originalname[:40]}:{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    """`eventually(condition)` waits until the condition is true; see support/waiting.py."""
    return _eventually


@pytest.fixture
def role(dsn: str, admin: psycopg.Connection[Any]) -> Iterator[Callable[..., str]]:
    """A function that makes a login role without any right or with hostile settings, and returns its DSN.

    `role(settings={"statement_timeout": "50ms"})`.
    """
    with ExitStack() as stack:
        yield lambda settings=None: stack.enter_context(servers.role(admin, dsn, settings or {}))


@pytest.fixture
def make_server() -> Iterator[Callable[..., OwnServer]]:
    """A function that starts a private server: `make_server(fsync=True, settings=None)`; see support/servers.py."""
    with ExitStack() as stack:
        yield lambda **kwargs: stack.enter_context(servers.own(**kwargs))


@pytest.fixture(scope="session")
def lend_server() -> Iterator[Callable[..., OwnServer]]:
    """A function that lends a private server without fsync, one for each `lend_server(**settings)`: it stays as it is."""
    lent: dict[tuple[tuple[str, str], ...], OwnServer] = {}
    with ExitStack() as stack:

        def as_user_connection(**settings: str) -> OwnServer:
            kind = tuple(sorted(settings.items()))
            if kind not in lent:
                lent[kind] = stack.enter_context(servers.own(fsync=False, settings=settings))
            return lent[kind]

        yield as_user_connection


@pytest.fixture
def own_server(make_server: Callable[..., OwnServer]) -> OwnServer:
    """A private server with the default settings and fsync, to be crashed, stopped or cut off."""
    return make_server()
