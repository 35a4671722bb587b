"""A lease whose row or whose line is in somebody's way: what a contender is told, and what it waits for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence.errors import LockTimeoutError
from support.leases import lease, rival, row
from support.locking import background, labelled, sessions
from support.waiting import eventually

if TYPE_CHECKING:
    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


async def test_a_timeout_in_the_local_queue_names_the_holder(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Only the first in line asks the server; those behind it name the holder that it found."""
    rival(admin, name)
    one = lease(world, labelled(world, name), name)
    first = world.other()
    async with background(first.call(one.acquire, timeout=3)) as waiting:
        # It has asked, and was answered.
        await eventually(lambda: any("acquire_lease" in s.query and s.state == "idle" for s in sessions(admin, name)))
        with pytest.raises(LockTimeoutError, match="rival") as caught:
            await world.call(one.acquire, timeout=0.5)
        assert [seen.token for seen in caught.value.holders] == [1]
        with pytest.raises(LockTimeoutError, match="rival"):
            await waiting


@pytest.mark.every_driver
async def test_an_adoption_waits_for_a_locked_row(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """Longer than the server itself waits for it: asked again, and no driver's error comes out."""
    kind = type(lease(world, lambda: None, name))
    engine = world.engine()
    ref = await world.call((await world.call(lease(world, engine, name).acquire)).hand_over)
    with psycopg.connect(dsn) as other:
        other.execute("UPDATE pgfence_lease SET purpose = purpose WHERE name = %s", [name])
        async with background(world.other().call(kind.adopt, engine, ref)) as adopting:
            end = time.monotonic() + 2.3
            await eventually(lambda: time.monotonic() > end or adopting.done(), deadline=10)
            assert not adopting.done()
            other.commit()
            held = await adopting
    assert held.token == 1
    assert row(admin, name).lease_id == held.lease_id
    await world.call(held.release)
