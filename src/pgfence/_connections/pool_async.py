"""Connections for the tasks of one loop: opened by a task of ours, given out in turn, kept warm."""

from __future__ import annotations

import asyncio
import math
import threading
import traceback
from typing import TYPE_CHECKING, Any

from pgfence._connections.connect import in_greenlet, judge, open_connection
from pgfence._connections.connection_async import AsyncCallerConnection, AsyncLockConnection, keep, on_loop
from pgfence._connections.drivers import ASYNC_DRIVERS, driver_connection_for
from pgfence._connections.pool import OPEN_BUDGET, OPEN_LIMIT, LockPool, PoolWaiter, close_all
from pgfence._process.lifecycle import MUTEX, PROCESS
from pgfence._sql.errors import translate_connect_error
from pgfence.errors import CapacityError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncConnection

    from pgfence._holds.hold import Hold
    from pgfence.config import Config


class TaskEvent:
    """Where one task waits to be woken once, from any thread."""

    __slots__ = ("_future", "_loop", "_thread")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._future: asyncio.Future[None] = self._loop.create_future()

    def ring(self) -> None:
        if threading.get_ident() == self._thread:
            self._set()
        else:
            on_loop(self._loop, self._set)

    def _set(self) -> None:
        _resolve(self._future)

    async def wait(self, left: float) -> bool:
        """Wait at most `left` seconds and say whether it has rung."""
        over = self._loop.create_future()
        timer = None if math.isinf(left) else self._loop.call_later(left, _resolve, over)
        self._future.add_done_callback(lambda _: _resolve(over))
        try:
            await over
        finally:
            if timer is not None:
                timer.cancel()
        return self._future.done()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AsyncLockPool(LockPool[AsyncLockConnection]):
    """The connections of one engine for the tasks of one loop."""

    def __init__(
        self, engine: Engine, config: Config, on_death: Callable[[Hold[Any] | None], object], **options: Any
    ) -> None:
        self._wire = driver_connection_for(engine.dialect.driver, ASYNC_DRIVERS, "async")
        self.loop = asyncio.get_running_loop()
        super().__init__(engine, config, on_death, **options)
        self._close_with_loop = _close_with_loop(self.sessions)
        self._armed = False
        self._late: set[asyncio.Task[Any] | None] = set()
        """Openings that were given up."""

    async def checkout(self, left: float, keys: int = 1, *, again: bool = False) -> AsyncLockConnection | None:
        """Return a session: a warm one, a new one, or in turn when `max_lock_connections` are in use; None: not in time."""
        bell = None
        with MUTEX:
            turn = self.roster.take(PoolWaiter())
            if not turn.served:
                bell = TaskEvent()
                turn.wake = bell.ring
        if bell is not None and not await self._in_turn(turn, bell, left):
            return None
        budget = max(1.0 if again else OPEN_BUDGET, min(left, OPEN_LIMIT))
        return turn.session or await self._open(budget, keys)

    async def checkout_for_query(self) -> AsyncLockConnection:
        """Return a session to look with: a warm one, or one beside the roster that is closed after the look."""
        turn: PoolWaiter[AsyncLockConnection] = PoolWaiter()
        with MUTEX:
            self.roster.warm(turn)
        return turn.session or await self._open(OPEN_BUDGET, 0)

    async def _in_turn(self, turn: PoolWaiter[AsyncLockConnection], bell: TaskEvent, left: float) -> bool:
        try:
            await bell.wait(left)
        except BaseException:
            with MUTEX:
                self.roster.forgo(turn)
                if turn.may_open:
                    self.roster.gone()
            if turn.session is not None:
                self.checkin(turn.session)
            raise
        with MUTEX:
            self.roster.forgo(turn)
            return turn.served

    async def _open(self, budget: float, keys: int) -> AsyncLockConnection:
        """Open a session in a task of ours: a cancelled caller leaves it to whoever comes next."""
        counts = keys > 0
        try:
            self.begin_opening()
        except UnreachableError:
            with MUTEX:
                if counts:
                    self.roster.gone()
            raise
        task = asyncio.ensure_future(self._opener(counts=counts))
        keep(task)
        try:
            await asyncio.wait({task}, timeout=budget)
        except BaseException:
            task.add_done_callback(self._park_result)
            raise
        if not task.done():
            with MUTEX:
                self._late.add(task)
                self.given_up(counts=counts, late=True)
            task.add_done_callback(self._park_result)
            raise self.too_late(budget)
        session = task.result()
        try:
            self.room_for(keys)
        except CapacityError:
            self.checkin(session)
            raise
        return session

    def _park_result(self, task: asyncio.Task[AsyncLockConnection]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.checkin(task.result())

    async def _opener(self, *, counts: bool) -> AsyncLockConnection:
        generation = self.generation
        session: AsyncLockConnection | None = None
        try:
            if not self._armed:
                self._armed = True
                await anext(self._close_with_loop)
            session = await self._opened_alone()
            return session
        except asyncio.CancelledError as ended:
            # The loop ends. The frames that it was cancelled in refer to each other, and with them lives a socket that is half
            # open: until they are collected the server waits for the rest of a login, up to authentication_timeout.
            traceback.clear_frames(ended.__traceback__)
            raise
        finally:
            with MUTEX:
                late = asyncio.current_task() in self._late
                self._late.discard(asyncio.current_task())
                self.opened(session, generation, counts=counts and not late, late=late)

    async def _opened_alone(self) -> AsyncLockConnection:
        """Open a session of which no child that is forked meanwhile keeps the socket; see the sync twin."""
        engine, pooler, any_pooler = self.engine, self.config.pooler, self.any_pooler
        while True:
            forks = PROCESS.forks
            dbapi_connection, driver, facts = await in_greenlet(
                lambda: open_connection(engine, pooler, any_pooler=any_pooler)
            )
            session = AsyncLockConnection(dbapi_connection, self._wire(driver), facts)
            self.settle(session)
            if forks == PROCESS.forks:
                return session
            session.close()

    async def borrow(self, connection: AsyncConnection, limit: float) -> AsyncLockConnection:
        """Make the caller's own connection a session, for one lock; its first question may take `limit` seconds."""
        try:
            session = await AsyncCallerConnection.of(connection, limit)
        except Exception as error:
            if told := translate_connect_error(self.engine, error):
                raise told from error
            raise
        engine, facts, driver, pooler = self.engine, session.facts, session.wire.driver, self.config.pooler
        try:
            await in_greenlet(lambda: judge(engine, facts, driver, pooler))
        except BaseException:
            session.let_go()
            raise
        session.on_death = self.on_death
        return session

    def reap(self, now: float) -> None:
        """Called on the watcher's thread, done on the loop."""
        if any(session.cold(now) for session in list(self.roster.idle)):
            on_loop(self.loop, lambda: self._close_cold(now))

    def _close_cold(self, now: float) -> None:
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

        def close() -> None:
            for session in idle:
                self.discard(session)

        if on_this(self.loop):
            close()
        else:
            on_loop(self.loop, close)


def on_this(loop: asyncio.AbstractEventLoop) -> bool:
    """Say whether this thread runs that loop at this moment."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


async def _close_with_loop(sessions: set[AsyncLockConnection]) -> AsyncIterator[None]:
    """asyncio.run() closes async generators before the loop: the last chance to end sessions in an orderly way."""
    try:
        yield
    finally:
        holds = [session.hold for session in sessions if session.hold is not None]
        close_all(sessions)
        for hold in holds:
            hold.lose("killed")
        await asyncio.sleep(0)  # for the transports' own farewell
