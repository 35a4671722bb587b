"""`__version_relationships__` counts changes of a row's children as changes of it, once per flush."""

from __future__ import annotations

import secrets
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from sqlalchemy import Column, DateTime, ForeignKey, Identity, Table, func, inspect, select
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    aliased,
    configure_mappers,
    foreign,
    mapped_column,
    relationship,
)
from sqlalchemy.orm.attributes import flag_modified

from pgfence import schema
from pgfence.errors import VersionConflictError
from pgfence.versions import Versioned
from support.versioned_rows import made, on_session

if TYPE_CHECKING:
    from support.worlds import World

pytestmark = pytest.mark.one_driver

COUNTED = ("lines", "tags")


class Shop(NamedTuple):
    """Classes of one test."""

    order: Any
    line: Any
    tag: Any


async def shop(
    world: World, engine: Any, *, mode: str = "client", counted: tuple[str, ...] = COUNTED, bare: bool = False
) -> Shop:
    """Make orders with lines and tags: order 1 with lines 1 and 2 and tag 1, order 2 with nothing, tag 2.

    Args:
        world: the sync or async world.
        engine: the engine on which the tables are created.
        mode: client or server.
        counted: the relationships of an order whose changes count.
        bare: whether an order has no columns besides its key and version.
    """

    class Base(DeclarativeBase):
        pass

    name = f"order_{secrets.token_hex(6)}"
    both = Table(
        f"{name}_tags",
        Base.metadata,
        Column("order_id", ForeignKey(f"{name}.id"), primary_key=True),
        Column("tag_id", ForeignKey(f"{name}_tag.id"), primary_key=True),
    )

    class Order(Versioned, Base):
        __tablename__ = name
        __version_mode__ = mode
        __version_relationships__ = counted
        id: Mapped[int] = mapped_column(primary_key=True)
        if not bare:
            changed: Mapped[Any] = mapped_column(DateTime, server_default=func.now(), onupdate=func.clock_timestamp())
            number: Mapped[str] = mapped_column(default="")
        lines: Mapped[list[Any]] = relationship("Line", back_populates="order", cascade="all, delete-orphan")
        tags: Mapped[list[Any]] = relationship("Tag", secondary=both, back_populates="orders")

    class Line(Base):
        __tablename__ = f"{name}_line"
        id: Mapped[int] = mapped_column(primary_key=True)
        order_id: Mapped[int] = mapped_column(ForeignKey(f"{name}.id"))
        amount: Mapped[int] = mapped_column(default=0)
        order: Mapped[Any] = relationship("Order", back_populates="lines")

    class Tag(Base):
        __tablename__ = f"{name}_tag"
        id: Mapped[int] = mapped_column(primary_key=True)
        label: Mapped[str] = mapped_column(default="")
        orders: Mapped[list[Any]] = relationship("Order", secondary=both, back_populates="tags")

    await made(world, engine, Order)
    if mode == "server":
        await world.call(schema.add_version_trigger, engine, Order)

    def fill(session: Session) -> None:
        session.add_all([Order(id=1, lines=[Line(id=1), Line(id=2)], tags=[Tag(id=1)]), Order(id=2), Tag(id=2)])
        session.commit()

    await on_session(world, engine, fill)
    return Shop(Order, Line, Tag)


def append(session: Session, one: Shop) -> None:
    order = session.get_one(one.order, 1)
    order.lines.append(one.line(id=3))


def append_by_parent(session: Session, one: Shop) -> None:
    session.add(one.line(id=3, order=session.get_one(one.order, 1)))


def append_by_key(session: Session, one: Shop) -> None:
    session.add(one.line(id=3, order_id=1))


def remove(session: Session, one: Shop) -> None:
    order = session.get_one(one.order, 1)
    order.lines.pop()


def delete(session: Session, one: Shop) -> None:
    session.delete(session.get_one(one.line, 2))


def edit(session: Session, one: Shop) -> None:
    session.get_one(one.line, 2).amount = 5


def edit_and_more(session: Session, one: Shop) -> None:
    order = session.get_one(one.order, 1)
    order.number = "7"
    order.lines[0].amount = 5
    order.lines.append(one.line(id=3))
    order.tags.clear()


def tagged(session: Session, one: Shop) -> None:
    order = session.get_one(one.order, 1)
    order.tags.append(session.get_one(one.tag, 2))


def tagged_from_the_other_side(session: Session, one: Shop) -> None:
    tag = session.get_one(one.tag, 2)
    tag.orders.append(session.get_one(one.order, 1))


def untagged(session: Session, one: Shop) -> None:
    order = session.get_one(one.order, 1)
    order.tags.clear()


def tag_deleted(session: Session, one: Shop) -> None:
    session.delete(session.get_one(one.tag, 1))


CHANGES = (
    append,
    append_by_parent,
    append_by_key,
    remove,
    delete,
    edit,
    edit_and_more,
    tagged,
    tagged_from_the_other_side,
    untagged,
    tag_deleted,
)


def versions(session: Session, one: Shop) -> list[int]:
    return list(session.scalars(select(one.order.version).order_by(one.order.id)))


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize(("mode", "loaded"), [("client", False), ("server", True)])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_of_what_belongs_to_a_row_counts_once(
    world: World, mode: str, change: Any, loaded: bool
) -> None:
    """C065: rows that come, go or change, by either side of the relationship or by the key: the order's version rises by 1."""
    engine = world.engine()
    one = await shop(world, engine, mode=mode)

    def work(session: Session) -> list[int]:
        orders = session.scalars(select(one.order).order_by(one.order.id)).all() if loaded else []
        rows = [*session.scalars(select(one.line)), *session.scalars(select(one.tag))]
        with session.no_autoflush:
            change(session, one)
        session.flush()
        assert [inspect(order).dict["version"] for order in orders] == [2, 1][: len(orders)]
        session.commit()
        assert rows
        return versions(session, one)

    assert await on_session(world, engine, work) == [2, 1]


async def test_without_the_option_only_its_own_columns_count(world: World) -> None:
    """C065: by default a change of the lines leaves the order's version as it is."""
    engine = world.engine()
    one = await shop(world, engine, counted=())

    def work(session: Session) -> list[int]:
        kept = [session.get_one(one.order, 1), session.get_one(one.tag, 2)]
        for change in (append, edit, tagged):
            change(session, one)
        session.commit()
        assert kept
        return versions(session, one)

    assert await on_session(world, engine, work) == [1, 1]


@pytest.mark.twins
async def test_changes_of_different_lines_conflict_over_their_owner(world: World) -> None:
    """C065: one appends a line, the other edits another one; the second to commit is in conflict over the order."""
    engine = world.engine()
    one = await shop(world, engine)
    kept: dict[str, Any] = {}

    def read(session: Session) -> None:
        kept["order"], kept["line"] = session.get_one(one.order, 1), session.get_one(one.line, 2)

    def edit_what_was_read(session: Session) -> None:
        session.add_all(kept.values())
        kept["line"].amount = 5
        session.commit()

    def append_first(session: Session) -> None:
        append(session, one)
        session.commit()

    await on_session(world, engine, read)
    await on_session(world, engine, append_first)
    with pytest.raises(VersionConflictError) as refused:
        await on_session(world, engine, edit_what_was_read)
    assert refused.value.items == ((one.order, (1,), 1, 2),)


async def test_a_line_that_moves_counts_for_both_orders(world: World) -> None:
    """A line that moves, through the relationship or by its key, counts for its old and its new order."""
    engine = world.engine()
    one = await shop(world, engine)

    def work(session: Session) -> list[list[int]]:
        session.get_one(one.line, 1).order_id = 2
        session.commit()
        by_key = versions(session, one)
        session.get_one(one.line, 2).order = session.get_one(one.order, 2)
        session.commit()
        return [by_key, versions(session, one)]

    assert await on_session(world, engine, work) == [[2, 2], [3, 3]]


async def test_a_new_or_deleted_owner_counts_once(world: World) -> None:
    """A new order starts at 1 with its lines, and a deleted one is deleted with them."""
    engine = world.engine()
    one = await shop(world, engine)

    def work(session: Session) -> list[int]:
        session.add(one.order(id=3, lines=[one.line(id=9)]))
        session.delete(session.get_one(one.order, 1))
        session.commit()
        return versions(session, one)

    assert await on_session(world, engine, work) == [1, 1]


async def test_columns_that_change_by_themselves_still_do(world: World) -> None:
    """An `onupdate` column of the order is set when a line changes."""
    engine = world.engine()
    one = await shop(world, engine)

    def work(session: Session) -> None:
        order = session.get_one(one.order, 1)
        before = order.changed
        edit(session, one)
        session.commit()
        assert order.changed > before

    await on_session(world, engine, work)


async def test_a_row_of_key_and_version_alone_can_count(world: World) -> None:
    """In mode "client", a row needs no column besides its key and version to be counted."""
    engine = world.engine()
    one = await shop(world, engine, bare=True)

    def work(session: Session) -> list[int]:
        for change in (append, edit):
            change(session, one)
            session.commit()
        return versions(session, one)

    assert await on_session(world, engine, work) == [3, 1]


async def test_an_order_is_counted_by_a_column_that_can_be_written(world: World) -> None:
    """Not by one that is GENERATED ALWAYS AS IDENTITY, nor by one whose load is rejected."""
    engine = world.engine()

    class Base(DeclarativeBase):
        pass

    class Order(Versioned, Base):
        __tablename__ = f"order_{secrets.token_hex(6)}"
        __version_relationships__ = ("lines",)
        id: Mapped[int] = mapped_column(primary_key=True)
        number: Mapped[int] = mapped_column(Identity(always=True))
        text: Mapped[str] = mapped_column(default="", deferred=True, deferred_raiseload=True)
        name: Mapped[str] = mapped_column(default="")
        lines: Mapped[list[Line]] = relationship()

    class Line(Base):
        __tablename__ = f"line_{secrets.token_hex(6)}"
        id: Mapped[int] = mapped_column(primary_key=True)
        order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))

    await made(world, engine, Base)

    def work(session: Session) -> None:
        session.add(Order(id=1))
        session.commit()
        order = session.get_one(Order, 1)
        session.add(Line(id=1, order_id=1))
        session.commit()
        assert order.version == 2

    await on_session(world, engine, work)


async def test_a_trigger_needs_a_column_to_write(world: World) -> None:
    """In the mode "server" a row of key and version alone cannot be updated without a change, and the error says so."""
    engine = world.engine()
    one = await shop(world, engine, mode="server", bare=True)

    def work(session: Session) -> None:
        append(session, one)
        session.commit()

    with pytest.raises(TypeError, match="Add another column to the table"):
        await on_session(world, engine, work)


async def test_a_row_can_be_counted_manually(world: World) -> None:
    """Where no relationship tells, `flag_modified` on any other column makes the flush write and count the row."""
    engine = world.engine()
    one = await shop(world, engine, counted=())

    def work(session: Session) -> list[int]:
        flag_modified(session.get_one(one.order, 1), "number")
        session.commit()
        return versions(session, one)

    assert await on_session(world, engine, work) == [2, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "'nothing', which is not a relationship"),
        ("owner", "'owner', which is many-to-one or viewonly"),
        ("alias", "an aliased class.: use Line itself as the target, or remove"),
        ("unmapped", "map the columns that the join uses, or remove"),
    ],
)
def test_names_that_cannot_count_are_rejected(name: str, message: str) -> None:
    """A name that is no relationship, a many-to-one relationship, or one whose rows do not determine their owner."""

    class Base(DeclarativeBase):
        pass

    class Owner(Base):
        __tablename__ = "owner"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Line(Base):
        __tablename__ = "line"
        __table_args__ = (Column("order_id", ForeignKey("order.id")),)
        __mapper_args__ = {"exclude_properties": ["order_id"]}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        other_id: Mapped[int] = mapped_column(ForeignKey("owner.id"))

    @cache
    def other() -> Any:
        return aliased(Line)

    class Order(Versioned, Base):
        __tablename__ = "order"
        __version_relationships__ = (name,)
        id: Mapped[int] = mapped_column(primary_key=True)
        owner_id: Mapped[int] = mapped_column(ForeignKey("owner.id"))
        owner: Mapped[Owner] = relationship()
        unmapped: Mapped[list[Line]] = relationship()
        alias: Mapped[list[Line]] = relationship(other, primaryjoin=lambda: Order.owner_id == foreign(other().other_id))

    try:
        with pytest.raises(ValueError, match=message):
            configure_mappers()
    finally:
        Base.registry.dispose()


def test_a_subclass_cannot_name_them_as_text() -> None:
    """A str in place of the tuple is rejected when the subclass is mapped, as in the base."""

    class Base(DeclarativeBase):
        pass

    class Order(Versioned, Base):
        __tablename__ = "order"
        id: Mapped[int] = mapped_column(primary_key=True)

    with pytest.raises(TypeError, match="must be a tuple of names, not 'lines'"):
        type("Sub", (Order,), {"__version_relationships__": "lines"})
    Base.registry.dispose()
