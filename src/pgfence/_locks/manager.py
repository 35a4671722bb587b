"""Acquire and release session locks, for the threads of this process or for the tasks of one event loop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from pgfence._connections.connection import ConnectionGoneError, LockConnection
from pgfence._connections.lock_table import MANY_KEYS
from pgfence._connections.pool import LockPool
from pgfence._holds.carriers import Cancelled, build_cancelled_error, expect_uncancelled
from pgfence._holds.hold import Hold, format_names
from pgfence._holds.queue import BURST, BURST_TIME, LocalQueue
from pgfence._holds.registry import ManagerRegistry
from pgfence._holds.wait_plan import WaitPlan
from pgfence._locks.acquisition import Acquisition, timeout_of
from pgfence._locks.errors import build_in_transaction_error, translate_lock_error
from pgfence._locks.looks import look_on, look_quietly
from pgfence._locks.names import UNTRANSLATED, note_names
from pgfence._locks.outages import build_gone_error
from pgfence._locks.own_holds import find_holds_on, find_self_deadlock
from pgfence._locks.server_wait import ServerWait
from pgfence._process import threads
from pgfence._process.callbacks import log
from pgfence._process.clock import Deadline, clock
from pgfence._process.lifecycle import MUTEX, PROCESS, make_weak_method
from pgfence._process.monitor import MONITOR
from pgfence._sql import server
from pgfence._sql.errors import is_connection_lost
from pgfence._sql.params import style_of
from pgfence._sql.token import TokenSql
from pgfence.errors import LockNotHeldError, StandbyError, UnreachableError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from typing import TypeAlias

    from sqlalchemy import Connection, Engine

    from pgfence._holds.carriers import Carrier
    from pgfence._process.clock import Seconds
    from pgfence._sql.advisory import LockSql
    from pgfence._sql.params import ParamStyle
    from pgfence.config import Config

    SessionHold: TypeAlias = Hold[LockConnection]
    LockAcquisition: TypeAlias = Acquisition[LockSql]

HandleT = TypeVar("HandleT")

RETRY_AFTER = 1.0
"""A replacement that is lost sooner than this is replaced after a pause. The first lost connection is replaced immediately."""


class LockManager:
    """The queue and the connections that one engine's threads, or the tasks of one event loop, share."""

    def __init__(self, engine: Engine, config: Config, carrier: Carrier) -> None:
        threads.require_native_threads()
        self.engine = engine
        self.config = config
        self.carrier = carrier
        self.style: ParamStyle = style_of(engine.dialect)
        self.pid = PROCESS.pid
        self.queue = LocalQueue(engine.dialect)
        self.pool = LockPool(engine, config, carrier, make_weak_method(self._on_connection_lost))

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop whose tasks share this manager, or None for threads."""
        return self.carrier.loop

    def begin_call(
        self,
        names: tuple[str, ...],
        sql: LockSql,
        timeout: Seconds | None,
        *,
        lasts: bool = False,
        budget: float | None = None,
    ) -> LockAcquisition:
        """Return the state of a new acquire call, which has not entered a queue yet."""
        owner = self.carrier.get_contender()
        limit = timeout_of(self.config, timeout, owner)
        cancel = self.carrier.cancel_event() if limit else None
        return Acquisition(
            self.queue,
            self.config,
            names,
            sql,
            owner,
            limit,
            lasts=lasts,
            no_handoff=not sql.hands_over,
            cancel=cancel,
            budget=budget,
        )

    async def acquire(
        self,
        names: tuple[str, ...],
        sql: LockSql,
        timeout: Seconds | None,
        make: Callable[[LockManager, SessionHold], HandleT],
        *,
        on: Connection | None = None,
        budget: float | None = None,
    ) -> HandleT | None:
        """Acquire a lock and return its handle, or None if another holder has it and `timeout` is 0.

        With a timeout of None, the default applies, and the call does not wait for an unreachable server. `make` creates the
        handle, whose finaliser is responsible for the lock from then on. `on` is the caller's own connection, if any. `budget`
        limits the seconds of each statement, for a caller that polls.
        """
        call = self.begin_call(names, sql, timeout, lasts=timeout is not None and on is None, budget=budget)
        entry = call.entry
        try:
            if call.cancel is not None:
                expect_uncancelled(call.cancel)
            with MUTEX:
                front = call.enqueue()
                if front and on is None:  # the same mutex, so that the uncontended path takes it only once
                    self.pool.state.pop_idle(entry)
            if front is False:
                await self._wait_for_turn(call, on)
            if front is not None and (entry.handed_over is not None or await self._contend(call, on)):
                # Until the handle exists, the clean-up below is responsible for the grant; then the handle's finaliser is.
                return make(self, self._record(call, entry.handed_over or entry.session))
            entry.leave()
        except BaseException as error:  # the exception may come from a signal, and a second signal may follow
            self.carrier.run_cleanup(lambda: self._abort_acquire(call))
            if isinstance(error, Cancelled):
                raise build_cancelled_error(names) from None
            raise
        call.refuse()
        return None

    async def _wait_for_turn(self, call: LockAcquisition, on: Connection | None) -> None:
        """Wait until the call is first in the queue. The previous holder may hand over its connection and lock."""
        if not await call.wait_for_turn(self.carrier):
            raise call.build_late_error(call.find_local_holders() or await look_quietly(self.pool, call.wanted))
        entry = call.entry
        if entry.handed_over is not None and on is not None:
            entry.session, entry.handed_over = entry.handed_over, None
            await self._unlock_unused(entry.session, call.wanted)
            entry.session = None

    def _abort_acquire(self, call: LockAcquisition) -> None:
        """Clean up after an acquire that ends with an exception, wherever it was raised."""
        self._discard(call)
        call.entry.discard_partial()
        self._discard(call)  # again, because another thread may have handed over its lock in the meantime

    def _discard(self, call: LockAcquisition) -> None:
        for session in (call.entry.session, call.entry.handed_over):
            if session is not None:
                self.pool.discard(session)

    async def _contend(self, call: LockAcquisition, on: Connection | None) -> bool:
        """Contend with other processes for the lock. Return False if it is held and the call does not wait."""
        failures, sql, entry = 0, call.wanted, call.entry
        many = len(sql.keys) > MANY_KEYS
        while True:
            if entry.session is None:
                try:
                    entry.session = await self._checkout(call, on, failures)
                except (UnreachableError, StandbyError) as error:
                    if on is not None:
                        raise
                    failures += 1
                    await self.carrier.sleep(call.plan_retry(error), call.cancel)
                    continue
            session: LockConnection = entry.session
            began = time.monotonic() if failures else 0.0  # the first failure counts once, however late it happened
            try:
                try:
                    if many:
                        await self._make_room(session, call)
                    granted = await session.try_lock(self.engine, sql, call.budget)
                    if not granted and call.waits:
                        call.note_held()
                        granted = await self._wait(session, call)
                    if granted:
                        await note_names(self.engine, session, sql, call.budget)
                except UNTRANSLATED:
                    raise
                except Exception as error:
                    raise translate_lock_error(session, error, sql) from error
                if granted:
                    session.handoffs, session.granted_at = 0, time.monotonic()
                    if many:
                        self.pool.lock_table.note_taken(len(sql.keys))
                    return True
                holders = await look_on(self.pool, session, sql) if call.waits else []
            except ConnectionGoneError as gone:
                self.pool.discard(session)
                entry.session = None
                if on is not None:
                    raise build_gone_error(call.names, gone) from gone.__cause__
                failures = failures + 1 if time.monotonic() - began < RETRY_AFTER else 1
                await self.carrier.sleep(call.plan_retry_after_loss(gone, failures), call.cancel)
                continue
            entry.session = None
            self.pool.checkin(session)
            if call.waits:
                raise call.build_timeout_error(holders)
            return False

    async def _checkout(self, call: LockAcquisition, on: Connection | None, failures: int) -> LockConnection:
        if on is not None:
            return await self.pool.borrow(on, call.budget)
        session = await self.pool.checkout(call.left, len(call.wanted.keys), again=failures > 0, cancel=call.cancel)
        if session is None:
            raise call.build_no_connection_error()
        return session

    async def _make_room(self, session: LockConnection, call: LockAcquisition) -> None:
        """Reject a large request that would fill the server's lock table, after counting its entries if necessary."""
        if self.pool.lock_table.needs_count(len(call.wanted.keys)):
            used = await session.fetch_value(self.engine, server.LOCK_TABLE_USE, (), limit=call.budget)
            self.pool.lock_table.note_count(used)
        self.pool.lock_table.check_room(len(call.wanted.keys))

    async def _wait(self, session: LockConnection, call: LockAcquisition) -> bool:
        sql = call.wanted
        # The caller may hold the key through another engine, which this queue does not know, so query the server.
        if own := find_holds_on(call.owner, sql.keys):
            found = await look_on(self.pool, session, sql)
            if error := find_self_deadlock(call.owner, call.names, own, found, session.facts.started):
                raise error
        plan = WaitPlan(Deadline(call.ends_at, call.timeout), session.slice, clock())
        wait = ServerWait(self.engine, session, sql)
        while (step := plan.next(clock())) is not None:
            expect_uncancelled(call.cancel)
            if step.polls:
                await self.carrier.sleep(step.seconds)
                granted: bool | None = await session.try_lock(self.engine, sql, call.budget)
            else:
                granted = await wait.run_step(step, call)
            if granted:
                return True
            call.note_held()
            if granted is not None and (due := plan.take_due_log(clock())) and log.isEnabledFor(due[0]):
                call.log_wait(*due, holders := await look_on(self.pool, session, sql))
                call.note_held(holders)
        await wait.leave()
        return False

    def _record(self, call: LockAcquisition, session: LockConnection) -> SessionHold:
        """Record a grant, and return its hold."""
        sql, entry = call.wanted, call.entry
        hold = Hold(call.names, sql, entry, session)
        if isinstance(sql, TokenSql):
            hold.token, hold.stored, hold.place = session.token, sql.name, sql.place
        with MUTEX:
            entry.owner.waits = entry.away = None
            entry.owner.holds.append(hold)
            session.hold = entry.hold = hold
        if sql.shared:
            entry.leave()  # the next reader of this process may be admitted too
        # The connection may have died before the hold was attached, in which case `hold` missed the loss.
        if session.dead is not None:
            session.on_connection_lost(session.dead)
        if (events := self.config.events).active:
            hold.emit(events, "acquired", waited=clock() - call.began, contended=call.contended)
        return hold

    async def release(self, hold: SessionHold, *, leaving: bool = False, failing: bool = False) -> None:
        """Release the lock, and return when the server has confirmed the release or the connection is closed.

        `leaving` means that a block ends, which a lock on the caller's connection must not outlive, and `failing` that it raised
        an exception.

        Raises:
            LockNotHeldError: the lock was released before, or this is a forked child.
            LockLostError: the lock was lost before.
            TransactionStateError: the caller's own connection is in a transaction. The lock is kept, unless a block ends.
        """
        blocked = self._is_in_transaction(hold, leaving=leaving)
        try:
            mine, handed_over = self._begin_release(hold)
            if not mine:
                raise hold.not_held_error()
            if not handed_over:
                session, kept = hold.session, False
                if hold.reason is None and not blocked:
                    try:
                        if session.in_user_hands:
                            await session.reclaim(self.engine)
                        kept = await session.unlock(self.engine, hold.sql)
                        if not kept:
                            hold.reason = "killed"
                    except Exception as error:
                        if not (session.dead or is_connection_lost(error)):
                            raise
                        hold.reason = session.dead or "killed"
                    if not kept:
                        hold.emit(self.config.events, "release_failed", reason=hold.reason)
                (self.pool.checkin if kept and not session.in_user_hands else self.pool.discard)(session)
                hold.entry.leave()
        except LockNotHeldError:
            raise
        except BaseException:
            self.carrier.run_cleanup(lambda: self._finish_interrupted_release(hold))
            raise
        if hold.reason is not None:
            raise hold.lost_error()
        hold.emit(self.config.events, "released")
        if blocked and not failing:
            raise build_in_transaction_error(hold.names, closed=True)

    def _is_in_transaction(self, hold: SessionHold, *, leaving: bool) -> bool:
        """Return whether a transaction is open on the caller's own connection, which blocks the release.

        Raises:
            LockNotHeldError: this is a forked child, which must not touch its parent's connection.
        """
        if hold.pid != PROCESS.pid:
            raise hold.not_held_error()
        if not hold.session.is_in_transaction or hold.state == "released":
            return False
        if not leaving:
            raise build_in_transaction_error(hold.names)
        return True

    def _begin_release(self, hold: SessionHold) -> tuple[bool, bool]:
        """Claim the right to release a hold, and hand the lock over in this process if possible. Return whether each succeeded."""
        with MUTEX:
            if not hold.begin_release():
                return False, False
            if hold in hold.owner.holds:
                hold.owner.holds.remove(hold)
            (session := hold.session).hold = None
            if hold.reason is not None or session.dead or session.in_user_hands or not session.ours:
                return True, False
            # At most 16 times in a row and for at most 20 ms, because a process that waits in the server would starve otherwise.
            successor = self.queue.find_successor(hold.entry) if hold.sql.hands_over else None
            if successor is None or session.handoffs >= BURST or time.monotonic() - session.granted_at > BURST_TIME:
                return True, False
            session.handoffs += 1
            successor.handed_over = session
            self.queue.dequeue(hold.entry)
            return True, True

    def _finish_interrupted_release(self, hold: SessionHold) -> None:
        """Close the connection after an interrupted release, unless it already serves another holder."""
        session = hold.session
        if session.hold in (None, hold):
            if session.statement_started:  # another thread runs it, so this thread may only shut down the socket
                MONITOR.shut_down(session)
            else:
                self.pool.discard(session)
        hold.entry.discard_partial()

    async def _unlock_unused(self, session: LockConnection, sql: LockSql) -> None:
        """Unlock a connection that was handed over to a contender that cannot use it."""
        try:
            await session.unlock(self.engine, sql)
        except BaseException:
            self.pool.discard(session)
            raise
        self.pool.checkin(session)

    def abandon(self, hold: SessionHold) -> None:
        """Release a lock whose handle was dropped. A finaliser calls this, so another thread or task does the work."""

        def close() -> None:
            mine, handed_over = self._begin_release(hold)
            if mine and not handed_over:
                self.pool.discard(hold.session)
                hold.entry.leave()

        self.carrier.run_later(close)

    def _on_connection_lost(self, hold: SessionHold | None) -> None:
        """Leave the queue and emit the event, because the connection of a lock was lost."""
        # The server has released the lock, so waiters in this process need not wait until the former holder leaves its block.
        if hold is not None:
            hold.entry.leave()
            hold.emit(self.config.events, "lost", reason=hold.reason)
            fields = hold.build_log_fields("lost")
            log.warning("lock %s was lost: %s", format_names(hold.names), hold.reason, extra=fields)
        self.pool.close_idle(time.monotonic())


def get_manager(engine: Engine, config: Config) -> LockManager:
    """Return an engine's lock manager in this process. For an async engine, it belongs to the running event loop."""
    return ManagerRegistry.for_carrier(engine, LockManager, lambda carrier: LockManager(engine, config, carrier))
