"""Fixtures: a PostgreSQL for the test run, and what each test gets of it."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from ledger import Base
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from pgfence import embedded, schema


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """An engine on a server that lives as long as the test run."""
    with embedded.server(fsync=False) as url:
        engine = create_engine(url)
        schema.create_all(engine)
        Base.metadata.create_all(engine)
        yield engine
        engine.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """A Session that may commit; everything is rolled back after the test."""
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            yield session
        outer.rollback()


@pytest.fixture
def name() -> str:
    """The name of a lock that no other test uses."""
    return f"test:{uuid4()}"
