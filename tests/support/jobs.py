"""Jobs that workers claim, on every driver: a table with a parent, children and a subclass, and sessions of a world."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import ForeignKey, create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from pgfence import Claimable, claim

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from support.worlds import Contender, World

SUFFIX = secrets.token_hex(6)


class Base(DeclarativeBase):
    """Of the tables here."""


class Customer(Base):
    """What jobs refer to."""

    __tablename__ = f"customer_{SUFFIX}"
    id: Mapped[int] = mapped_column(primary_key=True)
    vip: Mapped[bool] = mapped_column(default=True)


class Job(Base):
    """What is claimed."""

    __tablename__ = f"job_{SUFFIX}"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")
    kind: Mapped[str] = mapped_column(default="job")
    customer_id: Mapped[int | None] = mapped_column(ForeignKey(Customer.id))
    customer: Mapped[Customer | None] = relationship()
    tags: Mapped[list[Tag]] = relationship(order_by="Tag.id")
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "job"}  # noqa: RUF012


class Mail(Job):
    """A job with a table of its own for the rest of its columns."""

    __tablename__ = f"mail_{SUFFIX}"
    id: Mapped[int] = mapped_column(ForeignKey(Job.id), primary_key=True)
    address: Mapped[str] = mapped_column(default="")
    __mapper_args__ = {"polymorphic_identity": "mail"}  # noqa: RUF012


class Tag(Base):
    """A row that refers to a job."""

    __tablename__ = f"tag_{SUFFIX}"
    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int] = mapped_column(ForeignKey(Job.id))


class Task(Claimable, Base):
    """What is claimed for longer than a transaction."""

    __tablename__ = f"task_{SUFFIX}"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")


class Jobs:
    """Sessions of a world, and the rows."""

    def __init__(self, world: World, **options: Any) -> None:
        self.world = world
        self.engine = world.engine(**options)
        url = f"postgresql+psycopg://{world.dsn.split('://', 1)[1]}"
        # A statement of the test that meets a lock fails instead of hanging.
        self.plain = create_engine(url, connect_args={"options": "-c lock_timeout=2s"})

    def session(self, **options: Any) -> Any:
        return self.world.pick(Session, AsyncSession)(self.engine, **options)

    def own(self) -> Session:
        """Return a sync session for the test itself."""
        return Session(self.plain)

    def add(self, count: int, make: Callable[[int], Base] = lambda n: Job(id=n)) -> None:
        """Commit rows 1 to `count`."""
        with self.own() as session:
            session.add_all(map(make, range(1, count + 1)))
            session.commit()

    async def claim(self, session: Any, *args: Any, who: Contender | None = None, **options: Any) -> Sequence[Any]:
        """Claim rows in a session of this world."""
        found: Sequence[Any] = await (who or self.world).call(partial(claim, session, *args, **options))
        return found

    async def claim_ids(self, session: Any, *args: Any, who: Contender | None = None, **options: Any) -> list[int]:
        """Claim rows and return their keys."""
        return [row.id for row in await self.claim(session, *args, who=who, **options)]

    def count(self, *criteria: Any) -> int:
        with self.own() as session:
            return len(session.scalars(select(Job.id).where(*criteria)).all())
