"""Work for `run_transaction` in a world, written once for Session and AsyncSession, and a row that counts."""

from __future__ import annotations

import functools
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence.errors import VersionConflict, VersionConflictError
from pgfence.retrying import run_transaction
from pgfence.versions import Versioned, VersionedSession
from support.transactions import factory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg
    from sqlalchemy.orm import Session

    from support.worlds import Contender, World


class Row:
    """A table of counters with a version, and how to look at it from outside.

    Args:
        admin: who looks.
        rows: how many, all at 0.
        versioned: the class has the mixin, in place of SQLAlchemy's own version column.
    """

    def __init__(self, admin: psycopg.Connection[Any], rows: int = 1, *, versioned: bool = False) -> None:
        self.table = f"counter_{secrets.token_hex(6)}"
        self.cls = _with_mixin(self.table) if versioned else _plain(self.table)
        self._admin = admin
        admin.execute(f"CREATE TABLE {self.table} (id int PRIMARY KEY, n int NOT NULL, version int NOT NULL)")
        admin.execute(f"INSERT INTO {self.table} SELECT i, 0, 1 FROM generate_series(1, {rows}) AS i")

    def n(self, ident: int = 1) -> int:
        """Return what is committed."""
        row = self._admin.execute(f"SELECT n FROM {self.table} WHERE id = %s", (ident,)).fetchone()
        assert row is not None
        return int(row[0])

    def overtake(self, ident: int = 1) -> None:
        """Write the row from outside, with a new version."""
        self._admin.execute(f"UPDATE {self.table} SET n = n + 100, version = version + 1 WHERE id = %s", (ident,))

    def add_one(self, session: Session, ident: int = 1) -> int:
        """Read the row, add one, and return the sum; the flush is left to the commit."""
        row = session.get_one(self.cls, ident)
        row.n += 1
        return int(row.n)

    def drop(self) -> None:
        self._admin.execute(f"SET lock_timeout = '5s'; DROP TABLE {self.table}")
        self._admin.execute(f"DROP FUNCTION IF EXISTS {self.table}_second")


@pytest.fixture
def row(admin: psycopg.Connection[Any]) -> Iterator[Row]:
    """A table with two counters at 0."""
    made = Row(admin, rows=2)
    yield made
    made.drop()


def conflict(*, precondition: bool) -> VersionConflictError:
    """Return the error for a row that another session has changed."""
    return VersionConflictError(
        "somebody was first", items=[VersionConflict(Row, (1,), 1, 2)], precondition=precondition
    )


def sessions(world: World, engine: Any, *, versioned: bool) -> Any:
    """Return a factory of plain sessions, or of those that turn a stale row into a VersionConflictError."""
    given = {world.pick("class_", "sync_session_class"): VersionedSession} if versioned else {}
    return factory(world, engine, **given)


def _with_mixin(table: str) -> Any:
    class Base(DeclarativeBase):
        pass

    class Counter(Versioned, Base):
        __tablename__ = table
        id: Mapped[int] = mapped_column(primary_key=True)
        n: Mapped[int]

    return Counter


def _plain(table: str) -> Any:
    class Base(DeclarativeBase):
        pass

    class Counter(Base):
        __tablename__ = table
        id: Mapped[int] = mapped_column(primary_key=True)
        n: Mapped[int]
        version: Mapped[int] = mapped_column()
        __mapper_args__ = {"version_id_col": version}  # noqa: RUF012

    return Counter


def on_session(world: World, work: Callable[[Session], Any]) -> Any:
    """Return work on a sync Session as a function for the session of a world."""
    if not world.is_async:
        return work

    @functools.wraps(work)
    async def awaited(session: Any) -> Any:
        return await session.run_sync(work)

    return awaited


async def transact(
    world: World, source: Any, work: Callable[[Session], Any], who: Contender | None = None, **options: Any
) -> Any:
    """Run work on a sync Session by `run_transaction`.

    Args:
        world: where.
        source: an engine or a session factory.
        work: gets the sync Session, also in async worlds.
        who: calls; None is the test itself.
        **options: of `run_transaction`.
    """
    made = source if hasattr(source, "kw") else factory(world, source)
    return await (who or world).call(run_transaction, made, on_session(world, work), **options)
