"""A `VersionConflictError` lists exactly the rows that others changed, and leaves the session usable."""

from __future__ import annotations

import gc
import secrets
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import ForeignKey, create_engine, event, select, text, update
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, defer, load_only, mapped_column, relationship, sessionmaker
from sqlalchemy.orm.exc import StaleDataError, UnmappedInstanceError

from pgfence.errors import VersionConflict, VersionConflictError, VersionRequiredError
from pgfence.versions import Versioned, VersionedSession
from support.versioned_models import meddle, pages, stored
from support.versioned_rows import made, on_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.one_driver

MODES = ("client", "uuid", "server")


def versions(admin: psycopg.Connection[Any], cls: Any) -> dict[int, Any]:
    return {row[0]: row[2] for row in stored(admin, cls)}


# ------------------------------------------------------------ where it is raised, and what it lists


@pytest.mark.parametrize("act", ["flush", "autoflush", "commit", "savepoint"])
async def test_wherever_a_flush_happens_the_conflict_names_the_row(
    world: World, admin: psycopg.Connection[Any], act: str
) -> None:
    """By flush(), by the autoflush of a query, by commit() and by the end of a savepoint: class, key, expected, found."""
    engine = world.engine()
    cls = await pages(world, engine)

    def work(session: Session) -> None:
        session.get_one(cls, 1).title = "ours"
        meddle(admin, cls, 1)
        if act == "flush":
            session.flush()
        elif act == "autoflush":
            session.scalars(select(cls)).all()
        elif act == "commit":
            session.commit()
        else:
            with session.begin_nested():
                session.get_one(cls, 2).title = "ours"

    with pytest.raises(VersionConflictError, match=r"Page 1 was read at version 1 and is at version 2") as refused:
        await on_session(world, engine, work)
    error = refused.value
    assert error.items == (VersionConflict(cls, (1,), 1, 2),)
    assert (error.retryable, error.http_status) == (True, 409)
    assert isinstance(error.__cause__, StaleDataError)


@pytest.mark.parametrize("mode", ["client", "uuid", "server", "xmin"])
async def test_a_partly_loaded_row_is_guarded_by_the_version_read_with_it(
    world: World, admin: psycopg.Connection[Any], mode: str
) -> None:
    """load_only() and defer() leave the version in: one that the flush read would hide a change since."""
    engine = world.engine()
    cls = await pages(world, engine, mode=mode)

    def work(session: Session) -> None:
        for number, options in enumerate([load_only(cls.title), defer("*"), defer(cls.version)], start=1):
            page = session.scalars(select(cls).options(options).where(cls.id == number)).one()
            meddle(admin, cls, number)
            page.title = "ours"
            with pytest.raises(VersionConflictError):
                session.flush()
            session.rollback()

    await on_session(world, engine, work)
    assert [title for _, title, _ in stored(admin, cls)][:3] == ["theirs"] * 3


@pytest.mark.parametrize("mode", ["client", "xmin"])
async def test_columns_of_an_expired_instance_are_read_with_its_version(
    world: World, admin: psycopg.Connection[Any], mode: str
) -> None:
    """refresh() of some columns and a deferred column bring the version along: one that the flush read would hide a change."""
    engine = world.engine()
    cls = await pages(world, engine, mode=mode)

    def work(session: Session) -> None:
        for number, options in enumerate([(), [defer(cls.title)]], start=1):
            page = session.scalars(select(cls).options(*options).where(cls.id == number)).one()
            session.commit()
            if number == 1:
                session.refresh(page, ["title"])
            before = page.title
            meddle(admin, cls, number)
            page.title = before + "ours"
            with pytest.raises(VersionConflictError):
                session.flush()
            session.rollback()

    await on_session(world, engine, work)
    assert [title for _, title, _ in stored(admin, cls)][:2] == ["theirs"] * 2


@pytest.mark.parametrize("check", ["auto", "row", "batch"])
@pytest.mark.parametrize("change", ["update", "delete"])
def test_a_row_that_was_read_without_its_version_is_rejected(engine: Any, check: Any, change: str) -> None:
    """An instance from SQL text that omits the version has no known version to compare."""
    with engine.connect() as connection:
        Base.metadata.create_all(connection)
        with VersionedSession(connection, conflict_check=check) as session:
            session.add(Card(id=1))
            session.flush()
            session.expunge_all()
            partial = text(f"SELECT id, title FROM {Card.__tablename__}")
            card = session.scalars(select(Card).from_statement(partial)).one()
            if change == "update":
                card.title += "ours"
            else:
                session.delete(card)
            with pytest.raises(VersionRequiredError, match="read without its version"):
                session.flush()
        connection.rollback()


def test_a_session_dropped_in_a_savepoint_returns_its_connection(dsn: str) -> None:
    """What is kept of a savepoint does not keep the session, nor its connection out of the pool."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")

    def drop() -> weakref.ref[Session]:
        session = VersionedSession(engine)
        session.begin_nested()
        session.execute(select(1))
        return weakref.ref(session)

    dropped = drop()
    gc.collect()
    assert dropped() is None
    engine.dispose()


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check", ["auto", "row", "batch"])
async def test_exactly_the_rows_that_others_have_written_are_listed(
    world: World, admin: psycopg.Connection[Any], mode: str, check: str
) -> None:
    """Five rows in one flush, one changed elsewhere, one deleted elsewhere, one deleted here: two conflicts, one without found."""
    engine = world.engine()
    cls = await pages(world, engine, mode=mode)
    before = versions(admin, cls)

    def work(session: Session) -> None:
        *changed, last = session.scalars(select(cls).order_by(cls.id))
        for page in changed:
            page.title = "ours"
        session.delete(last)
        meddle(admin, cls, 2)
        admin.execute(f"DELETE FROM {cls.__tablename__} WHERE id = 4".encode())
        session.commit()

    with pytest.raises(VersionConflictError, match="Page 4 was read at version .* and has been deleted") as refused:
        await on_session(world, engine, work, conflict_check=check)
    found = versions(admin, cls)[2]
    assert set(refused.value.items) == {(cls, (2,), before[2], found), (cls, (4,), before[4], None)}
    assert [row[1] for row in stored(admin, cls)] == ["", "theirs", "", ""]


@pytest.mark.parametrize("mode", MODES)
async def test_rows_written_before_in_the_same_transaction_are_not_listed(
    world: World, admin: psycopg.Connection[Any], mode: str
) -> None:
    """What an earlier flush or statement of the transaction has changed or added is not a conflict when all is rolled back."""
    engine = world.engine()
    cls = await pages(world, engine, mode=mode)
    before = versions(admin, cls)

    def work(session: Session) -> None:
        first, second, third = (session.get_one(cls, number) for number in (1, 2, 3))
        first.title = "once"
        new = cls(id=9)
        session.add(new)
        session.flush()
        session.execute(update(cls).where(cls.id == 3).values(title="stated"))
        meddle(admin, cls, 2)
        for page in (first, second, third, new):
            page.title = "ours"
        session.commit()

    with pytest.raises(VersionConflictError) as refused:
        await on_session(world, engine, work)
    assert refused.value.items == ((cls, (2,), before[2], versions(admin, cls)[2]),)


async def test_a_row_deleted_and_created_again_is_a_conflict_by_uuid(
    world: World, admin: psycopg.Connection[Any]
) -> None:
    """A number starts again at 1 and would match; a random version does not."""
    engine = world.engine()
    cls = await pages(world, engine, mode="uuid")

    def work(session: Session) -> None:
        session.get_one(cls, 1).title = "ours"
        again = f"DELETE FROM {cls.__tablename__} WHERE id = 1"
        admin.execute(again.encode())
        admin.execute(f"INSERT INTO {cls.__tablename__} VALUES (1, 'theirs', gen_random_uuid())".encode())
        session.commit()

    with pytest.raises(VersionConflictError):
        await on_session(world, engine, work)


async def test_an_expired_instance_of_a_deleted_row_is_a_conflict(world: World, admin: psycopg.Connection[Any]) -> None:
    """The version at which an expired instance was read is unknown, and `found` is None."""
    engine = world.engine()
    cls = await pages(world, engine)

    def work(session: Session) -> None:
        page = session.get_one(cls, 1)
        session.commit()
        page.title = "ours"
        admin.execute(f"DELETE FROM {cls.__tablename__} WHERE id = 1".encode())
        session.commit()

    with pytest.raises(VersionConflictError) as refused:
        await on_session(world, engine, work)
    assert refused.value.items == ((cls, (1,), None, None),)


async def test_a_stale_row_of_another_class_stays_sqlalchemys_error(
    world: World, admin: psycopg.Connection[Any]
) -> None:
    """A StaleDataError about a class without versions is left as it is."""
    engine = world.engine()

    class Base(DeclarativeBase):
        pass

    class Note(Base):
        __tablename__ = f"note_{secrets.token_hex(6)}"
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")

    await made(world, engine, Note)
    cls = await pages(world, engine)

    def work(session: Session) -> None:
        session.add(Note(id=1))
        session.commit()
        note, page = session.get_one(Note, 1), session.get_one(cls, 1)
        note.title = page.title = "ours"
        admin.execute(f"DELETE FROM {Note.__tablename__}".encode())
        session.commit()

    with pytest.raises(StaleDataError):
        await on_session(world, engine, work)


# ------------------------------------------------------------ after it


@pytest.mark.twins
async def test_after_a_conflict_the_session_reads_what_is_there(world: World, admin: psycopg.Connection[Any]) -> None:
    """C069: until rollback() the session rejects work; after it the instances are read again, and a second attempt passes."""
    engine = world.engine()
    cls = await pages(world, engine)

    def work(session: Session) -> None:
        page = session.get_one(cls, 1)
        page.title = "ours"
        meddle(admin, cls, 1)
        with pytest.raises(VersionConflictError):
            session.commit()
        with pytest.raises(PendingRollbackError):
            session.get_one(cls, 2)
        session.rollback()
        assert (page.title, page.version) == ("theirs", 2)
        page.title = "ours"
        session.commit()

    await on_session(world, engine, work)
    assert stored(admin, cls)[0] == (1, "ours", 3)


@pytest.mark.twins
async def test_a_conflict_in_a_savepoint_leaves_what_was_before_it_usable(
    world: World, admin: psycopg.Connection[Any]
) -> None:
    """What was written before the savepoint is committed, the conflict lists one row, and its instance is read again."""
    engine = world.engine()
    cls = await pages(world, engine)

    def work(session: Session) -> None:
        session.get_one(cls, 1).title = "before"
        page = session.get_one(cls, 2)
        meddle(admin, cls, 2)
        with pytest.raises(VersionConflictError) as refused, session.begin_nested():
            session.get_one(cls, 3).title = "inside"
            session.flush()
            page.title = "ours"
            session.get_one(cls, 3).title = "inside again"
            session.get_one(cls, 1).title = "inside, too"
            session.flush()
        assert refused.value.items == ((cls, (2,), 1, 2),)
        assert (page.title, page.version) == ("theirs", 2)
        session.get_one(cls, 4).title = "after"
        session.commit()

    await on_session(world, engine, work)
    assert [row[1:] for row in stored(admin, cls)] == [("before", 2), ("theirs", 2), ("", 1), ("after", 2), ("", 1)]


@pytest.mark.every_driver
async def test_the_look_at_the_rows_holds_nothing(world: World, admin: psycopg.Connection[Any]) -> None:
    """After the conflict, before rollback(), the session's connection is in no transaction and others may write the row."""
    engine = world.engine()
    cls = await pages(world, engine)

    def work(session: Session) -> None:
        pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        session.get_one(cls, 1).title = "ours"
        meddle(admin, cls, 1)
        with pytest.raises(VersionConflictError):
            session.flush()
        state = admin.execute("SELECT state FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone()
        assert state == ("idle",)
        meddle(admin, cls, 1)

    await on_session(world, engine, work)


@pytest.mark.every_driver
async def test_a_conflict_in_repeatable_read_is_a_serialization_failure(
    world: World, admin: psycopg.Connection[Any]
) -> None:
    """In REPEATABLE READ a conflict is SQLSTATE 40001, which `run_transaction` retries too."""
    engine = world.engine(isolation_level="REPEATABLE READ")
    cls = await pages(world, engine)

    def work(session: Session) -> None:
        session.get_one(cls, 1).title = "ours"
        meddle(admin, cls, 1)
        session.commit()

    with pytest.raises(Exception, match="could not serialize"):
        await on_session(world, engine, work)


# ------------------------------------------------------------ sessions on a Connection


@pytest.fixture
def engine(dsn: str) -> Iterator[Any]:
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    yield engine
    engine.dispose()


class Base(DeclarativeBase):
    """Of one class for the tests below."""


class Card(Versioned, Base):
    """A class whose rows live in one test's transaction."""

    __tablename__ = f"card_{secrets.token_hex(6)}"
    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(default="")


class Note(Base):
    """A class without a version."""

    __tablename__ = f"note_{secrets.token_hex(6)}"
    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(default="")


@pytest.mark.parametrize("mode", ["create_savepoint", "conditional_savepoint", "rollback_only"])
@pytest.mark.parametrize("check", ["auto", "row", "batch"])
def test_two_sessions_on_one_connection_are_in_conflict_as_elsewhere(engine: Any, mode: Any, check: Any) -> None:
    """In a test that rolls everything back: rows that no other connection sees, and a rollback that undoes the other's write."""
    with engine.connect() as connection:
        outer = connection.begin()
        Base.metadata.create_all(connection)
        one, other = (VersionedSession(connection, join_transaction_mode=mode, conflict_check=check) for _ in range(2))
        one.add_all([Card(id=1), Card(id=2)])
        one.commit()
        first, second = one.get_one(Card, 1), one.get_one(Card, 2)
        other.get_one(Card, 1).title = "theirs"
        other.commit()
        first.title = second.title = "ours"
        with pytest.raises(VersionConflictError) as refused:
            one.commit()
        assert refused.value.items == ((Card, (1,), 1, 2),)
        one.rollback()
        assert outer.is_active is (mode == "create_savepoint")
        if outer.is_active:
            one.get_one(Card, 1).title = "ours"
            one.commit()
            assert connection.execute(select(Card.title).where(Card.id == 1)).scalar_one() == "ours"
        one.close()
        other.close()


# ------------------------------------------------------------ rows that are kept from being written


async def test_a_row_that_a_policy_hides_counts_as_deleted(world: World, admin: psycopg.Connection[Any]) -> None:
    """C068: a row that row-level security hides from the session is a conflict in which no version was found."""
    engine, role = world.engine(), f"reader_{secrets.token_hex(6)}"
    cls = await pages(world, engine)
    table = cls.__tablename__
    admin.execute(f"CREATE ROLE {role}".encode())
    admin.execute(f"GRANT SELECT, UPDATE ON {table} TO {role}".encode())
    admin.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY".encode())
    admin.execute(f"CREATE POLICY a ON {table} FOR SELECT USING (title <> 'theirs')".encode())
    admin.execute(f"CREATE POLICY b ON {table} FOR UPDATE USING (true)".encode())

    def work(session: Session) -> None:
        session.connection().execute(text(f"SET ROLE {role}"))
        session.commit()
        page = session.get_one(cls, 1)
        meddle(admin, cls, 1)
        page.title = "ours"
        try:
            session.commit()
        finally:
            session.rollback()
            session.connection().execute(text("RESET ROLE"))
            session.commit()

    with pytest.raises(VersionConflictError, match="has been deleted, or is hidden from this role"):
        await on_session(world, engine, work)
    admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


# ------------------------------------------------------------ merge


async def test_merge_without_a_version_overwrites_nothing(world: World, admin: psycopg.Connection[Any]) -> None:
    """C072: an instance from a form has no version; if its row exists it is rejected, otherwise it is added."""
    engine = world.engine()
    cls = await pages(world, engine)

    def work(session: Session) -> None:
        with pytest.raises(VersionRequiredError, match="load_for_version"):
            session.merge(cls(id=1, title="mine"))
        session.merge(cls(id=9, title="new"))
        session.commit()

    await on_session(world, engine, work)
    assert [row for row in stored(admin, cls) if row[1]] == [(9, "new", 1)]


async def test_merge_of_what_was_read_before_compares_the_version(world: World, admin: psycopg.Connection[Any]) -> None:
    """A detached instance overwrites only the version it was read at, and does not bring back a deleted row."""
    engine = world.engine()
    cls = await pages(world, engine)
    kept = [await on_session(world, engine, lambda session, n=n: session.get_one(cls, n)) for n in (1, 2, 3)]
    meddle(admin, cls, 2)
    admin.execute(f"DELETE FROM {cls.__tablename__} WHERE id = 3".encode())

    def work(session: Session) -> None:
        kept[0].title = "mine"
        session.merge(kept[0])
        session.commit()
        for page, found in ((kept[1], 2), (kept[2], None)):
            with pytest.raises(VersionConflictError) as refused:
                session.merge(page)
            assert refused.value.items == ((cls, (page.id,), 1, found),)
            assert not refused.value.retryable

    await on_session(world, engine, work)
    assert stored(admin, cls)[:2] == [(1, "mine", 2), (2, "theirs", 2)]


async def test_merge_looks_at_what_it_takes_along(world: World) -> None:
    """merge() also rejects a related instance that has no version."""
    engine = world.engine()

    class Family(DeclarativeBase):
        pass

    name = f"order_{secrets.token_hex(6)}"

    class Order(Versioned, Family):
        __tablename__ = name
        id: Mapped[int] = mapped_column(primary_key=True)
        before_id: Mapped[int | None] = mapped_column(ForeignKey(f"{name}.id"))
        before: Mapped[Any] = relationship("Order", remote_side="Order.id")

    await made(world, engine, Order)

    def work(session: Session) -> None:
        session.add(Order(id=1))
        session.commit()
        with pytest.raises(VersionRequiredError, match="Order 1 has no version"):
            session.merge(Order(id=2, before=Order(id=1)))

    await on_session(world, engine, work)


async def test_merge_rejects_an_xmin_from_elsewhere(world: World) -> None:
    """C071: the version of an instance that has left its session would miss what the same transaction wrote after it."""
    engine = world.engine()
    cls = await pages(world, engine, mode="xmin")
    page = await on_session(world, engine, lambda session: session.get_one(cls, 1))

    def work(session: Session) -> None:
        with pytest.raises(VersionRequiredError, match="only in the session that read it"):
            session.merge(page)

    await on_session(world, engine, work)


@pytest.mark.parametrize("cls", [Note, Card])
def test_merge_inside_a_flush_is_that_of_a_session(engine: Any, cls: Any) -> None:
    """A before_flush listener may merge, instances of classes with a version and without one."""
    with VersionedSession(engine) as session:
        Base.metadata.create_all(session.connection())
        merged: list[Any] = []

        def listener(session: VersionedSession, *_: Any) -> None:
            merged.append(session.merge(cls(id=7, title="merged")))
            if hasattr(Session, "merge_all"):  # since SQLAlchemy 2.1
                merged.extend(session.merge_all([cls(id=8, title="merged")]))

        event.listen(session, "before_flush", listener, once=True)
        session.add(Card(id=1))
        session.flush()
        assert len(merged) == len(session.scalars(select(cls).where(cls.title == "merged")).all())
        session.rollback()


@pytest.mark.parametrize("given", [None, 5, "x", Card], ids=repr)
def test_merge_of_what_is_not_mapped_raises_as_in_a_session(given: Any) -> None:
    """It is SQLAlchemy's UnmappedInstanceError for anything that is not an instance."""
    with VersionedSession() as session, pytest.raises(UnmappedInstanceError):
        session.merge(given)
    if hasattr(Session, "merge_all"):
        with VersionedSession() as session, pytest.raises(UnmappedInstanceError):
            session.merge_all([given])


def test_unknown_options_are_rejected(engine: Any) -> None:
    """A misspelled policy is an error when the session is created."""
    with pytest.raises(ValueError, match="bulk must be one of"):
        VersionedSession(engine, bulk="bumps")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="conflict_check must be one of"):
        sessionmaker(engine, class_=VersionedSession, conflict_check="rows")()
