"""Versioned classes of one table or two, each with its own tables, and work on a VersionedSession in a world."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from sqlalchemy import ForeignKey, event, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from pgfence import schema
from pgfence.versions import Versioned, VersionedSession, VersionedUUID

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World

KINDS = ("integer", "uuid", "server")


async def page(world: World, engine: Any, kind: str = "integer", *, column: str = "version") -> Any:
    """Make a versioned class and its table, with pages 1 to 5.

    Args:
        world: where.
        engine: likewise.
        kind: integer, uuid, server or xmin.
        column: the version's name in the table.
    """

    class Base(DeclarativeBase):
        pass

    class Page(VersionedUUID if kind == "uuid" else Versioned, Base):  # type: ignore[misc]
        __tablename__ = f"page_{secrets.token_hex(6)}"
        __version_mode__ = kind if kind in ("server", "xmin") else "client"  # type: ignore[assignment]
        __version_column__ = column
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")
        views: Mapped[int] = mapped_column(default=0)

    await made(world, engine, Base, Page)
    return Page


async def joined(world: World, engine: Any, counted_by: str = "client") -> Any:
    """Make a class in two tables, the version in the first; with pages 1 to 5."""

    class Base(DeclarativeBase):
        pass

    name = f"item_{secrets.token_hex(6)}"

    class Item(Versioned, Base):
        __tablename__ = name
        __version_mode__ = counted_by  # type: ignore[assignment]
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "item"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        title: Mapped[str] = mapped_column(default="")

    class Book(Item):
        __tablename__ = f"{name}_book"
        __mapper_args__ = {"polymorphic_identity": "book"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(ForeignKey(f"{name}.id"), primary_key=True)
        views: Mapped[int] = mapped_column(default=0)

    await made(world, engine, Base, Book)
    return Book


async def made(world: World, engine: Any, base: Any, cls: Any = None) -> None:
    """Make the tables of a declarative base, and put pages 1 to 5 into one of its classes."""

    def make(session: Session) -> None:
        base.metadata.create_all(session.connection())
        if cls is not None:
            if cls.__version_mode__ == "server":
                schema.add_version_trigger(session.connection(), cls.__mapper__.base_mapper.class_)
            session.add_all([cls(id=number) for number in range(1, 6)])
        session.commit()

    await on_session(world, engine, make)


async def on_session(world: World, engine: Any, work: Callable[[Session], Any], **options: Any) -> Any:
    """Open a VersionedSession and hand it to `work`; what is not committed there is rolled back."""
    if world.is_async:
        async with AsyncSession(engine, sync_session_class=VersionedSession, **options) as session:
            return await session.run_sync(work)

    def body() -> Any:
        with VersionedSession(engine, **options) as session:
            return work(session)

    return await world.call(body)


async def beside(world: World, engine: Any, work: Callable[[Session], Any], **options: Any) -> Any:
    """Work with a second session, `session.info["writer"]`, in the same thread or task."""

    def body(session: Session) -> Any:
        with VersionedSession(session.get_bind()) as writer:
            session.info["writer"] = writer
            return work(session)

    return await on_session(world, engine, body, **options)


def versions(session: Session, cls: Any) -> dict[int, Any]:
    """The versions as they stand in the table."""
    version = cls.__mapper__.column_attrs["version"].columns[0]
    return dict(iter(session.execute(select(version.table.c.id, version))))


async def read(world: World, engine: Any, cls: Any) -> dict[int, Any]:
    """The versions as they stand in the table, read by a separate session."""
    found: dict[int, Any] = await on_session(world, engine, lambda session: versions(session, cls))
    return found


def statements(session: Session) -> list[tuple[str, bool]]:
    """Return a list that fills with what the session sends from now on, each with whether it goes out for many rows at once."""
    sent: list[tuple[str, bool]] = []
    event.listen(
        session.connection(),
        "before_cursor_execute",
        lambda _connection, _cursor, text, _parameters, _context, many: sent.append((text, many)),
    )
    return sent
