"""`run_transaction` runs inside an open transaction only as a savepoint that a test asks for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm.exc import StaleDataError

from pgfence.errors import TransactionStateError
from pgfence.retrying import in_transaction, run_transaction
from support.retrying import Row, on_session, transact
from support.transactions import connection, factory, run, scoped, session, value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg
    from sqlalchemy.orm import Session

    from support.worlds import World

pytestmark = pytest.mark.twins


@pytest.fixture
def row(admin: psycopg.Connection[Any]) -> Iterator[Row]:
    """A table with one counter at 0."""
    made = Row(admin)
    yield made
    made.drop()


async def nested(world: World, outer: Any, inner: Callable[[], Any]) -> None:
    """Call something inside a transaction of `run_transaction`, as its own contender."""

    def work(_session: Session) -> None:
        inner()

    async def work_async(_session: Any) -> None:
        await inner()

    await world.call(run_transaction, outer, world.pick(work, work_async))


async def test_inside_another_one_it_is_rejected(world: World, row: Row) -> None:
    """C069: a nested transaction on the same database would be committed separately and repeated: rejected, nothing is run."""
    engine = world.engine()
    outer, same = factory(world, engine), factory(world, engine.execution_options(isolation_level="SERIALIZABLE"))
    for inner in (outer, same):
        with pytest.raises(TransactionStateError, match=r"__wrapped__\(session"):
            await nested(world, outer, lambda inner=inner: run_transaction(inner, on_session(world, row.add_one)))
    assert row.n() == 0
    assert await transact(world, outer, row.add_one) == 1


async def test_beside_another_one_it_runs(world: World, row: Row) -> None:
    """It runs inside a transaction on another database, and in another thread or task that was started inside."""
    outer = factory(world, world.engine())
    apart = factory(world, world.engine())
    add = on_session(world, row.add_one)
    await nested(world, outer, lambda: run_transaction(apart, add))
    if world.is_async:
        await nested(world, outer, lambda: asyncio.create_task(run_transaction(outer, add)))
    else:
        loop = asyncio.get_running_loop()
        await nested(
            world,
            outer,
            lambda: asyncio.run_coroutine_threadsafe(asyncio.to_thread(run_transaction, outer, add), loop).result(5),
        )
    assert row.n() == 2


async def test_the_function_itself_joins_the_open_transaction(world: World, row: Row) -> None:
    """What is decorated can be called as a part of another one: `__wrapped__` takes the session that is open."""
    made = factory(world, world.engine())
    part: Any = in_transaction(made)(on_session(world, row.add_one))

    def work(session: Session) -> None:
        part.__wrapped__(session)
        part.__wrapped__(session)

    async def work_async(session: Any) -> None:
        await part.__wrapped__(session)
        await part.__wrapped__(session)

    await world.call(run_transaction, made, world.pick(work, work_async))
    assert row.n() == 2
    assert await world.call(part) == 3


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["session", "connection", "scoped"])
async def test_a_session_or_connection_is_rejected(world: World, row: Row, kind: str) -> None:
    """A fresh session cannot be created from it; for an open transaction the error gives the reason and the alternative."""
    engine = world.engine()
    add = on_session(world, row.add_one)
    call: Any = in_transaction(factory(world, engine))(add)

    async def refused(work: Any, error: type[Exception], match: str) -> None:
        for asked in (lambda: run_transaction(work, add), lambda: in_transaction(work), lambda: call(work)):
            with pytest.raises(error, match=match):
                await world.call(asked)

    if kind == "connection":
        async with connection(world, engine) as work:
            await refused(work, TypeError, rf"sessionmaker|omit the {type(work).__name__} in the call$")
            await run(world, work, "SELECT 1")
            await refused(work, TransactionStateError, "40001")
        return
    async with session(world, engine) as work:
        given = work if kind == "session" else scoped(world, engine)
        await refused(given, TypeError, rf"sessionmaker|omit the {type(given).__name__} in the call$")
        await world.call(given.execute, text("SELECT 1"))
        await refused(given, TransactionStateError, "40001")
        await world.call(given.begin_nested)
        await refused(given, TransactionStateError, "savepoint")
        if given is not work:
            await world.call(given.remove)
    assert row.n() == 0


# ------------------------------------------------------------ tests that roll everything back


async def test_a_rolled_back_test_can_run_it(world: World, row: Row) -> None:
    """On a Connection whose transaction the test rolls back, its transactions are savepoints: they work and conflicts repeat."""
    calls: list[int] = []

    def work(session: Session) -> int:
        calls.append(1)
        n = row.add_one(session)
        if len(calls) == 1:
            row.overtake()
        return n

    async with connection(world, world.engine()) as outer:
        await run(world, outer, "SELECT 1")
        made = factory(world, outer, join_transaction_mode="create_savepoint")
        assert await transact(world, made, work) == 101
        assert await transact(world, made, row.add_one) == 102
        assert await value(world, outer, f"SELECT n FROM {row.table}") == 102
    assert len(calls) == 2
    assert row.n() == 100


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("swallow", [False, True])
async def test_a_snapshot_is_not_retried_in_a_savepoint(world: World, row: Row, swallow: bool) -> None:
    """A savepoint keeps the snapshot, so 40001 would recur forever. It is raised once, with the reason."""
    calls: list[int] = []

    def work(session: Session) -> None:
        calls.append(1)
        try:
            session.execute(text(f"UPDATE {row.table} SET n = n + 1"))
        except DBAPIError:
            if not swallow:
                raise

    async with connection(world, world.engine(isolation_level="REPEATABLE READ")) as outer:
        await run(world, outer, f"SELECT n FROM {row.table}")
        row.overtake()
        made = factory(world, outer, join_transaction_mode="create_savepoint")
        with pytest.raises(DBAPIError) as caught:
            await transact(world, made, work)
        assert any("savepoint" in note and "retry all of it" in note for note in caught.value.__notes__)
        assert await value(world, outer, f"SELECT n FROM {row.table}") == 0
    assert calls == [1]


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mode", "inside_savepoint", "allowed"),
    [
        ("create_savepoint", False, True),
        ("conditional_savepoint", True, True),
        ("conditional_savepoint", False, False),
        ("rollback_only", True, False),
        ("control_fully", False, False),
    ],
)
async def test_the_open_transaction_of_a_connection_is_never_ended(
    world: World, row: Row, mode: str, inside_savepoint: bool, allowed: bool
) -> None:
    """Nothing runs where a rollback or commit would end a transaction that the caller began."""
    async with connection(world, world.engine()) as outer:
        await run(world, outer, "SELECT 1")
        if inside_savepoint:
            await world.call(outer.begin_nested)
        made = factory(world, outer, join_transaction_mode=mode)
        if allowed:
            assert await transact(world, made, row.add_one) == 1
        else:
            with pytest.raises(TransactionStateError, match="create_savepoint"):
                await transact(world, made, row.add_one)
        assert outer.in_transaction()
        await run(world, outer, "SELECT 1")
    assert row.n() == 0


async def test_a_connection_without_a_transaction_is_as_good_as_an_engine(world: World, row: Row) -> None:
    """On a Connection without a transaction, each attempt begins and commits a transaction."""
    calls: list[int] = []

    def work(session: Session) -> None:
        calls.append(1)
        row.add_one(session)
        if len(calls) == 1:
            raise StaleDataError("x")

    async with connection(world, world.engine()) as outer:
        await transact(world, factory(world, outer), work)
        assert not outer.in_transaction()
    assert row.n() == 1
