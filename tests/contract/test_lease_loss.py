"""A lost lease: who is notified and when, and what a former holder can no longer do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from pgfence.errors import LockLostError, StaleFencingTokenError
from support.leases import lapse, lease, rival, row
from support.locking import background
from support.transactions import connection, run
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]

EVICT = "SELECT * FROM pgfence_evict_lease_v1(%s, 'operator', 'it hangs', NULL)"


@pytest.mark.every_driver
async def test_a_loss_ends_the_block_with_its_reason(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C090: taken over by another holder: an async body is cancelled at once, and leaving the block raises in both APIs."""
    one = lease(world, world.engine(), name, ttl=2)
    body_ended = False
    with pytest.raises(LockLostError) as caught:
        async with world.enter(one.hold()) as held:
            lapse(admin, name)
            assert rival(admin, name) == 2
            try:
                await eventually(lambda: held.lost and not world.is_async)
            finally:
                body_ended = True
    assert body_ended
    assert (caught.value.reason, caught.value.token, caught.value.names) == ("superseded", 1, (name,))


async def test_a_loss_that_the_block_raised_has_no_note(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C090: check() raised the loss in the block, so leaving the block does not repeat it as a note."""
    held = await world.call(lease(world, world.engine(), name, ttl=2).acquire)
    with pytest.raises(LockLostError) as caught:
        async with world.enter(held):
            lapse(admin, name)
            assert rival(admin, name) == 2
            await eventually(lambda: held.lost)
            held.check()
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    "error", [ZeroDivisionError, lambda: LockLostError("the loss of another lock")], ids=["other", "loss"]
)
async def test_a_loss_is_noted_on_another_error_of_the_block(
    world: World, name: str, admin: psycopg.Connection[Any], error: Any
) -> None:
    """C090: the body's own error takes precedence, also the loss of another lock, and carries the loss as a note."""
    held = await world.call(lease(world, world.engine(), name, ttl=2).acquire)
    with pytest.raises((ZeroDivisionError, LockLostError)) as caught:
        async with world.enter(held):
            lapse(admin, name)
            assert rival(admin, name) == 2
            await eventually(lambda: held.lost)
            raise error()
    assert caught.value.__notes__ == [f"while the lock was being released: LockLostError: {held._hold.lost_error()}"]


async def test_with_on_loss_flag_a_loss_only_sets_a_flag(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """on_loss="flag": the body continues, the handle shows the loss, leaving the block raises nothing."""
    async with world.enter(lease(world, world.engine(), name, ttl=2).hold(on_loss="flag")) as held:
        lapse(admin, name)
        rival(admin, name)
        await eventually(lambda: held.lost)
        assert held.loss_reason == "superseded"
    assert row(admin, name).owner == "rival"


async def test_callbacks_and_waiters_are_notified_of_a_loss(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """on_lost runs once, at once if it is lost already; wait_lost comes back with True."""
    held = await world.call(lease(world, world.engine(), name, ttl=2).acquire)
    told: list[str] = []
    held.on_lost(lambda: told.append("first"))
    async with background(world.other().call(held.wait_lost, 10)) as waiting:
        lapse(admin, name)
        rival(admin, name)
        assert await waiting is True
    held.on_lost(lambda: told.append("second"))
    await eventually(lambda: sorted(told) == ["first", "second"])
    with pytest.raises(LockLostError):
        await world.call(held.release)


async def test_an_evicted_holder_is_notified(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """An evicted holder is notified at its next heartbeat or release, neither of which changes the row."""
    one = lease(world, world.engine(), name, ttl=2)
    held = await world.call(one.acquire)
    assert admin.execute(EVICT, [name]).fetchone() == (1, 2)
    await eventually(lambda: held.lost)
    assert held.loss_reason == "evicted"
    again = await world.call(one.acquire)
    assert again.token == 3
    admin.execute(EVICT, [name])
    with pytest.raises(LockLostError) as caught:
        await world.call(again.release)
    assert caught.value.reason == "evicted"
    assert row(admin, name).token == 4


@pytest.mark.matrix
@pytest.mark.parametrize("taken", [True, False])
async def test_nothing_a_former_holder_does_reaches_the_next_one(
    world: World, name: str, admin: psycopg.Connection[Any], taken: bool
) -> None:
    """C077, C078: renew, release, hand over after an expiry are rejected, and the next holder's row is unchanged."""
    engine = world.engine()
    for call in ("renew", "hand_over", "release"):
        held = await world.call(lease(world, engine, f"{name}:{call}", ttl=30, heartbeat="manual").acquire)
        lapse(admin, f"{name}:{call}")
        if taken:
            rival(admin, f"{name}:{call}")
        before = row(admin, f"{name}:{call}")[:-1]
        with pytest.raises(LockLostError) as caught:
            await world.call(getattr(held, call))
        assert caught.value.reason == ("superseded" if taken else "expired")
        if taken:
            assert row(admin, f"{name}:{call}")[:-1] == before
        assert held.lost or call == "release"
        assert rival(admin, f"{name}:{call}") == (None if taken else 2)


@pytest.mark.every_driver
async def test_a_blocked_loop_or_thread_loses_nothing(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C062: the heartbeat has its own thread and connection: a body that blocks for two TTLs keeps its lease."""
    async with world.enter(lease(world, world.engine(), name, ttl=1.5).hold()) as held:
        before = held.expires_at
        time.sleep(2.6)  # noqa: ASYNC251
        assert held.state == "held"
        assert held.expires_at > before
        assert rival(admin, name) is None


@pytest.mark.every_driver
async def test_the_heartbeat_never_uses_the_callers_connection(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C061: the only connection of the pool is busy for two TTLs: no driver error, and the expiry moves on."""
    engine = world.engine(pool_size=1, max_overflow=0)
    async with world.enter(lease(world, engine, name, ttl=1.5).hold()) as held:
        async with connection(world, engine) as open_connection:
            before = row(admin, name).expires_at
            await run(world, open_connection, "SELECT pg_sleep(2.6)")
            assert held.state == "held"
            assert (row(admin, name).expires_at - before).total_seconds() > 1


async def test_a_former_holders_writes_are_rejected(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Work begun before the loss cannot commit once a newer token exists, and no new work begins after the loss is known."""
    engine = world.engine()
    held = await world.call(lease(world, engine, name, heartbeat="manual").acquire)
    lapse(admin, name)
    assert rival(admin, name) == 2
    assert held.state == "held"
    with pytest.raises(StaleFencingTokenError) as caught:
        async with world.enter(held.begin(engine)):
            pytest.fail("entered")
    assert (caught.value.token, caught.value.newest) == (1, 2)
    with pytest.raises(LockLostError):
        await world.call(held.release)
    with pytest.raises(Exception, match="released|lost"):
        async with world.enter(held.begin(engine)):
            pytest.fail("entered")


async def test_many_leases_of_one_process_end_each_for_itself(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """If one lease is lost, the other leases that the same statement renews are kept."""
    engine = world.engine()
    crowd = [await world.call(lease(world, engine, f"{name}:{n}", ttl=2).acquire) for n in range(20)]
    lapse(admin, f"{name}:7")
    rival(admin, f"{name}:7")
    await eventually(lambda: crowd[7].lost)
    assert [n for n, held in enumerate(crowd) if held.state != "held"] == [7]
    for n, held in enumerate(crowd):
        if n != 7:
            await world.call(held.release)


async def test_a_renewal_that_overtakes_a_release_warns_of_nothing(
    world: World, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A renewal that reaches the server after the release is rejected, which says nothing about clocks."""
    held = await world.call(lease(world, world.engine(), name).acquire)
    grant = held._hold
    await world.call(held.release)
    grant.lose_rejected("superseded")
    assert not caplog.records
