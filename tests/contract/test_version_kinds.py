"""Every kind of ORM write compares and raises versions, in every mode and with both checks."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from sqlalchemy import ForeignKey, Integer, Text, create_engine, delete, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, configure_mappers, mapped_column, relationship
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.pool import NullPool

from pgfence import schema
from pgfence.errors import PgfenceError, SchemaError, VersionConflictError
from pgfence.versions import Versioned, VersionedSession
from support.version_kinds import KINDS, MODES, OTHERS, Kind, bystanders, classes, table, write_bystanders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Run = Callable[[str, Callable[[Session], Any]], Any]

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "versions.md"
CHECKS = ("auto", "row", "batch")

# By default a flush writes a few rows of a table in another way than one.
WAYS = (("auto", False), ("auto", True), ("row", False), ("batch", False))
_NUMBERS = itertools.count(1, 10)

# Drivers differ in whether they send several rows at once, and in whether they count them.
SEVERAL = ("update", "delete", "post_update of many", "deleted parent with post_update")
EVERY = [
    pytest.param("psycopg", mode, name, id=f"psycopg-{mode}-{name}")
    for name, kind in KINDS.items()
    for mode in kind.modes
]
EVERY += [
    pytest.param(driver, mode, name, id=f"{driver}-{mode}-{name}")
    for driver in ("asyncpg",)
    for name in SEVERAL
    for mode in ("client", "server")
]


@pytest.fixture(scope="module")
def engine(dsn: str) -> Iterator[Any]:
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def models(engine: Any) -> Iterator[Callable[[str], Any]]:
    """The classes of a mode, with their tables."""
    found: dict[str, Any] = {}

    def of(mode: str) -> Any:
        if mode not in found:
            found[mode] = m = classes(mode)
            m.base.metadata.create_all(engine)
            for cls in m.versioned if mode == "server" else ():
                if cls.__mapper__.inherits is None:
                    schema.add_version_trigger(engine, cls)
        return found[mode]

    yield of
    for m in found.values():
        m.base.metadata.drop_all(engine)


async def run(engine: Any, driver: str, work: Callable[[Session], Any], check: str) -> Any:
    """Work with a VersionedSession of a driver."""
    options: Any = {"conflict_check": check, "autoflush": False}
    if driver == "psycopg":
        with VersionedSession(engine, **options) as session:
            return work(session)
    address = engine.url.set(drivername=f"postgresql+{driver}")
    if driver == "asyncpg":
        sender = create_async_engine(address, poolclass=NullPool)
        async with AsyncSession(sender, sync_session_class=VersionedSession, **options) as async_session:
            return await async_session.run_sync(work)
    with VersionedSession(create_engine(address, poolclass=NullPool), **options) as session:
        return work(session)


def fill(engine: Any, m: Any, kind: Kind, *, company: bool = False) -> int:
    """Add the rows of a kind, and others to be changed with them; return the number that their keys start at."""
    start = next(_NUMBERS)
    with VersionedSession(engine) as session:
        for row in (*kind.rows(m, start), *(bystanders(kind, m, start) if company else ())):
            session.add(row)
            session.flush()
        session.commit()
    return start


def version_of(cls: Any) -> Any:
    return cls.__mapper__.column_attrs["version"].columns[0]


def versions(executor: Any, m: Any, start: int) -> dict[tuple[str, int], Any]:
    """Return the versions that the rows of one test have in the tables."""
    found = {}
    for cls in m.versioned:
        if cls.__mapper__.inherits is None:
            key = cls.__table__.c.id
            query = select(key, version_of(cls)).where(key.between(start, start + 9))
            found |= {(cls.__name__, number - start): version for number, version in executor.execute(query)}
    return found


def beat(engine: Any, m: Any, mode: str, row: tuple[str, int], start: int, how: str) -> None:
    """Write a row before the session does, as another process would."""
    cls = getattr(m, row[0])
    table = cls.__table__
    values: dict[str, Any] = {"label": "theirs"} if "label" in table.c else {"id": table.c.id}
    if mode == "client":
        values["version"] = table.c.version + 1
    elif mode == "UUID":
        values["version"] = uuid4()
    statement: Any = update(table).values(values) if how == "changed" else delete(table)
    with engine.begin() as connection:
        assert connection.execute(statement.where(table.c.id == start + row[1])).rowcount == 1


@pytest.mark.parametrize(("driver", "mode", "name"), EVERY)
async def test_a_free_write_is_saved_at_the_next_version(
    engine: Any, models: Any, driver: str, mode: str, name: str
) -> None:
    """The rows that are written get the next version, all others keep theirs, and instances have the versions of the table."""
    kind, m = KINDS[name], models(mode)
    for check, company in WAYS:
        start = fill(engine, m, kind, company=company)
        with engine.connect() as connection:
            before = versions(connection, m, start)
        work = partial(_write, kind, m, start)
        written = kind.written | {row: 1 for row in before if company and row[1] in OTHERS and row[0] != "Parent"}
        if mode in kind.rejected:
            with pytest.raises(kind.rejected[mode]):
                await run(engine, driver, work, check)
            continue
        await run(engine, driver, work, check)
        with engine.connect() as connection:
            after = versions(connection, m, start)
        for row in before.keys() & after.keys():
            if row not in written:
                assert after[row] == before[row], (check, company, row)
            elif mode in {"client", "server"}:
                assert after[row] - before[row] == written[row], (check, company, row)
            else:
                assert after[row] != before[row], (check, company, row)


def _write(kind: Kind, m: Any, start: int, session: Session) -> None:
    kind.act(session, m, start)
    write_bystanders(session, m, start)
    session.info.get("late", session.flush)()
    session.flush()
    table = versions(session, m, start)
    for row in session.identity_map.values():
        if "version" in row.__dict__:
            cls = row.__mapper__.base_mapper.class_
            assert table[cls.__name__, row.id - start] == row.__dict__["version"]
    session.commit()


@pytest.mark.parametrize(
    ("driver", "mode", "name"),
    [
        each
        for each in EVERY
        if KINDS[str(each.values[2])].beaten and each.values[1] not in KINDS[str(each.values[2])].rejected
    ],
)
async def test_a_beaten_write_lists_exactly_the_row(
    engine: Any, models: Any, driver: str, mode: str, name: str
) -> None:
    """A row that another process has changed or deleted is the one item of the conflict, and nothing of the flush is kept."""
    kind, m = KINDS[name], models(mode)
    # A row that is gone is the same in every mode.
    ways = ("changed", "deleted") if kind.gone and mode == "client" else ("changed",)
    for (check, company), how in itertools.product(WAYS, ways):
        start = fill(engine, m, kind, company=company)
        theirs: dict[Any, Any] = {}
        with pytest.raises(VersionConflictError) as conflict:
            await run(engine, driver, partial(_lose, engine, kind, m, start, mode, how, theirs), check)
        (item,) = conflict.value.items
        found = theirs.get(kind.beaten)
        assert (item.pk, item.found) == ((start + kind.beaten[1],), found), (check, company, how)  # type: ignore[index]
        assert item.expected != found, (check, company, how)
        with engine.connect() as connection:
            assert versions(connection, m, start) == theirs, (check, company, how)


def _lose(
    engine: Any, kind: Kind, m: Any, start: int, mode: str, how: str, theirs: dict[Any, Any], session: Session
) -> None:
    assert kind.beaten is not None
    kind.act(session, m, start)
    write_bystanders(session, m, start)
    beat(engine, m, mode, kind.beaten, start, how)
    with engine.connect() as connection:
        theirs |= versions(connection, m, start)
    session.info.get("late", session.flush)()
    session.commit()


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_session_compares_and_counts_the_same(engine: Any, models: Any, mode: str) -> None:
    """Writes that SQLAlchemy sends in another way are counted in a plain Session, too, and raise StaleDataError if stale."""
    m = models(mode)
    for name in ("one-to-one", "row switch", "row switch of a key", "post_update of many", "deleted with post_update"):
        kind = KINDS[name]
        assert kind.beaten is not None
        if mode in kind.rejected:
            continue
        start = fill(engine, m, kind)
        with Session(engine, autoflush=False) as session:
            _write(kind, m, start, session)
        start = fill(engine, m, kind)
        with Session(engine, autoflush=False) as session:
            kind.act(session, m, start)
            beat(engine, m, mode, kind.beaten, start, "changed")
            with pytest.raises(StaleDataError):
                session.flush()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mode", ["client", "server"])
def test_a_row_without_a_version_is_rejected_on_post_update(engine: Any, mode: str, check: str) -> None:
    """If the version is NULL, the error says how to fill it, although SQLAlchemy emits no event before this UPDATE."""
    m = classes(mode)
    column = m.Task.__table__.c.version
    with engine.connect() as connection:
        m.base.metadata.create_all(connection)
        connection.execute(text(f"ALTER TABLE {m.Task.__tablename__} ALTER {column.name} DROP NOT NULL"))
        connection.execute(m.Task.__table__.insert().values([{"id": 1, "version": None}, {"id": 2, "version": 1}]))
        with VersionedSession(connection, conflict_check=check, autoflush=False) as session:  # type: ignore[arg-type]
            session.get_one(m.Task, 1).next = session.get_one(m.Task, 2)
            with pytest.raises(SchemaError, match="Task .* has no version"):
                session.flush()


def test_the_page_on_versions_shows_this_table() -> None:
    """The page has a row for each kind, as the tests above have it."""
    assert table() in PAGE.read_text(encoding="utf-8")


# ------------------------------------------------------------ what is rejected when the class is mapped


def _mapped(kind: str) -> None:
    class Base(DeclarativeBase):
        pass

    class Item(Versioned, Base):
        __tablename__ = "item"
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "item"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]

    class Book(Item):
        __tablename__ = "book"
        __mapper_args__ = {"polymorphic_identity": "book"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(ForeignKey(Item.id), primary_key=True)
        shelf_id: Mapped[int | None] = mapped_column(ForeignKey("shelf.id"))
        if kind == "many-to-one":
            shelf: Mapped[Shelf] = relationship(post_update=True)

    class Shelf(Base):
        __tablename__ = "shelf"
        id: Mapped[int] = mapped_column(primary_key=True)
        if kind == "one-to-many":
            books: Mapped[list[Book]] = relationship(post_update=True)
        if kind == "secondary":
            items: Mapped[list[Item]] = relationship(secondary="place")

    class Place(Versioned, Base):
        __tablename__ = "place"
        item_id: Mapped[int] = mapped_column(ForeignKey(Item.id), primary_key=True)
        shelf_id: Mapped[int] = mapped_column(ForeignKey(Shelf.id), primary_key=True)

    try:
        configure_mappers()
    finally:
        Base.registry.dispose()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("many-to-one", "Book.shelf has post_update, which writes 'book.shelf_id'"),
        ("one-to-many", "Shelf.books has post_update, which writes 'book.shelf_id'"),
        ("secondary", "Shelf.items adds and deletes rows of Place"),
    ],
)
def test_a_relationship_that_bypasses_versions_is_rejected(kind: str, says: str) -> None:
    """An UPDATE or DELETE that SQLAlchemy sends without a comparison is an error when the class is mapped."""
    with pytest.raises(TypeError, match=says):
        _mapped(kind)


@pytest.mark.parametrize("check", CHECKS)
def test_a_class_switch_under_one_key_names_its_cause(engine: Any, models: Any, check: str) -> None:
    """An instance of another class under the key of one that the flush deletes is an error, and a conflict if it is beaten."""
    m = models("client")
    kind = KINDS["joined"]
    for beaten in (False, True):
        start = fill(engine, m, kind)
        with VersionedSession(engine, conflict_check=check) as session:  # type: ignore[arg-type]
            session.delete(session.get_one(m.Book, start))
            session.add(m.Item(id=start))
            if beaten:
                beat(engine, m, "client", ("Item", 0), start, "changed")
                with pytest.raises(VersionConflictError):
                    session.commit()
            else:
                with pytest.raises(
                    PgfenceError, match=r"Item .* was added with the key of a row of class Book .*flush\(\)"
                ):
                    session.commit()
            session.rollback()
            session.delete(session.get_one(m.Book, start))
            session.flush()
            session.add(m.Item(id=start))
            session.commit()


def test_deletes_on_a_shared_connection_are_distinguished(engine: Any, models: Any) -> None:
    """Of two rows that a session deletes, the one that another session on its connection has deleted is in the conflict."""
    m = models("client")
    start = fill(engine, m, KINDS["delete"])
    with engine.connect() as connection:
        connection.begin()
        one, other = (VersionedSession(connection, join_transaction_mode="rollback_only") for _ in range(2))
        for page in [one.get_one(m.Page, start + number) for number in range(2)]:
            one.delete(page)
        other.delete(other.get_one(m.Page, start + 1))
        other.flush()
        with pytest.raises(VersionConflictError) as conflict:
            one.flush()
        assert conflict.value.items == ((m.Page, (start + 1,), 1, None),)
        one.close()
        other.close()


def test_a_stale_delete_is_noticed_without_confirmed_rows(engine: Any) -> None:
    """A mapper with `confirm_deleted_rows=False` deletes several rows only at the versions they were read at."""

    class Base(DeclarativeBase):
        pass

    class Page(Versioned, Base):
        __tablename__ = "kinds_unconfirmed"
        __mapper_args__ = {"confirm_deleted_rows": False}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)

    with engine.connect() as connection:
        Base.metadata.create_all(connection)
        with VersionedSession(connection) as session:
            session.add_all([Page(id=1), Page(id=2)])
            session.flush()
        with VersionedSession(connection) as session:
            for page in session.scalars(select(Page)).all():
                session.delete(page)
            connection.execute(update(Page.__table__).where(Page.__table__.c.id == 2).values(version=2))
            with pytest.raises(VersionConflictError) as conflict:
                session.flush()
            assert conflict.value.items == ((Page, (2,), 1, 2),)
        connection.rollback()


@pytest.mark.parametrize(
    "options", [{"__mapper_args__": {"eager_defaults": False}}, {"__table_args__": {"implicit_returning": False}}]
)
@pytest.mark.parametrize("check", CHECKS)
def test_a_new_row_has_its_version_however_the_server_returns_it(engine: Any, check: Any, options: Any) -> None:
    """A version that is read when the row is changed would hide a write since the INSERT."""
    base = type("Base", (DeclarativeBase,), {})
    given = {
        "__tablename__": "kinds_" + uuid4().hex[:12],
        "__version_mode__": "server",
        "id": mapped_column(Integer, primary_key=True),
        "title": mapped_column(Text),
    }
    cls: Any = type("Page", (Versioned, base), given | options)
    base.metadata.create_all(engine)  # type: ignore[attr-defined]
    schema.add_version_trigger(engine, cls)
    with VersionedSession(engine, expire_on_commit=False, conflict_check=check) as session:
        session.add(page := cls(id=1, title="new"))
        session.commit()
        with engine.begin() as connection:
            connection.execute(update(cls.__table__).values(title="theirs"))
        page.title = "ours"
        with pytest.raises(VersionConflictError):
            session.commit()


@pytest.mark.parametrize("check", CHECKS)
def test_a_row_deleted_before_the_flush_is_a_conflict(engine: Any, check: str) -> None:
    """If another process has deleted an expired owner that counts its lines, the conflict lists it, whichever part reads it."""

    class Base(DeclarativeBase):
        pass

    class Owner(Versioned, Base):
        __tablename__ = "kinds_owner"
        __version_relationships__ = ("lines",)
        id: Mapped[int] = mapped_column(primary_key=True)
        label: Mapped[str] = mapped_column(default="")
        lines: Mapped[list[Line]] = relationship(back_populates="owner")

    class Line(Base):
        __tablename__ = "kinds_line"
        id: Mapped[int] = mapped_column(primary_key=True)
        owner_id: Mapped[int] = mapped_column(ForeignKey(Owner.id))
        owner: Mapped[Owner] = relationship(back_populates="lines")

    with engine.connect() as connection:
        Base.metadata.create_all(connection)
        with VersionedSession(connection, conflict_check=check) as session:  # type: ignore[arg-type]
            session.add(owner := Owner(id=1))
            session.flush()
            session.expire(owner, ["label"])
            connection.execute(delete(Owner.__table__))
            owner.lines.append(Line(id=1))
            with pytest.raises(VersionConflictError) as conflict:
                session.flush()
            assert [(item.pk, item.found) for item in conflict.value.items] == [((1,), None)]
        connection.rollback()
