"""PgBouncer in transaction mode: the heartbeat renews through it, prepares nothing there, and changes no pooled session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pgfence import configure
from pgfence.lease import AsyncLease, Lease
from support.waiting import eventually

from .test_transaction_mode import busy_pool, pooled, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.usefixtures("tables")


def renewed(admin: psycopg.Connection[Any], name: str) -> Any:
    row = admin.execute("SELECT renewed_at FROM pgfence_lease WHERE name = %s", (name,)).fetchone()
    return None if row is None else row[0]


@pytest.mark.matrix
@pytest.mark.parametrize("declared", ["auto", "transaction"])
async def test_a_lease_is_renewed_while_the_poolers_sessions_change(
    world: World, name: str, pgbouncer: Callable[..., str], admin: psycopg.Connection[Any], declared: Any
) -> None:
    """Six renewals, each on any session of the pooler, beside clients that are in transactions."""
    through = pgbouncer("transaction")
    before = shown(through)
    engine = pooled(world, through)
    configure(engine, pooler=declared)
    seen = set()
    with busy_pool(through):
        lease = world.pick(Lease, AsyncLease)(engine, name, ttl=1.5)
        async with world.enter(lease.hold(timeout=5)) as held:

            def moved() -> bool:
                seen.add(renewed(admin, name))
                return len(seen) > 6

            await eventually(moved, deadline=10)
            assert held.state == "held"
            await world.call(held.renew)
    assert shown(through) == before
