"""A client is killed behind a pooler: what becomes of its lock is the pooler's to decide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.locking import freed, is_free
from support.programs import holder

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.processes import Script
    from support.worlds import World


async def test_a_killed_client_of_a_session_pooler_frees_its_lock(
    world: World,
    name: str,
    pgbouncer: Callable[..., str],
    script: Callable[..., Script],
    admin: psycopg.Connection[Any],
) -> None:
    """C021: PgBouncer resets the server session before it serves another client, and the reset frees the lock."""
    holding = script(holder(world, pooler="session"), world.url_of(pgbouncer("session")), name)
    holding.wait_for("held")
    assert not is_free(admin, name)
    holding.kill()
    await freed(admin, name)
