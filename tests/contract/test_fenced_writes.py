"""Every kind of write of a fenced class, in each mode, by the right holder, by a stale one and without a token.

The table of the outcomes is on the page about fences, and is read from there.
"""

from __future__ import annotations

import itertools
import secrets
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from sqlalchemy import ForeignKey, Text, create_engine, delete, event, insert, literal_column, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    column_property,
    configure_mappers,
    mapped_column,
    registry,
    relationship,
)
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.schema import CreateSchema, DropSchema

from pgfence.errors import FenceRequiredError, StaleFencingTokenError
from pgfence.fence import Fenced, fence
from pgfence.versions import Versioned, VersionedSession
from support.fenced_models import on_session, under
from support.fenced_writes import WRITES, Shop, fill, shop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

    from support.worlds import World

pytestmark = pytest.mark.usefixtures("tables")

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "fence.md"
MODES = [("gate", False), ("gate", True), ("row", False), ("row", True)]
WRITTEN, STALE, REQUIRED = "✓", "S", "F"
_TOKENS = itertools.count(10, 10)
_PREFIX = f"w{secrets.token_hex(5)}"


def told() -> dict[str, list[str]]:
    """Return the table of the page: for each kind of write the outcomes in each of the modes."""
    lines = PAGE.read_text(encoding="utf-8").split("## Every kind of write")[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


@pytest.fixture(scope="module")
def engine(dsn: str, tables: None) -> Iterator[Engine]:
    made = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    yield made
    made.dispose()


@cache
def classes(engine: Engine, mode: str, by_row: bool, versioned: bool) -> Shop:
    prefix = f"{_PREFIX}{mode[0]}{by_row:d}{versioned:d}"
    made = shop(prefix, mode, by_row=by_row, mixins=(Versioned,) if versioned else ())
    made.metadata.create_all(engine)
    return made


def attempt(engine: Engine, made: Shop, write: str, who: str, opened: Session) -> str:
    """Try a write as one of three writers, on rows with a token, and return the outcome."""
    token = next(_TOKENS)
    with engine.begin() as connection:
        for table in reversed(made.metadata.sorted_tables):
            connection.execute(table.delete())
    with Session(engine) as session:
        fence(session, made.resource, token)
        fill(made, session)
        session.commit()
    if made.Entry.__fence__ == "row":  # so that the column alone is left to refuse
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM pgfence_gate WHERE resource = :r"), {"r": made.resource})
    before = rows(engine, made)
    mine = {"right": token + 1, "stale": token - 1}.get(who)
    try:
        with opened as session:
            if mine is not None:
                fence(session, made.resource, mine)
            WRITES[write](made, session)
            session.commit()
    except (FenceRequiredError, StaleFencingTokenError) as error:
        assert rows(engine, made) == before
        return STALE if isinstance(error, StaleFencingTokenError) else REQUIRED
    after = rows(engine, made)
    assert after != before
    if who == "right" and "SQL" not in write:
        changed = [row for row in after if row not in before and "fence_token" in row]
        assert {row["fence_token"] for row in changed} <= {mine}
        versions = {(row["table"], row["id"]): row["version"] for row in before if "version" in row}
        for row in changed:
            key = row["table"], row["id"]
            assert key not in versions or row["version"] == versions[key] + 1
    return WRITTEN


def rows(engine: Engine, made: Shop) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        found = [connection.execute(table.select()).mappings().all() for table in made.metadata.sorted_tables]
    return [{"table": n, **row} for n, table in enumerate(found) for row in table]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(("mode", "by_row"), MODES)
def test_each_kind_of_write_ends_as_the_page_says(engine: Engine, write: str, mode: str, by_row: bool) -> None:
    """The right holder's rows carry the token; a stale or missing one is rejected where the page promises that."""
    made = classes(engine, mode, by_row, versioned=False)
    outcomes = [attempt(engine, made, write, who, Session(engine)) for who in ("right", "stale", "none")]
    assert " ".join(outcomes) == told()[write][MODES.index((mode, by_row))]


@pytest.mark.parametrize(
    "write", [write for write in list(WRITES)[: list(WRITES).index("`insert()`")] if "merge" not in write]
)
@pytest.mark.parametrize(("mode", "by_row"), [("gate", True), ("row", False)])
@pytest.mark.parametrize("check", ["auto", "row", "batch"])
def test_a_fenced_class_may_be_versioned_too(engine: Engine, write: str, mode: str, by_row: bool, check: Any) -> None:
    """A flush of a class with both mixins keeps the fence, and each row it writes gets one new version."""
    made = classes(engine, mode, by_row, versioned=True)
    opened = [VersionedSession(engine, conflict_check=check) for _ in range(2)]
    outcomes = [attempt(engine, made, write, who, one) for who, one in zip(("right", "stale"), opened, strict=True)]
    assert outcomes == told()[write][MODES.index((mode, by_row))].split()[:2]


def test_the_page_has_no_other_kinds_of_write() -> None:
    """The kinds of write in the page's table are those that are tried here, in the same order."""
    assert list(told()) == list(WRITES)


@pytest.mark.parametrize(
    "write",
    ["`post_update` of a child", "a one-to-one child whose primary key is its parent's, replaced by a new child"],
)
async def test_rows_that_no_hook_sees_are_checked_with_every_driver(world: World, write: str) -> None:
    """A row is read and locked in the middle of a flush, also where a driver is asynchronous."""
    engine = world.engine()
    made = shop(f"w{secrets.token_hex(6)}", "row", by_row=True)
    create = lambda session: made.metadata.create_all(session.connection()) or session.commit()  # noqa: E731
    await on_session(world, engine, create)
    await under(world, engine, {made.resource: 3}, lambda session: fill(made, session))
    with pytest.raises(FenceRequiredError):
        await under(world, engine, {}, lambda session: WRITES[write](made, session))
    await under(world, engine, {made.resource: 4}, lambda session: WRITES[write](made, session))
    cls = made.Same if "one-to-one" in write else made.Entry
    token = select(cls.fence_token).where(cls.id == 1)
    assert await on_session(world, engine, lambda session: session.scalar(token)) == 4


@pytest.mark.parametrize("statement", ["Core", "update", "update by key", "delete"])
def test_rows_are_checked_in_the_schema_that_a_statement_means(engine: Engine, statement: str) -> None:
    """With a schema_translate_map, the row that decides is the one that is written, not its namesake."""
    made = shop(f"w{secrets.token_hex(6)}", "row", by_row=False)
    entry, tenant = made.Entry, f"{made.resource}_tenant"
    with engine.begin() as connection:
        connection.execute(CreateSchema(tenant))
    there: dict[str, Any] = {"schema_translate_map": {None: tenant}}
    for place, token in ((engine, 1), (engine.execution_options(**there), 3)):
        made.metadata.create_all(place)
        with place.begin() as connection:
            connection.execute(insert(entry.__table__).values(id=1, book="", amount=0, fence_token=token))
    sent: dict[str, tuple[Any, ...]] = {
        "Core": (update(entry.__table__).where(entry.__table__.c.id == 1).values(amount=9),),
        "update": (update(entry).values(amount=9),),
        "update by key": (update(entry), [{"id": 1, "amount": 9}]),
        "delete": (delete(entry),),
    }
    with Session(engine) as session:
        fence(session, made.resource, 2)
        with pytest.raises(StaleFencingTokenError, match="was written under token 3"):
            session.execute(*sent[statement], execution_options=there)
    with engine.begin() as connection:
        connection.execute(DropSchema(tenant, cascade=True))


def test_a_change_that_a_later_listener_makes_in_the_flush_is_checked(engine: Engine) -> None:
    """A before_update listener that runs after the mixin's may be what makes SQLAlchemy send the UPDATE."""
    made = shop(f"w{secrets.token_hex(6)}", "row", by_row=False)
    made.metadata.create_all(engine)
    event.listen(made.Entry, "before_update", lambda _mapper, _connection, row: setattr(row, "amount", 9))
    write = "an unfenced one-to-one child"
    outcomes = [attempt(engine, made, write, who, Session(engine)) for who in ("right", "stale", "none")]
    assert outcomes == [WRITTEN, STALE, REQUIRED]


@pytest.mark.parametrize("mode", ["gate", "row"])
def test_a_deleted_row_raises_sqlalchemys_error(engine: Engine, mode: str) -> None:
    """An UPDATE without a hook, of a row deleted in the meantime, raises StaleDataError as a flush does."""
    made = classes(engine, mode, True, versioned=False)
    with Session(engine) as session:
        fence(session, made.resource, next(_TOKENS))
        with pytest.raises(StaleDataError, match="does not exist"):
            session.bulk_update_mappings(made.Entry, [{"id": 10**6, "amount": 9}])


# ------------------------------------------------------------ the resource is a function of the row


@pytest.fixture
def doc(engine: Engine) -> Iterator[Any]:
    """A class Doc, whose resource is its owner's, and its subclass Memo, whose rows belong to another resource."""
    prefix, mappers = f"w{secrets.token_hex(6)}", registry()

    class Base(DeclarativeBase):
        registry = mappers

    class Doc(Fenced, Base):
        __tablename__ = prefix
        __fence_resource__ = staticmethod(lambda row: f"{prefix}:{'memo' if isinstance(row, Memo) else row.owner_id}")
        __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "doc"}
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        amount: Mapped[int] = mapped_column(default=0)
        owner_id: Mapped[int | None] = mapped_column(ForeignKey(f"{prefix}.id"))
        owner = relationship("Doc", remote_side="Doc.id", post_update=True)

    class Memo(Doc):
        __mapper_args__: ClassVar = {"polymorphic_identity": "memo"}

    Base.metadata.create_all(engine)
    with Session(engine) as session:
        fence(session, {f"{prefix}:None": 1, f"{prefix}:1": 1, f"{prefix}:memo": 1})
        session.add_all([Doc(id=1), Doc(id=2), Memo(id=3)])
        session.flush()
        session.add(Doc(id=4, owner_id=1))
        session.commit()
    yield SimpleNamespace(Doc=Doc, Memo=Memo, prefix=prefix)
    Base.metadata.drop_all(engine)
    mappers.dispose()


def _replace(m: Any, s: Session) -> None:
    s.delete(s.get_one(m.Doc, 4))
    s.add(m.Doc(id=4))


def _hand_over(m: Any, s: Session) -> None:
    row = s.get_one(m.Doc, 2)
    row.amount, row.owner = 9, s.get_one(m.Doc, 1)


MOVES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a row replaced under its key": (_replace, ("None", "1")),
    "a new row that post_update moves": (lambda m, s: s.add(m.Doc(id=9, owner=s.get_one(m.Doc, 1))), ("None", "1")),
    "a changed row that post_update moves": (_hand_over, ("None", "1")),
    "a row of a subclass": (lambda m, s: setattr(s.get_one(m.Doc, 3), "amount", 9), ("memo",)),
    "a deleted row of a subclass": (lambda m, s: s.delete(s.get_one(m.Doc, 3)), ("memo",)),
    "update() of the subclass": (lambda m, s: s.execute(update(m.Memo).values(amount=9)), ("memo",)),
    "a Core UPDATE of a subclass's row": (
        lambda m, s: s.execute(update(m.Doc.__table__).where(m.Doc.__table__.c.id == 3).values(amount=9)),
        ("memo",),
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_flush_needs_the_tokens_of_all_resources_of_a_row(engine: Engine, doc: Any, move: str) -> None:
    """A row that belongs to another resource after a write, or to one by its class, needs exactly these tokens."""
    write, needed = MOVES[move]
    for tokens in [*itertools.combinations(needed, len(needed) - 1), ("2",), needed]:
        with Session(engine) as session:
            if tokens:
                fence(session, {f"{doc.prefix}:{name}": 2 for name in tokens})
            with nullcontext() if tokens == needed else pytest.raises(FenceRequiredError):
                write(doc, session)
                session.commit()


@pytest.mark.parametrize(
    "statement",
    [
        lambda m: (update(m.Doc).values(amount=9),),
        lambda m: (delete(m.Doc),),
        lambda m: (insert(m.Memo), [{"id": 9}]),
        lambda m: (
            upsert(m.Doc.__table__)
            .values(id=1, kind="doc")
            .on_conflict_do_update(index_elements=["id"], set_={"amount": 9}),
        ),
    ],
    ids=["update", "delete", "insert", "upsert"],
)
def test_a_statement_whose_resources_are_not_certain_is_rejected(engine: Engine, doc: Any, statement: Any) -> None:
    """A statement on rows of several classes does not know the class that the resource depends on, nor an upsert its row."""
    with Session(engine) as session:
        fence(session, {f"{doc.prefix}:{name}": 2 for name in ("None", "1", "memo")})
        with pytest.raises(FenceRequiredError, match="write such rows through a flush"):
            session.execute(*statement(doc))


def test_an_error_of_post_update_does_not_suggest_a_flush_with_post_update(engine: Engine) -> None:
    """If the resource depends on a column of a subclass's table, an UPDATE by post_update cannot read it."""
    prefix, mappers = f"w{secrets.token_hex(6)}", registry()

    class Base(DeclarativeBase):
        registry = mappers

    class Doc(Fenced, Base):
        __tablename__ = prefix
        __fence_resource__ = staticmethod(lambda row: f"{prefix}:{row.room if row.kind == 'memo' else 'doc'}")
        __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "doc"}
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        owner_id: Mapped[int | None] = mapped_column(ForeignKey(f"{prefix}.id"))
        owner = relationship("Doc", remote_side="Doc.id", post_update=True)

    class Memo(Doc):
        __tablename__ = f"{prefix}_memo"
        __mapper_args__: ClassVar = {"polymorphic_identity": "memo"}
        id: Mapped[int] = mapped_column(ForeignKey(f"{prefix}.id"), primary_key=True)
        room: Mapped[str]

    Base.metadata.create_all(engine)
    try:
        with Session(engine) as session:
            fence(session, {f"{prefix}:doc": 1, f"{prefix}:a": 1})
            session.add(Memo(id=2, room="a", owner=Doc(id=1)))
            with pytest.raises(FenceRequiredError, match="'room', which is not in .* a flush without post_update"):
                session.flush()
    finally:
        Base.metadata.drop_all(engine)
        mappers.dispose()


@pytest.mark.parametrize("column", [column_property(literal_column("'x'")), mapped_column(Text, onupdate="x")])
def test_a_resource_that_changes_unseen_is_rejected(engine: Engine, column: Any) -> None:
    """A resource may depend neither on an expression nor on a column that gets another value with each UPDATE."""
    mappers = registry()

    class Base(DeclarativeBase):
        registry = mappers

    class Doc(Fenced, Base):
        __tablename__ = f"w{secrets.token_hex(6)}"
        __fence_resource__ = staticmethod(lambda row: row.name)
        id: Mapped[int] = mapped_column(primary_key=True)
        name = column

    try:
        with Session(engine) as session:
            session.add(Doc(id=1))
            with pytest.raises(AttributeError, match="may use only columns, and 'name'"):
                session.flush()
    finally:
        mappers.dispose()


# ------------------------------------------------------------ refused when the class is mapped


def _secondary(base: Any, entry: Any) -> None:
    class Tag(base):
        __tablename__ = "tag"
        id: Mapped[int] = mapped_column(primary_key=True)
        rows = relationship("Doc", secondary=entry.__table__)

    class Doc(base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)

    configure_mappers()


def _post_update(base: Any, entry: Any) -> None:
    class Child(entry):
        __tablename__ = "child"
        __mapper_args__: ClassVar = {"polymorphic_identity": "child"}
        id: Mapped[int] = mapped_column(ForeignKey(entry.id), primary_key=True)
        next_id: Mapped[int | None] = mapped_column(ForeignKey("child.id"))
        next = relationship("Child", foreign_keys=next_id, remote_side="Child.id", post_update=True)

    configure_mappers()


def _other_resource(base: Any, entry: Any) -> None:
    class Child(entry):
        __fence_resource__ = "another"
        __mapper_args__: ClassVar = {"polymorphic_identity": "child"}


def _unfenced_base(base: Any, entry: Any) -> None:
    class Doc(base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Child(Fenced, Doc):
        __fence_resource__ = "a"


def _own_column(base: Any, entry: Any) -> None:
    class Doc(Fenced, base):
        __tablename__ = "doc"
        __fence_resource__ = "a"
        id: Mapped[int] = mapped_column(primary_key=True)
        fence_token: Mapped[int] = mapped_column()


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (_secondary, "writes rows of Entry as its secondary table"),
        (_post_update, "has post_update and writes a table of Child without the fencing column"),
        (_other_resource, "different values of __fence_resource__"),
        (_unfenced_base, "Child is fenced, but Doc, whose table it shares, is not"),
        (_own_column, "Doc has no fencing column, or one that the mixin did not create"),
    ],
)
def test_a_mapping_that_cannot_be_guarded_raises_type_error(mapping: Any, message: str) -> None:
    """What a flush would write past the fence is an error when classes are mapped or configured."""
    mappers = registry()

    class Base(DeclarativeBase):
        registry = mappers

    class Entry(Fenced, Base):
        __tablename__ = "entry"
        __fence_resource__ = "a"
        __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "entry"}
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        tag_id: Mapped[int | None] = mapped_column(ForeignKey("tag.id"))
        doc_id: Mapped[int | None] = mapped_column(ForeignKey("doc.id"))

    try:
        with pytest.raises(TypeError, match=message):
            mapping(Base, Entry)
    finally:
        mappers.dispose()
