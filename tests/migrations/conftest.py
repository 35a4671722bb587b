"""A database for the tests of migrations: the same one for all tests of a worker, empty at the beginning of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine

from support.servers import database

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

OTHERS = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() AND pid <> %s"
SCHEMAS = "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'"


@pytest.fixture(scope="session")
def _migrated(dsn: str) -> Iterator[str]:
    with database(dsn, "migrations") as other:
        yield other


@pytest.fixture
def own(_migrated: str) -> str:
    """An empty database, which nobody else uses meanwhile."""
    with psycopg.connect(_migrated, autocommit=True) as connection:
        connection.execute(OTHERS, [connection.info.backend_pid])
        connection.execute("SET client_min_messages = warning")
        for (schema,) in connection.execute(SCHEMAS).fetchall():
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
        connection.execute("CREATE SCHEMA public")
    return _migrated


@pytest.fixture
def engine(own: str) -> Iterator[Engine]:
    """An engine on the empty database."""
    made = create_engine(own.replace("postgresql://", "postgresql+psycopg://", 1))
    yield made
    made.dispose()
