"""A swallowed error, several databases, a cancel or autocommit never pass for a commit."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, event, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError
from sqlalchemy.orm import sessionmaker
from sqlalchemy.orm.exc import StaleDataError

from pgfence.errors import (
    CommitOutcomeUnknownError,
    StaleFencingTokenError,
    TransactionStateError,
    UnsupportedServerError,
    VersionConflictError,
)
from pgfence.fence import fence
from pgfence.lease import AsyncLease, Lease
from pgfence.retrying import run_transaction
from support.retrying import Row, conflict, sessions, transact
from support.transactions import factory
from support.worlds import World

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy.orm import Session

pytestmark = pytest.mark.twins


@pytest.mark.every_driver
async def test_an_error_that_was_swallowed_is_not_taken_for_a_commit(world: World, row: Row) -> None:
    """After an error PostgreSQL answers COMMIT with a ROLLBACK and no error: the swallowed error is raised."""

    def work(session: Session) -> str:
        row.add_one(session)
        session.flush()
        for wrong in ("SELECT 1 / 0", "SELECT 7"):
            try:
                session.execute(text(wrong))
            except DBAPIError:
                continue
        return "all is well"

    with pytest.raises(DBAPIError, match="division by zero") as caught:
        await transact(world, world.engine(), work)
    assert "the function caught this error" in caught.value.__notes__[0]
    assert row.n() == 0


@pytest.mark.every_driver
async def test_a_swallowed_serialization_failure_is_retried(world: World, row: Row) -> None:
    """A serialization failure that the function caught has still undone its transaction: it runs again."""
    calls: list[int] = []

    def work(session: Session) -> None:
        calls.append(1)
        session.execute(select(row.cls.n)).all()
        if len(calls) == 1:
            row.overtake()
        try:
            session.execute(text(f"UPDATE {row.table} SET n = n + 1 WHERE id = 1"))
        except DBAPIError:
            return

    await transact(world, world.engine(isolation_level="REPEATABLE READ"), work)
    assert len(calls) == 2
    assert row.n() == 101


def flush_overtaken(session: Session, row: Row, calls: list[int], *errors: type[Exception]) -> None:
    """Change the row, which another transaction changes first at the first call, and swallow the errors of the flush."""
    calls.append(1)
    row.add_one(session)
    if len(calls) == 1:
        row.overtake()
    with suppress(*errors):
        session.flush()


async def test_a_failed_flush_that_was_swallowed_is_raised(world: World, row: Row) -> None:
    """A flush that fails has rolled back: what it failed by is raised, and one that another attempt cures is done again."""
    calls: list[int] = []

    def twice(session: Session) -> None:
        session.add(row.cls(id=1, n=0))
        try:
            session.flush()
        except DBAPIError:
            return

    engine = world.engine(isolation_level="REPEATABLE READ")
    with pytest.raises(IntegrityError) as caught:
        await transact(world, engine, twice)
    assert "the function caught this error" in caught.value.__notes__[0]
    assert caught.value.__cause__ is caught.value.orig
    await transact(world, engine, lambda session: flush_overtaken(session, row, calls, DBAPIError))
    assert len(calls) == 2
    assert row.n() == 101


@pytest.mark.every_driver
@pytest.mark.parametrize("versioned", [False, True])
async def test_a_version_conflict_that_was_swallowed_is_retried(
    world: World, admin: psycopg.Connection[Any], versioned: bool
) -> None:
    """A conflict in a flush has rolled the session back: the transaction runs again, or the conflict is raised."""
    row = Row(admin, versioned=versioned)
    made = sessions(world, world.engine(), versioned=versioned)
    calls: list[int] = []

    def work(session: Session) -> None:
        flush_overtaken(session, row, calls, StaleDataError, VersionConflictError)

    with pytest.raises(VersionConflictError if versioned else StaleDataError) as caught:
        await transact(world, made, work, attempts=1)
    assert "the function caught this error" in caught.value.__notes__[0]
    calls.clear()
    await transact(world, made, work)
    assert len(calls) == 2
    assert row.n() == 201
    row.drop()


async def test_a_conflict_undone_by_a_savepoint_does_not_stop_the_commit(world: World, row: Row) -> None:
    """After a conflict in a savepoint, the rest of the transaction is committed."""
    calls: list[int] = []

    def work(session: Session) -> None:
        calls.append(1)
        row.add_one(session, 2)
        session.flush()
        try:
            with session.begin_nested():
                row.add_one(session)
                row.overtake()
        except StaleDataError:
            pass

    await transact(world, world.engine(), work)
    assert len(calls) == 1
    assert (row.n(1), row.n(2)) == (100, 1)


@pytest.mark.every_driver
async def test_a_lost_connection_that_was_swallowed_is_raised(
    world: World, row: Row, admin: psycopg.Connection[Any]
) -> None:
    """Work that continues without its connection has nothing that could be committed."""

    def work(session: Session) -> None:
        row.add_one(session)
        session.flush()
        admin.execute("SELECT pg_terminate_backend(%s, 2000)", (session.scalar(text("SELECT pg_backend_pid()")),))
        try:
            session.execute(text("SELECT 1"))
        except DBAPIError:
            return

    with pytest.raises(DBAPIError) as caught:
        await transact(world, world.engine(), work)
    assert caught.value.connection_invalidated
    assert not isinstance(caught.value, CommitOutcomeUnknownError)
    assert row.n() == 0


@pytest.mark.every_driver
@pytest.mark.usefixtures("tables")
async def test_a_stale_token_that_was_swallowed_is_raised(world: World, name: str) -> None:
    """A rejection by the fence is raised and not retried, because another holder has taken over."""
    engine = world.engine()
    tokens: list[int] = []
    calls: list[int] = []
    for _ in range(2):
        held = await world.call(world.pick(Lease, AsyncLease)(engine, name, ttl=30).acquire)
        tokens.append(held.token)
        await world.call(held.release)
    await transact(world, engine, lambda session: fence(session, name, tokens[1]))

    def work(session: Session) -> None:
        calls.append(1)
        try:
            fence(session, name, tokens[0])
        except StaleFencingTokenError:
            return

    with pytest.raises(StaleFencingTokenError) as caught:
        await transact(world, engine, work)
    assert caught.value.newest == tokens[1]
    assert calls == [1]


async def test_an_error_undone_by_a_savepoint_does_not_stop_the_commit(world: World, row: Row) -> None:
    """An error that was undone by a rollback to a savepoint does not prevent the commit."""

    def work(session: Session) -> None:
        row.add_one(session)
        try:
            with session.begin_nested():
                session.execute(text("SELECT 1 / 0"))
        except DBAPIError:
            pass

    await transact(world, world.engine(), work)
    assert row.n() == 1


async def test_work_that_continues_after_its_own_commit_is_rejected(world: World, row: Row) -> None:
    """A function that commits and continues would be repeated in part: it raises, and is not retried."""
    calls: list[int] = []

    def work(session: Session) -> None:
        calls.append(1)
        row.add_one(session)
        session.commit()
        row.add_one(session)

    with pytest.raises(InvalidRequestError, match="context manager"):
        await transact(world, world.engine(), work)
    assert calls == [1]
    assert row.n() == 1


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
async def test_a_function_that_ends_its_own_transaction_is_rejected(world: World, row: Row, end: str) -> None:
    """A function that returns after it ended its transaction raises an error, because its result may not be committed."""

    def work(session: Session) -> None:
        row.add_one(session)
        session.flush()
        getattr(session, end)()

    with pytest.raises(TransactionStateError, match="neither commit, roll back nor close"):
        await transact(world, world.engine(), work)
    assert row.n() == (end == "commit")


@pytest.mark.parametrize("when", ["in a listener", "in the function"])
async def test_a_conflict_after_the_commit_is_not_retried(world: World, row: Row, when: str) -> None:
    """A conflict that is raised after the transaction was committed is raised, and the transaction runs once."""

    def fail(*_: object) -> None:
        raise conflict(precondition=False)

    def work(session: Session) -> None:
        row.add_one(session)
        if when == "in a listener":
            with session.begin_nested():
                session.flush()
            event.listen(session, "after_commit", fail)
            return
        session.commit()
        fail()

    with pytest.raises(VersionConflictError) as caught:
        await transact(world, world.engine(), work)
    assert "was committed before this error" in caught.value.__notes__[0]
    assert row.n() == 1


@pytest.mark.filterwarnings("ignore:transaction already deassociated:sqlalchemy.exc.SAWarning")
async def test_two_databases_are_not_retried_after_one_commit(
    world: World, row: Row, admin: psycopg.Connection[Any]
) -> None:
    """The second COMMIT is rejected with 40001 after the first succeeded: a retry would write to the first one twice."""
    other = Row(admin)
    for mine, first in ((row, other), (other, row)):
        admin.execute(
            f"CREATE FUNCTION {mine.table}_second() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" IF (SELECT n FROM {first.table} WHERE id = 1) > 0 THEN RAISE 'no' USING ERRCODE = '40001'; END IF;"
            f" RETURN NULL; END $$; CREATE CONSTRAINT TRIGGER second AFTER UPDATE ON {mine.table}"
            f" DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {mine.table}_second()"
        )
    made = factory(world, world.engine(), binds={other.cls: world.engine()})
    calls: list[int] = []

    def work(session: Session) -> None:
        calls.append(1)
        row.add_one(session)
        other.add_one(session)

    with pytest.raises(CommitOutcomeUnknownError, match="COMMIT of one database"):
        await transact(world, made, work)
    assert calls == [1]
    assert row.n() + other.n() == 1
    other.drop()


async def test_a_cancelled_task_leaves_its_connection_whole(dsn: str, row: Row) -> None:
    """Cancelled in the work or in the pause, the task ends, and nothing of the transaction is left."""
    world = World("psycopg_async", dsn)
    made = factory(world, world.engine(pool_size=1, max_overflow=0))
    reached = asyncio.Event()

    async def work(session: Any) -> None:
        await session.run_sync(row.add_one)
        await session.flush()
        reached.set()
        await asyncio.Event().wait()

    async def always(_session: Any) -> None:
        reached.set()
        raise StaleDataError("x")

    for body in (work, always):
        reached.clear()
        task = asyncio.create_task(run_transaction(made, body, attempts=10**6))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await transact(world, made, row.add_one) == 1
    await world.close()


@pytest.mark.every_driver
async def test_autocommit_is_rejected_before_anything_is_sent(world: World, row: Row) -> None:
    """If each statement commits by itself, another attempt would run it twice."""

    def work(session: Session) -> None:
        session.execute(text(f"UPDATE {row.table} SET n = n + 1"))

    with pytest.raises(TransactionStateError, match="autocommit"):
        await transact(world, world.engine(isolation_level="AUTOCOMMIT"), work)
    assert row.n() == 0


def test_another_kind_of_server_is_rejected() -> None:
    """The rules are PostgreSQL's: a session that begins on SQLite raises an error that says so."""
    engine = create_engine("sqlite://")
    with pytest.raises(UnsupportedServerError):
        run_transaction(sessionmaker(engine), lambda session: session.execute(text("SELECT 1")))
    engine.dispose()
