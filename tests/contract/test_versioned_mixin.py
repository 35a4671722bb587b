"""`Versioned` guards every kind of mapped class: a write applies to the version that was read."""

from __future__ import annotations

import dataclasses
import json
import pickle
import secrets
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from pydantic import TypeAdapter
from sqlalchemy import BigInteger, Column, ForeignKey, String, Table, Uuid, func, inspect, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, relationship
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.orm.exc import StaleDataError
from sqlmodel import SQLModel

from pgfence import schema
from pgfence.errors import SchemaError, VersionConflictError
from pgfence.fence import Fenced
from pgfence.versions import Versioned, VersionedUUID
from support.versioned_models import KINDS, MODES, adding, meddle, page_class, pages, stored
from support.versioned_rows import made, on_session

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.one_driver


EVERY = [*((kind, "client") for kind in KINDS), *(("plain", mode) for mode in MODES[1:])]


def change(cls: Any, title: str = "ours") -> Any:
    def work(session: Session) -> Any:
        page = session.get_one(cls, 1)
        page.title = title
        session.commit()
        return page.version

    return work


# ------------------------------------------------------------ every kind of class


@pytest.mark.every_driver
@pytest.mark.parametrize(("kind", "mode"), EVERY)
async def test_each_flush_gives_the_row_another_version(
    world: World, admin: psycopg.Connection[Any], kind: str, mode: str
) -> None:
    """A new row has a version, a change gives it another one, and memory agrees with the table without a new read."""
    engine = world.engine()
    cls = await pages(world, engine, kind, mode)
    first = stored(admin, cls)[0][2]

    def work(session: Session) -> Any:
        page = session.get_one(cls, 1)
        assert page.version == first
        page.title = "ours"
        session.flush()
        seen = inspect(page).dict["version"]
        session.commit()
        return seen

    seen = await on_session(world, engine, work)
    assert stored(admin, cls)[0] == (1, "ours", seen)
    assert seen != first
    if mode in ("client", "server"):
        assert (first, seen) == (1, 2)


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "mode"), EVERY)
@pytest.mark.parametrize("act", ["change", "delete"])
async def test_a_stale_row_is_not_overwritten(
    world: World, admin: psycopg.Connection[Any], kind: str, mode: str, act: str
) -> None:
    """UPDATE and DELETE of a row that has changed since it was read end in a conflict, and the other's change stays."""
    engine = world.engine()
    cls = await pages(world, engine, kind, mode)
    before = stored(admin, cls)[0][2]

    def work(session: Session) -> None:
        page = session.get_one(cls, 1)
        meddle(admin, cls, 1)
        if act == "change":
            page.title = "ours"
        else:
            session.delete(page)
        session.commit()

    with pytest.raises(VersionConflictError) as refused:
        await on_session(world, engine, work)
    after = stored(admin, cls)[0]
    assert after[1] == "theirs"
    assert refused.value.items == ((cls, (1,), before, after[2]),)


def test_it_adds_no_argument_to_a_dataclass() -> None:
    """The version is not a field: `__init__` does not take it, and equality ignores it."""
    cls = page_class("dataclass")
    assert [field.name for field in dataclasses.fields(cls)] == ["id", "title"]
    with pytest.raises(TypeError, match="version"):
        cls(id=1, version=1)


@pytest.mark.parametrize(("mode", "kind"), [("client", BigInteger), ("uuid", Uuid), ("server", BigInteger)])
def test_the_column_is_configurable(mode: str, kind: type[Any]) -> None:
    """`__version_column__` names the column in the table, which takes no NULL; the attribute stays `version`."""
    cls = page_class(mode=mode, __version_column__="revision")
    column = cls.__table__.c.revision
    assert (type(column.type), column.nullable) == (kind, False)
    assert inspect(cls).version_id_col is column
    assert "version" in inspect(cls).column_attrs


async def test_a_column_of_another_name_is_counted(world: World, admin: psycopg.Connection[Any]) -> None:
    """The trigger of the mode "server" finds the column by the class."""
    engine = world.engine()
    cls = await pages(world, engine, mode="server", __version_column__="revision No.")
    await on_session(world, engine, change(cls))
    assert stored(admin, cls)[0] == (1, "ours", 2)


async def test_a_fenced_class_may_be_versioned_too(world: World, admin: psycopg.Connection[Any], tables: None) -> None:
    """Both mixins on one class: the row gets a token and a version."""
    from support.fenced_models import under

    engine, resource = world.engine(), f"books:{secrets.token_hex(6)}"

    class Base(DeclarativeBase):
        pass

    class Page(Fenced, Versioned, Base):
        __tablename__ = f"page_{secrets.token_hex(6)}"
        __fence_resource__ = resource
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")

    await made(world, engine, Page)
    await under(world, engine, {resource: 3}, lambda session: session.add(Page(id=1)))
    await under(world, engine, {resource: 4}, lambda session: setattr(session.get_one(Page, 1), "title", "ours"))
    assert admin.execute(f"SELECT version, fence_token FROM {Page.__tablename__}".encode()).fetchall() == [(2, 4)]


# ------------------------------------------------------------ assigning


@pytest.mark.parametrize("kind", KINDS)
async def test_assigning_the_version_raises_at_once(world: World, admin: psycopg.Connection[Any], kind: str) -> None:
    """C072: an assigned version would guard nothing, so it is rejected before anything is sent, also on a new instance."""
    engine = world.engine()
    cls = await pages(world, engine, kind)

    def work(session: Session) -> None:
        page = session.get_one(cls, 1)
        for target in (page, cls(id=9)):
            with pytest.raises(AttributeError, match="load_for_version"):
                target.version = 7
        with pytest.raises(AttributeError, match="version"):
            del page.version
        page.title = "ours"
        session.commit()

    await on_session(world, engine, work)
    assert stored(admin, cls)[0] == (1, "ours", 2)


def test_concrete_inheritance_from_a_versioned_class_is_rejected() -> None:
    """The version of the base is in another table than the rows of the subclass."""
    base = page_class()
    with pytest.raises(TypeError, match="put the mixin on each of the classes"):
        type(
            "Leaf",
            (base,),
            {
                "__tablename__": "leaf",
                "__mapper_args__": {"concrete": True},
                "id": mapped_column(BigInteger, primary_key=True),
            },
        )


SENT = {"id": 1, "title": "x", "version": 3}


class Form(SQLModel):
    """A form as a client sends it, with its version."""

    id: int = 1
    title: str = "x"
    version: int | None = 3


@pytest.mark.parametrize(
    "create",
    [
        lambda cls: cls(**SENT),
        lambda cls: cls.model_validate(SENT),
        lambda cls: cls.model_validate(Form()),
        lambda cls: cls.model_validate({"id": 1}, update={"version": 3}),
        lambda cls: cls.model_validate_json(json.dumps(SENT)),
        lambda cls: cls.model_validate_strings({"id": "1", "version": "3"}),
        lambda cls: cls.model_construct(**SENT),
        lambda cls: TypeAdapter(cls).validate_python(SENT),
        lambda cls: cls(id=1).sqlmodel_update(SENT),
        lambda cls: cls(id=1).sqlmodel_update(Form()),
        lambda cls: cls(id=1).sqlmodel_update({}, update={"version": 3}),
        lambda cls: cls(id=1).model_copy(update=SENT),
    ],
)
def test_methods_of_sqlmodel_take_no_version(create: Callable[[Any], Any]) -> None:
    """They would drop it, because it is not a field of the model, and save a form that is out of date."""
    cls = page_class("sqlmodel")
    with pytest.raises(
        AttributeError, match=r"Page\.version cannot be assigned.*load_for_version\(session, Page, pk, expected\)"
    ):
        create(cls)


def test_methods_of_sqlmodel_work_without_a_version() -> None:
    """None is not a version, and a row that is validated or copied has a version which no client has sent."""
    cls = page_class("sqlmodel")
    row = cls.model_validate(Form(version=None))
    set_committed_value(row, "version", 3)
    assert cls.model_validate(row).version is None
    assert row.sqlmodel_update({"title": "y"}).sqlmodel_update({"title": "z", "version": 3}).title == "z"
    with pytest.raises(AttributeError, match="load_for_version"):
        row.sqlmodel_update({"title": "stale", "version": 2})
    assert (row.title, row.model_copy(update={"title": "a"}).title) == ("z", "a")


def own_constructor() -> Any:
    class Page(page_class()):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            super().__init__(**{name: value for name, value in given.items() if name in {"id", "title"}})

    return Page


def dataclass_without_init() -> Any:
    class Base(MappedAsDataclass, DeclarativeBase, init=False):
        pass

    class Page(Versioned, Base, init=False):
        __tablename__ = "page"
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")

    return Page


@pytest.mark.parametrize("build", [page_class, own_constructor, dataclass_without_init])
def test_the_constructor_takes_no_version(build: Callable[[], Any]) -> None:
    """`version` as a keyword of a constructor is rejected like an assignment."""
    with pytest.raises(AttributeError, match="version cannot be assigned"):
        build()(**SENT)


def test_a_replaced_dataclass_takes_no_version() -> None:
    """dataclasses.replace() with a version is rejected, because it passes the version to the constructor."""
    with pytest.raises(TypeError, match="version"):
        dataclasses.replace(page_class("dataclass")(id=1), version=3)
    with pytest.raises(AttributeError, match="version cannot be assigned"):
        dataclasses.replace(dataclass_without_init()(id=1), version=3)


async def test_instances_can_be_pickled_and_their_version_comes_along(world: World) -> None:
    """An unpickled instance has the version of the original."""
    engine = world.engine()
    cls = await pages(world, engine)
    page = await on_session(world, engine, lambda session: session.get_one(cls, 1))
    globals()["Page"], cls.__qualname__, cls.__module__ = cls, "Page", __name__
    assert pickle.loads(pickle.dumps(page)).version == 1


# ------------------------------------------------------------ inheritance and keys


def family(mode: str = "client") -> Any:
    """An item, a book in a separate table, and a leaflet in the table of the items."""

    class Base(DeclarativeBase):
        pass

    name = f"item_{secrets.token_hex(6)}"

    class Item(Versioned, Base):
        __tablename__ = name
        __version_mode__ = mode
        __mapper_args__: ClassVar[Any] = {"polymorphic_on": "kind", "polymorphic_identity": "item"}
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]

    class Book(Item):
        __tablename__ = f"{name}_book"
        __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "book"}
        id: Mapped[int] = mapped_column(ForeignKey(f"{name}.id"), primary_key=True)
        title: Mapped[str] = mapped_column(default="")

    class Leaflet(Item):
        __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "leaflet"}
        text: Mapped[str | None]

    return Item, Book, Leaflet


@pytest.mark.twins
@pytest.mark.parametrize("mode", ["client", "server"])
async def test_a_child_that_changes_alone_counts_each_time(world: World, mode: str) -> None:
    """With joined inheritance, changes of the child's table only: twice in one session, memory right without a new read."""
    engine = world.engine()
    item, book, _ = family(mode)
    await made(world, engine, item)
    if mode == "server":
        await world.call(schema.add_version_trigger, engine, book.__mro__[1])

    def work(session: Session) -> list[int]:
        session.add(book(id=1))
        session.commit()
        found = session.get_one(book, 1)
        seen = []
        for title in ("a", "b", "c"):
            found.title = title
            session.flush()
            seen.append(inspect(found).dict["version"])
        session.commit()
        seen.append(found.version)
        return seen

    assert await on_session(world, engine, work) == [2, 3, 4, 4]


@pytest.mark.parametrize("which", [1, 2])
async def test_inheritance_is_guarded_as_a_whole(world: World, admin: psycopg.Connection[Any], which: int) -> None:
    """A subclass in its own table or in its parent's: changes through the base class and through the subclass conflict."""
    engine = world.engine()
    cls = family()[which]
    await made(world, engine, cls)
    attribute = "title" if which == 1 else "text"
    await on_session(world, engine, adding(cls(id=1)))

    def work(session: Session) -> None:
        found = session.get_one(cls, 1)
        admin.execute(f"UPDATE {cls.__mro__[1].__tablename__} SET version = version + 1".encode())
        setattr(found, attribute, "ours")
        session.commit()

    with pytest.raises(VersionConflictError) as refused:
        await on_session(world, engine, work)
    assert refused.value.items == ((cls, (1,), 1, 2),)

    def delete(session: Session) -> None:
        session.delete(session.get_one(cls, 1))
        session.commit()

    await on_session(world, engine, delete)


@pytest.mark.twins
async def test_composite_and_natural_keys(world: World, admin: psycopg.Connection[Any]) -> None:
    """The conflict names a key of several columns, texts among them, in the order of the mapper."""
    engine = world.engine()

    class Base(DeclarativeBase):
        pass

    class Stock(Versioned, Base):
        __tablename__ = f"stock_{secrets.token_hex(6)}"
        shelf: Mapped[str] = mapped_column("Shelf No.", String(20), primary_key=True)
        place: Mapped[int] = mapped_column(primary_key=True)
        amount: Mapped[int] = mapped_column(default=0)

    await made(world, engine, Stock)
    await on_session(world, engine, adding(*(Stock(shelf=f"it's {x}", place=2) for x in "ab")))

    def work(session: Session) -> None:
        for row in session.scalars(select(Stock)):
            row.amount = 5
        admin.execute(f"UPDATE {Stock.__tablename__} SET version = 9 WHERE \"Shelf No.\" = 'it''s b'".encode())
        session.commit()

    with pytest.raises(VersionConflictError) as refused:
        await on_session(world, engine, work)
    assert refused.value.items == ((Stock, ("it's b", 2), 1, 9),)


async def test_a_changed_key_is_guarded_by_the_old_one(world: World, admin: psycopg.Connection[Any]) -> None:
    """A new primary key for a row at another version is a conflict, named by the key it was read under."""
    engine = world.engine()
    cls = await pages(world, engine)

    def work(session: Session) -> None:
        page = session.get_one(cls, 1)
        meddle(admin, cls, 1)
        page.id = 77
        session.commit()

    with pytest.raises(VersionConflictError) as refused:
        await on_session(world, engine, work)
    assert refused.value.items == ((cls, (1,), 1, 2),)


async def test_a_row_in_the_place_of_a_deleted_one_is_guarded(world: World, admin: psycopg.Connection[Any]) -> None:
    """A delete and an add under the same key in one flush are one UPDATE, of the version that was read."""
    engine = world.engine()
    cls = await pages(world, engine)

    def work(session: Session) -> None:
        page = session.get_one(cls, 1)
        meddle(admin, cls, 1)
        session.delete(page)
        session.add(cls(id=1, title="ours"))
        session.commit()

    with pytest.raises(VersionConflictError) as refused:
        await on_session(world, engine, work)
    assert refused.value.items == ((cls, (1,), 1, 2),)


async def test_a_post_update_counts_once_and_does_not_spoil_the_delete(
    world: World, admin: psycopg.Connection[Any]
) -> None:
    """C066: two rows that refer to each other: one flush, one count, memory equals the table, and both can be deleted."""
    engine = world.engine()

    class Base(DeclarativeBase):
        pass

    name = f"owner_{secrets.token_hex(6)}"

    class Owner(Versioned, Base):
        __tablename__ = name
        id: Mapped[int] = mapped_column(primary_key=True)
        favourite_id: Mapped[int | None] = mapped_column(ForeignKey(f"{name}_part.id"))
        changed: Mapped[Any] = mapped_column(BigInteger, default=0, onupdate=func.floor(func.random() * 1000))
        favourite: Mapped[Any] = relationship("Part", foreign_keys=favourite_id, post_update=True)

    class Part(Versioned, Base):
        __tablename__ = f"{name}_part"
        id: Mapped[int] = mapped_column(primary_key=True)
        owner_id: Mapped[int] = mapped_column(ForeignKey(f"{name}.id"))
        owner: Mapped[Any] = relationship("Owner", foreign_keys=owner_id)

    await made(world, engine, Owner)

    def work(session: Session) -> list[tuple[int, int]]:
        owner = Owner(id=1)
        session.add_all([owner, Part(id=1, owner=owner), Part(id=2, owner=owner)])
        session.commit()
        seen = []
        for number in (1, 2):
            owner.favourite = session.get_one(Part, number)
            session.flush()
            table = session.execute(text(f"SELECT version FROM {name}")).scalar_one()
            seen.append((owner.version, table))
        session.commit()
        for row in (*session.scalars(select(Part)), owner):
            session.delete(row)
        session.commit()
        return seen

    seen = await on_session(world, engine, work)
    assert [memory - table for memory, table in seen] == [0, 0]
    assert [table for _, table in seen] == [2, 3]


# ------------------------------------------------------------ xmin


@pytest.mark.every_driver
@pytest.mark.parametrize("number", [2**31, 2**32 - 1])
async def test_xmin_is_compared_beyond_half_of_its_range(world: World, number: int) -> None:
    """C071: an xmin of 2**31 and more is read, sent and compared as unsigned."""
    cls = page_class(mode="xmin")
    kind = cls.version.type

    def work(session: Session) -> Any:
        given = text(f"SELECT '{number}'::xid AS x").columns(Column("x", kind)).subquery()
        return session.execute(select(given.c.x).where(given.c.x == number)).scalar_one()

    assert await on_session(world, world.engine(), work) == number


async def test_xmin_needs_no_column_and_sees_plain_sql(world: World, admin: psycopg.Connection[Any]) -> None:
    """The table has no column for it, and a writer who knows of no version is seen."""
    engine = world.engine()
    cls = await pages(world, engine, mode="xmin")
    columns = "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
    assert admin.execute(columns, [cls.__tablename__]).fetchall() == [("id",), ("title",)]

    def work(session: Session) -> None:
        session.get_one(cls, 1).title = "ours"
        admin.execute(f"UPDATE {cls.__tablename__} SET title = 'theirs'".encode())
        session.commit()

    with pytest.raises(VersionConflictError):
        await on_session(world, engine, work)


async def test_a_rewrite_of_the_table_changes_xmin_and_no_real_version(
    world: World, admin: psycopg.Connection[Any]
) -> None:
    """C071: VACUUM FULL between read and write is not a conflict for a version column."""
    engine = world.engine()
    cls = await pages(world, engine)

    def work(session: Session) -> None:
        page = session.get_one(cls, 1)
        session.commit()
        set_committed_value(page, "version", 1)
        admin.execute(f"VACUUM FULL {cls.__tablename__}".encode())
        page.title = "ours"
        session.commit()

    await on_session(world, engine, work)
    assert stored(admin, cls)[0] == (1, "ours", 2)


def test_xmin_is_rejected_for_joined_inheritance() -> None:
    """The mode is rejected, because a change of only the child's table does not change the parent's xmin."""
    with pytest.raises(ValueError, match="with joined inheritance, use the mode"):
        family("xmin")


def test_xmin_is_rejected_for_a_partitioned_table() -> None:
    """The mode is rejected, because PostgreSQL does not return the xmin of a row inserted into a partitioned table."""
    with pytest.raises(ValueError, match="partitioned table"):
        page_class(mode="xmin", __table_args__={"postgresql_partition_by": "LIST (id)"})


# ------------------------------------------------------------ what cannot be guarded


def test_unusable_options_are_rejected_on_mapping() -> None:
    """An unknown mode, a column without a name, relationships as one text, a mode that VersionedUUID does not know."""
    with pytest.raises(ValueError, match="must be one of 'client', 'server', 'xmin', not 'both'"):
        page_class(mode="both")
    with pytest.raises(TypeError, match="must be the name of a column"):
        page_class(__version_column__="")
    with pytest.raises(TypeError, match="must be a tuple of names"):
        page_class(__version_relationships__="lines")
    with pytest.raises(ValueError, match="supports only the mode .client."):
        page_class(mode="uuid", __version_mode__="server")


def test_two_version_columns_are_rejected() -> None:
    """SQLAlchemy's own version beside the mixin's, a column in its place, both mixins at once."""

    class Base(DeclarativeBase):
        pass

    own = Column("own", BigInteger)
    with pytest.raises(TypeError, match="two version columns: remove version_id_col"):
        page_class(own=own, __mapper_args__={"version_id_col": own})
    with pytest.raises(
        TypeError, match="no version column, or one that the mixin did not create: leave the attribute 'version'"
    ):
        page_class(version=mapped_column(BigInteger))
    with pytest.raises(TypeError, match="two version columns: use either Versioned or"):

        class Both(Versioned, VersionedUUID, Base):  # type: ignore[misc]
            __tablename__ = "both"
            id: Mapped[int] = mapped_column(primary_key=True)


def test_the_mixin_belongs_on_the_class_at_the_base() -> None:
    """The mixin is rejected on a subclass, where it would miss changes of inherited columns."""

    class Base(DeclarativeBase):
        pass

    class Item(Base):
        __tablename__ = "item"
        id: Mapped[int] = mapped_column(primary_key=True)

    with pytest.raises(TypeError, match="put the mixin on the base class"):

        class Book(Versioned, Item):
            __tablename__ = "book"
            id: Mapped[int] = mapped_column(ForeignKey("item.id"), primary_key=True)


async def test_a_row_without_a_version_is_rejected_with_the_way_to_fill_it(
    world: World, admin: psycopg.Connection[Any]
) -> None:
    """NULL in a table that was there before: SQLAlchemy would compare nothing; the error's command fills the column."""
    engine = world.engine()
    cls = await pages(world, engine)
    admin.execute(f"ALTER TABLE {cls.__tablename__} ALTER version DROP NOT NULL".encode())
    admin.execute(f"UPDATE {cls.__tablename__} SET version = NULL".encode())
    with pytest.raises(SchemaError, match="has no version") as refused:
        await on_session(world, engine, change(cls))
    assert stored(admin, cls)[0] == (1, "", None)
    for statement in refused.value.command.split("; "):
        admin.execute(statement.encode())
    assert await on_session(world, engine, change(cls)) == 2


@pytest.mark.twins
async def test_a_missing_trigger_is_noticed(world: World, admin: psycopg.Connection[Any]) -> None:
    """In the mode "server" a write that no trigger counted is rejected, and the error says how to create the trigger."""
    engine = world.engine()
    cls = await pages(world, engine, mode="server")
    await world.call(schema.drop_version_trigger, engine, cls)
    with pytest.raises(SchemaError, match="trigger that increments the version is missing or disabled") as refused:
        await on_session(world, engine, change(cls))
    assert refused.value.command == "pgfence.schema.add_version_trigger(engine, Page)"
    assert stored(admin, cls)[0] == (1, "", 1)


@pytest.mark.twins
async def test_a_plain_session_is_guarded_as_well(world: World, admin: psycopg.Connection[Any]) -> None:
    """Without VersionedSession the conflict is SQLAlchemy's StaleDataError, and nothing is overwritten either."""
    from support.fenced_models import on_session as on_plain_session

    engine = world.engine()
    cls = await pages(world, engine)

    def work(session: Session) -> None:
        page = session.get_one(cls, 1)
        meddle(admin, cls, 1)
        page.title = "ours"
        session.commit()

    with pytest.raises(StaleDataError):
        await on_plain_session(world, engine, work)
    assert stored(admin, cls)[0] == (1, "theirs", 2)


def test_a_declared_table_may_contain_the_column() -> None:
    """A Table that is passed to the class must have the column, and the mixin says so."""

    class Base(DeclarativeBase):
        pass

    with pytest.raises(Exception, match="version"):

        class Page(Versioned, Base):
            __table__ = Table("page", Base.metadata, Column("id", BigInteger, primary_key=True))
