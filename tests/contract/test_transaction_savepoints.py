"""Rolling back to a savepoint releases the locks acquired since; the next request notices that."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from sqlalchemy.event import registry

from pgfence.errors import LockTimeoutError, TransactionStateError
from support.transactions import connection, lock, run, session, statements, value

if TYPE_CHECKING:
    from support.worlds import World


@pytest.fixture
async def engine(world: World) -> Any:
    return world.engine()


async def begin_nested(world: World, work: Any) -> Any:
    nested = work.begin_nested()
    return await world.call(nested.start) if world.is_async else nested


async def cost(world: World, engine: Any, work: Any, *names: str) -> int:
    """Acquire the lock and return the number of statements that were sent."""
    with statements(engine) as sent:
        await world.call(lock(work, *names).acquire, timeout=0)
    return len(sent)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["connection", "session"])
async def test_a_rolled_back_savepoint_that_took_the_lock_is_noticed(
    world: World, engine: Any, name: str, kind: str
) -> None:
    """C017: after the nested block is rolled back another transaction gets the lock, and asking again excludes us."""
    opener = connection if kind == "connection" else session
    async with opener(world, engine) as work, connection(world, engine) as other:
        await run(world, work, "SELECT 1")
        nested = await begin_nested(world, work)
        await world.call(lock(work, name).acquire)
        await world.call(nested.rollback)
        assert await world.call(lock(other, name).try_acquire) is True
        assert await world.call(lock(work, name).try_acquire) is False
        with pytest.raises(LockTimeoutError):
            await world.call(lock(work, name).acquire, timeout=0.02)
        await world.call(other.rollback)
        assert await cost(world, engine, work, name) == 1
        assert await world.call(lock(other, name).try_acquire) is False


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["connection", "session"])
async def test_a_lock_that_the_savepoint_did_not_take_stays_free_of_cost(
    world: World, engine: Any, name: str, kind: str
) -> None:
    """C017: locks older than the savepoint, and those of a released savepoint, are still held after its rollback."""
    opener = connection if kind == "connection" else session
    async with opener(world, engine) as work, connection(world, engine) as other:
        await world.call(lock(work, name).acquire)
        for end in ("rollback", "commit"):
            nested = await begin_nested(world, work)
            await world.call(lock(work, f"{name}:{end}").acquire)
            await world.call(getattr(nested, end))
        assert await cost(world, engine, work, name) == 0
        assert await cost(world, engine, work, f"{name}:commit") == 0
        assert await cost(world, engine, work, f"{name}:rollback") == 1
        for one in (name, f"{name}:commit", f"{name}:rollback"):
            assert await world.call(lock(other, one).try_acquire) is False


async def test_a_wait_inside_a_savepoint_falls_with_it(world: World, engine: Any, name: str) -> None:
    """C017: the savepoints of our own wait do not confuse the record of the user's."""
    async with connection(world, engine) as work, connection(world, engine) as other:
        await run(world, work, "SELECT 1")
        nested = await begin_nested(world, work)
        await world.call(lock(work, name, name + ":2").acquire)
        await world.call(lock(other, name + ":3").acquire)
        with pytest.raises(LockTimeoutError):
            await world.call(lock(work, name + ":3").acquire, timeout=0.02)
        assert await cost(world, engine, work, name, name + ":2") == 0
        await world.call(nested.rollback)
        assert await world.call(lock(other, name, name + ":2").try_acquire) is True
        assert await world.call(lock(work, name).try_acquire) is False


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("before", "after", "asked"),
    [
        (["SAVEPOINT a"], ["ROLLBACK TO a"], 1),
        (["savepoint a"], ["rollback work to savepoint A"], 1),
        (['SAVEPOINT "a"'], ['ROLLBACK TO SAVEPOINT "a"'], 1),
        (["SAVEPOINT a"], ["RELEASE a"], 0),
        (["SAVEPOINT a"], ["SAVEPOINT b", "ROLLBACK TO b"], 0),
        (["SAVEPOINT a"], ["SAVEPOINT a", "ROLLBACK TO a"], 0),
        (["SAVEPOINT a"], ["SAVEPOINT a", "RELEASE a", "ROLLBACK TO a"], 1),
        (["SAVEPOINT a"], ["SAVEPOINT b", "ROLLBACK TO a"], 1),
        (["SAVEPOINT a"], ["/* why */ ROLLBACK TO a"], 1),
        (["SAVEPOINT a"], ["ROLLBACK TO a -- why"], 1),
        ([], ["SELECT 'a'"], 0),
    ],
    ids=lambda value: "; ".join(value) if isinstance(value, list) else "",
)
async def test_savepoints_in_plain_text_are_noticed(
    world: World, engine: Any, name: str, before: list[str], after: list[str], asked: int
) -> None:
    """C017: the record follows what the server does, also for savepoints that SQLAlchemy knows nothing of."""
    async with connection(world, engine) as work, connection(world, engine) as other:
        await run(world, work, "SELECT 1")
        for statement in before:
            await run(world, work, statement)
        await world.call(lock(work, name).acquire)
        for statement in after:
            await run(world, work, statement)
        assert await cost(world, engine, work, name) == asked
        assert await world.call(lock(other, name).try_acquire) is False


@pytest.mark.twins
async def test_a_savepoint_in_a_statement_without_parameters_is_noticed(world: World, engine: Any, name: str) -> None:
    """C017: with the option `no_parameters`, SQLAlchemy calls another event, and the savepoint is still noticed."""
    async with connection(world, engine) as work, connection(world, engine) as other:
        await run(world, work, "SAVEPOINT a")
        await world.call(lock(work, name).acquire)
        await world.call(work.exec_driver_sql, "ROLLBACK TO a", execution_options={"no_parameters": True})
        assert await world.call(lock(other, name).try_acquire) is True
        assert await world.call(lock(work, name).try_acquire) is False


@pytest.mark.matrix
@pytest.mark.parametrize("end", ["ROLLBACK", "COMMIT", "end", "/* why */ abort"])
async def test_an_end_in_plain_text_is_noticed(world: World, engine: Any, name: str, end: str) -> None:
    """C014: the lock is requested again; if the driver continues without a transaction, that is an error and not a grant."""
    async with connection(world, engine) as work, connection(world, engine) as other:
        await run(world, work, "SELECT 1")
        await world.call(lock(work, name).acquire)
        await run(world, work, end)
        if world.name in ("psycopg", "psycopg_async"):
            assert await cost(world, engine, work, name) == 1
            assert await world.call(lock(other, name).try_acquire) is False
        else:
            with pytest.raises(TransactionStateError, match="the server has no open transaction"):
                await world.call(lock(work, name).acquire)


@pytest.mark.matrix
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_an_end_past_sqlalchemy_is_noticed(world: World, engine: Any, name: str, end: str) -> None:
    """C014: when the driver's own connection ended the transaction, the lock is asked for again."""
    async with connection(world, engine) as work, connection(world, engine) as other:
        await world.call(lock(work, name).acquire)

        def past(sync: Any) -> None:
            getattr(sync.connection.dbapi_connection, end)()

        await world.call(*((work.run_sync, past) if world.is_async else (past, work)))
        assert await world.call(lock(other, name).try_acquire) is True
        assert await world.call(lock(work, name).try_acquire) is False
        await world.call(other.rollback)
        assert await cost(world, engine, work, name) == 1


@pytest.mark.twins
async def test_a_savepoint_older_than_the_first_lock_is_noticed(world: World, engine: Any, name: str) -> None:
    """C017: the record begins with the first lock, and a savepoint set before it takes that lock away."""
    async with connection(world, engine) as work, connection(world, engine) as other:
        await run(world, work, "SAVEPOINT old")
        await world.call(lock(work, name).acquire)
        await run(world, work, "ROLLBACK TO old")
        assert await world.call(lock(other, name).try_acquire) is True


@pytest.mark.twins
async def test_sessions_isolated_by_rollback_keep_their_locks(world: World, engine: Any, name: str) -> None:
    """A test suite that wraps sessions in one outer transaction: the lock is one transaction's, and free to take again."""
    async with connection(world, engine) as outer, connection(world, engine) as other:
        await world.call(outer.begin)
        async with session(world, outer, join_transaction_mode="create_savepoint") as work:
            await world.call(lock(work, name).acquire)
            await world.call(work.commit)
        async with session(world, outer, join_transaction_mode="create_savepoint") as work:
            await world.call(work.connection)
            assert await cost(world, engine, work, name) == 0
            await world.call(lock(work, name + ":2").acquire)
            await world.call(work.rollback)
        assert await world.call(lock(other, name).try_acquire) is False
        assert await world.call(lock(other, name + ":2").try_acquire) is True
        await world.call(outer.rollback)
        assert await world.call(lock(other, name).try_acquire) is True


@pytest.mark.twins
async def test_a_failed_block_does_not_leave_a_forbidden_upgrade(world: World, engine: Any, name: str) -> None:
    """After a rollback has released a shared lock, the exclusive lock can be acquired."""
    async with connection(world, engine) as work:
        await run(world, work, "SELECT 1")
        nested = await begin_nested(world, work)
        await world.call(lock(work, name, shared=True).acquire)
        with pytest.raises(TransactionStateError):
            await world.call(lock(work, name).acquire)
        await world.call(nested.rollback)
        await world.call(lock(work, name).acquire)


# ---------------------------------------------------------------- hooks of the user


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("when", ["begin", "first statement"])
async def test_settings_of_a_hook_survive_a_failed_request(world: World, name: str, when: str) -> None:
    """SET LOCAL of a hook at the begin or before the first statement survives when several names are released."""
    engine = world.engine()
    sync = getattr(engine, "sync_engine", engine)

    def set_tenant(connection: Any, *_: Any) -> Any:
        if "tenant" not in connection.info:
            connection.info["tenant"] = "set"
            connection.exec_driver_sql("SET LOCAL application_name = 'tenant'")

    async with connection(world, engine) as holder, connection(world, engine) as work:
        await world.call(lock(holder, name).acquire)
        event.listen(sync, "begin" if when == "begin" else "before_cursor_execute", set_tenant)
        for timeout in (0, 0.02):
            with pytest.raises(LockTimeoutError):
                await world.call(lock(work, name, "a" + name, "b" + name, "c" + name).acquire, timeout=timeout)
        assert await value(world, work, "SHOW application_name") == "tenant"
        assert len(await world.call(lock(holder, name, "a" + name, "b" + name, "c" + name).holders)) == 1
        event.remove(sync, "begin" if when == "begin" else "before_cursor_execute", set_tenant)


@pytest.mark.twins
async def test_hooks_cost_several_names_a_savepoint(world: World, engine: Any, name: str) -> None:
    """A hook may have sent a statement first, so the transaction cannot be restarted: three statements for several names."""
    sync = getattr(engine, "sync_engine", engine)

    def hook(*_: Any) -> None:
        pass

    async with connection(world, engine) as work:
        for kind, kinds in (("after", ["SELECT"]), ("before", ["SAVEPOINT", "SELECT", "RELEASE"])):
            event.listen(sync, f"{kind}_cursor_execute", hook)
            with statements(engine) as sent:
                await world.call(lock(work, name, name + ":2").acquire)
            assert [statement.split()[0] for statement in sent] == kinds
            event.remove(sync, f"{kind}_cursor_execute", hook)
            await world.call(work.rollback)


@pytest.mark.twins
async def test_many_transactions_leave_no_trace(world: World, name: str) -> None:
    """The record of a transaction is freed with its Connection; nothing grows."""
    engine = world.engine()

    async def some(count: int) -> int:
        for _ in range(count):
            async with connection(world, engine) as work:
                await world.call(lock(work, name, name + ":2").acquire)
        gc.collect()
        return len(registry._key_to_collection)

    before = await some(5)
    assert await some(100) <= before
