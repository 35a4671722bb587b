"""`run_transaction` retries curable errors from the start, in a new session, and no other error."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm.exc import StaleDataError

from pgfence.config import configure
from pgfence.errors import (
    CommitOutcomeUnknownError,
    DeadlockError,
    LockTimeoutError,
    StaleFencingTokenError,
    VersionConflict,
    VersionConflictError,
)
from pgfence.retrying import TransactionAttempt, run_transaction
from support.retrying import Row, conflict, sessions, transact
from support.transactions import factory
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy.orm import Session

    from support.worlds import World

pytestmark = pytest.mark.twins


EACH = 25 if os.environ.get("PGFENCE_TEST_FAULTS") else 8


# ------------------------------------------------------------ again


async def test_a_stale_row_is_read_again_in_a_fresh_session(world: World, row: Row) -> None:
    """C069: after a version conflict the whole work runs again, in another session that has loaded nothing yet."""
    seen: list[tuple[Session, int, int]] = []

    def work(session: Session) -> int:
        seen.append((session, len(session.identity_map), session.info["pgfence_attempt"]))
        n = row.add_one(session)
        if len(seen) == 1:
            row.overtake()
        return n

    assert await transact(world, world.engine(), work) == 101
    assert row.n() == 101
    assert [(loaded, number) for _, loaded, number in seen] == [(0, 1), (0, 2)]
    assert seen[0][0] is not seen[1][0]
    assert not seen[1][0].in_transaction()


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("level", "versioned"),
    [("READ COMMITTED", False), ("READ COMMITTED", True), ("REPEATABLE READ", True), ("SERIALIZABLE", True)],
)
async def test_eight_workers_add_up_exactly(
    world: World, admin: psycopg.Connection[Any], level: str, versioned: bool
) -> None:
    """C069: 8 workers increment one row, 25 times each in a long run: exactly their sum, at any level, mixin or not."""
    row = Row(admin, versioned=versioned)
    made = sessions(world, world.engine(isolation_level=level, pool_size=8), versioned=versioned)

    async def worker() -> None:
        who = world.other()
        for _ in range(EACH):
            await transact(world, made, row.add_one, who, attempts=100)

    await asyncio.gather(*(worker() for _ in range(8)))
    assert row.n() == 8 * EACH
    row.drop()


async def test_a_version_conflict_is_retried(world: World, admin: psycopg.Connection[Any]) -> None:
    """A conflict that a flush reports is cured by another attempt; that of the last attempt is raised."""
    row = Row(admin, versioned=True)
    engine = world.engine()
    told: list[Any] = []
    configure(engine, on_event=told.append)

    def work(session: Session) -> int:
        n = row.add_one(session)
        if session.info["pgfence_attempt"] == 1:
            row.overtake()
        return n

    made = sessions(world, engine, versioned=True)
    assert await transact(world, made, work) == 101
    with pytest.raises(VersionConflictError) as caught:
        await transact(world, made, work, attempts=1)
    assert [one.event for one in told] == ["conflict", "retried", "committed", "conflict", "failed"]
    assert [one.error for one in told if isinstance(one, TransactionAttempt)] == [
        "VersionConflictError",
        None,
        "VersionConflictError",
    ]
    assert caught.value.items == (VersionConflict(row.cls, (1,), 3, 4),)
    assert caught.value.__notes__
    row.drop()


@pytest.mark.every_driver
async def test_a_serialization_failure_at_an_update_is_retried(world: World, row: Row) -> None:
    """C069: under REPEATABLE READ the conflict is SQLSTATE 40001 at the UPDATE, and a new transaction cures it."""
    calls = 0

    def work(session: Session) -> int:
        nonlocal calls
        calls += 1
        n = row.add_one(session)
        if calls == 1:
            row.overtake()
        return n

    assert await transact(world, world.engine(isolation_level="REPEATABLE READ"), work) == 101
    assert calls == 2


@pytest.mark.every_driver
async def test_a_serialization_failure_at_commit_is_retried(world: World, row: Row) -> None:
    """Two SERIALIZABLE transactions read each other's row: one is rejected at COMMIT, and its work runs again."""
    engine = world.engine(isolation_level="SERIALIZABLE")
    other = create_engine(world.dsn.replace("postgresql:", "postgresql+psycopg:"), isolation_level="SERIALIZABLE")
    flushed: list[int] = []

    def work(session: Session) -> int:
        total = sum(session.scalars(select(row.cls.n)))
        session.execute(text(f"UPDATE {row.table} SET n = :n WHERE id = 1"), {"n": total + 1})
        if not flushed:
            with other.begin() as connection:
                found = connection.execute(text(f"SELECT sum(n) FROM {row.table}")).scalar_one()
                connection.execute(text(f"UPDATE {row.table} SET n = :n WHERE id = 2"), {"n": found + 1})
        flushed.append(total)
        return total

    try:
        assert await transact(world, engine, work) == 1
    finally:
        other.dispose()
    assert flushed == [0, 1]
    assert (row.n(1), row.n(2)) == (2, 1)


@pytest.mark.every_driver
async def test_a_deadlock_is_retried(world: World, row: Row) -> None:
    """Two transactions that lock two rows crosswise: PostgreSQL ends one with 40P01, and its work runs again."""
    locked: set[int] = set()
    calls = 0

    async def cross(first: int, second: int) -> None:
        def begin(session: Session) -> None:
            nonlocal calls
            calls += 1
            session.execute(text("SET LOCAL deadlock_timeout = '50ms'"))
            session.execute(text(f"UPDATE {row.table} SET n = n + 1 WHERE id = :id"), {"id": first})
            locked.add(first)

        def finish(session: Session) -> None:
            session.execute(text(f"UPDATE {row.table} SET n = n + 1 WHERE id = :id"), {"id": second})

        def work(session: Session) -> None:
            begin(session)
            assert met.wait(5)
            finish(session)

        async def work_async(session: Any) -> None:
            await session.run_sync(begin)
            await eventually(lambda: len(locked) == 2)
            await session.run_sync(finish)

        await world.other().call(run_transaction, made, world.pick(work, work_async))

    met = threading.Event()
    made = factory(world, world.engine())
    both = asyncio.gather(cross(1, 2), cross(2, 1))
    await eventually(lambda: len(locked) == 2)
    met.set()
    await both
    # The one that was ended may be back before the other one wakes up, and they meet once more.
    assert calls >= 3
    assert (row.n(1), row.n(2)) == (2, 2)


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("error", [conflict(precondition=False), StaleDataError("x"), DeadlockError("x")], ids=repr)
async def test_curable_errors_are_retried(world: World, error: Exception) -> None:
    """A version conflict, SQLAlchemy's own, and a deadlock while waiting for a lock of pgfence."""
    calls: list[int] = []

    def work(session: Session) -> str:
        calls.append(session.info["pgfence_attempt"])
        if len(calls) < 3:
            raise error
        return "done"

    assert await transact(world, world.engine(), work) == "done"
    assert calls == [1, 2, 3]


# ------------------------------------------------------------ not again


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize(
    "error",
    [
        conflict(precondition=True),
        LockTimeoutError("busy"),
        StaleFencingTokenError("stale", resource="r", token=1, newest=2),
        CommitOutcomeUnknownError("who knows"),
        ZeroDivisionError("mine"),
        OperationalError("UPDATE", {}, ConnectionResetError("gone")),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_any_other_error_ends_it_at_once(world: World, row: Row, error: Exception) -> None:
    """A client's version, a busy lock, a stale token, a lost connection and errors of the caller: one call, rolled back."""
    calls: list[int] = []

    def work(session: Session) -> None:
        calls.append(1)
        row.add_one(session)
        session.flush()
        raise error

    with pytest.raises(type(error)) as caught:
        await transact(world, world.engine(), work)
    assert caught.value is error
    assert calls == [1]
    assert row.n() == 0


async def test_an_error_raised_from_a_conflict_is_the_callers_own(world: World) -> None:
    """A conflict that the function turns into its own error is not retried."""
    calls: list[int] = []

    def work(_session: Session) -> None:
        calls.append(1)
        try:
            raise StaleDataError("x")
        except StaleDataError as error:
            raise LookupError("answer 409") from error

    with pytest.raises(LookupError):
        await transact(world, world.engine(), work)
    assert calls == [1]


@pytest.mark.every_driver
async def test_a_constraint_that_fails_at_commit_is_raised_once(
    world: World, row: Row, admin: psycopg.Connection[Any]
) -> None:
    """A deferred constraint that fails at COMMIT leaves no doubt: its error is raised once, nothing is written."""
    admin.execute(f"UPDATE {row.table} SET n = 1 WHERE id = 2")
    admin.execute(f"ALTER TABLE {row.table} ADD CONSTRAINT {row.table}_u UNIQUE (n) DEFERRABLE INITIALLY DEFERRED")
    calls: list[int] = []

    def work(session: Session) -> None:
        calls.append(1)
        row.add_one(session)

    with pytest.raises(IntegrityError):
        await transact(world, world.engine(), work)
    assert calls == [1]
    assert row.n() == 0


# ------------------------------------------------------------ bounds


async def test_attempts_are_bounded_and_the_last_error_is_raised(world: World, row: Row) -> None:
    """C069: one call per attempt, never more than asked for, and the error of the last one says so."""
    errors: list[Exception] = []

    def work(session: Session) -> None:
        errors.append(StaleDataError(f"number {session.info['pgfence_attempt']}"))
        row.add_one(session)
        session.flush()
        raise errors[-1]

    with pytest.raises(StaleDataError) as caught:
        await transact(world, world.engine(), work, attempts=3)
    assert caught.value is errors[2]
    assert len(errors) == 3
    assert "given up after attempt 3 of 3" in caught.value.__notes__[0]
    assert row.n() == 0


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("timeout", [0, timedelta(seconds=0.3), None, math.inf])
async def test_no_attempt_begins_after_the_timeout(world: World, timeout: Any) -> None:
    """With timeout=0 there is one attempt; otherwise no attempt begins after the given or configured timeout."""
    engine = world.engine()
    configure(engine, default_timeout=0.3)
    began: list[float] = []
    clock = asyncio.get_running_loop().time

    def work(_session: Session) -> None:
        began.append(clock())
        raise StaleDataError("x")

    with pytest.raises(StaleDataError) as caught:
        await transact(world, engine, work, attempts=6 if timeout == math.inf else 1000, timeout=timeout)
    assert ("because the timeout has passed" in caught.value.__notes__[0]) is (timeout != math.inf)
    if timeout == 0:
        assert len(began) == 1
    elif timeout == math.inf:
        assert len(began) == 6
    else:
        assert 2 < len(began) < 1000
        assert 0.2 < began[-1] - began[0] < 0.45


async def test_each_attempt_is_an_event_with_its_pause(world: World, row: Row) -> None:
    """`configure(on_event=...)` gets every attempt: what ended it, and a pause within the bound of that attempt."""
    engine = world.engine()
    told: list[TransactionAttempt] = []

    def hear(event: Any) -> None:
        told.append(event)
        raise RuntimeError("a failing hook breaks nothing")

    configure(engine, on_event=hear)

    def lucky(session: Session) -> None:
        row.add_one(session)
        if session.info["pgfence_attempt"] < 3:
            row.overtake()

    def unlucky(_session: Session) -> None:
        raise ZeroDivisionError

    await transact(world, engine, lucky)
    with pytest.raises(ZeroDivisionError):
        await transact(world, engine, unlucky)
    assert [(one.event, one.attempt, one.error) for one in told] == [
        ("retried", 1, "StaleDataError"),
        ("retried", 2, "StaleDataError"),
        ("committed", 3, None),
        ("failed", 1, "ZeroDivisionError"),
    ]
    assert all(isinstance(one, TransactionAttempt) and one.seconds > 0 for one in told)
    assert told[0].name.endswith("lucky")
    assert told[0].pause <= 0.005
    assert told[1].pause <= 0.010
    assert told[2].pause == told[3].pause == 0


@pytest.mark.every_driver
async def test_the_event_of_an_attempt_has_the_sqlstate(world: World) -> None:
    """The event of an attempt that PostgreSQL ended has the SQLSTATE."""
    engine = world.engine()
    told: list[Any] = []
    configure(engine, on_event=told.append)

    def work(session: Session) -> None:
        session.execute(text("SELECT 1 / 0"))

    with pytest.raises(DBAPIError):
        await transact(world, engine, work)
    assert [(one.event, one.sqlstate) for one in told] == [("failed", "22012")]
