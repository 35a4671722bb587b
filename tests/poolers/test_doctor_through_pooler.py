"""The doctor behind PgBouncer: it proves transaction mode, and asks for a declaration of session mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence import LockKey, configure, monitoring
from support.locking import is_free, take

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World

pytestmark = pytest.mark.twins
# As the manuals of the drivers advise behind a pooler in transaction mode.
_ARGUMENTS = {
    "psycopg": {"prepare_threshold": None},
    "asyncpg": {"statement_cache_size": 0, "prepared_statement_cache_size": 0},
}


async def find(world: World, through: str, **settings: Any) -> dict[str, str]:
    """Return the findings about poolers, with their severity."""
    engine = world.engine(dsn=through, connect_args=_ARGUMENTS[world.name])
    configure(engine, **settings)
    found = await world.call(monitoring.doctor, engine)
    return {one.code: one.severity for one in found if one.code.startswith("pooler") or one.code == "keepalives"}


async def test_transaction_mode_is_proven(world: World, pgbouncer: Callable[..., str]) -> None:
    """C019: an error; a note where it is declared; no finding where session locks go past it."""
    through = pgbouncer("transaction")
    assert await find(world, through) == {"pooler-transaction": "error"}
    assert await find(world, through, pooler="session") == {"pooler-transaction": "error"}
    assert await find(world, through, pooler="transaction") == {"pooler-transaction": "info"}
    past = await find(world, through, pooler="transaction", lock_engine=world.engine())
    assert "pooler-transaction" not in past


@pytest.mark.one_driver
async def test_a_lock_that_a_client_left_in_a_transaction_pool_is_released(
    world: World, name: str, pgbouncer: Callable[..., str], admin: psycopg.Connection[Any]
) -> None:
    """C019, C021: the client is gone and the server session stays, with the lock, until release_leaked ends it."""
    with psycopg.connect(pgbouncer("transaction"), autocommit=True, prepare_threshold=None) as client:
        take(client, name)
    assert not is_free(admin, name)
    (holder,) = await world.call(monitoring.release_leaked, world.engine(), reason="the client is gone", idle_for=0)
    assert holder.key == LockKey.of(name)
    assert is_free(admin, name)


async def test_session_mode_has_to_be_declared(
    world: World, pgbouncer: Callable[..., str], role: Callable[..., str]
) -> None:
    """An error until it is; then nothing is set in the session, so an idle_session_timeout counts for holders."""
    through = pgbouncer("session")
    assert await find(world, through) == {"pooler-undeclared": "error"}
    assert await find(world, through, pooler="session") == {}
    limited = pgbouncer("session", role({"idle_session_timeout": "10min"}))
    engine = world.engine(dsn=limited)
    configure(engine, pooler="session")
    found = {one.code: one.severity for one in await world.call(monitoring.doctor, engine)}
    assert found["idle-session-timeout"] == "warning"
