"""Carry out evictions and other requests of operators, for the Python functions and for the command line."""

from __future__ import annotations

import getpass
import os
import socket
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar, overload

from sqlalchemy import Engine

from pgfence._admin.connection import run_on_engine, translate_statement_error
from pgfence._api.inputs import check_text
from pgfence._holds.registry import ManagerRegistry
from pgfence._leases.heartbeat.service import HeartbeatService
from pgfence._process.events import emit_event
from pgfence._sql.errors import translate_error
from pgfence._sql.evict import EvictionRequest
from pgfence._sql.resign import ResignRequest
from pgfence._sql.storage import table_names_of
from pgfence.config import config_of, events_of
from pgfence.errors import PgfenceError
from pgfence.keys import LockKey, qualify_name, unqualify_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence._process.coroutines import Coro
    from pgfence._sql.errors import ErrorContext
    from pgfence._sql.evict import Found
    from pgfence._sql.storage import TableNames


class AdminRequest(Protocol):
    """An operator's request, which is carried out on a connection."""

    context: ClassVar[ErrorContext]

    @property
    def place(self) -> TableNames: ...


O = TypeVar("O", bound=AdminRequest)  # noqa: E741
R = TypeVar("R")


def build_eviction_request(
    engine: Engine | AsyncEngine, name: str, *, reason: str, actor: str | None
) -> EvictionRequest:
    """Check the arguments of an eviction, and return the request."""
    namespace = config_of(engine).namespace
    reason, actor = build_audit_fields(reason, actor)
    return EvictionRequest(
        name=qualify_name(name, namespace),
        key=LockKey.of(name, namespace=namespace),
        place=table_names_of(engine),
        reason=reason,
        actor=actor,
    )


def build_resign_request(engine: Engine | AsyncEngine, name: str, *, reason: str, actor: str | None) -> ResignRequest:
    """Check the arguments of a request to resign, and return the request."""
    namespace = config_of(engine).namespace
    reason, actor = build_audit_fields(reason, actor)
    key = LockKey.of(name, namespace=namespace)
    return ResignRequest(qualify_name(name, namespace), key, table_names_of(engine), reason, actor)


def notify_holders_here(engine: Engine | AsyncEngine, order: EvictionRequest, found: Found) -> Found:
    """Mark what this engine holds under the evicted name as lost, emit the event, and return `found`."""
    # Other processes need the notification. This process already knows of the eviction, so it does not wait for the
    # notification.
    heartbeat = ManagerRegistry.of(engine if isinstance(engine, Engine) else engine.sync_engine).get("heartbeat")
    if isinstance(heartbeat, HeartbeatService) and found.newest is not None and found.token is not None:
        heartbeat.note_eviction(order.place, order.name, found.token)
    if found.newest is not None:
        kind, owner = (found.holders[0].kind, found.holders[0].owner) if found.holders else ("lease", None)
        name = unqualify_name(order.name)
        emit_event(events_of(engine), "evicted", name, kind, owner=owner, token=found.token, reason=order.reason)
    return found


def build_audit_fields(reason: str, actor: str | None) -> tuple[str, str]:
    """Check and return the reason and the actor; the default actor is this process's user and host."""
    return check_non_empty(reason, "reason"), _default_actor() if actor is None else check_non_empty(actor, "actor")


@overload
def perform(engine: AsyncEngine, work: Callable[[Connection, O], R], request: O) -> Coro[R]: ...
@overload
def perform(engine: Engine, work: Callable[[Connection, O], R], request: O) -> R: ...
def perform(engine: Engine | AsyncEngine, work: Callable[[Connection, O], R], request: O) -> object:
    """Carry out a request on a connection of the engine. For an AsyncEngine, return a coroutine."""

    def translate(engine: Engine, error: Exception) -> PgfenceError | None:
        if isinstance(error, PgfenceError):
            return None
        told = translate_error(error, request.place, request.context, engine)
        return told or translate_statement_error(engine, error)

    return run_on_engine(engine, lambda connection: work(connection, request), translate)


def check_non_empty(value: object, what: str) -> str:
    text = check_text(value, what)
    if not text.strip():
        raise ValueError(f"{what} must not be blank: {value!r}")
    return text


def _default_actor() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user of a container may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
