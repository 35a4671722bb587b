"""How many connections one engine may have open for locks, who waits for one, which are kept warm; how full the server is.

No I/O; the keepers of the two worlds open and close.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pgfence._connections.connection import CallerConnection, LockConnection
from pgfence._process import threads
from pgfence._process.callbacks import log
from pgfence._process.lifecycle import MUTEX, PROCESS
from pgfence._process.monitor import MONITOR
from pgfence._process.references import when_disposed
from pgfence._sql import server
from pgfence._sql.addresses import describe_server
from pgfence._sql.errors import LOCK_OUTCOME_UNKNOWN
from pgfence.errors import CapacityError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine

    from pgfence._holds.hold import Hold
    from pgfence.config import Config

WARM = 5
OPEN_BUDGET = 5.0
"""Seconds that opening a connection may take at least, however short the caller's timeout for the lock is."""
OPEN_LIMIT = 30.0
MANY_KEYS = 100
COUNT_EVERY = 1.0

S = TypeVar("S", bound=LockConnection)


class Borrower(Protocol[S]):
    """Whoever is given a session, and gives it back whatever happens."""

    session: S | None


class PoolWaiter(Generic[S]):
    """A place in the line for a connection."""

    __slots__ = ("may_open", "opening", "session", "wake")

    def __init__(self) -> None:
        self.session: S | None = None
        """What it was given."""
        self.may_open = False
        """Whether it has one of the places, to open a connection."""
        self.opening: Any = None
        """The connection that is being opened for it, which has the place from then on."""
        self.wake: Callable[[], object] = lambda: None

    @property
    def served(self) -> bool:
        return self.may_open or self.session is not None


class PoolState(Generic[S]):
    """The connections of one engine. Pure; the caller holds the mutex."""

    def __init__(self, limit: int, warm: int = WARM) -> None:
        self.limit = limit
        self.warmest = warm
        """How many are kept idle at most."""
        self.open = 0
        """Open or being opened."""
        self.idle: list[S] = []
        self._line: deque[PoolWaiter[S]] = deque()

    def take(self, turn: PoolWaiter[S]) -> PoolWaiter[S]:
        """Give a turn a warm session, the right to open one, or a place in the line for one, and return it."""
        if self.warm(turn):
            return turn
        if self.open < self.limit and not self._line:
            self.open += 1
            turn.may_open = True
        else:
            self._line.append(turn)
        return turn

    def warm(self, user: Borrower[S]) -> bool:
        """Give the session that was used last, if it lives; a dead one stays for `cold`."""
        if not self.idle or self.idle[-1].dead is not None:
            return False
        user.session = self.idle[-1]  # before it is taken out: an interrupt in between must not lose it
        self.idle.pop()
        return True

    def give(self, session: S) -> bool:
        """Take a session back; False: it is one too many, the caller closes it and calls `gone`."""
        if session.dead or session.close_after_use:
            return False
        if self._line:
            turn = self._line.popleft()
            turn.session = session
            turn.wake()
            return True
        if len(self.idle) >= self.warmest:
            return False
        session.idle_since = time.monotonic()
        self.idle.append(session)
        return True

    def gone(self) -> None:
        """One is closed, or could not be opened."""
        self.open -= 1
        if self._line and self.open < self.limit:
            self.open += 1
            turn = self._line.popleft()
            turn.may_open = True
            turn.wake()

    def forgo(self, turn: PoolWaiter[S]) -> None:
        """Leave the line without having been served."""
        with contextlib.suppress(ValueError):
            self._line.remove(turn)

    def cold(self, now: float) -> list[S]:
        """Take out the sessions that were idle for too long, or are dead."""
        cold = [s for s in self.idle if s.cold(now)]
        self.idle[:] = [s for s in self.idle if s not in cold]
        return cold

    def take_all_idle(self) -> list[S]:
        """Take out all idle sessions."""
        idle, self.idle[:] = list(self.idle), []
        return idle


class LockPool(ABC, Generic[S]):
    """What both worlds' keepers of connections share."""

    def __init__(
        self,
        engine: Engine,
        config: Config,
        on_death: Callable[[Hold[Any] | None], object],
        *,
        any_pooler: bool = False,
        warm: int = WARM,
    ) -> None:
        self.engine = engine
        self.config = config
        self.pid = PROCESS.pid
        self.any_pooler = any_pooler
        """The sessions hold nothing by themselves: no pooler is refused."""
        self.roster: PoolState[S] = PoolState(config.max_lock_connections, warm)
        self.generation = 0
        """Raised by every `engine.dispose()`: what was opened before it is not kept."""
        self.sessions: set[S] = set()
        self.stuck = 0
        """Openings that took too long and have not ended yet."""
        self._opening_began = 0.0
        self.on_death = on_death
        self._counted_at = 0.0
        self._used = 0
        self._limit = 0
        self._warned = False
        when_disposed(engine, self._engine_disposed)
        weakref.finalize(engine.dialect, _close_at_exit, weakref.ref(engine.dialect), self.sessions)
        MONITOR.keep(self)

    def settle(self, session: S) -> None:
        """Make a new session ready for its work."""
        wire = session.wire
        wire.pooled = self.any_pooler and (
            self.config.pooler in ("session", "transaction") or wire.pid != session.facts.backend_pid
        )
        session.watch()

    def checkin(self, session: S) -> None:
        """Give back a session that holds nothing."""
        if not session.ours:
            assert isinstance(session, CallerConnection)
            session.let_go()
            return
        with MUTEX:
            kept = self.roster.give(session)
        if not kept:
            self.discard(session)

    def discard(self, session: S) -> None:
        """Close a session; the server frees whatever it held."""
        session.close()
        with MUTEX:
            if session in self.sessions:
                if session.counts:
                    self.roster.gone()
                self.sessions.discard(session)  # last: an interrupt before it is followed by another discard

    @abstractmethod
    def reap(self, now: float) -> None:
        """Close the idle sessions that are dead, or were idle for too long."""

    def _engine_disposed(self, _: Engine) -> None:
        if self.pid == PROCESS.pid:  # a forked child often disposes of the engine that it inherits
            self.disposed()

    @abstractmethod
    def disposed(self) -> None:
        """Close the idle sessions; the others are closed when what they hold ends."""

    def opened(self, session: S | None, generation: int, *, counts: bool, late: bool) -> None:
        """Enter a session that was opened, or none; under the mutex. One that does not count is closed after its use."""
        if late:
            self.stuck -= 1
        if session is None:
            if counts:
                self.roster.gone()
            return
        session.close_after_use = generation != self.generation or not counts
        session.counts = counts
        session.on_death = self.on_death
        self.sessions.add(session)
        self.counted(session.facts.locks_used, session.facts.lock_limit)

    def given_up(self, *, counts: bool, late: bool) -> None:
        """Give the place of an opening, if it has one, to somebody else, under the mutex; when the session comes, it is closed.

        Args:
            counts: whether it has a place.
            late: it takes too long. One that was interrupted says nothing about the server.
        """
        self.stuck += late
        if counts:
            self.roster.gone()

    def too_late(self, budget: float) -> UnreachableError:
        return UnreachableError(
            f"no session at {describe_server(self.engine)} within {budget:g} s. {LOCK_OUTCOME_UNKNOWN}"
        )

    def must_count(self) -> bool:
        """Say whether the last count of the server's lock table is too old to judge a large request by."""
        return time.monotonic() - self._counted_at > COUNT_EVERY

    def took(self, keys: int) -> None:
        """Add what this process took since the last count."""
        self._used += keys

    def counted(self, used: int, limit: int | None = None) -> None:
        self._counted_at = time.monotonic()
        self._used = used
        if limit is not None:
            self._limit = limit

    def begin_opening(self) -> None:
        """Refuse at once when as many openings as there are places are stuck: the server is not there, not busy.

        One more is tried every few seconds, for a driver may hang long after the server is back.

        Raises:
            UnreachableError: it is refused. The place is still the caller's.
        """
        threads.block_during_shutdown()
        now = time.monotonic()
        with MUTEX:
            if self.stuck < self.roster.limit or now - self._opening_began > OPEN_BUDGET:
                self._opening_began = now
                return
        raise UnreachableError(f"{describe_server(self.engine)} does not answer. {LOCK_OUTCOME_UNKNOWN}")

    def room_for(self, keys: int) -> None:
        """Raise CapacityError when the request would fill the server's lock table; warn once when it comes near."""
        if not self._limit:
            return
        judged = server.capacity(self._used, keys, self._limit)
        if isinstance(judged, CapacityError):
            raise judged
        if judged == "warn" and not self._warned:
            log.warning("%d of at least %d places in the server's lock table are taken", self._used, self._limit)
        self._warned = judged == "warn"


def _close_at_exit(dialect: Callable[[], object], sessions: set[Any]) -> None:
    if dialect() is not None:  # nobody collected it: the interpreter ends
        threads.end_all()
    close_all(sessions)


def close_all(sessions: set[Any]) -> None:
    """End sessions in an orderly way: their engine is collected, their loop or the interpreter ends."""
    PROCESS.notice_fork()  # a forked child must not shut down the sockets of its parent
    for session in list(sessions):
        if session.since:  # another thread is inside a statement: it must not lose the memory under it
            MONITOR.shut_down(session)
        else:
            session.close()
    sessions.clear()
