"""The migration lock behind PgBouncer: rejected in transaction mode with an alternative, working in session mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Connection, text

from pgfence import LockKey, configure
from pgfence.errors import PoolerError
from pgfence.migrations import migration_lock

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World

UNPREPARED: dict[str, Any] = {
    "psycopg": {"prepare_threshold": None},
    "psycopg2": {},
    "psycopg_async": {"prepare_threshold": None},
    "asyncpg": {"statement_cache_size": 0, "prepared_statement_cache_size": 0},
}


async def migrate(world: World, through: str, name: str, pooler: Any) -> int:
    """Take the lock as env.py does, and return how many locks there are inside."""
    engine = world.engine(dsn=through, connect_args=UNPREPARED[world.name])
    configure(engine, pooler=pooler)

    def work(connection: Connection) -> int:
        with migration_lock(connection, key=LockKey.of(name), timeout=5), connection.begin():
            held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
            count: int = connection.scalar(text(held))  # type: ignore[assignment]
            return count

    def here() -> int:
        with engine.connect() as connection:
            return work(connection)

    async def there() -> int:
        async with engine.connect() as connection:
            answer: int = await connection.run_sync(work)
            return answer

    count: int = await world.call(world.pick(here, there))
    return count


@pytest.mark.matrix
@pytest.mark.parametrize("declared", ["auto", "transaction"])
async def test_transaction_mode_is_rejected_with_an_alternative(
    world: World,
    name: str,
    declared: Any,
    pgbouncer: Callable[..., str],
    advisory_rows: Callable[[], list[Any]],
) -> None:
    """C051: two pods would get the lock on one server session, and it would stay there; nothing is left, nothing is set."""
    with pytest.raises(PoolerError, match="MIGRATION_URL") as caught:
        await migrate(world, pgbouncer("transaction"), name, declared)
    assert caught.value.mode == "transaction"
    assert advisory_rows() == []


async def test_a_declared_session_pooler_serves(
    world: World, name: str, pgbouncer: Callable[..., str], advisory_rows: Callable[[], list[Any]]
) -> None:
    """There a client keeps its server session, and gives it back without a lock."""
    assert await migrate(world, pgbouncer("session"), name, "session") == 1
    assert advisory_rows() == []
