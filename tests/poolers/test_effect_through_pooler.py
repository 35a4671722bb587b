"""PgBouncer in transaction mode: an effect is claimed, renewed, saved and finished through it, each on any session."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from support.effects import Gate, Shop
from support.waiting import eventually

from .test_transaction_mode import busy_pool, pooled, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.usefixtures("tables")


async def test_an_effect_works_while_the_poolers_sessions_change(
    world: World, pgbouncer: Callable[..., str], admin: psycopg.Connection[Any]
) -> None:
    """Renewed twice between its steps; the caller that waits gets its result; no pooled session is changed by it."""
    through = pgbouncer("transaction")
    before = shown(through)
    shop, gate = Shop(world, admin), Gate()
    shop.engine = pooled(world, through)

    async def work(attempt: Any) -> str:
        await shop.step(attempt, "reserve", shop.provider.charge)
        await gate.wait()
        return await shop.charge(attempt)

    with busy_pool(through):
        first = asyncio.create_task(shop.run("k", work, who=world.other(), ttl=0.9))
        await gate.reached()
        second = asyncio.create_task(shop.run("k", work, who=world.other(), timeout=20))
        until: set[Any] = set()

        def renewed() -> bool:
            until.add(shop.row("k").locked_until)
            return len(until) > 2

        await eventually(renewed, deadline=10)
        gate.open()
        assert await first == await second == "receipt of k:charge"
    assert shop.provider.asked == {"k:reserve": 1, "k:charge": 1}
    assert shop.row("k").attempt == 1
    assert shown(through) == before
