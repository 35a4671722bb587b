"""`claim` in the caller's transaction gives each row to one worker, and at most `limit` rows, without waiting."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, delete, event, func, select, text, update
from sqlalchemy.orm import Session, aliased, joinedload, selectinload, subqueryload

from pgfence import StandbyError, TransactionStateError, claim
from support.jobs import Base, Customer, Job, Jobs, Mail, Tag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.worlds import World

pytestmark = pytest.mark.twins

WORKERS = 16
ROWS = 320


@pytest.fixture
def jobs(world: World) -> Iterator[Jobs]:
    """Sessions of a world, and the tables."""
    here = Jobs(world, pool_size=WORKERS)
    Base.metadata.create_all(here.plain)
    yield here
    Base.metadata.drop_all(here.plain)
    here.plain.dispose()


def tagged(number: int) -> Job:
    return Job(id=number, customer=Customer(id=number), tags=[Tag(), Tag()])


@pytest.mark.every_driver
async def test_workers_claim_different_rows_in_order(jobs: Jobs) -> None:
    """Three workers claim the first, the next and the remaining rows without waiting, and a rollback frees them."""
    jobs.add(7)
    async with jobs.world.enter(jobs.session()) as first, jobs.world.enter(jobs.session()) as second:
        assert await jobs.claim_ids(first, Job, Job.state == "new", order_by=Job.id, limit=3) == [1, 2, 3]
        assert await jobs.claim_ids(second, Job, Job.state == "new", order_by=Job.id.desc(), limit=2) == [7, 6]
        async with jobs.world.enter(jobs.session()) as third:
            assert await jobs.claim_ids(third, select(Job).order_by(Job.id), limit=9) == [4, 5]
            assert await jobs.claim_ids(second, Job, Job.id < 6) == []
        await jobs.world.call(first.rollback)
        assert await jobs.claim_ids(second, Job, order_by=[Job.state, Job.id], limit=2) == [1, 2]


@pytest.mark.every_driver
async def test_each_row_is_processed_once_by_many_workers(jobs: Jobs) -> None:
    """C111: 16 workers claim three rows at a time through a join; every row is claimed exactly once."""
    jobs.add(ROWS, lambda n: Job(id=n, customer=Customer(id=n)))
    done: list[int] = []
    most = 0
    query = select(Job).join(Job.customer).where(Job.state == "new", Customer.vip).order_by(Job.id)

    async def work() -> None:
        nonlocal most
        who = jobs.world.contender()
        while True:
            async with who.enter(jobs.session()) as session:
                found = await jobs.claim(session, query, limit=3, who=who)
                if not found:
                    return
                most = max(most, len(found))
                done.extend(job.id for job in found)
                for job in found:
                    job.state = "done"
                await who.call(session.commit)

    for _ in range(3):  # a worker ends when all remaining rows are claimed, and those may be returned
        await asyncio.gather(*(work() for _ in range(WORKERS)))
    assert sorted(done) == list(range(1, ROWS + 1))
    assert most == 3
    assert jobs.count(Job.state == "done") == ROWS


async def test_exactly_the_returned_rows_are_locked(jobs: Jobs, admin: Any) -> None:
    """C111: rows that are not returned are free for other workers, even if the planner uses a nested loop."""
    jobs.add(50, tagged)
    async with jobs.world.enter(jobs.session()) as session:
        for setting in ("hashjoin", "mergejoin", "sort", "material"):
            await jobs.world.call(session.execute, text(f"SET LOCAL enable_{setting} = off"))
        query = select(Job).where(Job.tags.any()).join(Job.customer).where(Customer.vip)
        found = await jobs.claim_ids(session, query.order_by(Job.id), limit=1)
        free = select(Job.id).with_for_update(skip_locked=True)
        with jobs.own() as other:
            assert sorted(set(range(1, 51)) - set(other.scalars(free))) == found == [1]


async def test_only_the_claimed_table_is_locked(jobs: Jobs) -> None:
    """C112: other transactions can write and lock the customer's row that the join reads."""
    jobs.add(2, tagged)
    async with jobs.world.enter(jobs.session()) as session:
        assert await jobs.claim_ids(session, select(Job).join(Job.customer).order_by(Job.id), limit=1) == [1]
        with jobs.own() as other:
            other.execute(update(Customer).values(vip=False))
            other.commit()


async def test_a_row_that_refers_to_a_claimed_one_can_be_inserted(jobs: Jobs) -> None:
    """The foreign key's check does not wait for the claim. A DELETE does, and so does a second claim's UPDATE."""
    jobs.add(1)
    async with jobs.world.enter(jobs.session()) as session:
        assert await jobs.claim_ids(session, Job) == [1]
        with jobs.own() as other:
            other.add(Tag(job_id=1))
            other.commit()
            for statement in (update(Job).values(state="b"), delete(Job)):
                with pytest.raises(Exception, match="lock timeout"):
                    other.execute(statement)
                other.rollback()


async def test_all_tables_of_a_subclass_are_locked(jobs: Jobs) -> None:
    """C112: with joined inheritance, a claim of a subclass locks both rows, and a claim of the base class locks its own."""
    jobs.add(3, lambda n: Mail(id=n, address=f"{n}@example.org"))
    async with jobs.world.enter(jobs.session()) as session, jobs.world.enter(jobs.session()) as second:
        (mail,) = await jobs.claim(session, Mail, Mail.address == "2@example.org")
        assert (type(mail), mail.id, mail.address) == (Mail, 2, "2@example.org")
        assert await jobs.claim_ids(second, Job, order_by=Job.id, limit=2) == [1, 3]
        free = select(Mail.__table__.c.id).with_for_update(skip_locked=True)
        with jobs.own() as other:
            assert set(other.scalars(free)) == {1, 3}


@pytest.mark.every_driver
async def test_relationships_are_usable(jobs: Jobs) -> None:
    """C112: collections that are loaded by a join, a second SELECT or a subquery are complete and do not count against the limit."""
    jobs.add(5, tagged)
    for way in (joinedload, selectinload, subqueryload):
        async with jobs.world.enter(jobs.session()) as session, jobs.world.enter(jobs.session()) as second:
            query = select(Job).options(way(Job.tags), joinedload(Job.customer)).order_by(Job.id)
            found = await jobs.claim(session, query, limit=2)
            assert [(job.id, len(job.tags), job.customer.id) for job in found] == [(1, 2, 1), (2, 2, 2)]
            assert await jobs.claim_ids(second, Job, order_by=Job.id, limit=9) == [3, 4, 5]


async def test_rows_in_the_session_are_read_again(jobs: Jobs) -> None:
    """An instance that was loaded before another worker changed its row has the row's present values after the claim."""
    jobs.add(1, tagged)
    async with jobs.world.enter(jobs.session()) as session:
        query = select(Job).options(selectinload(Job.tags))
        (known,) = (await jobs.world.call(session.scalars, query)).all()
        with jobs.own() as other:
            other.get_one(Job, 1).state = "again"
            other.execute(delete(Tag).where(Tag.id == known.tags[0].id))
            other.commit()
        assert await jobs.claim(session, query.where(Job.state == "again")) == [known]
        assert (known.state, len(known.tags)) == ("again", 1)


async def test_pending_changes_are_flushed_first(jobs: Jobs) -> None:
    """With autoflush they are flushed. Without it the claim is rejected, because reading the rows would lose them."""
    jobs.add(2)
    async with jobs.world.enter(jobs.session()) as session:
        (job,) = await jobs.claim(session, Job, order_by=Job.id)
        job.state = "done"
        assert await jobs.claim_ids(session, Job, Job.state == "new", limit=9) == [2]
        (session.sync_session if jobs.world.is_async else session).autoflush = False
        job.state = "failed"
        with pytest.raises(TransactionStateError, match=r"unflushed changes \(Job\).*flush\(\)"):
            await jobs.claim(session, Job)
        assert job.state == "failed"
        await jobs.world.call(session.commit)
    assert jobs.count(Job.state == "failed") == 1


@pytest.mark.every_driver
async def test_autocommit_is_rejected(jobs: Jobs) -> None:
    """C114: autocommit is rejected, because the rows would be free again before the caller sees them."""
    jobs.add(1)
    async with jobs.world.enter(jobs.session()) as session:
        await jobs.world.call(session.connection, execution_options={"isolation_level": "AUTOCOMMIT"})
        with pytest.raises(TransactionStateError, match="autocommit"):
            await jobs.claim(session, Job)


@pytest.mark.every_driver
async def test_a_read_only_transaction_is_reported(jobs: Jobs) -> None:
    """PostgreSQL locks no rows in a read-only transaction; the error says where to claim."""
    async with jobs.world.enter(jobs.session()) as session:
        await jobs.world.call(session.execute, text("SET TRANSACTION READ ONLY"))
        with pytest.raises(StandbyError, match="only on the primary"):
            await jobs.claim(session, Job)


@pytest.mark.one_driver
def test_a_session_that_routes_reads_claims_on_the_primary(jobs: Jobs) -> None:
    """A Session that routes reads to a standby claims on the engine to which a flush would write the rows."""
    jobs.add(1)

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, bind: Any = None, **_: Any) -> Any:
            writes = self._flushing or clause is None or clause.is_dml
            return bind or (jobs.plain if writes else elsewhere)

    elsewhere = create_engine("postgresql+psycopg://nowhere.invalid/")
    with Routing() as session:
        assert [job.id for job in claim(session, Job)] == [1]


@pytest.mark.one_driver
def test_a_claim_is_one_statement(jobs: Jobs) -> None:
    """A claim takes one round trip, besides BEGIN."""
    jobs.add(3)
    sent: list[str] = []
    event.listen(jobs.engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
    with jobs.session() as session:
        claim(session, Job, Job.state == "new", order_by=Job.id, limit=2)
    (only,) = sent
    assert only.endswith(f"FOR NO KEY UPDATE OF {Job.__tablename__} SKIP LOCKED")


@pytest.mark.one_driver
def test_a_kept_select_can_be_claimed_with_another_limit(jobs: Jobs) -> None:
    """The statement is prepared once for each select(), and for each class and order; each call has its own limit."""
    jobs.add(5, lambda n: Job(id=n, state=f"{9 - n}"))
    kept = select(Job).order_by(Job.id)
    with jobs.session() as session, jobs.session() as second:
        assert [job.id for job in claim(session, kept, limit=1)] == [1]
        assert [job.id for job in claim(session, kept, limit=3)] == [1, 2, 3]
        assert [job.id for job in claim(second, kept)] == [4]
        session.rollback()
        assert [job.id for job in claim(session, Job, order_by=Job.id, limit=2)] == [1, 2]
        assert [job.id for job in claim(session, Job, order_by=Job.state, limit=2)] == [5, 3]
        assert [job.id for job in claim(session, Job, Job.id > 1, order_by=Job.id)] == [2]


@pytest.mark.one_driver
def test_a_select_that_the_caller_drops_is_freed(jobs: Jobs) -> None:
    """A worker that creates a select() for each call does not keep them in memory."""
    dropped = select(Job).order_by(Job.id)
    seen = weakref.ref(dropped)
    with jobs.session() as session:
        claim(session, dropped)
    del dropped
    gc.collect()
    assert seen() is None


# ------------------------------------------------------------ bad input

OF_ONE_CLASS = "select(Job), without columns"
WRONG_STATEMENTS = [
    (select(Job.id), TypeError, OF_ONE_CLASS),
    (select(Job, Customer), TypeError, OF_ONE_CLASS),
    (select(aliased(Job)), TypeError, OF_ONE_CLASS),
    (select(func.count()), TypeError, OF_ONE_CLASS),
    (select(Job.__table__), TypeError, OF_ONE_CLASS),
    (select(), TypeError, OF_ONE_CLASS),
    (select(Job).union(select(Job)), TypeError, "UNION"),
    (select(Job).from_statement(text("SELECT 1")), TypeError, "cannot add its lock and LIMIT to text()"),
    (text("SELECT 1"), TypeError, "cannot add its lock and LIMIT to text()"),
    (Job.__table__, TypeError, "not Table"),
    (aliased(Job), TypeError, "takes a mapped class or a select"),
    (Job(), TypeError, "not Job"),
    (str, TypeError, "not <class 'str'>"),
    (select(Job).limit(1), ValueError, "pass limit="),
    (select(Job).fetch(1), ValueError, "pass limit="),
    (select(Job).offset(1), ValueError, "OFFSET"),
    (select(Job).with_for_update(), ValueError, "FOR UPDATE"),
    (select(Job).group_by(Job.id), ValueError, "GROUP BY"),
    (select(Job).having(func.count() > 1), ValueError, "HAVING"),
    (select(Job).distinct(), ValueError, "DISTINCT"),
]


@pytest.mark.one_driver
def test_statements_that_cannot_be_claimed_are_rejected(jobs: Jobs) -> None:
    """Statements that cannot be claimed raise an error before anything is sent, which says what to do instead."""
    with jobs.session() as session:
        for wrong, kind, advice in WRONG_STATEMENTS:
            with pytest.raises(kind) as told:
                claim(session, wrong)
            assert advice in str(told.value), f"{wrong}: {told.value}"
        assert not session.in_transaction()


@pytest.mark.one_driver
def test_wrong_arguments_are_rejected(jobs: Jobs) -> None:
    """Unusable limits, criteria and sessions raise an error before anything is sent."""
    with jobs.session() as session:
        for limit, kind in (
            (0, ValueError),
            (-1, ValueError),
            (10_001, ValueError),
            ("3", TypeError),
            (True, TypeError),
        ):
            with pytest.raises(kind, match="limit must be"):
                claim(session, Job, limit=limit)
        for criterion, advice in (("state = 'new'", "is the str"), (Job.customer is None, "evaluated by Python")):
            with pytest.raises(TypeError, match=advice):
                claim(session, Job, criterion)
        for extra in ({"order_by": Job.id}, {}):
            with pytest.raises(TypeError, match=r"call where\(\) and order_by\(\)"):
                claim(session, select(Job), *(() if extra else (Job.id == 1,)), **extra)
        assert not session.in_transaction()
        for wrong in (jobs.engine, session.connection(), None):
            with pytest.raises(TypeError, match="takes a Session"):
                claim(wrong, Job)


@pytest.mark.one_driver
def test_a_table_without_a_primary_key_is_rejected(jobs: Jobs) -> None:
    """A table without a primary key is rejected, because two rows could become one object."""
    from sqlalchemy import Column, Integer, Table
    from sqlalchemy.orm import DeclarativeBase

    class Other(DeclarativeBase):
        """Of the class here."""

    class Loose(Other):
        __table__ = Table("loose", Other.metadata, Column("id", Integer))
        __mapper_args__ = {"primary_key": [__table__.c.id]}  # noqa: RUF012

    with jobs.session() as session, pytest.raises(ValueError, match="the table .loose. has no primary key"):
        claim(session, Loose)
