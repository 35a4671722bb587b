"""One attempt, with a fresh Session, its transaction, and what is known about its end.

Async attempts pass their `sync_session`.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING

from sqlalchemy import Connection, event
from sqlalchemy.exc import SQLAlchemyError, UnboundExecutionError

from pgfence._api.transactions import ATTEMPT, NOT_COMMITTED, commit_unknown_error
from pgfence._process.clock import clock
from pgfence._sql.errors import find_connect_error, is_commit_unanswered, is_driver_error, translate_error
from pgfence._sql.params import style_of
from pgfence._sql.sqlstate import sqlstate_of
from pgfence._sql.transaction import read_driver_state
from pgfence.config import DEFAULT, Config, config_of
from pgfence.errors import PgfenceError, TransactionStateError

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.engine import ExceptionContext
    from sqlalchemy.engine.interfaces import Dialect
    from sqlalchemy.orm import Session, SessionTransaction

    from pgfence.errors import CommitOutcomeUnknownError, UnreachableError

NUMBER = "pgfence_attempt"
"""The key of `session.info` that contains the number of the attempt."""

_ABORTED = "25P02"

_PING = "SELECT 1"
_LISTENING: weakref.WeakSet[Dialect] = weakref.WeakSet()


class AttemptRun:
    """One attempt at a transaction.

    Attributes:
        joined: whether the attempt is a savepoint in a transaction that the caller began on the Session's Connection.
        committed: whether the transaction was committed, so that an error comes from a listener, or from the function after its
            own commit.
        flush_error: the error of the last flush that has rolled the session back.
    """

    def __init__(self, session: Session, number: int) -> None:
        self.number = number
        self.began = clock()
        self.joined = _sets_savepoint(session)
        self.committed = False
        self.flush_error: BaseException | None = None
        self._session = session
        self._ending = False
        self._connections: set[Connection] = set()
        self._met: dict[Connection, BaseException] = {}
        session.info[NUMBER] = number
        vars(session)[ATTEMPT] = self
        _listen_to_sessions()

    @property
    def config(self) -> Config:
        """The settings of the engine that the attempt ran on."""
        bind = next(iter(self._connections), None) or bind_of(self._session)
        return DEFAULT if bind is None else config_of(bind)

    def finish(self, session: Session) -> None:
        """Flush before the COMMIT, so that a later failure is a failure of the COMMIT itself.

        An error that the function swallowed is raised if it has aborted the transaction.
        """
        # The function may have swallowed the error of a flush that has rolled the session back. Such a session ends without an error.
        if session.is_active:
            session.flush()
        elif self.flush_error is not None:
            raise _swallowed_error(self.flush_error)
        # PostgreSQL responds to the COMMIT of an aborted transaction with a ROLLBACK, for which no driver raises an error.
        for connection, error in self._met.items():
            if not (session.is_active and _is_usable(connection)):
                raise _swallowed_error(error)
        if not (session.is_active and session.in_transaction()):
            raise TransactionStateError(
                "the function must neither commit, roll back nor close its session, because run_transaction commits after it has"
                " returned: raise an exception to roll back"
            )
        self._ending = True

    def detach(self) -> None:
        """Stop tracking the session and its connections, which may be the caller's."""
        for one in (self._session, *self._connections):
            vars(one).pop(ATTEMPT, None)
        self._connections.clear()
        self._met.clear()
        self.flush_error = None

    def find_doubt(self, error: Exception, what: str) -> CommitOutcomeUnknownError | None:
        """Return the error to raise if the transaction may have been committed despite an error, or None if it was not."""
        # A savepoint commits nothing, and an error before the COMMIT leaves no doubt.
        if not self._ending or self.joined or not (isinstance(error, OSError) or is_driver_error(error)):
            return None
        if is_commit_unanswered(error):
            why = "the connection was lost during COMMIT"
        elif len(self._connections) > 1 and not self._session.twophase:
            why = "the COMMIT of one database failed, and another database may have committed"
        else:
            return None
        return commit_unknown_error(why, what)

    def find_connect_failure(self, error: Exception) -> UnreachableError | None:
        """Return the UnreachableError for an error from opening the session's connection, or None for any other error."""
        bind = bind_of(self._session)
        return None if bind is None else find_connect_error(bind.engine, error, NOT_COMMITTED)

    def use(self, connection: Connection) -> None:
        """Track a connection on which the session begins a transaction."""
        style_of(connection.dialect)
        if read_driver_state(connection).autocommit:
            raise TransactionStateError(
                "a unit of work cannot be retried in autocommit, because each attempt would commit each statement separately."
                " Use an engine without AUTOCOMMIT"
            )
        self._connections.add(connection)
        # There is one listener for the whole dialect, which finds the attempt through its connection.
        vars(connection)[ATTEMPT] = self
        if connection.dialect not in _LISTENING:
            _LISTENING.add(connection.dialect)
            event.listen(connection.engine, "handle_error", _record_error)

    def record_error(self, connection: Connection, error: BaseException) -> None:
        """Keep the last error of a connection, which the function may swallow.

        SQLSTATE 25P02 is ignored, because it only reports an earlier error.
        """
        if sqlstate_of(error) != _ABORTED:
            self._met[connection] = error


def _listen_to_sessions() -> None:
    """Track every connection on which a Session begins a transaction, every commit, and every flush that fails."""
    from sqlalchemy.orm import Session

    # One listener for the class, because adding one to each Session is expensive.
    if not event.contains(Session, "after_begin", _use_connection):
        event.listen(Session, "after_begin", _use_connection)
        # This listener comes first, because one of the application may raise an error.
        event.listen(Session, "after_commit", _note_commit, insert=True)
        event.listen(Session, "after_rollback", _note_rollback, insert=True)


def _use_connection(session: Session, _transaction: SessionTransaction, connection: Connection) -> None:
    attempt: AttemptRun | None = vars(session).get(ATTEMPT)
    if attempt is not None:
        attempt.use(connection)


def _note_commit(session: Session) -> None:
    attempt: AttemptRun | None = vars(session).get(ATTEMPT)
    if attempt is not None and not session.in_nested_transaction():  # the end of a savepoint commits nothing
        attempt.committed = True


def _note_rollback(session: Session) -> None:
    attempt: AttemptRun | None = vars(session).get(ATTEMPT)
    if attempt is not None:
        attempt.flush_error = sys.exception()


def _swallowed_error(error: BaseException) -> BaseException:
    """Return the error to raise for an error that the function swallowed, translated if pgfence has a class for it."""
    found = (None if isinstance(error, PgfenceError) else translate_error(error, None)) or error
    found.add_note(
        "the function caught this error, but the transaction was aborted or rolled back: nothing of it can be committed"
    )
    found.__cause__ = error.__cause__ if found is error else error
    return found


def _is_usable(connection: Connection) -> bool:
    """Return whether the transaction is still usable after an error. It is if the function rolled back to a savepoint."""
    try:
        connection.exec_driver_sql(_PING)
    except SQLAlchemyError:
        return False
    return True


def _record_error(context: ExceptionContext) -> None:
    connection = context.connection
    attempt: AttemptRun | None = None if connection is None else vars(connection).get(ATTEMPT)
    if attempt is None or connection is None:
        return
    attempt.record_error(connection, context.sqlalchemy_exception or context.original_exception)


def bind_of(session: Session) -> Engine | Connection | None:
    """Return the Engine or Connection that a Session uses if no class is given, or None if there is none."""
    try:
        return session.get_bind()
    except UnboundExecutionError:
        return None


def _sets_savepoint(session: Session) -> bool:
    """Return whether the Session will set a savepoint in a transaction that is already open."""
    bind = bind_of(session)
    if not (isinstance(bind, Connection) and bind.in_transaction()):
        return False
    mode = session.join_transaction_mode
    if mode == "create_savepoint" or (mode == "conditional_savepoint" and bind.in_nested_transaction()):
        return True
    raise TransactionStateError(
        "the sessionmaker is bound to a Connection whose transaction is already open, and a retry would roll it back. Bind the"
        ' sessionmaker to the engine; or, for tests that roll everything back, use join_transaction_mode="create_savepoint"'
    )
