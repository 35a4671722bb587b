"""How tables, functions and triggers are made and dropped: in which transaction, and what it means that it cannot be done."""

from __future__ import annotations

from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from pgfence._sql import fences
from pgfence._sql import tables as texts
from pgfence._sql.errors import ErrorContext, raise_translated, translate_connect_error
from pgfence._sql.params import style_of
from pgfence._sql.server import check_version
from pgfence._sql.storage import VERSION, TableNames, table_names
from pgfence._sql.transaction import driver_state
from pgfence.errors import SchemaError, TransactionStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

_CONTEXT = ErrorContext(on_primary="Create and drop on the primary", owner=True)


def perform(engine: Any, work: Callable[[Connection, TableNames], None]) -> Any:
    """Do it in a transaction of its own, or in the one of the Connection; return an awaitable for the async ones."""
    place = table_names(engine)
    style_of(engine.dialect)

    def on_connection(connection: Connection) -> None:
        perform_on(connection, place, work)

    if hasattr(engine, "sync_engine"):
        return _async(engine, on_connection)
    return _sync(engine, on_connection)


def drop_unless_fenced(connection: Connection, place: TableNames) -> None:
    """Drop what is there.

    Raises:
        SchemaError: a table is still fenced.
    """
    if guarded := fences.fenced(connection, place):
        raise SchemaError(
            f"pgfence's fence still stands around {', '.join(guarded)}: pgfence.schema.drop_fence(engine, table) first",
            needed=VERSION,
            command=f"pgfence.schema.drop_fence(engine, {guarded[0]!r})",
        )
    texts.drop(connection, place)


def perform_on(connection: Connection, place: TableNames, work: Callable[[Connection, TableNames], None]) -> None:
    """Do it in the transaction of a Connection; Alembic's operations say the place themselves.

    Raises:
        PgfenceError, ValueError: as `schema.create_all` and its neighbours say.
    """
    check_version(connection.dialect)
    if driver_state(connection).autocommit:
        raise TransactionStateError(
            "tables and functions are made in one transaction, and this Connection is in autocommit: pass the engine, or in"
            " a migration call it outside of autocommit_block() and of an env.py in autocommit"
        )
    try:
        work(connection, texts.settled(connection, place))
    except DBAPIError as error:
        raise_translated(error, place, _CONTEXT, connection.engine)
        raise


def _sync(engine: Engine | Connection, work: Callable[[Connection], None]) -> None:
    if not isinstance(engine, Engine):
        work(engine)
        return
    with _connecting(engine):
        connection = engine.connect()
    # Whatever the engine's own default is: the look at what is there has to follow the wait for others.
    with connection.execution_options(isolation_level="READ COMMITTED"), connection.begin():
        work(connection)


async def _async(engine: Any, work: Callable[[Connection], None]) -> None:
    if hasattr(engine, "run_sync"):
        await engine.run_sync(work)
        return
    async with AsyncExitStack() as stack:
        with _connecting(engine.sync_engine):
            connection = await stack.enter_async_context(engine.connect())
        await connection.execution_options(isolation_level="READ COMMITTED")
        async with connection.begin():
            await connection.run_sync(work)


@contextmanager
def _connecting(engine: Engine) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if told := translate_connect_error(engine, error, "Nothing was made or changed"):
            raise told from error
        raise
