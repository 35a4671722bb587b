"""By default a flush writes several versioned rows of a table together, and a single row separately."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import ForeignKey, PrimaryKeyConstraint, event, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from pgfence.errors import PgfenceError, TransactionStateError, VersionConflictError
from pgfence.versions import Versioned, VersionedSession
from support.versioned_rows import KINDS, beside, made, on_session, page, read, statements, versions

if TYPE_CHECKING:
    from support.worlds import World

pytestmark = pytest.mark.one_driver
PAGE = (Path(__file__).parents[2] / "docs" / "concepts" / "versions.md").read_text(encoding="utf-8")


def changing(cls: Any, number: int) -> Any:
    """Return work that changes the first rows of a class, and returns what its flush sends."""

    def work(session: Session) -> list[tuple[str, bool]]:
        rows = session.scalars(select(cls).order_by(cls.id)).all()
        sent = statements(session)
        for row in rows[:number]:
            row.title = "new"
        session.commit()
        found = [(statement.split()[0], many) for statement, many in sent]
        assert {row.id: row.version for row in rows} == versions(session, cls)
        return found

    return work


# ------------------------------------------------------------ how rows are sent


@pytest.mark.every_driver
@pytest.mark.parametrize("kind", KINDS)
async def test_several_rows_need_few_statements(world: World, kind: str) -> None:
    """The number of statements does not grow with the number of rows, and a single row takes one statement."""
    engine = world.engine()
    counts = world.driver != "asyncpg"
    for number in range(1, 6):
        cls = await page(world, engine, kind)
        sent = await on_session(world, engine, changing(cls, number))
        together, one = ("UPDATE", True), ("UPDATE", False)
        if counts and kind != "server" and number > 1:
            assert sent == [together], number
        elif counts and number > 2:
            assert sent == [together, ("SELECT", False)], number
        elif number >= 4:
            assert sent == [("SELECT", False), together, ("SELECT", False)], number
        else:
            assert sent == [one] * number, number
        changed = [version for version in (await read(world, engine, cls)).items() if version[0] <= number]
        if kind != "uuid":
            assert changed == [(each, 2) for each in range(1, number + 1)]


@pytest.mark.twins
@pytest.mark.parametrize("check", ["auto", "row", "batch"])
async def test_the_page_counts_the_statements_of_a_flush(world: World, check: str) -> None:
    """The table on the page is for 1 and 100 rows. A flush of five rows sends as many statements, or one for each row."""
    table = re.findall(r"^\| (1|100.*?) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert len(table) == 3
    by_driver = world.pick(0, 1)
    column = {"auto": 1 + by_driver, "row": 3, "batch": 4 + by_driver}[check]
    engine = world.engine()
    for row in table:
        number = 1 if row[0] == "1" else 5
        cls = await page(world, engine, "server" if "server" in row[0] else "integer")
        sent = await on_session(world, engine, changing(cls, number), conflict_check=check)
        assert len(sent) == (int(row[column]) if row[column] != "100" else number), row


async def test_deleted_rows_are_one_statement(world: World) -> None:
    """Rows that are deleted are compared by the statement that deletes them, without a look before or after."""
    engine = world.engine()
    cls = await page(world, engine)

    def work(session: Session) -> None:
        rows = session.scalars(select(cls).order_by(cls.id)).all()
        sent = statements(session)
        for row in rows[:3]:
            session.delete(row)
        session.commit()
        assert [(statement.split()[0], many) for statement, many in sent] == [("DELETE", True)]

    await on_session(world, engine, work)
    assert set(await read(world, engine, cls)) == {4, 5}


async def test_rows_that_a_relationship_leads_to_are_one_statement(world: World) -> None:
    """The lines of an order that is deleted lose it together, although the session has changed none of them."""

    class Base(DeclarativeBase):
        pass

    name = "order_" + secrets.token_hex(6)

    class Order(Versioned, Base):
        __tablename__ = name
        id: Mapped[int] = mapped_column(primary_key=True)
        lines: Mapped[list[Line]] = relationship()

    class Line(Versioned, Base):
        __tablename__ = name + "_line"
        id: Mapped[int] = mapped_column(primary_key=True)
        order_id: Mapped[int | None] = mapped_column(ForeignKey(f"{name}.id"))

    engine = world.engine()
    await made(world, engine, Base)

    def work(session: Session) -> None:
        session.add(Order(id=1, lines=[Line(id=number) for number in (1, 2, 3)]))
        session.commit()
        order = session.get_one(Order, 1)
        assert len(order.lines) == 3
        sent = statements(session)
        session.delete(order)
        session.commit()
        assert [(statement.split()[0], many) for statement, many in sent] == [("UPDATE", True), ("DELETE", False)]

    await on_session(world, engine, work)
    assert await read(world, engine, Line) == {1: 2, 2: 2, 3: 2}


@pytest.mark.parametrize("shared", [True, False])
async def test_rows_are_sent_one_by_one_where_a_count_says_too_little(world: World, shared: bool) -> None:
    """On a shared Connection, and in AUTOCOMMIT, each row is written by a separate statement."""
    engine = world.engine(isolation_level="READ COMMITTED" if shared else "AUTOCOMMIT")
    cls = await page(world, engine)

    def work(session: Session) -> None:
        if not shared:
            assert changing(cls, 3)(session) == [("UPDATE", False)] * 3
            return
        with VersionedSession(session.connection()) as inner:
            assert changing(cls, 3)(inner) == [("UPDATE", False)] * 3

    await on_session(world, engine, work)


# ------------------------------------------------------------ conflicts


@pytest.mark.every_driver
@pytest.mark.parametrize("kind", KINDS)
async def test_a_conflict_lists_exactly_the_rows_of_others(world: World, kind: str) -> None:
    """Of five rows others have changed two and deleted one; the rows that the flush wrote before it noticed are not listed."""
    engine = world.engine()
    cls = await page(world, engine, kind)
    before = await read(world, engine, cls)

    def work(session: Session) -> None:
        rows = session.scalars(select(cls).order_by(cls.id)).all()
        writer = session.info["writer"]
        for number in (2, 4):
            writer.get_one(cls, number).title = "theirs"
        writer.delete(writer.get_one(cls, 5))
        writer.commit()
        for row in rows:
            row.title = "mine"
        session.commit()

    with pytest.raises(VersionConflictError) as conflict:
        await beside(world, engine, work)
    after = await read(world, engine, cls)
    found = {item.pk[0]: (item.expected, item.found) for item in conflict.value.items}
    assert found == {2: (before[2], after[2]), 4: (before[4], after[4]), 5: (before[5], None)}
    assert (after[1], after[3]) == (before[1], before[3])


@pytest.mark.every_driver
async def test_a_conflict_in_one_table_does_not_hide_those_in_another(world: World) -> None:
    """An order that is written alone and lines that are written together are listed by one error."""
    engine = world.engine()
    lines, order = await page(world, engine), await page(world, engine)

    def work(session: Session) -> None:
        writer = session.info["writer"]
        rows = [*session.scalars(select(lines)), session.get_one(order, 1)]
        writer.get_one(lines, 3).title = writer.get_one(order, 1).title = "theirs"
        writer.commit()
        for row in rows:
            row.title = "mine"
        session.commit()

    with pytest.raises(VersionConflictError) as conflict:
        await beside(world, engine, work)
    assert {(item.model, item.pk) for item in conflict.value.items} == {(lines, (3,)), (order, (1,))}


async def test_rows_that_this_session_wrote_by_sql_are_not_a_conflict(world: World) -> None:
    """SQL text has raised the version of one row of several: the error is not retryable and speaks of the session's statement."""
    engine = world.engine()
    cls = await page(world, engine)

    def work(session: Session) -> None:
        rows = session.scalars(select(cls).order_by(cls.id)).all()
        session.execute(text(f"UPDATE {cls.__tablename__} SET version = version + 1 WHERE id = 2"))
        for row in rows:
            row.title = "mine"
        session.commit()

    with pytest.raises(PgfenceError, match="own statement") as error:
        await on_session(world, engine, work)
    assert not error.value.retryable
    assert set((await read(world, engine, cls)).values()) == {1}


# ------------------------------------------------------------ keys that change


async def test_renumbered_rows_are_compared_with_their_own_versions(world: World) -> None:
    """Rows that move on to each other's keys in one flush are found by their old keys, each at the version it was read at."""

    class Base(DeclarativeBase):
        pass

    class Seat(Versioned, Base):
        __tablename__ = "seat_" + secrets.token_hex(6)
        __table_args__ = (PrimaryKeyConstraint("id", deferrable=True, initially="DEFERRED"),)
        id: Mapped[int] = mapped_column()
        title: Mapped[str] = mapped_column(default="")

    engine = world.engine()
    await made(world, engine, Base, Seat)

    def work(session: Session) -> None:
        second = session.get_one(Seat, 2)
        second.title = "second"
        session.commit()
        seats = session.scalars(select(Seat).order_by(Seat.id)).all()
        sent = statements(session)
        for seat in seats:
            seat.id -= 1
        session.commit()
        assert [many for statement, many in sent if statement.startswith("UPDATE")] == [True]
        assert versions(session, Seat) == {0: 2, 1: 3, 2: 2, 3: 2, 4: 2}

    await on_session(world, engine, work)


async def test_rows_whose_keys_follow_their_owner_are_compared(world: World) -> None:
    """PostgreSQL changes the keys of the rows (ON UPDATE CASCADE) before the flush does: they are found by their new keys."""

    class Base(DeclarativeBase):
        pass

    name = "owner_" + secrets.token_hex(6)

    class Owner(Base):
        __tablename__ = name
        id: Mapped[int] = mapped_column(primary_key=True)
        lines: Mapped[list[Line]] = relationship(back_populates="owner")

    class Line(Versioned, Base):
        __tablename__ = name + "_line"
        owner_id: Mapped[int] = mapped_column(ForeignKey(f"{name}.id", onupdate="CASCADE"), primary_key=True)
        number: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")
        owner: Mapped[Owner] = relationship(back_populates="lines")

    engine = world.engine()
    await made(world, engine, Base)

    def move(session: Session, *, beaten: bool) -> None:
        owner = session.scalars(select(Owner)).one()
        assert len(owner.lines) == 3
        if beaten:
            session.info["writer"].get_one(Line, (owner.id, 2)).title = "theirs"
            session.info["writer"].commit()
        owner.id += 1
        for line in owner.lines:
            line.title = "mine"
        sent = statements(session)
        session.commit()
        assert [many for statement, many in sent if f"UPDATE {name}_line" in statement] == [True]

    def work(session: Session) -> None:
        session.add(Owner(id=1, lines=[Line(number=number) for number in (1, 2, 3)]))
        session.commit()
        move(session, beaten=False)
        # The rows cannot be found under their old keys, so that the error does not say who was first.
        with pytest.raises(PgfenceError):
            move(session, beaten=True)
        session.rollback()
        assert {line.version for line in session.scalars(select(Line).where(Line.number != 2))} == {2}

    await beside(world, engine, work)


# ------------------------------------------------------------ beside other sessions


async def test_a_plain_session_in_a_hook_is_rejected_or_compared(world: World) -> None:
    """While rows are written together, the flush of a plain Session would go unchecked: it is an error that says what to do."""
    engine = world.engine()
    cls = await page(world, engine)

    def hook(_mapper: Any, _connection: Any, row: Any) -> None:
        if row.id == 1:
            with Session(engine if not world.is_async else engine.sync_engine) as plain:
                plain.get_one(cls, 5).views += 1
                plain.commit()

    event.listen(cls, "after_update", hook)
    with pytest.raises(TransactionStateError, match='conflict_check="row"'):
        await on_session(world, engine, changing(cls, 3))
    await on_session(world, engine, changing(cls, 3), conflict_check="row")
    assert await read(world, engine, cls) == {1: 2, 2: 2, 3: 2, 4: 1, 5: 2}
