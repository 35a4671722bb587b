"""Run administrative work on a connection of an engine, sync or async."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar, overload

from sqlalchemy import Engine

from pgfence._api.inputs import is_async_engine
from pgfence._sql.addresses import describe_server
from pgfence._sql.errors import (
    find_connect_error,
    is_connection_lost,
    message_of,
    translate_connect_error,
)
from pgfence._sql.params import style_of
from pgfence.errors import PgfenceError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence._process.coroutines import Coro

    Translate: TypeAlias = Callable[[Engine, Exception], PgfenceError | None]

R = TypeVar("R")
# Overrides the engine's default, because each statement must see what was committed before it.
_ISOLATION = "READ COMMITTED"


@overload
def run_on_engine(engine: AsyncEngine, work: Callable[[Connection], R], translate: Translate) -> Coro[R]: ...
@overload
def run_on_engine(engine: Engine, work: Callable[[Connection], R], translate: Translate) -> R: ...
def run_on_engine(engine: Engine | AsyncEngine, work: Callable[[Connection], R], translate: Translate) -> object:
    """Call `work` with a connection of the engine, outside a transaction. For an AsyncEngine, return a coroutine.

    The coroutine calls `work` inside a greenlet. `translate` returns the error to raise in place of the one that it gets, or None
    to re-raise that error.

    Raises:
        TypeError: `engine` is neither an Engine nor an AsyncEngine.
        UnsupportedServerError: the engine is not for PostgreSQL, or its driver is not supported.
    """
    if not is_async_engine(engine) and not isinstance(engine, Engine):
        raise TypeError(f"expected an Engine or AsyncEngine, not {type(engine).__name__}")
    style_of(engine.dialect)
    if is_async_engine(engine):
        return _perform_async(engine, work, translate)
    try:
        with engine.connect().execution_options(isolation_level=_ISOLATION) as connection:
            return work(connection)
    except Exception as error:
        _raise_translated(engine, error, translate)
        raise


async def _perform_async(engine: AsyncEngine, work: Callable[[Connection], R], translate: Translate) -> R:
    try:
        async with engine.connect() as connection:
            await connection.execution_options(isolation_level=_ISOLATION)
            return await connection.run_sync(work)
    except Exception as error:
        _raise_translated(engine.sync_engine, error, translate)
        raise


def _raise_translated(engine: Engine, error: Exception, translate: Translate) -> None:
    if told := translate(engine, error):
        raise told from error


def translate_statement_error(engine: Engine, error: Exception) -> PgfenceError | None:
    """Return the error to raise for a failed connection or statement, or None if the database did not raise `error`."""
    if unreachable := find_connect_error(engine, error, "Nothing was done"):
        return unreachable
    told = translate_connect_error(engine, error)
    if told is None:
        return None
    where, reason = describe_server(engine), message_of(error)
    if is_connection_lost(error):
        return UnreachableError(
            f"the connection to {where} was lost: {reason.rstrip('.')}. It is unknown whether the statement was executed",
            sqlstate=told.sqlstate,
        )
    return PgfenceError(f"{where} rejected a statement: {reason}", sqlstate=told.sqlstate)
