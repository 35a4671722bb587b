"""Statements on versioned classes raise versions, so that sessions with older rows get a conflict."""

from __future__ import annotations

import gc
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import (
    ForeignKey,
    Sequence,
    bindparam,
    delete,
    event,
    func,
    insert,
    lambda_stmt,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column, relationship
from sqlalchemy.orm.exc import StaleDataError

from pgfence.errors import PgfenceError, VersionConflictError, VersionRequiredError
from pgfence.versions import Versioned, VersionedUUID
from support.versioned_rows import KINDS, beside, joined, made, on_session, page, read, statements, versions

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World

pytestmark = pytest.mark.one_driver

CHECKS = ("auto", "row", "batch")
EVERY = (*KINDS, "xmin")
SYNCHRONIZE = ("auto", "evaluate", "fetch", False, None)


def by_criteria(cls: Any) -> Any:
    return update(cls).where(cls.id == 1).values(title="new")


def returning(cls: Any) -> Any:
    return update(cls).where(cls.id == 1).values(title="new").returning(cls.id)


def from_another_table(cls: Any) -> Any:
    other = select(func.min(cls.id).label("first")).subquery()
    return update(cls).where(cls.id == other.c.first).values(title="new")


def of_an_alias(cls: Any) -> Any:
    other = aliased(cls)
    return update(other).where(other.id == 1).values(title="new")


def of_the_table(cls: Any) -> Any:
    return update(cls.__table__).where(cls.__table__.c.id == 1).values(title="new")


def of_an_alias_of_the_table(cls: Any) -> Any:
    other = cls.__table__.alias()
    return update(other).where(other.c.id == 1).values(title="new")


def an_upsert(cls: Any) -> Any:
    new = upsert(cls).values(id=1, title="new")
    return new.on_conflict_do_update(index_elements=["id"], set_={"title": new.excluded.title})


def an_upsert_of_everything(cls: Any) -> Any:
    new = upsert(cls).values(id=1, title="new", views=0)
    return new.on_conflict_do_update(index_elements=["id"], set_={each.key: each for each in new.excluded})


def an_upsert_of_the_table(cls: Any) -> Any:
    new = upsert(cls.__table__).values(id=1, title="new", views=0)
    return new.on_conflict_do_update(index_elements=["id"], set_={"title": new.excluded.title})


FORMS = (
    by_criteria,
    returning,
    from_another_table,
    of_an_alias,
    of_the_table,
    of_an_alias_of_the_table,
    an_upsert,
    an_upsert_of_everything,
    an_upsert_of_the_table,
)


def executing(*given: Any, **options: Any) -> Callable[[Session], None]:
    def work(session: Session) -> None:
        session.execute(*given, **options)
        session.commit()

    return work


# ------------------------------------------------------------ those who have read the rows notice


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
async def test_a_reader_notices_a_statement(world: World, form: Callable[[Any], Any], kind: str) -> None:
    """C064: after an UPDATE of any form a session that has read the row cannot save over it; other rows keep their version."""
    engine = world.engine()
    cls = await page(world, engine, kind)
    before = await read(world, engine, cls)

    def save(session: Session) -> None:
        row = session.get_one(cls, 1)
        session.info["writer"].execute(form(cls))
        session.info["writer"].commit()
        row.title = "mine"
        session.commit()

    with pytest.raises(VersionConflictError) as conflict:
        await beside(world, engine, save)
    assert [(item.pk, item.expected) for item in conflict.value.items] == [((1,), before[1])]
    after = await read(world, engine, cls)
    assert {number for number in before if after[number] != before[number]} == {1}
    if kind != "uuid":
        assert after[1] == before[1] + 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("synchronize", SYNCHRONIZE)
async def test_an_instance_can_be_flushed_after_a_statement(world: World, kind: str, synchronize: Any) -> None:
    """With every `synchronize_session`, an instance of the session can be changed and flushed after a statement on it."""
    engine = world.engine()
    cls = await page(world, engine, kind)

    def work(session: Session) -> None:
        one, two = session.get_one(cls, 1), session.get_one(cls, 2)
        before = one.version, two.version
        one.views = 1  # goes out by autoflush
        session.execute(by_criteria(cls), execution_options={"synchronize_session": synchronize})
        assert (one.title, one.views) == ("new", 1)
        assert one.version == versions(session, cls)[1] != before[0]
        assert two.version == before[1]
        one.title = two.title = "newer"
        session.commit()

    await on_session(world, engine, work)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("synchronize", SYNCHRONIZE)
async def test_a_statement_never_makes_a_stale_instance_look_new(world: World, kind: str, synchronize: Any) -> None:
    """A statement never gives a new version to an instance with columns of an old one: it is a conflict, or it is read again."""
    engine = world.engine()
    cls = await page(world, engine, kind)

    def work(session: Session) -> str:
        row = session.get_one(cls, 1)
        session.info["writer"].get_one(cls, 1).views = 7
        session.info["writer"].commit()
        session.execute(by_criteria(cls), execution_options={"synchronize_session": synchronize})
        row.title = "newer"
        try:
            session.flush()
        except VersionConflictError:
            return "conflict"
        assert row.views == 7
        return "read again"

    assert await beside(world, engine, work) in {"conflict", "read again"}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_pending_change_keeps_the_version_it_was_made_at(world: World, kind: str) -> None:
    """A pending change is not treated as based on what a statement has written since."""
    engine = world.engine()
    cls = await page(world, engine, kind)

    def work(session: Session) -> None:
        row = session.get_one(cls, 1)
        session.info["writer"].get_one(cls, 1).views = 7
        session.info["writer"].commit()
        with session.no_autoflush:
            row.views = 1
            session.execute(by_criteria(cls))
        session.flush()

    with pytest.raises((VersionConflictError, StaleDataError)):
        await beside(world, engine, work)


@pytest.mark.parametrize("kind", KINDS)
async def test_returned_instances_have_the_new_version(world: World, kind: str) -> None:
    """What RETURNING gives as an instance can be flushed, whether the session knew it before or not."""
    engine = world.engine()
    cls = await page(world, engine, kind)

    def work(session: Session) -> None:
        known = session.get_one(cls, 1)
        statement = update(cls).where(cls.id < 3).values(title="new").returning(cls)
        rows = session.scalars(statement).all()
        assert known in rows
        for row in rows:
            row.title = "newer"
        session.commit()

    await on_session(world, engine, work)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_statement_after_a_flush_leaves_its_versions(world: World, kind: str, check: str) -> None:
    """Rows that a flush wrote can be written again if a listener for after_flush has executed a statement on their class."""
    engine = world.engine()
    cls = await page(world, engine, kind)

    def work(session: Session) -> None:
        rows = session.scalars(select(cls).order_by(cls.id)).all()
        event.listen(session, "after_flush", lambda session, _context: session.execute(by_criteria(cls)))
        for views in (1, 2):
            for row in rows:
                row.views = views
            session.flush()
            assert {row.id: row.version for row in rows} == versions(session, cls)

    await on_session(world, engine, work, conflict_check=check)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_reader_notices_a_delete(world: World, kind: str) -> None:
    """delete() of the class needs no version: sessions that have read the row find it deleted."""
    engine = world.engine()
    cls = await page(world, engine, kind)

    def save(session: Session) -> None:
        row = session.get_one(cls, 1)
        session.info["writer"].execute(delete(cls).where(cls.id == 1))
        session.info["writer"].commit()
        row.title = "mine"
        session.commit()

    with pytest.raises(VersionConflictError) as conflict:
        await beside(world, engine, save, bulk="refuse")
    assert [(item.pk, item.found) for item in conflict.value.items] == [((1,), None)]


async def test_a_version_in_a_column_of_another_name_is_raised(world: World) -> None:
    """Statements on the class and on its Table raise the version in a column of any name."""
    engine = world.engine()
    cls = await page(world, engine, column="row_version")
    for number, form in enumerate(FORMS, start=2):
        await on_session(world, engine, executing(form(cls)))
        assert (await read(world, engine, cls))[1] == number


async def test_values_that_come_as_parameters_are_enough(world: World) -> None:
    """Parameters without values(), for one row or many, and the older Query.update() raise the version too."""
    engine = world.engine()
    cls = await page(world, engine)
    await on_session(world, engine, executing(update(cls).where(cls.id == 1), {"title": "new"}))
    table = cls.__table__
    many = update(table).where(table.c.id == bindparam("number")).values(title="new")
    await on_session(world, engine, executing(many, [{"number": 2}, {"number": 3}]))

    def query(session: Session) -> None:
        session.query(cls).filter(cls.id == 4).update({"title": "new"})
        session.commit()

    await on_session(world, engine, query)
    assert await read(world, engine, cls) == {1: 2, 2: 2, 3: 2, 4: 2, 5: 1}


async def test_a_plain_session_raises_versions_as_well(world: World) -> None:
    """The guard belongs to the class, for every kind of Session that executes its statements."""
    engine = world.engine()
    cls = await page(world, engine)

    def work() -> None:
        with Session(engine) as session:
            executing(by_criteria(cls))(session)

    await world.call(work)
    assert (await read(world, engine, cls))[1] == 2


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
async def test_rows_inserted_by_a_statement_have_a_version(world: World, kind: str) -> None:
    """insert() of the class or its Table, of one row or many, from values or a SELECT, gives rows their first version."""
    engine = world.engine()
    cls = await page(world, engine, kind)

    def work(session: Session) -> None:
        session.execute(insert(cls).values(id=6))
        session.execute(insert(cls), [{"id": 7}, {"id": 8}])
        session.execute(insert(cls.__table__).values(id=9, title="", views=0))
        chosen = select(cls.id + 10, cls.title, cls.views).where(cls.id == 1)
        session.execute(insert(cls).from_select(["id", "title", "views"], chosen))
        for number in (6, 7, 8, 9, 11):
            session.get_one(cls, number).title = "changed"
        session.commit()

    await on_session(world, engine, work)
    found = await read(world, engine, cls)
    versions = [found[number] for number in (6, 7, 8, 9, 11)]
    assert len(set(versions)) == 5 if kind == "uuid" else versions == [2] * 5


# ------------------------------------------------------------ pending changes of rows that the session writes by a statement


def counted_inside(cls: Any) -> Any:
    statement = returning(cls)
    if cls.__version_mode__ == "client":
        following = func.gen_random_uuid() if issubclass(cls, VersionedUUID) else cls.version + 1
        statement = statement.values(version=following)
    return select(statement.cte().c.id)


def own_statements(cls: Any) -> list[Callable[[Session, Any], Any]]:
    """Return functions that change row 1 by a statement, each called with the session and the instance of row 1."""

    def sending(form: Any, options: Any) -> Callable[[Session, Any], Any]:
        return lambda session, _: session.execute(form(cls), execution_options=options)

    def by_key(session: Session, row: Any) -> None:
        session.execute(update(cls), [{"id": 1, "version": row.version, "title": "new"}])

    of_xmin = cls.__version_mode__ == "xmin"  # it has no place in SET, nor among parameters
    forms = [form for form in (*FORMS, counted_inside) if not of_xmin or form is not an_upsert_of_everything]
    found = [sending(form, {}) for form in forms]
    found += [sending(by_criteria, {"synchronize_session": each}) for each in SYNCHRONIZE]
    return found if of_xmin else [*found, by_key]


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("check", CHECKS)
async def test_a_pending_change_is_saved_beside_the_sessions_own_statements(
    world: World, kind: str, check: Any
) -> None:
    """A pending change or delete is saved, whichever statements of the session write its row before the flush."""
    engine = world.engine()
    cls = await page(world, engine, kind)

    def work(session: Session) -> None:
        row, other = session.get_one(cls, 1), session.get_one(cls, 2)
        untouched = other.version
        for number, send in enumerate(own_statements(cls), start=1):
            before = row.version
            row.views = number
            send(session, row)
            send(session, row)
            session.commit()
            assert (row.title, row.views) == ("new", number)
            assert row.version != before
            send(session, row)
            row.title = ""
            session.commit()
        session.delete(row)
        own_statements(cls)[0](session, row)
        session.commit()
        assert other.version == untouched
        session.delete(other)
        session.execute(update(cls.__table__).values(title="new"))
        session.execute(delete(cls).where(cls.id == 2))
        session.commit()

    await on_session(world, engine, work, conflict_check=check, autoflush=False)
    assert {1, 2} & (await read(world, engine, cls)).keys() == set()


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("check", CHECKS)
async def test_a_stale_change_stays_rejected_after_own_statements(world: World, kind: str, check: Any) -> None:
    """If another session has written the row before the statement, a pending change or delete of it is a conflict."""
    engine = world.engine()
    cls = await page(world, engine, kind)

    def work(session: Session) -> None:
        theirs = 100
        for send in own_statements(cls):
            for act in ("change", "delete"):
                row = session.get_one(cls, 1)
                before, theirs = row.version, theirs + 1
                session.info["writer"].get_one(cls, 1).views = theirs
                session.info["writer"].commit()
                if act == "change":
                    row.views = 1
                else:
                    session.delete(row)
                with pytest.raises(VersionConflictError) as conflict:
                    send(session, row)
                    session.commit()
                assert [(item.pk, item.expected) for item in conflict.value.items] == [((1,), before)]
                session.rollback()
                assert row.views == theirs

    await beside(world, engine, work, conflict_check=check, autoflush=False)


async def test_a_condition_true_only_in_memory_refreshes_no_stale_change(world: World) -> None:
    """SQLAlchemy evaluates WHERE in memory, where the row still has the values that another session has changed."""
    engine = world.engine()
    cls = await page(world, engine)

    def work(session: Session) -> None:
        row = session.get_one(cls, 1)
        session.info["writer"].get_one(cls, 1).title = "theirs"
        session.info["writer"].commit()
        row.views = 7
        session.execute(update(cls).where(cls.title == "").values(title="ours"))
        with pytest.raises(VersionConflictError):
            session.commit()

    await beside(world, engine, work, autoflush=False)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("kind", EVERY)
async def test_a_before_flush_listener_may_update_rows_with_pending_changes(
    world: World, kind: str, check: Any
) -> None:
    """A counter that before_flush raises by update() is part of the same unit of work."""
    engine = world.engine()
    cls = await page(world, engine, kind)

    def count(session: Session, *_: Any) -> None:
        for row in session.dirty:
            session.execute(update(cls).where(cls.id == row.id).values(views=cls.views + 1))
            session.execute(update(cls).where(cls.id == row.id).values(views=cls.views + 1))
            if kind != "xmin":
                session.execute(update(cls), [{"id": row.id, "version": row.version, "views": 9}])

    def work(session: Session) -> None:
        row = session.get_one(cls, 1)
        event.listen(session, "before_flush", count)
        row.title = "mine"
        session.commit()
        assert (row.title, row.views) == ("mine", 2 if kind == "xmin" else 9)

    await on_session(world, engine, work, conflict_check=check)


def unseen_writes(cls: Any) -> list[Callable[[Session], Any]]:
    """Return functions that write row 1 by statements of the session which it cannot follow."""
    version = {"uuid": ", version = gen_random_uuid()", "client": ", version = version + 1"}
    counted = version.get("uuid" if issubclass(cls, VersionedUUID) else cls.__version_mode__, "")
    statement = text(f"UPDATE {cls.__tablename__} SET title = 'new'{counted} WHERE id = 1")

    def in_a_savepoint(session: Session) -> None:
        with session.no_autoflush, session.connection().begin_nested():
            session.execute(statement)

    return [
        lambda session: session.execute(statement),
        lambda session: session.connection().execute(statement),
        in_a_savepoint,
        lambda session: session.execute(
            delete(cls).where(cls.id == 1), execution_options={"synchronize_session": False}
        ),
    ]


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("check", CHECKS)
async def test_a_statement_that_the_session_cannot_follow_is_not_a_conflict(
    world: World, kind: str, check: Any
) -> None:
    """The error says that the session itself has written the row and what to do, and it is not retryable."""
    engine = world.engine()
    cls = await page(world, engine, kind)

    def work(session: Session) -> None:
        row = session.get_one(cls, 1)
        for write in unseen_writes(cls):
            for early in (True, False):
                before = row.version, row.views
                if early:
                    row.views = 7
                write(session)
                row.views = 7
                with pytest.raises(PgfenceError, match=r"a statement or flush of this session.*refresh") as error:
                    session.commit()
                assert not isinstance(error.value, VersionConflictError)
                assert not error.value.retryable
                session.rollback()
                assert (row.version, row.views) == before
        unseen_writes(cls)[0](session)
        session.refresh(row)
        row.views = 7
        session.commit()

    await on_session(world, engine, work, conflict_check=check, autoflush=False)


@pytest.mark.parametrize("check", CHECKS)
async def test_only_rows_of_others_are_conflicts_beside_the_sessions_own(world: World, check: Any) -> None:
    """Of two rows that have changed since they were read, the conflict lists the one that another session has written."""
    engine = world.engine()
    cls = await page(world, engine)

    def work(session: Session) -> None:
        one, two = session.get_one(cls, 1), session.get_one(cls, 2)
        session.info["writer"].get_one(cls, 2).views = 9
        session.info["writer"].commit()
        one.views = two.views = 7
        unseen_writes(cls)[0](session)
        with pytest.raises(VersionConflictError) as conflict:
            session.commit()
        assert conflict.value.items == ((cls, (2,), 1, 2),)

    await beside(world, engine, work, conflict_check=check, autoflush=False)


async def test_an_update_by_key_after_an_own_statement_is_not_a_conflict(world: World) -> None:
    """The versions of the parameters were read before the session's own update(), or before it deleted the row."""
    engine = world.engine()
    cls = await page(world, engine)

    def work(session: Session) -> None:
        session.execute(by_criteria(cls))
        session.delete(two := session.get_one(cls, 2))
        for given in ({"id": 1, "version": 1}, {"id": two.id, "version": 1}):
            with pytest.raises(PgfenceError, match="a statement or flush of this session") as error:
                session.execute(update(cls), [{**given, "title": "x"}])
            assert not isinstance(error.value, VersionConflictError)

    await on_session(world, engine, work)


@pytest.mark.parametrize("kind", EVERY)
async def test_rolling_back_a_savepoint_expires_rows_of_its_statements(world: World, kind: str) -> None:
    """A version written in a savepoint does not stay in memory after the rollback, because it can be used again."""
    engine = world.engine()
    cls = await page(world, engine, kind)

    def work(session: Session) -> None:
        one = session.get_one(cls, 1)
        before = one.version, session.get_one(cls, 2).version
        session.expunge(session.get_one(cls, 2))
        with session.begin_nested() as outer:
            with session.begin_nested():
                session.execute(update(cls).values(title="new"), execution_options={"synchronize_session": False})
            two = session.get_one(cls, 2)
            assert "new" == one.title == two.title
            outer.rollback()
        assert (one.title, two.title, one.version, two.version) == ("", "", *before)

    await on_session(world, engine, work)


async def test_rolling_back_a_savepoint_expires_rows_reloaded_inside_it(world: World) -> None:
    """The instance that was flushed is dropped, and the one that was loaded in its place has a version which was undone."""
    engine = world.engine()
    cls = await page(world, engine)

    def work(session: Session) -> None:
        with session.begin_nested() as savepoint:
            session.get_one(cls, 1).title = "inside"
            session.add(cls(id=6))
            session.flush()
            gc.collect()
            row, new = session.get_one(cls, 1), session.get_one(cls, 6)
            assert (row.version, row.title) == (2, "inside")
            savepoint.rollback()
        session.info["writer"].get_one(cls, 1).title = "theirs"
        session.info["writer"].add(cls(id=6, title="theirs"))
        session.info["writer"].commit()
        assert (row.title, new.title) == ("theirs", "theirs")

    await beside(world, engine, work)


async def test_a_stale_owner_is_a_conflict_after_the_sessions_own_statement(world: World) -> None:
    """An owner that its lines will touch stays out of date when update() gives it a new version."""
    engine = world.engine()

    class Base(DeclarativeBase):
        pass

    class Order(Versioned, Base):
        __tablename__ = f"order_{secrets.token_hex(6)}"
        __version_relationships__ = ("lines",)
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")
        lines: Mapped[list[Any]] = relationship("Line", back_populates="order")

    class Line(Base):
        __tablename__ = f"{Order.__tablename__}_line"
        id: Mapped[int] = mapped_column(primary_key=True)
        order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))
        amount: Mapped[int] = mapped_column(default=0)
        order: Mapped[Order] = relationship(back_populates="lines")

    await made(world, engine, Base)

    def work(session: Session) -> None:
        session.add(Order(id=1, lines=[Line(id=1), Line(id=2)]))
        session.commit()
        one, order = session.get_one(Line, 1), session.get_one(Order, 1)
        assert order.version == 1
        session.info["writer"].get_one(Line, 2).amount = 2
        session.info["writer"].commit()
        one.amount = 1
        session.execute(update(Order).values(title="new"))
        with pytest.raises(VersionConflictError):
            session.commit()

    await beside(world, engine, work, autoflush=False)


# ------------------------------------------------------------ by primary key


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("synchronize", ["auto", "evaluate", False, None])
async def test_an_update_by_primary_key_compares_the_versions_it_is_given(
    world: World, kind: str, synchronize: Any
) -> None:
    """With their versions rows pass, and an instance of the session can be flushed after; a wrong version is rejected."""
    engine = world.engine()
    cls = await page(world, engine, kind)
    before = await read(world, engine, cls)
    options = {"synchronize_session": synchronize}

    def work(session: Session) -> None:
        known = session.get_one(cls, 1)
        given = [{"id": number, "version": before[number], "title": "new"} for number in (1, 2)]
        session.execute(update(cls), given, execution_options=options)
        assert known.title == "new"
        assert known.version == versions(session, cls)[1] != before[1]
        known.title = "newer"
        session.commit()

    await on_session(world, engine, work)
    after = await read(world, engine, cls)
    given = [{"id": 3, "version": before[3], "title": "x"}, {"id": 1, "version": before[1], "title": "x"}]
    with pytest.raises(VersionConflictError) as conflict:
        await on_session(world, engine, executing(update(cls), given, execution_options=options))
    assert [(item.pk, item.expected, item.found) for item in conflict.value.items] == [((1,), before[1], after[1])]
    assert await read(world, engine, cls) == after


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [{}, {"version": None}])
async def test_an_update_by_primary_key_without_a_version_is_rejected(
    world: World, kind: str, version: dict[str, Any]
) -> None:
    """A row without its version, or with None for it, is rejected by name before anything is sent."""
    engine = world.engine()
    cls = await page(world, engine, kind)
    before = await read(world, engine, cls)
    given = [{"id": 1, "version": before[1], "title": "x"}, {"id": 2, "title": "x"} | version]
    with pytest.raises(VersionRequiredError, match="1 of the 2 rows has no version"):
        await on_session(world, engine, executing(update(cls), given))
    assert await read(world, engine, cls) == before


async def test_an_update_by_primary_key_with_criteria_is_rejected(world: World) -> None:
    """With a WHERE clause in addition to the keys, SQLAlchemy does not count rows, so a conflict would not be detected."""
    engine = world.engine()
    cls = await page(world, engine)
    given = [{"id": 1, "version": 1, "title": "x"}, {"id": 2, "version": 1, "title": "x"}]
    with pytest.raises(VersionRequiredError, match="its own WHERE"):
        await on_session(
            world,
            engine,
            executing(update(cls).where(cls.views == 0), given, execution_options={"synchronize_session": None}),
        )


@pytest.mark.every_driver
async def test_a_row_given_twice_is_a_value_error(world: World) -> None:
    """C068: the same primary key twice in one batch is a separate error."""
    engine = world.engine()
    cls = await page(world, engine)
    given = [{"id": 1, "version": 1, "title": "x"}, {"id": 1, "version": 1, "title": "y"}]
    with pytest.raises(ValueError, match=r"given more than once: \[\(1,\)\]"):
        await on_session(world, engine, executing(update(cls), given))
    assert (await read(world, engine, cls))[1] == 1


async def test_an_update_by_primary_key_raises_the_other_tables_version(world: World) -> None:
    """An update of columns of the second table alone compares and increments the version in the first."""
    engine = world.engine()
    cls = await joined(world, engine)
    await on_session(world, engine, executing(update(cls), [{"id": 1, "version": 1, "views": 3}]))
    assert (await read(world, engine, cls))[1] == 2
    with pytest.raises(VersionConflictError):
        await on_session(world, engine, executing(update(cls), [{"id": 1, "version": 1, "views": 4}]))


# ------------------------------------------------------------ what is refused


async def test_a_statement_on_the_second_table_of_a_class_is_rejected(world: World) -> None:
    """Joined inheritance: neither the guard nor a trigger sees an UPDATE of the child's table alone from its parent's."""
    engine = world.engine()
    for cls in (await joined(world, engine), await joined(world, engine, "server")):
        await refused_on_its_second_table(world, engine, cls)


async def refused_on_its_second_table(world: World, engine: Any, cls: Any) -> None:
    for statement in (update(cls).values(views=1), update(cls.__table__).values(views=1)):
        # A trigger does not help either, so the advice does not mention the mode "server".
        with pytest.raises(VersionRequiredError, match="the versions are in the table 'item_.*instances and flush$"):
            await on_session(world, engine, executing(statement))
    parent = cls.__mapper__.inherits.class_
    await on_session(world, engine, executing(update(parent).values(title="new")))
    assert set((await read(world, engine, cls)).values()) == {2}


@pytest.mark.parametrize("form", FORMS)
async def test_a_session_can_refuse_statements(world: World, form: Callable[[Any], Any]) -> None:
    """With bulk="refuse" a statement that would have to raise versions is not sent."""
    engine = world.engine()
    cls = await page(world, engine)
    with pytest.raises(VersionRequiredError, match='bulk="refuse"'):
        await on_session(world, engine, executing(form(cls)), bulk="refuse")
    assert (await read(world, engine, cls))[1] == 1


async def test_a_session_that_rejects_looks_inside_of_a_statement(world: World) -> None:
    """With bulk="refuse" an UPDATE is found as a part of a SELECT too."""
    engine = world.engine()
    cls = await page(world, engine)
    inside = by_criteria(cls).returning(cls.id).cte()
    for statement in (select(inside.c.id), select(cls.id).where(cls.id.in_(select(inside.c.id)))):
        with pytest.raises(VersionRequiredError, match="inside another statement"):
            await on_session(world, engine, executing(statement), bulk="refuse")


@pytest.mark.parametrize("bulk", ["bump", "refuse"])
async def test_a_nested_statement_must_raise_the_version(world: World, bulk: str) -> None:
    """C064: an UPDATE inside another statement or in from_statement() changes no row without its version."""
    engine = world.engine()
    cls = await page(world, engine)
    inside = returning(cls).cte()
    for statement in (
        select(inside.c.id),
        select(cls.title).join(inside, inside.c.id == cls.id),
        select(literal(1)).add_cte(inside),
        select(cls).from_statement(by_criteria(cls).returning(cls)),
        select(cls).from_statement(an_upsert(cls).returning(cls)),
    ):
        with pytest.raises(VersionRequiredError, match="inside another statement") as refused:
            await on_session(world, engine, executing(statement), bulk=bulk)
        # The values() of an upsert are those of the new row, so setting the version there would not be enough.
        upserts = "ON CONFLICT" in str(statement.compile(dialect=postgresql.dialect()))
        assert ("Page.version + 1 in its values()" in str(refused.value)) is not upserts
    counted = returning(cls).values(version=cls.version + 1).cte()
    await on_session(world, engine, executing(select(counted.c.id)), bulk=bulk)
    expected = 2
    assert (await read(world, engine, cls))[1] == expected


async def test_a_statement_that_comes_as_a_lambda_raises_the_version(world: World) -> None:
    """C064: lambda_stmt() is the statement that the lambda returns."""
    engine = world.engine()
    cls = await page(world, engine)
    await on_session(world, engine, executing(lambda_stmt(lambda: update(cls).where(cls.id == 1).values(title="new"))))
    expected = 2
    assert (await read(world, engine, cls))[1] == expected


async def test_what_has_no_parts_can_be_executed_under_every_policy(world: World) -> None:
    """The next value of a sequence can be queried under every policy, including bulk="refuse"."""
    engine = world.engine()
    sequence = Sequence("numbers_of_pages")

    def work(session: Session) -> None:
        sequence.create(session.connection())
        assert session.scalar(sequence) == 1

    await on_session(world, engine, work, bulk="refuse")


async def test_a_session_that_rejects_lets_through_what_is_guarded(world: World) -> None:
    """bulk="refuse" admits deletes, inserts, updates by key with versions, and statements on a table with a version trigger."""
    engine = world.engine()
    cls, other = await page(world, engine), await page(world, engine, "server")

    def work(session: Session) -> None:
        session.execute(insert(cls), [{"id": 6}])
        session.execute(delete(cls).where(cls.id == 6))
        session.execute(update(cls), [{"id": 1, "version": 1, "title": "new"}])
        session.execute(update(cls).where(cls.id == 2).values(title="new", version=cls.version + 1))
        session.execute(by_criteria(other))
        session.commit()

    await on_session(world, engine, work, bulk="refuse")
    assert await read(world, engine, cls) == {1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
    assert (await read(world, engine, other))[1] == 2


@pytest.mark.parametrize("form", FORMS)
async def test_a_session_can_leave_statements_alone(world: World, form: Callable[[Any], Any]) -> None:
    """With bulk="ignore" a statement is sent unchanged."""
    engine = world.engine()
    cls = await page(world, engine)
    expected = 1
    await on_session(world, engine, executing(form(cls)), bulk="ignore")
    assert (await read(world, engine, cls))[1] == expected


async def test_a_version_that_is_assigned_is_rejected(world: World) -> None:
    """A value for the version in an UPDATE is an error; an expression that raises it is left as it is."""
    engine = world.engine()
    cls = await page(world, engine)
    table = cls.__table__
    for statement in (
        update(cls).values(version=7),
        update(table).values(version=7),
        update(cls).values({cls.version: 7}),
        update(cls).values(version=cls.version),
    ):
        with pytest.raises(ValueError, match=r"Page\.version is incremented automatically"):
            await on_session(world, engine, executing(statement))
    with pytest.raises(ValueError, match=r"Page\.version is incremented automatically"):
        await on_session(world, engine, executing(update(cls).where(cls.id == 1), {"version": 7}))
    await on_session(world, engine, executing(update(cls).values(version=cls.version + 10)))
    assert set((await read(world, engine, cls)).values()) == {11}


async def test_values_in_an_order_of_their_own_are_rejected(world: World) -> None:
    """ordered_values() is rejected, because the version cannot be added to it."""
    engine = world.engine()
    cls = await page(world, engine)
    with pytest.raises(VersionRequiredError, match="ordered_values"):
        await on_session(world, engine, executing(update(cls).ordered_values((cls.title, "new"))))


async def test_statements_of_other_classes_stay_as_they_are(world: World) -> None:
    """Statements on classes without versions are sent unchanged under every policy."""

    class Base(DeclarativeBase):
        pass

    class Note(Base):
        __tablename__ = "note_without_version"
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")

    engine = world.engine()
    await page(world, engine)

    def work(session: Session) -> None:
        Note.metadata.create_all(session.connection())
        sent = statements(session)
        session.execute(update(Note).values(title="new"))
        table: Any = Note.__table__
        session.execute(update(table).values(title="new"))
        assert all("version" not in text.split("SET")[1] for text, _ in sent)
        session.rollback()

    for policy in ("bump", "refuse", "ignore"):
        await on_session(world, engine, work, bulk=policy)
