"""What one process shares for one engine (async: for one engine and loop): lines, connections, judgement. No I/O.

The life of a hold, in both worlds:

    line up ── first in line ── connection ── try ──────────────── hold ── release: hand over, or unlock
                    │                          └─ busy: wait in slices ─┘
                    └─ handed over by the one before: hold at once

Every step has one owner, the contender's own thread or task. Whatever ends it there (timeout, cancel, Ctrl-C, an error) gives
up the connection it was at and leaves the line; a loss does the same from the watcher's thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from pgfence._connections.connection import RELEASE_BUDGET, STATEMENT_BUDGET, ConnectionGoneError, LockConnection
from pgfence._connections.pool import S
from pgfence._holds.events import emit_event, format_names
from pgfence._holds.hold import Hold, here
from pgfence._holds.queue import BURST, BURST_TIME, Contender, LocalQueue, QueueEntry, closes_circle
from pgfence._holds.wait_plan import NESTED_LIMIT
from pgfence._locks.errors import in_transaction
from pgfence._locks.outages import Patience, gone_error
from pgfence._locks.own_holds import is_held_by, self_deadlock
from pgfence._process import threads
from pgfence._process.callbacks import log
from pgfence._process.clock import Deadline, clock, seconds
from pgfence._process.lifecycle import MUTEX, PROCESS
from pgfence._sql.params import style_of
from pgfence._sql.token import TokenSql
from pgfence.errors import (
    LockTimeoutError,
    SelfDeadlockError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Engine

    from pgfence._holds.cancellation import CancelEvent
    from pgfence._locks.outages import Away
    from pgfence._process.clock import Seconds
    from pgfence._sql.advisory import LockSql
    from pgfence._sql.params import ParamStyle
    from pgfence.config import Config
    from pgfence.keys import LockKey
    from pgfence.types import Holder

RETRY_AFTER = 1.0
"""A session that ended sooner than this after it was taken for a wait counts as a failure; only the first is replaced at once."""


_NOW = Deadline(0.0, 0.0)


@dataclass(slots=True)
class LockRequest:
    """One call: who wants what until when."""

    names: tuple[str, ...]
    sql: LockSql
    owner: Contender
    deadline: Deadline
    patient: bool = False
    """Whether it waits for a server that is away from its first question on."""
    told: bool = False
    """Whether the log has been told of a long wait."""
    cancel: CancelEvent | None = None
    """Ends the wait of a thread."""
    known_patience: Patience | None = None

    @property
    def patience(self) -> Patience:
        """What it does while the server is away. Made at its first use, because a lock that is free needs none."""
        if self.known_patience is None:
            self.known_patience = Patience(self.patient)
        return self.known_patience

    @property
    def keys(self) -> tuple[LockKey, ...]:
        return self.sql.keys

    @property
    def left(self) -> float:
        return self.deadline.left(clock())

    @property
    def waits(self) -> bool:
        return self.deadline.timeout > 0

    @property
    def budget(self) -> float:
        """Seconds that one statement of this call may take: a hung server must not outlast its timeout by much."""
        left = self.deadline.at - clock()
        if left >= STATEMENT_BUDGET - RELEASE_BUDGET:
            return STATEMENT_BUDGET
        return RELEASE_BUDGET + left if left > 0.0 else RELEASE_BUDGET


class LockManager(ABC, Generic[S]):
    """Lines and connections of one engine in this process."""

    once_only = "a session lock is not re-entrant. Pass the handle on, or use one lock with many names"

    def __init__(self, engine: Engine, config: Config) -> None:
        threads.require_native_threads()
        self.engine = engine
        self.config = config
        self.style: ParamStyle = style_of(engine.dialect)
        self.pid = PROCESS.pid
        self.lines = LocalQueue(engine.dialect)

    # ------------------------------------------------------------ lines

    def timeout(self, timeout: Seconds | None, owner: Contender) -> float:
        """Return how long a call may wait; the default is cut for whoever holds a session lock already."""
        if timeout is not None:
            return seconds(timeout)
        return min(self.config.default_timeout, NESTED_LIMIT) if owner.holds else self.config.default_timeout

    def request(
        self, names: tuple[str, ...], sql: LockSql, owner: Contender, timeout: float, *, patient: bool = False
    ) -> LockRequest:
        """Return a call; `patient`: it waits for a server that is away from its first question on."""
        deadline = Deadline(clock() + timeout, timeout) if timeout else _NOW
        return LockRequest(names, sql, owner, deadline, patient and timeout > 0)

    def enqueue(self, request: LockRequest, entry: QueueEntry) -> bool | None:
        """Enter the lines, under the mutex, and return whether it stands first in all of them.

        None: another contender is ahead, or this one holds it, and the call does not wait.

        Raises:
            SelfDeadlockError: the wait would never end inside this process.
        """
        owner, names = request.owner, request.names
        if self.lines.held_by(owner, request.sql.places) or (
            owner.holds and is_held_by(owner, self.lines, request.sql)
        ):
            if not request.waits:  # a try cannot deadlock
                return None
            raise SelfDeadlockError(
                f"this {owner.kind} holds {format_names(names)} already: {self.once_only}",
                names=names,
            )
        if self.lines.arrive(entry):
            return True
        circle = request.waits and closes_circle(entry)
        if request.waits and not circle:
            owner.waits = entry
            return False
        self.lines.leave(entry)
        if circle:
            raise SelfDeadlockError(
                f"waiting for {format_names(names)} would never end: its holder in this process waits for"
                f" {format_names(_held_here(owner))}, held here. Take both at once: one lock with many names",
                names=names,
            )
        return None

    def dequeue(self, entry: QueueEntry) -> None:
        """Leave the lines; a second time does nothing."""
        with MUTEX:
            self._leave(entry)

    def _leave(self, entry: QueueEntry) -> None:
        if entry.owner.waits is entry:
            entry.owner.waits = None
        entry.lines.leave(entry)

    def expect_others(
        self, session: LockConnection, request: LockRequest, own: Sequence[Hold[Any]], found: Sequence[Holder]
    ) -> None:
        """Before a wait in the server: raise if the holder is this contender itself, through another engine.

        Raises:
            SelfDeadlockError: it is.
        """
        if error := self_deadlock(request.owner, request.names, own, found, session.facts.started):
            raise error

    # ------------------------------------------------------------ holds

    def torn(self, entry: QueueEntry) -> None:
        """Forget what a grant left behind that was interrupted before its handle was there."""
        with MUTEX:
            entry.owner.holds[:] = [hold for hold in entry.owner.holds if hold.entry is not entry]
            self._leave(entry)

    def held(self, request: LockRequest, entry: QueueEntry, session: S) -> Hold[S]:
        """Record a grant."""
        hold = Hold(request.names, request.sql, entry, session)
        if isinstance(request.sql, TokenSql):
            hold.token, hold.stored, hold.place = session.token, request.sql.name, request.sql.place
        with MUTEX:
            entry.owner.waits = entry.away = None
            entry.owner.holds.append(hold)
            session.hold = entry.hold = hold
        if session.dead is not None:  # it died between the answer and this line
            session.died(session.dead)
        if self.config.on_event is not None:
            emit_event(self.config, "acquired", request.names, hold.token)
        return hold

    def let_go(self, hold: Hold[S]) -> tuple[bool, bool]:
        """Begin a release, under no lock: (it is ours to release, the lock went on to the next in line without a trip).

        The next in line gets the server's lock as it is, at most 16 times in a row or for 20 ms, so that another process
        that waits in the server is not starved by a crowd in this one.
        """
        with MUTEX:
            if not hold.begin_release():
                return False, False
            if hold in hold.owner.holds:
                hold.owner.holds.remove(hold)
            session = hold.session
            session.hold = None
            if hold.reason is not None or session.dead or session.lent or not session.ours:
                return True, False
            heir = self.lines.next_for_same_keys(hold.entry)
            if heir is None or session.handoffs >= BURST or time.monotonic() - session.granted_at > BURST_TIME:
                return True, False
            session.handoffs += 1
            heir.handed_over = session
            self._leave(hold.entry)
            return True, True

    def session_died(self, hold: Hold[Any] | None) -> None:
        """The lock of a dead session is free: who waits for it here need not wait for the loser to leave its block."""
        if hold is not None:
            self.dequeue(hold.entry)
            emit_event(self.config, "lost", hold.names, hold.token)
            log.warning("the lock %s was lost: %s", format_names(hold.names), hold.reason)
        self.close_dead()

    @abstractmethod
    def close_dead(self) -> None:
        """Close the connections that died."""

    def spoiled(self, hold: Hold[S], *, leaving: bool) -> bool:
        """Whether a transaction is open on the caller's own connection, so that the lock cannot be given back there.

        Raises:
            LockNotHeldError: this is a forked child; nothing of its parent's is looked at.
        """
        if hold.pid != PROCESS.pid:
            raise hold.not_held_error()
        if not hold.session.spoiled or hold.state == "released":
            return False
        if not leaving:
            raise in_transaction(hold.names)
        return True

    def released(self, hold: Hold[S], *, spoiled: bool) -> None:
        """Tell of a release, or of what it found."""
        if hold.reason is not None:
            raise hold.lost_error()
        if self.config.on_event is not None:
            emit_event(self.config, "released", hold.names, hold.token)
        if spoiled:
            raise in_transaction(hold.names, closed=True)

    # ------------------------------------------------------------ telling

    def timed_out(self, request: LockRequest, holders: Sequence[Holder], *, why: str = "") -> LockTimeoutError:
        owner, held_here = request.owner, _held_here(request.owner)
        by = f"; held by {', '.join(map(str, holders))}" if holders else ""
        emit_event(self.config, "timeout", request.names)
        if is_held_by(owner, self.lines, request.sql):
            nested = f"; this {owner.kind} holds it already, and {self.once_only}"
        else:
            nested = f". This {owner.kind} also holds {format_names(held_here)}" if held_here else ""
        return LockTimeoutError(
            f"could not acquire {format_names(request.names)} within {request.deadline.timeout:g} s{why}{by}{nested}",
            names=request.names,
            keys=request.keys,
            timeout=request.deadline.timeout,
            holders=holders,
            held_here=held_here,
        )

    def late(self, request: LockRequest, entry: QueueEntry, holders: Sequence[Holder]) -> Exception:
        """Return what a contender raises that was not first in line in time: it is held, or the first one found no server."""
        with MUTEX:
            fronts = [next(iter(self.lines.line(place)), entry) for place in entry.places]
        away = [front.away for front in fronts if front.away is not None]
        if not away:
            return self.timed_out(request, holders)
        request.patience.failures += 1  # so that it gets an error of its own, and not that of another contender
        return self.ended(request, away[0])

    def ended(self, request: LockRequest, error: Away) -> Away:
        """Return the error that a call ends with that finds no server."""
        return request.patience.ended(request.names, error, request.deadline.timeout)

    def saw_line(self, request: LockRequest, entry: QueueEntry) -> None:
        """Note, under the mutex, whether a contender in front holds it or has found it held by another process."""
        # A loop, because an interrupt that comes while a generator is dropped partway is swallowed there.
        for place in entry.places:
            front = next(iter(self.lines.line(place)), entry)
            if front.hold is not None or front.told_held:
                request.patience.held()
                return

    def saw_held(self, request: LockRequest, entry: QueueEntry, holders: Sequence[Holder] = ()) -> None:
        """Note that the server has responded, and that it is held."""
        request.patience.held(holders)
        entry.told_held, entry.away = True, None

    def outlast(self, request: LockRequest, entry: QueueEntry, error: Away) -> float:
        """Return how many seconds to pause before a server that is away is asked again.

        Raises:
            UnreachableError, StandbyError: the call does not wait for it, or no longer.
        """
        pause = request.patience.pause(request.names, error, request.left)
        if pause is not None:
            entry.away = error
            return pause
        ended = self.ended(request, error)
        if ended is error:
            raise error
        raise ended from error

    def holders_here(self, request: LockRequest) -> list[Holder]:
        """Return the holders in this process that a contender stands in line behind."""
        with MUTEX:
            first = [
                (key, next(iter(self.lines.line(place)), None))
                for key, place in zip(request.keys, request.sql.places, strict=True)
            ]
        return [here(key, entry.hold) for key, entry in first if entry is not None and entry.hold is not None]

    def gone(self, request: LockRequest, entry: QueueEntry, gone: ConnectionGoneError, failures: int) -> float:
        """Return how many seconds to pause after a session that ended while it asked; the first of them is replaced at once.

        Raises:
            UnreachableError: one too many ended, and the call does not wait for the server.
        """
        if failures == 1 and (request.left or not request.waits):
            return 0.0
        error = gone_error(request.names, gone)
        error.__cause__ = gone.__cause__
        return self.outlast(request, entry, error)

    def log_wait(self, request: LockRequest, news: tuple[int, float], holders: Sequence[Holder]) -> None:
        """Say in the log who is waited for."""
        keys = ", ".join(str(key.value) for key in request.keys)
        by = ", ".join(map(str, holders)) or "nobody by now"
        if not log.isEnabledFor(news[0]):
            return
        log.log(
            news[0],
            "waiting for the lock %s (%s) for %.1f s, held by %s",
            format_names(request.names),
            keys,
            news[1],
            by,
        )


NO_CONNECTION = ": all connections for locks are in use (max_lock_connections)"


def _held_here(owner: Contender) -> tuple[str, ...]:
    return tuple(name for hold in owner.holds for name in hold.names)
