"""Contestants of the uncontended cycle: plain drivers, plain SQLAlchemy, and pgfence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.place import plain
from pgfence import AdvisoryLock, AsyncAdvisoryLock
from pgfence.keys import LockKey

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AsyncExitStack, ExitStack

    from benchmarks.place import Place
    from benchmarks.rounds import AsyncMake, Make

TRY, UNLOCK = "SELECT pg_try_advisory_lock({0})", "SELECT pg_advisory_unlock({0})"


def key(name: str) -> int:
    """Return a contestant's own key. All have the same size."""
    return LockKey.of(name, namespace="benchmark").value


def raw_psycopg(name: str) -> Make:
    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        connection = stack.enter_context(place.connect())
        number, lock, unlock = key(name), TRY.format("%s"), UNLOCK.format("%s")

        def cycle() -> None:
            connection.execute(lock, (number,)).fetchone()
            connection.execute(unlock, (number,)).fetchone()

        return cycle

    return make


def core(name: str, *, checkout: bool = False) -> Make:
    """Acquire and release with SQLAlchemy Core, on one connection in autocommit, or each time on one from the pool."""

    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        engine = sa.create_engine(place.url(), isolation_level="AUTOCOMMIT")
        stack.callback(engine.dispose)
        lock, unlock, args = sa.text(TRY.format(":k")), sa.text(UNLOCK.format(":k")), {"k": key(name)}
        held = engine.connect()
        stack.callback(held.close)

        def on(connection: sa.Connection) -> None:
            connection.execute(lock, args).scalar()
            connection.execute(unlock, args).scalar()

        def checked_out() -> None:
            with engine.connect() as connection:
                on(connection)

        return checked_out if checkout else lambda: on(held)

    return make


def ours(name: str, way: str) -> Make:
    """Acquire and release with pgfence: `with lock.hold()`, `try_acquire` and `release`, or a new lock object each time."""

    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        engine = sa.create_engine(place.url())
        stack.callback(engine.dispose)
        lock: Any = AdvisoryLock(engine, name)

        def hold() -> None:
            with lock.hold():
                pass

        def new() -> None:
            with AdvisoryLock(engine, name).hold(timeout=5):
                pass

        return {"hold": hold, "try": lambda: lock.try_acquire().release(), "new": new}[way]

    return make


def raw_psycopg_async(name: str) -> AsyncMake:
    async def make(place: Place, stack: AsyncExitStack) -> Any:
        connection = await psycopg.AsyncConnection.connect(place.dsn, autocommit=True)
        stack.push_async_callback(connection.close)
        number, lock, unlock = key(name), TRY.format("%s"), UNLOCK.format("%s")

        async def cycle() -> None:
            await (await connection.execute(lock, (number,))).fetchone()
            await (await connection.execute(unlock, (number,))).fetchone()

        return cycle

    return make


def raw_asyncpg(name: str) -> AsyncMake:
    async def make(place: Place, stack: AsyncExitStack) -> Any:
        connection = await asyncpg.connect(plain(place.url()))
        stack.push_async_callback(connection.close)
        number, lock, unlock = key(name), TRY.format("$1"), UNLOCK.format("$1")

        async def cycle() -> None:
            await connection.fetchval(lock, number)
            await connection.fetchval(unlock, number)

        return cycle

    return make


def core_async(name: str, driver: str) -> AsyncMake:
    async def make(place: Place, stack: AsyncExitStack) -> Any:
        engine = create_async_engine(place.url(driver), isolation_level="AUTOCOMMIT")
        stack.push_async_callback(engine.dispose)
        connection = await engine.connect()
        stack.push_async_callback(connection.close)
        lock, unlock, args = sa.text(TRY.format(":k")), sa.text(UNLOCK.format(":k")), {"k": key(name)}

        async def cycle() -> None:
            (await connection.execute(lock, args)).scalar()
            (await connection.execute(unlock, args)).scalar()

        return cycle

    return make


def ours_async(name: str, driver: str) -> AsyncMake:
    async def make(place: Place, stack: AsyncExitStack) -> Any:
        engine = create_async_engine(place.url(driver))
        stack.push_async_callback(engine.dispose)
        lock = AsyncAdvisoryLock(engine, name)

        async def cycle() -> None:
            async with lock.hold():
                pass

        return cycle

    return make
