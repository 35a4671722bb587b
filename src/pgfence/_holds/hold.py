"""The record of one grant, and the four states it can be in: held, unknown, lost, released.

A `Hold` belongs to the session that carries the lock. A lease has no session: its record is `_leases.grant.Grant`, on the same
base. The state changes once from held to lost or released, from any thread. What `configure(on_event=...)` receives, and how
names are written in messages, is here too.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pgfence._process.callbacks import call_logged
from pgfence._process.lifecycle import MUTEX, PROCESS
from pgfence.errors import LockLostError, LockNotHeldError
from pgfence.types import Event, Holder

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from pgfence._holds.queue import Contender, QueueEntry
    from pgfence._sql.advisory import LockSql
    from pgfence._sql.storage import TableNames
    from pgfence.config import Config
    from pgfence.errors import LossReason
    from pgfence.keys import LockKey
    from pgfence.types import State


SessionT = TypeVar("SessionT")


def format_names(names: tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names)


def emit_event(
    config: Config,
    event: str,
    names: tuple[str, ...],
    token: int | None = None,
    *,
    owner: str | None = None,
    lease_id: UUID | None = None,
) -> None:
    """Tell `configure(on_event=...)` of an event; its exception is logged."""
    hook: Callable[[Event], object] | None = config.on_event
    if hook is not None:
        what = Event(event, ", ".join(names), owner, lease_id, token, datetime.now(UTC))
        call_logged(lambda: hook(what))


class BaseHold:
    """What every grant has in common: whose it is, whether it still stands, and who wants to hear of its end."""

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
        "stored",
        "token",
    )

    noun = "lock"
    place: TableNames
    """The tables that the token comes from. Not set where there is no token."""

    def __init__(self, names: tuple[str, ...], entry: QueueEntry) -> None:
        self.names = names
        self.entry = entry
        self.owner: Contender = entry.owner
        self.token: int | None = None
        """The fencing token, where the kind has one."""
        self.stored = ""
        """The name that the token belongs to, as it stands in the tables."""
        self.pid = PROCESS.known_pid  # the same call has asked before
        # Weak: the handle refers to the hold and never the other way round, so that a dropped handle is noticed.
        self.handle: Callable[[], object] = _find_nothing
        """A weak reference to what the user has in hand."""
        self.reason: LossReason | None = None
        """What it was marked lost for."""
        self.released = False
        self.dropped = False
        """Whether the handle was dropped without release(): a background thread or task releases it."""
        self.in_doubt = False
        self._listeners: tuple[Callable[[], object], ...] = ()
        self._end_callbacks: tuple[Callable[[], object], ...] = ()

    @property
    def keys(self) -> tuple[LockKey, ...]:
        """The keys of an advisory lock; empty for everything else."""
        return ()

    @property
    def row(self) -> tuple[TableNames, str] | None:
        """The row of the lease table that it stands in, if it uses one."""
        return None

    @property
    def loss_reason(self) -> LossReason | None:
        """Why it is lost, as far as this process knows; None while it is not. Takes no lock of ours."""
        return self.reason

    @property
    def ours(self) -> bool:
        """Whether this process acquired it. A forked child holds nothing."""
        return self.pid == PROCESS.pid

    @property
    def state(self) -> State:
        if not self.ours:
            return "released"
        if self.loss_reason is not None:
            return "lost"
        if self.released:
            return "released"
        # Asked, and no answer yet: silence never counts as held.
        return "unknown" if self.in_doubt else "held"

    def check(self) -> None:
        """Raise unless it is held as far as this process knows."""
        state = self.state
        if state == "lost":
            raise self.lost_error()
        if state == "released":
            raise self.not_held_error()

    @property
    def description(self) -> str:
        """Who has it, for the others of this process."""
        if self.dropped:
            return "a handle of this process that was dropped without release()"
        return f"another {self.owner.kind} of this process"

    def lost_error(self) -> LockLostError:
        reason = self.loss_reason or "killed"
        return LockLostError(
            f"the {self.noun} {format_names(self.names)} was lost while it was held: {_TOLD[reason]}. Another process may hold it by"
            " now; what was done since then was not protected",
            names=self.names,
            reason=reason,
            token=self.token,
        )

    def not_held_error(self) -> LockNotHeldError:
        why = "it was released already" if self.ours else "this is a forked child, it belongs to its parent"
        return LockNotHeldError(f"the {self.noun} {format_names(self.names)} is not held: {why}", names=self.names)

    def lose(self, reason: LossReason) -> bool:
        """Mark it lost, once, and tell the listeners. Callable from any thread; must not be called under the mutex."""
        if not self.ours:
            return False
        with MUTEX:
            if self.reason is not None or self.released:
                return False
            self.reason = reason
            # Taken out under the mutex and called outside of it: a listener may come back here.
            listeners, self._listeners = self._end_callbacks + self._listeners, ()
        for listener in listeners:
            call_logged(listener)
        return True

    def begin_release(self) -> bool:
        """Take the right to release, under the mutex: true for the first caller only."""
        first = not self.released and self.pid == PROCESS.known_pid
        self.released = True
        self._listeners = ()
        if self._end_callbacks:
            for ender in self._end_callbacks:
                ender()
        return first

    def add_end_callback(self, ender: Callable[[], object]) -> None:
        """Have `ender` called at the loss or the release, at once if that is past. It must take no lock of ours."""
        over = not self.ours
        with MUTEX:
            self._end_callbacks = (*self._end_callbacks, ender)
            # Looked at under the same mutex: a loss or a release in between would call nobody.
            over = over or self.state in ("lost", "released")
        if over:
            ender()

    def remove_end_callback(self, ender: Callable[[], object]) -> None:
        with MUTEX:
            self._end_callbacks = tuple(other for other in self._end_callbacks if other != ender)

    def subscribe(self, listener: Callable[[], object]) -> None:
        """Have `listener` called once when it is lost, at once if it is already. It must be quick and not block."""
        if not self.ours:
            return
        with MUTEX:
            lost = self.reason is not None
            if not lost:
                self._listeners = (*self._listeners, listener)
        if lost:
            call_logged(listener)


class Hold(BaseHold, Generic[SessionT]):
    """One grant of an advisory lock: which keys, on which session."""

    __slots__ = ("session", "sql")

    def __init__(self, names: tuple[str, ...], sql: LockSql, entry: QueueEntry, session: SessionT) -> None:
        super().__init__(names, entry)
        self.sql = sql
        self.session = session

    @property
    def keys(self) -> tuple[LockKey, ...]:
        return self.sql.keys

    @property
    def row(self) -> tuple[TableNames, str] | None:
        return self.sql.row


_TOLD: dict[LossReason, str] = {
    "killed": "its server session ended",
    "cut off": "the server cannot be reached any more",
    "returned": "its Connection was closed, and with that returned to the pool",
    "expired": "it was not renewed in time",
    "superseded": "it is somebody else's by now",
    "evicted": "an operator evicted its holder",
    "overdue": "it was held for longer than max_hold",
}


def _find_nothing() -> None:
    """There is no handle (yet)."""


def describe_local_holder(key: LockKey, hold: Hold[Any]) -> Holder:
    """Describe a holder in this process."""
    return Holder(
        name=key.name,
        key=key,
        kind="advisory",
        owner=hold.description,
        pid=hold.pid,
        backend_pid=hold.session.pid,
        token=hold.token,
    )
