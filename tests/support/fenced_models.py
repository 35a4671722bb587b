"""Fenced classes of every kind, each with its own table, and work on a Session in a world."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, registry
from sqlmodel import Field, SQLModel

from pgfence.fence import fence
from pgfence.fence._mixin import Fenced

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World

KINDS = ("plain", "dataclass", "sqlmodel")


def by_book(row: Any) -> str:
    """The resource of a row whose book is the resource."""
    return row.book


def plain(table: str, options: dict[str, Any]) -> Any:
    class Base(DeclarativeBase):
        pass

    class Entry(Fenced, Base):
        __tablename__ = table
        vars().update(options)
        id: Mapped[int] = mapped_column(primary_key=True)
        book: Mapped[str]
        amount: Mapped[int] = mapped_column(default=0)

    return Entry


def dataclass(table: str, options: dict[str, Any]) -> Any:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Entry(Fenced, Base):
        __tablename__ = table
        vars().update(options)
        id: Mapped[int] = mapped_column(primary_key=True)
        book: Mapped[str]
        amount: Mapped[int] = mapped_column(default=0)

    return Entry


def sqlmodel(table: str, options: dict[str, Any]) -> Any:
    class Base(SQLModel, registry=registry()):
        pass

    class Entry(Fenced, Base, table=True):
        __tablename__ = table
        vars().update(options)
        id: int = Field(primary_key=True)
        book: str
        amount: int = 0

    return Entry


async def entry(
    world: World, engine: Any, kind: str = "plain", *, mode: str = "gate", resource: Any = None, **options: Any
) -> Any:
    """Make a fenced class and its table.

    Args:
        world: where.
        engine: likewise.
        kind: plain, dataclass or sqlmodel.
        mode: gate or row.
        resource: a function of the row; None: a name of its own, as `Entry.resource`.
        **options: further attributes of the class.
    """
    table = f"entry_{secrets.token_hex(6)}"
    resource = resource or f"books:{table}"
    given = {"__fence__": mode, "__fence_resource__": staticmethod(resource) if callable(resource) else resource}
    made = globals()[kind](table, given | options)
    await on_session(world, engine, lambda session: made.metadata.create_all(session.connection()) or session.commit())
    return made


async def on_session(world: World, engine: Any, work: Callable[[Session], Any], **options: Any) -> Any:
    """Open a Session or AsyncSession and hand its sync side to `work`; what is not committed there is rolled back."""
    if world.is_async:
        async with AsyncSession(engine, **options) as session:
            return await session.run_sync(work)

    def body() -> Any:
        with Session(engine, **options) as session:
            return work(session)

    return await world.call(body)


async def under(world: World, engine: Any, tokens: dict[str, int], work: Callable[[Session], Any]) -> Any:
    """Do some work in a transaction that enters gates first, and commit it."""

    def body(session: Session) -> Any:
        if tokens:
            fence(session, tokens)
        answer = work(session)
        session.commit()
        return answer

    return await on_session(world, engine, body)
