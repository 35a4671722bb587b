"""A session lock on the very connection that migrates.

Of the ways to wait that were tried beside CREATE INDEX CONCURRENTLY, only polling in autocommit neither hung nor deadlocked:
a session that waits in the server, or that is idle in a transaction, keeps a snapshot which the index build waits for.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import event

from pgfence._connections.connect import judge, open_sqlalchemy_connection, wrong_backend_error
from pgfence._connections.connection import RELEASE_BUDGET, STATEMENT_BUDGET
from pgfence._connections.drivers import find_descriptor
from pgfence._process.clock import between, clock
from pgfence._process.lifecycle import PROCESS
from pgfence._process.monitor import MONITOR, identify_socket
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

    from pgfence.errors import LossReason
    from pgfence.keys import LockKey
    from pgfence.types import Holder

T = TypeVar("T")

log = logging.getLogger("pgfence.migrations")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 0.3
TELL_EVERY = 10.0

UNKNOWN = "Nothing is known about the migration lock"


class _Limit:
    """The end of the time for statements of ours: the watcher then shuts the connection's socket down.

    Waiting for the response of a server that hangs cannot be ended in another way, by any driver.
    """

    dup = -1
    dead: object = None

    def __init__(self, driver: Any, seconds: float) -> None:
        self.seconds = seconds
        self.exceeded = False
        self._end = time.monotonic() + seconds
        fd = find_descriptor(driver)
        self.socket = identify_socket(fd) if fd >= 0 else None
        PROCESS.notice_fork()
        MONITOR.watch(self, fd)

    def on_connection_lost(self, reason: LossReason) -> None:
        """Nothing to do: the statement under way fails."""

    def tick(self, now: float, paused: bool) -> None:
        """Once a second, on the watcher's thread."""
        if paused:  # the response may have arrived: this process, not the server, was stopped
            self._end = max(self._end, now + RELEASE_BUDGET)
        elif now > self._end:
            self.exceeded = True
            MONITOR.shut_down(self)


class SessionLock:
    """One lock, on somebody's connection, which is handed back as it was."""

    def __init__(self, connection: Connection, key: LockKey, limit: float) -> None:
        """Make it.

        Args:
            connection: the one that migrates.
            key: of the lock.
            limit: seconds from now to wait for it.
        """
        self._connection = connection
        self._key = key
        self._limit = limit
        self._deadline = clock() + limit
        self._sql = LockSql((key,), style_of(connection.dialect))
        self._dbapi_connection: Any = connection.connection.dbapi_connection
        self._driver: Any = connection.connection.driver_connection
        self._facts: server.ServerInfo
        self._wrote = False

    def ask(self, question: Callable[[Connection], T]) -> T:
        """Ask the server in autocommit, before the deadline.

        Raises:
            UnreachableError: the server went away, or does not respond.
        """
        with self._use_autocommit(max(0.0, self._deadline - clock()) + RELEASE_BUDGET) as own:
            return question(own)

    @contextmanager
    def _use_autocommit(self, seconds: float) -> Iterator[Connection]:
        """Yield another Connection on the same session, in autocommit; the caller's never notices."""
        engine, dbapi_connection = self._connection.engine, self._dbapi_connection
        before = dbapi_connection.autocommit
        try:
            with self._limit_time(seconds):
                dbapi_connection.autocommit = True
                with open_sqlalchemy_connection(engine, dbapi_connection) as own:
                    yield own
        except Exception as error:
            if told := translate_connect_error(engine, error, UNKNOWN):
                raise told from error
            raise
        finally:
            with suppress(Exception):  # a connection that broke has no mode, and its own error says more
                dbapi_connection.autocommit = before

    @contextmanager
    def _limit_time(self, seconds: float) -> Iterator[None]:
        """End the session if the block takes longer."""
        limit = _Limit(self._driver, seconds)
        try:
            yield
        except Exception as error:
            if limit.exceeded:
                raise UnreachableError(
                    f"no response from {describe_server(self._connection.engine)} within {seconds:.1f} s. {UNKNOWN}"
                ) from error
            raise
        finally:
            MONITOR.unwatch(limit)

    # ------------------------------------------------------------ acquire

    def acquire(self) -> None:
        """Wait until this session has it.

        Raises:
            LockTimeoutError: somebody else had it all the time.
            PoolerError, StandbyError, UnsupportedServerError: it would be worth nothing on this server.
            UnreachableError: the server went away, or does not respond.
        """
        try:
            busy = self.ask(self._acquire)
        except PoolerError as error:
            self._connection.invalidate()
            raise PoolerError(
                f"{error}. For migrations alone: give env.py a URL that leads past the pooler, as MIGRATION_URL is in the"
                " env.py that pgfence init makes",
                mode=error.mode,
            ) from error
        except BaseException:
            # Torn in the middle of a statement: the lock may be there.
            self._connection.invalidate()
            raise
        if busy is not None:
            raise busy

    def _acquire(self, own: Connection) -> LockTimeoutError | None:
        self._facts = server.read_facts(own, -1, set_up=False)
        judge(self._connection.engine, self._facts, self._driver, config_of(self._connection).pooler)
        migration_lock.set_up(own, self._facts.backend_pid)
        if self._wait(own):
            return None
        busy = self._timeout_error(own)
        server.restore(own, self._facts)
        return busy

    def _wait(self, own: Connection) -> bool:
        began = clock()
        told = began
        while not self._try(own):
            now = clock()
            if now >= self._deadline:
                return False
            if told == began or now - told >= TELL_EVERY:
                told = now
                log.info(
                    "waiting for the migration lock %s since %.0f s: %s",
                    self._name,
                    now - began,
                    self._find_holders(own)[1],
                )
            time.sleep(min(between(SHORTEST_PAUSE, LONGEST_PAUSE), self._deadline - now))
        if told > began:
            log.info("the migration lock %s is ours after %.1f s", self._name, clock() - began)
        return True

    def _try(self, own: Connection) -> bool:
        asked = self._facts.backend_pid, *self._sql.unlock_args
        granted: bool | None = own.exec_driver_sql(self._sql.try_text, asked).scalar_one()
        if granted is None:
            raise wrong_backend_error(own.engine)
        return granted

    def _find_holders(self, own: Connection) -> tuple[list[Holder], str]:
        found = activity.find_holders(own, (self._key,))
        doing = migration_lock.describe_sessions(own, [each.backend_pid for each in found if each.backend_pid])
        told = [f"{each}: {doing.get(each.backend_pid or 0, migration_lock.UNSEEN)}" for each in found]
        return found, "; ".join(told) or "held by nobody at this moment"

    def _timeout_error(self, own: Connection) -> LockTimeoutError:
        found, told = self._find_holders(own)
        return LockTimeoutError(
            f"no migration lock {self._name} within {self._limit:g} s: {told}. Wait longer (timeout=); or, if the process behind that"
            " backend is gone, end it with pg_terminate_backend()",
            names=[self._key.label],
            keys=[self._key],
            timeout=self._limit,
            holders=found,
        )

    @property
    def _name(self) -> str:
        return f"{self._key.label!r} ({self._key.value})"

    # ------------------------------------------------------------ hold

    @contextmanager
    def watch(self, before_a_revision: Callable[[], None]) -> Iterator[None]:
        """Look at each statement of the block: does it go to the same session; and before a revision is recorded."""

        def begin(_: Connection) -> None:
            self._wrote = False

        def on_statement(_: Connection, clause: object, *__: object) -> None:
            if _command.writes_version(clause):
                before_a_revision()

        def on_cursor(_: Connection, __: object, ___: str, ____: object, context: Any, _____: bool) -> None:
            if not self._is_same():
                raise self._lost_error()
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
        """Raise unless this session still has it. One round trip, in the caller's transaction."""
        try:
            with self._limit_time(STATEMENT_BUDGET):
                held = activity.is_mine(self._connection, (self._key,))
        except UnreachableError as error:
            raise self._lost_error() from error
        if not held:
            raise self._lost_error()

    def _is_same(self) -> bool:
        # SQLAlchemy reconnects after a lost connection without a word.
        connection = self._connection
        return not (connection.closed or connection.invalidated) and (
            connection.connection.dbapi_connection is self._dbapi_connection
        )

    def _lost_error(self) -> LockLostError:
        return LockLostError(
            f"the migration lock {self._name} is lost: the session that held it has ended, or was told to unlock everything"
            " (pg_advisory_unlock_all, DISCARD ALL). What was not committed until then is not recorded",
            names=[self._key.label],
            reason="killed",
        )

    # ------------------------------------------------------------ release

    def release(self) -> None:
        """Give it back, or close the connection if that cannot be proven.

        Raises:
            LockLostError: it was gone before.
            TransactionStateError: a transaction is open that has written something, which is rolled back.
        """
        try:
            if not self._is_same():
                raise self._lost_error()
            written = self._end_transaction()
            if not self._unlock():
                raise self._lost_error()
        except BaseException:
            self._close()
            raise
        if written:
            raise TransactionStateError(
                "the migration lock's block ended inside a transaction, which was rolled back with what it had written. Run"
                " migrations in `with context.begin_transaction():`, and commit what else is done in the block"
            )

    def _end_transaction(self) -> bool:
        """End the caller's transaction; say whether something is lost with it."""
        connection, wrote = self._connection, self._wrote
        if not connection.in_transaction():
            return False
        with self._limit_time(STATEMENT_BUDGET):
            written = not self._dbapi_connection.autocommit and migration_lock.has_written(connection)
        if written and not wrote:
            # Alembic makes its version table in a transaction that is begun by looking for it, and commits it with a revision.
            connection.commit()
            return False
        connection.rollback()
        return written

    def _unlock(self) -> bool:
        with self._use_autocommit(STATEMENT_BUDGET) as own:
            held: bool = own.exec_driver_sql(self._sql.unlock_text, self._sql.unlock_args).scalar_one()
            server.restore(own, self._facts)
            return held

    def abandon(self, error: BaseException) -> None:
        """Give it back after a migration that failed, or close the connection. Why it failed says more than we could.

        Raises:
            LockLostError: it failed because the session has ended.
        """
        gone = not self._is_same()
        try:
            if not gone:
                with self._limit_time(STATEMENT_BUDGET):
                    self._connection.rollback()
                if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
                    self._explain_wait(error)
                if self._unlock():
                    return
        except Exception:
            gone = True
            log.debug("the migration lock could not be given back: its session is closed", exc_info=True)
        self._close()
        if gone and isinstance(error, Exception) and is_driver_error(error):
            raise self._lost_error() from error

    def _explain_wait(self, error: BaseException) -> None:
        """Add a note to the error of a statement that waited for a lock until `lock_timeout`: who has locks on tables."""
        with self._use_autocommit(STATEMENT_BUDGET) as own:
            found = migration_lock.describe_lockers(own)
        if found:
            error.add_note(
                f"These transactions still have locks on tables, and one may be in the way: {'; '.join(found)}"
            )

    def _close(self) -> None:
        """End the session, for the lock would stay on it."""
        with suppress(Exception):
            self._dbapi_connection.close()
        if not (self._connection.closed or self._connection.invalidated):
            self._connection.invalidate()
