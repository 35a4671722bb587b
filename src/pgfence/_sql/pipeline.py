"""Send a statement in one round trip with the BEGIN before it or the COMMIT after it, in psycopg's pipeline mode.

psycopg sends BEGIN before the first statement of a transaction, and waits for the response. Its public `pipeline()` saves no
round trip here, because it also waits after that BEGIN, and again at its end. Therefore this module runs the driver's own steps
in another order, with one wait for all responses at the end. The statement uses a cursor of the driver, which prepares it as
usual. An error leaves the connection in the same state as without a pipeline. After an error of the statement, the transaction is
aborted and COMMIT is not executed. After an error of BEGIN, there is no transaction.

asyncpg and psycopg2 have no pipeline mode.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from sqlalchemy import Connection
    from sqlalchemy.engine.interfaces import Dialect
    from sqlalchemy.pool import PoolProxiedConnection

    from pgfence._sql.params import RawConnection

DriverSteps: TypeAlias = "Generator[Any, Any, None]"
"""A generator for the driver's own `wait`. The generator yields what to wait for, and receives what is ready."""

_IDLE = 0
_IN_TRANSACTION = 2
_CONNECTED = 0


class _Library(NamedTuple):
    """The parts of psycopg that a pipeline uses, sync or async."""

    connection: type[Any]
    cursor: Any
    pipeline: Any
    send: Callable[[Any], DriverSteps]
    error: type[Exception]
    module: str
    """The module that defines the methods of the library's cursors."""


@cache
def _load(is_async: bool) -> _Library | None:
    """Return the driver's classes, sync or async, or None if libpq has no pipeline mode."""
    import psycopg

    if not psycopg.Pipeline.is_supported():
        return None
    from psycopg.generators import send

    class Pipeline(psycopg.Pipeline):
        """A pipeline that passes messages to libpq and sends them in one packet at the end."""

        def _communicate_gen(self) -> DriverSteps:
            while self.command_queue:
                self.command_queue.popleft()()
            yield from ()

    if is_async:
        return _Library(
            psycopg.AsyncConnection, psycopg.AsyncCursor, Pipeline, send, psycopg.Error, "psycopg.cursor_async"
        )
    return _Library(psycopg.Connection, psycopg.Cursor, Pipeline, send, psycopg.Error, "psycopg.cursor")


def may_begin(connection: Connection) -> bool:
    """Return whether BEGIN can be sent with the next statement, because the server is in no transaction."""
    return _may_pipeline(connection, _IDLE)


def may_commit(connection: Connection) -> bool:
    """Return whether a statement can be sent with COMMIT, because the server is in a transaction that is not aborted."""
    return _may_pipeline(connection, _IN_TRANSACTION)


def _may_pipeline(connection: Connection, status: int) -> bool:
    """Return whether the connection has the given transaction status and its classes are the driver's original ones."""
    # Instrumentation replaces the class of connections or cursors, or one of their methods, and must observe the start and end of
    # each statement.
    if connection.dialect.driver != "psycopg":
        return False
    driver = find_driver(connection.dialect, connection.connection)
    if driver.pgconn.transaction_status != status or driver.autocommit or driver.pgconn.pipeline_status:
        return False
    library = _load(connection.dialect.is_async)
    if library is None or driver.__class__ is not library.connection or driver.cursor_factory is not library.cursor:
        return False
    execute = library.cursor.execute
    return type(execute) is FunctionType and execute.__globals__["__name__"] == library.module


def find_driver(dialect: Dialect, pooled: PoolProxiedConnection) -> RawConnection:
    """Return the driver's connection, even if the Connection was detached from its pool."""
    assert pooled.dbapi_connection is not None
    return dialect.get_driver_connection(pooled.dbapi_connection)


def begin_and_execute(connection: Connection, text: str, values: tuple[object, ...]) -> Any:
    """Begin the server's transaction together with a statement, and return the statement's only value.

    Call it only after `may_begin`.
    """
    return _execute(
        connection.dialect, find_driver(connection.dialect, connection.connection), text, values, begins=True
    )


def execute_and_commit(dialect: Dialect, driver: RawConnection, text: str, values: tuple[object, ...]) -> None:
    """Send a statement and commit the server's transaction. Call it only after `may_commit`."""
    _execute(dialect, driver, text, values, begins=False)


def is_in_transaction(driver: RawConnection) -> bool:
    """Return whether a psycopg connection is in a transaction that is not aborted."""
    return bool(driver.pgconn.transaction_status == _IN_TRANSACTION)


def has_ended(driver: RawConnection) -> bool:
    """Return whether the server is no longer in a transaction, for example after a failed COMMIT."""
    return bool(driver.pgconn.transaction_status == _IDLE)


def _execute(dialect: Dialect, driver: RawConnection, text: str, values: tuple[object, ...], *, begins: bool) -> Any:
    library = _load(dialect.is_async)
    assert library is not None
    cursor = driver.cursor()
    steps = _execute_together(library, driver, cursor, text, values, begins=begins)
    if dialect.is_async:
        from sqlalchemy.util import await_only

        return await_only(_run_async(driver, cursor, steps))[0]
    try:
        with driver.lock:
            driver.wait(steps)
    finally:
        _end(driver, steps)
    return cursor.fetchone()[0]


async def _run_async(driver: RawConnection, cursor: Any, steps: DriverSteps) -> Any:
    try:
        async with driver.lock:
            await driver.wait(steps)
    finally:
        _end(driver, steps)
    return await cursor.fetchone()


def _end(driver: RawConnection, steps: DriverSteps) -> None:
    """Close the generator, and close the connection if an interrupt left it with unread responses."""
    steps.close()
    if driver.pgconn.pipeline_status:
        driver.pgconn.finish()


def _execute_together(
    library: _Library, driver: RawConnection, cursor: Any, text: str, values: tuple[object, ...], *, begins: bool
) -> DriverSteps:
    """Send BEGIN and a statement, or a statement and COMMIT, and wait for both responses. Raise the first error."""
    wire, pipeline = driver.pgconn, library.pipeline(driver)
    failure: Exception | None = None
    wire.enter_pipeline_mode()
    driver._pipeline = pipeline
    try:
        if begins:
            pipeline.result_queue.append(None)
            # BEGIN is passed to libpq immediately, which makes the connection busy, so that the cursor does not send BEGIN
            # itself.
            wire.send_query_params(driver._get_tx_start_command(), None)
        try:
            yield from cursor._execute_gen(text, values)
            if not begins:
                pipeline.result_queue.append(None)
                wire.send_query_params(b"COMMIT", None)
        except Exception as error:
            failure = error
        # The sync is also sent after an error, because a server that has rejected a statement skips all messages up to the sync.
        pipeline.result_queue.append(None)
        wire.pipeline_sync()
        yield from library.send(wire)
        yield from pipeline._fetch_gen(flush=False)
    except Exception as error:
        failure = failure or error
    finally:
        driver._pipeline = None
        if wire.status == _CONNECTED:
            # Leaving pipeline mode fails while responses are outstanding.
            with suppress(library.error):
                wire.exit_pipeline_mode()
    if failure is not None:
        raise failure
