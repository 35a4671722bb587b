"""How tables, functions and triggers are made and dropped: in which transaction, and what it means that it cannot be done."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from pgfence._connections.connect import unreachable
from pgfence._sql import fences
from pgfence._sql import tables as texts
from pgfence._sql.params import style_of
from pgfence._sql.sqlstate import SWITCHING, sqlstate
from pgfence._sql.storage import VERSION, TableNames, primary, table_names, translated
from pgfence._sql.transaction import driver_state
from pgfence.errors import PgfenceError, SchemaError, StandbyError, TransactionStateError, UnsupportedServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

OLDEST = (14,)


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
    version = connection.dialect.server_version_info
    if version is not None and version < OLDEST:
        raise UnsupportedServerError(
            f"pgfence needs PostgreSQL 14 or newer; this server is {'.'.join(map(str, version))}"
        )
    if driver_state(connection).autocommit:
        raise TransactionStateError(
            "tables and functions are made in one transaction, and this Connection is in autocommit: pass the engine, or in"
            " a migration call it outside of autocommit_block() and of an env.py in autocommit"
        )
    try:
        work(connection, texts.settled(connection, place))
    except DBAPIError as error:
        raise _told(error, place) or error from error


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


_OWNED = re.compile(r"(?:must be owner of|permission denied for) (?:relation|table|view) (.+)")


@contextmanager
def _connecting(engine: Engine) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if told := unreachable(engine, error, "Nothing was made or changed"):
            raise told from error
        raise


def _told(error: DBAPIError, place: TableNames) -> PgfenceError | None:
    """Return what it means that something could not be made or dropped; None when it is not ours to explain."""
    match sqlstate(error):
        case "42501" as state:
            said = primary(error)
            of = _OWNED.search(said)
            owned = of is not None and not of[1].startswith(place.prefix)
            return SchemaError(
                f"this role may not do that: {said}."
                + (" Do it as its owner" if owned else f" Run `{place.command}` as a role that may"),
                needed=VERSION,
                command="" if owned else place.command,
                sqlstate=state,
            )
        case "25006":
            return StandbyError(f"{primary(error)}: this server is a standby, or rejects writes. {SWITCHING}")
    return translated(error, place)
