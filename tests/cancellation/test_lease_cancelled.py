"""Leases cancelled at every await and interrupted at many moments: the name is free long before its TTL."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

from pgfence import AsyncLease, Lease
from pgfence.config import configure
from pgfence.errors import LockLostError
from support.locking import labelled
from support.moments import SoftLimit, Stop, interrupted, torn_connections
from support.stepping import at_every_step, quitting_in_line, stepped
from support.worlds import World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

pytestmark = [
    pytest.mark.usefixtures("tables"),
    pytest.mark.filterwarnings("ignore:.*Future exception was never retrieved"),
]

TTL = 600
SOON = 20
MOMENTS = int(os.environ.get("PGFENCE_TEST_MOMENTS", "10"))
"""How many of the moments of a cycle are interrupted, at random."""


@pytest.fixture(params=["psycopg_async", "asyncpg"])
async def world(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[World]:
    """The async drivers."""
    here = World(request.param, dsn)
    yield here
    await here.close()


async def test_a_cycle_cancelled_at_every_await(world: World, name: str) -> None:
    """acquire, body, release: after each step the next one gets it soon, with a larger token."""
    engine = labelled(world, name)
    tokens = [0]

    async def work() -> None:
        async with AsyncLease(engine, name, ttl=TTL).hold(timeout=SOON):
            await asyncio.sleep(0)

    async def check() -> None:
        async with AsyncLease(engine, name, ttl=TTL).hold(timeout=SOON) as held:
            tokens.append(held.token)

    assert await at_every_step(work, check) >= 3
    assert tokens == sorted(set(tokens))


async def test_a_first_use_cancelled_at_every_await(world: World, name: str) -> None:
    """It opens its connection and looks at the tables first: a cancel there takes no place among the connections."""
    engines: list[Any] = []

    async def work() -> None:
        engines.append(labelled(world, name))
        configure(engines[-1], max_lock_connections=1)
        async with AsyncLease(engines[-1], name, ttl=TTL).hold(timeout=SOON):
            await asyncio.sleep(0)

    async def check() -> None:
        async with AsyncLease(engines[-1], name, ttl=TTL).hold(timeout=SOON):
            pass
        await engines[-1].dispose()

    assert await at_every_step(work, check) >= 3


async def test_a_release_that_is_cancelled_frees_the_lease(world: World, name: str) -> None:
    """The handle is released, on_event is called, and the server frees the lease in the background."""
    engine, heard = labelled(world, name), []
    configure(engine, on_event=lambda e: heard.append(e.event))
    one = AsyncLease(engine, name, ttl=TTL)
    for times in (1, 2):
        held = await one.acquire(timeout=SOON)
        cancelled, _ = await stepped(held.release, 0, times)
        assert cancelled
        assert held.state == "released"
        assert heard == ["acquired", "released"]
        heard.clear()
    await (await one.acquire(timeout=SOON)).release()


async def test_a_hand_over_cancelled_at_every_await(world: World, name: str) -> None:
    """Either it is still held here, or it was handed over and ends with its TTL."""
    one = AsyncLease(labelled(world, name), name, ttl=TTL)
    for at in range(10):
        held = await one.acquire(timeout=SOON)
        cancelled, _ = await stepped(held.hand_over, at, 1)
        if not cancelled:
            break
        assert held.state == "held"
        await held.release()
    assert held.state == "released"


async def test_an_adoption_cancelled_at_every_await(world: World, name: str) -> None:
    """Either the reference can be adopted again, or the lease is released soon."""
    engine = labelled(world, name)
    one = AsyncLease(engine, name, ttl=TTL)
    for at in range(10):
        ref = await (await one.acquire(timeout=SOON)).hand_over()

        async def work() -> None:
            await (await AsyncLease.adopt(engine, ref)).release()  # noqa: B023

        cancelled, _ = await stepped(work, at, 1)
        if not cancelled:
            break
        try:
            await (await AsyncLease.adopt(engine, ref)).release()
        except LockLostError:
            await (await one.acquire(timeout=SOON)).release()
        assert await one.holders() == []
    else:
        pytest.fail("more suspensions than expected")


async def test_a_wait_in_the_local_queue_cancelled_at_any_moment(world: World, name: str) -> None:
    """Cancelled behind a neighbour, also in the moment of the hand-over: the one after it is served."""
    one = AsyncLease(labelled(world, name), name, ttl=TTL)

    async def check() -> None:
        assert await one.holders() == []

    await quitting_in_line(lambda: one.acquire(timeout=SOON), check, SOON)


@pytest.fixture(params=["psycopg", "psycopg2"])
def engine(request: pytest.FixtureRequest, dsn: str) -> Iterator[Any]:
    """An engine of a sync driver."""
    made = create_engine(f"postgresql+{request.param}://{dsn.split('://', 1)[1]}")
    with torn_connections():
        yield made
        made.dispose()


def usable(one: Lease) -> bool:
    """Say whether another thread gets the lease soon."""
    got: list[int] = []

    def take() -> None:
        with one.hold(timeout=SOON) as held:
            got.append(held.token)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(got)


def moments(work: Callable[[], None]) -> int:
    """Count the moments of a piece of work."""
    with interrupted(1 << 30) as count:
        work()
    return (1 << 30) - count.left


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [Stop, SoftLimit])
def test_a_cycle_interrupted_at_many_moments(engine: Any, name: str, kind: type[BaseException]) -> None:
    """acquire, body, release in a thread that a signal handler stops: the interrupt comes out, and the next one gets it."""
    one = Lease(engine, name, ttl=TTL)

    def work() -> None:
        with one.hold(timeout=SOON):
            pass

    work()
    total = moments(work)
    leaks, strange = [], []
    for at in sorted(random.sample(range(1, total + 1), min(MOMENTS, total))):
        outcome: BaseException | None = None
        with interrupted(at, kind) as interrupt:
            try:
                work()
            except BaseException as error:
                outcome = error
        if interrupt.where and not isinstance(outcome, kind):
            strange.append((at, interrupt.where, repr(outcome)))
        del outcome
        gc.collect()
        if not usable(one):
            leaks.append((at, interrupt.where))
            one = Lease(engine, f"{name}:{at}", ttl=TTL)
    assert (leaks, strange) == ([], [])
