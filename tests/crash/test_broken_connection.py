"""A proxy between pgfence and the server resets, closes or swallows."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from sqlalchemy import event

from pgfence import configure
from pgfence._connections import pool
from pgfence.errors import LockLostError, LockTimeoutError, UnreachableError
from support.locking import background, elsewhere, freed, give, is_free, lock, waits
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    import psycopg

    from pgfence.testing._proxy import Proxy
    from support.worlds import World


@pytest.mark.parametrize("fault", ["reset", "half-closed towards us", "half-closed towards the server"])
async def test_a_broken_connection_is_noticed_and_the_next_acquire_works(
    world: World, name: str, proxy: Proxy, admin: psycopg.Connection[Any], fault: str
) -> None:
    """C042: after a reset or half-close the holder sees the loss without a statement, and nothing stays on the server."""
    one = lock(world, world.engine(dsn=proxy.dsn), name)
    held = await world.call(one.acquire)
    if fault == "reset":
        await asyncio.to_thread(proxy.cut)
    else:
        await asyncio.to_thread(proxy.half_close, "client" if fault.endswith("us") else "server")
    await eventually(lambda: held.lost)
    assert held.loss_reason in ("killed", "cut off")
    with pytest.raises(LockLostError):
        await world.call(held.release)
    await freed(admin, name)
    async with world.enter(one.hold(timeout=10)) as again:
        again.check()


@pytest.mark.twins
async def test_a_waiter_whose_connection_breaks_goes_on_with_another(
    world: World, name: str, proxy: Proxy, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """After a reset during the wait it asks again, within the same timeout."""
    one = lock(world, world.engine(dsn=proxy.dsn), name)
    waiter = world.other()
    with elsewhere(dsn, name) as holder:
        async with background(waiter.call(one.acquire, timeout=20)) as waiting:
            await eventually(waits(admin, name))
            await asyncio.to_thread(proxy.cut)
            await eventually(lambda: proxy.connections() == 1 and waits(admin, name)())
            assert give(holder, name)
            held = await waiting
    held.check()
    await waiter.call(held.release)


async def test_a_release_into_a_black_hole_ends_with_a_loss(
    world: World, name: str, proxy: Proxy, admin: psycopg.Connection[Any], short_statements: float
) -> None:
    """The kernel still sees a living peer; the statement's own budget ends it as cut off, and the lock is lost."""
    held = await world.call(lock(world, world.engine(dsn=proxy.dsn), name).acquire)
    await asyncio.to_thread(proxy.black_hole)
    began = time.monotonic()
    with pytest.raises(LockLostError) as caught:
        await world.call(held.release)
    assert time.monotonic() - began < FAR
    assert caught.value.reason == "cut off"
    assert (held.state, held.loss_reason) == ("lost", "cut off")
    assert not is_free(admin, name)
    await asyncio.to_thread(proxy.cut)
    await freed(admin, name)


async def test_a_wait_over_a_black_hole_ends_by_its_slice(
    world: World, name: str, proxy: Proxy, dsn: str, admin: psycopg.Connection[Any], short_opening: float
) -> None:
    """After its slice and two seconds the session is given up, no other can be opened, and the call raises."""
    one = lock(world, world.engine(dsn=proxy.dsn), name)
    waiter = world.other()
    with elsewhere(dsn, name):
        async with background(waiter.call(one.acquire, timeout=1)) as waiting:
            await eventually(waits(admin, name))
            await asyncio.to_thread(proxy.black_hole)
            began = time.monotonic()
            with pytest.raises(UnreachableError):
                await waiting
            assert time.monotonic() - began < FAR
        await asyncio.to_thread(proxy.heal)


async def test_a_warm_connection_to_a_black_hole_is_abandoned(
    world: World, name: str, proxy: Proxy, short_statements: float, short_opening: float
) -> None:
    """A try without a response ends by the limit of a statement; no connection can be opened either: UnreachableError."""
    one = lock(world, world.engine(dsn=proxy.dsn), name)
    held = await world.call(one.acquire)
    await world.call(held.release)
    await asyncio.to_thread(proxy.black_hole)
    began = time.monotonic()
    with pytest.raises(UnreachableError):
        await world.call(one.try_acquire)
    assert time.monotonic() - began < FAR
    await asyncio.to_thread(proxy.heal)


async def test_opening_into_a_black_hole_ends_within_its_budget(
    world: World, name: str, proxy: Proxy, short_opening: float
) -> None:
    """Without a response to the greeting: UnreachableError, however short the timeout, and without a password in it."""
    await asyncio.to_thread(proxy.black_hole)
    engine = world.engine(dsn=proxy.dsn)
    for call in (lock(world, engine, name).try_acquire, lock(world, engine, name).holders):
        began = time.monotonic()
        with pytest.raises(UnreachableError, match=f"within {short_opening:g} s") as caught:
            await world.call(call)
        assert short_opening * 0.9 < time.monotonic() - began < FAR
        assert proxy.dsn.split("@")[0].rsplit(":", 1)[1] not in str(caught.value)
    await asyncio.to_thread(proxy.heal)


def test_opening_may_take_five_seconds() -> None:
    """What the tests here shorten is long enough for a slow login, and short enough for a caller."""
    assert pool.OPEN_BUDGET == 5


@pytest.mark.twins
async def test_a_server_that_cannot_be_reached_is_never_called_busy(
    world: World, name: str, proxy: Proxy, short_opening: float
) -> None:
    """Connections that hang while opening use up `max_lock_connections`; a further call raises UnreachableError."""
    engine = world.engine(dsn=proxy.dsn)
    configure(engine, max_lock_connections=2)
    await asyncio.to_thread(proxy.black_hole)
    for number in range(4):
        with pytest.raises(UnreachableError):
            try:
                await world.call(lock(world, engine, f"{name}{number}").try_acquire)
            except LockTimeoutError as error:
                pytest.fail(f"an unreachable server was called busy: {error}")
    await asyncio.to_thread(proxy.heal)
    await comes_back(world, lock(world, engine, name))


@pytest.mark.twins
async def test_a_server_that_is_back_is_found_beside_hanging_openings(
    world: World, name: str, proxy: Proxy, dsn: str, short_opening: float
) -> None:
    """Nothing ends an opening whose peer accepted and fell silent: it must not keep this process out of a living server."""
    engine = world.engine(dsn=proxy.dsn)
    configure(engine, max_lock_connections=2)
    ports = [proxy.port]

    @event.listens_for(getattr(engine, "sync_engine", engine), "do_connect")
    def redirect(_dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> None:
        parameters["port"] = ports[0]

    await asyncio.to_thread(proxy.black_hole)
    for number in range(3):
        with pytest.raises(UnreachableError):
            await world.call(lock(world, engine, f"{name}{number}").try_acquire)
    ports[0] = urlsplit(dsn).port
    await comes_back(world, lock(world, engine, name))
    await asyncio.to_thread(proxy.heal)


async def comes_back(world: World, one: Any) -> None:
    """Wait until a lock can be had again."""

    async def granted() -> bool:
        try:
            held = await world.call(one.acquire, timeout=5)
        except UnreachableError:
            return False
        await world.call(held.release)
        return True

    await eventually(granted, deadline=10)


@pytest.mark.twins
async def test_a_rejecting_server_is_unreachable_and_locks_stay_held(
    world: World, name: str, proxy: Proxy, admin: psycopg.Connection[Any]
) -> None:
    """A new lock raises UnreachableError at once, while the old one is held and can be released."""
    engine = world.engine(dsn=proxy.dsn)
    held = await world.call(lock(world, engine, name).acquire)
    await asyncio.to_thread(proxy.refuse)
    began = time.monotonic()
    with pytest.raises(UnreachableError):
        await world.call(lock(world, engine, f"{name}!").acquire)
    assert time.monotonic() - began < FAR
    held.check()
    assert not is_free(admin, name)
    await world.call(held.release)
    assert is_free(admin, name)
