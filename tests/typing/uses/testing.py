"""Fixtures of pgfence.testing, as tests use them: what they yield, and what is no target of a fault."""

import subprocess
from typing import assert_type

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pgfence import (
    AdvisoryLock,
    AsyncHeldLease,
    AsyncLease,
    Held,
    HeldLease,
    Lease,
    LockKey,
    Permit,
    ReadWriteLock,
    Semaphore,
    TransactionLock,
    WriteHeld,
)
from pgfence.testing import PgfenceFaults, PgfenceHistory, PgfenceHolds

ACCOUNT = LockKey.family("account")


def held_elsewhere(engine: Engine, async_engine: AsyncEngine, pgfence_holds: PgfenceHolds) -> None:
    with pgfence_holds(ACCOUNT(1), "report") as held:
        assert_type(held, Held)
    with pgfence_holds("report", shared=True) as reader:
        assert_type(reader, Held)
    with pgfence_holds(Lease(engine, "close", ttl=30)) as lease:
        assert_type(lease, HeldLease)
    with pgfence_holds(AsyncLease(async_engine, "close", ttl=30)) as async_lease:
        assert_type(async_lease, AsyncHeldLease)
    with pgfence_holds(Semaphore(engine, "provider", permits=1, ttl=30)) as permit:
        assert_type(permit, Permit)
    with pgfence_holds(ReadWriteLock(engine, "config").write) as writer:
        assert_type(writer, WriteHeld)


def wrong_locks(connection: Connection, pgfence_holds: PgfenceHolds) -> None:
    pgfence_holds(TransactionLock(connection, "report"))  # type: ignore[call-overload] # pyright: ignore[reportCallIssue, reportArgumentType]
    pgfence_holds(1)  # type: ignore[call-overload] # pyright: ignore[reportCallIssue, reportArgumentType]


def faults(engine: Engine, lease: HeldLease, held: Held, pgfence_faults: PgfenceFaults) -> None:
    worker = subprocess.Popen(["worker"])
    with pgfence_faults.pause(worker, 4711), pgfence_faults.cut(silent=True), pgfence_faults.skew(-3600):
        pgfence_faults.kill(worker)
    pgfence_faults.kill(held)
    pgfence_faults.kill(ACCOUNT(1))
    pgfence_faults.expire(lease)
    with pgfence_faults.steal(lease) as thief:
        assert_type(thief, HeldLease)
    with pgfence_faults.steal(held) as other:
        assert_type(other, Held)
    with pgfence_faults.busy(AdvisoryLock(engine, "report", token=True)) as busy:
        assert busy.token
    pgfence_faults.expire(ACCOUNT(1))  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


async def history(connection: Connection, async_connection: AsyncConnection, history: PgfenceHistory) -> None:
    PgfenceHistory.enter(connection, "worker-1", resource="report", token=3)
    await history.enter(async_connection, "worker-2")
    await history.leave(async_connection, "worker-2")
    assert_type(history.check(), set[str])
