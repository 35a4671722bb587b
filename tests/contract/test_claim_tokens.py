"""`Claimable`: claims that outlive the transaction, expire by the clock of the server, and are checked by their token."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, func, select, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, registry
from sqlmodel import Field, SQLModel

from pgfence import (
    AttemptLostError,
    Claimable,
    LockNotHeldError,
    StandbyError,
    TransactionStateError,
    Versioned,
    claim,
    extend_claim,
    finish_claim,
)
from support.jobs import Base, Job, Jobs, Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.worlds import World

pytestmark = pytest.mark.twins

WORKERS = 16
ROWS = 200


@pytest.fixture
def jobs(world: World) -> Iterator[Jobs]:
    """Sessions of a world, and the tables."""
    here = Jobs(world, pool_size=WORKERS)
    Base.metadata.create_all(here.plain)
    yield here
    Base.metadata.drop_all(here.plain)
    here.plain.dispose()


def add(jobs: Jobs, count: int) -> None:
    jobs.add(count, lambda n: Task(id=n))


def expire(jobs: Jobs, number: int = 1) -> None:
    """Let the claim of a row expire."""
    with jobs.own() as session:
        session.execute(update(Task).where(Task.id == number).values(claimed_until=func.now()))
        session.commit()


def read(jobs: Jobs, number: int = 1) -> Task:
    with jobs.own() as session:
        return session.get_one(Task, number)


async def claim_one(jobs: Jobs, session: Any, **options: Any) -> Task:
    """Claim a row and commit."""
    (task,) = await jobs.claim(session, Task, Task.state == "new", order_by=Task.id, **({"ttl": 60} | options))
    await jobs.world.call(session.commit)
    return task


async def finish(jobs: Jobs, session: Any, task: Task) -> None:
    await jobs.world.call(finish_claim, session, task)
    await jobs.world.call(session.commit)


@pytest.mark.every_driver
async def test_a_claim_outlives_its_transaction(jobs: Jobs) -> None:
    """The next worker gets another row; a finished row is free again, and its token stays."""
    add(jobs, 2)
    async with jobs.world.enter(jobs.session(expire_on_commit=False)) as session:
        task = await claim_one(jobs, session)
        assert task.id == task.claim_token == 1
        assert task.claimed_until is not None
        assert task.claimed_by is not None
        async with jobs.world.enter(jobs.session()) as second:
            assert await jobs.claim_ids(second, Task, limit=9, ttl=60) == [2]
        task.state = "done"
        await finish(jobs, session, task)
        assert (task.claim_token, task.claimed_until, task.claimed_by) == (1, None, None)
    stored = read(jobs)
    assert (stored.state, stored.claim_token, stored.claimed_until, stored.claimed_by) == ("done", 1, None, None)


@pytest.mark.every_driver
async def test_the_claim_expires_by_the_clock_of_the_server(jobs: Jobs) -> None:
    """It ends `ttl` seconds after the claim, and after each extension, as the server measures them."""
    add(jobs, 1)

    def left() -> float:
        with jobs.own() as session:
            found = session.scalar(select(Task.claimed_until - func.clock_timestamp()))
            return found.total_seconds()

    async with jobs.world.enter(jobs.session()) as session:
        task = await claim_one(jobs, session, ttl=100)
        assert 40 < left() <= 100
        for options, seconds in (({"ttl": timedelta(days=2)}, 172_800), ({}, 172_800), ({"ttl": 200}, 200)):
            await jobs.world.call(partial(extend_claim, session, task, **options))
            await jobs.world.call(session.commit)
            assert seconds - 60 < left() <= seconds


@pytest.mark.every_driver
async def test_a_late_owner_cannot_finish(jobs: Jobs) -> None:
    """C115: if another worker has claimed the row, the error names both claims, and the late transaction rolls back."""
    add(jobs, 1)
    async with jobs.world.enter(jobs.session()) as late, jobs.world.enter(jobs.session()) as session:
        first = await claim_one(jobs, late)
        expire(jobs)
        second = await claim_one(jobs, session)
        await jobs.world.call(session.refresh, second)
        assert second.claim_token == 2
        for call in (finish_claim, extend_claim):
            await jobs.world.call(late.refresh, first)
            first.state = "stale"
            await jobs.world.call(late.flush)
            with pytest.raises(AttemptLostError, match="another worker has claimed the row since") as told:
                await jobs.world.call(call, late, first)
            error = told.value
            assert (error.scope, error.key, error.attempt, error.newest) == (Task.__tablename__, "1", 1, 2)
            assert error.sqlstate == "PF005"
            await jobs.world.call(late.commit)
            assert read(jobs).state == "new"
        second.state = "done"
        await finish(jobs, session, second)
    assert (read(jobs).state, read(jobs).claim_token) == ("done", 2)


async def test_a_late_owner_that_is_alone_can_finish(jobs: Jobs) -> None:
    """An expired claim can be finished or extended as long as no other worker has claimed the row."""
    add(jobs, 1)
    async with jobs.world.enter(jobs.session()) as session:
        task = await claim_one(jobs, session)
        expire(jobs)
        await jobs.world.call(extend_claim, session, task)
        await jobs.world.call(session.commit)
        async with jobs.world.enter(jobs.session()) as second:
            assert await jobs.claim_ids(second, Task, ttl=60) == []
        expire(jobs)
        await finish(jobs, session, task)
    assert read(jobs).claimed_until is None


async def test_a_claim_that_was_rolled_back_is_lost(jobs: Jobs) -> None:
    """The next claim may have the same token, and the first owner is still recognized as lost."""
    add(jobs, 1)
    async with jobs.world.enter(jobs.session()) as session, jobs.world.enter(jobs.session()) as second:
        (task,) = await jobs.claim(session, Task, ttl=60)
        await jobs.world.call(session.rollback)
        with pytest.raises(AttemptLostError, match="rolled back"):
            await jobs.world.call(finish_claim, session, task)
        await jobs.world.call(session.rollback)
        other = await claim_one(jobs, second)
        with pytest.raises(AttemptLostError, match="rolled back"):
            await jobs.world.call(finish_claim, session, task)
        await finish(jobs, second, other)


async def test_a_claim_ends_once(jobs: Jobs) -> None:
    """A finished claim, or one of a deleted row, can neither be finished nor extended; a savepoint limits the error."""
    add(jobs, 2)
    async with jobs.world.enter(jobs.session()) as session:
        task = await claim_one(jobs, session)
        await finish(jobs, session, task)
        for call in (finish_claim, extend_claim):
            with pytest.raises(AttemptLostError, match="already been finished"):
                async with jobs.world.enter(session.begin_nested()):
                    await jobs.world.call(call, session, task)
        with jobs.own() as other:
            other.delete(other.get_one(Task, 1))
            other.commit()
        with pytest.raises(AttemptLostError, match="was deleted"):
            async with jobs.world.enter(session.begin_nested()):
                await jobs.world.call(finish_claim, session, task)
        assert await jobs.claim_ids(session, Task, ttl=60) == [2]


async def test_each_row_is_done_once_by_many_workers(jobs: Jobs) -> None:
    """C114: 16 workers commit their claims and work afterwards: every row has one claim, one result, and no owner."""
    add(jobs, ROWS)
    done: list[int] = []

    async def work() -> None:
        who = jobs.world.contender()
        async with who.enter(jobs.session(expire_on_commit=False)) as session:
            while found := await jobs.claim(session, Task, Task.state == "new", limit=4, ttl=60, who=who):
                await who.call(session.commit)
                for task in found:
                    done.append(task.id)
                    task.state = "done"
                    await who.call(finish_claim, session, task)
                await who.call(session.commit)

    await asyncio.gather(*(work() for _ in range(WORKERS)))
    assert sorted(done) == list(range(1, ROWS + 1))
    with jobs.own() as session:
        rows = session.execute(select(Task.state, Task.claim_token, Task.claimed_by).distinct()).all()
    assert rows == [("done", 1, None)]


async def test_another_session_can_finish(jobs: Jobs) -> None:
    """Another session can finish a detached instance. A copy is rejected, and a merge cannot write an older claim."""
    add(jobs, 1)
    async with jobs.world.enter(jobs.session(expire_on_commit=False)) as session:
        task = await claim_one(jobs, session)
    async with jobs.world.enter(jobs.session()) as other:
        with jobs.own() as next_one:
            next_one.execute(update(Task).values(claim_token=2, claimed_by="another"))
            next_one.commit()
        copy = await jobs.world.call(other.merge, task)
        with pytest.raises(LockNotHeldError, match="not a copy"):
            await jobs.world.call(finish_claim, other, copy)
        with pytest.raises(ValueError, match="merged from another instance"):
            await jobs.world.call(other.flush)
        await jobs.world.call(other.rollback)
        with jobs.own() as next_one:
            next_one.execute(update(Task).values(claim_token=1, claimed_by=task.claimed_by))
            next_one.commit()
        await finish(jobs, other, task)
    assert read(jobs).claimed_by is None


@pytest.mark.one_driver
def test_every_kind_of_class_can_be_claimable(jobs: Jobs) -> None:
    """Plain declarative classes, dataclasses and SQLModel; the mixin adds no argument of the constructor."""

    class Plain(DeclarativeBase):
        """Of the class here."""

    class Data(MappedAsDataclass, DeclarativeBase):
        """Of the class here."""

    class Model(SQLModel, registry=registry()):
        """Of the class here."""

    class PlainTask(Claimable, Plain):
        __tablename__ = "plain_task"
        tenant: Mapped[str] = mapped_column(primary_key=True)
        id: Mapped[int] = mapped_column(primary_key=True)

    class DataTask(Claimable, Data):
        __tablename__ = "data_task"
        tenant: Mapped[str] = mapped_column(primary_key=True)
        id: Mapped[int] = mapped_column(primary_key=True)

    class ModelTask(Claimable, Model, table=True):
        __tablename__ = "model_task"
        tenant: str = Field(primary_key=True)
        id: int = Field(primary_key=True)

    for metadata in (Plain.metadata, Data.metadata, Model.metadata):
        metadata.create_all(jobs.plain)
    try:
        for cls in (PlainTask, DataTask, ModelTask):
            with Session(jobs.plain) as session:
                session.add_all([cls(tenant="a", id=n) for n in (1, 2, 3)])
                session.commit()
                found = claim(session, cls, cls.tenant == "a", order_by=cls.id, limit=2, ttl=60)
                assert [(row.id, row.claim_token) for row in found] == [(1, 1), (2, 1)]
                session.commit()
                finish_claim(session, found[0])
                session.commit()
                assert [row.id for row in claim(session, cls, order_by=cls.id, limit=3, ttl=60)] == [1, 3]
    finally:
        for metadata in (Plain.metadata, Data.metadata, Model.metadata):
            metadata.drop_all(jobs.plain)


@pytest.mark.one_driver
def test_a_claim_is_two_statements_and_a_finish_one(jobs: Jobs) -> None:
    """Besides BEGIN and COMMIT, a claim takes two round trips and a finish one, for any number of rows."""
    add(jobs, 3)
    sent: list[str] = []
    event.listen(jobs.engine, "before_cursor_execute", lambda *args: sent.append(args[2].split()[0]))
    with jobs.session(expire_on_commit=False) as session:
        task, *_ = claim(session, Task, Task.state == "new", order_by=Task.id, limit=3, ttl=60)
        session.commit()
        finish_claim(session, task)
        session.commit()
        extend_claim(session, _[0])
        claim(session, Task, Task.state == "none", ttl=60)
    assert sent == ["SELECT", "UPDATE", "UPDATE", "UPDATE", "SELECT"]


@pytest.mark.one_driver
def test_wrong_arguments_of_claims_with_tokens_are_rejected(jobs: Jobs) -> None:
    """Wrong arguments raise an error before anything is sent, which says what to do instead."""

    class Counted(Versioned, Task):
        __version_mode__ = "server"
        __mapper_args__ = {"concrete": True}  # noqa: RUF012
        __tablename__ = "counted"
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str] = mapped_column(default="new")

    with jobs.session() as session:
        for args, ttl, kind, advice in (
            ((Job,), 60, TypeError, "Job has no columns .*: put the mixin Claimable on the class"),
            ((Task,), None, TypeError, "call claim.. with the class itself and ttl="),
            ((select(Task),), None, TypeError, "call claim.. with the class itself and ttl="),
            ((select(Task),), 60, TypeError, "takes a class"),
            ((Counted,), 60, TypeError, "only the mode 'client'"),
            ((Task,), 0, ValueError, "ttl must be from 0.3 s .* even a short pause of the worker"),
            ((Task,), -1, ValueError, "ttl must be 0 or more"),
            ((Task,), 100_000, ValueError, "timedelta"),
            ((Task,), float("inf"), ValueError, "ttl must be"),
            ((Task,), "60", TypeError, "ttl must be seconds"),
        ):
            with pytest.raises(kind, match=advice):
                claim(session, *args, **({} if ttl is None else {"ttl": ttl}))
        for call in (finish_claim, extend_claim):
            with pytest.raises(LockNotHeldError, match="was not returned by claim"):
                call(session, Task(id=1))
            with pytest.raises(TypeError, match="with the mixin Claimable"):
                call(session, Job(id=1))
            with pytest.raises(TypeError, match="takes a Session"):
                call(jobs.engine, Task(id=1))
        assert not session.in_transaction()


@pytest.mark.one_driver
def test_a_claim_cannot_be_finished_in_autocommit(jobs: Jobs) -> None:
    """Autocommit is rejected, because the result of the work would be committed even after the claim is lost."""
    add(jobs, 1)
    with jobs.session() as session:
        (task,) = claim(session, Task, ttl=60)
        session.commit()
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        with pytest.raises(TransactionStateError, match="autocommit"):
            finish_claim(session, task)


@pytest.mark.one_driver
def test_a_read_only_transaction_cannot_write_a_claim(jobs: Jobs) -> None:
    """extend_claim() and finish_claim() raise StandbyError, as claim() does."""
    add(jobs, 1)
    with jobs.session() as session:
        (task,) = claim(session, Task, ttl=60)
        session.commit()
        for write in (extend_claim, finish_claim):
            session.execute(text("SET TRANSACTION READ ONLY"))
            with pytest.raises(StandbyError, match="read-write transaction"):
                write(session, task)
            session.rollback()
