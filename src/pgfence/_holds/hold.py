"""The record of one grant and its four states: held, unknown, lost, released.

A `Hold` belongs to the connection that holds the lock. A lease has no connection, so its record is `_leases.grant.Grant`, with
the same base class. The state becomes lost or released once, in any thread. This module also formats names for messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from pgfence._process.callbacks import call_logged
from pgfence._process.clock import clock
from pgfence._process.events import build_log_fields, emit_event
from pgfence._process.lifecycle import MUTEX, PROCESS
from pgfence.errors import LockLostError, LockNotHeldError, StaleFencingTokenError

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from pgfence._holds.queue import Contender, QueueEntry
    from pgfence._process.events import EventHub
    from pgfence._sql.advisory import LockSql
    from pgfence._sql.storage import TableNames
    from pgfence.errors import LossReason
    from pgfence.keys import LockKey
    from pgfence.types import Holder, State


SessionT = TypeVar("SessionT")


def format_names(names: tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names)


HoldDetails: TypeAlias = "tuple[str, str | None, UUID | None, float | None, int | None]"
"""The details of a hold in events and log records, besides its names and its token: kind, owner, lease id, TTL, attempt."""


class BaseHold:
    """The common part of all grants: the owner, the state, and the callbacks for the end of the grant."""

    __slots__ = (
        "_end_callbacks",
        "_listeners",
        "dropped",
        "entry",
        "handle",
        "in_doubt",
        "names",
        "owner",
        "pid",
        "place",
        "reason",
        "released",
        "since",
        "stored",
        "token",
    )

    noun = "lock"
    place: TableNames
    """The tables that the token comes from. It is not set if there is no token."""

    def __init__(self, names: tuple[str, ...], entry: QueueEntry) -> None:
        self.names = names
        self.entry = entry
        self.owner: Contender = entry.owner
        self.token: int | None = None
        """The fencing token, if this kind of lock has one."""
        self.stored = ""
        """The stored name that the token belongs to."""
        self.pid = PROCESS.known_pid  # the calling function has already checked for a fork
        self.since = clock()
        """The time of the grant, on this process's clock."""
        self.handle: Callable[[], object] = _find_nothing
        """A weak reference to the caller's handle, because a strong one would keep a dropped handle alive."""
        self.reason: LossReason | None = None
        """The reason for the loss, once the hold is marked as lost."""
        self.released = False
        self.dropped = False
        """Whether the handle was dropped without release(), so that a background thread or task releases it."""
        self.in_doubt = False
        self._listeners: tuple[Callable[[], object], ...] = ()
        self._end_callbacks: tuple[Callable[[], object], ...] = ()

    def get_details(self) -> HoldDetails:
        """Return the details of the hold for events and log records."""
        raise NotImplementedError

    def emit(
        self,
        events: EventHub,
        event: str,
        *,
        waited: float | None = None,
        reason: str | None = None,
        contended: bool = False,
    ) -> None:
        """Pass an event of this hold to the listeners. The caller must not hold the mutex."""
        if events.active:
            kind, owner, lease_id, ttl, attempt = self.get_details()
            emit_event(
                events,
                event,
                self.names[0] if len(self.names) == 1 else ", ".join(self.names),
                kind,
                owner=owner,
                lease_id=lease_id,
                token=self.token,
                ttl=ttl,
                waited=waited,
                held=clock() - self.since if event in ("released", "lost") else None,
                reason=reason,
                attempt=attempt,
                contended=contended,
            )

    def build_log_fields(self, event: str) -> dict[str, dict[str, object]]:
        """Return the `extra` of a log record about this hold."""
        _, owner, lease_id, ttl, _ = self.get_details()
        names = ", ".join(self.names)
        return build_log_fields(event, names, owner=owner, lease_id=lease_id, token=self.token, ttl=ttl)

    @property
    def keys(self) -> tuple[LockKey, ...]:
        """The keys of an advisory lock; empty for other kinds."""
        return ()

    @property
    def row(self) -> tuple[TableNames, str] | None:
        """The row of the lease table that the hold uses, if any."""
        return None

    @property
    def loss_reason(self) -> LossReason | None:
        """The reason for the loss, as far as this process knows, or None. Reading it takes no lock."""
        return self.reason

    @property
    def ours(self) -> bool:
        """Whether this process acquired the hold. A forked child holds nothing."""
        return self.pid == PROCESS.pid

    @property
    def state(self) -> State:
        if not self.ours:
            return "released"
        if self.loss_reason is not None:
            return "lost"
        if self.released:
            return "released"
        # Until the server has responded again, the hold does not count as held.
        return "unknown" if self.in_doubt else "held"

    def check(self) -> None:
        """Raise an error if, as far as this process knows, the lock is not held."""
        state = self.state
        if state == "lost":
            raise self.lost_error()
        if state == "released":
            raise self.not_held_error()

    @property
    def description(self) -> str:
        """The holder, as other contenders of this process see it in messages."""
        if self.dropped:
            return "a handle of this process that was dropped without release()"
        return f"another {self.owner.kind} of this process"

    def lost_error(self) -> LockLostError:
        reason = self.loss_reason or "killed"
        return LockLostError(
            f"{self.noun} {format_names(self.names)} was lost while it was held: {_LOSS[reason]}. Another process may hold it"
            " now. Since the loss, only fenced writes were protected",
            names=self.names,
            reason=reason,
            token=self.token,
        )

    def not_held_error(self) -> LockNotHeldError:
        ended = "it was already released" if self.released or self.reason is None else f"it was lost ({self.reason})"
        why = ended if self.ours else "this is a forked child, and the lock belongs to its parent"
        return LockNotHeldError(f"{self.noun} {format_names(self.names)} is not held: {why}", names=self.names)

    def lose(self, reason: LossReason) -> bool:
        """Mark the hold as lost, once, and call the listeners. Any thread may call this, but not under the mutex."""
        if not self.ours:
            return False
        with MUTEX:
            if self.reason is not None or self.released:
                return False
            self.reason = reason
            # Listeners are taken out under the mutex and called without it, because one may call methods of this object.
            listeners, self._listeners = self._end_callbacks + self._listeners, ()
        for listener in listeners:
            call_logged(listener)
        return True

    def begin_release(self) -> bool:
        """Claim the right to release, under the mutex. Return True for the first caller only."""
        first = not self.released and self.pid == PROCESS.known_pid
        self.released = True
        self._listeners = ()
        if self._end_callbacks:
            for ender in self._end_callbacks:
                ender()
        return first

    def add_end_callback(self, ender: Callable[[], object]) -> None:
        """Call `ender` when the hold is lost or released, or now if it has ended. `ender` must not take a lock of pgfence."""
        over = not self.ours
        with MUTEX:
            self._end_callbacks = (*self._end_callbacks, ender)
            # The state is checked under the same mutex, because a loss or release after the check would miss the new callback.
            over = over or self.state in ("lost", "released")
        if over:
            ender()

    def remove_end_callback(self, ender: Callable[[], object]) -> None:
        with MUTEX:
            self._end_callbacks = tuple(other for other in self._end_callbacks if other != ender)

    def subscribe(self, listener: Callable[[], object]) -> None:
        """Call `listener` once when the hold is lost, or now if it is already lost.

        `listener` must be quick and must not block.
        """
        if not self.ours:
            return
        with MUTEX:
            lost = self.reason is not None
            if not lost:
                self._listeners = (*self._listeners, listener)
        if lost:
            call_logged(listener)


class Hold(BaseHold, Generic[SessionT]):
    """One grant of an advisory lock: its keys and its connection."""

    __slots__ = ("session", "sql")

    def __init__(self, names: tuple[str, ...], sql: LockSql, entry: QueueEntry, session: SessionT) -> None:
        super().__init__(names, entry)
        self.sql = sql
        self.session = session

    def get_details(self) -> HoldDetails:
        return self.sql.kind, None, None, None, None

    @property
    def keys(self) -> tuple[LockKey, ...]:
        return self.sql.keys

    @property
    def row(self) -> tuple[TableNames, str] | None:
        return self.sql.row


_LOSS: dict[LossReason, str] = {
    "killed": "its server session ended",
    "cut off": "the server cannot be reached",
    "returned": "its Connection was closed, which returned it to the pool",
    "expired": "it was not renewed in time",
    "superseded": "another holder has taken over",
    "evicted": "an operator evicted its holder",
    "overdue": "it was held for longer than max_hold",
    "resigned": "its holder has resigned",
}


def _find_nothing() -> None:
    """Return None, because there is no handle yet."""


def describe_local_holder(key: LockKey, hold: Hold[Any]) -> Holder:
    """Return the description of a hold of this process, as a `Holder`."""
    from pgfence.types import Holder  # imported here, because that takes longer than acquiring a lock

    return Holder(
        name=key.name,
        key=key,
        kind="advisory",
        owner=hold.description,
        pid=hold.pid,
        backend_pid=hold.session.pid,
        token=hold.token,
    )


def is_about_loss(error: BaseException) -> bool:
    """Return whether an exception, or each one of an exception group as asyncio.TaskGroup raises it, reports a loss."""
    kinds = LockLostError, StaleFencingTokenError
    if isinstance(error, BaseExceptionGroup):
        return error.split(kinds)[1] is None
    return isinstance(error, kinds)
