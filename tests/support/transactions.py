"""Sessions, connections and transaction locks in a world, sync or async."""

from __future__ import annotations

import inspect
import threading
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pgfence.transaction import AsyncTransactionLock, TransactionLock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from support.worlds import Contender, World

ASYNC = (AsyncSession, AsyncConnection, async_scoped_session)


def lock(work: Any, *names: Any, **kwargs: Any) -> Any:
    """Return the lock of the world that a session or connection belongs to."""
    return (AsyncTransactionLock if isinstance(work, ASYNC) else TransactionLock)(work, *names, **kwargs)


@asynccontextmanager
async def session(world: World, engine: Any, who: Contender | None = None, **kwargs: Any) -> AsyncIterator[Any]:
    """Open a Session or AsyncSession on an engine; closed, and so rolled back, at the end."""
    who = who or world
    opened = world.pick(Session, AsyncSession)(engine, **kwargs)
    try:
        yield opened
    finally:
        await who.call(opened.close)


@asynccontextmanager
async def connection(world: World, engine: Any, who: Contender | None = None) -> AsyncIterator[Any]:
    """Open a Connection or AsyncConnection; closed, and so rolled back, at the end."""
    who = who or world
    opened = await who.call(_opened, engine)
    try:
        yield opened
    finally:
        await who.call(opened.close)


def _opened(engine: Any) -> Any:
    opened = engine.connect()
    return opened.start() if inspect.isawaitable(opened) else opened


def factory(world: World, engine: Any, **kwargs: Any) -> Any:
    """Return a sessionmaker or async_sessionmaker."""
    return world.pick(sessionmaker, async_sessionmaker)(engine, **kwargs)


def scoped(world: World, engine: Any) -> Any:
    """Return a scoped session of the world."""
    if world.is_async:
        return async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: None)
    return scoped_session(sessionmaker(engine))


async def run(who: Contender, work: Any, sql: str, **parameters: Any) -> Any:
    """Execute SQL on a session or connection and return the rows, or None where there are none."""
    result = await who.call(work.execute, text(sql), parameters)
    return result.all() if result.returns_rows else None


async def value(who: Contender, work: Any, sql: str, **parameters: Any) -> Any:
    """Execute SQL on a session or connection and return the one value of its one row."""
    return (await run(who, work, sql, **parameters))[0][0]


@contextmanager
def statements(engine: Any) -> Iterator[list[str]]:
    """Collect all statements that are sent on an engine, whether they succeed or fail.

    By the hooks after a statement: hooks before it make some requests choose another way. What the background thread sends on a
    connection of its own, to store names, is not collected.
    """
    sent: list[str] = []

    def done(_c: Any, _cursor: Any, statement: str, _p: Any, _context: Any, _many: Any) -> None:
        if threading.current_thread().name != "pgfence-names":
            sent.append(statement)

    def failed(context: Any) -> None:
        if context.statement is not None and threading.current_thread().name != "pgfence-names":
            sent.append(context.statement)

    sync = getattr(engine, "sync_engine", engine)
    event.listen(sync, "after_cursor_execute", done)
    event.listen(sync, "handle_error", failed)
    try:
        yield sent
    finally:
        event.remove(sync, "after_cursor_execute", done)
        event.remove(sync, "handle_error", failed)


def sqlstate_of(error: Any) -> str | None:
    """Return the SQLSTATE of an error of a driver, or of the SQLAlchemy error around it."""
    found = getattr(error, "orig", error)
    return getattr(found, "sqlstate", None) or getattr(found, "pgcode", None)
