"""`IdempotentEffect`: one effect outside the database for each key, on every driver."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest

from pgfence.errors import IdempotencyInProgressError
from support.effects import Gate, Shop

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

ROUNDS = 100 if os.environ.get("PGFENCE_TEST_FAULTS") else 1
CALLERS = 20
pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture
def shop(world: World, admin: psycopg.Connection[Any]) -> Shop:
    """Effects of a world, and a provider that counts them."""
    return Shop(world, admin)


async def test_the_work_is_done_once_and_everybody_gets_its_result(shop: Shop) -> None:
    """C105: a second call does nothing and returns an equal result."""
    first = await shop.run("k")
    assert await shop.run("k") == first == "receipt of k:charge"
    assert shop.provider.asked == {"k:charge": 1}
    row = shop.row("k")
    assert (row.status, row.attempt, row.result) == ("done", 1, "receipt of k:charge")
    assert 86000 < row.record_left <= 86400


async def test_a_second_caller_is_told_at_once_that_an_attempt_is_at_work(shop: Shop) -> None:
    """Without a timeout the loser does not wait, and learns when the claim would end."""
    gate = Gate()

    async def slow(attempt: Any) -> str:
        await gate.wait()
        return await shop.charge(attempt)

    winner = asyncio.create_task(shop.run("k", slow, who=shop.world.other(), ttl=30))
    await gate.reached()
    with pytest.raises(IdempotencyInProgressError, match="attempt 1 .* is at work under") as told:
        await shop.run("k")
    assert told.value.retry_after is not None
    assert 25 < told.value.retry_after <= 30
    gate.open()
    assert await winner == await shop.run("k")
    assert shop.provider.done == 1


async def test_of_many_at_once_one_runs_and_all_answers_are_equal(shop: Shop) -> None:
    """C095: twenty callers with one key, who wait: one execution."""
    for n in range(ROUNDS):
        callers = [shop.run(f"k{n}", who=shop.world.other(), timeout=30) for _ in range(CALLERS)]
        answers = await asyncio.gather(*callers)
        assert set(answers) == {f"receipt of k{n}:charge"}
        assert shop.provider.asked[f"k{n}:charge"] == 1
