"""How an eviction is carried out, by the function and by the command alike."""

from __future__ import annotations

import getpass
import os
import socket
from typing import TYPE_CHECKING

from pgfence._runtime.opening import unreachable
from pgfence._sql import evict as statements
from pgfence._sql.evict import Found, Order
from pgfence._sql.storage import place_of
from pgfence.config import config_of
from pgfence.errors import PgfenceError
from pgfence.keys import LockKey, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence.grants import Holder


def order_of(engine: Engine | AsyncEngine, name: str, *, reason: str, actor: str | None) -> Order:
    """Return what is to be done, checked."""
    namespace = config_of(engine).namespace
    return Order(
        name=stored(name, namespace),
        key=LockKey.of(name, namespace=namespace),
        place=place_of(engine),
        reason=_words(reason, "reason"),
        actor=_me() if actor is None else _words(actor, "actor"),
    )


def perform(engine: Engine, work: Callable[[Connection, Order], Found], order: Order) -> Found:
    """Do it on a connection of the engine's."""
    try:
        # Whatever the engine's own default is: each statement has to see what was committed before it.
        with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            return work(connection, order)
    except Exception as error:
        if (told := _told(engine, order, error)) is None:
            raise
        raise told from error


async def perform_async(
    engine: AsyncEngine, work: Callable[[Connection, Order], Found], order: Order
) -> Sequence[Holder]:
    """As `perform`, on a connection of an async engine's; return who it met."""
    try:
        async with engine.connect() as connection:
            await connection.execution_options(isolation_level="READ COMMITTED")
            return (await connection.run_sync(work, order)).holders
    except Exception as error:
        if (told := _told(engine.sync_engine, order, error)) is None:
            raise
        raise told from error


def _told(engine: Engine, order: Order, error: Exception) -> PgfenceError | None:
    if isinstance(error, PgfenceError):
        return None
    return statements.meaning(error, order.place) or unreachable(engine, error)


def _words(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")
    if not value.strip() or "\x00" in value:
        raise ValueError(f"{what} must say something, without NUL: {value!r}")
    return value


def _me() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
