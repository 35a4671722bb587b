"""`_orm`: which rows a flush writes, held against the UPDATE statements that SQLAlchemy sends."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import ForeignKey, create_engine, event, func, inspect
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, column_property, mapped_column, relationship
from sqlalchemy.orm.attributes import flag_modified

from pgfence._orm import sends_update, will_send_update

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIX = f"flushes_{secrets.token_hex(6)}"


class Base(DeclarativeBase):
    pass


class Owner(Base):
    __tablename__ = f"{_PREFIX}_owner"
    id: Mapped[int] = mapped_column(primary_key=True)


class Doc(Base):
    __tablename__ = f"{_PREFIX}_doc"
    id: Mapped[int] = mapped_column(primary_key=True)
    label: Mapped[str] = mapped_column(default="x")
    owner_id: Mapped[int | None] = mapped_column(ForeignKey(Owner.id))
    next_id: Mapped[int | None] = mapped_column(ForeignKey(f"{_PREFIX}_doc.id"))
    owner = relationship(Owner)
    owner_view = relationship(Owner, viewonly=True)
    next = relationship("Doc", foreign_keys=next_id, remote_side="Doc.id", post_update=True)
    one = relationship("One", uselist=False, back_populates="doc")
    length = column_property(func.length("abc"))


class One(Base):
    __tablename__ = f"{_PREFIX}_one"
    id: Mapped[int] = mapped_column(primary_key=True)
    doc_id: Mapped[int | None] = mapped_column(ForeignKey(Doc.id))
    doc = relationship(Doc, back_populates="one")


def _reassign(doc: Doc) -> None:
    owner, doc.owner = doc.owner, None
    doc.owner = owner


# What is done to Doc 1 and One 1, and the rows whose own UPDATE is sent for it.
CASES: dict[str, tuple[Any, set[type[Any]]]] = {
    "a column": (lambda s, doc, one: setattr(doc, "label", "y"), {Doc}),
    "an expression": (lambda s, doc, one: setattr(doc, "label", func.lower("Y")), {Doc}),
    "a column there and back": (lambda s, doc, one: (setattr(doc, "label", "y"), setattr(doc, "label", "x")), set()),
    "a marked column": (lambda s, doc, one: flag_modified(doc, "label"), {Doc}),
    "a marked relationship": (lambda s, doc, one: flag_modified(doc, "one"), set()),
    "a many-to-one": (lambda s, doc, one: setattr(doc, "owner", s.get(Owner, 2)), {Doc}),
    "a many-to-one to a new row": (lambda s, doc, one: setattr(doc, "owner", Owner(id=3)), {Doc}),
    "a many-to-one cleared": (lambda s, doc, one: setattr(doc, "owner", None), {Doc}),
    "a many-to-one there and back": (lambda s, doc, one: _reassign(doc), set()),
    "a one-to-one from its other side": (lambda s, doc, one: setattr(doc, "one", one), {One}),
    "a one-to-one": (lambda s, doc, one: setattr(one, "doc", doc), {One}),
    "a view": (lambda s, doc, one: setattr(doc, "owner_view", s.get(Owner, 2)), set()),
    "a column property": (lambda s, doc, one: setattr(doc, "length", 7), set()),
    "a post_update": (lambda s, doc, one: setattr(doc, "next", s.get(Doc, 2)), set()),
}


@pytest.fixture(scope="module")
def engine(dsn: str) -> Iterator[Any]:
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Owner(id=1), Owner(id=2), Doc(id=1, owner_id=1), Doc(id=2), One(id=1)])
        session.commit()
    yield engine
    Base.metadata.drop_all(engine)
    engine.dispose()


@pytest.mark.parametrize("case", CASES)
def test_the_rows_that_a_flush_updates_are_known(engine: Any, case: str) -> None:
    """A row counts as written exactly when its own UPDATE is sent, before the flush and when its turn comes."""
    change, expected = CASES[case]
    turn: set[type[Any]] = set()
    sent: list[str] = []

    def note(_mapper: Any, _connection: Any, row: Any) -> None:
        if sends_update(inspect(row)):
            turn.add(type(row))

    with Session(engine, autoflush=False) as session:
        doc, one = session.get_one(Doc, 1), session.get_one(One, 1)
        assert (doc.owner is not None, doc.one, doc.owner_view is not None, doc.length) == (True, None, True, 3)
        change(session, doc, one)
        ahead = {type(row) for row in session.dirty if will_send_update(inspect(row))}
        event.listen(session.connection(), "before_cursor_execute", lambda *args: sent.append(args[2]))
        for cls in (Doc, One):
            event.listen(cls, "before_update", note)
        try:
            session.flush()
        finally:
            for cls in (Doc, One):
                event.remove(cls, "before_update", note)
        session.rollback()
    updates = {cls for cls in (Doc, One) for text in sent if text.startswith(f"UPDATE {cls.__tablename__} ")}
    assert updates == (expected if case != "a post_update" else {Doc})
    assert (ahead, turn) == (expected, expected)
