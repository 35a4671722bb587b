"""What the programs share: plain models, engines, sessions."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Engine, ForeignKey, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


class Job(Base):
    __tablename__ = "job"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("job.id"))


engine = create_engine("postgresql+psycopg://")
async_engine = create_async_engine("postgresql+asyncpg://")
SessionLocal = sessionmaker(engine)
AsyncSessionLocal = async_sessionmaker(async_engine)


def get_engine() -> Engine:
    return engine


def get_async_engine() -> AsyncEngine:
    return async_engine


def get_session() -> Iterator[Session]:
    with SessionLocal.begin() as session:
        yield session
