"""The sync shell: each thread runs its own statements and parks on a gate."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from pgfence._connections.connection import STATEMENT_BUDGET, WAIT_GRACE, ConnectionGoneError
from pgfence._connections.connection_sync import SyncLockConnection
from pgfence._connections.pool import MANY_KEYS
from pgfence._connections.pool_sync import SyncLockPool, ThreadEvent
from pgfence._holds.cancellation import Cancelled, cancel_here, cancelled, expect_uncancelled, pause, wait
from pgfence._holds.queue import Contender, QueueEntry
from pgfence._holds.wait_plan import WARN_AFTER, WaitPlan
from pgfence._locks.errors import translate_lock_error
from pgfence._locks.manager import NO_CONNECTION, RETRY_AFTER, LockManager
from pgfence._locks.outages import gone_error
from pgfence._locks.own_holds import on_these_keys
from pgfence._process.callbacks import log
from pgfence._process.clock import clock
from pgfence._process.lifecycle import MUTEX, PROCESS
from pgfence._process.monitor import MONITOR
from pgfence._process.references import weak_method
from pgfence._process.registry import ManagerRegistry
from pgfence._sql import server
from pgfence._sql.encoding import TextError
from pgfence._sql.errors import is_connection_lost, translate_connect_error
from pgfence._sql.token import TokenSql
from pgfence.errors import LockNotHeldError, StandbyError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine

    from pgfence._holds.hold import Hold
    from pgfence._locks.manager import LockRequest
    from pgfence._process.clock import Seconds
    from pgfence._sql.advisory import LockSql
    from pgfence.config import Config
    from pgfence.types import Holder

HandleT = TypeVar("HandleT")

_HERE = threading.local()


def contender() -> Contender:
    """Return the contender that this thread is."""
    try:
        me: Contender = _HERE.contender
    except AttributeError:
        me = _HERE.contender = Contender("thread")
    if me.pid != PROCESS.known_pid:
        me = _HERE.contender = Contender("thread")
    return me


class SyncLockManager(LockManager[SyncLockConnection]):
    """The lines and connections that the threads of this process share for one engine."""

    def __init__(self, engine: Engine, config: Config) -> None:
        super().__init__(engine, config)
        self.keeper = SyncLockPool(engine, config, weak_method(self.session_died))

    def acquire(
        self,
        names: tuple[str, ...],
        sql: LockSql,
        timeout: Seconds | None,
        make: Callable[[SyncLockManager, Hold[SyncLockConnection]], HandleT],
        *,
        on: Connection | None = None,
    ) -> HandleT | None:
        """Return a handle, or None when somebody else has the lock and `timeout` is 0.

        Args:
            names: for messages.
            sql: the keys to take.
            timeout: seconds; None is the default, which does not wait for a server that is away at the first question.
            make: makes the handle. From then on its finaliser answers for the lock, until then we do.
            on: the caller's own connection; None takes one of ours.

        Raises:
            LockTimeoutError: it was not free within the timeout.
            SelfDeadlockError: it would never be, inside this process.
        """
        owner = contender()
        limit = self.timeout(timeout, owner)
        request = self.request(names, sql, owner, limit, patient=timeout is not None and on is None)
        cancel = cancel_here() if limit else None
        entry = QueueEntry(sql.places, owner, self.lines, alone=isinstance(sql, TokenSql))
        try:
            if cancel is not None:
                request.cancel = cancel
                expect_uncancelled(cancel)
            with MUTEX:
                if (front := self.enqueue(request, entry)) is None:
                    return None
                if front and on is None:
                    self.keeper.roster.warm(entry)
            if not front:
                self._in_line(request, entry, on)
            if entry.handed_over is not None or self._at_server(request, entry, on):
                session: SyncLockConnection = entry.handed_over or entry.session
                return make(self, self.held(request, entry, session))
        except BaseException as error:
            self._abort_acquire(entry)
            if isinstance(error, Cancelled):
                raise cancelled(names) from None
            raise
        self.dequeue(entry)
        return None

    def _in_line(self, request: LockRequest, entry: QueueEntry, on: Connection | None) -> None:
        """Wait to be the first in line. The ticket's gift is the session that was handed over with the lock, if one was."""
        gate = ThreadEvent()
        with MUTEX:
            entry.wake = gate.open
            if self.lines.first(entry):
                gate.open()
            self.saw_line(request, entry)
        if request.left > WARN_AFTER and not wait(gate.wait, WARN_AFTER, request.cancel):
            self.log_wait(request, (logging.WARNING, WARN_AFTER), self.holders_here(request))
        wait(gate.wait, request.left, request.cancel)
        with MUTEX:
            request.owner.waits = None
            first = self.lines.first(entry)
        if not first:
            raise self.late(request, entry, self.holders_here(request) or self._look_quietly(request.sql))
        if entry.handed_over is not None and on is not None:
            entry.session, entry.handed_over = entry.handed_over, None
            self._pass_by(entry.session, request.sql)
            entry.session = None

    def _abort_acquire(self, entry: QueueEntry) -> None:
        """Leave nothing behind, whatever happened; certainly, for the exception may be a signal's, and another may follow."""

        def clean() -> None:
            self._discard(entry)
            self.torn(entry)
            self._discard(entry)  # until it left the line, another thread could hand its lock over to it

        run_cleanup(clean)

    def _discard(self, entry: QueueEntry) -> None:
        for session in (entry.session, entry.handed_over):
            if session is not None:
                self.keeper.discard(session)

    def _at_server(self, request: LockRequest, entry: QueueEntry, on: Connection | None) -> bool:
        """Contend with other processes, at the ticket's session. False: not free, and no time to wait."""
        failures, many = 0, len(request.sql.keys) > MANY_KEYS
        while True:
            if entry.session is None:
                try:
                    entry.session = self._session(request, on, failures)
                except (UnreachableError, StandbyError) as error:
                    if on is not None:
                        raise
                    failures += 1
                    pause(self.outlast(request, entry, error), request.cancel)
                    continue
            session: SyncLockConnection = entry.session
            began = time.monotonic() if failures else 0.0  # the first failure counts once, however late it came
            try:
                try:
                    if many:
                        self._make_room(session, request)
                    granted = session.try_lock(self.engine, request.sql, request.budget)
                    if not granted and request.waits:
                        self.saw_held(request, entry)
                        granted = self._wait(session, request, entry)
                except TextError:
                    raise
                except Exception as error:
                    raise translate_lock_error(session, error, request.sql) from error
                if granted:
                    session.handoffs, session.granted_at = 0, time.monotonic()
                    if many:
                        self.keeper.took(len(request.keys))
                    return True
                holders = self._look_on(session, request.sql) if request.waits else []
            except ConnectionGoneError as gone:
                self.keeper.discard(session)
                entry.session = None
                if on is not None:
                    raise gone_error(request.names, gone) from gone.__cause__
                failures = failures + 1 if time.monotonic() - began < RETRY_AFTER else 1
                pause(self.gone(request, entry, gone, failures), request.cancel)
                continue
            entry.session = None
            self.keeper.checkin(session)
            if request.waits:
                raise self.timed_out(request, holders)
            return False

    def _session(self, request: LockRequest, on: Connection | None, failures: int) -> SyncLockConnection:
        if on is not None:
            return self.keeper.borrow(on, request.budget)
        session = self.keeper.checkout(request.left, len(request.keys), again=failures > 0, cancel=request.cancel)
        if session is None:
            raise self.timed_out(request, (), why=NO_CONNECTION)
        return session

    def _make_room(self, session: SyncLockConnection, request: LockRequest) -> None:
        """Count the server's lock table before a large request, at most once a second, and refuse what would fill it."""
        if self.keeper.must_count():
            self.keeper.counted(session.ask(self.engine, server.LOCK_TABLE_USE, (), limit=request.budget))
        self.keeper.room_for(len(request.keys))

    def _wait(self, session: SyncLockConnection, request: LockRequest, entry: QueueEntry) -> bool:
        if own := on_these_keys(request.owner, request.keys):
            self.expect_others(session, request, own, self._look_on(session, request.sql))
        plan = WaitPlan(request.deadline, session.slice, len(request.keys), clock())
        while (step := plan.next(clock())) is not None:
            expect_uncancelled(request.cancel)
            if step.polls:
                time.sleep(step.seconds)
                granted = session.try_lock(self.engine, request.sql, request.budget)
            else:
                granted = session.wait_lock(self.engine, request.sql, step.milliseconds, quiet=step.quiet)
            if granted:
                return True
            self.saw_held(request, entry)
            if (news := plan.news(clock())) is not None and log.isEnabledFor(news[0]):
                self.log_wait(request, news, holders := self._look_on(session, request.sql))
                self.saw_held(request, entry, holders)
        return False

    # ------------------------------------------------------------ release

    def release(self, hold: Hold[SyncLockConnection], *, leaving: bool = False, failing: bool = False) -> None:
        """Give the lock back, provably, or close its connection.

        Args:
            hold: what is given back.
            leaving: a block ends: a lock on the caller's connection must not outlive it.
            failing: it ends by an exception.

        Raises:
            LockNotHeldError: it was released before, or this is a forked child.
            LockLostError: it was lost before.
            TransactionStateError: the caller's own connection is in a transaction. Unless a block ends, the lock stays.
        """
        spoiled = self.spoiled(hold, leaving=leaving)
        try:
            mine, handed_over = self.let_go(hold)
            if not mine:
                raise hold.not_held_error()
            if not handed_over:
                kept = hold.reason is None and not spoiled and self._unlock(hold, hold.session)
                (self.keeper.checkin if kept else self.keeper.discard)(hold.session)
                self.dequeue(hold.entry)
        except LockNotHeldError:
            raise
        except BaseException:
            run_cleanup(lambda: self._end(hold))
            raise
        self.released(hold, spoiled=spoiled and not failing)

    def _end(self, hold: Hold[SyncLockConnection]) -> None:
        """Finish a release that was torn, by closing the connection, unless it serves somebody else already."""
        session = hold.session
        if session.hold in (None, hold):
            if session.since:  # somebody else is inside a statement on it by now
                MONITOR.shut_down(session)
            else:
                self.keeper.discard(session)
        self.torn(hold.entry)

    def _unlock(self, hold: Hold[SyncLockConnection], session: SyncLockConnection) -> bool:
        """Unlock on the server. Returns whether the session may be used again."""
        try:
            if session.lent:
                session.reclaim(self.engine)
            done = session.unlock(self.engine, hold.sql)
        except Exception as error:
            if not (session.dead or is_connection_lost(error)):
                raise
            hold.reason = session.dead or "killed"
            return False
        if not done:
            hold.reason = "killed"
        return done and not session.lent

    def _pass_by(self, session: SyncLockConnection, sql: LockSql) -> None:
        """Unlock a session that was handed over to somebody who cannot use it."""
        try:
            session.unlock(self.engine, sql)
        except BaseException:
            self.keeper.discard(session)
            raise
        self.keeper.checkin(session)

    def abandon(self, hold: Hold[SyncLockConnection]) -> None:
        """Free a lock whose handle was dropped; called by a finaliser, so the work is done on the jobs thread."""

        def close() -> None:
            mine, handed_over = self.let_go(hold)
            if mine and not handed_over:
                self.keeper.discard(hold.session)
                self.dequeue(hold.entry)

        MONITOR.post(close)

    def close_dead(self) -> None:
        self.keeper.reap(time.monotonic())

    # ------------------------------------------------------------ looking

    def holders(self, sql: LockSql) -> list[Holder]:
        """Ask the server who holds what the statements are for, on a session that holds nothing.

        Raises:
            UnreachableError: there is no server.
            PoolerError, StandbyError, UnsupportedServerError: as `acquire`.
        """
        session = self.keeper.checkout_for_query()
        try:
            found = self._look(session, sql)
        except BaseException as error:
            self.keeper.discard(session)
            if isinstance(error, Exception) and (told := translate_connect_error(self.engine, error)):
                raise told from error
            raise
        self.keeper.checkin(session)
        return found

    def _look(self, session: SyncLockConnection, sql: LockSql, limit: float = STATEMENT_BUDGET) -> list[Holder]:
        return session.through(self.engine, sql.holders, limit=limit)

    def _look_on(self, session: SyncLockConnection, sql: LockSql) -> list[Holder]:
        """For a message: nothing must fail for it."""
        try:
            return self._look(session, sql, WAIT_GRACE)
        except Exception:
            log.debug("could not look who holds a lock", exc_info=True)
            session.close_after_use = True
            return []

    def _look_quietly(self, sql: LockSql) -> list[Holder]:
        """For a message: nothing must fail or wait for it."""
        with MUTEX:
            idle = self.keeper.roster.idle.pop() if self.keeper.roster.idle else None
        if idle is None:
            return []
        try:
            return self._look_on(idle, sql)
        finally:
            self.keeper.checkin(idle)


def run_cleanup(clean: Callable[[], None]) -> None:
    """Run a clean-up that may be run twice, also if a signal's exception tears it: then once more, where none arrives."""
    try:
        clean()
    except BaseException:
        MONITOR.post(clean)
        raise


def manager_for(engine: Engine, config: Config) -> SyncLockManager:
    """Return the lock manager of an engine in this process."""
    return ManagerRegistry.for_process(
        engine, SyncLockManager, SyncLockManager, lambda: SyncLockManager(engine, config)
    )
