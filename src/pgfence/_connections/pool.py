"""The pool of one engine's lock connections, with its limit, its waiters, and its idle connections."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Protocol

from pgfence._connections.caller_connection import CallerConnection
from pgfence._connections.connect import open_connection
from pgfence._connections.connection_async import AsyncCallerConnection, AsyncLockConnection
from pgfence._connections.connection_sync import SyncCallerConnection, SyncLockConnection
from pgfence._connections.drivers import choose_driver_connection
from pgfence._connections.lock_table import LockTable
from pgfence._connections.opening import PendingConnection, close_at_exit, close_with_loop, start_task, start_thread
from pgfence._process import threads
from pgfence._process.lifecycle import MUTEX, PROCESS, on_disposed
from pgfence._process.monitor import MONITOR
from pgfence._sql import server
from pgfence._sql.addresses import describe_server
from pgfence._sql.errors import LOCK_OUTCOME_UNKNOWN
from pgfence.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine

    from pgfence._connections.connection import LockConnection
    from pgfence._holds.carriers import CancelEvent, Carrier
    from pgfence._holds.hold import Hold
    from pgfence.config import Config

WARM = 5
OPEN_BUDGET = 5.0
"""The least limit for opening a connection, even if the caller's timeout is shorter, unless the connection replaces a lost one."""
OPEN_LIMIT = 30.0


class Borrower(Protocol):
    """An object that receives a connection and always returns it."""

    session: LockConnection | None


class PoolWaiter:
    """A place in the queue for a connection."""

    __slots__ = ("may_open", "opening", "session", "wake")

    def __init__(self) -> None:
        self.session: LockConnection | None = None
        """The connection that the waiter received."""
        self.may_open = False
        """Whether the waiter has a slot to open a connection."""
        self.opening: PendingConnection | None = None
        """The connection that is being opened for the waiter and has taken over the slot."""
        self.wake: Callable[[], object] = lambda: None

    @property
    def served(self) -> bool:
        return self.may_open or self.session is not None


class PoolState:
    """The state of the pool, without I/O. The caller holds the mutex."""

    def __init__(self, limit: int, warm: int = WARM) -> None:
        self.limit = limit
        self.max_idle = warm
        self.open = 0
        """The number of slots that connections use, open or being opened."""
        self.idle: list[LockConnection] = []
        self._waiting: deque[PoolWaiter] = deque()

    def serve_or_enqueue(self, turn: PoolWaiter) -> PoolWaiter:
        """Give a waiter an idle connection, a slot to open one, or a place in the queue, and return the waiter."""
        if self.pop_idle(turn):
            return turn
        if self.open < self.limit and not self._waiting:  # earlier waiters come first
            self.open += 1
            turn.may_open = True
        else:
            self._waiting.append(turn)
        return turn

    def take_slot(self) -> bool:
        """Take a slot for a connection that is already open. Return False if all slots are in use."""
        if self.open >= self.limit:
            return False
        self.open += 1
        return True

    def pop_idle(self, user: Borrower) -> bool:
        """Give `user` the most recently used idle connection if that is alive. Return whether `user` received a connection."""
        if not self.idle or self.idle[-1].dead is not None:  # `take_expired` removes a dead one
            return False
        user.session = self.idle[-1]  # an interrupt between this line and the next must not lose the connection
        self.idle.pop()
        return True

    def checkin(self, session: LockConnection) -> bool:
        """Return a connection to the pool. If the result is False, the caller closes the connection and calls `note_closed`."""
        if session.dead or session.close_after_use:
            return False
        if self._waiting:
            turn = self._waiting.popleft()
            turn.session = session
            turn.wake()
            return True
        if len(self.idle) >= self.max_idle:
            return False
        session.idle_since = time.monotonic()
        self.idle.append(session)
        return True

    def note_closed(self) -> None:
        """Record that a connection was closed or could not be opened, and pass its slot to the next waiter."""
        self.open -= 1
        if self._waiting and self.open < self.limit:
            self.open += 1
            turn = self._waiting.popleft()
            turn.may_open = True
            turn.wake()

    def cancel_wait(self, turn: PoolWaiter) -> None:
        """Remove a waiter from the queue, if it is still there."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(turn)

    def take_expired(self, now: float) -> list[LockConnection]:
        """Remove and return the connections that were idle for too long or are dead."""
        expired = [s for s in self.idle if s.is_expired(now)]
        self.idle[:] = [s for s in self.idle if s not in expired]
        return expired

    def take_all_idle(self) -> list[LockConnection]:
        idle, self.idle[:] = list(self.idle), []
        return idle


class LockPool:
    """The lock connections of one engine, for the threads of this process or for the tasks of one event loop."""

    def __init__(
        self,
        engine: Engine,
        config: Config,
        carrier: Carrier,
        on_death: Callable[[Hold[LockConnection] | None], object],
        *,
        any_pooler: bool = False,
        warm: int = WARM,
    ) -> None:
        self._driver_kind = choose_driver_connection(engine.dialect)
        is_async = engine.dialect.is_async
        self._kind: type[LockConnection] = AsyncLockConnection if is_async else SyncLockConnection
        self._callers_kind: type[CallerConnection] = AsyncCallerConnection if is_async else SyncCallerConnection
        self.carrier = carrier
        self.engine = engine
        self.config = config
        self.pid = PROCESS.pid
        self.any_pooler = any_pooler
        """Whether any pooler is accepted, because nothing depends on the server session."""
        self.state: PoolState = PoolState(config.max_lock_connections, warm)
        self.generation = 0
        """Incremented by every `engine.dispose()`. Connections of an earlier generation are not kept."""
        self.sessions: set[LockConnection] = set()
        self.stuck = 0
        """The number of abandoned openings that have not ended yet."""
        self._opening_began = 0.0
        self.on_death = on_death
        self.lock_table = LockTable()
        self._close_with_loop = close_with_loop(self.sessions) if engine.dialect.is_async else None
        """The generator that closes connections with the event loop; started with the first opening."""
        on_disposed(engine, self._on_engine_disposed)
        weakref.finalize(engine.dialect, close_at_exit, weakref.ref(engine.dialect), self.sessions)
        MONITOR.keep(self)

    async def checkout(
        self, left: float, keys: int = 1, *, again: bool = False, cancel: CancelEvent | None = None
    ) -> LockConnection | None:
        """Return an idle or a new connection or, if `max_lock_connections` are in use, the next free connection.

        Return None if no connection was free within `left` seconds. `keys` is the number of keys that the connection will hold.
        With `again`, the connection replaces a lost one, so that opening it must not take much longer than the time left.
        """
        turn = PoolWaiter()
        try:
            event = None
            with MUTEX:
                if not self.state.serve_or_enqueue(turn).served:
                    event = self.carrier.make_event()
                    turn.wake = event.set
            if event is not None:
                await event.wait(left, cancel)
                with MUTEX:
                    self.state.cancel_wait(turn)
                if not turn.served:
                    return None
            if turn.session is None:
                await self._open(turn, max(1.0 if again else OPEN_BUDGET, min(left, OPEN_LIMIT)), keys, cancel)
            return turn.session
        except BaseException:
            self._give_up(turn)
            raise

    async def checkout_for_query(self) -> LockConnection:
        """Return a connection for a query, either an idle one, or one outside the limit that is closed after use."""
        turn = PoolWaiter()
        try:
            with MUTEX:
                self.state.pop_idle(turn)
            if turn.session is None:
                await self._open(turn, OPEN_BUDGET, 0)
            assert turn.session is not None
            return turn.session
        except BaseException:
            self._give_up(turn)
            raise

    def _give_up(self, turn: PoolWaiter) -> None:
        """Give up what a waiter has: its place in the queue, its slot, or its connection."""
        opening = turn.opening
        with MUTEX:
            self.state.cancel_wait(turn)
            if opening is None and turn.may_open:
                turn.may_open = False
                self.state.note_closed()
        session = turn.session or (self._abandon(opening, late=False) if opening is not None else None)
        if session is not None:
            self.checkin(session)

    async def _open(self, turn: PoolWaiter, budget: float, keys: int, cancel: CancelEvent | None = None) -> None:
        """Open a connection in a separate thread or task, so that the caller can time out, or be interrupted or cancelled."""
        self.begin_opening()
        opening = turn.opening = PendingConnection(self.carrier.make_event(), counts=keys > 0)
        (start_task if self.engine.dialect.is_async else start_thread)(opening, self._open_for)
        await opening.event.wait(budget, cancel)
        turn.session = self._abandon(opening, late=True)
        if turn.session is None:
            where = describe_server(self.engine)
            raise opening.error or UnreachableError(
                f"cannot connect to {where} within {budget:g} s. {LOCK_OUTCOME_UNKNOWN}"
            )
        self.lock_table.check_room(keys)

    def _abandon(self, opening: PendingConnection, *, late: bool) -> LockConnection | None:
        """Stop waiting for a connection, and return it if it has been opened. A call for an abandoned opening returns None.

        `late` means after a timeout, and the opening then counts as stuck.
        """
        with MUTEX:
            if opening.abandoned:  # if it is opened later, its opener returns it to the pool
                return None
            if not opening.done:
                opening.abandoned, opening.late = True, late
                self.stuck += late
                if opening.uses_slot:
                    self.state.note_closed()
        return opening.session

    async def _open_for(self, opening: PendingConnection) -> None:
        session: LockConnection | None = None
        error: Exception | None = UnreachableError(
            f"opening a connection was interrupted: try again. {LOCK_OUTCOME_UNKNOWN}"
        )
        generation = self.generation
        try:
            if self._close_with_loop is not None:
                entered, self._close_with_loop = self._close_with_loop, None
                self._entered = entered  # keeps the generator alive until the event loop ends
                await anext(entered)
            session = await self._open_unshared()
        except Exception as caught:
            error = caught
        finally:
            opening.mark_done()
            with MUTEX:
                # An abandoned connection is kept for the next caller if a slot is free.
                counts = opening.uses_slot and (
                    not opening.abandoned or (session is not None and self.state.take_slot())
                )
                self.note_opened(session, generation, counts=counts, late=opening.late)
                opening.session, opening.error, opening.done = session, error, True
            opening.event.set()
            if opening.abandoned and session is not None:
                self.checkin(session)

    async def _open_unshared(self) -> LockConnection:
        """Open a connection whose socket no forked child has copied. A copy would keep the lock alive after this process dies."""
        while True:
            forks = PROCESS.forks
            dbapi_connection, driver, facts = await self.carrier.call(
                lambda: open_connection(self.engine, self.config.pooler, any_pooler=self.any_pooler)
            )
            session = self._kind(dbapi_connection, self._driver_kind(driver), facts)
            self.configure(session)
            if forks == PROCESS.forks:
                return session
            session.close()

    async def borrow_unjudged(self, connection: Connection) -> CallerConnection:
        """Borrow the caller's connection without a round trip, for statements that take no lock."""
        return await self._callers_kind.borrow(self.carrier, connection, self._driver_kind)

    async def borrow(self, connection: Connection, limit: float) -> LockConnection:
        """Borrow the caller's connection for one lock. Facts that are not cached are read within a time limit."""
        session = await self.borrow_unjudged(connection)
        if session.facts is server.UNKNOWN:
            await session.learn(self.config.pooler, limit)
        session.on_death = self.on_death
        return session

    def configure(self, session: LockConnection) -> None:
        """Prepare a new connection: detect a pooler, and watch the socket."""
        strange = session.driver.pid != session.facts.backend_pid
        session.driver.pooled = self.any_pooler and (strange or self.config.pooler in ("session", "transaction"))
        session.watch()

    def checkin(self, session: LockConnection) -> None:
        """Return a connection that holds no lock to its owner or to the pool, which keeps only a few idle ones."""
        if not session.ours:
            assert isinstance(session, CallerConnection)
            session.detach()
            return
        with MUTEX:
            kept = self.state.checkin(session)
        if not kept:
            self.discard(session)

    def discard(self, session: LockConnection) -> None:
        """Close a connection. The server then releases the locks that the connection held."""
        session.close()
        with MUTEX:
            if session in self.sessions:
                if session.uses_slot:
                    self.state.note_closed()
                self.sessions.discard(session)  # last, because an interrupted `discard` is called again

    def close_idle(self, now: float) -> None:
        """Close the idle connections that are dead or were idle for too long."""
        if any(session.is_expired(now) for session in list(self.state.idle)):
            self.carrier.run_at_home(lambda: self._close_expired(now))

    def _close_expired(self, now: float) -> None:
        with MUTEX:
            expired = self.state.take_expired(now)
        for session in expired:
            self.discard(session)

    def _on_engine_disposed(self, _: Engine) -> None:
        """Close the idle connections. The others are closed when their locks are released."""
        if self.pid != PROCESS.pid:  # a forked child often disposes of the engine that it inherited
            return
        with MUTEX:
            self.generation += 1
            for session in self.sessions:
                session.close_after_use = True
            idle = self.state.take_all_idle()

        def close() -> None:
            for session in idle:
                self.discard(session)

        self.carrier.run_at_home(close)

    def note_opened(self, session: LockConnection | None, generation: int, *, counts: bool, late: bool) -> None:
        """Add a new connection, or free its slot if opening failed. The caller holds the mutex."""
        if late:
            self.stuck -= 1
        if session is None:
            if counts:
                self.state.note_closed()
            return
        session.close_after_use = generation != self.generation or not counts
        session.uses_slot = counts
        session.on_death = self.on_death
        self.sessions.add(session)
        self.lock_table.note_count(session.facts.locks_used, session.facts.lock_limit)

    def begin_opening(self) -> None:
        """Raise UnreachableError if the number of stuck openings has reached the number of slots. The caller keeps its slot."""
        # One more opening is tried every few seconds, because a driver may hang long after the server is available again.
        threads.block_during_shutdown()
        now = time.monotonic()
        with MUTEX:
            if self.stuck < self.state.limit or now - self._opening_began > OPEN_BUDGET:
                self._opening_began = now
                return
        raise UnreachableError(f"{describe_server(self.engine)} does not respond. {LOCK_OUTCOME_UNKNOWN}")
