"""The server crashes, is away for a while, and comes back."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine

from pgfence import AsyncLease, AsyncOnce, Lease, Once, schema
from pgfence._holds.registry import ManagerRegistry
from pgfence._leases.manager import LeaseManager
from pgfence.errors import LockLostError, LockTimeoutError, UnreachableError
from support.commandline import Cli, first_line
from support.locking import background, is_free, labelled, lock, run, waits
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.servers import OwnServer
    from support.worlds import World


def connect(server: OwnServer) -> psycopg.Connection[Any]:
    return psycopg.connect(server.dsn, autocommit=True, application_name="admin")


async def test_a_crash_notifies_the_holder_and_a_waiter_outlasts_it(
    world: World, name: str, private_server: OwnServer, caplog: pytest.LogCaptureFixture
) -> None:
    """C046: the holder is notified of the loss; the waiter asks again until the server is back, and gets the lock."""
    engine = labelled(world, name, dsn=private_server.dsn)
    one = lock(world, engine, name)
    warm = await world.call(lock(world, engine, f"{name}!").acquire)
    held = await world.call(one.acquire)
    told: list[str] = []
    held.on_lost(lambda: told.append(held.state))
    await world.call(warm.release)
    waiter = world.other()
    other = lock(world, labelled(world, f"{name} waiter", dsn=private_server.dsn), name)
    async with background(waiter.call(other.acquire)) as waiting:
        with connect(private_server) as admin:
            await eventually(waits(admin, name))
        await asyncio.to_thread(private_server.stop, "immediate")
        # The message follows the callbacks. Before it, `held` still has its place in this process's queue, so `try_acquire` returns
        # None without a request.
        await eventually(lambda: held.lost and told and "was lost: killed" in caplog.text)
        assert (held.state, held.loss_reason, told) == ("lost", "killed", ["lost"])
        for call in (
            lambda: world.call(one.try_acquire),
            lambda: world.call(one.acquire, timeout=0),
            lambda: world.call(one.acquire),
        ):
            with pytest.raises(UnreachableError) as caught:
                await call()
            assert caught.value.retryable
            assert private_server.password not in str(caught.value)
        with pytest.raises(UnreachableError):
            await world.call(one.holders)
        assert not waiting.done()
        await asyncio.to_thread(private_server.start)
        mine = await waiting
    mine.check()
    with pytest.raises(LockLostError):
        await world.call(held.release)
    with connect(private_server) as admin:
        assert not is_free(admin, name)
    await waiter.call(mine.release)
    with connect(private_server) as admin:
        assert is_free(admin, name)


@pytest.mark.twins
async def test_a_wait_that_ends_during_an_outage_names_the_last_known_holder(
    world: World, name: str, private_server: OwnServer
) -> None:
    """C040: UnreachableError, not LockTimeoutError: it says that the lock was held, and that the server is unreachable since then."""
    other = lock(world, world.engine(dsn=private_server.dsn), name)
    held = await world.call(lock(world, world.engine(dsn=private_server.dsn), name).acquire)
    async with background(world.other().call(other.acquire, timeout=4)) as waiting:
        with connect(private_server) as admin:
            await eventually(waits(admin, name))
        await asyncio.to_thread(private_server.stop, "immediate")
        # Stands in line behind a waiter that finds no server.
        async with background(world.other().call(other.acquire, timeout=0.5)) as behind:
            with pytest.raises(UnreachableError):
                await behind
        with pytest.raises(
            UnreachableError, match=r"(?s)Waited 4 s for .* s ago it was held.*has been unreachable"
        ) as caught:
            await waiting
    assert caught.value.retryable
    assert held.lost
    await asyncio.to_thread(private_server.start)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["lock", "lease", "slot"])
async def test_a_timeout_that_was_passed_is_waited_for_a_server_too(
    world: World, name: str, private_server: OwnServer, kind: str
) -> None:
    """The first statement finds no server: with an explicit timeout the call retries until the server is there."""
    engine = world.engine(dsn=private_server.dsn)
    await world.call(schema.create_all, engine)
    one = contended(world, kind, engine, name)
    await asyncio.to_thread(private_server.stop, "immediate")
    async with background(world.other().call(one.acquire, timeout=20)) as waiting:
        with pytest.raises(UnreachableError):
            await world.call(contended(world, kind, engine, f"{name}!").acquire)
        await asyncio.to_thread(private_server.start)
        held = await waiting
    held.check()
    # The outage is over: who stands in line behind the holder finds the lock held, not the server away.
    with pytest.raises(LockTimeoutError):
        await world.other().call(one.acquire, timeout=0.3)
    await world.call(held.release)
    await world.call(schema.drop_all, world.engine(dsn=private_server.dsn))


@pytest.mark.matrix
@pytest.mark.twins
@pytest.mark.parametrize("kind", ["lease", "slot"])
async def test_a_wait_for_a_lease_or_slot_outlasts_a_restart(
    world: World, name: str, private_server: OwnServer, kind: str
) -> None:
    """The holder survives a short outage, and so does the wait, also with the default timeout."""
    engine = world.engine(dsn=private_server.dsn)
    await world.call(schema.create_all, engine)
    held = await world.call(contended(world, kind, engine, name).acquire)
    waiter, other = world.other(), contended(world, kind, world.engine(dsn=private_server.dsn), name)
    async with background(waiter.call(other.acquire)) as waiting:
        await eventually(lambda: contended_for(other))
        await asyncio.to_thread(private_server.restart, "immediate")
        held.check()
        if kind == "slot":
            await end_badly(world, held)
        else:
            await world.call(held.release)
        mine = await waiting
    mine.check()
    await waiter.call(mine.release)
    await world.call(schema.drop_all, world.engine(dsn=private_server.dsn))


@pytest.mark.twins
async def test_nothing_runs_unprotected_beside_a_holder_that_was_named(
    world: World, name: str, private_server: OwnServer
) -> None:
    """`unreachable="run"` waits until the TTL of the holder is over: by then the holder has been notified of the loss."""
    engine = world.engine(dsn=private_server.dsn)
    await world.call(schema.create_all, engine)
    held = await world.call(contended(world, "lease", engine, name, 4).acquire)
    other = contended(world, "lease", world.engine(dsn=private_server.dsn), name, 4)
    beside: list[bool] = []
    work = guarded(world, other, lambda: beside.append(not held.lost))
    async with background(world.other().call(work)) as first:
        await eventually(lambda: contended_for(other))
        # Stands in line behind it, and was told nothing by the server itself.
        async with background(world.other().call(work)) as second:
            await asyncio.to_thread(private_server.stop, "immediate")
            await second
        await first
    assert beside == [False, False]
    await asyncio.to_thread(private_server.start)
    await world.call(schema.drop_all, world.engine(dsn=private_server.dsn))


def contended(world: World, kind: str, engine: Any, name: str, ttl: float = 60) -> Any:
    """Return a lock, a lease or a slot of one day."""
    if kind == "lock":
        return lock(world, engine, name)
    if kind == "lease":
        return world.pick(Lease, AsyncLease)(engine, name, ttl=ttl)
    return world.pick(Once, AsyncOnce)(engine, name, at="2026-04-01", ttl=ttl)


def contended_for(one: Any) -> bool:
    """Say whether the server has responded to a waiter of this process that its lease is held."""
    managers = ManagerRegistry.of(one._engine.find()).values()
    return any(each._seen._until for each in managers if isinstance(each, LeaseManager))


def guarded(world: World, one: Any, note: Callable[[], object]) -> Any:
    """Return a function that runs without the server, if it has to."""
    wrap = one.wrap(timeout=0.5, unreachable="run")
    if not world.is_async:
        return wrap(note)

    @wrap
    async def work() -> None:
        note()

    return work


async def end_badly(world: World, held: Any) -> None:
    """End a slot by an error: it is free for the next attempt."""
    error = ValueError("failed")
    leave = held.__aexit__ if world.is_async else held.__exit__
    await world.call(leave, ValueError, error, None)


@pytest.mark.twins
async def test_work_on_the_holders_connection_ends_with_the_server(
    world: World, name: str, private_server: OwnServer
) -> None:
    """C044: after a restart the lent connection writes nothing more, though its engine would find a server."""
    with connect(private_server) as admin:
        admin.execute("CREATE TABLE IF NOT EXISTS written (what text)")
    with pytest.raises(LockLostError):
        async with world.enter(
            lock(world, labelled(world, name, dsn=private_server.dsn), name).connect()
        ) as connection:
            private_server.restart("immediate")
            for _ in range(2):
                with pytest.raises(Exception):  # noqa: B017 each driver has its own
                    await run(world, connection, "INSERT INTO written VALUES ('stale')")
                try:
                    await world.call(connection.rollback)
                except Exception:  # a dead connection may refuse
                    continue
    with connect(private_server) as admin:
        assert admin.execute("SELECT count(*) FROM written").fetchone() == (0,)


def test_a_command_waits_for_a_server_too(name: str, private_server: OwnServer, tmp_path: Path) -> None:
    """`--on-unreachable run` is decided when `--wait` is over: the command runs under the lock once the server is back."""
    private_server.stop("immediate")
    cli = Cli(private_server.dsn, tmp_path)
    with cli.started("--wait", "60", "--on-unreachable", "run", "--json", name, "--", "true") as process:
        assert process.stderr is not None
        assert "waiting for" in process.stderr.readline()
        private_server.start()
        report = json.loads(process.stderr.read().splitlines()[-1])
    assert (report["outcome"], report["locked"]) == ("ran", True)


def test_a_command_never_runs_beside_a_holder_that_was_named(
    name: str, private_server: OwnServer, tmp_path: Path
) -> None:
    """`--on-unreachable run` starts it once the TTL of the known holder is over, which has been notified of the loss by then."""
    engine = create_engine(private_server.dsn.replace("postgresql:", "postgresql+psycopg:"))
    schema.create_all(engine)
    held = Lease(engine, name, ttl=4).acquire()
    cli = Cli(private_server.dsn, tmp_path)
    words = ("--lease", "--ttl", "4", "--wait", "0.5", "--on-unreachable", "run")
    with cli.started(*words, name, "--", "sh", "-c", "echo ran") as process:
        assert process.stderr is not None
        assert f"waiting for '{name}', held by" in process.stderr.readline()
        private_server.stop("immediate")
        assert first_line(process) == "ran"
        assert held.lost
    engine.dispose()
    private_server.start()
    schema.drop_all(engine)
    engine.dispose()
