"""The async shell: each task runs its own statements on its own loop; opening a connection is a task of ours.

The same algorithm as in `sync`, step by step, with the loop's means: a future where a thread has a gate. A cancel may arrive
at every await. It ends the step, closes the session the step was at, and leaves the line; nothing needs to be awaited for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from pgfence._runtime.aio_sessions import AsyncSession, BorrowedAsyncSession, keep, on_loop
from pgfence._runtime.domain import (
    NO_CONNECTION,
    RETRY_AFTER,
    Domain,
    Homes,
    in_transaction,
    keyed,
    translated,
    weak_method,
)
from pgfence._runtime.drivers import ASYNC_WIRES, wire_for
from pgfence._runtime.localqueue import MUTEX, Contender, Ticket
from pgfence._runtime.sessions import (
    OPEN_BUDGET,
    STATEMENT_BUDGET,
    Borrowed,
    Gone,
    Session,
    Turn,
    in_greenlet,
    judge,
    lost_connection,
    open_connection,
    unreachable,
)
from pgfence._runtime.state import emit, log, named
from pgfence._runtime.watch import WATCHER
from pgfence._sql import activity, server
from pgfence._sql.advisory import LockSql
from pgfence.errors import CapacityError, UnreachableError
from pgfence.timing import Deadline, WaitPlan, clock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from pgfence._runtime.state import Hold
    from pgfence.config import Config
    from pgfence.grants import Holder
    from pgfence.keys import LockKey

__all__ = ["AsyncDomain", "contender", "contender_here", "domain_of", "keep", "on_loop"]

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
    if me is None:
        me = _HERE[task] = Contender("task")
    return me


class Bell:
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
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, left: float) -> None:
        timer = self._loop.call_later(left, self._set) if left != float("inf") else None
        try:
            await self._future
        finally:
            if timer is not None:
                timer.cancel()


class AsyncDomain(Domain[AsyncSession]):
    """The lines and connections that the tasks of one loop share for one engine."""

    def __init__(self, engine: AsyncEngine, config: Config) -> None:
        super().__init__(engine.sync_engine, config)
        self.async_engine = engine
        self.loop = asyncio.get_running_loop()
        self.wire = wire_for(engine.dialect.driver, ASYNC_WIRES, "async")
        self._sessions: weakref.WeakSet[AsyncSession] = weakref.WeakSet()
        self._goodbye = _goodbye(self._sessions)
        self._armed = False
        event.listen(engine.sync_engine, "engine_disposed", weak_method(self.disposed))
        WATCHER.keep(self)

    # ------------------------------------------------------------ acquire

    async def acquire(
        self, names: tuple[str, ...], keys: Sequence[LockKey], timeout: float, *, on: AsyncConnection | None = None
    ) -> Hold[AsyncSession] | None:
        """Return a hold, or None when somebody else has it and `timeout` is 0; see the sync twin."""
        owner = contender()
        deadline = Deadline.after(timeout, clock())
        ticket = await self._first_in_line(names, keys, owner, deadline)
        if ticket is None:
            return None
        try:
            session = ticket.gift
            if session is not None and on is not None:
                await self.pass_by(session, LockSql(keys, self.style))
                session = None
            if session is None:
                session = await self._at_server(names, keys, owner, deadline, on)
            if session is not None:
                return self.held(names, ticket, session)
        except BaseException:
            if ticket.gift is not None:
                self.discard(ticket.gift)
            self.step_out(ticket)
            raise
        self.step_out(ticket)
        return None

    async def _first_in_line(
        self, names: tuple[str, ...], keys: Sequence[LockKey], owner: Contender, deadline: Deadline
    ) -> Ticket | None:
        wait = deadline.timeout > 0
        with MUTEX:
            ticket = self.line_up(names, keys, owner, wait=wait)
            if ticket is None or not ticket.ahead:
                return ticket
            bell = Bell()
            ticket.wake = bell.ring
        try:
            await bell.wait(deadline.left(clock()))
            with MUTEX:
                owner.waits = None
                if not ticket.ahead:
                    return ticket
        except BaseException:
            if ticket.gift is not None:
                self.discard(ticket.gift)
            self.step_out(ticket)
            raise
        self.step_out(ticket)
        raise self.timed_out(names, keys, deadline.timeout, owner, await self._look_quietly(keys))

    async def _at_server(
        self,
        names: tuple[str, ...],
        keys: Sequence[LockKey],
        owner: Contender,
        deadline: Deadline,
        on: AsyncConnection | None,
    ) -> AsyncSession | None:
        """Contend with other processes. Returns the session that holds, or None: not free, and no time to wait."""
        sql = LockSql(keys, self.style)
        failures = 0
        while True:
            session = await self.checkout(deadline, names, keys, owner) if on is None else await self.borrow(on)
            began = time.monotonic()
            try:
                if await self._contend(session, sql, names, deadline):
                    session.burst, session.granted_at = 0, time.monotonic()
                    return session
                holders = await self._look_on(session, keys) if deadline.timeout > 0 else []
            except Gone as gone:
                self.discard(session)
                failures = 1 if time.monotonic() - began > RETRY_AFTER else failures + 1
                if failures > 1 or on is not None:
                    raise self.gone_error(names, gone) from gone.__cause__
                continue
            except BaseException:
                self.discard(session)
                raise
            self.park(session)
            if deadline.timeout <= 0:
                return None
            raise self.timed_out(names, keys, deadline.timeout, owner, holders)

    async def _contend(self, session: AsyncSession, sql: LockSql, names: tuple[str, ...], deadline: Deadline) -> bool:
        try:
            if self.must_count(len(sql.keys)):
                self.counted(await session.ask(self.engine, server.LOCK_TABLE_USE, ()))
                self.room_for(len(sql.keys))
            if await session.try_lock(self.engine, sql):
                return True
            if deadline.timeout <= 0:
                return False
            plan = WaitPlan(deadline, session.slice, len(sql.keys), clock())
            while (step := plan.next(clock())) is not None:
                if step.polls:
                    await asyncio.sleep(step.seconds)
                    granted = await session.try_lock(self.engine, sql)
                else:
                    granted = await session.wait_lock(self.engine, sql, step.milliseconds, quiet=step.quiet)
                if granted:
                    return True
                if (news := plan.news(clock())) is not None and log.isEnabledFor(news[0]):
                    holders = ", ".join(map(str, await self._look_on(session, sql.keys))) or "nobody by now"
                    log.log(
                        news[0],
                        "waiting for the lock %s (%s) for %.1f s, held by %s",
                        named(names),
                        keyed(sql),
                        news[1],
                        holders,
                    )
        except Exception as error:
            raise translated(self.engine, session, error) from error
        return False

    # ------------------------------------------------------------ connections

    async def checkout(
        self,
        deadline: Deadline,
        names: tuple[str, ...] = (),
        keys: Sequence[LockKey] = (),
        owner: Contender | None = None,
    ) -> AsyncSession:
        """Return a session: a warm one, a new one, or in turn when `max_lock_connections` are in use."""
        bell = None
        with MUTEX:
            turn = self.roster.take()
            if not turn.served:
                bell = Bell()
                turn.wake = bell.ring
        if bell is not None:
            await self._wait_turn(turn, bell, deadline, names, keys, owner)
        if turn.given is not None:
            return turn.given
        return await self._open(max(OPEN_BUDGET, min(deadline.left(clock()), STATEMENT_BUDGET)), len(keys))

    async def _wait_turn(
        self,
        turn: Turn[AsyncSession],
        bell: Bell,
        deadline: Deadline,
        names: tuple[str, ...],
        keys: Sequence[LockKey],
        owner: Contender | None,
    ) -> None:
        try:
            await bell.wait(deadline.left(clock()))
        except BaseException:
            self._forgo(turn)
            raise
        with MUTEX:
            if turn.served:
                return
            self.roster.forgo(turn)
        raise self.timed_out(names, keys, deadline.timeout, owner or contender(), (), why=NO_CONNECTION)

    def _forgo(self, turn: Turn[AsyncSession]) -> None:
        with MUTEX:
            self.roster.forgo(turn)
            if turn.may_open:
                self.roster.gone()
        if turn.given is not None:
            self.park(turn.given)

    async def _open(self, budget: float, keys: int) -> AsyncSession:
        """Open a session in a task of ours: a cancelled caller leaves it to whoever comes next."""
        task = asyncio.ensure_future(self._opener())
        keep(task)
        try:
            await asyncio.wait({task}, timeout=budget)
        except BaseException:
            task.add_done_callback(self._park_result)
            raise
        if not task.done():
            task.add_done_callback(self._park_result)
            where = self.engine.url.render_as_string(hide_password=True)
            raise UnreachableError(f"no session at {where} within {budget:g} s. Nothing is known about the lock")
        session = task.result()
        try:
            self.room_for(keys)
        except CapacityError:
            self.park(session)
            raise
        return session

    def _park_result(self, task: asyncio.Task[AsyncSession]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.park(task.result())

    async def _opener(self) -> AsyncSession:
        session: AsyncSession | None = None
        generation = self.generation
        try:
            if not self._armed:
                self._armed = True
                await anext(self._goodbye)
            engine, pooler = self.engine, self.config.pooler
            dbapi_connection, driver, facts = await in_greenlet(lambda: open_connection(engine, pooler))
            session = AsyncSession(dbapi_connection, self.wire(driver), facts)
            session.on_death = weak_method(self.session_died)
            session.watch()
            self._sessions.add(session)
        finally:
            with MUTEX:
                if session is None:
                    self.roster.gone()
                else:
                    session.retired = generation != self.generation
                    self.counted(session.facts.locks_used, session.facts.lock_limit)
        return session

    async def borrow(self, connection: AsyncConnection) -> BorrowedAsyncSession:
        """Make the caller's own connection a session, for one lock."""
        session = await BorrowedAsyncSession.of(connection)
        try:
            engine, facts, driver, pooler = self.engine, session.facts, session.wire.driver, self.config.pooler
            await in_greenlet(lambda: judge(engine, facts, driver, pooler))
        except BaseException:
            session.let_go()
            raise
        session.on_death = weak_method(self.session_died)
        return session

    def park(self, session: AsyncSession) -> None:
        """Give back a session that holds nothing."""
        if isinstance(session, Borrowed):
            session.let_go()
            return
        with MUTEX:
            kept = self.roster.give(session)
        if not kept:
            self.discard(session)

    def discard(self, session: AsyncSession) -> None:
        """Close a session; the server frees whatever it held."""
        session.close()
        if session.ours:
            with MUTEX:
                self.roster.gone()

    # ------------------------------------------------------------ release

    async def release(self, hold: Hold[AsyncSession], *, leaving: bool = False, failing: bool = False) -> None:
        """Give the lock back, provably, or close its connection; see the sync twin."""
        session = hold.session
        spoiled = session.wire.in_transaction is not False if not session.ours and not session.dead else False
        if spoiled and not leaving and hold.state != "released":
            raise in_transaction(hold.names)
        mine, handed_over = self.let_go(hold)
        if not mine:
            raise hold.not_held_error()
        if not handed_over:
            await self._give_back(hold, session, spoiled=spoiled)
        if hold.reason is not None:
            raise hold.lost_error()
        emit(self.config, "released", hold.names)
        if spoiled and not failing:
            raise in_transaction(hold.names, closed=True)

    async def _give_back(self, hold: Hold[AsyncSession], session: AsyncSession, *, spoiled: bool) -> None:
        kept = False
        try:
            if hold.reason is None and not spoiled:
                kept = await self._unlock(hold, session)
        finally:
            if kept:
                self.park(session)
            else:
                self.discard(session)
            self.step_out(hold.ticket)

    async def _unlock(self, hold: Hold[AsyncSession], session: AsyncSession) -> bool:
        """Unlock on the server. Returns whether the session may be used again."""
        try:
            if session.lent:
                await session.take_back(self.engine)
            done = await session.unlock(self.engine, LockSql(hold.keys, self.style))
        except Exception as error:
            if not lost_connection(self.engine, session, error):
                raise
            hold.reason = session.dead or "killed"
            return False
        if not done:
            hold.reason = "killed"
        return done and not session.lent

    async def pass_by(self, session: AsyncSession, sql: LockSql) -> None:
        """Unlock a session that was handed over to somebody who cannot use it."""
        try:
            await session.unlock(self.engine, sql)
        except BaseException:
            self.discard(session)
            raise
        self.park(session)

    # ------------------------------------------------------------ looking

    async def holders(self, keys: Sequence[LockKey]) -> list[Holder]:
        """Ask the server who holds the keys, on a session that holds nothing."""
        session = await self.checkout(Deadline.after(OPEN_BUDGET, clock()))
        try:
            found = await session.through(self.engine, lambda connection: activity.holders(connection, keys))
        except BaseException as error:
            self.discard(session)
            if isinstance(error, Exception) and (told := unreachable(self.engine, error)):
                raise told from error
            raise
        self.park(session)
        return found

    async def _look_on(self, session: AsyncSession, keys: Sequence[LockKey]) -> list[Holder]:
        try:
            return await session.through(self.engine, lambda connection: activity.holders(connection, keys))
        except Exception:
            log.debug("could not look who holds a lock", exc_info=True)
            return []

    async def _look_quietly(self, keys: Sequence[LockKey]) -> list[Holder]:
        """For a message: nothing must fail or wait for it."""
        with MUTEX:
            idle = self.roster.idle.pop() if self.roster.idle else None
        if idle is None:
            return []
        try:
            found = await self._look_on(idle, keys)
        except BaseException:
            self.discard(idle)
            raise
        self.park(idle)
        return found

    # ------------------------------------------------------------ housekeeping

    def abandon(self, hold: Hold[AsyncSession]) -> None:
        """Free a lock whose handle was dropped; called by a finaliser, so the work is done on the loop."""

        def close() -> None:
            mine, handed_over = self.let_go(hold)
            if mine and not handed_over:
                self.discard(hold.session)
                self.step_out(hold.ticket)

        on_loop(self.loop, close)

    def reap(self, now: float) -> None:
        """Close cold sessions; called on the watcher's thread, done on the loop."""

        def close() -> None:
            with MUTEX:
                cold = self.roster.cold(now)
            for session in cold:
                self.discard(session)

        if any(s.dead or now - s.idle_since > 1 for s in list(self.roster.idle)):
            on_loop(self.loop, close)

    def session_died(self, session: Session) -> None:
        super().session_died(session)
        self.reap(time.monotonic())

    def disposed(self, _: Engine) -> None:
        """`engine.dispose()`: idle sessions close now, the others when what they hold ends."""
        with MUTEX:
            self.generation += 1
            idle = self.roster.retire()
        for session in idle:
            if self.loop.is_closed():
                with contextlib.suppress(RuntimeError):
                    self.discard(session)
            else:
                on_loop(self.loop, lambda session=session: self.discard(session))  # type: ignore[misc]


async def _goodbye(sessions: weakref.WeakSet[AsyncSession]) -> AsyncIterator[None]:
    """asyncio.run() closes async generators before the loop: the last chance to end sessions in an orderly way."""
    try:
        yield
    finally:
        for session in list(sessions):
            session.close()


def domain_of(engine: AsyncEngine, config: Config) -> AsyncDomain:
    """Return the domain of an engine on the running loop; a connection cannot leave its loop."""
    home = Homes.of(engine.sync_engine)
    loop = asyncio.get_running_loop()
    domain = home.get(id(loop))
    if isinstance(domain, AsyncDomain) and domain.loop is loop and domain.pid == os.getpid():
        return domain
    with MUTEX:
        for place in [
            place for place, other in home.items() if isinstance(other, AsyncDomain) and other.loop.is_closed()
        ]:
            del home[place]
    domain = home[id(loop)] = AsyncDomain(engine, config)
    return domain
