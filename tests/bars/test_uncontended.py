"""What a free permit and an allowed take cost: one round trip."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from pgfence import AsyncRateLimit, AsyncSemaphore, RateLimit, Semaphore
from support.proxy import CountingProxy

if TYPE_CHECKING:
    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


async def test_a_permit_and_a_take_cost_one_round_trip(world: World, name: str, dsn: str) -> None:
    """On a warm connection, with any number of permits and units; a release costs one more."""
    with closing(CountingProxy(dsn)) as proxy:
        engine = world.engine(dsn=proxy.dsn)
        semaphores = [
            world.pick(Semaphore, AsyncSemaphore)(engine, f"{name}:{permits}", permits=permits, ttl=60)
            for permits in (1, 5, 50)
        ]
        rate = world.pick(RateLimit, AsyncRateLimit)(engine, name, limit=1000, per=60)
        for _ in range(3):  # statements are prepared by then
            counts: list[Any] = []
            for semaphore in semaphores:
                before = proxy.trips
                permit = await world.call(semaphore.acquire)
                counts.append(proxy.trips - before)
                before = proxy.trips
                await world.call(permit.release)
                counts.append(proxy.trips - before)
            before = proxy.trips
            assert await world.call(rate.try_take, 3)
            counts.append(proxy.trips - before)
        assert counts == [1] * 7
        await world.call(engine.dispose)
