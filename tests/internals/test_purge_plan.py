"""`monitoring.purge` reads expired keys by their index, each batch from where the last one ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine

from pgfence._sql import purge as statements
from pgfence._sql.storage import TableNames
from support.expired_keys import Keys

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture
def keys(admin: psycopg.Connection[Any], name: str) -> Iterator[Keys]:
    """Keys of this test, in a table in which no other is expired."""
    admin.execute("DELETE FROM pgfence_idempotency_key WHERE expires_at <= clock_timestamp()")
    yield Keys(admin, name)
    admin.execute("DELETE FROM pgfence_idempotency_key WHERE scope = %s", [name])


def index_scan(admin: psycopg.Connection[Any], begin: float, size: int) -> dict[str, Any]:
    """Return the only index scan in the plan of the executed statement, whose effect is rolled back."""
    text = statements._PURGE.format("%s", "%s", table='"pgfence_idempotency_key"')
    with admin.transaction(force_rollback=True):
        admin.execute(statements._BY_INDEX)
        (plan,) = admin.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {text}".encode(), [begin, size]).fetchone()
    nodes = [plan[0]["Plan"]]
    for node in nodes:
        nodes += node.get("Plans", [])
    scans = [node for node in nodes if node.get("Index Name") == "pgfence_idempotency_key_expiry"]
    assert len(scans) == 1, plan
    return scans[0]


@pytest.mark.parametrize("counted", [False, True])
def test_the_index_is_used_and_a_batch_begins_where_the_last_one_ended(
    keys: Keys, admin: psycopg.Connection[Any], dsn: str, *, counted: bool
) -> None:
    """C109: also right after the rows came, with statistics without expired rows; deleted entries are not scanned again."""
    keys.fill("live", 5_000, life=600)
    if counted:
        admin.execute("ANALYZE pgfence_idempotency_key")
    keys.fill("old", 5_000, life=-6000)
    assert index_scan(admin, statements.BEGINNING, 100)["Actual Rows"] == 100
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    with psycopg.connect(dsn) as old:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT 1")
        with engine.connect() as connection:
            end = statements.BEGINNING
            for _ in range(40):
                batch = statements.purge(connection, TableNames(), 100, end)
                assert batch.number == 100
                end = batch.end
        walked, jumped = (index_scan(admin, begin, 100) for begin in (statements.BEGINNING, end))
    engine.dispose()
    assert walked["Actual Rows"] == jumped["Actual Rows"] == 100
    assert 2 * jumped["Shared Hit Blocks"] < walked["Shared Hit Blocks"]
