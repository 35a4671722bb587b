"""`conflict_check="batch"` sends rows together and misses no conflict that a row check finds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import ForeignKey, event, inspect, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from pgfence import schema
from pgfence.errors import SchemaError, TransactionStateError, VersionConflictError
from pgfence.versions import Versioned, VersionedSession
from support.versioned_rows import KINDS, beside, joined, made, on_session, page, read, statements, versions

if TYPE_CHECKING:
    from support.worlds import World

pytestmark = pytest.mark.one_driver

BATCH = {"conflict_check": "batch"}


async def in_batch(world: World, engine: Any, work: Any) -> Any:
    return await on_session(world, engine, work, **BATCH)


# ------------------------------------------------------------ rows go out together


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
async def test_rows_go_out_together(world: World, kind: str) -> None:
    """For any number of rows, a flush sends one lock, one statement for each kind of change, and at most two queries after them."""
    engine = world.engine()
    cls = await page(world, engine, kind)
    before = await read(world, engine, cls)

    def work(session: Session) -> None:
        rows = session.scalars(select(cls).order_by(cls.id)).all()
        sent = statements(session)
        for row in rows[:3]:
            row.title = "new"
        for row in rows[3:]:
            session.delete(row)
        session.add_all([cls(id=6), cls(id=7)])
        session.flush()
        changes = [(text.split()[0], many) for text, many in sent if not text.startswith("SELECT")]
        assert [change for change in changes if change[0] != "INSERT"] == [("UPDATE", True), ("DELETE", True)]
        looks = [text for text, _ in sent if text.startswith("SELECT")]
        assert "ORDER BY" in looks[0].partition(" FOR ")[0]
        assert [" FOR " in text for text in looks] == [True] + [False] * (len(looks) - 1)
        assert len(looks) <= 3
        assert {row.id: row.version for row in rows[:3]} == {
            number: version for number, version in versions(session, cls).items() if number < 4
        }
        session.commit()

    await in_batch(world, engine, work)
    after = await read(world, engine, cls)
    assert set(after) == {1, 2, 3, 6, 7}
    assert all(after[number] != before[number] for number in (1, 2, 3))
    if kind != "uuid":
        assert set(after.values()) == {1, 2}
        assert {after[number] for number in (1, 2, 3)} == {2}


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_flushes_again_and_again(world: World, kind: str) -> None:
    """The versions in memory are those of the table after each flush, so the next one passes, in a new transaction too."""
    engine = world.engine()
    cls = await page(world, engine, kind)

    def work(session: Session) -> None:
        rows = session.scalars(select(cls).order_by(cls.id)).all()
        for number in range(3):
            for row in rows[number:]:
                row.views += 1
            session.flush()
            assert {row.id: inspect(row).dict["version"] for row in rows} == versions(session, cls)
        session.commit()
        for row in rows:
            row.views += 1
        session.commit()

    await in_batch(world, engine, work)


async def test_rows_with_other_changed_columns_have_their_own_statement(world: World) -> None:
    """Rows with different versions or with different changed columns are each written correctly."""
    engine = world.engine()
    cls = await page(world, engine)

    def work(session: Session) -> None:
        rows = session.scalars(select(cls).order_by(cls.id)).all()
        rows[0].views = 1
        session.flush()
        rows[0].title, rows[1].views, rows[2].title = "new", 2, "new"
        session.commit()
        assert [(row.title, row.views, row.version) for row in rows[:4]] == [
            ("new", 1, 3),
            ("", 2, 2),
            ("new", 0, 2),
            ("", 0, 1),
        ]

    await in_batch(world, engine, work)


@pytest.mark.twins
async def test_hooks_see_the_new_version(world: World) -> None:
    """In after_update, each instance has its new version."""
    engine = world.engine()
    cls = await page(world, engine)
    seen: dict[int, int] = {}
    event.listen(cls, "after_update", lambda _mapper, _connection, row: seen.update({row.id: row.version}))

    def work(session: Session) -> None:
        session.get_one(cls, 1).views = 1
        session.flush()
        for number in (1, 2):
            session.get_one(cls, number).views = 2
        session.commit()

    await in_batch(world, engine, work)
    assert seen == {1: 3, 2: 2}


async def test_only_rows_that_change_are_locked(world: World) -> None:
    """An instance that was assigned the value that it had, or whose collection changed, is not locked and keeps its version."""
    engine = world.engine()
    order, line = await orders(world, engine)

    def work(session: Session) -> None:
        one = session.get_one(order, 1)
        one.title = one.title
        one.lines.append(line(id=9))
        sent = statements(session)
        session.commit()
        assert not [text for text, _ in sent if " FOR " in text]

    await in_batch(world, engine, work)
    assert await read(world, engine, order) == {1: 1}


# ------------------------------------------------------------ conflicts


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
async def test_a_conflict_names_every_row_before_anything_is_sent(world: World, kind: str) -> None:
    """Of five rows two were changed and one deleted elsewhere: the error lists these three, and no row was written."""
    engine = world.engine()
    cls = await page(world, engine, kind)
    before = await read(world, engine, cls)

    def work(session: Session) -> list[tuple[str, bool]]:
        rows = session.scalars(select(cls).order_by(cls.id)).all()
        writer = session.info["writer"]
        for number in (2, 4):
            writer.get_one(cls, number).title = "theirs"
        writer.delete(writer.get_one(cls, 5))
        writer.commit()
        for row in rows[:3]:
            row.title = "mine"
        session.delete(rows[3])
        rows[4].title = "mine"
        sent = session.info["sent"] = statements(session)
        try:
            session.commit()
        finally:
            assert {text.split()[0] for text, _ in sent} == {"SELECT"}
        return sent

    with pytest.raises(VersionConflictError) as conflict:
        await beside(world, engine, work, **BATCH)
    after = await read(world, engine, cls)
    found = {item.pk[0]: (item.expected, item.found) for item in conflict.value.items}
    assert found == {2: (before[2], after[2]), 4: (before[4], after[4]), 5: (before[5], None)}
    assert conflict.value.retryable
    assert after[1] == before[1]


async def test_a_conflict_in_a_savepoint_leaves_the_transaction(world: World) -> None:
    """After a conflict inside begin_nested() the outer transaction continues, and the instance is read again."""
    engine = world.engine()
    cls = await page(world, engine)

    def work(session: Session) -> None:
        one, two = session.get_one(cls, 1), session.get_one(cls, 2)
        one.views = 1
        session.flush()
        session.info["writer"].get_one(cls, 2).title = "theirs"
        session.info["writer"].commit()
        with pytest.raises(VersionConflictError), session.begin_nested():
            two.title = "mine"
        assert (two.title, two.version) == ("theirs", 2)
        two.title = "mine"
        session.commit()

    await beside(world, engine, work, **BATCH)
    assert await read(world, engine, cls) == {1: 2, 2: 3, 3: 1, 4: 1, 5: 1}


async def test_an_instance_whose_version_was_never_read_passes(world: World) -> None:
    """An expired instance is based on no read, so any version in the table is accepted and incremented."""
    engine = world.engine()
    cls = await page(world, engine)

    def work(session: Session) -> None:
        row = session.get_one(cls, 1)
        session.info["writer"].get_one(cls, 1).title = "theirs"
        session.info["writer"].commit()
        session.expire(row)
        row.views = 1
        session.commit()
        assert row.version == 3

    await beside(world, engine, work, **BATCH)


async def test_a_row_that_the_flush_comes_upon_later_is_compared(world: World) -> None:
    """A row that the flush writes only because of a collection is compared, and gets the next version."""
    engine = world.engine()
    order, line = await orders(world, engine)

    def move(session: Session) -> None:
        one = session.get_one(order, 1)
        one.lines.remove(session.get_one(line, 1))
        session.commit()

    await in_batch(world, engine, move)
    assert await read(world, engine, line) == {1: 2, 2: 1}

    def stale(session: Session) -> None:
        one, row = session.get_one(order, 1), session.get_one(line, 2)
        session.info["writer"].get_one(line, 2).amount = 7
        session.info["writer"].commit()
        one.lines.remove(row)
        session.commit()

    with pytest.raises(VersionConflictError) as conflict:
        await beside(world, engine, stale, **BATCH)
    assert [item.pk for item in conflict.value.items] == [(2,)]


async def test_a_row_that_a_hook_changes_is_compared(world: World) -> None:
    """Other rows that a before_update listener changes are compared, and get the next version in the same flush or the next."""
    engine = world.engine()
    cls = await page(world, engine)

    def count(session: Session, *_: Any) -> None:
        session.get_one(cls, 2).views += 1

    def work(session: Session) -> None:
        one, _ = session.get_one(cls, 1), session.get_one(cls, 2)
        one.views = 1
        event.listen(session, "before_flush", count, once=True)
        session.commit()

    await in_batch(world, engine, work)
    assert await read(world, engine, cls) == {1: 2, 2: 2, 3: 1, 4: 1, 5: 1}


async def test_a_row_deleted_and_added_in_one_flush_goes_on_from_its_version(world: World) -> None:
    """SQLAlchemy sends one UPDATE for the delete and the add, which compares and increments the version."""
    engine = world.engine()
    cls = await page(world, engine)

    def work(session: Session) -> None:
        session.delete(session.get_one(cls, 1))
        session.add(cls(id=1, title="again"))
        session.commit()

    await in_batch(world, engine, work)
    assert (await read(world, engine, cls))[1] == 2

    def stale(session: Session) -> None:
        row = session.get_one(cls, 1)
        session.info["writer"].get_one(cls, 1).title = "theirs"
        session.info["writer"].commit()
        session.delete(row)
        session.add(cls(id=1, title="mine"))
        session.commit()

    with pytest.raises(VersionConflictError):
        await beside(world, engine, stale, **BATCH)


# ------------------------------------------------------------ kinds of classes


@pytest.mark.twins
async def test_a_class_in_two_tables_is_compared_in_the_first(world: World) -> None:
    """A change to the second table alone increments the version, twice in one session; a stale change is rejected."""
    engine = world.engine()
    cls = await joined(world, engine)

    def work(session: Session) -> None:
        rows = session.scalars(select(cls).order_by(cls.id)).all()
        for _ in range(2):
            for row in rows[:2]:
                row.views += 1
            session.flush()
        session.delete(rows[4])
        session.commit()

    await in_batch(world, engine, work)
    assert await read(world, engine, cls) == {1: 3, 2: 3, 3: 1, 4: 1}

    def stale(session: Session) -> None:
        row = session.get_one(cls, 1)
        session.info["writer"].get_one(cls, 1).views = 9
        session.info["writer"].commit()
        row.views = 8
        session.commit()

    with pytest.raises(VersionConflictError):
        await beside(world, engine, stale, **BATCH)


async def test_a_missing_version_trigger_is_reported(world: World) -> None:
    """If the mode "server" has no trigger, the error says so and how to add it, and nothing is saved."""
    engine = world.engine()
    cls = await page(world, engine, "server")
    await world.call(schema.drop_version_trigger, engine, cls)

    def work(session: Session) -> None:
        for row in session.scalars(select(cls)):
            row.views = 1
        session.commit()

    with pytest.raises(SchemaError, match="add_version_trigger"):
        await in_batch(world, engine, work)


@pytest.mark.every_driver
async def test_autocommit_is_rejected_where_a_row_lock_has_to_last(world: World) -> None:
    """In autocommit the lock ends with its statement, so comparing the rows of a batch or a pending change would be useless."""
    engine = world.engine()
    cls = await page(world, engine)

    def batch(session: Session) -> None:
        session.add(cls(id=6))
        session.commit()
        session.get_one(cls, 1).views = 1
        with pytest.raises(TransactionStateError, match="autocommit"):
            session.commit()

    def pending(session: Session) -> None:
        session.get_one(cls, 1).views = 1
        with pytest.raises(TransactionStateError, match="autocommit"):
            session.execute(update(cls).where(cls.id == 1).values(views=2))

    autocommit = world.engine(isolation_level="AUTOCOMMIT")
    await in_batch(world, autocommit, batch)
    await on_session(world, autocommit, pending, autoflush=False)
    assert await read(world, engine, cls) == dict.fromkeys(range(1, 7), 1)


@pytest.mark.every_driver
async def test_keys_of_every_kind_are_found(world: World) -> None:
    """Composite keys of text, numbers and UUIDs are locked, compared and confirmed like one number, and may be changed."""

    class Base(DeclarativeBase):
        pass

    class Seat(Versioned, Base):
        __tablename__ = "seat_" + uuid4().hex[:12]
        train: Mapped[str] = mapped_column(primary_key=True)
        number: Mapped[int] = mapped_column(primary_key=True)
        ride: Mapped[UUID] = mapped_column(primary_key=True)
        taken: Mapped[bool] = mapped_column(default=False)

    engine = world.engine()
    await made(world, engine, Base)
    ride = uuid4()

    def work(session: Session) -> None:
        seats = [Seat(train=train, number=number, ride=ride) for train in ("IC 1", "a'b\\c,{}") for number in (1, 2)]
        session.add_all(seats)
        session.commit()
        seats[0].number = 9
        for seat in seats:
            seat.taken = True
        session.commit()
        assert [(seat.number, seat.version) for seat in seats] == [(9, 2), (2, 2), (1, 2), (2, 2)]
        for seat in seats:
            session.delete(seat)
        session.commit()

    await in_batch(world, engine, work)


async def orders(world: World, engine: Any) -> tuple[Any, Any]:
    """Two classes, the rows of one in a collection of the other that has no way back; an order with two lines."""

    class Base(DeclarativeBase):
        pass

    name = "order_" + uuid4().hex[:12]

    class Order(Versioned, Base):
        __tablename__ = name
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")
        lines: Mapped[list[Line]] = relationship()

    class Line(Versioned, Base):
        __tablename__ = name + "_line"
        id: Mapped[int] = mapped_column(primary_key=True)
        order_id: Mapped[int | None] = mapped_column(ForeignKey(name + ".id"))
        amount: Mapped[int] = mapped_column(default=0)

    Base.registry._class_registry["Line"] = Line
    await made(world, engine, Base)

    def add(session: Session) -> None:
        session.add(Order(id=1, lines=[Line(id=1), Line(id=2)]))
        session.commit()

    await on_session(world, engine, add)
    return Order, Line


# ------------------------------------------------------------ beside other sessions


async def test_other_sessions_keep_their_own_check(world: World) -> None:
    """The statements of a class that a batch has written are not those of a session that compares row by row, nor the reverse."""
    engine = world.engine()
    for first, second in ((BATCH, {}), ({}, BATCH)):
        cls = await page(world, engine)

        def change(session: Session, cls: Any = cls) -> list[tuple[str, bool]]:
            rows = session.scalars(select(cls).order_by(cls.id)).all()
            sent = statements(session)
            rows[0].views += 1
            session.delete(rows[1])
            session.commit()
            return sent

        for options in (first, second):
            sent = await on_session(world, engine, change, **options)
            changes = [text for text, _ in sent if text.startswith(("UPDATE", "DELETE"))]
            compared = [".version =" in text.split("WHERE")[1] for text in changes]
            assert compared == [not options, not options]


@pytest.mark.async_only
@pytest.mark.every_driver
async def test_tasks_beside_a_batch_keep_their_own_check(world: World) -> None:
    """While one task waits in a batch flush, the flush of another compares row by row, and is rejected if it is stale."""
    engine = world.engine(pool_size=8)
    cls = await page(world, engine)

    def batch(session: Session) -> None:
        for _ in range(10):
            for number in (1, 2):
                session.get_one(cls, number).views += 1
            session.commit()

    def row_by_row(session: Session) -> None:
        for _ in range(10):
            row = session.get_one(cls, 3)
            row.views += 1
            session.info["writer"].get_one(cls, 3, populate_existing=True).views += 1
            session.info["writer"].commit()
            with pytest.raises(VersionConflictError):
                session.commit()
            session.rollback()

    await asyncio.gather(in_batch(world, engine, batch), beside(world, engine, row_by_row))
    assert (await read(world, engine, cls))[1] == 11


async def test_a_change_by_another_session_in_a_flush_hook_is_detected(world: World) -> None:
    """A second VersionedSession compares inside a batch flush; a plain Session would go unchecked, so it is an error."""
    engine = world.engine()
    cls = await page(world, engine)

    def work(session: Session) -> None:
        def hook(_mapper: Any, _connection: Any, row: Any) -> None:
            if row.id != 1:
                return
            writer = session.info["writer"]
            writer.get_one(cls, 2).views = 1
            writer.commit()
            with Session(session.get_bind()) as plain:
                plain.get_one(cls, 2).views = 2
                plain.flush()

        event.listen(cls, "after_update", hook)
        session.get_one(cls, 1).views = 1
        session.commit()

    with pytest.raises(TransactionStateError, match="another session is flushing"):
        await beside(world, engine, work, **BATCH)
    assert (await read(world, engine, cls))[2] == 2


@pytest.mark.every_driver
async def test_a_flush_that_fails_leaves_nothing_behind(world: World) -> None:
    """After an error of the database in a batch flush, flushes in the same thread or task compare as they should."""
    engine = world.engine()
    cls = await page(world, engine)

    def work(session: Session) -> None:
        writer = session.info["writer"]
        stale = writer.get_one(cls, 3)
        session.get_one(cls, 3).views = 2
        session.commit()
        session.get_one(cls, 1).views = 1
        session.add(cls(id=2))
        with pytest.raises(IntegrityError):
            session.flush()
        stale.views = 3
        with pytest.raises(VersionConflictError):
            writer.commit()
        session.rollback()
        session.get_one(cls, 1).views = 2
        session.commit()

    await beside(world, engine, work, **BATCH)
    assert await read(world, engine, cls) == {1: 2, 2: 1, 3: 2, 4: 1, 5: 1}


@pytest.mark.twins
async def test_rows_are_locked_in_one_order(world: World) -> None:
    """Two sessions that change the same rows in opposite order get a conflict, never a deadlock."""
    engine = world.engine(pool_size=8)
    cls = await page(world, engine)
    outcomes: list[str] = []

    def change(numbers: list[int]) -> Any:
        def work(session: Session) -> None:
            for _ in range(15):
                rows = {row.id: row for row in session.scalars(select(cls))}
                for number in numbers:
                    rows[number].views += 1
                try:
                    session.commit()
                except VersionConflictError:
                    session.rollback()
                    outcomes.append("conflict")
                else:
                    outcomes.append("written")

        return work

    async def contend(numbers: list[int]) -> None:
        if world.is_async:
            await in_batch(world, engine, change(numbers))
        else:
            await world.contender().call(_with_session, engine, change(numbers))

    await asyncio.gather(contend([1, 2, 3, 4, 5]), contend([5, 4, 3, 2, 1]))
    assert len(outcomes) == 30
    assert set((await read(world, engine, cls)).values()) == {1 + outcomes.count("written")}


def _with_session(engine: Any, work: Any) -> None:
    with VersionedSession(engine, conflict_check="batch") as session:
        work(session)


async def test_a_snapshot_that_is_too_old_is_the_servers_error(world: World) -> None:
    """In REPEATABLE READ, a row that has changed since the snapshot is a serialization failure, as without the batch."""
    engine = world.engine(isolation_level="REPEATABLE READ")
    cls = await page(world, engine)

    def work(session: Session) -> None:
        row = session.get_one(cls, 1)
        session.info["writer"].get_one(cls, 1).views = 3
        session.info["writer"].commit()
        row.views = 2
        session.commit()

    with pytest.raises(DBAPIError) as refused:
        await beside(world, engine, work, **BATCH)
    assert getattr(refused.value.orig, "sqlstate", None) == "40001"
