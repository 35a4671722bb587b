"""How an eviction is carried out, by the function and by the command alike; and what other orders of operators share with it."""

from __future__ import annotations

import getpass
import os
import socket
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from sqlalchemy import Engine

from pgfence._api.inputs import check_text
from pgfence._leases.heartbeat.service import HeartbeatService
from pgfence._process.registry import ManagerRegistry
from pgfence._sql.errors import translate_connect_error, translate_error
from pgfence._sql.evict import EvictionRequest
from pgfence._sql.storage import table_names
from pgfence.config import config_of
from pgfence.errors import PgfenceError
from pgfence.keys import LockKey, qualified_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence._sql.errors import ErrorContext
    from pgfence._sql.evict import Found
    from pgfence._sql.storage import TableNames


class AdminRequest(Protocol):
    """Something to be done on a connection."""

    context: ClassVar[ErrorContext]

    @property
    def place(self) -> TableNames: ...


O = TypeVar("O", bound=AdminRequest)  # noqa: E741
R = TypeVar("R")


def order_of(engine: Engine | AsyncEngine, name: str, *, reason: str, actor: str | None) -> EvictionRequest:
    """Return what is to be done, checked."""
    namespace = config_of(engine).namespace
    reason, actor = audit_fields(reason, actor)
    return EvictionRequest(
        name=qualified_name(name, namespace),
        key=LockKey.of(name, namespace=namespace),
        place=table_names(engine),
        reason=reason,
        actor=actor,
    )


def tell_holders_here(engine: Engine | AsyncEngine, order: EvictionRequest, found: Found) -> Found:
    """End what this process held through the engine under the name that was evicted, and return what was found."""
    beat = ManagerRegistry.of(engine if isinstance(engine, Engine) else engine.sync_engine).get("heartbeat")
    if isinstance(beat, HeartbeatService) and found.newest is not None and found.token is not None:
        beat.evicted(order.place, order.name, found.token)
    return found


def audit_fields(reason: str, actor: str | None) -> tuple[str, str]:
    """Return why and by whom, checked; without an actor it is this process's user and host."""
    return _non_empty(reason, "reason"), _default_actor() if actor is None else _non_empty(actor, "actor")


def perform(engine: Engine, work: Callable[[Connection, O], R], order: O) -> R:
    """Do it on a connection of the engine's."""
    try:
        # Whatever the engine's own default is: each statement has to see what was committed before it.
        with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            return work(connection, order)
    except Exception as error:
        if (told := _told(engine, order, error)) is None:
            raise
        raise told from error


async def perform_async(engine: AsyncEngine, work: Callable[[Connection, O], R], order: O) -> R:
    """As `perform`, on a connection of an async engine's."""
    try:
        async with engine.connect() as connection:
            await connection.execution_options(isolation_level="READ COMMITTED")
            return await connection.run_sync(work, order)
    except Exception as error:
        if (told := _told(engine.sync_engine, order, error)) is None:
            raise
        raise told from error


def _told(engine: Engine, order: AdminRequest, error: Exception) -> PgfenceError | None:
    if isinstance(error, PgfenceError):
        return None
    return translate_error(error, order.place, order.context, engine) or translate_connect_error(engine, error)


def _non_empty(value: object, what: str) -> str:
    text = check_text(value, what)
    if not text.strip():
        raise ValueError(f"{what} must not be blank: {value!r}")
    return text


def _default_actor() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
