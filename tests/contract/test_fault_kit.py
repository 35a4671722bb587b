"""`pgfence_holds` and `pgfence_faults`: each fault happens as described, to sync and async code."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

from pgfence import (
    AdvisoryLock,
    AsyncAdvisoryLock,
    AsyncLease,
    AsyncOnce,
    AsyncReadWriteLock,
    AsyncSemaphore,
    AsyncTransactionLock,
    Lease,
    LockKey,
    LockLostError,
    LockNotHeldError,
    LockTimeoutError,
    Once,
    ReadWriteLock,
    Semaphore,
    StaleFencingTokenError,
    TransactionLock,
)
from pgfence.testing import FaultUnavailableError
from support.locking import run
from support.processes import alive
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence.testing import PgfenceFaults, PgfenceHolds
    from support.processes import Script
    from support.worlds import World

pytestmark = pytest.mark.twins


def lock(world: World, *names: Any, **kwargs: Any) -> Any:
    return world.pick(AdvisoryLock, AsyncAdvisoryLock)(world.engine(), *names, **kwargs)


def lease(world: World, name: str, engine: Any = None) -> Any:
    return world.pick(Lease, AsyncLease)(engine or world.engine(), name, ttl=30)


async def test_names_are_held_by_another_session(world: World, name: str, pgfence_holds: PgfenceHolds) -> None:
    """Session and transaction locks wait during the block, with the holder in the error, and are granted after it."""
    other = LockKey.of(f"{name}:2", namespace="its own")
    with pgfence_holds(name, other) as held:
        assert held.names == (name, other.name)
        assert await world.call(lock(world, name).try_acquire) is None
        async with world.enter(world.engine().begin()) as connection:
            wanted = world.pick(TransactionLock, AsyncTransactionLock)(connection, other)
            with pytest.raises(LockTimeoutError) as caught:
                await world.call(wanted.acquire, timeout=0.1)
    assert [holder.application_name for holder in caught.value.holders] == ["pgfence_testing"]
    async with world.enter(lock(world, name, other).hold(timeout=0)):
        pass


async def test_a_name_is_held_shared(world: World, name: str, pgfence_holds: PgfenceHolds) -> None:
    """A reader gets the lock during a shared hold, and a writer does not; several names cannot be held shared."""
    wanted = world.pick(ReadWriteLock, AsyncReadWriteLock)(world.engine(), name)
    with pgfence_holds(name, shared=True):
        async with world.enter(wanted.read.hold(timeout=1)):
            assert await world.call(wanted.write.try_acquire) is None
    with pytest.raises(ValueError, match="one name"):
        pgfence_holds(name, f"{name}:2", shared=True)


@pytest.mark.parametrize("kind", ["lease", "once", "semaphore", "session lock"])
async def test_a_lock_is_held_by_another_contender(
    world: World, name: str, tables: None, pgfence_holds: PgfenceHolds, kind: str
) -> None:
    """A lease, slot or permit of the application's own engine is held in its place, sync or async."""
    engine = world.engine()
    wanted = {
        "lease": lambda: lease(world, name, engine),
        "once": lambda: world.pick(Once, AsyncOnce)(engine, name, every=timedelta(days=1)),
        "semaphore": lambda: world.pick(Semaphore, AsyncSemaphore)(engine, name, permits=1, ttl=30),
        "session lock": lambda: lock(world, name),
    }[kind]()
    with pgfence_holds(wanted) as held:
        assert held.state == "held"
        assert await world.call(wanted.try_acquire) is None
    assert held.state == "released"


async def test_str_names_are_in_the_namespace_of_the_test(
    world: World, name: str, pgfence_namespace: str, pgfence_holds: PgfenceHolds
) -> None:
    """With `pgfence_namespace` a str is in that namespace, and a LockKey keeps its own."""
    with pgfence_holds(name):
        assert await world.call(lock(world, name, namespace=pgfence_namespace).try_acquire) is None
        async with world.enter(lock(world, name).hold(timeout=0)):
            pass
    with pgfence_holds(LockKey.of(name)):
        assert await world.call(lock(world, name).try_acquire) is None


@pytest.mark.parametrize("by", ["handle", "name"])
async def test_a_killed_session_loses_its_lock(world: World, name: str, pgfence_faults: PgfenceFaults, by: str) -> None:
    """The holder is notified with the reason "killed"; a lock that no session holds cannot be killed."""
    held = await world.call(lock(world, name).acquire)
    pgfence_faults.kill(held if by == "handle" else name)
    if by == "name":
        assert await world.call(held.wait_lost, 20)
    assert held.loss_reason == "killed"
    with pytest.raises(LockNotHeldError):
        pgfence_faults.kill(held if by == "handle" else name)


async def test_an_expired_lease_is_lost_and_free(
    world: World, name: str, tables: None, pgfence_faults: PgfenceFaults
) -> None:
    """The handle is lost with the reason "expired" when the call returns, and another holder gets the lease at once."""
    held = await world.call(lease(world, name).acquire)
    pgfence_faults.expire(held)
    assert held.loss_reason == "expired"
    with pgfence_faults.busy(lease(world, name)) as again:
        assert again.token == held.token + 1
        pgfence_faults.expire(name)
        async with world.enter(lease(world, name).hold(timeout=0)):
            # The lease of the second holder is another one now, and must not be touched.
            with pytest.raises(LockNotHeldError):
                pgfence_faults.expire(again)


async def test_a_stolen_lease_leaves_its_former_holder_unaware(
    world: World, name: str, tables: None, pgfence_faults: PgfenceFaults
) -> None:
    """The former holder still considers the lease held, and the gate rejects its writes."""
    engine = world.engine()
    held = await world.call(lease(world, name, engine).acquire)
    with pgfence_faults.steal(held) as thief:
        assert (thief.token, held.state) == (held.token + 1, "held")
        with pytest.raises(StaleFencingTokenError):
            async with world.enter(held.begin(engine)):
                pytest.fail("a stale writer entered")
    with pytest.raises(LockLostError):
        await world.call(held.release)


async def test_a_stolen_lease_does_not_disturb_a_writer_inside(
    world: World, name: str, tables: None, pgfence_faults: PgfenceFaults
) -> None:
    """A transaction that is inside the gate may commit, and the other holder has the lease meanwhile."""
    engine = world.engine()
    held = await world.call(lease(world, name, engine).acquire)
    async with world.enter(held.begin(engine)):
        with pgfence_faults.steal(name) as thief:
            assert thief.token == held.token + 1
    with pytest.raises(LockNotHeldError, match=name):
        pgfence_faults.expire(name)
    with pytest.raises(LockLostError):
        await world.call(held.release)


async def test_a_stolen_session_lock_has_another_holder(world: World, name: str, pgfence_faults: PgfenceFaults) -> None:
    """The former holder is notified, and another session has the key."""
    held = await world.call(lock(world, name).acquire)
    with pgfence_faults.steal(held):
        assert await world.call(held.wait_lost, 20)
        assert await world.call(lock(world, name).try_acquire) is None


@pytest.mark.parametrize("silent", [False, True])
async def test_cut_connections_do_not_come_back(world: World, pgfence_faults: PgfenceFaults, silent: bool) -> None:
    """Inside the block neither old nor new connections work, and after the block new connections work."""
    engine = world.engine(dsn=pgfence_faults.url)

    async def ask(connection: Any) -> None:
        await run(world, connection, "SELECT 1")

    failed = False
    with contextlib.suppress(DBAPIError):  # of the rollback
        async with world.enter(engine.connect()) as old:
            await ask(old)
            with pgfence_faults.cut(silent=silent):
                if not silent:
                    with pytest.raises(DBAPIError):
                        await ask(old)
                    with pytest.raises((DBAPIError, OSError)):
                        async with world.enter(world.engine(dsn=pgfence_faults.url).connect()):
                            pass
            if silent:
                with pytest.raises(DBAPIError):
                    await ask(old)
            failed = True
    assert failed
    async with world.enter(engine.connect()) as new:
        await ask(new)


def test_a_paused_process_does_not_respond(script: Callable[..., Script], pgfence_faults: PgfenceFaults) -> None:
    """It is stopped inside the block and continues after it; `kill` ends it."""
    running = script("say('here'); park(); say('there'); park()")
    running.wait_for("here")
    state = Path(f"/proc/{running.pid}/stat")
    with pgfence_faults.pause(running):
        eventually(lambda: state.read_text().rsplit(")", 1)[1].split()[0] == "T")
    eventually(lambda: state.read_text().rsplit(")", 1)[1].split()[0] == "S")
    pgfence_faults.kill(running.pid)
    eventually(lambda: not alive(running.pid))
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        pgfence_faults.kill(process)
        assert process.returncode == -signal.SIGKILL


async def test_a_process_of_asyncio_is_killed(pgfence_faults: PgfenceFaults) -> None:
    """The test awaits the end of the process, because the call has no event loop."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    pgfence_faults.kill(process)
    assert await process.wait() == -signal.SIGKILL


def test_a_fault_that_cannot_be_made_says_why(
    dsn: str,
    name: str,
    role: Callable[..., str],
    pgfence_faults: PgfenceFaults,
    monkeypatch: pytest.MonkeyPatch,
    make_faults: Callable[[str], PgfenceFaults],
) -> None:
    """A missing privilege, clock control, SIGSTOP or right to a process is named in the error."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    with AdvisoryLock(engine, name).hold():
        with pytest.raises(FaultUnavailableError, match="Run GRANT pg_signal_backend TO <role>"):
            make_faults(role()).kill(name)
    engine.dispose()
    with pytest.raises(FaultUnavailableError, match="pgfence_skew = true"):
        pgfence_faults.skew(1)
    monkeypatch.delattr(signal, "SIGSTOP")
    with pytest.raises(FaultUnavailableError, match="no SIGSTOP"), pgfence_faults.pause(1):
        pass


async def test_a_fault_of_the_wrong_kind_is_rejected(
    world: World, name: str, tables: None, pgfence_faults: PgfenceFaults
) -> None:
    """A lease has no session to kill, a session lock does not expire, a transaction lock has no engine; the message helps."""
    async with world.enter(world.engine().begin()) as connection:
        wanted = world.pick(TransactionLock, AsyncTransactionLock)(connection, name)
        with pytest.raises(TypeError, match="for a TransactionLock, pass its names instead"):
            pgfence_faults.busy(wanted)
    async with world.enter(lease(world, name).hold()) as held:
        with pytest.raises(TypeError, match=r"use expire\(\) or steal\(\)"):
            pgfence_faults.kill(held)
    async with world.enter(lock(world, f"{name}:2").hold()) as held:
        with pytest.raises(TypeError, match=r"use kill\(\)"):
            pgfence_faults.expire(held)
