"""Every way in which rows of a fenced class are written, on classes of each mode and kind of resource."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import Column, ForeignKey, Table, delete, insert, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from pgfence.fence import Fenced

if TYPE_CHECKING:
    from collections.abc import Callable

    Write = Callable[["Shop", Session], Any]


class Shop(SimpleNamespace):
    """Classes with their own tables: Entry, Same, Item and Piece are fenced, Doc, Profile and Tag are not."""

    metadata: Any
    resource: str


def shop(prefix: str, mode: str, *, by_row: bool, mixins: tuple[type[Any], ...] = ()) -> Shop:
    """Map the classes.

    Args:
        prefix: of the tables.
        mode: gate or row.
        by_row: the resource is a function of the row; its books are all called `prefix`.
        mixins: further ones for the fenced classes.
    """

    class Base(DeclarativeBase):
        pass

    class Guard(*mixins, Fenced):  # type: ignore[misc]
        __fence__ = mode  # type: ignore[assignment]
        __fence_resource__ = staticmethod(lambda row: row.book) if by_row else prefix

    class Doc(Base):
        __tablename__ = f"{prefix}_doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        same = relationship("Same", uselist=False, cascade="all, delete-orphan")
        lines = relationship("Entry", foreign_keys="Entry.doc_id")
        marked = relationship("Entry", foreign_keys="Entry.mark_id", post_update=True)
        parts = relationship("Entry", foreign_keys="Entry.part_id", cascade="all, delete-orphan")
        passive = relationship("Entry", foreign_keys="Entry.cascade_id", passive_deletes=True)

    class Entry(Guard, Base):
        __tablename__ = f"{prefix}_entry"
        id: Mapped[int] = mapped_column(primary_key=True)
        book: Mapped[str] = mapped_column(default=prefix)
        amount: Mapped[int] = mapped_column(default=0)
        doc_id: Mapped[int | None] = mapped_column(ForeignKey(Doc.id))
        mark_id: Mapped[int | None] = mapped_column(ForeignKey(Doc.id))
        part_id: Mapped[int | None] = mapped_column(ForeignKey(Doc.id))
        cascade_id: Mapped[int | None] = mapped_column(ForeignKey(Doc.id, ondelete="CASCADE"))
        next_id: Mapped[int | None] = mapped_column(ForeignKey(f"{prefix}_entry.id"))
        next = relationship("Entry", remote_side="Entry.id", post_update=True)
        profile = relationship("Profile", uselist=False, back_populates="entry")
        tags = relationship("Tag", secondary=lambda: tagged)

    class Same(Guard, Base):
        __tablename__ = f"{prefix}_same"
        id: Mapped[int] = mapped_column(ForeignKey(Doc.id), primary_key=True)
        book: Mapped[str] = mapped_column(default=prefix)
        label: Mapped[str] = mapped_column(default="")

    class Item(Guard, Base):
        __tablename__ = f"{prefix}_item"
        __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "item"}
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        book: Mapped[str] = mapped_column(default=prefix)

    class Piece(Item):
        __tablename__ = f"{prefix}_piece"
        __mapper_args__: ClassVar = {"polymorphic_identity": "piece"}
        id: Mapped[int] = mapped_column(ForeignKey(Item.id, ondelete="CASCADE"), primary_key=True)
        size: Mapped[int] = mapped_column(default=0)

    class Profile(Base):
        __tablename__ = f"{prefix}_profile"
        id: Mapped[int] = mapped_column(primary_key=True)
        entry_id: Mapped[int | None] = mapped_column(ForeignKey(Entry.id))
        entry = relationship(Entry, back_populates="profile")

    class Tag(Base):
        __tablename__ = f"{prefix}_tag"
        id: Mapped[int] = mapped_column(primary_key=True)

    tagged = Table(
        f"{prefix}_tagged",
        Base.metadata,
        Column("entry_id", ForeignKey(Entry.id), primary_key=True),
        Column("tag_id", ForeignKey(Tag.id), primary_key=True),
    )
    found = {cls.__name__: cls for cls in (Doc, Entry, Same, Item, Piece, Profile, Tag)}
    return Shop(metadata=Base.metadata, resource=prefix, **found)


def fill(m: Shop, s: Session) -> None:
    """Add the rows that the writes are about; the transaction has their token."""
    book = m.resource
    s.add_all([m.Doc(id=number) for number in (1, 2)])
    s.flush()
    s.add_all(
        [
            m.Entry(id=1, book=book, doc_id=1, mark_id=1, part_id=1),
            m.Entry(id=2, book=book, cascade_id=2),
            m.Same(id=1, book=book, label="old"),
            m.Piece(id=1, book=book),
            m.Tag(id=1),
        ]
    )


def _replace_same(m: Shop, s: Session) -> None:
    doc = s.get_one(m.Doc, 1)
    assert doc.same.label == "old"
    doc.same = m.Same(book=m.resource, label="new")


def _clear(name: str) -> Write:
    def write(m: Shop, s: Session) -> None:
        doc = s.get_one(m.Doc, 1)
        getattr(doc, name).clear()
        s.flush()

    return write


def _append(name: str) -> Write:
    def write(m: Shop, s: Session) -> None:
        doc = s.get_one(m.Doc, 2)
        getattr(doc, name).append(s.get_one(m.Entry, 1))
        s.flush()

    return write


def _tag(m: Shop, s: Session) -> None:
    entry = s.get_one(m.Entry, 1)
    entry.tags.append(s.get_one(m.Tag, 1))
    s.flush()


def _switch_piece(m: Shop, s: Session) -> None:
    s.delete(s.get_one(m.Piece, 1))
    s.add(m.Piece(id=1, book=m.resource, size=9))


def _switch(m: Shop, s: Session) -> None:
    s.delete(s.get_one(m.Entry, 1))
    s.add(m.Entry(id=1, book=m.resource, amount=9))


def _delete_marked(m: Shop, s: Session) -> None:
    s.execute(text(f"UPDATE {m.Entry.__tablename__} SET doc_id = NULL, part_id = NULL"))
    s.execute(text(f"DELETE FROM {m.Same.__tablename__}"))
    s.delete(s.get_one(m.Doc, 1))


def _core(statement: Callable[[Any], Any]) -> Write:
    return lambda m, s: s.execute(statement(m.Entry.__table__))


WRITES: dict[str, Write] = {
    # A flush.
    "`add()`": lambda m, s: s.add(m.Entry(id=9, book=m.resource)),
    "a changed attribute": lambda m, s: setattr(s.get_one(m.Entry, 1), "amount", 9),
    "a changed primary key": lambda m, s: setattr(s.get_one(m.Entry, 1), "id", 9),
    "an attribute in the table of a joined subclass": lambda m, s: setattr(s.get_one(m.Piece, 1), "size", 9),
    "`merge()`": lambda m, s: s.merge(m.Entry(id=1, book=m.resource, amount=9)),
    "`delete()`": lambda m, s: s.delete(s.get_one(m.Entry, 2)),
    "`delete()` and `add()` of the same key in one flush": _switch,
    "`delete()` and `add()` of the same key in one flush, for a joined subclass": _switch_piece,
    "a one-to-one child whose primary key is its parent's, replaced by a new child": _replace_same,
    "an orphan, deleted by the flush": _clear("parts"),
    "a child added to a collection": _append("lines"),
    "a child removed from a collection, its foreign key set to NULL": _clear("lines"),
    "`post_update` of a child": _append("marked"),
    "`post_update` of a many-to-one": lambda m, s: setattr(s.get_one(m.Entry, 1), "next", s.get_one(m.Entry, 2)),
    "`post_update` of a deleted row's children": _delete_marked,
    # Statements of the class.
    "`insert()`": lambda m, s: s.execute(insert(m.Entry), [{"id": 9, "book": m.resource}]),
    "`update()`, `delete()`": lambda m, s: (
        s.execute(update(m.Entry).where(m.Entry.id == 1).values(amount=9)),
        s.execute(delete(m.Entry).where(m.Entry.id == 2)),
    ),
    "`update()` by primary key": lambda m, s: s.execute(update(m.Entry), [{"id": 1, "amount": 9}]),
    "an upsert": lambda m, s: s.execute(
        upsert(m.Entry).values(id=1, book=m.resource).on_conflict_do_update(index_elements=["id"], set_={"amount": 9})
    ),
    "INSERT from SELECT": lambda m, s: s.execute(
        insert(m.Entry).from_select(["id", "book", "amount"], select(m.Entry.id + 10, m.Entry.book, m.Entry.amount))
    ),
    # Past the class.
    "`bulk_insert_mappings()`, `bulk_save_objects()`": lambda m, s: (
        s.bulk_insert_mappings(m.Entry, [{"id": 8, "book": m.resource}]),
        s.bulk_save_objects([m.Entry(id=9, book=m.resource)]),
    ),
    "`bulk_update_mappings()`": lambda m, s: s.bulk_update_mappings(m.Entry, [{"id": 1, "amount": 9}]),
    "Core: INSERT": lambda m, s: s.execute(insert(m.Entry.__table__).values(id=9, book=m.resource, amount=0)),
    "Core: UPDATE of one row by its primary key": _core(lambda t: update(t).where(t.c.id == 1).values(amount=9)),
    "Core: any other UPDATE": _core(lambda t: update(t).values(amount=9)),
    "Core: DELETE": _core(lambda t: delete(t).where(t.c.id == 1)),
    "SQL in plain text": lambda m, s: s.execute(text(f"UPDATE {m.Entry.__tablename__} SET amount = 9")),
    "`ON DELETE CASCADE`, carried out by the server": lambda m, s: s.delete(s.get_one(m.Doc, 2)),
    # Rows of other classes.
    "an unfenced one-to-one child": lambda m, s: s.add(m.Profile(id=9, entry=s.get_one(m.Entry, 1))),
    "a row of an unfenced secondary table": _tag,
}
