"""The statements of `pgfence.testing`: histories, leaked locks, and faults that change rows or end sessions."""

from __future__ import annotations

from sqlalchemy import text

from pgfence._sql.storage import quote

HISTORY = "pgfence_test_history"

CREATE_HISTORY = text(
    f"CREATE TABLE IF NOT EXISTS {HISTORY} (id bigserial PRIMARY KEY, resource text NOT NULL, holder text NOT NULL,"
    " what text NOT NULL, token bigint)"
)
CLEAR_HISTORY = text(f"DELETE FROM {HISTORY}")
RECORD = text(
    f"INSERT INTO {HISTORY} (resource, holder, what, token) VALUES (:resource, :holder, :what, CAST(:token AS bigint))"
)
READ_HISTORY = text(f"SELECT resource, holder, what, token FROM {HISTORY} ORDER BY id")
COUNT_HISTORY = text(f"SELECT count(*) FROM {HISTORY}")


def build_create_database(name: str) -> str:
    return f"CREATE DATABASE {quote(name)}"


def build_drop_database(name: str) -> str:
    """Return the statement that drops a database and ends the sessions in it."""
    return f"DROP DATABASE {quote(name)} WITH (FORCE)"
