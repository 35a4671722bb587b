"""The name of a lock determines its scope, and messages contain it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pgfence.errors import LockTimeoutError
from support.locking import lock

if TYPE_CHECKING:
    from support.worlds import World

pytestmark = pytest.mark.twins


async def test_locks_of_different_tenants_overlap_and_those_of_one_do_not(world: World, name: str) -> None:
    """C030: with the schema in the name two schemas migrate at the same time, the same schema twice never does."""
    engine = world.engine()
    inside: dict[str, int] = {}
    together: set[frozenset[str]] = set()
    overlaps: list[str] = []
    both = asyncio.Event()

    async def migrate(schema: str) -> None:
        async with world.other().enter(lock(world, engine, f"{name}:migrate:{schema}").hold(timeout=10)):
            if inside.get(schema):
                overlaps.append(schema)
            inside[schema] = 1
            together.add(frozenset(one for one, there in inside.items() if there))
            if sum(inside.values()) == 2:
                both.set()
            await asyncio.wait_for(both.wait(), 10)
            inside[schema] = 0

    await asyncio.gather(migrate("red"), migrate("blue"), migrate("red"), migrate("blue"))
    assert frozenset({"red", "blue"}) in together
    assert not overlaps


async def test_a_timeout_names_the_scope_it_waited_for(world: World, name: str) -> None:
    """C030: the error of an unsuccessful wait says which schema's lock it was."""
    engine = world.engine()
    async with world.enter(lock(world, engine, f"{name}:migrate:red").hold(timeout=5)):
        with pytest.raises(LockTimeoutError, match=f"{name}:migrate:red") as caught:
            await world.other().call(lock(world, engine, f"{name}:migrate:red").acquire, timeout=0.2)
    assert caught.value.names == (f"{name}:migrate:red",)
