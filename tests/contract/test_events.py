"""`configure(on_event=...)` gets an event for everything that happens to locks, leases, keys, fences and versions."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence import configure, monitoring, schema
from pgfence.errors import (
    FenceRequiredError,
    IdempotencyKeyReusedError,
    LockLostError,
    LockTimeoutError,
    StaleFencingTokenError,
    UnreachableError,
    VersionConflictError,
)
from pgfence.fence import fence
from pgfence.idempotency import idempotent
from pgfence.retrying import run_transaction
from pgfence.types import Event, LockEvent
from pgfence.versions import Versioned, VersionedSession
from support.leases import lapse, lease, rival
from support.locking import elsewhere, labelled, lock, terminate
from support.transactions import connection, run, session
from support.transactions import lock as transaction_lock
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterable

    import psycopg

    from support.proxy import Proxy
    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


def listen(engine: Any) -> list[Any]:
    """Return the list of the engine's events."""
    heard: list[Event] = []
    configure(engine, on_event=heard.append)
    return heard


def list_names(heard: Iterable[Event]) -> list[str]:
    return [each.event for each in heard]


async def test_a_session_lock_reports_waits_and_holds(world: World, name: str, dsn: str) -> None:
    """A failed try emits "refused". After a wait the events are `contended`, and for a free lock they are not."""
    engine = world.engine()
    heard, one = listen(engine), lock(world, engine, name)
    async with world.enter(one.hold()):
        assert await world.other().call(one.try_acquire) is None
    with elsewhere(dsn, name):
        assert await world.call(one.try_acquire) is None
        with pytest.raises(LockTimeoutError):
            await world.call(one.acquire, timeout=0)
        with pytest.raises(LockTimeoutError):
            await world.call(one.acquire, timeout=0.1)
    assert list_names(heard) == ["acquired", "refused", "released", "refused", "refused", "timeout"]
    assert {(type(each), each.name, each.kind) for each in heard} == {(LockEvent, name, "advisory")}
    acquired, refused, released, *_, late = heard
    assert [each.contended for each in heard] == [False, True, False, True, True, True]
    assert (acquired.waited >= 0, acquired.held, refused.waited >= 0) == (True, None, True)
    assert (released.held > 0, released.waited, late.waited >= 0.1) == (True, None, True)


async def test_a_release_that_finds_the_lock_gone_has_failed(world: World, name: str) -> None:
    """If the application has already unlocked the key, "release_failed" is emitted instead of "released"."""
    engine = world.engine()
    heard = listen(engine)
    async with connection(world, engine) as own:
        held = await world.call(lock(world, own, name).acquire)
        await run(world, own, "SELECT pg_advisory_unlock_all()")
        await world.call(own.commit)
        with pytest.raises(LockLostError):
            await world.call(held.release)
    assert [(each.event, each.reason) for each in heard] == [("acquired", None), ("release_failed", "killed")]


async def test_a_lease_reports_its_owner_its_ttl_and_who_was_late(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """An event "reclaimed" follows "acquired" if the previous lease had expired; no event contains metadata."""
    engine = world.engine()
    heard = listen(engine)
    one = lease(world, engine, name, owner="me", metadata={"password": "hunter2"}, purpose="hunter2")
    async with world.enter(one.hold()):
        assert await world.other().call(one.try_acquire) is None
    rival(admin, name)
    assert await world.call(one.try_acquire) is None
    lapse(admin, name)
    async with world.enter(one.hold()):
        pass
    async with world.enter(one.hold()) as held:
        pass
    assert list_names(heard)[:4] == ["acquired", "refused", "released", "refused"]
    assert list_names(heard)[4:] == ["acquired", "reclaimed", "released", "acquired", "released"]
    released = heard[-1]
    assert (released.kind, released.owner, released.ttl) == ("lease", "me", 30.0)
    assert (released.token, released.lease_id, released.held > 0) == (4, held.lease_id, True)
    assert "hunter2" not in repr(heard)


async def test_an_eviction_is_reported_by_both_sides(world: World, name: str) -> None:
    """The process that evicts reports "evicted" with its reason, and the holder "lost"."""
    engine, own = world.engine(), world.engine()
    heard, told = listen(engine), listen(own)
    held = await world.call(lease(world, engine, name).acquire)
    await world.call(monitoring.evict, own, name, reason="stuck", dry_run=True)
    await world.call(monitoring.evict, own, name, reason="stuck")
    with pytest.raises((LockLostError, UnreachableError)):
        await world.call(held.renew)
    assert [(each.event, each.name, each.kind, each.token, each.reason) for each in told] == [
        ("evicted", name, "lease", 1, "stuck")
    ]
    assert [(each.event, each.reason) for each in heard] == [("acquired", None), ("lost", "evicted")]


async def test_renewals_and_releases_without_a_response_are_reported(world: World, name: str, proxy: Proxy) -> None:
    """Each names the lease and the error; the release counts as released, because it is repeated."""
    engine = world.engine(dsn=proxy.dsn)
    heard = listen(engine)
    held = await world.call(lease(world, engine, name, heartbeat="manual").acquire)
    proxy.refuse()
    proxy.cut()
    with pytest.raises(UnreachableError):
        await world.call(held.renew)
    await world.call(held.release)
    await eventually(lambda: len(heard) >= 4)
    assert list_names(heard)[-2:] == ["release_failed", "released"]
    assert set(list_names(heard)[1:-2]) == {"renewal_failed"}
    assert all(each.name == name and each.reason for each in heard[1:-1])


async def test_rejections_by_a_fence_are_reported(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A stale token and a write without a token each emit an event with the name of the resource."""
    engine = world.engine()
    heard, table = listen(engine), f"guarded_{secrets.token_hex(6)}"
    admin.execute(f"CREATE TABLE {table} (id int)")
    await world.call(schema.add_fence, engine, table, resource=name)
    held = await world.call(lease(world, engine, name).acquire)
    async with session(world, engine) as work:
        with pytest.raises(StaleFencingTokenError):
            await world.call(fence, work, name, 7)
    async with session(world, engine) as work:
        with pytest.raises(FenceRequiredError):
            await run(world, work, f"INSERT INTO {table} VALUES (1)")
    await world.call(held.release)
    admin.execute(f"DROP TABLE {table}")
    assert [(each.name, each.kind, each.token, each.reason) for each in heard if each.event == "fence_rejected"] == [
        (name, "fence", 7, "stale"),
        (name, "fence", None, "missing"),
    ]


async def test_a_transaction_lock_reports_a_refusal(world: World, name: str, dsn: str) -> None:
    """A failed try of a TransactionLock emits "refused", and a wait in the server is `contended`."""
    engine = world.engine()
    heard = listen(engine)
    async with session(world, engine) as work:
        with elsewhere(dsn, name):
            assert not await world.call(transaction_lock(work, name).try_acquire)
            with pytest.raises(LockTimeoutError):
                await world.call(transaction_lock(work, name).acquire, timeout=0.1)
        await world.call(transaction_lock(work, f"{name}-free").acquire)
    assert [(each.event, each.kind, each.contended) for each in heard] == [
        ("refused", "transaction", True),
        ("timeout", "transaction", True),
        ("acquired", "transaction", False),
    ]


@pytest.mark.one_driver
async def test_keys_report_replays_and_other_payloads(world: World, name: str) -> None:
    """Events of keys contain neither the payload nor the result."""
    engine = world.engine()
    heard = listen(engine)
    for payload in ("hunter2", "hunter2", "other"):
        async with session(world, engine) as work:
            op = idempotent(work, "k", scope=name, payload=payload)
            if payload == "other":
                with pytest.raises(IdempotencyKeyReusedError):
                    op.run(lambda: "hunter2")
            else:
                op.run(lambda: "hunter2")
            work.commit()
    assert [(each.event, each.name, each.kind) for each in heard] == [
        (event, f"{name}:k", "idempotency key") for event in ("acquired", "replayed", "reused")
    ]
    assert "hunter2" not in repr(heard)


@pytest.mark.one_driver
async def test_a_conflict_names_the_class_and_no_key(world: World, admin: psycopg.Connection[Any]) -> None:
    """A conflict emits an event for each row, and another one for the attempt of run_transaction."""

    class Base(DeclarativeBase):
        pass

    class Page(Versioned, Base):
        __tablename__ = f"page_{secrets.token_hex(6)}"
        id: Mapped[int] = mapped_column(primary_key=True)

    engine = world.engine()
    heard = listen(engine)
    Base.metadata.create_all(engine)
    with VersionedSession(engine) as work:
        work.add(Page(id=4711))
        work.commit()

    def bump(work: VersionedSession) -> None:
        page = work.get_one(Page, 4711)
        with engine.begin() as other:
            other.execute(update(Page).values(version=Page.version + 1))
        work.delete(page)

    from sqlalchemy.orm import sessionmaker

    with pytest.raises(VersionConflictError):
        run_transaction(sessionmaker(engine, class_=VersionedSession), bump, attempts=1)
    Base.metadata.drop_all(engine)
    assert [(each.event, each.name) for each in heard] == [("conflict", "Page"), ("failed", bump.__qualname__)]
    assert (heard[0].kind, heard[0].reason) == ("version", "written")
    assert "4711" not in repr(heard)


async def test_a_listener_that_raises_breaks_nothing(
    world: World, name: str, admin: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Locks, leases and transaction locks are acquired, refused and released as without a listener."""
    engine = world.engine()
    configure(engine, on_event=lambda event: 1 / 0)
    with caplog.at_level(logging.ERROR, "pgfence.advisory"):
        for one in (lock(world, engine, name), lease(world, engine, f"{name}-lease")):
            async with world.enter(one.hold()):
                assert await world.other().call(one.try_acquire) is None
            assert not await world.call(one.is_held)
        async with session(world, engine) as work:
            await world.call(transaction_lock(work, name).acquire)
        await world.call(monitoring.evict, engine, f"{name}-lease", reason="test")
    assert caplog.text.count("ZeroDivisionError: ") >= 8
    assert admin.execute("SELECT count(*) FROM pgfence_audit WHERE resource = %s", [f"{name}-lease"]).fetchone() == (1,)


async def test_log_records_about_a_lease_have_fields(world: World, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """`record.pgfence` of a loss has event, name, owner, lease_id, token and ttl."""
    engine = world.engine()
    held = await world.call(lease(world, engine, name, owner="me").acquire)
    with caplog.at_level(logging.WARNING, "pgfence.lease"):
        await world.call(monitoring.evict, engine, name, reason="test")
        await eventually(lambda: held.lost)
        await eventually(lambda: any(getattr(each, "pgfence", {}).get("name") == name for each in caplog.records))
    (record,) = [each for each in caplog.records if getattr(each, "pgfence", {}).get("name") == name]
    assert record.pgfence == {
        "event": "lost",
        "name": name,
        "owner": "me",
        "lease_id": str(held.lease_id),
        "token": 1,
        "ttl": 30.0,
    }


async def test_a_listener_that_exits_stops_no_renewal_and_no_detection(
    world: World, name: str, admin: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """SystemExit in a thread of pgfence is logged, because the thread also serves other locks."""
    engine = labelled(world, name)

    def exit_on_loss(event: Event) -> None:
        if event.event == "lost":
            raise SystemExit(1)

    configure(engine, on_event=exit_on_loss)
    lost = await world.call(lease(world, engine, f"{name}-lost", ttl=0.6, heartbeat="manual").acquire)
    kept = await world.call(lease(world, engine, f"{name}-kept", ttl=1.5).acquire)
    locks = [await world.call(lock(world, engine, f"{name}-{each}").acquire) for each in range(2)]
    with caplog.at_level(logging.ERROR, "pgfence.advisory"):
        await eventually(lambda: lost.lost)
        for each in locks:
            pid = (await world.call(lock(world, engine, *each.names).holders))[0].backend_pid
            terminate(admin, pid)
            await eventually(lambda each=each: each.lost)
        before = kept.expires_at
        await eventually(lambda: kept.expires_at > before)
    assert caplog.text.count("SystemExit: 1") == 3
    assert kept.state == "held"
    await world.call(kept.release)
