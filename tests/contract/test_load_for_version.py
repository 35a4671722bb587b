"""`load_for_version` loads a row at the version that a client has seen, or raises; `etag` is its tag."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Connection, Delete, ForeignKey, Update, event, inspect
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    make_transient_to_detached,
    mapped_column,
    relationship,
    scoped_session,
    sessionmaker,
    synonym,
)
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.orm.exc import StaleDataError

from pgfence import schema
from pgfence.errors import SchemaError, TransactionStateError, VersionConflict, VersionConflictError
from pgfence.versions import Versioned, VersionedSession, VersionedUUID, load_for_version
from pgfence.versions.etags import IfMatch, etag, if_match

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World

pytestmark = pytest.mark.one_driver

A_UUID = UUID("8f1f9f0e-3f0e-4b57-9d57-0f6f5a1d6b1a")


def page(mixin: Any = Versioned, table: str = "", **options: Any) -> Any:
    """Make a versioned class with a separate table."""

    class Base(DeclarativeBase):
        pass

    class Page(mixin, Base):
        __tablename__ = table or f"page_{secrets.token_hex(6)}"
        vars().update(options)
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str]

    return Page


def texts() -> tuple[Any, Any]:
    """Make a versioned class and a subclass with a separate table, loaded together by outer joins."""

    class Base(DeclarativeBase):
        pass

    suffix = secrets.token_hex(6)

    class Author(Base):
        __tablename__ = f"author_{suffix}"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Text(Versioned, Base):
        __tablename__ = f"text_{suffix}"
        __mapper_args__: ClassVar = {
            "polymorphic_on": "kind",
            "polymorphic_identity": "text",
            "with_polymorphic": "*",
        }
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        title: Mapped[str]
        author_id: Mapped[int | None] = mapped_column(ForeignKey(Author.id))
        author: Mapped[Author | None] = relationship(lazy="joined")

    class Essay(Text):
        __tablename__ = f"essay_{suffix}"
        __mapper_args__: ClassVar = {"polymorphic_identity": "essay"}
        id: Mapped[int] = mapped_column(ForeignKey(Text.id), primary_key=True)
        topic: Mapped[str]

    return Text, Essay


class Desk:
    """Sessions of a world on one engine, and what is sent through it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.engine = world.engine()
        self.sent: list[str] = []
        engine = self.engine.sync_engine if world.is_async else self.engine
        event.listen(engine, "before_cursor_execute", lambda *args: self.sent.append(args[2]))

    def open(self, kind: Any = VersionedSession, **options: Any) -> Any:
        """Open a session of this world, for `async with`."""
        if self.world.is_async:
            return self.world.enter(AsyncSession(self.engine, sync_session_class=kind, **options))
        return self.world.enter(kind(self.engine, **options))

    async def on(self, session: Any, work: Callable[[Any], Any]) -> Any:
        """Hand the sync side of a session to some work."""
        if self.world.is_async:
            return await session.run_sync(work)
        return await self.world.call(work, session)

    async def load(self, session: Any, *args: Any, **options: Any) -> Any:
        return await self.world.call(load_for_version, session, *args, **options)

    async def do(self, work: Callable[[Any], Any]) -> Any:
        """Do some work in a separate session, and commit it."""

        def body(session: Any) -> Any:
            answer = work(session)
            session.commit()
            return answer

        async with self.open() as session:
            return await self.on(session, body)

    async def save(self, session: Any, row: Any, title: str = "mine") -> None:
        """Change a row that the session has loaded, and commit."""
        await self.on(session, lambda session: setattr(row, "title", title) or session.commit())

    async def make(self, cls: Any, *rows: Any) -> None:
        """Create the tables of a class, and add rows."""
        await self.do(lambda session: cls.metadata.create_all(session.connection()) or session.add_all(rows))

    async def retitle(self, cls: Any, pk: Any = 1, title: str = "theirs") -> None:
        """Change a row, as another client does."""
        await self.do(lambda session: setattr(session.get_one(cls, pk), "title", title))

    async def title(self, cls: Any, pk: Any = 1) -> str:
        return await self.do(lambda session: session.get_one(cls, pk).title)


@pytest.fixture
def desk(world: World) -> Desk:
    return Desk(world)


# ------------------------------------------------------------ the version that a client has seen


@pytest.mark.twins
async def test_of_two_clients_the_second_gets_a_conflict(desk: Desk) -> None:
    """C072: both have read version 1; the second to save gets row, expected and found version, and its change is not saved."""
    cls = page()
    await desk.make(cls, cls(id=1, title="old"))
    for title in ("first", "second"):
        async with desk.open() as session:
            try:
                row = await desk.load(session, cls, 1, 1)
                await desk.save(session, row, title)
            except VersionConflictError as error:
                refused = error
    assert refused.items == (VersionConflict(cls, (1,), expected=1, found=2),)
    assert (refused.http_status, refused.retryable) == (412, False)
    assert "is at version 2" in str(refused) and "(1)" in str(refused)
    assert await desk.title(cls) == "first"


async def test_a_rejected_load_sends_one_select_only(desk: Desk) -> None:
    """C072: the version is compared before any UPDATE, and what else the session has to write waits as well."""
    cls = page()
    await desk.make(cls, cls(id=1, title="old"))
    await desk.retitle(cls)
    async with desk.open() as session:
        session.add(cls(id=2, title="new"))
        desk.sent.clear()
        with pytest.raises(VersionConflictError):
            await desk.load(session, cls, 1, 1)
        assert [statement.split()[0] for statement in desk.sent] == ["SELECT"]


@pytest.mark.parametrize("lock", [False, True])
async def test_an_older_copy_in_the_session_neither_passes_nor_stays(desk: Desk, lock: bool) -> None:
    """C072: what the session has loaded before is read again, so its old version does not match, and the new one does."""
    cls = page()
    await desk.make(cls, cls(id=1, title="old"))
    for expected, passes in ((1, False), (3, True)):
        async with desk.open() as session:
            held = await desk.on(session, lambda session: session.get_one(cls, 1))
            await desk.retitle(cls, title=f"theirs {expected}")
            with nullcontext() if passes else pytest.raises(VersionConflictError):
                assert await desk.load(session, cls, 1, expected, lock=lock) is held
            assert (held.version, held.title) == (3 if passes else 2, f"theirs {expected}")
            if passes:
                await desk.save(session, held)
    assert await desk.title(cls) == "mine"


@pytest.mark.parametrize("expected", [1, IfMatch(("*",))], ids=str)
async def test_a_deleted_row_is_a_conflict_with_nothing_found(desk: Desk, expected: Any) -> None:
    """A deleted row is at no version: also `*` asks for a row that is there."""
    cls = page()
    await desk.make(cls, cls(id=1, title="old"))
    await desk.do(lambda session: session.delete(session.get_one(cls, 1)))
    async with desk.open() as session:
        with pytest.raises(
            VersionConflictError, match="it does not exist, or is hidden .* Tell the client that"
        ) as refused:
            await desk.load(session, cls, 1, expected)
    (item,) = refused.value.items
    assert (item.pk, item.found, refused.value.http_status) == ((1,), None, 412)


async def test_a_write_in_between_makes_the_flush_fail(desk: Desk) -> None:
    """The loaded version guards the flush: that conflict is retryable, because the client's version was right."""
    cls = page()
    await desk.make(cls, cls(id=1, title="old"))
    for kind, failure in ((VersionedSession, VersionConflictError), (Session, StaleDataError)):
        async with desk.open(kind) as session:
            row = await desk.load(session, cls, 1, IfMatch(("*",)))
            await desk.retitle(cls, title=f"theirs, {kind.__name__}")
            with pytest.raises(failure) as refused:
                await desk.save(session, row)
        assert await desk.title(cls) == f"theirs, {kind.__name__}"
        assert not isinstance(refused.value, VersionConflictError) or refused.value.http_status == 409


@pytest.mark.twins
async def test_a_lock_keeps_the_row_until_the_transaction_ends(desk: Desk, admin: psycopg.Connection[Any]) -> None:
    """With `lock=True` no other session writes the row, so the flush cannot fail; without it any may."""
    cls = page()
    await desk.make(cls, cls(id=1, title="old"), cls(id=2, title="old"))
    theirs = f"SELECT 1 FROM {cls.__tablename__} WHERE id = %s FOR UPDATE NOWAIT"
    for lock in (False, True):
        async with desk.open() as session:
            row = await desk.load(session, cls, 1, 1 + lock, lock=lock)
            if lock:
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    admin.execute(theirs, [1])
            else:
                admin.execute(theirs, [1])
            admin.execute(theirs, [2])
            await desk.save(session, row, str(lock))
            admin.execute(theirs, [1])


async def test_the_session_is_usable_after_a_conflict(desk: Desk) -> None:
    """A conflict sends nothing and breaks nothing: the same transaction can load the row at the version it has."""
    cls = page()
    await desk.make(cls, cls(id=1, title="old"))
    async with desk.open() as session:
        with pytest.raises(VersionConflictError) as refused:
            await desk.load(session, cls, 1, 7)
        row = await desk.load(session, cls, 1, refused.value.items[0].found)
        await desk.save(session, row)
    assert await desk.title(cls) == "mine"


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize("expected", [None, "1", 1.0, True, b"1", A_UUID, '"page-1"'], ids=repr)
async def test_a_version_of_the_wrong_type_is_rejected_without_a_query(desk: Desk, expected: Any) -> None:
    """C072: None and "1" are not versions, and neither silently skips the check; the message says which type it is."""
    cls = page()
    async with desk.open() as session:
        with pytest.raises(TypeError, match=r"version of Page is of type int.* int\(\.\.\.\)"):
            await desk.load(session, cls, 1, expected)
        assert desk.sent == []


@pytest.mark.parametrize("expected", [None, 1, str(A_UUID)], ids=repr)
def test_a_uuid_version_takes_a_uuid(expected: Any) -> None:
    """A version that is not a UUID is rejected, and the message names the type of the class's version."""
    with pytest.raises(TypeError, match=r"is of type UUID.* UUID\(\.\.\.\)"):
        load_for_version(Session(), page(VersionedUUID), 1, expected)


def test_other_classes_and_sessions_are_rejected() -> None:
    """A class without the mixin has no version to compare, and only a Session has a unit of work."""

    class Base(DeclarativeBase):
        pass

    class Plain(Base):
        __tablename__ = "plain"
        id: Mapped[int] = mapped_column(primary_key=True)

    for model in (Plain, object, Plain(id=1), "Plain"):
        with pytest.raises(TypeError, match="takes a class with the mixin Versioned"):
            load_for_version(Session(), model, 1, 1)
    for session in (sessionmaker(), None, Session):
        with pytest.raises(TypeError, match=r"load_for_version\(\) takes a Session or an AsyncSession, not"):
            load_for_version(session, page(), 1, 1)
    with pytest.raises(TypeError, match=r"etag\(\) takes an instance"):
        etag(Plain(id=1))
    with pytest.raises(TypeError, match=r"etag\(\) takes an instance"):
        etag(page())


@pytest.mark.twins
async def test_changes_that_are_not_flushed_are_neither_lost_nor_sent(desk: Desk) -> None:
    """Reading again would overwrite them, a flush would write them unchecked: the call raises, and they stay."""
    cls = page()
    await desk.make(cls, cls(id=1, title="old"), cls(id=2, title="old"))
    async with desk.open() as session:

        def change(session: Session) -> Any:
            row = session.get_one(cls, 1)
            row.title = "mine"
            return row

        row = await desk.on(session, change)
        desk.sent.clear()
        for pk in (1, 2):
            with pytest.raises(TransactionStateError, match=r"unflushed changes \(Page\).*call flush\(\) first"):
                await desk.load(session, cls, pk, 1)
        assert (desk.sent, row.title) == ([], "mine")
        await desk.on(session, lambda session: session.flush())
        await desk.load(session, cls, 1, 2)
        await desk.load(session, cls, 2, 1)

        await desk.on(session, lambda session: session.delete(row))
        with pytest.raises(TransactionStateError, match="unflushed changes"):
            await desk.load(session, cls, 1, 2)


# ------------------------------------------------------------ kinds of classes, keys and sessions


@pytest.mark.every_driver
async def test_uuid_versions_and_a_column_of_another_name(desk: Desk) -> None:
    """A UUID distinguishes a row from one created again in its place; the column's name in the table is the class's."""
    cls = page(VersionedUUID, __version_column__="row_version")
    await desk.make(cls, cls(id=1, title="old"))
    seen, tag = await desk.do(lambda session: (session.get_one(cls, 1).version, etag(session.get_one(cls, 1))))
    async with desk.open() as session:
        assert (await desk.load(session, cls, 1, seen)).title == "old"
        await desk.load(session, cls, 1, IfMatch((tag,)))
    await desk.do(lambda session: session.delete(session.get_one(cls, 1)))
    await desk.do(lambda session: session.add(cls(id=1, title="made again")))
    async with desk.open() as session:
        for expected in (seen, IfMatch((tag,))):
            with pytest.raises(VersionConflictError):
                await desk.load(session, cls, 1, expected)


async def test_a_version_that_the_server_counts_sees_every_writer(desk: Desk, admin: psycopg.Connection[Any]) -> None:
    """With `__version_mode__ = "server"` plain SQL is a writer like any other, and a tag is right as soon as it is flushed."""
    cls = page(__version_mode__="server")
    await desk.make(cls, cls(id=1, title="old"))
    await desk.world.call(schema.add_version_trigger, desk.engine, cls)
    admin.execute(f"UPDATE {cls.__tablename__} SET title = 'by hand'")
    async with desk.open() as session:
        with pytest.raises(VersionConflictError) as refused:
            await desk.load(session, cls, 1, if_match({"If-Match": f'"{cls.__tablename__}-1"'}))
        assert refused.value.items[0].found == 2
        row = await desk.load(session, cls, 1, 2)
        for version in (3, 4):
            await desk.on(session, lambda session, v=version: setattr(row, "title", str(v)) or session.flush())
            assert etag(row) == f'"{cls.__tablename__}-{version}"'
        await desk.world.call(session.commit)
    assert admin.execute(f"SELECT version, title FROM {cls.__tablename__}").fetchall() == [(4, "4")]


@pytest.mark.every_driver
async def test_xmin_is_compared_but_is_not_an_etag(desk: Desk) -> None:
    """C071: within a unit of work xmin is a version like any other; a tag that may outlive a dump of the database is rejected."""
    cls = page(__version_mode__="xmin")
    await desk.make(cls, cls(id=1, title="old"))
    seen = await desk.do(lambda session: session.get_one(cls, 1).version)
    async with desk.open() as session:
        row = await desk.load(session, cls, 1, seen)
        await desk.load(session, cls, 1, IfMatch(("*",)), lock=True)
        with pytest.raises(TypeError, match="xmin, which does not survive a dump"):
            etag(row)
        with pytest.raises(TypeError, match="xmin"):
            await desk.load(session, cls, 1, IfMatch(('"page-1"',)))
        await desk.save(session, row)
    async with desk.open() as session:
        with pytest.raises(VersionConflictError):
            await desk.load(session, cls, 1, seen)


async def test_a_row_without_a_version_is_no_conflict(desk: Desk, admin: psycopg.Connection[Any]) -> None:
    """A NULL in the column raises SchemaError with the statement that fills it, for every expected version and for a tag."""
    cls = page()
    await desk.make(cls, cls(id=1, title="old"))
    admin.execute(f"ALTER TABLE {cls.__tablename__} ALTER version DROP NOT NULL".encode())
    admin.execute(f"UPDATE {cls.__tablename__} SET version = NULL".encode())
    async with desk.open() as session:
        for expected in (1, IfMatch(("*",)), IfMatch((f'"{cls.__tablename__}-None"',))):
            with pytest.raises(SchemaError, match="To fill the column"):
                await desk.load(session, cls, 1, expected)
        row = await desk.on(session, lambda session: session.get_one(cls, 1))
        with pytest.raises(SchemaError, match="To fill the column"):
            etag(row)


@pytest.mark.parametrize("mixin", [Versioned, VersionedUUID])
async def test_the_statements_of_a_missing_version_fill_the_column(
    desk: Desk, mixin: Any, admin: psycopg.Connection[Any]
) -> None:
    """After the `command` of the error, the row can be loaded and written."""
    cls = page(mixin)
    await desk.make(cls, cls(id=1, title="old"))
    admin.execute(f"ALTER TABLE {cls.__tablename__} ALTER version DROP NOT NULL".encode())
    admin.execute(f"UPDATE {cls.__tablename__} SET version = NULL".encode())
    with pytest.raises(SchemaError) as caught:
        await desk.retitle(cls)
    admin.execute(caught.value.command.encode())
    await desk.retitle(cls)
    assert await desk.title(cls) == "theirs"


async def test_dataclasses_have_the_version_of_their_own_column(desk: Desk) -> None:
    """MappedAsDataclass: no argument of `__init__`, and the version is found under the name that the class gave it."""

    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Note(Versioned, Base):
        __tablename__ = f"note_{secrets.token_hex(6)}"
        __version_column__ = "row_version"
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str]

    await desk.make(Note, Note(id=1, title="old"))
    await desk.retitle(Note)
    async with desk.open() as session:
        with pytest.raises(VersionConflictError):
            await desk.load(session, Note, 1, 1)
        assert etag(await desk.load(session, Note, 1, 2)) == f'"{Note.__tablename__}-2"'


@pytest.mark.twins
async def test_composite_keys_as_a_tuple_and_as_a_dict(desk: Desk) -> None:
    """Keys are given as for `Session.get`; in the error they are a tuple in the order of the table."""

    class Base(DeclarativeBase):
        pass

    class Line(Versioned, Base):
        __tablename__ = f"line_{secrets.token_hex(6)}"
        book: Mapped[str] = mapped_column(primary_key=True)
        number: Mapped[int] = mapped_column("no", primary_key=True)
        title: Mapped[str]

    await desk.make(Line, Line(book="a", number=3, title="old"))
    async with desk.open() as session:
        for pk in (("a", 3), {"number": 3, "book": "a"}):
            assert (await desk.load(session, Line, pk, 1, lock=True)).title == "old"
            with pytest.raises(VersionConflictError) as refused:
                await desk.load(session, Line, pk, 2)
            assert refused.value.items[0].pk == ("a", 3)
        for gone in (("b", 3), {"number": 3, "book": "b"}):
            with pytest.raises(VersionConflictError) as refused:
                await desk.load(session, Line, gone, 1)
            assert refused.value.items == (VersionConflict(Line, ("b", 3), 1, None),)


@pytest.mark.parametrize("lock", [False, True])
async def test_a_key_is_given_as_for_session_get(desk: Desk, lock: bool) -> None:
    """A key is converted to the type of its column, and one that does not fit raises SQLAlchemy's error, with a lock too."""
    cls = page(second=synonym("id"))
    await desk.make(cls, cls(id=1, title="old"))
    async with desk.open() as session:
        for pk in ("1", True, {"id": "1"}, *([{"second": 1}] if hasattr(inspect(cls), "_pk_synonyms") else [])):
            assert (await desk.load(session, cls, pk, 1, lock=lock)).title == "old"
        for wrong in ({"title": 1}, {}, (1, 1), ()):
            with pytest.raises(InvalidRequestError, match="primary key"):
                await desk.load(session, cls, wrong, 1, lock=lock)


async def test_joined_inheritance_and_eager_rows_can_be_locked(desk: Desk) -> None:
    """Only the table with the version is locked, because FOR UPDATE of an outer join is rejected. A subclass has its base's tag."""
    base, derived = texts()
    await desk.make(base, derived(id=1, title="old", topic="locks"))
    for cls in (base, derived):
        async with desk.open() as session:
            row = await desk.load(session, cls, 1, 1, lock=True)
            assert (type(row), row.topic, etag(row)) == (derived, "locks", f'"{base.__tablename__}-1"')
            with pytest.raises(VersionConflictError):
                await desk.load(session, cls, 1, 2, lock=True)


@pytest.mark.twins
async def test_after_a_wait_for_a_lock_every_table_is_read_again(
    desk: Desk, dsn: str, admin: psycopg.Connection[Any], eventually: Callable[..., Any]
) -> None:
    """The row and its joined tables are those of the transaction that was waited for, not of the snapshot before it."""
    base, derived = texts()
    await desk.make(base, derived(id=1, title="old", topic="old"))
    waits = "SELECT FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"
    async with desk.open() as session:
        held = await desk.on(session, lambda session: session.get_one(derived, 1))
        with psycopg.connect(dsn) as theirs:
            theirs.execute(f"UPDATE {derived.__tablename__} SET topic = 'theirs'")
            theirs.execute(f"UPDATE {base.__tablename__} SET version = 2, title = 'theirs'")
            call = desk.world.other().call(load_for_version, session, derived, 1, IfMatch(("*",)), lock=True)
            loading = asyncio.ensure_future(call)
            await eventually(lambda: admin.execute(waits, [theirs.info.backend_pid]).fetchone() is not None)
            theirs.commit()
        assert (row := await loading) is held
        assert (row.version, row.title, row.topic) == (2, "theirs", "theirs")


@pytest.mark.twins
async def test_scoped_sessions_are_taken(desk: Desk) -> None:
    """A scoped_session or async_scoped_session stands for the session of the current thread or task."""
    cls = page()
    await desk.make(cls, cls(id=1, title="old"))
    if desk.world.is_async:
        factory = async_sessionmaker(desk.engine, sync_session_class=VersionedSession)
        session: Any = async_scoped_session(factory, scopefunc=lambda: 1)
    else:
        session = scoped_session(sessionmaker(desk.engine, class_=VersionedSession))
    assert (await desk.load(session, cls, 1, 1)).title == "old"
    await desk.world.call(session.remove)


@pytest.mark.twins
async def test_a_session_on_a_connection_is_taken(desk: Desk) -> None:
    """A test's session that is bound to a connection, and rolled back, loads and compares like any other."""
    cls = page()
    await desk.make(cls, cls(id=1, title="old"))

    def work(connection: Connection) -> None:
        connection.begin()
        with VersionedSession(connection, join_transaction_mode="create_savepoint") as session:
            load_for_version(session, cls, 1, 1).title = "mine"
            session.commit()
            with pytest.raises(VersionConflictError):
                load_for_version(session, cls, 1, 1)
        connection.rollback()

    if desk.world.is_async:
        async with desk.engine.connect() as connection:
            await connection.run_sync(work)
    else:
        with desk.engine.connect() as connection:
            work(connection)
    assert await desk.title(cls) == "old"


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("lock", [False, True])
async def test_a_session_that_reads_from_replicas_compares_on_the_primary(desk: Desk, lock: bool) -> None:
    """A replica may be behind, so the row is read on the engine to which the flush will write it."""
    asked: list[bool] = []
    primary = desk.engine.sync_engine if desk.world.is_async else desk.engine

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, bind: Any = None, **kw: Any) -> Any:
            if bind is not None:
                return bind
            asked.append(isinstance(clause, (Update, Delete)) or self._flushing)
            if asked[-1]:
                return primary
            raise AssertionError("the replica was asked")

    cls = page()
    await desk.make(cls, cls(id=1, title="old"))
    async with desk.world.enter(
        AsyncSession(sync_session_class=Routing) if desk.world.is_async else Routing()
    ) as session:
        await desk.save(session, await desk.load(session, cls, 1, 1, lock=lock))
    assert asked and all(asked)


# ------------------------------------------------------------ tags


async def test_a_tag_is_strong_and_changes_with_the_version(desk: Desk) -> None:
    """The tag that a client was shown matches until the row is written again, and then it is 412."""
    cls = page()
    await desk.make(cls, cls(id=1, title="old"))
    shown = await desk.do(lambda session: etag(session.get_one(cls, 1)))
    assert shown == f'"{cls.__tablename__}-1"'
    async with desk.open() as session:
        await desk.load(session, cls, 1, if_match({"If-Match": f'"other-1", {shown}'}))
    await desk.retitle(cls)
    async with desk.open() as session:
        for header in (shown, f"W/{shown}", '"other-2"', ""):
            with pytest.raises(VersionConflictError) as refused:
                await desk.load(session, cls, 1, if_match({"If-Match": header}))
            assert refused.value.items == (VersionConflict(cls, (1,), header, 2),)
            assert refused.value.http_status == 412
        await desk.load(session, cls, 1, if_match({"If-Match": "*"}))


@pytest.mark.twins
async def test_an_expired_row_is_loaded_for_its_tag(desk: Desk) -> None:
    """After a commit the tag is that of the version in the database; in asyncio that needs `expire_on_commit=False`."""
    cls = page()
    await desk.make(cls, cls(id=1, title="old"))
    async with desk.open(expire_on_commit=not desk.world.is_async) as session:
        row = await desk.load(session, cls, 1, 1)
        await desk.on(session, lambda session: setattr(row, "title", "mine"))
        with pytest.raises(ValueError, match=r"unflushed changes: call commit\(\) first"):
            etag(row)
        await desk.world.call(session.commit)
        assert await desk.world.call(etag, row) == f'"{cls.__tablename__}-2"'


def test_a_row_that_is_not_in_the_database_has_no_tag() -> None:
    """A new instance has no version yet, and an invented one would match the next row."""
    with pytest.raises(ValueError, match="unflushed"):
        etag(page()(id=1, title="new"))


@pytest.mark.parametrize(
    ("table", "schema", "named"),
    [
        ("page", None, "page"),
        ("page", "shop", "shop.page"),
        ("Päge", None, "P%C3%A4ge"),
        ('a "b",c', "Other schema", "Other%20schema.a%20%22b%22%2Cc"),
        ("ページ", None, "%E3%83%9A%E3%83%BC%E3%82%B8"),
    ],
)
def test_a_tag_of_any_table_is_one_that_a_header_can_carry(table: str, schema: str | None, named: str) -> None:
    """The form of a tag is fixed: the table, `-`, the version; for any name it is ASCII without a comma."""
    cls = page(table=table, __table_args__={"schema": schema})
    row = cls(id=1, title="old")
    make_transient_to_detached(row)
    set_committed_value(row, "version", 7)
    tag = etag(row)
    assert tag == f'"{named}-7"'
    assert if_match({"If-Match": f'"x", {tag}'}).tags == ('"x"', tag)
