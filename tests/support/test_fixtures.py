"""The fixtures themselves: what the other tests stand on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
from sqlalchemy import text

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World


async def _backend(engine: Any, world: World) -> int:
    if world.is_async:
        async with engine.connect() as connection:
            return await connection.scalar(text("SELECT pg_backend_pid()"))
    with engine.connect() as connection:
        return connection.scalar(text("SELECT pg_backend_pid()"))


async def test_world_engine_reaches_the_test_database(world: World) -> None:
    """Each world's engine connects."""
    assert await _backend(world.engine(), world) > 0


def test_a_role_has_its_hostile_settings(role: Callable[..., str]) -> None:
    """A role made with settings logs in with them and is no superuser."""
    with psycopg.connect(
        role(settings={"statement_timeout": "50ms", "default_transaction_isolation": "serializable"})
    ) as connection:
        assert connection.execute("SHOW statement_timeout").fetchone() == ("50ms",)
        assert connection.execute("SHOW is_superuser").fetchone() == ("off",)


def test_advisory_rows_shows_a_lock(dsn: str, advisory_rows: Callable[[], list[Any]]) -> None:
    """A session lock is seen with its mode and backend."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(42)")
        (row,) = advisory_rows()
        assert (row.pid, row.objid, row.granted) == (connection.info.backend_pid, 42, True)
