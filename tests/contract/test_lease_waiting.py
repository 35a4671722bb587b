"""Waiting for a lease: locked rows, late or lost responses, cancellation."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import event

from pgfence.config import configure
from pgfence.errors import LockTimeoutError, UnreachableError
from support.leases import lapse, lease, rival, row
from support.limits import set_limit
from support.locking import background, elsewhere, labelled, lock, sessions
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.proxy import Proxy
    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


def let_go(admin: psycopg.Connection[Any], name: str) -> None:
    """Release a lease as its holder would, past all of our code."""
    found = row(admin, name)
    call = "SELECT pgfence_release_lease_v1(%s, %s, %s)"
    assert admin.execute(call, [name, str(found.lease_id), found.token]).fetchone() == ("released",)


@contextmanager
def locked_row(dsn: str, name: str) -> Iterator[psycopg.Connection[Any]]:
    """Keep the row of a lease locked until the transaction is committed, at the latest with the block."""
    with psycopg.connect(dsn) as other:
        other.execute("UPDATE pgfence_lease SET purpose = purpose WHERE name = %s", [name])
        yield other


def waits_for_row(admin: psycopg.Connection[Any]) -> bool:
    """Return whether a session waits in the server for a locked row."""
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%acquire_lease%'"
        " AND datname = current_database()"
    )
    return admin.execute(query).fetchone() == (1,)


async def passed(seconds: float) -> None:
    """Wait for the time that the test is about."""
    end = time.monotonic() + seconds
    await eventually(lambda: time.monotonic() > end, deadline=seconds + 5)


@pytest.mark.every_driver
async def test_a_release_wakes_a_waiter(
    world: World, name: str, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NOTIFY wakes the waiter: the next poll and the end of the TTL would come after the timeout."""
    set_limit(monkeypatch, "LONGEST_SLEEP", 3600)
    one = lease(world, world.engine(), name, ttl=120)
    for again in (False, True):
        assert rival(admin, name, 120)
        async with background(world.other().call(one.acquire, timeout=1000)) as waiting:
            # The second time, the connection still listens, but if the machine was slow, its last query is a renewal of `held`.
            if not again:
                await eventually(lambda: listening(admin))
            await eventually(lambda: not waiting.done() and sleeps(admin))
            let_go(admin, name)
            held = await asyncio.wait_for(waiting, FAR)
        await world.call(held.release)


def listening(admin: psycopg.Connection[Any]) -> bool:
    query = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
    return admin.execute(query).fetchone() != (0,)


def sleeps(admin: psycopg.Connection[Any]) -> bool:
    """Return whether a waiter's last query of the row is so long ago that the waiter must be sleeping."""
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%acquire_lease%' AND state = 'idle'"
        " AND state_change < clock_timestamp() - interval '0.3 s' AND datname = current_database() AND pid <> pg_backend_pid()"
    )
    return admin.execute(query).fetchone() != (0,)


async def test_an_expiry_wakes_a_waiter(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C085: without a notification the waiter gets the lease at most a moment after the holder's expiry."""
    one = lease(world, world.engine(), name)
    rival(admin, name, 0.6)
    over = row(admin, name).expires_at
    held = await world.call(one.acquire, timeout=20)
    assert row(admin, name).acquired_at >= over
    assert held.token == 2
    await world.call(held.release)


async def test_a_hundred_waiters_poll_once_a_second_like_one(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C085: a hundred contenders of one process wait in one line, and only the first polls the row."""
    engine = world.engine()
    one = lease(world, engine, name)
    rival(admin, name)
    seen: list[float] = []
    event.listen(
        getattr(engine, "sync_engine", engine),
        "before_cursor_execute",
        lambda *args: seen.append(time.monotonic()) if "acquire_lease_v2" in args[2] else None,
    )
    count = 100 if world.is_async else 30
    async with AsyncExitStack() as stack:
        crowd = [world.other() for _ in range(count)]
        tasks = [await stack.enter_async_context(background(who.call(one.acquire, timeout=2.5))) for who in crowd]
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [LockTimeoutError] * count
    # At once, when the connection begins to listen, and then a second apart. Whoever comes to the front when another one gives
    # up looks once; that is after these two seconds.
    assert len([at for at in seen if at < seen[0] + 2]) <= 4


@pytest.mark.matrix
@pytest.mark.parametrize("given", [True, False])
async def test_a_wait_ends_at_its_timeout(world: World, name: str, admin: psycopg.Connection[Any], given: bool) -> None:
    """A wait ends at the call's or the configured timeout; the error names the holder, and the queue is empty."""
    engine = world.engine()
    configure(engine, default_timeout=30 if given else 0.4)
    one = lease(world, engine, name)
    rival(admin, name)
    start = time.monotonic()
    with pytest.raises(LockTimeoutError, match="rival"):
        await world.call(one.acquire, **({"timeout": 0.4} if given else {}))
    assert 0.39 < time.monotonic() - start < FAR
    let_go(admin, name)
    async with world.enter(one.hold(timeout=5)) as held:
        assert held.token == 2


async def test_a_wait_of_a_contender_that_holds_a_lease_is_cut(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an explicit timeout it waits at most a minute, because deadlocks between processes are not detected."""
    set_limit(monkeypatch, "NESTED_LIMIT", 0.2)
    engine = world.engine()
    rival(admin, name)
    with elsewhere(dsn, f"{name}:lock"):
        async with world.enter(lease(world, engine, f"{name}:outer").hold()):
            for inner in (lease(world, engine, name), lock(world, engine, f"{name}:lock")):
                with pytest.raises(LockTimeoutError) as caught:
                    await world.call(inner.acquire)
                assert (caught.value.timeout, caught.value.held_here) == (0.2, (f"{name}:outer",))


async def test_never_two_at_a_time_and_never_a_token_twice(world: World, name: str) -> None:
    """Contenders of two engines, which share no queue, like two processes, never hold the lease at the same time."""
    inside = most = 0
    tokens: list[int] = []

    async def work(one: Any) -> None:
        nonlocal inside, most
        who = world.other()
        for _ in range(5):
            async with who.enter(one.hold(timeout=30)) as held:
                inside += 1
                most = max(most, inside)
                tokens.append(held.token)
                await asyncio.sleep(0)
                inside -= 1

    leases = [lease(world, world.engine(), name) for _ in range(2)]
    await asyncio.gather(*(work(one) for one in leases for _ in range(3)))
    assert most == 1
    assert len(set(tokens)) == 30
    assert tokens == sorted(tokens)


async def test_a_wait_for_the_row_takes_nothing_off_the_ttl(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """C075: the expiry is computed after the wait; the holder's deadline counts from before it, so it is not later."""
    one = lease(world, world.engine(), name, ttl=5, heartbeat="manual")
    rival(admin, name)
    lapse(admin, name)
    with locked_row(dsn, name) as other:
        async with background(world.other().call(one.acquire, timeout=10)) as waiting:
            await eventually(lambda: waits_for_row(admin))
            await passed(1)
            other.commit()
            held = await waiting
    assert row(admin, name).left > 4
    assert held.remaining() < 5 - 0.5 - 1
    await world.call(held.release)


async def test_a_release_during_the_request_is_not_an_expiry(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """The statement began before the release was committed, and no event says that the last holder let the lease expire."""
    engine, heard = world.engine(), []
    configure(engine, on_event=lambda e: heard.append(e.event))
    one = lease(world, engine, name)
    rival(admin, name)
    with psycopg.connect(dsn) as other:
        let_go(other, name)
        async with background(world.other().call(one.acquire, timeout=FAR)) as waiting:
            await eventually(lambda: waits_for_row(admin))
            other.commit()
            held = await waiting
    await world.call(held.release)
    assert heard == ["acquired", "released"]


@pytest.mark.one_driver
async def test_a_release_that_is_committed_after_the_expiry_is_not_an_expiry(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """The lease had not expired when the statement began, and was released before the statement went on."""
    engine, heard = world.engine(), []
    configure(engine, on_event=lambda e: heard.append(e.event))
    one = lease(world, engine, name)
    warm = await world.call(lease(world, engine, f"{name}:warm").acquire)  # opens the connection
    await world.call(warm.release)
    heard.clear()
    rival(admin, name, ttl=1.5)
    with psycopg.connect(dsn) as other:
        let_go(other, name)
        async with background(world.other().call(one.acquire, timeout=FAR)) as waiting:
            await eventually(lambda: waits_for_row(admin))
            await eventually(lambda: row(admin, name).left < 0)
            other.commit()
            held = await waiting
    await world.call(held.release)
    assert heard == ["acquired", "released"]


async def test_a_grant_that_comes_too_late_is_not_held(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """C086: the response took longer than the TTL: the lease is released, and requested again if there is time."""
    one = lease(world, world.engine(), name, ttl=1.0)
    rival(admin, name)
    lapse(admin, name)
    for call, wanted in ((one.try_acquire, None), (one.acquire, "held")):
        with locked_row(dsn, name) as other:
            async with background(world.other().call(call)) as waiting:
                await eventually(lambda: waits_for_row(admin))
                await passed(1.2)
                other.commit()
                held = await waiting
        assert (held and held.state) == wanted
        if held is None:
            await eventually(lambda: row(admin, name).released_at is not None)
    assert held.remaining() > 0
    await world.call(held.release)


@pytest.mark.every_driver
async def test_a_row_that_stays_locked_is_neither_free_nor_held(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """The server's wait for the row ends after two seconds and the caller's at its timeout, and nothing is left."""
    one = lease(world, world.engine(), name)
    rival(admin, name)
    lapse(admin, name)
    with locked_row(dsn, name):
        with pytest.raises(LockTimeoutError):
            await world.call(one.acquire, timeout=0.5)
    assert rival(admin, name) == 2


@pytest.mark.every_driver
async def test_a_grant_whose_response_is_lost_blocks_no_other(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], proxy: Proxy
) -> None:
    """C084: the error says that the outcome is unknown, and the row is free again long before its TTL of a minute."""
    engine = world.engine(dsn=proxy.dsn)
    one = lease(world, engine, name, ttl=60)
    await world.call((await world.call(one.acquire)).release)
    with locked_row(dsn, name) as other:
        async with background(world.other().call(one.acquire)) as waiting:
            await eventually(lambda: waits_for_row(admin))
            proxy.cut()
            with pytest.raises(UnreachableError, match="unknown"):
                await waiting
            other.commit()
    await eventually(lambda: row(admin, name).token == 2)
    await eventually(lambda: rival(admin, name) == 3, deadline=10)


@pytest.mark.every_driver
async def test_no_server_is_never_a_grant(world: World, name: str) -> None:
    """Without a server, each method raises UnreachableError."""
    one = lease(world, world.engine(dsn="postgresql://somebody:hunter2@127.0.0.1:1/d"), name)
    for call in (one.try_acquire, one.acquire, one.holders, one.is_held):
        with pytest.raises(UnreachableError) as caught:
            await world.call(call)
        assert "hunter2" not in str(caught.value)


@pytest.mark.async_only
@pytest.mark.every_driver
async def test_a_cancelled_wait_leaves_nothing_behind(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], proxy: Proxy
) -> None:
    """A wait that is cancelled in the queue, or in a statement whose grant is then lost, leaves nothing behind."""
    one = lease(world, world.engine(dsn=proxy.dsn), name, ttl=60)
    rival(admin, name)
    await cancelled(one, lambda: listening(admin))
    assert await one.try_acquire() is None  # a warm session: the cancel may have met a statement, and closed the first
    lapse(admin, name)
    with locked_row(dsn, name) as other:
        proxy.refuse()
        await cancelled(one, lambda: waits_for_row(admin))
        other.commit()
        await eventually(lambda: not waits_for_row(admin))
    proxy.heal()
    await eventually(lambda: rival(admin, name) is not None)


async def cancelled(one: Any, moment: Callable[[], bool]) -> None:
    """Wait for a lease, and be cancelled at some moment."""
    waiting = asyncio.create_task(one.acquire(timeout=20))
    await eventually(moment)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


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
    """An adoption is retried if the row stays locked for longer than the server waits, without a driver's error."""
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
