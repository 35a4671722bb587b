"""Tables, functions and fences created through PgBouncer in transaction mode."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence import schema
from pgfence.config import configure

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World

BEHIND_A_POOLER: dict[str, dict[str, Any]] = {
    "psycopg": {"prepare_threshold": None},
    "psycopg2": {},
    "psycopg_async": {"prepare_threshold": None},
    "asyncpg": {"statement_cache_size": 0, "prepared_statement_cache_size": 0},
}


async def test_tables_and_fences_are_created_and_dropped_through_it(
    world: World, name: str, pgbouncer: Callable[..., str], admin: psycopg.Connection[Any]
) -> None:
    """C022: with each driver set up for a pooler all of it works, and the pooler's sessions keep no setting of pgfence."""
    through = pgbouncer("transaction")
    engine = world.engine(dsn=through, connect_args=BEHIND_A_POOLER[world.name])
    here = f"pooled_{name[-12:]}"
    configure(engine, schema=here)
    for _ in range(2):
        await given(schema.create_all(engine))
    admin.execute(f"CREATE TABLE {here}.books (book int)".encode())
    await given(schema.add_fence(engine, f"{here}.books", resource="{book}"))
    with psycopg.connect(through, prepare_threshold=None) as writer:
        with pytest.raises(psycopg.DatabaseError, match="brought no token"):
            writer.execute(f"INSERT INTO {here}.books VALUES (1)".encode())
    await given(schema.drop_fence(engine, f"{here}.books"))
    await given(schema.drop_all(engine))
    with psycopg.connect(through, prepare_threshold=None) as reader:
        shown = reader.execute("SHOW default_transaction_isolation").fetchone()
    assert shown == ("read committed",)
    admin.execute(f"DROP SCHEMA {here} CASCADE".encode())


async def given(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer
