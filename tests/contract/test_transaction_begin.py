"""TransactionLock.begin(): transaction and lock as one block."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, InvalidRequestError, PendingRollbackError

from pgfence.errors import LockTimeoutError, TransactionStateError
from pgfence.transaction import AsyncTransactionLock, TransactionLock
from support.transactions import connection, factory, lock, run, statements, value

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins


@pytest.fixture
def journal(admin: psycopg.Connection[Any]) -> Iterator[str]:
    """A table of one column, n."""
    admin.execute("CREATE TABLE entries (n int)")
    yield "entries"
    admin.execute("DROP TABLE entries")


def begin(world: World, *args: Any, **kwargs: Any) -> Any:
    return world.pick(TransactionLock, AsyncTransactionLock).begin(*args, **kwargs)


@pytest.fixture(params=["engine", "sessionmaker"])
def source(request: pytest.FixtureRequest, world: World) -> Any:
    """An engine or a session factory."""
    engine = world.engine(pool_size=1, max_overflow=0)
    return engine if request.param == "engine" else factory(world, engine)


@pytest.mark.every_driver
@pytest.mark.matrix
async def test_the_block_commits_and_then_the_lock_is_free(
    world: World, source: Any, name: str, journal: str, admin: psycopg.Connection[Any], advisory_rows: Any
) -> None:
    """Inside, both names are held; after the block the work is committed, the lock free and the connection returned."""
    for n in range(2):
        async with world.enter(begin(world, source, name, name + ":2", timeout=1)) as work:
            assert len(advisory_rows()) == 2
            await run(world, work, f"INSERT INTO {journal} VALUES (:n)", n=n)
        assert advisory_rows() == []
    assert admin.execute(f"SELECT count(*) FROM {journal}").fetchone() == (2,)


async def test_a_connection_lost_before_the_commit_leaves_no_doubt(
    world: World, source: Any, name: str, admin: psycopg.Connection[Any]
) -> None:
    """No COMMIT was sent, so SQLAlchemy's error is raised unchanged, although the block had swallowed the first error."""
    with pytest.raises(PendingRollbackError):
        async with world.enter(begin(world, source, name)) as work:
            admin.execute("SELECT pg_terminate_backend(%s)", [await value(world, work, "SELECT pg_backend_pid()")])
            with suppress(DBAPIError):
                await run(world, work, "SELECT 1")


@pytest.mark.matrix
async def test_an_exception_rolls_back_and_goes_on(
    world: World, source: Any, name: str, journal: str, admin: psycopg.Connection[Any], advisory_rows: Any
) -> None:
    """After an exception in the block, nothing is written or held, and the exception propagates unchanged."""
    with pytest.raises(ZeroDivisionError):
        async with world.enter(begin(world, source, name)) as work:
            await run(world, work, f"INSERT INTO {journal} VALUES (1)")
            raise ZeroDivisionError
    assert advisory_rows() == []
    assert admin.execute(f"SELECT count(*) FROM {journal}").fetchone() == (0,)


@pytest.mark.every_driver
@pytest.mark.matrix
async def test_the_callers_exception_wins_over_a_failing_end(world: World, source: Any, name: str) -> None:
    """If the rollback fails too, its error becomes a note on the caller's exception."""
    engine = source if not hasattr(source, "kw") else source.kw["bind"]
    failures = [RuntimeError("the end's")]

    def fail(_connection: Any) -> None:
        if failures:
            raise failures.pop()

    event.listen(getattr(engine, "sync_engine", engine), "rollback", fail)
    with pytest.raises(ZeroDivisionError, match="the caller's") as caught:
        async with world.enter(begin(world, source, name)):
            raise ZeroDivisionError("the caller's")
    assert failures == []
    assert "the end's" in caught.value.__notes__[0]


@pytest.mark.matrix
async def test_the_lock_is_the_first_statement(world: World, source: Any, name: str) -> None:
    """Nothing is read before the lock, and several names are one statement."""
    engine = source if not hasattr(source, "kw") else source.kw["bind"]
    with statements(engine) as sent:
        async with world.enter(begin(world, source, name, name + ":2")) as work:
            await run(world, work, "SELECT 7")
    assert len(sent) == 2
    assert "advisory" in sent[0]


@pytest.mark.matrix
async def test_a_busy_lock_raises_on_entering(world: World, source: Any, name: str) -> None:
    """If the lock is held elsewhere, the body does not run, and the connection is returned to the pool."""
    async with connection(world, world.engine()) as holder:
        await world.call(lock(holder, name).acquire)
        for _ in range(3):
            with pytest.raises(LockTimeoutError):
                async with world.enter(begin(world, source, name, timeout=0)):
                    pytest.fail("the body ran without the lock")
        async with world.enter(begin(world, source, name + ":2")) as work:
            assert await value(world, work, "SELECT 1") == 1


@pytest.mark.matrix
async def test_statements_after_a_commit_inside_the_block_are_rejected(world: World, source: Any, name: str) -> None:
    """A commit inside the block ends the lock, so nothing more may run there unguarded."""
    with pytest.raises(InvalidRequestError, match="context manager"):
        async with world.enter(begin(world, source, name)) as work:
            await world.call(work.commit)
            await run(world, work, "SELECT 1")


@pytest.mark.every_driver
async def test_modes_and_snapshots_are_passed_on(world: World, name: str) -> None:
    """begin() passes `shared`, `namespace` and `stale_snapshot_ok` on to the lock."""
    engine = world.engine(isolation_level="SERIALIZABLE")
    with pytest.raises(TransactionStateError):
        async with world.enter(begin(world, engine, name)):
            pass
    way = {"shared": True, "namespace": "other", "stale_snapshot_ok": True}
    async with world.enter(begin(world, engine, name, **way)), connection(world, world.engine()) as other:
        (holder,) = await world.call(lock(other, name, namespace="other").holders)
        assert holder.mode == "shared"


async def test_begin_rejects_what_it_cannot_open(world: World, name: str) -> None:
    """Sessions, connections, wrong twins and wrong names are rejected at once, with what to use instead."""
    async with connection(world, world.engine()) as work:
        for wrong in (work, None, world.url):
            with pytest.raises(TypeError, match=r"needs an? .*TransactionLock\(\)"):
                begin(world, wrong, name)
    with pytest.raises(ValueError, match="at least one name"):
        begin(world, world.engine())
    twin = world.pick(AsyncTransactionLock, TransactionLock)
    with pytest.raises(TypeError, match="for an? a?sync factory or engine"):
        twin.begin(world.engine(), name)


async def test_no_block_is_a_decorator(world: World, name: str) -> None:
    """A coroutine function under a sync decorator would run after the lock has ended, so there is no decorator."""
    engine = world.engine()
    async with connection(world, engine) as work:
        for block in (begin(world, engine, name), lock(work, name).hold()):
            with pytest.raises(TypeError, match=r"not a decorator|not callable"):

                @block
                async def unguarded() -> None: ...
