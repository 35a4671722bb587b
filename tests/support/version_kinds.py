"""Every kind of write that a session sends to a versioned row, as a table; and the classes that it is tried on."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sqlalchemy import ForeignKey, event, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from pgfence.errors import VersionRequiredError
from pgfence.versions import Versioned, VersionedSession, VersionedUUID

if TYPE_CHECKING:
    from collections.abc import Callable

    Rows = Callable[[Any, int], list[Any]]
    Act = Callable[[Session, Any, int], Any]

MODES = ("client", "server", "UUID", "xmin")


@dataclass(frozen=True)
class Kind:
    """A kind of write, on rows whose keys start at a number that no other test uses.

    Attributes:
        says: what it is called on the page.
        rows: the rows that are there before.
        act: what the session does, ahead of its flush.
        written: the rows that get a new version, and how many of them; all others keep theirs.
        beaten: a row that another process writes before the flush; None: nothing is compared.
        gone: whether the other process can also delete it.
        rejected: the modes in which the write is rejected, and with what.
        modes: the modes that can map the classes.
    """

    says: str
    rows: Rows
    act: Act
    written: dict[tuple[str, int], int] = field(default_factory=dict)
    beaten: tuple[str, int] | None = None
    gone: bool = True
    rejected: dict[str, type[Exception]] = field(default_factory=dict)
    modes: tuple[str, ...] = MODES


def table() -> str:
    """Return the table of the kinds as the page on versions shows it."""
    head = ["write", *(f'`"{mode}"`' if mode != "UUID" else "`VersionedUUID`" for mode in MODES)]
    lines = [head, ["---"] * len(head)]
    for kind in KINDS.values():
        lines.append([kind.says, *(_cell(kind, mode) for mode in MODES)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(kind: Kind, mode: str) -> str:
    if mode not in kind.modes:
        return "not mapped"
    if mode in kind.rejected:
        return "rejected"
    if kind.beaten is not None:
        return "compared"
    return "counted" if kind.written else "new"


def classes(mode: str) -> Any:
    """Return the classes of a mode, in tables that have no rows yet."""
    prefix = f"kinds_{secrets.token_hex(6)}"

    class Base(DeclarativeBase):
        pass

    class V(VersionedUUID if mode == "UUID" else Versioned):  # type: ignore[misc]
        __version_mode__ = mode if mode in {"server", "xmin"} else "client"

    class Page(V, Base):
        __tablename__ = f"{prefix}_page"
        id: Mapped[int] = mapped_column(primary_key=True)
        label: Mapped[str] = mapped_column(default="")
        views: Mapped[int] = mapped_column(default=0)

    class Parent(V, Base):
        __tablename__ = f"{prefix}_parent"
        id: Mapped[int] = mapped_column(primary_key=True)
        label: Mapped[str] = mapped_column(default="")
        kids: Mapped[list[Kid]] = relationship(back_populates="parent")
        own: Mapped[list[Own]] = relationship(cascade="all, delete-orphan")
        one: Mapped[One | None] = relationship(back_populates="parent")
        twin: Mapped[Twin | None] = relationship(cascade="all, delete-orphan")

    class Kid(V, Base):
        __tablename__ = f"{prefix}_kid"
        id: Mapped[int] = mapped_column(primary_key=True)
        label: Mapped[str] = mapped_column(default="")
        parent_id: Mapped[int | None] = mapped_column(ForeignKey(Parent.id))
        parent: Mapped[Parent | None] = relationship(back_populates="kids")

    class Own(V, Base):
        __tablename__ = f"{prefix}_own"
        id: Mapped[int] = mapped_column(primary_key=True)
        label: Mapped[str] = mapped_column(default="")
        parent_id: Mapped[int] = mapped_column(ForeignKey(Parent.id))

    class One(V, Base):
        __tablename__ = f"{prefix}_one"
        id: Mapped[int] = mapped_column(primary_key=True)
        label: Mapped[str] = mapped_column(default="")
        parent_id: Mapped[int | None] = mapped_column(ForeignKey(Parent.id))
        parent: Mapped[Parent | None] = relationship(back_populates="one")

    class Twin(V, Base):
        __tablename__ = f"{prefix}_twin"
        id: Mapped[int] = mapped_column(ForeignKey(Parent.id), primary_key=True)
        label: Mapped[str] = mapped_column(default="")

    class Link(V, Base):
        __tablename__ = f"{prefix}_link"
        id: Mapped[int] = mapped_column(ForeignKey(Parent.id), primary_key=True)

    class Task(V, Base):
        __tablename__ = f"{prefix}_task"
        id: Mapped[int] = mapped_column(primary_key=True)
        label: Mapped[str] = mapped_column(default="")
        parent_id: Mapped[int | None] = mapped_column(ForeignKey(f"{prefix}_task.id"))
        next_id: Mapped[int | None] = mapped_column(ForeignKey(f"{prefix}_task.id"))
        steps: Mapped[list[Task]] = relationship(foreign_keys=parent_id, remote_side=parent_id, post_update=True)
        next: Mapped[Task | None] = relationship(foreign_keys=next_id, remote_side=lambda: Task.id, post_update=True)

    class Stamped(V, Base):
        __tablename__ = f"{prefix}_stamped"
        id: Mapped[int] = mapped_column(primary_key=True)
        label: Mapped[str] = mapped_column(default="")
        notes: Mapped[list[Note]] = relationship()

    class Note(Base):
        __tablename__ = f"{prefix}_note"
        id: Mapped[int] = mapped_column(primary_key=True)
        stamped_id: Mapped[int] = mapped_column(ForeignKey(Stamped.id))

    class Group(Base):
        __tablename__ = f"{prefix}_group"
        number: Mapped[int] = mapped_column(primary_key=True)
        members: Mapped[list[Member]] = relationship(passive_updates=False)

    class Member(V, Base):
        __tablename__ = f"{prefix}_member"
        id: Mapped[int] = mapped_column(primary_key=True)
        label: Mapped[str] = mapped_column(default="")
        number: Mapped[int] = mapped_column(ForeignKey(Group.number, deferrable=True, initially="DEFERRED"))

    found = [Page, Parent, Kid, Own, One, Twin, Link, Task, Stamped, Member]
    if mode != "xmin":

        class Item(V, Base):
            __tablename__ = f"{prefix}_item"
            __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "item"}  # noqa: RUF012
            id: Mapped[int] = mapped_column(primary_key=True)
            kind: Mapped[str]
            label: Mapped[str] = mapped_column(default="")
            after_id: Mapped[int | None] = mapped_column(ForeignKey(f"{prefix}_item.id"))
            after: Mapped[Item | None] = relationship(remote_side=lambda: Item.id, post_update=True)

        class Book(Item):
            __tablename__ = f"{prefix}_book"
            __mapper_args__ = {"polymorphic_identity": "book"}  # noqa: RUF012
            id: Mapped[int] = mapped_column(ForeignKey(Item.id), primary_key=True)
            pages: Mapped[int] = mapped_column(default=0)

        found += [Item, Book]

    event.listen(Stamped, "before_update", lambda _mapper, _connection, row: setattr(row, "label", "stamped"))
    return SimpleNamespace(base=Base, versioned=found, Note=Note, Group=Group, **{cls.__name__: cls for cls in found})


# ------------------------------------------------------------ the rows that are there, and what is done to them


def _of(name: str, *numbers: int, **values: int) -> Rows:
    """Rows of a class; `values` are keys of other rows, counted from the same number."""

    def rows(m: Any, n: int) -> list[Any]:
        return [getattr(m, name)(id=n + each, **{key: n + value for key, value in values.items()}) for each in numbers]

    return rows


def _all(*parts: Rows) -> Rows:
    return lambda m, n: [row for part in parts for row in part(m, n)]


def _change(session: Session, m: Any, n: int) -> None:
    for page in _pages(session, m, n):
        page.label = "ours"


def _pages(session: Session, m: Any, n: int) -> list[Any]:
    return list(session.scalars(select(m.Page).where(m.Page.id.between(n, n + 3)).order_by(m.Page.id)))


def _delete(session: Session, m: Any, n: int) -> None:
    for page in _pages(session, m, n):
        session.delete(page)


def _expired(session: Session, m: Any, n: int) -> None:
    page = session.get_one(m.Page, n)
    session.expire(page)
    page.label = "ours"


def _switch(session: Session, m: Any, n: int) -> None:
    session.delete(session.get_one(m.Page, n))
    session.add(m.Page(id=n))


def _key_switch(session: Session, m: Any, n: int) -> None:
    session.delete(session.get_one(m.Link, n))
    session.add(m.Link(id=n))


def _orphan_switch(session: Session, m: Any, n: int) -> None:
    parent = session.get_one(m.Parent, n)
    assert parent.twin
    parent.twin = m.Twin(label="ours")


def _next(session: Session, m: Any, n: int) -> None:
    task, other = session.get_one(m.Task, n), session.get_one(m.Task, n + 1)
    assert task.next is None
    task.next = other


def _next_and_label(session: Session, m: Any, n: int) -> None:
    _next(session, m, n)
    session.get_one(m.Task, n).label = "ours"


def _steps(session: Session, m: Any, n: int) -> None:
    task, *steps = (session.get_one(m.Task, n + each) for each in range(3))
    task.steps.extend(steps)


def _cycle(session: Session, m: Any, n: int) -> None:
    session.add_all([one := m.Task(id=n), other := m.Task(id=n + 1)])
    one.next, other.next = other, one


def _delete_task(session: Session, m: Any, n: int) -> None:
    task = session.get_one(m.Task, n)
    assert (task.next, task.steps) is not None
    session.delete(task)


def _cleared(session: Session, m: Any, n: int) -> None:
    parent = session.get_one(m.Parent, n)
    assert len(parent.kids) == 2
    parent.kids.clear()


def _orphans(session: Session, m: Any, n: int) -> None:
    parent = session.get_one(m.Parent, n)
    assert len(parent.own) == 2
    parent.own.clear()


def _delete_parent(session: Session, m: Any, n: int) -> None:
    parent = session.get_one(m.Parent, n)
    assert len(parent.kids) + len(parent.own) == 2
    session.delete(parent)


def _moved(session: Session, m: Any, n: int) -> None:
    session.get_one(m.Kid, n + 1).parent = session.get_one(m.Parent, n + 1)


def _one_to_one(session: Session, m: Any, n: int) -> None:
    parent, one = session.get_one(m.Parent, n), session.get_one(m.One, n + 1)
    assert parent.one
    parent.one = one


def _stamped(session: Session, m: Any, n: int) -> None:
    row = session.get_one(m.Stamped, n)
    row.notes.append(m.Note(id=n))


def _key_changed(session: Session, m: Any, n: int) -> None:
    page = session.get_one(m.Page, n)
    page.id = n + 1


def _key_copied(session: Session, m: Any, n: int) -> None:
    group = session.get_one(m.Group, n)
    assert len(group.members) == 2
    group.number = n + 1


def _book(session: Session, m: Any, n: int) -> None:
    session.get_one(m.Book, n).pages = 7


def _book_after(session: Session, m: Any, n: int) -> None:
    book, other = session.get_one(m.Book, n), session.get_one(m.Book, n + 1)
    assert book.after is None
    book.after = other


def _merge(session: Session, m: Any, n: int) -> None:
    with VersionedSession(session.get_bind()) as elsewhere:
        page = elsewhere.get_one(m.Page, n)
    page.label = "ours"
    session.info["late"] = lambda: session.merge(page)


def _by_key(session: Session, m: Any, n: int) -> None:
    page = session.get_one(m.Page, n)
    rows = [{"id": n, "version": page.version, "label": "ours"}]
    session.info["late"] = lambda: session.execute(update(m.Page), rows)


def _update(session: Session, m: Any, n: int) -> None:
    session.info["late"] = lambda: session.execute(update(m.Page).where(m.Page.id == n).values(label="ours"))


def _update_and_change(session: Session, m: Any, n: int) -> None:
    page = session.get_one(m.Page, n)
    session.execute(
        update(m.Page).where(m.Page.id == n).values(views=1), execution_options={"synchronize_session": False}
    )
    page.label = "ours"


def _change_and_update(session: Session, m: Any, n: int) -> None:
    session.get_one(m.Page, n).label = "ours"
    session.info["late"] = lambda: session.execute(
        update(m.Page).where(m.Page.id == n).values(views=1), execution_options={"synchronize_session": False}
    )


def _upsert(session: Session, m: Any, n: int) -> None:
    statement = insert(m.Page).values(id=n, label="", views=0)
    session.info["late"] = lambda: session.execute(
        statement.on_conflict_do_update(index_elements=["id"], set_={"label": "ours"})
    )


OTHERS = (6, 7, 8)
"""The numbers of rows that a flush changes, or deletes, beside those of a kind."""


def bystanders(kind: Kind, m: Any, n: int) -> list[Any]:
    """Return three rows of each class of a kind, and the rows that they refer to."""
    names = {type(row).__name__ for row in kind.rows(m, n)} - {"Parent", "Group"} or {"Page"}
    keys: dict[str, dict[str, int]] = {"Own": {"parent_id": 6}, "Member": {"number": 6}}
    referred = [*_of("Parent", *OTHERS)(m, n), m.Group(number=n + 6)]
    return [*referred, *(row for name in sorted(names) for row in _of(name, *OTHERS, **keys.get(name, {}))(m, n))]


def write_bystanders(session: Session, m: Any, n: int) -> None:
    """Change the rows that `bystanders` has added, or delete those that have no column to change."""
    for cls in m.versioned:
        if cls is m.Parent or (m.versioned[-1].__name__ == "Book" and cls is m.Item):
            continue
        for row in session.scalars(select(cls).where(cls.id.between(n + OTHERS[0], n + OTHERS[-1]))):
            if hasattr(row, "label"):
                row.label = "ours"
            else:
                session.delete(row)


_TWO = _of("Task", 0, 1)
_KIDS = _all(_of("Parent", 0, 1), _of("Kid", 1, 2, parent_id=0))

KINDS: dict[str, Kind] = {
    "insert": Kind("a new row", _of("Page"), lambda s, m, n: s.add(m.Page(id=n))),
    "update": Kind(
        "changed columns", _of("Page", 0, 1, 2), _change, {("Page", 0): 1, ("Page", 1): 1, ("Page", 2): 1}, ("Page", 1)
    ),
    "expired": Kind(
        "a changed column of an expired instance, whose row is read again in the flush",
        _of("Page", 0),
        _expired,
        {("Page", 0): 1},
    ),
    "hook": Kind(
        "a column that a listener of `before_update` changes",
        _of("Stamped", 0),
        _stamped,
        {("Stamped", 0): 1},
        ("Stamped", 0),
    ),
    "many-to-one": Kind("an assigned many-to-one relationship", _KIDS, _moved, {("Kid", 1): 1}, ("Kid", 1)),
    "one-to-one": Kind(
        "a one-to-one relationship whose foreign key is in the other table: that row, and the one it replaces",
        _all(_of("Parent", 0), _of("One", 0, parent_id=0), _of("One", 1)),
        _one_to_one,
        {("One", 0): 1, ("One", 1): 1},
        ("One", 0),
    ),
    "primary key": Kind("a changed primary key", _of("Page", 0), _key_changed, {}, ("Page", 0)),
    "copied key": Kind(
        "a foreign key that follows a changed primary key (`passive_updates=False`)",
        _all(lambda m, n: [m.Group(number=n)], _of("Member", 0, 1, number=0)),
        _key_copied,
        {("Member", 0): 1, ("Member", 1): 1},
        ("Member", 1),
    ),
    "joined": Kind(
        "a column in the table of a subclass",
        _of("Book", 0),
        _book,
        {("Item", 0): 1},
        ("Item", 0),
        gone=False,
        modes=("client", "server", "UUID"),
    ),
    "delete": Kind("a deleted row", _of("Page", 0, 1, 2), _delete, {}, ("Page", 1)),
    "row switch": Kind(
        "a new row with the same primary key as a row that the flush deletes",
        _of("Page", 0),
        _switch,
        {("Page", 0): 1},
        ("Page", 0),
    ),
    "row switch of a key": Kind(
        "a new row with the same primary key as a row that the flush deletes, in a table that has no columns other than the key and the version",
        _all(_of("Parent", 0), _of("Link", 0)),
        _key_switch,
        {("Link", 0): 1},
        ("Link", 0),
        rejected={"xmin": TypeError},
    ),
    "row switch by orphan": Kind(
        "a new row with the same primary key as the row that it replaces in a relationship with `delete-orphan`",
        _all(_of("Parent", 0), _of("Twin", 0)),
        _orphan_switch,
        {("Twin", 0): 1},
        ("Twin", 0),
    ),
    "orphan": Kind(
        "rows taken out of a collection with `delete-orphan`",
        _all(_of("Parent", 0), _of("Own", 1, 2, parent_id=0)),
        _orphans,
        {},
        ("Own", 1),
    ),
    "nulled": Kind(
        "rows taken out of a collection, whose foreign key is set to NULL",
        _KIDS,
        _cleared,
        {("Kid", 1): 1, ("Kid", 2): 1},
        ("Kid", 1),
    ),
    "nulled by a delete": Kind(
        "rows of a collection whose owner is deleted",
        _KIDS,
        _delete_parent,
        {("Kid", 1): 1, ("Kid", 2): 1},
        ("Kid", 2),
    ),
    "cascade": Kind(
        "rows that are deleted with their owner (`cascade`)",
        _all(_of("Parent", 0), _of("Own", 1, 2, parent_id=0)),
        _delete_parent,
        {},
        ("Own", 2),
    ),
    "post_update": Kind("a many-to-one relationship with `post_update`", _TWO, _next, {("Task", 0): 1}, ("Task", 0)),
    "post_update and a change": Kind(
        "a many-to-one relationship with `post_update`, together with a changed column: two UPDATEs",
        _TWO,
        _next_and_label,
        {("Task", 0): 2},
        ("Task", 0),
    ),
    "post_update of many": Kind(
        "the rows of a one-to-many relationship with `post_update`",
        _of("Task", 0, 1, 2),
        _steps,
        {("Task", 1): 1, ("Task", 2): 1},
        ("Task", 2),
    ),
    "post_update of a subclass": Kind(
        "a many-to-one relationship with `post_update` that a joined subclass inherits",
        _of("Book", 0, 1),
        _book_after,
        {("Item", 0): 1},
        ("Item", 0),
        gone=False,
        modes=("client", "server", "UUID"),
    ),
    "post_update of new rows": Kind("new rows that refer to each other, with `post_update`", _of("Task"), _cycle),
    "deleted with post_update": Kind(
        "a deleted row, which `post_update` writes first",
        lambda m, n: [*_of("Task", 1)(m, n), *_of("Task", 0, next_id=1)(m, n)],
        _delete_task,
        {},
        ("Task", 0),
    ),
    "deleted parent with post_update": Kind(
        "the rows of a one-to-many relationship with `post_update` whose owner is deleted",
        lambda m, n: [*_of("Task", 0)(m, n), *_of("Task", 1, 2, parent_id=0)(m, n)],
        _delete_task,
        {("Task", 1): 1, ("Task", 2): 1},
        ("Task", 1),
    ),
    "merge": Kind(
        "`merge()` of an instance that another session has read",
        _of("Page", 0),
        _merge,
        {("Page", 0): 1},
        ("Page", 0),
        rejected={"xmin": VersionRequiredError},
    ),
    "by key": Kind(
        "`update()` by primary key, each row with its version",
        _of("Page", 0),
        _by_key,
        {("Page", 0): 1},
        ("Page", 0),
        rejected={"xmin": VersionRequiredError},
    ),
    "own statement, then a change": Kind(
        "`update()` of a row, and then a changed column", _of("Page", 0), _update_and_change, {("Page", 0): 2}
    ),
    "a change, then an own statement": Kind(
        "a changed column, and then an `update()` ahead of the flush",
        _of("Page", 0),
        _change_and_update,
        {("Page", 0): 2},
        ("Page", 0),
    ),
    "statement": Kind("`update()` with a WHERE clause", _of("Page", 0), _update, {("Page", 0): 1}),
    "upsert": Kind("`insert()` with ON CONFLICT DO UPDATE", _of("Page", 0), _upsert, {("Page", 0): 1}),
}
