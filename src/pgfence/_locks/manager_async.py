"""The async shell: each task runs its own statements on its own loop.

The same algorithm as in `sync`, step by step. A cancel may arrive at every await. It ends the step, closes the session the
step was at, and leaves the line; nothing needs to be awaited for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from pgfence._connections.connection import STATEMENT_BUDGET, WAIT_GRACE, ConnectionGoneError
from pgfence._connections.connection_async import AsyncLockConnection, keep, on_loop
from pgfence._connections.pool import MANY_KEYS
from pgfence._connections.pool_async import AsyncLockPool, TaskEvent
from pgfence._holds.queue import Contender, QueueEntry
from pgfence._holds.wait_plan import WARN_AFTER, WaitPlan
from pgfence._locks.errors import translate_lock_error
from pgfence._locks.manager import NO_CONNECTION, RETRY_AFTER, LockManager
from pgfence._locks.outages import gone_error
from pgfence._locks.own_holds import on_these_keys
from pgfence._process.callbacks import log
from pgfence._process.clock import clock
from pgfence._process.lifecycle import MUTEX, PROCESS
from pgfence._process.references import weak_method
from pgfence._process.registry import ManagerRegistry
from pgfence._sql import server
from pgfence._sql.encoding import TextError
from pgfence._sql.errors import is_connection_lost, translate_connect_error
from pgfence._sql.token import TokenSql
from pgfence.errors import StandbyError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from pgfence._holds.hold import Hold
    from pgfence._locks.manager import LockRequest
    from pgfence._process.clock import Seconds
    from pgfence._sql.advisory import LockSql
    from pgfence.config import Config
    from pgfence.types import Holder

__all__ = ["AsyncLockManager", "contender", "contender_here", "keep", "manager_for", "on_loop"]

HandleT = TypeVar("HandleT")

_HERE: weakref.WeakKeyDictionary[asyncio.Task[Any], Contender] = weakref.WeakKeyDictionary()


def contender_here() -> Contender | None:
    """Return the contender that this task is, if it ever was one; None also outside a task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    return None if task is None else _HERE.get(task)


def contender() -> Contender:
    """Return the contender that this task is."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("an async lock is taken by a task")
    me = _HERE.get(task)
    if me is None or me.pid != PROCESS.known_pid:
        me = _HERE[task] = Contender("task")
    return me


class AsyncLockManager(LockManager[AsyncLockConnection]):
    """The lines and connections that the tasks of one loop share for one engine."""

    def __init__(self, engine: AsyncEngine, config: Config) -> None:
        super().__init__(engine.sync_engine, config)
        self.async_engine = engine
        self.loop = asyncio.get_running_loop()
        self.keeper = AsyncLockPool(engine.sync_engine, config, weak_method(self.session_died))

    async def acquire(
        self,
        names: tuple[str, ...],
        sql: LockSql,
        timeout: Seconds | None,
        make: Callable[[AsyncLockManager, Hold[AsyncLockConnection]], HandleT],
        *,
        on: AsyncConnection | None = None,
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
        entry = QueueEntry(sql.places, owner, self.lines, alone=isinstance(sql, TokenSql))
        try:
            with MUTEX:
                if (front := self.enqueue(request, entry)) is None:
                    return None
                if front and on is None:
                    self.keeper.roster.warm(entry)
            if not front:
                await self._in_line(request, entry, on)
            if entry.handed_over is not None or await self._at_server(request, entry, on):
                session: AsyncLockConnection = entry.handed_over or entry.session
                return make(self, self.held(request, entry, session))
        except BaseException:
            self._abort_acquire(entry)
            raise
        self.dequeue(entry)
        return None

    async def _in_line(self, request: LockRequest, entry: QueueEntry, on: AsyncConnection | None) -> None:
        """Wait to be the first in line. The ticket's gift is the session that was handed over with the lock, if one was."""
        bell = TaskEvent()
        with MUTEX:
            entry.wake = bell.ring
            if self.lines.first(entry):
                bell.ring()
            self.saw_line(request, entry)
        if request.left > WARN_AFTER and not await bell.wait(WARN_AFTER):
            self.log_wait(request, (logging.WARNING, WARN_AFTER), self.holders_here(request))
        await bell.wait(request.left)
        with MUTEX:
            request.owner.waits = None
            first = self.lines.first(entry)
        if not first:
            raise self.late(request, entry, self.holders_here(request) or await self._look_quietly(request.sql))
        if entry.handed_over is not None and on is not None:
            entry.session, entry.handed_over = entry.handed_over, None
            await self._pass_by(entry.session, request.sql)
            entry.session = None

    def _abort_acquire(self, entry: QueueEntry) -> None:
        """Leave nothing behind, whatever happened."""
        for session in (entry.session, entry.handed_over):
            if session is not None:
                self.keeper.discard(session)
        self.torn(entry)

    async def _at_server(self, request: LockRequest, entry: QueueEntry, on: AsyncConnection | None) -> bool:
        """Contend with other processes, at the ticket's session. False: not free, and no time to wait."""
        failures, many = 0, len(request.sql.keys) > MANY_KEYS
        while True:
            if entry.session is None:
                try:
                    entry.session = await self._session(request, on, failures)
                except (UnreachableError, StandbyError) as error:
                    if on is not None:
                        raise
                    failures += 1
                    await asyncio.sleep(self.outlast(request, entry, error))
                    continue
            session: AsyncLockConnection = entry.session
            began = time.monotonic() if failures else 0.0  # the first failure counts once, however late it came
            try:
                try:
                    if many:
                        await self._make_room(session, request)
                    granted = await session.try_lock(self.engine, request.sql, request.budget)
                    if not granted and request.waits:
                        self.saw_held(request, entry)
                        granted = await self._wait(session, request, entry)
                except TextError:
                    raise
                except Exception as error:
                    raise translate_lock_error(session, error, request.sql) from error
                if granted:
                    session.handoffs, session.granted_at = 0, time.monotonic()
                    if many:
                        self.keeper.took(len(request.keys))
                    return True
                holders = await self._look_on(session, request.sql) if request.waits else []
            except ConnectionGoneError as gone:
                self.keeper.discard(session)
                entry.session = None
                if on is not None:
                    raise gone_error(request.names, gone) from gone.__cause__
                failures = failures + 1 if time.monotonic() - began < RETRY_AFTER else 1
                await asyncio.sleep(self.gone(request, entry, gone, failures))
                continue
            entry.session = None
            self.keeper.checkin(session)
            if request.waits:
                raise self.timed_out(request, holders)
            return False

    async def _session(self, request: LockRequest, on: AsyncConnection | None, failures: int) -> AsyncLockConnection:
        if on is not None:
            return await self.keeper.borrow(on, request.budget)
        session = await self.keeper.checkout(request.left, len(request.keys), again=failures > 0)
        if session is None:
            raise self.timed_out(request, (), why=NO_CONNECTION)
        return session

    async def _make_room(self, session: AsyncLockConnection, request: LockRequest) -> None:
        """Count the server's lock table before a large request, at most once a second, and refuse what would fill it."""
        if self.keeper.must_count():
            self.keeper.counted(await session.ask(self.engine, server.LOCK_TABLE_USE, (), limit=request.budget))
        self.keeper.room_for(len(request.keys))

    async def _wait(self, session: AsyncLockConnection, request: LockRequest, entry: QueueEntry) -> bool:
        if own := on_these_keys(request.owner, request.keys):
            self.expect_others(session, request, own, await self._look_on(session, request.sql))
        plan = WaitPlan(request.deadline, session.slice, len(request.keys), clock())
        while (step := plan.next(clock())) is not None:
            if step.polls:
                await asyncio.sleep(step.seconds)
                granted = await session.try_lock(self.engine, request.sql, request.budget)
            else:
                granted = await session.wait_lock(self.engine, request.sql, step.milliseconds, quiet=step.quiet)
            if granted:
                return True
            self.saw_held(request, entry)
            if (news := plan.news(clock())) is not None and log.isEnabledFor(news[0]):
                self.log_wait(request, news, holders := await self._look_on(session, request.sql))
                self.saw_held(request, entry, holders)
        return False

    # ------------------------------------------------------------ release

    async def release(self, hold: Hold[AsyncLockConnection], *, leaving: bool = False, failing: bool = False) -> None:
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
        mine, handed_over = self.let_go(hold)
        if not mine:
            raise hold.not_held_error()
        if not handed_over:
            kept = False
            try:
                if hold.reason is None and not spoiled:
                    kept = await self._unlock(hold, hold.session)
            finally:
                if kept:
                    self.keeper.checkin(hold.session)
                else:
                    self.keeper.discard(hold.session)
                self.dequeue(hold.entry)
        self.released(hold, spoiled=spoiled and not failing)

    async def _unlock(self, hold: Hold[AsyncLockConnection], session: AsyncLockConnection) -> bool:
        """Unlock on the server. Returns whether the session may be used again."""
        try:
            if session.lent:
                await session.reclaim(self.engine)
            done = await session.unlock(self.engine, hold.sql)
        except Exception as error:
            if not (session.dead or is_connection_lost(error)):
                raise
            hold.reason = session.dead or "killed"
            return False
        if not done:
            hold.reason = "killed"
        return done and not session.lent

    async def _pass_by(self, session: AsyncLockConnection, sql: LockSql) -> None:
        """Unlock a session that was handed over to somebody who cannot use it."""
        try:
            await session.unlock(self.engine, sql)
        except BaseException:
            self.keeper.discard(session)
            raise
        self.keeper.checkin(session)

    def abandon(self, hold: Hold[AsyncLockConnection]) -> None:
        """Free a lock whose handle was dropped; called by a finaliser, so the work is done on the loop."""

        def close() -> None:
            mine, handed_over = self.let_go(hold)
            if mine and not handed_over:
                self.keeper.discard(hold.session)
                self.dequeue(hold.entry)

        on_loop(self.loop, close)

    def close_dead(self) -> None:
        self.keeper.reap(time.monotonic())

    # ------------------------------------------------------------ looking

    async def holders(self, sql: LockSql) -> list[Holder]:
        """Ask the server who holds what the statements are for, on a session that holds nothing.

        Raises:
            UnreachableError: there is no server.
            PoolerError, StandbyError, UnsupportedServerError: as `acquire`.
        """
        session = await self.keeper.checkout_for_query()
        try:
            found = await self._look(session, sql)
        except BaseException as error:
            self.keeper.discard(session)
            if isinstance(error, Exception) and (told := translate_connect_error(self.engine, error)):
                raise told from error
            raise
        self.keeper.checkin(session)
        return found

    async def _look(self, session: AsyncLockConnection, sql: LockSql, limit: float = STATEMENT_BUDGET) -> list[Holder]:
        return await session.through(self.engine, sql.holders, limit=limit)

    async def _look_on(self, session: AsyncLockConnection, sql: LockSql) -> list[Holder]:
        """For a message: nothing must fail for it."""
        try:
            return await self._look(session, sql, WAIT_GRACE)
        except Exception:
            log.debug("could not look who holds a lock", exc_info=True)
            session.close_after_use = True
            return []

    async def _look_quietly(self, sql: LockSql) -> list[Holder]:
        """For a message: nothing must fail or wait for it."""
        with MUTEX:
            idle = self.keeper.roster.idle.pop() if self.keeper.roster.idle else None
        if idle is None:
            return []
        try:
            found = await self._look_on(idle, sql)
        except BaseException:
            self.keeper.discard(idle)
            raise
        self.keeper.checkin(idle)
        return found


def manager_for(engine: AsyncEngine, config: Config) -> AsyncLockManager:
    """Return the lock manager of an engine on the running loop."""
    loop, make = asyncio.get_running_loop(), lambda: AsyncLockManager(engine, config)
    return ManagerRegistry.for_loop(engine.sync_engine, loop, AsyncLockManager, make)
