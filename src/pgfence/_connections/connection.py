"""A connection that holds a lock: its statements, and how a loss of the connection is detected.

Unless it is the caller's own, it is opened with the engine's settings and belongs to no pool of the application, so that
`engine.dispose()` does not end a hold. Until `connect()` lends it, it is in autocommit, so it is never idle in a transaction.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from pgfence._connections.connect import (
    R,
    has_listeners,
    keep_alive,
    open_sqlalchemy_connection,
    wrap_dbapi,
    wrong_backend_error,
)
from pgfence._holds.wait_plan import slice_for
from pgfence._process.lifecycle import PROCESS
from pgfence._process.monitor import HAS_HANGUP, MONITOR, SocketId, identify_socket
from pgfence._sql import server
from pgfence._sql.encoding import text_error
from pgfence._sql.sqlstate import LOCK_NOT_AVAILABLE, SERIALIZATION_FAILURE, sqlstate_of
from pgfence._sql.token import RETRIES, ROW_WAIT, STRANGE_BACKEND, TokenSql

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Engine
    from sqlalchemy.engine.interfaces import DBAPIConnection

    from pgfence._connections.drivers import DriverConnection
    from pgfence._holds.carriers import Carrier, WakeEvent
    from pgfence._holds.hold import Hold
    from pgfence._sql.advisory import LockSql
    from pgfence._sql.params import Row
    from pgfence.errors import LossReason

STATEMENT_BUDGET = 30.0
"""Seconds that a statement may take on a server that does not respond, unless the caller's deadline is earlier."""
RELEASE_BUDGET = 5.0
"""The same limit for a statement that must not delay the caller, such as a release, a try, or work after the deadline."""
WAIT_GRACE = 2.0
PROBE_EVERY = 10.0
WARM_FOR = 30.0


class ConnectionGoneError(Exception):
    """The connection was lost during a statement that cannot have left a lock behind. A caller never gets this error."""


class Turn(Protocol):
    """The methods of the mutex that gives either the monitor's probe or the unlock the turn to use the connection."""

    def acquire(self, blocking: bool, /) -> bool: ...
    def release(self) -> None: ...


class LockConnection(ABC):
    """A connection that pgfence opened, or borrowed from the caller. Its user runs statements on it, one at a time.

    Cancelling a statement interrupts the driver, and the outcome on the server is then unknown, so the caller closes the
    connection. Closing is a plain driver call that never waits, so it works during cancellation and from the monitor's thread.
    """

    ours = True
    """False for the caller's own connection, which keeps its settings, is closed only if a lock would stay on it, and is not in
    the pool."""

    carrier: Carrier
    turn: Turn
    """The mutex that keeps the monitor's probe and the unlock from running at the same time."""

    def __init__(self, dbapi_connection: DBAPIConnection, driver: DriverConnection, facts: server.ServerInfo) -> None:
        # The connection holds no reference to the engine, which must be collectable while a connection of its pool is alive.
        self.dbapi_connection = dbapi_connection
        self.driver = driver
        self.learn_facts(facts)
        self.hold: Hold[LockConnection] | None = None
        self.in_user_hands = False
        """Whether the caller's code uses the connection (`connect()`). pgfence may mark it as dead, but sends nothing on it."""
        self.dead: LossReason | None = None
        self.closed = False
        self.close_after_use = False
        self.uses_slot = True
        """Whether the connection counts towards `max_lock_connections`."""
        self.dup = -1
        self.socket: SocketId | None = None
        """The identity of the connection's socket."""
        self.statement_started = 0.0
        """When the running statement was sent; 0 if none is running."""
        self.limit = STATEMENT_BUDGET
        self.idle_since = time.monotonic()
        self.last_probe = self.idle_since
        self.handoffs = 0
        self.granted_at = 0.0
        self.token = 0
        """The token of the last grant, for locks with tokens."""
        self.on_death: Callable[[Hold[LockConnection] | None], object] | None = None
        self.alarm: WakeEvent | None = None
        """The event on which its user sleeps, which a loss of the connection sets."""

    def learn_facts(self, facts: server.ServerInfo) -> None:
        self.pid = facts.backend_pid
        self.slice = slice_for(facts.deadlock_timeout)
        if 0 < facts.statement_timeout < 2 * self.slice:
            self.slice = 0.0  # the server's statement_timeout would end a wait in the server, so poll instead
        self.facts = facts

    direct = True
    """Whether statements may be sent directly over the driver's connection."""
    is_in_transaction = False
    """Whether an open transaction currently blocks the release of the lock."""

    def is_expired(self, now: float) -> bool:
        """Return whether an idle connection must be closed."""
        return self.dead is not None or now - self.idle_since > WARM_FOR

    def watch(self) -> None:
        fd = self.driver.fileno()
        if fd >= 0:
            self.socket = identify_socket(fd)
            if self.ours:
                keep_alive(fd)
        MONITOR.watch(self, fd)
        _OPEN.add(self)

    def on_connection_lost(self, reason: LossReason) -> None:
        """Mark the connection as dead and notify the hold and the pool. May run on the monitor's thread."""
        if self.dead is None:
            self.dead = reason
        if (alarm := self.alarm) is not None:
            alarm.set()
        # The hold is notified first, because its listeners must run before the pool reuses the connection's slot.
        hold = self.hold
        lost = hold is not None and hold.lose(self.dead)
        if self.on_death is not None:
            self.on_death(hold if lost else None)

    def tick(self, now: float, paused: bool) -> None:
        """Abort an overdue statement, and probe a hold after a pause or, where hang-ups are not reported, every 10 s."""
        if self.statement_started and paused:
            # After a pause of this process, the response may already be in the socket, so the statement gets the full time again.
            self.statement_started = now
        elif self.statement_started and now - self.statement_started > self.limit:
            self.abort()
        hold = self.hold
        if hold is None or self.in_user_hands or self.dead or not self.ours:
            return
        if paused:
            hold.in_doubt = True
        if paused or (not HAS_HANGUP and now - self.last_probe > PROBE_EVERY):
            self.last_probe = now
            self.probe(hold)

    @abstractmethod
    def probe(self, hold: Hold[LockConnection]) -> None:
        """Query the server in the background to check whether the session is alive."""

    def abort(self) -> None:
        """Give up on a server that does not respond, so that the running statement fails and the hold is lost."""
        self.dead = self.dead or "cut off"
        MONITOR.shut_down(self)
        self.on_connection_lost("cut off")

    def close(self) -> None:
        """Close the connection. Only its current user may call this, and never while another thread runs a statement on it."""
        PROCESS.notice_fork()  # a forked child must not end its parent's session
        if self.closed:
            return
        self.dead = self.dead or "killed"
        try:
            self.unwatch()
        finally:
            with contextlib.suppress(Exception):
                self.driver.close()
        self.closed = True

    def unwatch(self) -> None:
        try:
            MONITOR.unwatch(self)
        finally:
            _OPEN.discard(self)

    def begin(self, limit: float) -> None:
        """Record that a statement is being sent, which may take at most `limit` seconds."""
        # The end is recorded by an assignment, `statement_started = 0.0`: a method call could be interrupted before it ran.
        self.limit = limit
        self.statement_started = time.monotonic()

    # ------------------------------------------------------------ statements

    async def fetch_value(
        self,
        engine: Engine,
        text: str,
        args: Sequence[object],
        *,
        limit: float = STATEMENT_BUDGET,
        prepare: bool = True,
    ) -> Any:
        """Run a statement and return the first column of its only row."""
        return (await self.fetch_row(engine, text, args, limit=limit, prepare=prepare))[0]

    async def fetch_row(
        self,
        engine: Engine,
        text: str,
        args: Sequence[object],
        *,
        limit: float = STATEMENT_BUDGET,
        prepare: bool = True,
    ) -> Any:
        """Run a statement and return its first row, or None if it returns no rows."""
        self.begin(limit)
        try:
            return await self._send(engine, text, args, prepare)
        except Exception as error:
            if told := text_error(error, args, lambda: self.driver.raw):
                raise told from error
            raise
        finally:
            self.statement_started = 0.0

    async def _send(self, engine: Engine, text: str, args: Sequence[object], prepare: bool) -> Row | None:
        if has_listeners(engine):  # event hooks, tracing and echo must also get these statements
            return await self._run(engine, lambda c: c.exec_driver_sql(text, tuple(args)).first())
        # The driver is called directly, because a statement of 30 µs would take two to three times as long through SQLAlchemy.
        return await self.driver.fetch(text, args, prepare=prepare)

    async def run_with_sqlalchemy(self, engine: Engine, run: Callable[[Connection], R], *, limit: float) -> R:
        """Run synchronous code on this connection through SQLAlchemy."""
        self.begin(limit)
        try:
            return await self._run(engine, run)
        finally:
            self.statement_started = 0.0

    async def _run(self, engine: Engine, run: Callable[[Connection], R]) -> R:
        def call() -> R:
            with open_sqlalchemy_connection(engine, self.dbapi_connection) as connection:
                return run(connection)

        return await self.carrier.call(call)

    async def try_lock(self, engine: Engine, sql: LockSql, limit: float) -> bool:
        if isinstance(sql, TokenSql):
            return bool(await self.lock_with_token(engine, sql, 0))
        args = (self.pid, *sql.try_args)
        if self.direct and not has_listeners(engine):  # a shortcut for the common case, because every layer costs time
            self.limit, self.statement_started = limit, time.monotonic()
            try:
                granted = (await self.driver.fetch(sql.try_text, args, prepare=True))[0]
            finally:
                self.statement_started = 0.0
        else:
            granted = await self.fetch_value(engine, sql.try_text, args, limit=limit)
        if granted is None:
            raise wrong_backend_error(engine)
        return bool(granted)

    async def lock_with_token(
        self, engine: Engine, sql: TokenSql, milliseconds: int, *, unless_queued: bool = False
    ) -> bool | None:
        """Acquire a lock with a token, and store the token in `token`. With 0 milliseconds, do not wait for the lock.

        Return None if `unless_queued` is set and other waiters have tickets.
        """
        began, limit = time.monotonic(), milliseconds / 1000 + ROW_WAIT + WAIT_GRACE
        text, args = sql.lock_text, sql.lock_args(self.pid, milliseconds)
        if unless_queued:
            text, args = sql.lock_unless_queued, (*args, sql.base)
        token = None
        for failures in range(RETRIES + 1):
            try:
                row = await self.fetch_row(engine, text, args, limit=limit)
                if row is None:
                    return None
                token = row[0]
                break
            except Exception as error:
                state = sqlstate_of(error)
                if state == LOCK_NOT_AVAILABLE:
                    break
                if state != SERIALIZATION_FAILURE or failures == RETRIES:
                    raise
                # The transaction failed at COMMIT, possibly after the session lock was taken, so release the lock before
                # retrying.
                await self.fetch_value(engine, sql.unlock_text, sql.unlock_args, limit=RELEASE_BUDGET)
        if token == STRANGE_BACKEND:
            raise wrong_backend_error(engine)
        self.token = token or 0
        if token is None and (left := milliseconds / 1000 - (time.monotonic() - began)) > 0:
            await self.carrier.sleep(left)  # a lease blocks the lock, and no statement can wait for a lease
        return token is not None

    async def run_script(self, engine: Engine, script: tuple[str, ...], *, limit: float) -> bool:
        """Run several statements at once, and return whether the last one returned a row."""
        self.begin(limit)
        try:
            return await self._send_script(engine, script)
        finally:
            self.statement_started = 0.0

    async def _send_script(self, engine: Engine, script: tuple[str, ...]) -> bool:
        if not has_listeners(engine):
            return await self.driver.execute_script("; ".join(script))

        def run(connection: Connection) -> bool:
            rows = [connection.exec_driver_sql(text) for text in script]
            return rows[-1].first() is not None

        return await self._run(engine, run)

    async def unlock(self, engine: Engine, sql: LockSql) -> bool:
        if not self.turn.acquire(False):
            await self.wait_for_probe()
        try:
            if not self.direct or has_listeners(engine):
                return bool(await self.fetch_value(engine, sql.unlock_text, sql.unlock_args, limit=RELEASE_BUDGET))
            self.limit, self.statement_started = RELEASE_BUDGET, time.monotonic()
            try:
                return bool((await self.driver.fetch(sql.unlock_text, sql.unlock_args, prepare=True))[0])
            finally:
                self.statement_started = 0.0
        finally:
            self.turn.release()

    @abstractmethod
    async def wait_for_probe(self) -> None:
        """Wait until a running probe has finished, or abort the connection. It is then the caller's turn to unlock."""

    # ------------------------------------------------------------ lent to the caller's code

    async def as_user_connection(self, engine: Engine) -> Connection:
        """Turn this into an ordinary Connection for the caller's code, with transactions and the session's own time limits."""

        def lend() -> Connection:
            with open_sqlalchemy_connection(engine, self.dbapi_connection) as connection:
                server.put_back(connection, self.facts)
            engine.dialect.reset_isolation_level(self.dbapi_connection)
            return wrap_dbapi(engine, self.dbapi_connection, reconnects=False)

        self.in_user_hands = True
        return await self._call(lend)

    async def close_lent(self, connection: Connection) -> None:
        """Roll back open work, and close the Connection that was lent. Its session stays open for the unlock."""
        await self._call(connection.close)

    async def reclaim(self, engine: Engine) -> None:
        """Roll back what the caller's code left open, before the unlock."""

        def reclaim() -> None:
            self.dbapi_connection.rollback()
            engine.dialect.set_isolation_level(self.dbapi_connection, "AUTOCOMMIT")

        await self._call(reclaim)

    async def _call(self, work: Callable[[], R]) -> R:
        self.begin(RELEASE_BUDGET)
        try:
            return await self.carrier.call(work)
        finally:
            self.statement_started = 0.0


_OPEN: weakref.WeakSet[LockConnection] = weakref.WeakSet()
_LEAKED_AFTER_FORK: list[LockConnection] = []


def _forget_in_child() -> None:
    """Detach inherited connections in a forked child."""
    # Closing them would send Terminate on the parent's session, and keeping the sockets open would keep the parent's locks alive
    # after the parent dies.
    sessions = list(_OPEN)
    # They are never finalised, because a driver's finaliser could still use the socket, warn, or use the event loop.
    _LEAKED_AFTER_FORK.extend(sessions)
    null = os.open(os.devnull, os.O_RDWR)
    for session in sessions:
        with contextlib.suppress(Exception):
            fd = session.driver.fileno()
            # The child may have closed the socket before, and reused its number.
            if session.socket == identify_socket(fd):
                os.dup2(null, fd)
        session.dup = -1
    os.close(null)
    _OPEN.clear()
    MONITOR.forget()


PROCESS.renew_in_child(_forget_in_child)
