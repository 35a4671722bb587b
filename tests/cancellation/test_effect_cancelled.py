"""Effects cancelled at every await and interrupted at many moments: no claim stays renewed, no result is lost."""

from __future__ import annotations

import gc
import os
import random
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

from pgfence._leases.heartbeat.service import heartbeat_of
from pgfence.config import config_of
from pgfence.effects import IdempotentEffect
from support.effects import Shop
from support.moments import Stop, interrupted
from support.stepping import at_every_step
from support.waiting import eventually
from support.worlds import World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import psycopg

pytestmark = [
    pytest.mark.usefixtures("tables"),
    pytest.mark.filterwarnings("ignore:.*Future exception was never retrieved"),
]

TTL = 600
MOMENTS = int(os.environ.get("PGFENCE_TEST_MOMENTS", "10"))
"""How many of the moments of a run are interrupted, at random."""


@pytest.fixture(params=["psycopg_async", "asyncpg"])
async def world(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[World]:
    """The async drivers."""
    here = World(request.param, dsn)
    yield here
    await here.close()


def renewed(engine: Any) -> int:
    """Return how many claims the heartbeat of an engine renews."""
    return len(heartbeat_of(engine, config_of(engine))._queue.schedule)


async def test_a_run_cancelled_at_every_await(world: World, admin: psycopg.Connection[Any]) -> None:
    """Before the work the key is soon free; during it the outcome is unknown; after it the result is stored."""
    shop, numbers = Shop(world, admin), count()
    state: dict[str, Any] = {}

    async def work() -> None:
        state.update(key=f"k{next(numbers)}", at="claim")

        async def body(attempt: Any) -> str:
            state["at"] = "work"
            receipt = await shop.charge(attempt)
            state["at"] = "end"
            return receipt

        await shop.effect(state["key"], ttl=TTL).run(body)

    async def check() -> None:
        gc.collect()
        await eventually(lambda: renewed(shop.engine.sync_engine) == 0)
        if state["at"] == "work":
            assert shop.row(state["key"]).status == "in_progress"
            return
        if state["at"] == "end":
            await eventually(lambda: shop.row(state["key"]).status == "done")
        assert await shop.run(state["key"], timeout=10) == f"receipt of {state['key']}:charge"
        assert shop.provider.asked[f"{state['key']}:charge"] == 1

    assert await at_every_step(work, check) >= 3
    assert shop.provider.done > 6


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_run_interrupted_at_many_moments(driver: str, dsn: str, admin: psycopg.Connection[Any]) -> None:
    """After a signal the claim is not renewed, and a later caller gets the result or an unknown outcome."""
    url = f"postgresql+{driver}://{dsn.split('://', 1)[1]}"
    engine = create_engine(url)
    ran: list[str] = []

    def run(key: str) -> str:
        effect = IdempotentEffect(engine, key, scope=f"torn:{driver}", result=str, ttl=TTL)
        return effect.run(lambda attempt: attempt.step("charge", lambda derived: ran.append(derived) or derived))

    with interrupted(10**6) as interrupt:
        run("all")
    moments = 10**6 - interrupt.left
    for at in sorted(random.sample(range(1, moments), MOMENTS)):
        key, outcome = f"k{at}", None
        with interrupted(at) as interrupt:
            try:
                run(key)
            except BaseException as error:
                outcome = type(error)
        assert outcome in (Stop, None), interrupt.where
        gc.collect()
        eventually(lambda: renewed(engine) == 0)
        assert ran.count(f"{key}:charge") <= 1
        admin.execute(
            "UPDATE pgfence_idempotency_key SET locked_until = clock_timestamp() WHERE key = %s AND locked_until IS NOT NULL",
            [key],
        )
        assert run(key) == f"{key}:charge", interrupt.where
    engine.dispose()


def test_an_exit_in_the_middle_of_the_work_lets_the_claim_lapse(dsn: str) -> None:
    """SystemExit leaves the outcome unknown; the process ends, and no thread of pgfence keeps it."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")

    def leave(attempt: Any) -> str:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        IdempotentEffect(engine, "exit", scope="torn", result=str).run(leave)
    assert renewed(engine) == 0
    engine.dispose()
