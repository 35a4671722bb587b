"""How many connections one engine may have open for locks, who waits for one, which are kept idle. No I/O."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence._connections.connection import LockConnection
    from pgfence._connections.opening import PendingConnection

WARM = 5


class Borrower(Protocol):
    """Whoever is given a session, and gives it back whatever happens."""

    session: LockConnection | None


class PoolWaiter:
    """A place in the line for a connection."""

    __slots__ = ("may_open", "opening", "session", "wake")

    def __init__(self) -> None:
        self.session: LockConnection | None = None
        """What it was given."""
        self.may_open = False
        """Whether it has one of the places, to open a connection."""
        self.opening: PendingConnection | None = None
        """The connection that is being opened for it, which has the place from then on."""
        self.wake: Callable[[], object] = lambda: None

    @property
    def served(self) -> bool:
        return self.may_open or self.session is not None


class PoolState:
    """The connections of one engine. Pure; the caller holds the mutex."""

    def __init__(self, limit: int, warm: int = WARM) -> None:
        self.limit = limit
        self.max_idle = warm
        """How many are kept idle at most."""
        self.open = 0
        """Open or being opened."""
        self.idle: list[LockConnection] = []
        self._waiting: deque[PoolWaiter] = deque()

    def serve_or_enqueue(self, turn: PoolWaiter) -> PoolWaiter:
        """Give a turn a warm session, the right to open one, or a place in the line for one, and return it."""
        if self.pop_idle(turn):
            return turn
        if self.open < self.limit and not self._waiting:  # whoever waits already comes first
            self.open += 1
            turn.may_open = True
        else:
            self._waiting.append(turn)
        return turn

    def take_slot(self) -> bool:
        """Take a place for a connection that is open already; False: there is none."""
        if self.open >= self.limit:
            return False
        self.open += 1
        return True

    def pop_idle(self, user: Borrower) -> bool:
        """Give the session that was used last, if it lives; a dead one stays for `take_expired`."""
        if not self.idle or self.idle[-1].dead is not None:
            return False
        user.session = self.idle[-1]  # before it is taken out: an interrupt in between must not lose it
        self.idle.pop()
        return True

    def checkin(self, session: LockConnection) -> bool:
        """Take a session back; False: it is one too many, the caller closes it and calls `note_closed`."""
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
        """One is closed, or could not be opened."""
        self.open -= 1
        if self._waiting and self.open < self.limit:
            self.open += 1
            turn = self._waiting.popleft()
            turn.may_open = True
            turn.wake()

    def cancel_wait(self, turn: PoolWaiter) -> None:
        """Leave the line without having been served."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(turn)

    def take_expired(self, now: float) -> list[LockConnection]:
        """Take out the sessions that were idle for too long, or are dead."""
        expired = [s for s in self.idle if s.is_expired(now)]
        self.idle[:] = [s for s in self.idle if s not in expired]
        return expired

    def take_all_idle(self) -> list[LockConnection]:
        """Take out all idle sessions."""
        idle, self.idle[:] = list(self.idle), []
        return idle
