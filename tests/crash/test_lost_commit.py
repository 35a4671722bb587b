"""A connection that is lost during COMMIT, and before it: what `run_transaction` says of each, and that it does nothing twice."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from pgfence import AsyncTransactionLock, TransactionLock
from pgfence.config import configure
from pgfence.errors import CommitOutcomeUnknownError
from support.leases import lease
from support.locking import background
from support.retrying import Row, transact
from support.transactions import factory
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg
    from sqlalchemy.orm import Session

    from pgfence.testing._proxy import Proxy
    from support.worlds import World

IN_COMMIT = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'COMMIT%' AND state = 'active'"
    " AND wait_event = 'advisory'"
)
KEY = 7_004_069


@pytest.fixture
def row(admin: psycopg.Connection[Any]) -> Iterator[Row]:
    """A counter whose transactions wait in COMMIT until the test lets the lock KEY go."""
    made = Row(admin)
    admin.execute(
        f"CREATE FUNCTION {made.table}_second() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN PERFORM pg_advisory_xact_lock({KEY}); RETURN NULL; END $$;"
        f" CREATE CONSTRAINT TRIGGER waits AFTER UPDATE ON {made.table} DEFERRABLE INITIALLY DEFERRED"
        f" FOR EACH ROW EXECUTE FUNCTION {made.table}_second()"
    )
    yield made
    made.drop()


@pytest.fixture
def released(admin: psycopg.Connection[Any]) -> Iterator[Callable[[], Any]]:
    """Hold the lock that every COMMIT waits for; called, it lets go."""
    admin.execute("SELECT pg_advisory_lock(%s)", (KEY,))
    yield lambda: admin.execute("SELECT pg_advisory_unlock(%s)", (KEY,))
    admin.execute("SELECT pg_advisory_unlock_all()")


def counted(row: Row, calls: list[int]) -> Callable[[Session], int]:
    def pay(session: Session) -> int:
        calls.append(1)
        return row.add_one(session)

    return pay


def pids(admin: psycopg.Connection[Any]) -> list[int]:
    return [pid for (pid,) in admin.execute(IN_COMMIT)]


async def test_a_commit_that_was_cut_off_is_unknown_and_never_repeated(
    world: World, row: Row, proxy: Proxy, admin: psycopg.Connection[Any], released: Callable[[], Any]
) -> None:
    """C069: the connection is reset while the server commits: it does commit, the caller gets "unknown", after one call."""
    engine = world.engine(dsn=proxy.dsn)
    told: list[Any] = []
    configure(engine, on_event=told.append)
    calls: list[int] = []
    async with background(transact(world, engine, counted(row, calls), world.other())) as paying:
        await eventually(lambda: pids(admin))
        await asyncio.to_thread(proxy.cut)
        with pytest.raises(CommitOutcomeUnknownError, match=r"during COMMIT: .*pay\(\)") as caught:
            await paying
    assert row.n() == 0
    released()
    await eventually(lambda: row.n() == 1)
    assert calls == [1]
    assert caught.value.__cause__ is not None
    assert not caught.value.retryable
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert [(one.event, one.attempt) for one in told] == [("failed", 1)]


@pytest.mark.matrix
@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("kind", ["lease", "transaction lock"])
async def test_a_begin_whose_commit_was_cut_off_is_unknown(
    world: World,
    name: str,
    row: Row,
    proxy: Proxy,
    admin: psycopg.Connection[Any],
    released: Callable[[], Any],
    kind: str,
) -> None:
    """`lease.begin()` and `TransactionLock.begin()` raise it as `run_transaction` does, and name what was held."""
    sessions = factory(world, world.engine(dsn=proxy.dsn))
    held = await world.call(lease(world, world.engine(), name).acquire)
    begin = world.pick(TransactionLock, AsyncTransactionLock).begin
    block = held.begin(sessions) if kind == "lease" else begin(sessions, name)

    async def pay() -> None:
        async with world.other().enter(block) as session:
            await run_sync(session, row.add_one)

    async with background(pay()) as paying:
        await eventually(lambda: pids(admin))
        await asyncio.to_thread(proxy.cut)
        with pytest.raises(CommitOutcomeUnknownError, match=f"during COMMIT: .*{name}"):
            await paying
    released()
    await eventually(lambda: row.n() == 1)
    await world.call(held.release)


async def test_an_error_of_the_last_flush_of_begin_has_a_known_outcome(world: World, name: str, row: Row) -> None:
    """What the flush before COMMIT raises is raised as it is, and the transaction is rolled back."""
    sessions = factory(world, world.engine())
    with pytest.raises(DBAPIError):
        async with world.enter(world.pick(TransactionLock, AsyncTransactionLock).begin(sessions, name)) as session:
            await world.call(session.add, row.cls(id=1, n=0))
    assert row.n() == 0


async def run_sync(session: Any, work: Callable[[Any], Any]) -> Any:
    """Run sync work on a Session or an AsyncSession."""
    return await session.run_sync(work) if hasattr(session, "run_sync") else work(session)


async def test_a_server_process_killed_in_its_commit_is_unknown(
    world: World, row: Row, admin: psycopg.Connection[Any], released: Callable[[], Any]
) -> None:
    """Terminated within COMMIT it has not committed this time, which the client cannot know."""
    calls: list[int] = []
    async with background(transact(world, world.engine(), counted(row, calls), world.other())) as paying:
        (pid,) = await eventually(lambda: pids(admin))
        admin.execute("SELECT pg_terminate_backend(%s)", (pid,))
        with pytest.raises(CommitOutcomeUnknownError):
            await paying
    released()
    await eventually(lambda: not pids(admin))
    assert row.n() == 0
    assert calls == [1]


async def test_a_cancelled_statement_in_commit_is_a_response(
    world: World, row: Row, admin: psycopg.Connection[Any], released: Callable[[], Any]
) -> None:
    """The server says that it was cancelled and has rolled back: its own error, no doubt, no repetition."""
    calls: list[int] = []
    async with background(transact(world, world.engine(), counted(row, calls), world.other())) as paying:
        (pid,) = await eventually(lambda: pids(admin))
        admin.execute("SELECT pg_cancel_backend(%s)", (pid,))
        with pytest.raises(DBAPIError):
            await paying
    released()
    assert row.n() == 0
    assert calls == [1]


@pytest.mark.matrix
@pytest.mark.parametrize("moment", ["in the work", "at the last flush"])
async def test_a_connection_lost_before_commit_has_a_known_outcome(
    world: World, row: Row, admin: psycopg.Connection[Any], moment: str
) -> None:
    """Before COMMIT was sent nothing can be committed: the error is SQLAlchemy's own, and it is not tried again."""
    calls: list[int] = []

    def work(session: Session) -> None:
        calls.append(1)
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        row.add_one(session)
        admin.execute("SELECT pg_terminate_backend(%s, 2000)", (pid,))
        if moment == "in the work":
            session.execute(text("SELECT 1"))

    with pytest.raises(DBAPIError) as caught:
        await transact(world, world.engine(), work)
    assert caught.value.connection_invalidated
    assert calls == [1]
    assert row.n() == 0
