"""What a thread or task gets that asks for what it holds already: a try is busy, a wait raises SelfDeadlockError."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

import pgfence
from pgfence.errors import LockTimeoutError, SelfDeadlockError
from support import leases, locking

if TYPE_CHECKING:
    from support.worlds import World

pytestmark = pytest.mark.usefixtures("tables")

both = pytest.mark.parametrize("world", ["psycopg", "asyncpg"], indirect=True)


def advisory(world: World, engine: Any, name: str) -> Any:
    return locking.lock(world, engine, name)


def with_token(world: World, engine: Any, name: str) -> Any:
    return locking.lock(world, engine, name, token=True)


def once(world: World, engine: Any, name: str) -> Any:
    return world.pick(pgfence.Once, pgfence.AsyncOnce)(engine, name, cron="0 0 1 1 *")


@both
@pytest.mark.parametrize("noun", [advisory, with_token, leases.lease, once])
async def test_a_try_on_what_is_held_here_is_busy(world: World, noun: Any, name: str) -> None:
    """C006: try_acquire() returns None, timeout=0 names the holder and says that it is this one, and busy="skip" skips."""
    engine, ran = world.engine(), []
    one = noun(world, engine, name)

    def sync() -> None:
        ran.append(skipping())

    async def asynchronous() -> None:
        ran.append(await skipping())

    skipping = one.wrap(busy="skip")(world.pick(sync, asynchronous))
    async with world.enter(one.hold()) as held:
        assert await world.call(noun(world, engine, name).try_acquire) is None
        with pytest.raises(LockTimeoutError, match=f"this {world.pick('thread', 'task')} holds it already") as caught:
            await world.call(one.acquire, timeout=0)
        assert caught.value.held_here == (name,)
        assert [holder.name for holder in caught.value.holders] == [name]
        with pytest.raises(SelfDeadlockError, match="already"):
            await world.call(one.acquire, timeout=math.inf)
        assert await world.call(skipping) is None
        assert ran == []
        held.check()


@both
async def test_a_skipping_function_that_meets_itself_is_skipped(world: World, name: str) -> None:
    """The inner call of a recursive function returns None, and the outer one goes on."""
    ran: list[Any] = []

    def sync() -> str:
        ran.append(skipping())
        return "outer"

    async def asynchronous() -> str:
        ran.append(await skipping())
        return "outer"

    skipping = advisory(world, world.engine(), name).wrap(busy="skip")(world.pick(sync, asynchronous))
    assert await world.call(skipping) == "outer"
    assert ran == [None]
