"""One call of acquire: who wants what until when, and its place in the queue of this process.

    enqueue ── first in line ── connection ── try ─────────────────── hold ── release: hand over, or unlock
                    │                           └─ busy: wait in slices ─┘
                    └─ handed over by the one before: hold at once

Every step belongs to the contender's own thread or task. Whatever ends it there (timeout, cancel, Ctrl-C, an error) gives
back the connection it was at and leaves the queue; a loss does the same from the watcher's thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from pgfence._connections.connection import RELEASE_BUDGET, STATEMENT_BUDGET
from pgfence._holds.hold import Hold, describe_local_holder, emit_event, format_names
from pgfence._holds.queue import QueueEntry, is_deadlock
from pgfence._holds.wait_plan import NESTED_LIMIT, WARN_AFTER
from pgfence._locks.errors import NO_CONNECTION
from pgfence._locks.outages import Patience, build_gone_error
from pgfence._locks.own_holds import is_held_by
from pgfence._process.callbacks import log
from pgfence._process.clock import clock, seconds
from pgfence._process.lifecycle import MUTEX
from pgfence.errors import LockTimeoutError, SelfDeadlockError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pgfence._connections.connection import ConnectionGoneError
    from pgfence._holds.carriers import CancelEvent, Carrier
    from pgfence._holds.queue import Contender, LocalQueue
    from pgfence._locks.outages import Away
    from pgfence._process.clock import Seconds
    from pgfence._sql.storage import TableNames
    from pgfence.config import Config
    from pgfence.keys import LockKey
    from pgfence.types import Holder


class Wanted(Protocol):
    """What can be asked for: advisory keys, or a row."""

    @property
    def keys(self) -> tuple[LockKey, ...]: ...
    @property
    def places(self) -> tuple[Hashable, ...]:
        """Where its contenders of this process queue."""
        ...

    @property
    def row(self) -> tuple[TableNames, str] | None: ...


W = TypeVar("W", bound=Wanted)


class Acquisition(Generic[W]):
    """One call of acquire."""

    noun: ClassVar[str] = "lock"
    once_only: ClassVar[str] = "a session lock is not re-entrant. Pass the handle on, or use one lock with many names"

    __slots__ = (
        "_budget",
        "_known_patience",
        "_lasts",
        "cancel",
        "config",
        "ends_at",
        "entry",
        "names",
        "owner",
        "queue",
        "timeout",
        "wanted",
    )

    def __init__(
        self,
        queue: LocalQueue,
        config: Config,
        names: tuple[str, ...],
        wanted: W,
        owner: Contender,
        timeout: float,
        *,
        lasts: bool = False,
        no_handoff: bool = False,
        cancel: CancelEvent | None = None,
        budget: float | None = None,
    ) -> None:
        """Describe a call.

        Args:
            queue: of this process.
            config: of the engine.
            names: for messages.
            wanted: what it is for.
            owner: who calls.
            timeout: in seconds; 0 does not wait.
            lasts: whether it waits for a server that is away from its first question on.
            no_handoff: whether each of its grants has something of its own, a token.
            cancel: ends the wait of a thread.
            budget: seconds that one statement may take; None: by the timeout.
        """
        self.queue = queue
        self.config = config
        self.names = names
        self.wanted = wanted
        self.owner = owner
        self.timeout = timeout
        self.ends_at = clock() + timeout if timeout else 0.0
        """When its time is over, on the clock of this process."""
        self.cancel = cancel
        self.entry = QueueEntry(wanted.places, owner, queue, no_handoff=no_handoff)
        self._budget = budget
        self._lasts = lasts and timeout > 0
        self._known_patience: Patience | None = None

    @property
    def patience(self) -> Patience:
        """What it does while the server is away. Made at its first use, because a lock that is free needs none."""
        if self._known_patience is None:
            self._known_patience = Patience(self._lasts)
        return self._known_patience

    @property
    def left(self) -> float:
        return max(0.0, self.ends_at - clock())

    @property
    def waits(self) -> bool:
        return self.timeout > 0

    @property
    def budget(self) -> float:
        """Seconds that one statement of this call may take."""
        # A little more than what is left: a server that hangs must not make the call outlast its timeout by much.
        if self._budget is not None:
            return self._budget
        left = self.ends_at - clock()
        if left >= STATEMENT_BUDGET - RELEASE_BUDGET:
            return STATEMENT_BUDGET
        return RELEASE_BUDGET + left if left > 0.0 else RELEASE_BUDGET

    # ------------------------------------------------------------ in the queue of this process

    def enqueue(self) -> bool | None:
        """Enter the queue, under the mutex, and return whether it stands first for all that is wanted.

        None: another contender is ahead, or this one holds it, and the call does not wait.

        Raises:
            SelfDeadlockError: the wait would never end inside this process.
        """
        owner, entry, queue = self.owner, self.entry, self.queue
        if queue.is_held_by(owner, entry.places) or self.is_held_by_caller():
            if not self.waits:  # a try cannot deadlock
                return None
            raise SelfDeadlockError(
                f"this {owner.kind} holds {format_names(self.names)} already: {self.once_only}", names=self.names
            )
        if queue.enqueue(entry):
            return True
        circle = self.waits and is_deadlock(entry)
        if self.waits and not circle:
            owner.waits = entry
            return False
        queue.dequeue(entry)
        if circle:
            raise SelfDeadlockError(
                f"waiting for {format_names(self.names)} would never end: its holder in this process waits for"
                f" {format_names(_list_held_names(owner))}, held here. Take both at once: one lock with many names",
                names=self.names,
            )
        return None

    def is_held_by_caller(self) -> bool:
        """Say whether its own contender holds what it asks for."""
        return is_held_by(self.owner, self.queue, self.wanted)

    async def wait_for_turn(self, carrier: Carrier) -> bool:
        """Wait until it stands first, or was handed the lock; return False where its time ended before."""
        event, entry = carrier.make_event(), self.entry
        with MUTEX:
            entry.wake = event.set
            if self.queue.is_first(entry):
                event.set()
            self._note_holder_ahead()
        if self.left > WARN_AFTER and not await event.wait(WARN_AFTER, self.cancel):
            self.log_wait(logging.WARNING, WARN_AFTER, self.find_local_holders())
        await event.wait(self.left, self.cancel)
        with MUTEX:
            self.owner.waits = None
            return self.queue.is_first(entry)

    def _note_holder_ahead(self) -> None:
        """Note, under the mutex, whether a contender in front holds it or has found it held by another process."""
        # A loop, because an interrupt that comes while a generator is dropped partway is swallowed there.
        for place in self.entry.places:
            front = next(iter(self.queue.get_line(place)), self.entry)
            if front.hold is not None or front.found_held:
                self.patience.note_held()
                return

    def find_local_holders(self) -> list[Holder]:
        """Return the holders in this process that it queues behind."""
        with MUTEX:
            first = [
                (key, next(iter(self.queue.get_line(place)), None))
                for key, place in zip(self.wanted.keys, self.wanted.places, strict=True)
            ]
        return [
            describe_local_holder(key, entry.hold)
            for key, entry in first
            if entry is not None and isinstance(entry.hold, Hold)
        ]

    # ------------------------------------------------------------ what the server said

    def note_held(self, holders: Sequence[Holder] = ()) -> None:
        """Note that the server has responded, and that it is held."""
        self.patience.note_held(holders)
        self.entry.found_held, self.entry.away = True, None

    def plan_retry(self, error: Away) -> float:
        """Return how many seconds to pause before a server that is away is asked again.

        Raises:
            UnreachableError, StandbyError: the call does not wait for it, or no longer.
        """
        pause = self.patience.pause(self.names, error, self.left)
        if pause is not None:
            self.entry.away = error
            return pause
        ended = self.build_outage_error(error)
        if ended is error:
            raise error
        raise ended from error

    def plan_retry_after_loss(self, gone: ConnectionGoneError, failures: int) -> float:
        """Return how many seconds to pause after a session that ended while it asked; the first of them is replaced at once.

        Raises:
            UnreachableError: one too many ended, and the call does not wait for the server.
        """
        if failures == 1 and (self.left or not self.waits):
            return 0.0
        error = build_gone_error(self.names, gone)
        error.__cause__ = gone.__cause__
        return self.plan_retry(error)

    def build_outage_error(self, error: Away) -> Away:
        """Return the error that the call ends with because it finds no server."""
        return self.patience.build_outage_error(self.names, error, self.timeout)

    def build_late_error(self, holders: Sequence[Holder]) -> Exception:
        """Return what a contender raises that was not first in time: it is held, or the first one found no server."""
        with MUTEX:
            fronts = [next(iter(self.queue.get_line(place)), self.entry) for place in self.entry.places]
        away = [front.away for front in fronts if front.away is not None]
        if not away:
            return self.build_timeout_error(holders)
        self.patience.failures += 1  # so that it gets an error of its own, and not that of another contender
        return self.build_outage_error(away[0])

    def build_timeout_error(self, holders: Sequence[Holder], *, why: str = "") -> LockTimeoutError:
        owner, held_here = self.owner, _list_held_names(self.owner)
        by = f"; held by {', '.join(map(str, holders))}" if holders else ""
        emit_event(self.config, "timeout", self.names)
        if self.is_held_by_caller():
            nested = f"; this {owner.kind} holds it already, and {self.once_only}"
        else:
            nested = f". This {owner.kind} also holds {format_names(held_here)}" if held_here else ""
        return LockTimeoutError(
            f"could not acquire {format_names(self.names)} within {self.timeout:g} s{why}{by}{nested}",
            names=self.names,
            keys=self.wanted.keys,
            timeout=self.timeout,
            holders=holders,
            held_here=held_here,
        )

    def build_no_connection_error(self) -> Exception:
        """Return that all connections were in use until the end of the timeout."""
        return self.build_timeout_error((), why=NO_CONNECTION)

    def log_wait(self, level: int, age: float, holders: Sequence[Holder]) -> None:
        """Say in the log who is waited for."""
        if log.isEnabledFor(level):
            keys = f" ({', '.join(str(key.value) for key in self.wanted.keys)})" if self.wanted.keys else ""
            by = ", ".join(map(str, holders)) or "nobody by now"
            what = f"{self.noun} {format_names(self.names)}{keys}"
            log.log(level, "waiting for the %s for %.1f s, held by %s", what, age, by)


def _list_held_names(owner: Contender) -> tuple[str, ...]:
    return tuple(name for hold in owner.holds for name in hold.names)


def timeout_of(config: Config, timeout: Seconds | None, owner: Contender) -> float:
    """Return how long a call may wait; the default is cut for whoever holds something already."""
    if timeout is not None:
        return seconds(timeout)
    return min(config.default_timeout, NESTED_LIMIT) if owner.holds else config.default_timeout
