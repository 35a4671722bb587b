"""Versioned classes of every kind, each with its own table, and others who write the same rows."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, registry
from sqlmodel import Field, SQLModel

from pgfence import schema
from pgfence.versions import Versioned, VersionedUUID
from support.versioned_rows import made, on_session

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.worlds import World

KINDS = ("plain", "dataclass", "sqlmodel")
MODES = ("client", "uuid", "server", "xmin")
OF_SERVER = ("server", "xmin")


def plain(mixin: Any, options: dict[str, Any]) -> Any:
    class Base(DeclarativeBase):
        pass

    class Page(mixin, Base):
        vars().update(options)
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")

    return Page


def dataclass(mixin: Any, options: dict[str, Any]) -> Any:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Page(mixin, Base):
        vars().update(options)
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")

    return Page


def sqlmodel(mixin: Any, options: dict[str, Any]) -> Any:
    class Base(SQLModel, registry=registry()):
        pass

    class Page(mixin, Base, table=True):
        vars().update(options)
        id: int = Field(primary_key=True)
        title: str = ""

    return Page


def page_class(kind: str = "plain", mode: str = "client", **options: Any) -> Any:
    """Return a class without its table: plain, dataclass or sqlmodel; client, uuid, server or xmin."""
    mixin = VersionedUUID if mode == "uuid" else Versioned
    given = {"__tablename__": f"page_{secrets.token_hex(6)}", "__version_mode__": "client" if mode == "uuid" else mode}
    return globals()[kind](mixin, given | options)


async def pages(world: World, engine: Any, kind: str = "plain", mode: str = "client", **options: Any) -> Any:
    """Make a class and its table, with the pages 1 to 5, and the trigger in the mode "server"."""
    cls = page_class(kind, mode, **options)
    await made(world, engine, cls)
    if mode == "server":
        await world.call(schema.add_version_trigger, engine, cls)
    await on_session(world, engine, adding(*(cls(id=number) for number in range(1, 6))))
    return cls


def adding(*targets: Any) -> Callable[[Session], None]:
    """Return work that adds rows and commits."""

    def add(session: Session) -> None:
        session.add_all(targets)
        session.commit()

    return add


def meddle(admin: psycopg.Connection[Any], cls: Any, *ids: int, title: str = "theirs") -> None:
    """Change pages as another program would that knows of versions, and commit."""
    mode, column = cls.__version_mode__, cls.__version_column__
    counted = f', "{column}" = "{column}" + 1' if mode == "client" else ""
    if issubclass(cls, VersionedUUID):
        counted = f', "{column}" = gen_random_uuid()'
    statement = f"UPDATE {cls.__tablename__} SET title = %s{counted} WHERE id = ANY(%s)"
    admin.execute(statement.encode(), [title, list(ids)])


def stored(admin: psycopg.Connection[Any], cls: Any) -> list[tuple[Any, ...]]:
    """Return id, title and version of all pages, as they are committed."""
    column = "xmin::text::bigint" if cls.__version_mode__ == "xmin" else f'"{cls.__version_column__}"'
    return admin.execute(f"SELECT id, title, {column} FROM {cls.__tablename__} ORDER BY id".encode()).fetchall()
