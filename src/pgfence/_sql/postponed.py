"""Postpone a statement until the COMMIT of its transaction, so that both take one round trip.

The statement is sent earlier if another statement must come after it, such as a savepoint or its end, a setting, a COMMIT in
plain text, or a statement of pgfence. Queries and changes of rows may come before it. A rollback discards it.

SQLAlchemy's event for COMMIT comes too early, before the application's listeners have sent their statements. So the dialect's
`do_commit` and `do_rollback` are wrapped, once for each engine. A COMMIT that bypasses SQLAlchemy does not send the statement, so
only statements whose absence makes the server reject the COMMIT may be postponed.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy.engine import RootTransaction

from pgfence._sql import pipeline
from pgfence._sql.encoding import text_error
from pgfence._sql.sqlstate import sqlstate_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.engine.interfaces import Dialect

    from pgfence.errors import PgfenceError

_WAITING = "pgfence_postponed"
_WRAPPED = "_pgfence_postponing"
_DIVISION_BY_ZERO = "22012"
"""The error by which a statement reports that it had no effect, because COMMIT must not be executed after it."""


class Postponed(NamedTuple):
    """A statement that waits for COMMIT. It divides by zero if it has no effect; `build_error` builds the error for that case."""

    transaction: weakref.ref[RootTransaction]
    text: str
    values: tuple[object, ...]
    build_error: Callable[[], PgfenceError]

    def translate(self, error: BaseException, driver: object) -> PgfenceError | ValueError | None:
        """Return the error for a statement that had no effect or contains text that cannot be sent, or None for other errors."""
        if sqlstate_of(error) == _DIVISION_BY_ZERO:
            return self.build_error()
        return text_error(error, self.values, lambda: driver)


def postpone(
    connection: Connection, text: str, values: tuple[object, ...], build_error: Callable[[], PgfenceError]
) -> bool:
    """Postpone a statement until COMMIT. Return False if it must be sent now.

    Call this only if nothing listens for statements.
    """
    root = connection.get_transaction()
    # Subclasses are excluded, because a two-phase transaction is prepared by a statement other than COMMIT.
    if root is None or type(root) is not RootTransaction or not pipeline.may_commit(connection):
        return False
    dialect = vars(connection.dialect)
    if _WRAPPED not in dialect:
        dialect["do_rollback"] = partial(_roll_back, connection.dialect.do_rollback)
        dialect["do_commit"] = partial(_commit, connection.dialect, connection.dialect.do_commit)
        dialect[_WRAPPED] = True
    send_postponed(connection)
    connection.info[_WAITING] = Postponed(weakref.ref(root), text, values, build_error)
    return True


def send_postponed(connection: Connection) -> None:
    """Send the statement that waits for COMMIT, because a statement that must come after it is about to be sent.

    Raises:
        PgfenceError: the statement had no effect.
        ValueError: a text in the statement cannot be sent.
        DBAPIError: the statement failed with another error.
    """
    statement = _take(connection.info) if connection.in_transaction() else None
    if statement is None:
        return
    driver = pipeline.find_driver(connection.dialect, connection.connection)
    if not pipeline.is_in_transaction(driver):
        return  # aborted: only a rollback can follow, and a rollback to a savepoint leaves the claim without a result
    adapted: Any = connection.connection.dbapi_connection
    try:
        cursor = adapted.cursor()
        cursor.execute(statement.text, statement.values)
        cursor.close()
    except BaseException as error:
        if told := statement.translate(error, driver):
            raise told from error
        connection._handle_dbapi_exception(error, statement.text, statement.values, None, None)


def _take(info: dict[Any, Any]) -> Postponed | None:
    """Remove and return the statement that waits on a pooled connection, or None if its transaction has ended."""
    statement: Postponed | None = info.pop(_WAITING, None)
    root = None if statement is None else statement.transaction()
    return statement if root is not None and root.is_active else None


def _commit(dialect: Dialect, commit: Callable[[Any], None], pooled: Any) -> None:
    statement = _take(pooled.info)
    driver = pipeline.find_driver(dialect, pooled)
    # The server rolls an aborted transaction back at its COMMIT.
    if statement is None or not pipeline.is_in_transaction(driver):
        commit(pooled)
        return
    try:
        pipeline.execute_and_commit(dialect, driver, statement.text, statement.values)
    except Exception as error:
        by_commit = not driver.closed and pipeline.has_ended(driver)
        if not driver.closed:
            # The transaction is ended here, as after any failed COMMIT, because SQLAlchemy would not send a ROLLBACK.
            dialect.do_rollback(pooled)
        # An error of COMMIT comes from the application's deferred triggers and constraints, even a division by zero.
        if not by_commit and (told := statement.translate(error, driver)):
            raise told from error
        raise


def _roll_back(roll_back: Callable[[Any], None], pooled: Any) -> None:
    pooled.info.pop(_WAITING, None)
    roll_back(pooled)
