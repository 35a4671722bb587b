"""The application's own fixtures, which use the server of pgfence's pytest plugin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ledger import Base
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from pgfence import schema


@pytest.fixture(scope="session")
def engine(pgfence_server: str) -> Iterator[Engine]:
    engine = create_engine(pgfence_server)
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
