"""The sync shell: each thread runs its own statements and parks on a gate; opening a connection has a thread of its own."""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

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
from pgfence._runtime.drivers import SYNC_WIRES, wire_for
from pgfence._runtime.localqueue import MUTEX, Contender, Ticket
from pgfence._runtime.sessions import (
    OPEN_BUDGET,
    STATEMENT_BUDGET,
    Borrowed,
    Gone,
    Session,
    Turn,
    judge,
    lost_connection,
    open_connection,
    unreachable,
    wrapped,
)
from pgfence._runtime.state import emit, log, named
from pgfence._runtime.sync_sessions import BorrowedSyncSession, SyncSession
from pgfence._runtime.watch import WATCHER
from pgfence._sql import activity, server
from pgfence._sql.advisory import LockSql
from pgfence.errors import CapacityError, UnreachableError
from pgfence.timing import Deadline, WaitPlan, clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Engine

    from pgfence._runtime.state import Hold
    from pgfence.config import Config
    from pgfence.grants import Holder
    from pgfence.keys import LockKey

_HERE = threading.local()
_MAKING = threading.Lock()


def contender() -> Contender:
    """Return the contender that this thread is."""
    try:
        me: Contender = _HERE.contender
    except AttributeError:
        me = _HERE.contender = Contender("thread")
    return me


class Gate:
    """Where one thread waits to be woken once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self, left: float) -> bool:
        return self._lock.acquire(timeout=min(left, threading.TIMEOUT_MAX))


class Opening:
    """A connection being opened for somebody who may have gone by the time it is there."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.session: SyncSession | None = None
        self.error: Exception | None = None
        self.done = False
        self.abandoned = False


class SyncDomain(Domain[SyncSession]):
    """The lines and connections that the threads of this process share for one engine."""

    def __init__(self, engine: Engine, config: Config) -> None:
        super().__init__(engine, config)
        self.wire = wire_for(engine.dialect.driver, SYNC_WIRES, "sync")
        event.listen(engine, "engine_disposed", weak_method(self.disposed))
        WATCHER.keep(self)

    # ------------------------------------------------------------ acquire

    def acquire(
        self, names: tuple[str, ...], keys: Sequence[LockKey], timeout: float, *, on: Connection | None = None
    ) -> Hold[SyncSession] | None:
        """Return a hold, or None when somebody else has it and `timeout` is 0.

        Args:
            names: for messages.
            keys: sorted, each once.
            timeout: in seconds.
            on: the caller's own connection; None takes one of ours.

        Raises:
            LockTimeoutError: it was not free within the timeout.
            SelfDeadlockError: it would never be, inside this process.
        """
        owner = contender()
        deadline = Deadline.after(timeout, clock())
        ticket = self._first_in_line(names, keys, owner, deadline)
        if ticket is None:
            return None
        try:
            session = ticket.gift
            if session is not None and on is not None:
                self.pass_by(session, LockSql(keys, self.style))
                session = None
            if session is None:
                session = self._at_server(names, keys, owner, deadline, on)
            if session is not None:
                return self.held(names, ticket, session)
        except BaseException:
            if ticket.gift is not None:
                self.discard(ticket.gift)
            self.step_out(ticket)
            raise
        self.step_out(ticket)
        return None

    def _first_in_line(
        self, names: tuple[str, ...], keys: Sequence[LockKey], owner: Contender, deadline: Deadline
    ) -> Ticket | None:
        wait = deadline.timeout > 0
        with MUTEX:
            ticket = self.line_up(names, keys, owner, wait=wait)
            if ticket is None or not ticket.ahead:
                return ticket
            gate = Gate()
            ticket.wake = gate.open
        try:
            gate.wait(deadline.left(clock()))
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
        raise self.timed_out(names, keys, deadline.timeout, owner, self._look_quietly(keys))

    def _at_server(
        self,
        names: tuple[str, ...],
        keys: Sequence[LockKey],
        owner: Contender,
        deadline: Deadline,
        on: Connection | None,
    ) -> SyncSession | None:
        """Contend with other processes. Returns the session that holds, or None: not free, and no time to wait."""
        sql = LockSql(keys, self.style)
        failures = 0
        while True:
            session = self.checkout(deadline, names, keys, owner) if on is None else self.borrow(on)
            began = time.monotonic()
            try:
                if self._contend(session, sql, names, deadline):
                    session.burst, session.granted_at = 0, time.monotonic()
                    return session
            except Gone as gone:
                self.discard(session)
                failures = 1 if time.monotonic() - began > RETRY_AFTER else failures + 1
                if failures > 1 or on is not None:
                    raise self.gone_error(names, gone) from gone.__cause__
                continue
            except BaseException:
                self.discard(session)
                raise
            holders = self._look_on(session, keys) if deadline.timeout > 0 else []
            self.park(session)
            if deadline.timeout <= 0:
                return None
            raise self.timed_out(names, keys, deadline.timeout, owner, holders)

    def _contend(self, session: SyncSession, sql: LockSql, names: tuple[str, ...], deadline: Deadline) -> bool:
        try:
            if self.must_count(len(sql.keys)):
                self.counted(session.ask(self.engine, server.LOCK_TABLE_USE, ()))
                self.room_for(len(sql.keys))
            if session.try_lock(self.engine, sql):
                return True
            if deadline.timeout <= 0:
                return False
            plan = WaitPlan(deadline, session.slice, len(sql.keys), clock())
            while (step := plan.next(clock())) is not None:
                if step.polls:
                    time.sleep(step.seconds)
                    granted = session.try_lock(self.engine, sql)
                else:
                    granted = session.wait_lock(self.engine, sql, step.milliseconds, quiet=step.quiet)
                if granted:
                    return True
                if (news := plan.news(clock())) is not None and log.isEnabledFor(news[0]):
                    holders = ", ".join(map(str, self._look_on(session, sql.keys))) or "nobody by now"
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

    def checkout(
        self,
        deadline: Deadline,
        names: tuple[str, ...] = (),
        keys: Sequence[LockKey] = (),
        owner: Contender | None = None,
    ) -> SyncSession:
        """Return a session: a warm one, a new one, or in turn when `max_lock_connections` are in use."""
        gate = Gate()
        with MUTEX:
            turn = self.roster.take()
            turn.wake = gate.open
        if not turn.served:
            self._wait_turn(turn, gate, deadline, names, keys, owner)
        if turn.given is not None:
            return turn.given
        return self._open(max(OPEN_BUDGET, min(deadline.left(clock()), STATEMENT_BUDGET)), len(keys))

    def _wait_turn(
        self,
        turn: Turn[SyncSession],
        gate: Gate,
        deadline: Deadline,
        names: tuple[str, ...],
        keys: Sequence[LockKey],
        owner: Contender | None,
    ) -> None:
        left = deadline.left(clock())
        try:
            gate.wait(left)
        except BaseException:
            self._forgo(turn)
            raise
        with MUTEX:
            if turn.served:
                return
            self.roster.forgo(turn)
        raise self.timed_out(names, keys, deadline.timeout, owner or contender(), (), why=NO_CONNECTION)

    def _forgo(self, turn: Turn[SyncSession]) -> None:
        with MUTEX:
            self.roster.forgo(turn)
            if turn.may_open:
                self.roster.gone()
        if turn.given is not None:
            self.park(turn.given)

    def _open(self, budget: float, keys: int) -> SyncSession:
        """Open a session on a thread of its own: the caller can time out or be interrupted, the connection cannot be torn."""
        opening = Opening()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._opener, opening), name="pgfence-opener", daemon=True).start()
        try:
            in_time = opening.gate.wait(budget)
        finally:
            with MUTEX:
                opening.abandoned = not opening.done
        if not in_time and opening.abandoned:
            where = self.engine.url.render_as_string(hide_password=True)
            raise UnreachableError(f"no session at {where} within {budget:g} s. Nothing is known about the lock")
        session = opening.session
        if session is None:
            raise opening.error or UnreachableError("the thread that opened a session was ended")
        try:
            self.room_for(keys)
        except CapacityError:
            self.park(session)
            raise
        return session

    def _opener(self, opening: Opening) -> None:
        session: SyncSession | None = None
        error: Exception | None = None
        generation = self.generation
        try:
            dbapi_connection, driver, facts = open_connection(self.engine, self.config.pooler)
            session = SyncSession(dbapi_connection, self.wire(driver), facts)
            session.on_death = weak_method(self.session_died)
            session.watch()
        except Exception as caught:
            error = caught
        finally:
            with MUTEX:
                if session is None:
                    self.roster.gone()
                else:
                    session.retired = generation != self.generation
                    self.counted(session.facts.locks_used, session.facts.lock_limit)
                opening.session, opening.error, opening.done = session, error, True
                abandoned = opening.abandoned
            opening.gate.open()
            if abandoned and session is not None:
                self.park(session)

    def borrow(self, connection: Connection) -> BorrowedSyncSession:
        """Make the caller's own connection a session, for one lock."""
        session = BorrowedSyncSession.of(connection)
        try:
            judge(self.engine, session.facts, session.wire.driver, self.config.pooler)
        except BaseException:
            session.let_go()
            raise
        session.on_death = weak_method(self.session_died)
        return session

    def park(self, session: SyncSession) -> None:
        """Give back a session that holds nothing."""
        if isinstance(session, Borrowed):
            session.let_go()
            return
        with MUTEX:
            kept = self.roster.give(session)
        if not kept:
            self.discard(session)

    def discard(self, session: SyncSession) -> None:
        """Close a session; the server frees whatever it held."""
        session.close()
        if session.ours:
            with MUTEX:
                self.roster.gone()

    # ------------------------------------------------------------ release

    def release(self, hold: Hold[SyncSession], *, leaving: bool = False, failing: bool = False) -> None:
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
        session = hold.session
        spoiled = session.wire.in_transaction is not False if not session.ours and not session.dead else False
        if spoiled and not leaving and hold.state != "released":
            raise in_transaction(hold.names)
        mine, handed_over = self.let_go(hold)
        if not mine:
            raise hold.not_held_error()
        if not handed_over:
            self._give_back(hold, session, spoiled=spoiled)
        if hold.reason is not None:
            raise hold.lost_error()
        emit(self.config, "released", hold.names)
        if spoiled and not failing:
            raise in_transaction(hold.names, closed=True)

    def _give_back(self, hold: Hold[SyncSession], session: SyncSession, *, spoiled: bool) -> None:
        kept = False
        try:
            if hold.reason is None and not spoiled:
                kept = self._unlock(hold, session)
        finally:
            if kept:
                self.park(session)
            else:
                self.discard(session)
            self.step_out(hold.ticket)

    def _unlock(self, hold: Hold[SyncSession], session: SyncSession) -> bool:
        """Unlock on the server. Returns whether the session may be used again."""
        try:
            if session.lent:
                session.take_back(self.engine)
            done = session.unlock(self.engine, LockSql(hold.keys, self.style))
        except Exception as error:
            if not lost_connection(self.engine, session, error):
                raise
            hold.reason = session.dead or "killed"
            return False
        if not done:
            hold.reason = "killed"
        return done and not session.lent

    def pass_by(self, session: SyncSession, sql: LockSql) -> None:
        """Unlock a session that was handed over to somebody who cannot use it."""
        try:
            session.unlock(self.engine, sql)
        except BaseException:
            self.discard(session)
            raise
        self.park(session)

    # ------------------------------------------------------------ looking

    def holders(self, keys: Sequence[LockKey]) -> list[Holder]:
        """Ask the server who holds the keys, on a session that holds nothing."""
        session = self.checkout(Deadline.after(OPEN_BUDGET, clock()))
        try:
            with wrapped(self.engine, session.dbapi_connection) as connection:
                found = activity.holders(connection, keys)
        except BaseException as error:
            self.discard(session)
            if isinstance(error, Exception) and (told := unreachable(self.engine, error)):
                raise told from error
            raise
        self.park(session)
        return found

    def _look_on(self, session: SyncSession, keys: Sequence[LockKey]) -> list[Holder]:
        try:
            with wrapped(self.engine, session.dbapi_connection) as connection:
                return activity.holders(connection, keys)
        except Exception:
            log.debug("could not look who holds a lock", exc_info=True)
            return []

    def _look_quietly(self, keys: Sequence[LockKey]) -> list[Holder]:
        """For a message: nothing must fail or wait for it."""
        with MUTEX:
            idle = self.roster.idle.pop() if self.roster.idle else None
        if idle is None:
            return []
        found = self._look_on(idle, keys)
        self.park(idle)
        return found

    # ------------------------------------------------------------ housekeeping

    def abandon(self, hold: Hold[SyncSession]) -> None:
        """Free a lock whose handle was dropped; called by a finaliser, so the work is done on the callbacks thread."""

        def close() -> None:
            mine, handed_over = self.let_go(hold)
            if mine and not handed_over:
                self.discard(hold.session)
                self.step_out(hold.ticket)

        WATCHER.post(close)

    def reap(self, now: float) -> None:
        with MUTEX:
            cold = self.roster.cold(now)
        for session in cold:
            self.discard(session)

    def session_died(self, session: Session) -> None:
        super().session_died(session)
        self.reap(time.monotonic())

    def disposed(self, _: Engine) -> None:
        """`engine.dispose()`: idle sessions close now, the others when what they hold ends."""
        with MUTEX:
            self.generation += 1
            idle = self.roster.retire()
        for session in idle:
            self.discard(session)


def domain_of(engine: Engine, config: Config) -> SyncDomain:
    """Return the domain of an engine in this process; a forked child gets one of its own."""
    home = Homes.of(engine)
    domain = home.get("sync")
    if isinstance(domain, SyncDomain) and domain.pid == os.getpid():
        return domain
    with _MAKING:
        domain = home.get("sync")
        if not isinstance(domain, SyncDomain) or domain.pid != os.getpid():
            domain = home["sync"] = SyncDomain(engine, config)
    return domain
