"""The state of one acquire call, with the lock it requests, its deadline, and its place in the queue of this process.

    enqueue ── first in line ── connection ── try ─────────────────── hold ── release: hand over, or unlock
                    │                           └─ busy: wait in slices ─┘
                    └─ handed over by the previous holder: hold at once

Every step runs in the contender's own thread or task. A call that ends without the lock (by a timeout, a cancellation, Ctrl-C or
an error) returns or closes the connection and leaves the queue. If the connection of a hold is lost, the monitor's thread removes
the hold from the queue.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from pgfence._connections.connection import RELEASE_BUDGET, STATEMENT_BUDGET
from pgfence._holds.hold import Hold, describe_local_holder, format_names
from pgfence._holds.queue import QueueEntry, is_deadlock
from pgfence._holds.wait_plan import NESTED_LIMIT, WARN_AFTER
from pgfence._locks.errors import NO_CONNECTION
from pgfence._locks.outages import Patience, build_gone_error
from pgfence._locks.own_holds import is_held_by
from pgfence._process.callbacks import log
from pgfence._process.clock import clock, seconds
from pgfence._process.events import build_log_fields, emit_event
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
    """A resource that can be acquired: advisory keys, or a row of the lease table."""

    @property
    def once_only(self) -> str:
        """The reason why the holder cannot acquire the resource again, for messages."""
        ...

    @property
    def kind(self) -> str: ...
    @property
    def keys(self) -> tuple[LockKey, ...]: ...
    @property
    def places(self) -> tuple[Hashable, ...]:
        """The queues of this process in which the contenders for the resource wait."""
        ...

    @property
    def row(self) -> tuple[TableNames, str] | None: ...


W = TypeVar("W", bound=Wanted)

_CANDIDATES = ("term", "partition")
"""Kinds whose contenders retry in the background, so that no event is emitted for a try that finds the lock held."""


class Acquisition(Generic[W]):
    noun: ClassVar[str] = "lock"

    __slots__ = (
        "_budget",
        "_known_patience",
        "_lasts",
        "began",
        "cancel",
        "config",
        "contended",
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
        """Create the state of a call, which does not wait if `timeout` is 0.

        With `lasts`, it waits for an unreachable server from the first statement on. `budget` limits the seconds of each
        statement; None derives the limit from the timeout.
        """
        self.queue = queue
        self.config = config
        self.names = names
        self.wanted = wanted
        self.owner = owner
        self.timeout = timeout
        self.began = clock()
        self.ends_at = self.began + timeout if timeout else 0.0
        """The deadline of the call, on this process's clock."""
        self.contended = False
        """Whether another holder had the lock when it was requested."""
        self.cancel = cancel
        self.entry = QueueEntry(wanted.places, owner, queue, no_handoff=no_handoff)
        self._budget = budget
        self._lasts = lasts and timeout > 0
        self._known_patience: Patience | None = None

    @property
    def patience(self) -> Patience:
        """The retry state for outages, created on first use, because a free lock needs none."""
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
        """The seconds that one statement of this call may take."""
        # The limit is a little more than the time left, so that a server that hangs cannot make the call exceed its timeout by
        # much.
        if self._budget is not None:
            return self._budget
        left = self.ends_at - clock()
        if left >= STATEMENT_BUDGET - RELEASE_BUDGET:
            return STATEMENT_BUDGET
        return RELEASE_BUDGET + left if left > 0.0 else RELEASE_BUDGET

    # ------------------------------------------------------------ in the queue of this process

    def enqueue(self) -> bool | None:
        """Enter the queue, under the mutex, and return whether this call is first in all queues of the requested resource.

        Return None if the call does not wait, and another contender is ahead or the owner already holds the resource.

        Raises:
            SelfDeadlockError: waiting would deadlock inside this process.
        """
        owner, entry, queue = self.owner, self.entry, self.queue
        if queue.is_held_by(owner, entry.places) or self.is_held_by_caller():
            if not self.waits:  # a try cannot deadlock
                return None
            raise SelfDeadlockError(
                f"this {owner.kind} already holds {format_names(self.names)}: {self.wanted.once_only}", names=self.names
            )
        if queue.enqueue(entry):
            return True
        circle = self.waits and is_deadlock(entry)
        if self.waits and not circle:
            owner.waits = entry
            return False
        queue.dequeue(entry)
        if circle:
            held = _list_held_names(owner)
            raise SelfDeadlockError(
                f"waiting for {format_names(self.names)} would deadlock: its holder in this process is waiting for"
                f" {'one of ' if len(held) > 1 else ''}{format_names(held)}, which this {owner.kind} holds. Acquire them in the same"
                " order everywhere, or all names with one AdvisoryLock",
                names=self.names,
            )
        return None

    def is_held_by_caller(self) -> bool:
        """Return whether the calling contender already holds the resource that it requests."""
        return is_held_by(self.owner, self.queue, self.wanted)

    async def wait_for_turn(self, carrier: Carrier) -> bool:
        """Wait until this call is first in the queue, or the lock is handed over to it.

        Return False if the timeout passes first.
        """
        event, entry = carrier.make_event(), self.entry
        self.contended = True
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
        """Record, under the mutex, whether a contender ahead holds the lock or has found that another process holds it."""
        # This is a loop and not a generator, because an interrupt during the closing of a generator would be swallowed.
        for place in self.entry.places:
            front = next(iter(self.queue.get_line(place)), self.entry)
            if front.hold is not None or front.found_held:
                self.patience.note_held()
                return

    def find_local_holders(self) -> list[Holder]:
        """Return the holders in this process for which this call waits in the queue."""
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

    # ------------------------------------------------------------ responses of the server

    def note_held(self, holders: Sequence[Holder] = ()) -> None:
        """Record the server's response that the lock is held."""
        self.patience.note_held(holders)
        self.entry.found_held, self.entry.away = True, None
        self.contended = True

    def plan_retry(self, error: Away) -> float:
        """Return the pause in seconds before an unreachable server is tried again.

        Raises:
            UnreachableError, StandbyError: the call does not wait for the server, its timeout has passed, or a retry is useless.
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
        """Return the pause in seconds after a connection was lost during a statement. The first loss is retried immediately.

        Raises:
            UnreachableError: the connection was lost again, and the call does not wait for the server.
        """
        if failures == 1 and (self.left or not self.waits):
            return 0.0
        error = build_gone_error(self.names, gone)
        error.__cause__ = gone.__cause__
        return self.plan_retry(error)

    def build_outage_error(self, error: Away) -> Away:
        """Return the error for a call that ends while the server is unreachable."""
        return self.patience.build_outage_error(self.names, error, self.timeout)

    def build_late_error(self, holders: Sequence[Holder]) -> Exception:
        """Return the error for a call whose timeout has passed, because the lock is held or the server is unreachable."""
        with MUTEX:
            fronts = [next(iter(self.queue.get_line(place)), self.entry) for place in self.entry.places]
        away = [front.away for front in fronts if front.away is not None]
        if not away:
            return self.build_timeout_error(holders)
        # The failure is counted so that the next line builds a new error, because contenders must not share exceptions.
        self.patience.failures += 1
        return self.build_outage_error(away[0])

    def build_timeout_error(self, holders: Sequence[Holder], *, why: str = "") -> LockTimeoutError:
        owner, held_here = self.owner, _list_held_names(self.owner)
        by = f"; held by {' and by '.join(map(str, holders))}" if holders else ""
        if self.waits or why:  # for a call that does not wait, `refuse` has emitted the event
            self._emit_end("timeout")
        if self.is_held_by_caller():
            nested = f"; this {owner.kind} already holds it, and {self.wanted.once_only}"
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

    def refuse(self) -> None:
        """Emit the event of a call that ends because another holder has the lock. The caller must not hold the mutex."""
        self.contended = True
        if self.wanted.kind not in _CANDIDATES:
            self._emit_end("timeout" if self.waits else "refused")

    def _emit_end(self, event: str) -> None:
        waited, names = clock() - self.began, ", ".join(self.names)
        emit_event(self.config.events, event, names, self.wanted.kind, waited=waited, contended=self.contended)

    def build_no_connection_error(self) -> Exception:
        """Return the error for a call that found all connections in use until its timeout."""
        return self.build_timeout_error((), why=NO_CONNECTION)

    def log_wait(self, level: int, age: float, holders: Sequence[Holder]) -> None:
        """Log the holders that the call is waiting for."""
        if log.isEnabledFor(level):
            keys = f" ({', '.join(str(key.value) for key in self.wanted.keys)})" if self.wanted.keys else ""
            by = " and by ".join(map(str, holders)) or "an unknown holder"
            what = f"{self.noun} {format_names(self.names)}{keys}"
            fields = build_log_fields("waiting", ", ".join(self.names))
            log.log(level, "waiting for %s for %.1f s, held by %s", what, age, by, extra=fields)


def _list_held_names(owner: Contender) -> tuple[str, ...]:
    return tuple(name for hold in owner.holds for name in hold.names)


def timeout_of(config: Config, timeout: Seconds | None, owner: Contender) -> float:
    """Return the seconds that a call may wait. The default is at most 60 s if the caller already holds another lock."""
    if timeout is not None:
        return seconds(timeout)
    return min(config.default_timeout, NESTED_LIMIT) if owner.holds else config.default_timeout
