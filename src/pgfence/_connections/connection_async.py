"""The statements of a session, async: each runs on the task that needs it, on its own loop.

A cancel in mid-statement reaches the driver; what the server did is unknown then, and whoever asked closes the session.
Closing is a plain call of the driver's that waits for nothing, so it works while a cancel unwinds and from the watcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from pgfence._connections.connect import (
    R,
    at_once,
    has_listeners,
    in_greenlet,
    sqlalchemy_connection,
    wrap_dbapi,
    wrong_backend_error,
)
from pgfence._connections.connection import (
    RELEASE_BUDGET,
    STATEMENT_BUDGET,
    WAIT_GRACE,
    CallerConnection,
    LockConnection,
)
from pgfence._connections.drivers import ASYNC_DRIVERS, driver_connection_for
from pgfence._process.monitor import reason_of
from pgfence._process.references import weak_method
from pgfence._sql import server
from pgfence._sql.advisory import QUIET_CHECK, LockSql
from pgfence._sql.encoding import text_error
from pgfence._sql.sqlstate import LOCK_NOT_AVAILABLE, SERIALIZATION_FAILURE, sqlstate_of
from pgfence._sql.token import RETRIES, ROW_WAIT, STRANGE_BACKEND, TokenSql

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from pgfence._connections.drivers import AsyncDriverConnection
    from pgfence._holds.hold import Hold

_TASKS: set[asyncio.Future[Any]] = set()


def keep(task: asyncio.Future[Any]) -> None:
    """Keep a task alive until it is done: the loop itself refers to it weakly."""
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Run a call on a loop, from any thread; a loop that is closed needs no news."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


class AsyncLockConnection(LockConnection):
    """One connection of ours, or the caller's own, driven by the task that needs it."""

    wire: AsyncDriverConnection

    def __init__(self, dbapi_connection: Any, wire: AsyncDriverConnection, facts: server.ServerInfo) -> None:
        super().__init__(dbapi_connection, wire, facts)
        self.loop = asyncio.get_running_loop()
        self.probing: asyncio.Future[None] | None = None
        """The watcher's question, while it is under way."""
        if hasattr(wire.driver, "add_termination_listener"):
            # asyncio may see the end and close the socket before the watcher wakes, and epoll forgets closed sockets.
            self._listener = weak_method(self._terminated)
            wire.driver.add_termination_listener(self._listener)

    def _terminated(self, _: Any) -> None:
        if not self.closed:
            self.died(reason_of(self.dup) if self.dup >= 0 else "killed")

    async def ask(
        self, engine: Engine, text: str, args: Sequence[Any], *, limit: float = STATEMENT_BUDGET, prepare: bool = True
    ) -> Any:
        """Run a statement of ours and return the first column of its one row."""
        self.begin(limit)
        try:
            if has_listeners(engine):
                return await self._through(engine, lambda c: c.exec_driver_sql(text, tuple(args)).one()[0])
            return (await self.wire.query(text, args, prepare=prepare))[0]
        except Exception as error:
            if told := text_error(error, args, lambda: self.wire.driver):
                raise told from error
            raise
        finally:
            self.since = 0.0

    async def row(self, engine: Engine, text: str, args: Sequence[Any], *, limit: float = STATEMENT_BUDGET) -> Any:
        """Run a statement of ours and return its first row, or None where it has none."""
        self.begin(limit)
        try:
            if has_listeners(engine):
                return await self._through(engine, lambda c: c.exec_driver_sql(text, tuple(args)).first())
            return await self.wire.query(text, args, prepare=True)
        except Exception as error:
            if told := text_error(error, args, lambda: self.wire.driver):
                raise told from error
            raise
        finally:
            self.since = 0.0

    async def try_lock(self, engine: Engine, sql: LockSql, limit: float) -> bool:
        if isinstance(sql, TokenSql):
            return await self.lock_with_token(engine, sql, 0)
        args = (self.pid, *sql.unlock_args)
        if self.direct and not has_listeners(engine):  # the short way: each layer costs, and this is the common case
            self.limit, self.since = limit, time.monotonic()
            try:
                granted = (await self.wire.query(sql.try_text, args, prepare=True))[0]
            finally:
                self.since = 0.0
        else:
            granted = await self.ask(engine, sql.try_text, args, limit=limit)
        if granted is None:
            raise wrong_backend_error(engine)
        return bool(granted)

    async def lock_with_token(self, engine: Engine, sql: TokenSql, milliseconds: int) -> bool:
        """Take a lock whose grant brings a token, which is kept in `token`; 0 milliseconds do not wait."""
        began, limit = time.monotonic(), milliseconds / 1000 + ROW_WAIT + WAIT_GRACE
        args, token = sql.lock_args(self.pid, milliseconds), None
        for failures in range(RETRIES + 1):
            try:
                token = await self.ask(engine, sql.lock_text, args, limit=limit)
                break
            except Exception as error:
                state = sqlstate_of(error)
                if state == LOCK_NOT_AVAILABLE:
                    break
                if state != SERIALIZATION_FAILURE or failures == RETRIES:
                    raise
                # The session lock came before a commit that failed, or not at all.
                await self.ask(engine, sql.unlock_text, sql.unlock_args, limit=RELEASE_BUDGET)
        if token == STRANGE_BACKEND:
            raise wrong_backend_error(engine)
        self.token = token or 0
        if token is None and (left := milliseconds / 1000 - (time.monotonic() - began)) > 0:
            await asyncio.sleep(left)  # a lease of this name is in the way, and nothing in the server waits for that
        return token is not None

    async def wait_lock(self, engine: Engine, sql: LockSql, milliseconds: int, *, quiet: bool) -> bool:
        if isinstance(sql, TokenSql):
            return await self.lock_with_token(engine, sql, milliseconds)
        limit = milliseconds * len(sql.keys) / 1000 + WAIT_GRACE
        if not quiet:
            try:
                await self.ask(engine, sql.wait_text, sql.wait_args(milliseconds), limit=limit, prepare=False)
            except Exception as error:
                if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
                    return False
                raise
            return True
        self.begin(limit)
        try:
            return await self.run_script(engine, sql.quiet_wait(milliseconds))
        finally:
            self.since = 0.0

    async def run_script(self, engine: Engine, wait: str) -> bool:
        if not has_listeners(engine):
            return await self.wire.script(f"{wait}; {QUIET_CHECK}")

        def run(connection: Connection) -> bool:
            connection.exec_driver_sql(wait)
            return connection.exec_driver_sql(QUIET_CHECK).first() is not None

        return await self._through(engine, run)

    async def through(self, engine: Engine, run: Callable[[Connection], R], *, limit: float) -> R:
        """Run sync code on this session by way of SQLAlchemy."""
        self.begin(limit)
        try:
            return await self._through(engine, run)
        finally:
            self.since = 0.0

    async def _through(self, engine: Engine, run: Callable[[Connection], R]) -> R:
        def call() -> R:
            with sqlalchemy_connection(engine, self.dbapi_connection) as connection:
                return run(connection)

        return await in_greenlet(call)

    async def unlock(self, engine: Engine, sql: LockSql) -> bool:
        if self.probing is not None:  # this driver takes one statement at a time
            await asyncio.wait({self.probing}, timeout=RELEASE_BUDGET)
        if self.probing is not None:
            self.cut()  # the watcher's question has no answer either, and ends with the connection
            await asyncio.wait({self.probing})
        if not self.direct or has_listeners(engine):
            return bool(await self.ask(engine, sql.unlock_text, sql.unlock_args, limit=RELEASE_BUDGET))
        self.limit, self.since = RELEASE_BUDGET, time.monotonic()
        try:
            return bool((await self.wire.query(sql.unlock_text, sql.unlock_args, prepare=True))[0])
        finally:
            self.since = 0.0

    def probe(self, hold: Hold[Any]) -> None:
        async def ask() -> None:
            self.begin(STATEMENT_BUDGET)
            try:
                await self.wire.ping()
            except Exception:
                self.died("cut off")
            else:
                hold.in_doubt = False
            finally:
                self.since = 0.0
                self.probing = None

        def start() -> None:
            if self.hold is hold and self.probing is None:
                self.probing = asyncio.ensure_future(ask())
                keep(self.probing)

        on_loop(self.loop, start)

    async def as_user_connection(self, engine: Engine, async_engine: AsyncEngine) -> AsyncConnection:
        """Make the session an ordinary AsyncConnection for the user's code: transactions, and the site's own limits."""

        def as_user_connection() -> Any:
            self.begin(RELEASE_BUDGET)
            try:
                with sqlalchemy_connection(engine, self.dbapi_connection) as connection:
                    server.put_back(connection, self.facts)
            finally:
                self.since = 0.0
            engine.dialect.reset_isolation_level(self.dbapi_connection)
            return wrap_dbapi(engine, self.dbapi_connection, reconnects=False)

        from sqlalchemy.ext.asyncio import AsyncConnection

        self.lent = True
        connection = await in_greenlet(as_user_connection)
        return AsyncConnection(async_engine, connection)

    async def close_lent(self, connection: AsyncConnection) -> None:
        """End the AsyncConnection that was lent; the session below it lives on for the unlock."""
        self.begin(RELEASE_BUDGET)  # what is open is rolled back
        try:
            with contextlib.suppress(Exception):  # a dead connection cannot roll back, and need not
                await connection.close()
        finally:
            self.since = 0.0

    async def reclaim(self, engine: Engine) -> None:
        """End what the user's code left open, before the unlock."""

        def back() -> None:
            engine.dialect.do_rollback(self.dbapi_connection)
            engine.dialect.set_isolation_level(self.dbapi_connection, "AUTOCOMMIT")

        self.begin(RELEASE_BUDGET)
        try:
            await in_greenlet(back)
        finally:
            self.since = 0.0


class AsyncCallerConnection(CallerConnection, AsyncLockConnection):
    """The caller's own connection, for one lock. Our statements run between its transactions, in autocommit."""

    def let_go(self, *, listed: bool = False) -> None:
        if not self.closed and hasattr(self.wire.driver, "remove_termination_listener"):
            self.wire.driver.remove_termination_listener(self._listener)
        super().let_go(listed=listed)

    def invalidate(self) -> None:
        if self.connection.dialect.has_terminate:
            self.connection.invalidate()
        else:  # this dialect closes by awaiting, if only in form: the driver's connection is closed already
            at_once(self.connection.invalidate)

    @classmethod
    async def of(cls, connection: AsyncConnection, limit: float) -> AsyncCallerConnection:
        """Borrow a connection that is outside a transaction; its first question may take `limit` seconds."""
        raw = await connection.get_raw_connection()
        inner: Any = connection.sync_connection
        dbapi_connection: Any = raw.dbapi_connection
        wire = driver_connection_for(connection.dialect.driver, ASYNC_DRIVERS, "async")(
            connection.dialect.get_driver_connection(dbapi_connection)
        )
        cls.fit(inner, dbapi_connection, wire)
        facts = cls.known_facts(inner, dbapi_connection)
        session = cls(inner, dbapi_connection, wire, facts or server.UNKNOWN)
        if facts is None:
            try:
                facts = server.ServerInfo.of(await session.ask_row(server.READ_FACTS, limit), set_up=False)
            except BaseException:
                session.forgo()
                raise
            session.know(facts)
            cls.learn(inner, dbapi_connection, facts)
        return session

    async def ask(
        self, engine: Engine, text: str, args: Sequence[Any], *, limit: float = STATEMENT_BUDGET, prepare: bool = True
    ) -> Any:
        return (await self.ask_row(text, limit, args))[0]

    async def ask_row(self, text: str, limit: float, args: Sequence[Any] = ()) -> Any:
        """Run a statement in autocommit and return its one row."""
        self.expect_attached()
        self.begin(limit)
        before = await self.wire.set_autocommit(True)
        try:
            return await self.wire.query(text, args)
        except Exception as error:
            if told := text_error(error, args, lambda: self.wire.driver):
                raise told from error
            raise
        finally:
            self.since = 0.0
            with contextlib.suppress(Exception):  # the statement's own error says more; a dead connection has no mode
                await self.wire.set_autocommit(before)

    async def run_script(self, engine: Engine, wait: str) -> bool:
        self.expect_attached()
        before = await self.wire.set_autocommit(True)
        try:
            return await self.wire.script(f"{wait}; {QUIET_CHECK}")
        finally:
            with contextlib.suppress(Exception):
                await self.wire.set_autocommit(before)
