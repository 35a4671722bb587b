"""A connection that holds a lock: its statements, and how its end is noticed.

It is made like the user's and belongs to no pool, so that `engine.dispose()` does not end a hold and a lock never comes back to
the user's pool. It is in autocommit from the first statement to the last, and so never idle in a transaction.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from abc import ABC, abstractmethod
from logging import INFO
from typing import TYPE_CHECKING, Any, Protocol

from pgfence._connections.connect import R, keep_alive, open_sqlalchemy_connection, wrap_dbapi, wrong_backend_error
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
    from pgfence._holds.carriers import Carrier
    from pgfence._holds.hold import Hold
    from pgfence._sql.advisory import LockSql
    from pgfence._sql.params import Row
    from pgfence.errors import LossReason

STATEMENT_BUDGET = 30.0
"""Seconds after which a statement is given up on a server that does not respond, unless the caller's deadline is earlier."""
RELEASE_BUDGET = 5.0
"""Seconds for a statement whose caller does not wait: a release, a try, and what ends after the caller's deadline."""
WAIT_GRACE = 2.0
PROBE_EVERY = 10.0
WARM_FOR = 30.0


class ConnectionGoneError(Exception):
    """The connection ended under a statement that cannot have left a lock behind. Never reaches a caller."""


class Turn(Protocol):
    """A lock, as far as it is needed here."""

    def acquire(self, blocking: bool, /) -> bool: ...
    def release(self) -> None: ...


class LockConnection(ABC):
    """One connection of ours, or one that the caller lent; whoever needs it runs its statements, one at a time.

    A cancel in mid-statement reaches the driver; what the server did is unknown then, and whoever asked closes the session.
    Closing is a plain call of the driver's that waits for nothing, so it works while a cancel unwinds and from the watcher.
    """

    ours = True
    """False: the caller's own connection. We set nothing on it, close it only when a lock would stay on it, and keep it out
    of the roster."""

    carrier: Carrier
    turn: Turn
    """The watcher's question, and the unlock: one at a time."""

    def __init__(self, dbapi_connection: DBAPIConnection, driver: DriverConnection, facts: server.ServerInfo) -> None:
        # No engine: a connection must not keep alive what its pool goes with.
        self.dbapi_connection = dbapi_connection
        self.driver = driver
        self.learn_facts(facts)
        self.hold: Hold[LockConnection] | None = None
        self.in_user_hands = False
        """The user's code runs on it (`connect()`): it may be told dead, but no statement of ours goes in between."""
        self.dead: LossReason | None = None
        self.closed = False
        self.close_after_use = False
        """Not to be kept after its use."""
        self.uses_slot = True
        """Whether it is one of the `max_lock_connections`."""
        self.dup = -1
        self.socket: SocketId | None = None
        """Which socket it speaks through."""
        self.statement_started = 0.0
        """When the running statement was sent; 0: none runs."""
        self.limit = STATEMENT_BUDGET
        self.idle_since = time.monotonic()
        self.last_probe = self.idle_since
        self.handoffs = 0
        self.granted_at = 0.0
        self.token = 0
        """What came with the last grant, of a lock that brings one."""
        self.on_death: Callable[[Hold[LockConnection] | None], object] | None = None

    def learn_facts(self, facts: server.ServerInfo) -> None:
        """Store the facts about the server and this session."""
        self.pid = facts.backend_pid
        self.slice = slice_for(facts.deadlock_timeout)
        if 0 < facts.statement_timeout < 2 * self.slice:
            self.slice = 0.0  # the site would end a wait in the server: poll instead
        self.facts = facts

    direct = True
    """Statements may go straight to the driver's connection as it is."""
    is_in_transaction = False
    """Whether the lock cannot be given back at this moment."""

    def is_expired(self, now: float) -> bool:
        """Whether it is not worth keeping, idle as it is."""
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
        """Tell everybody that the session is over: on the watcher's thread, or wherever it was found out."""
        if self.dead is None:
            self.dead = reason
        # The hold first: its listeners learn of the loss before the connection is taken away from its pool.
        hold = self.hold
        lost = hold is not None and hold.lose(self.dead)
        if self.on_death is not None:
            self.on_death(hold if lost else None)

    def tick(self, now: float, paused: bool) -> None:
        """Once a second, on the watcher's thread: cut what is overdue, ask for what is in doubt."""
        if self.statement_started and paused:
            self.statement_started = now  # the answer may lie in the socket already: we, not the server, stood still
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
        """Ask the server whether the session lives, without waiting for the answer here."""

    def abort(self) -> None:
        """Give up on a server that does not answer: the statement under way fails, the hold is lost."""
        self.dead = self.dead or "cut off"
        MONITOR.shut_down(self)
        self.on_connection_lost("cut off")

    def close(self) -> None:
        """End the connection. Only for its owner: never while another thread is in a statement on it."""
        PROCESS.notice_fork()  # in a forked child this must not end the session of the parent
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
        """Note that a statement is sent. Its end is `since = 0.0`: a call there could be interrupted, and the note would stay."""
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
        """Run a statement of ours and return the first column of its one row."""
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
        """Run a statement of ours and return its first row, or None where it has none."""
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
        if has_listeners(engine):  # hooks, tracing and echo are to see our statements too
            return await self._run(engine, lambda c: c.exec_driver_sql(text, tuple(args)).first())
        # Past SQLAlchemy, which costs two to three times as much for a statement that takes 30 microseconds.
        return await self.driver.fetch(text, args, prepare=prepare)

    async def run_with_sqlalchemy(self, engine: Engine, run: Callable[[Connection], R], *, limit: float) -> R:
        """Run sync code on this session by way of SQLAlchemy."""
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
        args = (self.pid, *sql.unlock_args)
        if self.direct and not has_listeners(engine):  # the short way: each layer costs, and this is the common case
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
        """Take a lock whose grant brings a token, which is kept in `token`; 0 milliseconds do not wait.

        None: others have tickets, and it was to be taken unless they do.
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
                # The session lock came before a commit that failed, or not at all.
                await self.fetch_value(engine, sql.unlock_text, sql.unlock_args, limit=RELEASE_BUDGET)
        if token == STRANGE_BACKEND:
            raise wrong_backend_error(engine)
        self.token = token or 0
        if token is None and (left := milliseconds / 1000 - (time.monotonic() - began)) > 0:
            await self.carrier.sleep(left)  # a lease of this name blocks it, and nothing in the server waits for that
        return token is not None

    async def run_script(self, engine: Engine, script: tuple[str, ...], *, limit: float) -> bool:
        """Run statements as one and return whether the last one returned a row."""
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
        """Wait until the watcher's question has its answer, or end it with the connection; then it is the unlock's turn."""

    # ------------------------------------------------------------ lent to the user's code

    async def as_user_connection(self, engine: Engine) -> Connection:
        """Make the session an ordinary Connection for the user's code: transactions, and the site's own limits."""

        def lend() -> Connection:
            with open_sqlalchemy_connection(engine, self.dbapi_connection) as connection:
                server.put_back(connection, self.facts)
            engine.dialect.reset_isolation_level(self.dbapi_connection)
            return wrap_dbapi(engine, self.dbapi_connection, reconnects=False)

        self.in_user_hands = True
        return await self._call(lend)

    async def close_lent(self, connection: Connection) -> None:
        """End the Connection that was lent; the session below it lives on for the unlock. What is open is rolled back."""
        await self._call(connection.close)

    async def reclaim(self, engine: Engine) -> None:
        """End what the user's code left open, before the unlock."""

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


def has_listeners(engine: Engine) -> bool:
    """Say whether anybody wants to see our statements: hooks, tracing, echo."""
    if engine.logger.isEnabledFor(INFO):
        return True
    if not engine._has_events:
        return False
    dispatch = engine.dispatch
    return bool(dispatch.before_cursor_execute or dispatch.after_cursor_execute)


_OPEN: weakref.WeakSet[LockConnection] = weakref.WeakSet()
_LEAKED_AFTER_FORK: list[LockConnection] = []


def _forget_in_child() -> None:
    """Cut a forked child off: its goodbye would end the parent's session, its copy of the socket keep a dead parent's lock."""
    sessions = list(_OPEN)
    _LEAKED_AFTER_FORK.extend(
        sessions
    )  # finalising a driver's connection here could still speak, warn or touch the loop
    null = os.open(os.devnull, os.O_RDWR)
    for session in sessions:
        with contextlib.suppress(Exception):
            fd = session.driver.fileno()
            if session.socket == identify_socket(
                fd
            ):  # the child may have closed it long ago, and something else has its number
                os.dup2(null, fd)
        session.dup = -1
    os.close(null)
    _OPEN.clear()
    MONITOR.forget()


PROCESS.renew_in_child(_forget_in_child)
