"""A standby grants advisory locks that exclude no session on its primary: rejected, until it is a primary itself."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence import configure, monitoring
from pgfence._sql import server, tables
from pgfence._sql.storage import TableNames
from pgfence.errors import LockLostError, StandbyError, UnreachableError
from support import standby as standbys
from support import transactions
from support.leases import lease, rival, row
from support.locking import background, is_free, labelled, lock
from support.servers import own
from support.waiting import eventually
from support.worlds import NAMES, World

if TYPE_CHECKING:
    from support.servers import OwnServer
    from support.standby import Standby

_ROWS = "SELECT pid, mode, granted FROM pg_locks WHERE locktype = 'advisory'"


def rows(server: OwnServer) -> list[Any]:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        return connection.execute(_ROWS).fetchall()


async def test_a_session_lock_is_rejected_on_a_standby(
    world: World, name: str, pair: tuple[OwnServer, Standby]
) -> None:
    """C046: every verb, one name or many, on an engine or the caller's own connection; no row is left on either server."""
    primary, copy = pair
    engine = world.engine(dsn=copy.dsn)
    for one in (lock(world, engine, name), lock(world, engine, name, f"{name}!")):
        for call in (one.try_acquire, one.acquire):
            with pytest.raises(StandbyError, match=r"(?s)primary.*lock_engine="):
                await world.call(call)
        for manager in (one.hold(), one.connect()):
            with pytest.raises(StandbyError):
                async with world.enter(manager):
                    pytest.fail("entered")
    async with transactions.connection(world, engine) as connection:
        with pytest.raises(StandbyError):
            await world.call(lock(world, connection, name).acquire)
    assert rows(copy) == rows(primary) == []


async def test_a_list_without_a_primary_is_unreachable(
    world: World, name: str, pair: tuple[OwnServer, Standby]
) -> None:
    """`target_session_attrs=read-write`, and no host is a primary: UnreachableError, also where SQLAlchemy wraps no such error."""
    _, copy = pair
    engine = world.engine(dsn=f"{copy.dsn}?target_session_attrs=read-write")
    for one in (lock(world, engine, name), lease(world, engine, name)):
        with pytest.raises(UnreachableError) as caught:
            await world.call(one.try_acquire)
        assert caught.value.retryable
    async with transactions.session(world, engine) as session:
        with pytest.raises(UnreachableError):
            await world.call(transactions.lock(session, name).acquire)


@pytest.mark.twins
async def test_a_lease_through_a_pooler_to_a_standby_is_rejected(
    world: World, name: str, pair: tuple[OwnServer, Standby], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server was judged when it was opened, before the switchover: StandbyError all the same, and from evict().

    A server that does not tell its timeline, as a standby and Amazon Aurora do not, counts as one on its first timeline.
    """
    primary, copy = pair
    with psycopg.connect(primary.dsn, autocommit=True) as admin:
        for statement in tables.build_creation(TableNames()):
            admin.execute(statement.encode())
        assert rival(admin, name) == 1
    with psycopg.connect(copy.dsn, autocommit=True) as reader:
        await eventually(
            lambda: reader.execute("SELECT to_regclass('pgfence_lease') IS NOT NULL").fetchone() == (True,)
        )
        await eventually(lambda: row(reader, name))
        assert reader.execute("SELECT pgfence_timeline_v1()").fetchone() == (1,)
    monkeypatch.setattr(server, "judge_session", lambda *_: None)
    engine = world.engine(dsn=copy.dsn)
    with pytest.raises(StandbyError, match="rejected a write"):
        await world.call(lease(world, engine, name).try_acquire)
    with pytest.raises(StandbyError, match="Evict on the primary"):
        await world.call(monitoring.evict, engine, name, reason="test")


@pytest.mark.twins
async def test_a_primary_beside_it_can_carry_the_locks(
    world: World, name: str, pair: tuple[OwnServer, Standby]
) -> None:
    """C046: configure(lock_engine=...): reads from the replica, locks on the primary."""
    primary, copy = pair
    engine = world.engine(dsn=copy.dsn)
    configure(engine, lock_engine=world.engine(dsn=primary.dsn))
    async with world.enter(lock(world, engine, name).hold()) as held:
        held.check()
        with psycopg.connect(primary.dsn, autocommit=True) as admin:
            assert not is_free(admin, name)
        assert rows(copy) == []
    assert rows(primary) == []


async def test_a_promoted_standby_is_a_primary_and_a_failover_is_a_loss(name: str, dsn: str) -> None:
    """C046: rejected before; accepted after the promotion on new connections; holders on the old primary have lost it."""
    with own() as primary, standbys.standby(primary) as copy:
        worlds = [World(each, dsn) for each in NAMES]
        engines = [labelled(world, name, dsn=copy.dsn) for world in worlds]
        for world, engine in zip(worlds, engines, strict=True):
            with pytest.raises(StandbyError):
                await world.call(lock(world, engine, f"{name} {world.name}").try_acquire)
        before = [
            await world.call(lock(world, world.engine(dsn=primary.dsn), f"{name} {world.name}").acquire)
            for world in worlds
        ]
        primary.stop("immediate")
        # With a timeout of its own a wait outlasts the switchover.
        waiting = [
            world.other().call(lock(world, engine, f"{name} {world.name}!").acquire, timeout=60)
            for world, engine in zip(worlds, engines, strict=True)
        ]
        async with AsyncExitStack() as stack:
            tasks = [await stack.enter_async_context(background(each)) for each in waiting]
            copy.promote()
            for world, task in zip(worlds, tasks, strict=True):
                await world.call((await task).release)
        for world, engine, old in zip(worlds, engines, before, strict=True):
            await eventually(lambda old=old: old.lost)
            async with world.enter(lock(world, engine, f"{name} {world.name}").hold(timeout=5)) as held:
                held.check()
                with psycopg.connect(copy.dsn, autocommit=True) as admin:
                    assert not is_free(admin, f"{name} {world.name}")
            with pytest.raises(LockLostError):
                await world.call(old.release)
        assert rows(copy) == []
        for world in worlds:
            await world.close()
