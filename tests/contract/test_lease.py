"""Lease: try_acquire, acquire, hold, release, renew, hand over; its handle; invalid arguments."""

from __future__ import annotations

import gc
import json
import math
import os
import socket
import time
import uuid
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

import pgfence
from pgfence.config import configure
from pgfence.errors import LockLostError, LockNotHeldError, LockTimeoutError
from pgfence.fence.handles import AsyncHeldLease, HeldLease
from pgfence.keys import LockKey
from pgfence.lease import AsyncLease, Lease
from support.leases import lapse, lease, rival, row
from support.rows import every_row
from support.transactions import connection, session
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@pytest.mark.every_driver
async def test_a_free_lease_is_acquired_and_released(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Row and handle show the holder and the expiry; release frees the lease and keeps the row."""
    one = lease(world, world.engine(), name, purpose="closing", metadata={"month": "2026-04"}, owner="billing")
    held = await world.call(one.try_acquire)
    assert isinstance(held, world.pick(HeldLease, AsyncHeldLease))
    assert (held.names, held.keys, held.state, held.lost, held.loss_reason) == ((name,), (), "held", False, None)
    found = row(admin, name)
    assert (held.token, held.lease_id, held.expires_at) == (1, found.lease_id, found.expires_at)
    assert found.token == 1
    assert (found.owner, found.host, found.pid) == ("billing", socket.gethostname(), os.getpid())
    assert (found.purpose, found.metadata) == ("closing", {"month": "2026-04"})
    assert 20 < held.remaining() <= 27 < found.left + 3 <= 33
    held.check()
    await world.call(held.release)
    assert (held.state, held.remaining()) == ("released", 0.0)
    assert row(admin, name).released_at is not None
    assert rival(admin, name) == 2


@pytest.mark.every_driver
async def test_a_failed_try_returns_none_and_holds_nothing(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C018: a try on a held lease returns None and leaves the holder's row untouched."""
    assert rival(admin, name) == 1
    before = row(admin, name)[:-1]
    assert await world.call(lease(world, world.engine(), name).try_acquire) is None
    assert row(admin, name)[:-1] == before


async def test_acquire_without_waiting_names_the_holder_at_once(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """timeout=0 does not wait; the error names the holder, its purpose, token and expiry."""
    rival(admin, name)
    start = time.monotonic()
    with pytest.raises(LockTimeoutError, match="rival") as caught:
        await world.call(lease(world, world.engine(), name).acquire, timeout=0)
    assert time.monotonic() - start < FAR
    (seen,) = caught.value.holders
    assert (seen.name, seen.kind, seen.owner, seen.host, seen.pid) == (name, "lease", "rival", "elsewhere", 7)
    assert (seen.purpose, seen.token, seen.expires_at) == ("to win", 1, row(admin, name).expires_at)
    assert seen.since is not None


@pytest.mark.every_driver
async def test_looking_shows_the_holder_and_changes_nothing(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """`holders()` is empty before the grant, after the release and after an expiry, and names the holder in between."""
    one = lease(world, world.engine(), name)
    assert await world.call(one.holders) == []
    held = await world.call(one.acquire)
    (seen,) = await world.call(one.holders)
    assert (seen.name, seen.token, seen.pid) == (name, 1, os.getpid())
    assert await world.call(one.is_held)
    await world.call(held.release)
    assert not await world.call(one.is_held)
    rival(admin, name)
    lapse(admin, name)
    before = row(admin, name)[:-1]
    assert await world.call(one.holders) == []
    assert row(admin, name)[:-1] == before


async def test_tokens_only_grow(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Each grant has a larger token, after a release and after an expiry. C079: the row is never deleted."""
    engine = world.engine()
    tokens = []
    for _ in range(3):
        held = await world.call(lease(world, engine, name).acquire)
        tokens.append(held.token)
        await world.call(held.release)
        tokens.append(rival(admin, name))
        lapse(admin, name)
    assert tokens == [1, 2, 3, 4, 5, 6]


async def test_a_released_handle_says_so_and_cannot_be_released_again(world: World, name: str) -> None:
    """A second release raises LockNotHeldError; leaving the block of a released handle does not."""
    held = await world.call(lease(world, world.engine(), name).acquire)
    async with world.enter(held):
        await world.call(held.release)
        for call in (held.check, held.release, held.renew, held.hand_over, held.abandon):
            with pytest.raises(LockNotHeldError):
                await world.call(call)


async def test_hold_releases_however_the_block_ends(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """hold() releases at a normal end and after an exception, which propagates unchanged."""
    one = lease(world, world.engine(), name)
    async with world.enter(one.hold()) as held:
        assert held.state == "held"
        assert rival(admin, name) is None
    with pytest.raises(ZeroDivisionError):
        async with world.enter(one.hold()):
            raise ZeroDivisionError
    assert rival(admin, name) == 3


async def test_current_is_the_lease_of_this_contender(world: World, name: str) -> None:
    """`current(HeldLease)` finds it inside the block, and nowhere else."""
    kind = world.pick(HeldLease, AsyncHeldLease)
    async with world.enter(lease(world, world.engine(), name).hold()) as held:
        assert await world.call(pgfence.current, kind) is held
    with pytest.raises(LockNotHeldError):
        await world.call(pgfence.current, kind)


@pytest.mark.every_driver
async def test_acquire_and_release_are_one_statement_each(world: World, name: str) -> None:
    """On a warm engine nothing else is sent, and none of it through the caller's pool."""
    engine = world.engine(pool_size=1, max_overflow=0)
    await world.call((await world.call(lease(world, engine, name).acquire)).release)
    seen: list[str] = []
    sync_engine = getattr(engine, "sync_engine", engine)
    event.listen(sync_engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    async with connection(world, engine):
        held = await world.call(lease(world, engine, name).acquire)
        assert ["acquire_lease_v2" in text for text in seen] == [True]
        await world.call(held.release)
    assert ["release_lease_v1" in text for text in seen] == [False, True]


async def test_a_namespace_keeps_names_apart(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """The configured namespace, or the argument, is part of the name, and messages show it with a colon."""
    engine = world.engine()
    configure(engine, namespace="shop")
    held = await world.call(lease(world, engine, name).acquire)
    other = await world.call(lease(world, engine, name, namespace="").acquire)
    assert row(admin, f"shop\x1f{name}").lease_id == held.lease_id
    assert row(admin, name).lease_id == other.lease_id
    assert held.names == (f"shop:{name}",)
    for one in (held, other):
        await world.call(one.release)


async def test_wrap_runs_one_call_at_a_time_and_knows_its_lease(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A template of the call's arguments names the lease; busy="skip" gives None."""
    one = lease(world, world.engine(), name + ":{tenant}")

    def work(tenant: str) -> tuple[str, int]:
        held: Any = pgfence.current(world.pick(HeldLease, AsyncHeldLease))
        return held.names[0], held.token

    async def async_work(tenant: str) -> tuple[str, int]:
        return work(tenant)

    guarded = one.wrap(busy="skip")(world.pick(work, async_work))
    assert await world.call(guarded, "a") == (f"{name}:a", 1)
    rival(admin, f"{name}:b")
    assert await world.call(guarded, tenant="b") is None


async def test_an_engine_may_be_found_when_it_is_needed(world: World, name: str) -> None:
    """A function that returns the engine can be passed instead of the engine, for application factories."""
    made: list[Any] = []

    def engine() -> Any:
        made.append(made[0] if made else world.engine())
        return made[-1]

    one = lease(world, engine, name)
    assert made == []
    async with world.enter(one.hold()) as held:
        assert held.token == 1


async def test_a_dropped_handle_warns_and_frees_the_lease(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A handle that is dropped raises a ResourceWarning, and the lease is free long before its TTL."""
    one = lease(world, world.engine(), name, ttl=60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = await world.call(one.acquire)
        del held
        await world.call(int)  # its thread remembers what it returned last
        await eventually(lambda: gc.collect() >= 0 and row(admin, name).released_at is not None, deadline=10)
    assert [w.category for w in caught if name in str(w.message)] == [ResourceWarning]


async def test_events_are_reported(world: World, name: str) -> None:
    """`on_event` receives the grant and the release, with name and token."""
    heard: list[tuple[str, str | None, int | None]] = []
    engine = world.engine()
    configure(engine, on_event=lambda e: heard.append((e.event, e.name, e.token)))
    async with world.enter(lease(world, engine, name).hold()):
        pass
    assert heard == [("acquired", name, 1), ("released", name, 1)]


# ---------------------------------------------------------------- terms


async def test_min_hold_keeps_others_out_after_an_early_release(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C088: after a short job the name stays blocked until the minimum is over, by the server's clock."""
    held = await world.call(lease(world, world.engine(), name, ttl=2, min_hold=0.6).acquire)
    began = row(admin, name).acquired_at
    await world.call(held.release)
    assert rival(admin, name) is None
    await eventually(lambda: rival(admin, name) == 2)
    assert (row(admin, name).acquired_at - began).total_seconds() >= 0.6


async def test_lock_delay_counts_after_an_expiry_and_not_after_a_release(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The delay blocks the name after an expiry, and not after a release."""
    one = lease(world, world.engine(), name, ttl=0.4, lock_delay=0.8)
    await world.call((await world.call(one.acquire)).release)
    held = await world.call(one.acquire)
    began = row(admin, name).acquired_at
    assert held.token == 2
    held.abandon()
    await eventually(lambda: rival(admin, name) == 3)
    assert (row(admin, name).acquired_at - began).total_seconds() >= 1.2


async def test_max_hold_ends_it_however_alive_the_holder_is(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C083: the lease is renewed up to max_hold and then lost as "overdue"; leaving the block raises that too."""
    one = lease(world, world.engine(), name, ttl=2, max_hold=2.5)
    with pytest.raises(LockLostError, match="max_hold") as caught:
        async with world.enter(one.hold()) as held:
            await eventually(lambda: held.lost)
    assert (caught.value.reason, caught.value.token, held.loss_reason) == ("overdue", 1, "overdue")
    found = row(admin, name)
    assert found.renewed_at > found.acquired_at
    assert found.expires_at == found.hold_until == found.acquired_at + timedelta(seconds=2.5)


async def test_abandon_stops_the_heartbeat_and_gives_nothing_back(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """An abandoned lease is held until its TTL ends, and is then free."""
    held = await world.call(lease(world, world.engine(), name, ttl=0.6).acquire)
    held.abandon()
    assert held.state == "released"
    assert rival(admin, name) is None
    assert row(admin, name).released_at is None
    await eventually(lambda: rival(admin, name) == 2)


@pytest.mark.every_driver
async def test_a_manual_renewal_moves_the_expiry(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """With heartbeat="manual" only `renew` moves the expiry, with a new TTL if one is given."""
    held = await world.call(lease(world, world.engine(), name, ttl=5, heartbeat="manual").acquire)
    before = held.expires_at
    await world.call(held.renew)
    assert before < held.expires_at == row(admin, name).expires_at
    await world.call(held.renew, 60)
    assert 40 < held.remaining() <= 55 < row(admin, name).left <= 60
    for wrong in (0, -1, math.nan, 90_000):
        with pytest.raises(ValueError, match="ttl"):
            await world.call(held.renew, wrong)
    await world.call(held.release)


async def test_an_unrenewed_lease_ends_before_the_server_frees_it(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C083: the handle is "lost" while the server still blocks others; its release raises that, and frees the row."""
    held = await world.call(lease(world, world.engine(), name, ttl=1.5, heartbeat="manual").acquire)
    await eventually(lambda: held.lost)
    assert rival(admin, name) is None
    assert (held.loss_reason, held.remaining()) == ("expired", 0.0)
    with pytest.raises(LockLostError):
        held.check()
    with pytest.raises(LockLostError) as caught:
        await world.call(held.release)
    assert caught.value.reason == "expired"
    await eventually(lambda: rival(admin, name) == 2)


# ---------------------------------------------------------------- hand-over and checkpoints


@pytest.mark.every_driver
async def test_a_lease_is_handed_over_as_plain_json(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Another engine adopts it: the same token, a new lease_id, renewed there; the reference works once."""
    held = await world.call(lease(world, world.engine(), name, ttl=20, purpose="import").acquire)
    await world.call(held.renew, 10)
    before = row(admin, name).expires_at
    ref = json.loads(json.dumps(await world.call(held.hand_over)))
    assert row(admin, name).expires_at > before
    assert ref == {"name": name, "lease_id": str(held.lease_id), "token": 1}
    assert held.state == "released"
    assert rival(admin, name) is None
    kind, elsewhere = world.pick(Lease, AsyncLease), world.engine()
    adopted = await world.call(kind.adopt, elsewhere, ref)
    assert (adopted.token, adopted.state, adopted.names) == (1, "held", (name,))
    assert adopted.lease_id == row(admin, name).lease_id != held.lease_id
    assert 5 < adopted.remaining() <= 9
    with pytest.raises(LockLostError, match="already adopted") as caught:
        await world.call(kind.adopt, world.engine(), ref)
    assert caught.value.reason == "superseded"
    await world.call(adopted.release)
    assert rival(admin, name) == 2


async def test_a_reference_ends_with_its_ttl(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A reference that was not adopted in time is "expired", and a later holder is not disturbed."""
    kind, engine = world.pick(Lease, AsyncLease), world.engine()
    ref = await world.call((await world.call(lease(world, engine, name).acquire)).hand_over)
    lapse(admin, name)
    with pytest.raises(LockLostError, match="expired"):
        await world.call(kind.adopt, engine, ref)
    assert rival(admin, name) == 2
    before = row(admin, name)[:-1]
    with pytest.raises(LockLostError):
        await world.call(kind.adopt, engine, ref)
    assert row(admin, name)[:-1] == before


GOOD = {"name": "a", "lease_id": "00000000-0000-0000-0000-000000000001", "token": 1}


@every_row(
    "wrong",
    [
        None,
        "a",
        {},
        {"name": "a", "token": 1},
        GOOD | {"token": "1"},
        GOOD | {"token": True},
        GOOD | {"token": 0},
        GOOD | {"token": 2**63},
        GOOD | {"lease_id": "x"},
        GOOD | {"lease_id": None},
        GOOD | {"name": ""},
        GOOD | {"name": 5},
    ],
)
async def test_an_invalid_reference_is_rejected_at_once(world: World, wrong: Any) -> None:
    """A damaged reference raises an error before a statement is sent."""
    engine = world.engine(dsn="postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises((TypeError, ValueError), match=r"hand_over|damaged|name"):
        await world.call(world.pick(Lease, AsyncLease).adopt, engine, wrong)


async def test_an_open_checkpoint_transaction_does_not_block_the_heartbeat(
    world: World, name: str, eventually: Any
) -> None:
    """The checkpoint locks no row of the lease: it is renewed while the transaction that wrote it stays open past the TTL."""
    engine = world.engine()
    held = await world.call(lease(world, engine, name, ttl=1.5).acquire)
    async with world.enter(held.begin(engine)) as connection:
        await world.call(held.checkpoint, connection, {"done": 1})
        first = held.expires_at
        await eventually(lambda: (held.expires_at - first).total_seconds() > 1.6, deadline=10)
        held.check()
    await world.call(held.release)
    following = await world.call(lease(world, engine, name).acquire)
    assert following.last_checkpoint == {"done": 1}
    await world.call(following.release)


@pytest.mark.every_driver
async def test_a_checkpoint_is_read_by_the_next_holder(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """The next holder reads a checkpoint that was committed, and the previous one if it was rolled back."""
    engine = world.engine()
    held = await world.call(lease(world, engine, name).acquire)
    assert held.last_checkpoint is None
    async with world.enter(held.begin(engine)) as open_connection:
        await world.call(held.checkpoint, open_connection, {"done": [1, 2], "who": "é"})
    with pytest.raises(ZeroDivisionError):
        async with world.enter(held.begin(engine)) as open_connection:
            await world.call(held.checkpoint, open_connection, "later")
            raise ZeroDivisionError
    assert held.last_checkpoint is None
    await world.call(held.release)
    again = await world.call(lease(world, engine, name).acquire)
    assert again.last_checkpoint == {"done": [1, 2], "who": "é"}
    ref = await world.call(again.hand_over)
    adopted = await world.call(world.pick(Lease, AsyncLease).adopt, engine, ref)
    assert adopted.last_checkpoint == {"done": [1, 2], "who": "é"}
    await world.call(adopted.release)


# ---------------------------------------------------------------- bad input


@every_row(
    ("arguments", "error", "message"),
    [
        ({"ttl": 0}, ValueError, "at least 0.3 s"),
        ({"ttl": -1}, ValueError, "ttl"),
        ({"ttl": 0.29}, ValueError, r"three|at least 0\.3 s"),
        ({"ttl": 86_401}, ValueError, "timedelta"),
        ({"ttl": math.inf}, ValueError, "ttl"),
        ({"ttl": math.nan}, ValueError, "ttl"),
        ({"ttl": "5"}, TypeError, "ttl"),
        ({"ttl": True}, TypeError, "ttl"),
        ({"ttl": None}, TypeError, "ttl"),
        ({"min_hold": 31}, ValueError, "min_hold"),
        ({"min_hold": -1}, ValueError, "min_hold"),
        ({"max_hold": 0}, ValueError, "max_hold"),
        ({"max_hold": -5}, ValueError, "max_hold"),
        ({"max_hold": 5, "min_hold": 6}, ValueError, "min_hold"),
        ({"lock_delay": -1}, ValueError, "lock_delay"),
        ({"lock_delay": math.inf}, ValueError, "lock_delay"),
        ({"heartbeat": "often"}, ValueError, "heartbeat"),
        ({"owner": 5}, TypeError, "owner"),
        ({"owner": "a\x00"}, ValueError, "owner"),
        ({"purpose": None}, TypeError, "purpose"),
        ({"metadata": object()}, TypeError, "metadata"),
        ({"metadata": math.nan}, ValueError, "metadata"),
        ({"metadata": "\x00"}, ValueError, "metadata"),
        ({"name": ""}, ValueError, "empty"),
        ({"name": "n" * 256}, ValueError, "255"),
        ({"name": "a\x1fb"}, ValueError, r"U\+001F"),
        ({"name": "\ud800"}, ValueError, "surrogate"),
        ({"name": 5}, TypeError, "str"),
        ({"name": LockKey.of("a")}, TypeError, "must be a str"),
        ({"name": "n" * 250, "namespace": "shops"}, ValueError, "255"),
    ],
)
@every_row("kind", [Lease, AsyncLease])
def test_contradicting_options_are_rejected_in_the_constructor(
    kind: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Contradicting options raise an error in the constructor, which says what would work."""
    with pytest.raises(error, match=message):
        kind(lambda: None, **{"name": "a", "ttl": 30, **arguments})


async def test_the_ends_of_the_ranges_are_good(world: World, name: str) -> None:
    """The shortest TTL, a TTL of days as a timedelta, and the longest name are accepted."""
    engine = world.engine()
    for number, arguments in enumerate(
        ({"ttl": 0.3}, {"ttl": 86_400}, {"ttl": timedelta(days=40)}, {"min_hold": 30}, {"max_hold": math.inf})
    ):
        async with world.enter(lease(world, engine, f"{name}{number}".ljust(255, "n"), **arguments).hold()) as held:
            assert held.state == "held"


async def test_only_engines_carry_a_lease(world: World, name: str) -> None:
    """A Session, a Connection, the other twin's engine: each is rejected with what to pass instead."""
    engine = world.engine()
    with pytest.raises(TypeError, match="or the (a?sync) counterpart of "):
        world.pick(AsyncLease, Lease)(engine, name, ttl=30)
    async with session(world, engine) as orm, connection(world, engine) as plain:
        for work in (orm, plain):
            with pytest.raises(TypeError, match="needs an"):
                lease(world, work, name)
    for wrong in (None, "postgresql://", 5):
        with pytest.raises(TypeError, match="needs an"):
            lease(world, wrong, name)


def test_a_lease_shows_its_name(name: str) -> None:
    """The repr of a lease, which appears in logs, contains its name."""
    assert repr(Lease(lambda: None, name, ttl=30)) == f"<Lease {name!r}, ttl=30>"  # type: ignore[arg-type, return-value]


def test_lease_ids_are_chosen_by_the_client(name: str, dsn: str) -> None:
    """C084: each grant has an id chosen by the client, so that one whose response was lost can be ended."""
    from sqlalchemy import create_engine

    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    seen = set()
    for _ in range(3):
        with Lease(engine, name, ttl=5).hold() as held:
            seen.add(held.lease_id)
    engine.dispose()
    assert len(seen) == 3
    assert {one.version for one in seen} == {4}
    assert all(isinstance(one, uuid.UUID) for one in seen)
