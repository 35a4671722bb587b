"""The statements of a session, sync: each runs on the thread that needs it."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from pgfence._connections.connect import R, has_listeners, sqlalchemy_connection, wrap_dbapi, wrong_backend_error
from pgfence._connections.connection import (
    RELEASE_BUDGET,
    STATEMENT_BUDGET,
    WAIT_GRACE,
    CallerConnection,
    LockConnection,
)
from pgfence._connections.drivers import SYNC_DRIVERS, driver_connection_for
from pgfence._process.monitor import MONITOR
from pgfence._sql import server
from pgfence._sql.advisory import QUIET_CHECK, LockSql
from pgfence._sql.encoding import text_error
from pgfence._sql.sqlstate import LOCK_NOT_AVAILABLE, SERIALIZATION_FAILURE, sqlstate_of
from pgfence._sql.token import RETRIES, ROW_WAIT, STRANGE_BACKEND, TokenSql

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Engine

    from pgfence._connections.drivers import SyncDriverConnection
    from pgfence._holds.hold import Hold


class SyncLockConnection(LockConnection):
    """One connection of ours, or the caller's own, driven by the thread that needs it."""

    wire: SyncDriverConnection

    def __init__(self, dbapi_connection: Any, wire: SyncDriverConnection, facts: server.ServerInfo) -> None:
        super().__init__(dbapi_connection, wire, facts)
        self.turn = threading.Lock()
        """The watcher's question while it is held, and the unlock: one at a time."""

    def ask(
        self, engine: Engine, text: str, args: Sequence[Any], *, limit: float = STATEMENT_BUDGET, prepare: bool = True
    ) -> Any:
        """Run a statement of ours and return the first column of its one row."""
        self.begin(limit)
        try:
            if has_listeners(engine):
                with sqlalchemy_connection(engine, self.dbapi_connection) as connection:
                    return connection.exec_driver_sql(text, tuple(args)).one()[0]
            return self.wire.query(text, args, prepare=prepare)[0]
        except Exception as error:
            if told := text_error(error, args, lambda: self.wire.driver):
                raise told from error
            raise
        finally:
            self.since = 0.0

    def row(self, engine: Engine, text: str, args: Sequence[Any], *, limit: float = STATEMENT_BUDGET) -> Any:
        """Run a statement of ours and return its first row, or None where it has none."""
        self.begin(limit)
        try:
            if has_listeners(engine):
                with sqlalchemy_connection(engine, self.dbapi_connection) as connection:
                    return connection.exec_driver_sql(text, tuple(args)).first()
            return self.wire.query(text, args, prepare=True)
        except Exception as error:
            if told := text_error(error, args, lambda: self.wire.driver):
                raise told from error
            raise
        finally:
            self.since = 0.0

    def through(self, engine: Engine, run: Callable[[Connection], R], *, limit: float) -> R:
        """Run code on this session by way of SQLAlchemy."""
        self.begin(limit)
        try:
            with sqlalchemy_connection(engine, self.dbapi_connection) as connection:
                return run(connection)
        finally:
            self.since = 0.0

    def try_lock(self, engine: Engine, sql: LockSql, limit: float) -> bool:
        if isinstance(sql, TokenSql):
            return self.lock_with_token(engine, sql, 0)
        args = (self.pid, *sql.unlock_args)
        if self.direct and not has_listeners(engine):  # the short way: each layer costs, and this is the common case
            self.limit, self.since = limit, time.monotonic()
            try:
                granted = (self.wire.query(sql.try_text, args, prepare=True))[0]
            finally:
                self.since = 0.0
        else:
            granted = self.ask(engine, sql.try_text, args, limit=limit)
        if granted is None:
            raise wrong_backend_error(engine)
        return bool(granted)

    def lock_with_token(self, engine: Engine, sql: TokenSql, milliseconds: int) -> bool:
        """Take a lock whose grant brings a token, which is kept in `token`; 0 milliseconds do not wait."""
        began, limit = time.monotonic(), milliseconds / 1000 + ROW_WAIT + WAIT_GRACE
        args, token = sql.lock_args(self.pid, milliseconds), None
        for failures in range(RETRIES + 1):
            try:
                token = self.ask(engine, sql.lock_text, args, limit=limit)
                break
            except Exception as error:
                state = sqlstate_of(error)
                if state == LOCK_NOT_AVAILABLE:
                    break
                if state != SERIALIZATION_FAILURE or failures == RETRIES:
                    raise
                # The session lock came before a commit that failed, or not at all.
                self.ask(engine, sql.unlock_text, sql.unlock_args, limit=RELEASE_BUDGET)
        if token == STRANGE_BACKEND:
            raise wrong_backend_error(engine)
        self.token = token or 0
        if token is None and (left := milliseconds / 1000 - (time.monotonic() - began)) > 0:
            time.sleep(left)  # a lease of this name is in the way, and nothing in the server waits for that
        return token is not None

    def wait_lock(self, engine: Engine, sql: LockSql, milliseconds: int, *, quiet: bool) -> bool:
        if isinstance(sql, TokenSql):
            return self.lock_with_token(engine, sql, milliseconds)
        limit = milliseconds * len(sql.keys) / 1000 + WAIT_GRACE
        if not quiet:
            try:
                self.ask(engine, sql.wait_text, sql.wait_args(milliseconds), limit=limit, prepare=False)
            except Exception as error:
                if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
                    return False
                raise
            return True
        self.begin(limit)
        try:
            return self.run_script(engine, sql.quiet_wait(milliseconds))
        finally:
            self.since = 0.0

    def run_script(self, engine: Engine, wait: str) -> bool:
        if not has_listeners(engine):
            return self.wire.script(f"{wait}; {QUIET_CHECK}")
        with sqlalchemy_connection(engine, self.dbapi_connection) as connection:
            connection.exec_driver_sql(wait)
            return connection.exec_driver_sql(QUIET_CHECK).first() is not None

    def unlock(self, engine: Engine, sql: LockSql) -> bool:
        if not self.turn.acquire(False) and not self.turn.acquire(timeout=RELEASE_BUDGET):
            self.cut()  # the watcher's question has no answer either, and ends with the connection
            self.turn.acquire()
        try:
            if not self.direct or has_listeners(engine):
                return bool(self.ask(engine, sql.unlock_text, sql.unlock_args, limit=RELEASE_BUDGET))
            self.limit, self.since = RELEASE_BUDGET, time.monotonic()
            try:
                return bool((self.wire.query(sql.unlock_text, sql.unlock_args, prepare=True))[0])
            finally:
                self.since = 0.0
        finally:
            self.turn.release()

    def probe(self, hold: Hold[Any]) -> None:
        def ask() -> None:
            with self.turn:
                if self.hold is not hold:
                    return
                self.begin(STATEMENT_BUDGET)
                try:
                    self.wire.ping()
                except Exception:
                    self.died("cut off")
                else:
                    hold.in_doubt = False
                finally:
                    self.since = 0.0

        MONITOR.post(ask)

    def as_user_connection(self, engine: Engine) -> Connection:
        """Make the session an ordinary Connection for the user's code: transactions, and the site's own limits."""
        self.lent = True
        self.through(engine, lambda connection: server.put_back(connection, self.facts), limit=RELEASE_BUDGET)
        engine.dialect.reset_isolation_level(self.dbapi_connection)
        return wrap_dbapi(engine, self.dbapi_connection, reconnects=False)

    def close_lent(self, connection: Connection) -> None:
        """End the Connection that was lent; the session below it lives on for the unlock."""
        self.begin(RELEASE_BUDGET)  # what is open is rolled back
        try:
            connection.close()
        finally:
            self.since = 0.0

    def reclaim(self, engine: Engine) -> None:
        """End what the user's code left open, before the unlock."""
        self.begin(RELEASE_BUDGET)
        try:
            engine.dialect.do_rollback(self.dbapi_connection)
            engine.dialect.set_isolation_level(self.dbapi_connection, "AUTOCOMMIT")
        finally:
            self.since = 0.0


class SyncCallerConnection(CallerConnection, SyncLockConnection):
    """The caller's own connection, for one lock. Our statements run between its transactions, in autocommit."""

    @classmethod
    def of(cls, connection: Connection, limit: float) -> SyncCallerConnection:
        """Borrow a connection that is outside a transaction; its first question may take `limit` seconds."""
        dbapi_connection = connection.connection.dbapi_connection
        driver = connection.dialect.get_driver_connection(dbapi_connection)  # type: ignore[arg-type]
        wire = driver_connection_for(connection.dialect.driver, SYNC_DRIVERS, "sync")(driver)
        cls.fit(connection, dbapi_connection, wire)
        facts = cls.known_facts(connection, dbapi_connection)
        session = cls(connection, dbapi_connection, wire, facts or server.UNKNOWN)
        if facts is None:
            try:
                facts = server.ServerInfo.of(session.ask_row(server.READ_FACTS, limit), set_up=False)
            except BaseException:
                session.forgo()
                raise
            session.know(facts)
            cls.learn(connection, dbapi_connection, facts)
        return session

    def ask(
        self, engine: Engine, text: str, args: Sequence[Any], *, limit: float = STATEMENT_BUDGET, prepare: bool = True
    ) -> Any:
        return (self.ask_row(text, limit, args))[0]

    def ask_row(self, text: str, limit: float, args: Sequence[Any] = ()) -> Any:
        """Run a statement in autocommit and return its one row."""
        self.expect_attached()
        self.begin(limit)
        before = self.wire.set_autocommit(True)
        try:
            return self.wire.query(text, args)
        except Exception as error:
            if told := text_error(error, args, lambda: self.wire.driver):
                raise told from error
            raise
        finally:
            self.since = 0.0
            with contextlib.suppress(Exception):  # the statement's own error says more; a dead connection has no mode
                self.wire.set_autocommit(before)

    def run_script(self, engine: Engine, wait: str) -> bool:
        self.expect_attached()
        before = self.wire.set_autocommit(True)
        try:
            return self.wire.script(f"{wait}; {QUIET_CHECK}")
        finally:
            with contextlib.suppress(Exception):
                self.wire.set_autocommit(before)
