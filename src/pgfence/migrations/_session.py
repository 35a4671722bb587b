"""The migration lock, a session lock of the lock manager on the connection that migrates, with its own way to wait.

Among the ways to wait that were tested together with CREATE INDEX CONCURRENTLY, only polling and short waits in autocommit
neither hung nor deadlocked: a session that waits in the server keeps a snapshot, and the index build waits for that snapshot.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from sqlalchemy import event

from pgfence._connections.connect import open_sqlalchemy_connection
from pgfence._connections.connection import RELEASE_BUDGET, STATEMENT_BUDGET
from pgfence._locks.manager import get_manager
from pgfence._process.clock import between, clock
from pgfence._process.coroutines import run_sync
from pgfence._sql import activity, migration_lock, server
from pgfence._sql.addresses import describe_server
from pgfence._sql.advisory import LockSql
from pgfence._sql.errors import is_driver_error, translate_connect_error
from pgfence._sql.params import style_of
from pgfence._sql.sqlstate import LOCK_NOT_AVAILABLE, sqlstate_of
from pgfence.config import config_of
from pgfence.errors import LockLostError, LockTimeoutError, PoolerError, TransactionStateError, UnreachableError
from pgfence.migrations import _command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

    from pgfence._connections.connection import LockConnection
    from pgfence._locks.manager import SessionHold
    from pgfence._process.coroutines import Coro
    from pgfence.keys import LockKey
    from pgfence.types import Holder

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("pgfence.migrations")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 0.3
LOG_EVERY = 10.0

UNKNOWN = "The state of the migration lock is unknown"


class MigrationLock:
    """One lock on the caller's connection, whose original state is restored on release."""

    def __init__(self, connection: Connection, key: LockKey, limit: float) -> None:
        """Create a lock that is not held. `acquire` will wait until `limit` seconds from now."""
        self._connection = connection
        self._key = key
        self._name = f"{key.label!r} ({key.value})"
        self._limit = limit
        self._deadline = clock() + limit
        self._sql = LockSql((key,), style_of(connection.dialect))
        self._manager = get_manager(connection.engine, config_of(connection, pin=True))
        self._hold: SessionHold
        self._settings: dict[str, str] = {}
        """The settings before the lock was acquired."""
        self._wrote = False

    def _drive(self, function: Callable[P, Coro[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a coroutine function of the manager to its end. With an async driver, env.py runs in a greenlet of SQLAlchemy."""
        if not self._connection.dialect.is_async:
            return run_sync(function, *args, **kwargs)
        from sqlalchemy.util import await_only

        return await_only(function(*args, **kwargs))

    # ------------------------------------------------------------ statements

    def ask(self, question: Callable[[Connection], T]) -> T:
        """Call `question` with a Connection in autocommit, while the lock is not held, and return its result.

        Raises:
            UnreachableError: the connection was lost, or the server does not respond.
        """
        session = self._drive(self._manager.pool.borrow_unjudged, self._connection)
        try:
            with self._use_autocommit(session, self._choose_budget()) as own:
                return question(own)
        finally:
            session.give_up()

    @contextmanager
    def _use_autocommit(self, session: LockConnection, seconds: float) -> Iterator[Connection]:
        """Yield the session as a Connection in autocommit, and restore its mode afterwards."""
        engine, dbapi_connection = self._connection.engine, session.dbapi_connection
        before = dbapi_connection.autocommit
        try:
            with self._limit_time(session, seconds):
                dbapi_connection.autocommit = True
                with open_sqlalchemy_connection(engine, dbapi_connection) as own:
                    yield own
        except Exception as error:
            if unreachable := translate_connect_error(engine, error, UNKNOWN):
                raise unreachable from error
            raise
        finally:
            with suppress(Exception):  # a broken connection has no mode, and the error of the connection is more useful
                dbapi_connection.autocommit = before

    @contextmanager
    def _limit_time(self, session: LockConnection, seconds: float) -> Iterator[None]:
        """Have the watcher shut down the socket after `seconds`, because no driver ends a wait for a server that hangs."""
        session.begin(seconds)
        try:
            yield
        except Exception as error:
            if session.dead == "cut off":
                raise self._no_response_error(seconds) from error
            raise
        finally:
            session.statement_started = 0.0

    def _choose_budget(self) -> float:
        """Return the number of seconds that a statement may take while waiting for the lock."""
        return max(0.0, self._deadline - clock()) + RELEASE_BUDGET

    def _no_response_error(self, seconds: float) -> UnreachableError:
        server = describe_server(self._connection.engine)
        return UnreachableError(f"no response from {server} within {seconds:.1f} s. {UNKNOWN}")

    # ------------------------------------------------------------ acquire

    def acquire(self) -> None:
        """Acquire the lock, waiting until it is free or the timeout has passed.

        Raises:
            LockTimeoutError: another session held the lock until the timeout.
            PoolerError, StandbyError, UnsupportedServerError: session locks are not safe on this server.
            UnreachableError: the connection was lost, or the server does not respond.
        """
        try:
            self._hold = self._wait()
        except PoolerError as error:
            raise PoolerError(
                f"{error}. For migrations alone, give env.py a URL that bypasses the pooler, such as MIGRATION_URL in the env.py"
                " that `pgfence init` creates",
                mode=error.mode,
            ) from error
        session = self._hold.session
        try:
            with self._use_autocommit(session, STATEMENT_BUDGET) as own:
                name = f"migration (pid {os.getpid()} on {socket.gethostname()})"
                self._settings = migration_lock.set_up(own, session.pid, name)
        except BaseException:
            with suppress(LockLostError):
                self._give_back()
            raise

    def _wait(self) -> SessionHold:
        began = logged = clock()
        while (hold := self._try()) is None:
            now = clock()
            if now >= self._deadline:
                raise self._timeout_error(*self.ask(self._find_holders))
            if logged == began or now - logged >= LOG_EVERY:
                logged = now
                _, doing = self.ask(self._find_holders)
                log.info("waiting for the migration lock %s (%.0f s so far): %s", self._name, now - began, doing)
            pause = min(between(SHORTEST_PAUSE, LONGEST_PAUSE), self._deadline - now)
            self._drive(self._manager.carrier.sleep, pause)
        if logged > began:
            log.info("acquired the migration lock %s after %.1f s", self._name, clock() - began)
        return hold

    def _try(self) -> SessionHold | None:
        began, names, budget = clock(), (self._key.label,), self._choose_budget()
        try:
            return self._drive(
                self._manager.acquire,
                names,
                self._sql,
                0.0,
                lambda _, hold: hold,
                on=self._connection,
                budget=budget,
            )
        except UnreachableError as error:
            if clock() - began >= budget:
                raise self._no_response_error(budget) from error
            raise

    def _find_holders(self, own: Connection) -> tuple[list[Holder], str]:
        found = activity.find_holders(own, (self._key,))
        doing = migration_lock.describe_sessions(own, [each.backend_pid for each in found if each.backend_pid])
        descriptions = [
            f"{each}: {doing.get(each.backend_pid, migration_lock.ENDED) if each.backend_pid else migration_lock.UNSEEN}"
            for each in found
        ]
        return found, "; ".join(descriptions) or "it is not held at this moment"

    def _timeout_error(self, found: list[Holder], doing: str) -> LockTimeoutError:
        return LockTimeoutError(
            f"could not acquire the migration lock {self._name} within {self._limit:g} s: {doing}. Pass a longer timeout= or, if the"
            " client of a backend that holds the lock has died, end that backend with pg_terminate_backend()",
            names=[self._key.label],
            keys=[self._key],
            timeout=self._limit,
            holders=found,
        )

    # ------------------------------------------------------------ hold

    @contextmanager
    def watch(self, before_a_revision: Callable[[], None]) -> Iterator[None]:
        """Record whether the block writes, and call `before_a_revision` before a revision is recorded."""

        def begin(_: Connection) -> None:
            self._wrote = False

        def on_statement(_: Connection, clause: object, *__: object) -> None:
            if _command.writes_version(clause):
                before_a_revision()

        def on_cursor(_: Connection, __: object, ___: str, ____: object, context: Any, _____: bool) -> None:
            clause = getattr(context.compiled, "statement", None)
            if not (getattr(clause, "is_select", False) or _command.makes_version_table(clause)):
                self._wrote = True

        listeners: dict[str, Callable[..., None]] = {
            "begin": begin,
            "before_execute": on_statement,
            "before_cursor_execute": on_cursor,
        }
        for name, listener in listeners.items():
            event.listen(self._connection, name, listener)
        try:
            yield
        finally:
            for name, listener in listeners.items():
                event.remove(self._connection, name, listener)

    def expect_held(self) -> None:
        """Raise an error unless this session still holds the lock. This takes one round trip, in the caller's transaction."""
        try:
            with self._limit_time(self._hold.session, STATEMENT_BUDGET):
                held = activity.is_mine(self._connection, (self._key,))
        except UnreachableError as error:
            raise self._lost_error() from error
        if not held:
            raise self._lost_error()

    def _lost_error(self) -> LockLostError:
        return LockLostError(
            f"the migration lock {self._name} was lost: the session that held it has ended, or has released all its locks"
            " (pg_advisory_unlock_all, DISCARD ALL). Migrations that had not been committed when the"
            " lock was lost are not recorded",
            names=[self._key.label],
            reason="killed",
        )

    # ------------------------------------------------------------ release

    def release(self) -> None:
        """Release the lock, or close the connection if the release cannot be confirmed.

        Raises:
            LockLostError: the lock had already been lost.
            TransactionStateError: an open transaction has written something, and was rolled back.
        """
        try:
            written = self._end_transaction()
        except BaseException as error:
            try:
                self._give_back()
            except Exception:
                if is_driver_error(error):
                    raise self._lost_error() from error
            raise
        try:
            self._give_back()
        except LockLostError as error:
            raise self._lost_error() from error
        if written:
            raise TransactionStateError(
                "the block of migration_lock() ended inside a transaction, which was rolled back with everything it had written."
                " Run migrations in `with context.begin_transaction():`, and commit other work that the block does"
            )

    def _end_transaction(self) -> bool:
        """End the caller's transaction, and return whether writes were lost with it."""
        connection, wrote = self._connection, self._wrote
        if not connection.in_transaction():
            return False
        session = self._hold.session
        with self._limit_time(session, STATEMENT_BUDGET):
            written = not session.dbapi_connection.autocommit and migration_lock.has_written(connection)
        if written and not wrote:
            # Alembic creates its version table in the transaction in which it looks for the table, and commits both with a
            # revision.
            connection.commit()
            return False
        connection.rollback()
        return written

    def _give_back(self) -> None:
        """Restore the settings and unlock; the manager closes a connection on which the lock might remain."""
        hold = self._hold
        try:
            if hold.state == "held" and self._is_attached():
                with self._use_autocommit(hold.session, STATEMENT_BUDGET) as own:
                    server.restore(own, self._settings)
        except BaseException as error:
            try:
                self._drive(self._manager.release, hold, leaving=True, failing=True)
            except LockLostError as lost:
                # The session has ended between the check of its state and the statement.
                if isinstance(error, UnreachableError) and lost.reason == "killed":
                    raise lost from error
            raise
        self._drive(self._manager.release, hold, leaving=True, failing=True)

    def _is_attached(self) -> bool:
        # SQLAlchemy reconnects silently after a lost connection.
        connection = self._connection
        return not (connection.closed or connection.invalidated) and (
            connection.connection.dbapi_connection is self._hold.session.dbapi_connection
        )

    def abandon(self, error: BaseException) -> None:
        """Release the lock after a failed migration, or close the connection. The migration's own error is kept.

        Raises:
            LockLostError: the migration failed because the session that held the lock has ended.
        """
        lost = not self._is_attached()
        try:
            if not lost:
                with self._limit_time(self._hold.session, STATEMENT_BUDGET):
                    self._connection.rollback()
                if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
                    self._explain_wait(error)
        except Exception:
            lost = True
            log.debug("the transaction of a migration could not be rolled back", exc_info=True)
        try:
            self._give_back()
        except Exception:
            lost = True
            log.debug("the migration lock could not be released, so its session was closed", exc_info=True)
        if lost and isinstance(error, Exception) and is_driver_error(error):
            raise self._lost_error() from error

    def _explain_wait(self, error: BaseException) -> None:
        """Add a note to the error of a statement that `lock_timeout` ended: the sessions that hold locks on tables."""
        with self._use_autocommit(self._hold.session, STATEMENT_BUDGET) as own:
            found = migration_lock.describe_lockers(own)
        if found:
            error.add_note(
                f"These transactions still hold locks on tables, and one of them may be blocking: {'; '.join(found)}"
            )
