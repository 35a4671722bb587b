"""A statement of ours that waits for the COMMIT of its transaction, so that both take one round trip.

It is sent earlier if anything is sent that may not come before it: a savepoint or its end, a setting, a COMMIT in plain text, a
statement of ours. Queries and changes of rows may come before it. A rollback drops it.

SQLAlchemy's event of a COMMIT comes too early, before the listeners of the user have sent what they want to send. So the
dialect's own `do_commit` and `do_rollback` are wrapped, once for each engine. A COMMIT past SQLAlchemy does not send the
statement: postpone only what the server misses at COMMIT.
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
"""How a statement says that it had no effect: an error, for COMMIT must not be executed after it."""


class Postponed(NamedTuple):
    """A statement that waits for COMMIT.

    Attributes:
        transaction: that it belongs to.
        text: divides by zero where it has no effect.
        values: its parameters.
        build_error: the error for that case.
    """

    transaction: weakref.ref[RootTransaction]
    text: str
    values: tuple[object, ...]
    build_error: Callable[[], PgfenceError]

    def translate(self, error: BaseException, driver: object) -> PgfenceError | ValueError | None:
        """Return the error for a statement that had no effect, or whose text cannot be sent; None for any other error."""
        if sqlstate_of(error) == _DIVISION_BY_ZERO:
            return self.build_error()
        return text_error(error, self.values, lambda: driver)


def postpone(
    connection: Connection, text: str, values: tuple[object, ...], build_error: Callable[[], PgfenceError]
) -> bool:
    """Have a statement sent with COMMIT; False: it has to be sent now. Only where nothing listens for statements."""
    root = connection.get_transaction()
    # Not for a subclass: a two-phase transaction is prepared by another statement than COMMIT.
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
    """Send what waits for COMMIT, because something else is about to be sent that must come after it.

    Raises:
        PgfenceError: it had no effect.
        ValueError: a text of it cannot be sent.
        DBAPIError: another error of the statement.
    """
    statement = _take(connection.info) if connection.in_transaction() else None
    if statement is None:
        return
    driver = pipeline.find_driver(connection.dialect, connection.connection)
    if not pipeline.is_in_transaction(driver):
        return  # aborted: what comes next ends it, in whole or back to a savepoint, and without its effect it cannot commit
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
    """Return what waits on a pooled connection, and drop it there; None if its transaction has ended."""
    statement: Postponed | None = info.pop(_WAITING, None)
    root = None if statement is None else statement.transaction()
    return statement if root is not None and root.is_active else None


def _commit(dialect: Dialect, commit: Callable[[Any], None], pooled: Any) -> None:
    statement = _take(pooled.info)
    driver = pipeline.find_driver(dialect, pooled)
    # An aborted transaction is rolled back by its COMMIT, as the server does it.
    if statement is None or not pipeline.is_in_transaction(driver):
        commit(pooled)
        return
    try:
        pipeline.execute_and_commit(dialect, driver, statement.text, statement.values)
    except Exception as error:
        by_commit = not driver.closed and pipeline.has_ended(driver)
        if not driver.closed:
            # As after any COMMIT that failed, no transaction is left: SQLAlchemy would not send a ROLLBACK.
            dialect.do_rollback(pooled)
        # An error of COMMIT comes from the user's deferred triggers and constraints, whatever number they divide by.
        if not by_commit and (told := statement.translate(error, driver)):
            raise told from error
        raise


def _roll_back(roll_back: Callable[[Any], None], pooled: Any) -> None:
    pooled.info.pop(_WAITING, None)
    roll_back(pooled)
