"""Rows read before the lock are read again after it, or the lock is rejected; a routing Session locks where it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import ForeignKey, Update, event, select
from sqlalchemy.exc import MissingGreenlet, StatementError, UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship
from sqlalchemy.sql import Delete

from pgfence.errors import LockTimeoutError, TransactionStateError
from support.transactions import connection, lock, run, session, statements, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.worlds import World

pytestmark = pytest.mark.twins


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]
    entries: Mapped[list[Entry]] = relationship(back_populates="account")


class Entry(Base):
    __tablename__ = "entry"

    id: Mapped[int] = mapped_column(primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    account: Mapped[Account] = relationship(back_populates="entries")


@pytest.fixture
async def engine(world: World) -> AsyncIterator[Any]:
    """An engine on a database with one account that holds 100."""
    made = world.engine()
    async with connection(world, made) as work:
        for call in (Base.metadata.drop_all, Base.metadata.create_all):
            await world.call(*((work.run_sync, call) if world.is_async else (call, work)))
        await run(world, work, "INSERT INTO account VALUES (1, 100)")
        await world.call(work.commit)
    yield made
    async with connection(world, made) as work:
        await world.call(
            *((work.run_sync, Base.metadata.drop_all) if world.is_async else (Base.metadata.drop_all, work))
        )
        await world.call(work.commit)


async def deposit_elsewhere(world: World, engine: Any, amount: int = 50) -> None:
    async with connection(world, engine) as other:
        await run(world, other, "UPDATE account SET balance = balance + :n", n=amount)
        await world.call(other.commit)


async def balance(world: World, engine: Any) -> int:
    async with connection(world, engine) as other:
        return await value(world, other, "SELECT balance FROM account")


async def load(world: World, work: Any) -> Account:
    return await world.call(work.get, Account, 1)


# ---------------------------------------------------------------- freshness


@pytest.mark.matrix
@pytest.mark.parametrize("expire", [True, False])
async def test_an_instance_loaded_before_the_lock_is_read_again(
    world: World, engine: Any, name: str, expire: bool
) -> None:
    """100 + 50 in another session + 1 is 151; with expire=False the update is lost, and the result is 101."""
    async with session(world, engine) as work:
        account = await load(world, work)
        await deposit_elsewhere(world, engine)
        await world.call(lock(work, name, expire=expire).acquire)
        if expire:
            await world.call(work.refresh, account)
        account.balance += 1
        await world.call(work.commit)
    assert await balance(world, engine) == (151 if expire else 101)


async def test_an_expired_instance_loads_on_access_in_a_sync_session(world: World, engine: Any, name: str) -> None:
    """A sync session needs no refresh(). In an async session, access to an expired attribute raises an error."""
    async with session(world, engine, expire_on_commit=False) as work:
        account = await load(world, work)
        await world.call(work.commit)
        await deposit_elsewhere(world, engine)
        await world.call(lock(work, name).acquire)
        if world.is_async:
            with pytest.raises((MissingGreenlet, StatementError), match="greenlet_spawn"):
                _ = account.balance
        else:
            assert await world.call(lambda: account.balance) == 150


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["try_acquire", "acquire"])
async def test_unflushed_changes_refuse_the_lock_before_the_server_is_asked(
    world: World, engine: Any, name: str, way: str
) -> None:
    """Changes that are based on reads before the lock raise an error, before anything is sent or flushed."""
    async with session(world, engine) as work:
        account = await load(world, work)
        account.balance += 1
        with statements(engine) as sent, pytest.raises(TransactionStateError, match="Account"):
            await world.call(getattr(lock(work, name), way))
        assert sent == []
        assert account in work.dirty
        await world.call(lock(work, name, expire=False).acquire)
        assert account in work.dirty


async def test_a_pending_delete_rejects_the_lock(world: World, engine: Any, name: str) -> None:
    """A pending delete of a row that was read before the lock raises an error too."""
    async with session(world, engine) as work:
        account = await load(world, work)
        await world.call(work.delete, account)
        with pytest.raises(TransactionStateError, match="Account"):
            await world.call(lock(work, name).acquire)


async def test_an_assignment_that_changes_nothing_rejects_nothing(world: World, engine: Any, name: str) -> None:
    """Only changes that a flush would write reject the lock."""
    async with session(world, engine) as work:
        account = await load(world, work)
        account.balance = 100
        await world.call(lock(work, name).acquire)
        assert await world.call(lock(work, name).is_held)
        assert account not in work.dirty


async def test_new_instances_are_left_alone_and_nothing_is_flushed(world: World, engine: Any, name: str) -> None:
    """New instances keep their values and are written by the next flush, after the lock."""
    async with session(world, engine) as work:
        fresh = Account(id=2, balance=7)
        work.add(fresh)
        with statements(engine) as sent:
            await world.call(lock(work, name).acquire)
        assert [statement.split()[0] for statement in sent] == ["SELECT"]
        assert fresh in work.new and fresh.balance == 7
        await world.call(work.commit)
        assert await value(world, work, "SELECT balance FROM account WHERE id = 2") == 7


async def test_what_is_flushed_may_be_locked_after(world: World, engine: Any, name: str) -> None:
    """By flush() the caller asserts that a change is right: PostgreSQL locks its row, and it is read again."""
    async with session(world, engine) as work:
        account = await load(world, work)
        account.balance += 1
        await world.call(work.flush)
        await world.call(lock(work, name).acquire)
        await world.call(work.refresh, account)
        assert account.balance == 101


async def test_a_loaded_collection_is_read_again(world: World, engine: Any, name: str) -> None:
    """Relationships are refreshed too, not only columns."""
    async with session(world, engine) as work:
        account = await load(world, work)
        await world.call(work.refresh, account, ["entries"])
        async with connection(world, engine) as other:
            await run(world, other, "INSERT INTO entry VALUES (1, 1)")
            await world.call(other.commit)
        await world.call(lock(work, name).acquire)
        await world.call(work.refresh, account, ["entries"])
        assert [entry.id for entry in account.entries] == [1]


async def test_the_same_lock_again_neither_expires_nor_rejects(world: World, engine: Any, name: str) -> None:
    """A nested service that takes the lock it runs under finds what was loaded and changed under it as it is."""
    async with session(world, engine) as work:
        await world.call(lock(work, name).acquire)
        account = await load(world, work)
        account.balance += 1
        await world.call(lock(work, name).acquire)
        assert account.balance == 101
        await world.call(work.commit)
    assert await balance(world, engine) == 101


async def test_a_rejected_lock_expires_nothing(world: World, engine: Any, name: str) -> None:
    """A try that returns False and a timeout change nothing in the session."""
    async with session(world, engine) as work, connection(world, engine) as holder:
        await world.call(lock(holder, name).acquire)
        account = await load(world, work)
        assert await world.call(lock(work, name).try_acquire) is False
        with pytest.raises(LockTimeoutError):
            await world.call(lock(work, name).acquire, timeout=0.02)
        with statements(engine) as sent:
            assert account.balance == 100
        assert sent == []


async def test_what_the_holder_committed_is_read_after_a_wait(world: World, engine: Any, name: str) -> None:
    """C016: under READ COMMITTED the first read after the grant sees the last holder's commit."""
    import asyncio

    holder, waiter = world.other(), world.other()
    async with connection(world, engine, holder) as first, session(world, engine, waiter) as work:
        await holder.call(lock(first, name).acquire)
        waiting = asyncio.create_task(waiter.call(lock(work, name).acquire, timeout=10))
        await run(holder, first, "UPDATE account SET balance = 77")
        await holder.call(first.commit)
        await waiting
        assert await value(waiter, work, "SELECT balance FROM account") == 77


# ---------------------------------------------------------------- the snapshot


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("names", [1, 2, 20])
async def test_a_snapshot_older_than_the_lock_is_rejected(
    world: World, name: str, level: str, names: int, advisory_rows: Any
) -> None:
    """C016: nothing is acquired before the rejection, the transaction stays usable, and stale_snapshot_ok skips the check."""
    engine = world.engine(isolation_level=level)
    wanted = [f"{name}:{n}" for n in range(names)]
    async with session(world, engine) as work:
        for first in (True, False):
            for call in (lock(work, *wanted).try_acquire, lock(work, *wanted).acquire):
                with pytest.raises(TransactionStateError, match="snapshot"):
                    await world.call(call)
                assert advisory_rows() == []
            assert await value(world, work, "SELECT 1") == 1, first
        assert await world.call(lock(work, *wanted, stale_snapshot_ok=True).try_acquire)
        assert len(advisory_rows()) == names


# ---------------------------------------------------------------- routing


def routed(world: World, base: type[Session], primary: Any, replica: Any) -> Any:
    """Return a session whose `get_bind` chooses between two engines."""
    primary, replica = (getattr(one, "sync_engine", one) for one in (primary, replica))
    kind = type("Routed", (base,), {"primary": primary, "replica": replica})
    return AsyncSession(sync_session_class=kind) if world.is_async else kind()


class ByFlush(Session):
    """The recipe of SQLAlchemy's documentation: what is flushed or changes rows goes to the primary, the rest does not."""

    def get_bind(self, mapper: Any = None, clause: Any = None, **kwargs: Any) -> Any:
        return self.primary if self._flushing or isinstance(clause, (Update, Delete)) else self.replica


class ByForUpdate(Session):
    """Plain SELECTs go to a replica."""

    def get_bind(self, mapper: Any = None, clause: Any = None, **kwargs: Any) -> Any:
        reads = clause is not None and clause.is_select and clause._for_update_arg is None
        return self.replica if reads else self.primary


class ByArgument(Session):
    """The caller names the engine with bind_arguments."""

    def get_bind(self, mapper: Any = None, clause: Any = None, where: str = "replica", **kwargs: Any) -> Any:
        return getattr(self, where)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("base", "bind_arguments"),
    [(ByFlush, None), (ByForUpdate, None), (ByFlush, {"mapper": Account}), (ByArgument, {"where": "primary"})],
    ids=["by flush", "by for update", "by flush with a mapper", "by argument"],
)
async def test_a_routing_session_locks_on_the_primary(
    world: World, name: str, base: type[Session], bind_arguments: Any
) -> None:
    """C046: a Session that sends reads to a replica acquires and queries the lock on the primary."""
    primary, replica = world.engine(), world.engine()
    work = routed(world, base, primary, replica)
    try:
        with statements(primary) as there, statements(replica) as elsewhere:
            mine = lock(work, name, bind_arguments=bind_arguments)
            await world.call(mine.acquire)
            assert await world.call(mine.is_held)
            assert len(await world.call(mine.holders)) == 1
        assert len(there) == 3 and elsewhere == []
        if base is ByFlush:
            await world.call(work.execute, select(1))
            assert await world.call(lock(work, name).is_held)
    finally:
        await world.call(work.close)


async def test_a_session_with_an_engine_per_class_says_what_it_needs(world: World, name: str) -> None:
    """Without a default engine a lock cannot know which one is meant: the note names bind_arguments."""
    work = world.pick(Session, AsyncSession)(binds={Account: world.engine()})
    with pytest.raises(UnboundExecutionError) as caught:
        await world.call(lock(work, name).acquire)
    assert "bind_arguments={'mapper'" in caught.value.__notes__[0]
    await world.call(lock(work, name, bind_arguments={"mapper": Account}).acquire)
    await world.call(work.close)


async def test_the_lock_does_not_disturb_the_sessions_events(world: World, engine: Any, name: str) -> None:
    """A lock is not an ORM statement: do_orm_execute and flush events of the application do not see it."""
    heard: list[str] = []
    async with session(world, engine) as work:
        sync = getattr(work, "sync_session", work)
        for one in ("do_orm_execute", "before_flush"):
            event.listen(sync, one, lambda *_: heard.append("heard"))
        await world.call(lock(work, name).acquire)
    assert heard == []
