"""Transactions that `begin()` opens behind a gate, and what other parts do to a fenced transaction."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from pgfence.errors import StaleFencingTokenError, TransactionStateError
from pgfence.fence import fence
from pgfence.fence._entering import begin_fenced, begin_fenced_async, block_commit, save_checkpoint
from support.fences import get_entered_token, overtake
from support.transactions import factory, run, session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from support.worlds import Contender, World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@pytest.fixture
def ledger(admin: psycopg.Connection[Any]) -> Iterator[str]:
    """A table of amounts with one row of 100, not guarded."""
    table = f"ledger_{secrets.token_hex(6)}"
    admin.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, amount int NOT NULL)")
    admin.execute(f"INSERT INTO {table} VALUES (1, 100)")
    yield table
    admin.execute(f"DROP TABLE {table}")


async def on_sync(world: World, work: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of the sync core with a session or connection of this world."""
    if world.is_async:
        return await world.call(work.run_sync, function, *args)
    return await world.call(function, work, *args)


async def add(who: Contender, work: Any, ledger: str, amount: int) -> None:
    await run(who, work, f"UPDATE {ledger} SET amount = amount + {amount} WHERE id = 1")


def amount(admin: psycopg.Connection[Any], ledger: str) -> int:
    row = admin.execute(f"SELECT amount FROM {ledger} WHERE id = 1").fetchone()
    assert row is not None
    return int(row[0])


async def test_begin_enters_first_yields_and_commits(world: World, name: str, ledger: str, admin: Any) -> None:
    """From a factory and from an engine; a stale token is rejected on entering, and the block does not run."""
    engine = world.engine()
    begin = world.pick(begin_fenced, begin_fenced_async)
    for source in (factory(world, engine), engine):
        async with world.enter(begin(source, {name: 1})) as work:
            await add(world, work, ledger, 1)
    overtake(admin, name, 2)
    with pytest.raises(StaleFencingTokenError):
        async with world.enter(begin(engine, {name: 1})):
            pytest.fail("the block must not run")
    with pytest.raises(RuntimeError, match="mine"):
        async with world.enter(begin(engine, {name: 2})) as work:
            await add(world, work, ledger, 1000)
            raise RuntimeError("mine")
    assert amount(admin, ledger) == 102


async def test_begin_takes_a_factory_and_nothing_else(world: World) -> None:
    """A session is a transaction of the caller's: the message names the other way."""
    begin = world.pick(begin_fenced, begin_fenced_async)
    async with session(world, world.engine()) as work:
        with pytest.raises(TypeError, match=r"held\.fence"):
            begin(work, {"r": 1})
    with pytest.raises(TypeError, match="this context manager is not a decorator"):
        begin(world.engine(), {"r": 1})(len)


async def test_begin_allows_settings_sent_by_a_begin_hook(
    world: World, admin: psycopg.Connection[Any], name: str, ledger: str
) -> None:
    """`begin` opened the transaction itself: what a hook of the application sends there is not a read."""
    engine = world.engine()
    sync = getattr(engine, "sync_engine", engine)
    event.listen(sync, "begin", lambda connection: connection.exec_driver_sql("SET LOCAL work_mem = '4MB'"))
    for opener in (engine, factory(world, engine)):
        async with world.enter(world.pick(begin_fenced, begin_fenced_async)(opener, {name: 1})) as work:
            await run(world, work, f"UPDATE {ledger} SET amount = amount + 1")
    assert amount(admin, ledger) == 102


async def test_a_rejection_by_a_rows_token_blocks_the_commit(world: World, name: str, ledger: str) -> None:
    """A rejection without the gate, by a row's own token, has the same effect."""
    error = StaleFencingTokenError("found by a row", resource=name, token=1, newest=2)
    async with session(world, world.engine()) as work:
        await add(world, work, ledger, 1)
        await on_sync(world, work, block_commit, error)
        with pytest.raises(StaleFencingTokenError, match="found by a row"):
            await world.call(work.commit)


@pytest.mark.every_driver
async def test_a_checkpoint_is_written_behind_the_gate(world: World, name: str, admin: Any) -> None:
    """It is committed with the caller's transaction; a holder that was overtaken writes none."""
    engine = world.engine()
    async with session(world, engine) as work:
        await on_sync(world, work, save_checkpoint, name, 1, '{"page": 7}')
        await world.call(work.rollback)
        await on_sync(world, work, save_checkpoint, name, 1, '{"page": 8}')
        assert await on_sync(world, work, get_entered_token, name) == 1
        await world.call(work.commit)
        overtake(admin, name, 2)
        with pytest.raises(StaleFencingTokenError):
            await on_sync(world, work, save_checkpoint, name, 1, None)
    assert admin.execute("SELECT token, data FROM pgfence_checkpoint WHERE name = %s", (name,)).fetchall() == [
        (1, {"page": 8})
    ]


async def test_a_block_whose_entry_is_rejected_rolls_back(world: World, name: str) -> None:
    """The transaction that a block opened is over when it could not enter: the connection is back in the pool."""
    engine = world.engine(pool_size=1, max_overflow=0)
    begin = world.pick(begin_fenced, begin_fenced_async)
    async with world.enter(begin(engine, {name: 2})):
        pass
    for _ in range(2):
        with pytest.raises(Exception, match="was rejected, because the newest is 2"):
            async with world.enter(begin(engine, {name: 1})):
                pass
    async with world.enter(begin(engine, {name: 2})) as work:
        await run(world, work, "SELECT 1")
        with pytest.raises(TransactionStateError):
            await world.call(fence, work, name + ":2", 1)
