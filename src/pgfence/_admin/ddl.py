"""Create and drop tables, functions and triggers in one transaction, and translate the errors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from pgfence._admin.connection import run_on_engine
from pgfence._api.inputs import is_async_connection
from pgfence._ddl import fences
from pgfence._sql import tables as texts
from pgfence._sql.errors import ErrorContext, find_connect_error, raise_translated
from pgfence._sql.params import style_of
from pgfence._sql.server import check_version
from pgfence._sql.storage import VERSION, TableNames, table_names_of
from pgfence._sql.transaction import read_driver_state
from pgfence.errors import SchemaError, TransactionStateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from pgfence._process.coroutines import Coro
    from pgfence.errors import PgfenceError

_TABLES = ErrorContext(on_primary="Create and drop pgfence's tables on the primary", owner=True)
_TRIGGERS = ErrorContext(on_primary="Add and drop triggers on the primary", owner=True, trigger=True)


def perform(
    engine: Engine | AsyncEngine | Connection | AsyncConnection,
    work: Callable[[Connection, TableNames], None],
    *,
    triggers: bool = False,
) -> Coro[None] | None:
    """Call `work` in a new transaction, or in the transaction of a Connection. For async objects, return a coroutine.

    `triggers` says whether the work adds or drops triggers, instead of pgfence's tables.
    """
    place = table_names_of(engine)
    style_of(engine.dialect)

    def run_in_transaction(connection: Connection) -> None:
        with connection.begin():
            perform_on(connection, place, work, triggers=triggers)

    if isinstance(engine, Connection):
        perform_on(engine, place, work, triggers=triggers)
        return None
    if is_async_connection(engine):
        return engine.run_sync(partial(perform_on, triggers=triggers), place, work)
    return run_on_engine(engine, run_in_transaction, _translate)


def _translate(engine: Engine, error: Exception) -> PgfenceError | None:
    return find_connect_error(engine, error, "Nothing was created or changed")


def drop_unless_fenced(connection: Connection, place: TableNames) -> None:
    """Drop pgfence's tables and functions if no table is fenced.

    Raises:
        SchemaError: a table is still fenced.
    """
    if guarded := fences.list_fenced(connection, place):
        raise SchemaError(
            f"cannot drop pgfence's tables, because these tables are still fenced: {', '.join(guarded)}. First call"
            " pgfence.schema.drop_fence(engine, table) or, in a migration, op.drop_fence(table) for each of them",
            needed=VERSION,
            command=f"pgfence.schema.drop_fence(engine, {guarded[0]!r})",
        )
    texts.drop(connection, place)


def perform_on(
    connection: Connection, place: TableNames, work: Callable[[Connection, TableNames], None], *, triggers: bool = False
) -> None:
    """Call `work` in the transaction of a Connection, and pass the table names with the schema that they are in.

    Raises:
        PgfenceError, ValueError: as documented for `schema.create_all` and the other functions.
    """
    check_version(connection.dialect)
    # In autocommit each statement would commit separately, and an error would leave behind only some of the objects.
    if read_driver_state(connection).autocommit:
        raise TransactionStateError(
            "tables and functions are created in one transaction, but this Connection is in autocommit. Pass the engine instead. In a"
            " migration, use neither autocommit_block() nor an env.py that sets autocommit"
        )
    try:
        work(connection, texts.resolve_schema(connection, place))
    except DBAPIError as error:
        raise_translated(error, place, _TRIGGERS if triggers else _TABLES, connection.engine)
        raise
