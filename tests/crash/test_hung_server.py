"""The server is reachable and does not respond: its processes are stopped, its sockets stay open."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import Connection, text

from pgfence import AsyncLease, Lease, LockKey, schema
from pgfence._connections.connection import RELEASE_BUDGET, STATEMENT_BUDGET
from pgfence._connections.pool import OPEN_BUDGET
from pgfence._leases import manager as lease_manager
from pgfence._leases import statements
from pgfence._process.monitor import TICK as MONITOR_TICK
from pgfence.errors import LockLostError, LockTimeoutError, UnreachableError
from pgfence.migrations import _session, migration_lock
from pgfence.testing._processes import pause
from support.locking import background, freed, is_free, labelled, lock, run, sessions, take, waits
from support.processes import family
from support.transactions import connection
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import OwnServer
    from support.worlds import World

SLICE, GRACE, TICK = 0.5, 2.0, 1.0


@pytest.fixture
def admin(private_server: OwnServer) -> Iterator[psycopg.Connection[Any]]:
    """An administrator's connection to the private server."""
    with psycopg.connect(private_server.dsn, autocommit=True, application_name="admin") as connection:
        yield connection


def test_the_limits_are_those_of_the_page() -> None:
    """The page on guarantees promises about 6 seconds: the limit of a statement, and the watcher's tick."""
    assert RELEASE_BUDGET + MONITOR_TICK == 6
    assert OPEN_BUDGET <= RELEASE_BUDGET
    assert STATEMENT_BUDGET == 30


async def test_a_wait_on_a_hung_backend_ends_soon_after_its_timeout(
    world: World, name: str, private_server: OwnServer, admin: psycopg.Connection[Any]
) -> None:
    """acquire(timeout=1), stopped within a slice: it ends after slice + 2 s and the tick, and the server is tried again."""
    one = lock(world, labelled(world, name, dsn=private_server.dsn), name)
    take(admin, name)
    waiter = world.other()
    async with background(waiter.call(one.acquire, timeout=1)) as waiting:
        began = time.monotonic()
        with pause(await backend(admin, name)):
            with pytest.raises((LockTimeoutError, UnreachableError)):
                await waiting
            assert time.monotonic() - began < FAR
    admin.execute("SELECT pg_advisory_unlock_all()")
    await freed(admin, name)


@pytest.mark.twins
async def test_a_wait_on_a_hung_server_ends_soon_after_its_timeout(
    world: World, name: str, private_server: OwnServer, admin: psycopg.Connection[Any]
) -> None:
    """All of its processes are stopped, so no other session can be had either: UnreachableError, neither free nor busy."""
    one = lock(world, labelled(world, name, dsn=private_server.dsn), name)
    take(admin, name)
    waiter = world.other()
    async with background(waiter.call(one.acquire, timeout=1)) as waiting:
        began = time.monotonic()
        await backend(admin, name)
        with pause(*family(private_server.pid)):
            with pytest.raises(UnreachableError):
                await waiting
            assert time.monotonic() - began < FAR
    admin.execute("SELECT pg_advisory_unlock_all()")
    await freed(admin, name)


@pytest.mark.twins
async def test_a_waiter_outlives_a_hung_backend(
    world: World, name: str, private_server: OwnServer, admin: psycopg.Connection[Any]
) -> None:
    """Only its own server process is stopped: with time left it asks on another session, and holds in the end.

    Not while that process is stopped: it stands in the server's queue, and the server would give it the lock.
    """
    one = lock(world, labelled(world, name, dsn=private_server.dsn), name)
    take(admin, name)
    waiter = world.other()
    async with background(waiter.call(one.acquire, timeout=20)) as waiting:
        hung = await backend(admin, name)
        with pause(hung):
            await eventually(lambda: any(s.pid != hung for s in sessions(admin, name)))
        await eventually(lambda: all(s.pid != hung for s in sessions(admin, name)))
        admin.execute("SELECT pg_advisory_unlock_all()")
        held = await waiting
    held.check()
    await waiter.call(held.release)
    await freed(admin, name)


async def test_a_release_on_a_hung_backend_ends_with_a_loss(
    world: World, name: str, private_server: OwnServer, admin: psycopg.Connection[Any], short_statements: float
) -> None:
    """No response to the unlock within its limit: lost, "cut off"; the state on the server is reported as unknown."""
    one = lock(world, labelled(world, name, dsn=private_server.dsn), name)
    held = await world.call(one.acquire)
    (session,) = sessions(admin, name)
    with pause(session.pid):
        began = time.monotonic()
        with pytest.raises(LockLostError) as caught:
            await world.call(held.release)
        assert time.monotonic() - began < FAR
        assert (caught.value.reason, held.state) == ("cut off", "lost")
        assert not is_free(admin, name)
    await freed(admin, name)


@pytest.mark.twins
async def test_a_release_of_a_lease_on_a_hung_server_is_repeated(
    world: World,
    name: str,
    private_server: OwnServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The call returns with a warning, and the lease is free when the server responds again."""
    monkeypatch.setattr(statements, "RELEASE_BUDGET", 1.0)
    engine = world.engine(dsn=private_server.dsn)
    await world.call(schema.create_all, engine)
    kind = world.pick(Lease, AsyncLease)
    held = await world.call(kind(engine, name, ttl=60).acquire)
    with pause(*family(private_server.pid)):
        async with background(world.call(held.release)) as releasing:
            await eventually(releasing.done)
            await releasing
    assert f"no response to the release of lease '{name}', retrying" in caplog.text
    await world.call((await world.other().call(kind(engine, name, ttl=60).acquire, timeout=30)).release)
    await world.call(schema.drop_all, engine)


@pytest.mark.twins
async def test_a_block_on_a_hung_backend_can_be_left(
    world: World, name: str, private_server: OwnServer, admin: psycopg.Connection[Any], short_statements: float
) -> None:
    """hold() and connect() end too: the caller's own error wins, the loss is a note on it."""
    one = lock(world, labelled(world, name, dsn=private_server.dsn), name)
    for manager in (one.hold(), one.connect()):
        hung = pause()
        with pytest.raises(ValueError, match="mine") as caught:
            async with world.enter(manager):
                (session,) = [s for s in sessions(admin, name) if s.state == "idle"]
                hung = pause(session.pid)
                hung.__enter__()
                began = time.monotonic()
                raise ValueError("mine")
        assert time.monotonic() - began < FAR
        assert "LockLostError" in caught.value.__notes__[0]
        hung.__exit__(None, None, None)
        await freed(admin, name)


async def test_an_acquire_on_a_hung_server_ends_soon_after_its_timeout(
    world: World, name: str, private_server: OwnServer, short_statements: float, short_opening: float
) -> None:
    """The first try on a warm connection, the look at the holders and a try that does not wait derive from the timeout."""
    one = lock(world, world.engine(dsn=private_server.dsn), name)
    await world.call((await world.call(one.acquire)).release)
    for options in ({"timeout": 1}, {"timeout": 0}):
        with pause(*family(private_server.pid)):
            async with background(world.other().call(one.acquire, **options)) as waiting:
                await eventually(waiting.done)
                with pytest.raises(UnreachableError):
                    await waiting
        await world.call((await world.call(one.acquire, timeout=20)).release)


async def test_a_first_lock_on_the_callers_connection_ends_soon(
    world: World, name: str, private_server: OwnServer, short_statements: float
) -> None:
    """The question about the server that comes before the first lock on a connection is bounded too."""
    async with connection(world, labelled(world, name, dsn=private_server.dsn)) as borrowed:
        one = lock(world, borrowed, name)
        with psycopg.connect(private_server.dsn) as admin:
            (session,) = sessions(admin, name)
        with pause(session.pid):
            async with background(world.call(one.acquire, timeout=1)) as waiting:
                await eventually(waiting.done)
                with pytest.raises(UnreachableError):
                    await waiting


@pytest.mark.twins
async def test_an_adoption_on_a_hung_server_ends_soon(
    world: World, name: str, private_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`adopt` takes no timeout: without a response it raises UnreachableError after a few seconds, not after 30."""
    for module in (lease_manager, statements):
        monkeypatch.setattr(module, "RELEASE_BUDGET", 1.0)
    engine = world.engine(dsn=private_server.dsn)
    await world.call(schema.create_all, engine)
    kind = world.pick(Lease, AsyncLease)
    reference = await world.call((await world.call(kind(engine, name, ttl=60).acquire)).hand_over)
    with pause(*family(private_server.pid)):
        async with background(world.other().call(kind.adopt, engine, reference)) as adopting:
            await eventually(adopting.done)
            with pytest.raises(UnreachableError):
                await adopting
    await world.call(schema.drop_all, engine)


@pytest.mark.twins
async def test_leaving_a_block_on_a_hung_backend_ends_in_time(
    world: World, name: str, private_server: OwnServer, admin: psycopg.Connection[Any], short_statements: float
) -> None:
    """The rollback of what connect() left open is bounded too; the connection is closed, and the lock ends with it."""
    one = lock(world, labelled(world, name, dsn=private_server.dsn), name)
    hung = pause()

    async def leave() -> None:
        async with world.enter(one.connect()) as connection:
            await run(world, connection, "SELECT 1")
            (session,) = sessions(admin, name)
            nonlocal hung
            hung = pause(session.pid)
            hung.__enter__()

    async with background(leave()) as leaving:
        await eventually(leaving.done)
        hung.__exit__(None, None, None)
        with pytest.raises(LockLostError):
            await leaving
    await freed(admin, name)


@pytest.mark.twins
async def test_a_migration_lock_on_a_hung_backend_ends_soon(
    world: World, name: str, private_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait ends soon after its timeout, and the release after the limit of a statement, with UnreachableError."""
    for limit in ("RELEASE_BUDGET", "STATEMENT_BUDGET"):
        monkeypatch.setattr(_session, limit, 0.5)
    engine, key = world.engine(dsn=private_server.dsn), LockKey.of(name)

    def work(connection: Connection) -> None:
        pid = connection.scalar(text("SELECT pg_backend_pid()"))
        connection.rollback()
        with pause(pid), pytest.raises(UnreachableError, match=r"no response from .* within 1\.0 s"):
            migration_lock(connection, key=key, timeout=0.5).__enter__()
        pid = connection.scalar(text("SELECT pg_backend_pid()"))
        connection.rollback()
        held = migration_lock(connection, key=key, timeout=10)
        held.__enter__()
        with pause(pid), pytest.raises(UnreachableError, match=r"no response from .* within 0\.5 s"):
            held.__exit__(None, None, None)

    def here() -> None:
        with engine.connect() as connection:
            work(connection)

    async def there() -> None:
        async with engine.connect() as connection:
            await connection.run_sync(work)

    await world.call(world.pick(here, there))


async def backend(admin: psycopg.Connection[Any], name: str) -> int:
    """Wait until the one session of this name waits for its lock, and return its server process."""
    await eventually(waits(admin, name))
    return sessions(admin, name)[0].pid
