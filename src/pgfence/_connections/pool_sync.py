"""Connections for threads: opened on a thread of their own, given out in turn, kept warm."""

from __future__ import annotations

import contextvars
import threading
from typing import TYPE_CHECKING, Any

from pgfence._connections.connect import judge, open_connection
from pgfence._connections.connection_sync import SyncCallerConnection, SyncLockConnection
from pgfence._connections.drivers import SYNC_DRIVERS, driver_connection_for
from pgfence._connections.pool import OPEN_BUDGET, OPEN_LIMIT, LockPool, PoolWaiter
from pgfence._holds.cancellation import wait
from pgfence._process import threads
from pgfence._process.lifecycle import MUTEX, PROCESS
from pgfence._sql.errors import translate_connect_error
from pgfence.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine

    from pgfence._holds.cancellation import CancelEvent
    from pgfence._holds.hold import Hold
    from pgfence.config import Config


class ThreadEvent:
    """Where one thread waits to be woken once."""

    __slots__ = ("_lock", "_opened")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._opened = False

    def open(self) -> None:
        if not self._opened:
            self._opened = True
            self._lock.release()

    def wait(self, left: float) -> bool:
        """Wait at most `left` seconds and say whether it is open."""
        return self._opened or self._lock.acquire(timeout=min(left, threading.TIMEOUT_MAX))


class PendingConnection:
    """A connection being opened for somebody who may have gone by the time it is there."""

    __slots__ = ("__weakref__", "_over", "abandoned", "counts", "done", "error", "gate", "late", "session")

    def __init__(self, *, counts: bool) -> None:
        self.gate = ThreadEvent()
        self.counts = counts
        self.done = False
        self.session: SyncLockConnection | None = None
        self.error: Exception | None = None
        self.abandoned = False
        self.late = False
        self._over = threading.Event()
        threads.register(self)

    def left_driver(self) -> None:
        """Let the interpreter end, if it waits for that."""
        self._over.set()

    def end(self, seconds: float) -> None:
        """Wait, for the interpreter ends: exit() must not meet the thread inside the driver."""
        self._over.wait(seconds)

    def abandon(self, keeper: SyncLockPool, *, late: bool) -> SyncLockConnection | None:
        """Stop waiting, once. Returns the session if it came in the last moment."""
        with MUTEX:
            if self.abandoned:  # its opener parks what still comes
                return None
            if not self.done:
                self.abandoned, self.late = True, late
                keeper.given_up(counts=self.counts, late=late)
        return self.session


class SyncLockPool(LockPool[SyncLockConnection]):
    """The connections of one engine for the threads of this process."""

    def __init__(
        self, engine: Engine, config: Config, on_death: Callable[[Hold[Any] | None], object], **options: Any
    ) -> None:
        self._wire = driver_connection_for(engine.dialect.driver, SYNC_DRIVERS, "sync")
        super().__init__(engine, config, on_death, **options)

    def checkout(
        self, left: float, keys: int = 1, *, again: bool = False, cancel: CancelEvent | None = None
    ) -> SyncLockConnection | None:
        """Return a session: a warm one, a new one, or in turn when `max_lock_connections` are in use; None: not in time.

        Args:
            left: seconds to wait for a turn.
            keys: how many keys it is to hold.
            again: after one that ended: opening another may not take much longer than what is left.
            cancel: ends the wait for a turn, and for a new session.
        """
        turn: PoolWaiter[SyncLockConnection] = PoolWaiter()
        try:
            gate = None
            with MUTEX:
                if not self.roster.take(turn).served:
                    gate = ThreadEvent()
                    turn.wake = gate.open
            if gate is not None:
                wait(gate.wait, left, cancel)
                with MUTEX:
                    self.roster.forgo(turn)
                if not turn.served:
                    return None
            if turn.session is None:
                self._open(turn, max(1.0 if again else OPEN_BUDGET, min(left, OPEN_LIMIT)), keys, cancel)
            return turn.session
        except BaseException:
            self._give_up(turn)
            raise

    def checkout_for_query(self) -> SyncLockConnection:
        """Return a session to look with: a warm one, or one beside the roster that is closed after the look."""
        turn: PoolWaiter[SyncLockConnection] = PoolWaiter()
        try:
            with MUTEX:
                self.roster.warm(turn)
            if turn.session is None:
                self._open(turn, OPEN_BUDGET, 0)
            assert turn.session is not None
            return turn.session
        except BaseException:
            self._give_up(turn)
            raise

    def _give_up(self, turn: PoolWaiter[SyncLockConnection]) -> None:
        """Give back what a turn has: its place in the line, its place to open a connection, or its session."""
        opening: PendingConnection | None = turn.opening
        with MUTEX:
            self.roster.forgo(turn)
            if opening is None and turn.may_open:
                turn.may_open = False
                self.roster.gone()
        session = turn.session or (opening.abandon(self, late=False) if opening is not None else None)
        if session is not None:
            self.checkin(session)

    def _open(
        self, turn: PoolWaiter[SyncLockConnection], budget: float, keys: int, cancel: CancelEvent | None = None
    ) -> None:
        """Open a session on a thread of its own: the caller can time out or be interrupted, the connection cannot be torn."""
        self.begin_opening()
        opening = turn.opening = PendingConnection(counts=keys > 0)
        threads.start("pgfence-opener", contextvars.copy_context().run, self._opener, opening)
        wait(opening.gate.wait, budget, cancel)
        turn.session = opening.abandon(self, late=True)
        if turn.session is None:
            raise opening.error or self.too_late(budget)
        self.room_for(keys)

    def _opener(self, opening: PendingConnection) -> None:
        session: SyncLockConnection | None = None
        error: Exception | None = UnreachableError("the thread that opened a session was ended")
        generation = self.generation
        try:
            session = self._opened_alone()
        except Exception as caught:
            error = caught
        finally:
            opening.left_driver()
            with MUTEX:
                self.opened(session, generation, counts=opening.counts and not opening.abandoned, late=opening.late)
                opening.session, opening.error, opening.done = session, error, True
            opening.gate.open()
            if opening.abandoned and session is not None:
                self.checkin(session)

    def _opened_alone(self) -> SyncLockConnection:
        """Open a session of which no child that is forked meanwhile keeps the socket: its copy would keep a dead parent's lock."""
        while True:
            forks = PROCESS.forks
            dbapi_connection, driver, facts = open_connection(
                self.engine, self.config.pooler, any_pooler=self.any_pooler
            )
            session = SyncLockConnection(dbapi_connection, self._wire(driver), facts)
            self.settle(session)
            if forks == PROCESS.forks:
                return session
            session.close()

    def borrow(self, connection: Connection, limit: float) -> SyncLockConnection:
        """Make the caller's own connection a session, for one lock; its first question may take `limit` seconds."""
        try:
            session = SyncCallerConnection.of(connection, limit)
        except Exception as error:
            if told := translate_connect_error(self.engine, error):
                raise told from error
            raise
        try:
            judge(self.engine, session.facts, session.wire.driver, self.config.pooler)
        except BaseException:
            session.let_go()
            raise
        session.on_death = self.on_death
        return session

    def reap(self, now: float) -> None:
        with MUTEX:
            cold = self.roster.cold(now)
        for session in cold:
            self.discard(session)

    def disposed(self) -> None:
        with MUTEX:
            self.generation += 1
            for session in self.sessions:
                session.close_after_use = True
            idle = self.roster.take_all_idle()
        for session in idle:
            self.discard(session)
