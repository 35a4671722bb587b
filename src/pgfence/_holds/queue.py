"""The order of contenders inside this process, without I/O, threads or clocks.

All contenders for the keys of one engine (for an async engine, also of one event loop) wait in queues, one queue per key, in the
order of arrival. An entry joins all its queues at once and stays in them until its grant is released.

The caller holds `MUTEX` for every call, except for `QueueEntry.leave` and `discard_partial`, which take it. There is one mutex
for the whole process, because a deadlock may involve several engines.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pgfence._process.lifecycle import MUTEX, PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from pgfence._sql.storage import TableNames
    from pgfence.errors import StandbyError, UnreachableError
    from pgfence.keys import LockKey
    from pgfence.types import Holder, State


BURST = 16
BURST_TIME = 0.02


class Holding(Protocol):
    """The attributes of a hold that the queue needs. The class is `hold.BaseHold`."""

    names: tuple[str, ...]
    entry: QueueEntry
    stored: str
    place: TableNames
    dropped: bool

    @property
    def token(self) -> int | None: ...
    @property
    def keys(self) -> tuple[LockKey, ...]: ...
    @property
    def row(self) -> tuple[TableNames, str] | None: ...
    @property
    def ours(self) -> bool: ...
    @property
    def state(self) -> State: ...
    def check(self) -> None: ...


class Contender:
    """A thread or task. It may hold several locks but waits for at most one."""

    __slots__ = ("__weakref__", "holds", "kind", "pid", "waits")

    def __init__(self, kind: Literal["thread", "task"]) -> None:
        self.kind = kind
        self.pid = PROCESS.known_pid
        """A forked child uses a new contender, because these holds belong to the parent."""
        self.holds: list[Holding] = []
        self.waits: QueueEntry | None = None


class QueueEntry:
    """A place in the queues of some keys."""

    __slots__ = (
        "away",
        "found_held",
        "handed_over",
        "hold",
        "last_holder",
        "no_handoff",
        "owner",
        "places",
        "queue",
        "session",
        "wake",
    )

    def __init__(
        self, places: Sequence[Hashable], owner: Contender, queue: LocalQueue, *, no_handoff: bool = False
    ) -> None:
        self.places = places
        """The keys, sorted, or the stored name of a lease with its tables."""
        self.no_handoff = no_handoff
        """Whether the lock is never handed over from or to another entry, for example because each grant has its own token."""
        self.owner = owner
        self.queue = queue
        self.handed_over: Any = None
        """The connection that already holds these keys, if the previous holder handed it over."""
        self.session: Any = None
        """The connection that the entry uses, set before the first statement is sent."""
        self.hold: Holding | None = None
        """The hold, once the lock is granted."""
        self.away: UnreachableError | StandbyError | None = None
        """The error of an outage, while it lasts."""
        self.found_held = False
        """Whether the server has responded that another process holds the lock."""
        self.last_holder: Holder | None = None
        """The holder that the last attempt found, for messages."""
        self.wake: Callable[[], object] | None = None

    def leave(self) -> None:
        """Leave the queue. A second call does nothing. This takes the mutex."""
        with MUTEX:
            self.queue.dequeue(self)

    def discard_partial(self) -> None:
        """Remove a grant that was interrupted before its handle existed. This takes the mutex."""
        with MUTEX:
            self.owner.holds[:] = [hold for hold in self.owner.holds if hold.entry is not self]
            self.queue.dequeue(self)

    @property
    def dropped(self) -> bool:
        """Whether the handle of its hold was dropped, so that the hold is being released."""
        return self.hold is not None and self.hold.dropped


class LocalQueue:
    """The queues of one engine."""

    __slots__ = ("_lines", "home")

    def __init__(self, home: object = None) -> None:
        self.home = home
        """An object that an engine's queues for session locks and for leases share."""
        self._lines: dict[Hashable, deque[QueueEntry]] = {}

    def enqueue(self, entry: QueueEntry) -> bool:
        """Append an entry to all its queues, and return whether it is first in each of them."""
        # The entry joins all queues at once, so that every queue has the same order of arrival, and entries for several keys
        # cannot deadlock each other.
        first = True
        for place in entry.places:
            line = self._lines.get(place)
            if line is None:
                self._lines[place] = deque((entry,))
            else:
                line.append(entry)
                first = False
        return first

    def is_first(self, entry: QueueEntry) -> bool:
        """Return whether an entry is first in all its queues."""
        # Only the first entry contends at the server, so a thousand waiters for one key use one connection.
        for place in entry.places:
            line = self._lines.get(place)
            if line is None or line[0] is not entry:
                return False
        return True

    def dequeue(self, entry: QueueEntry) -> None:
        """Remove an entry from any position, and wake the entries that are now first in all their queues."""
        # A call that an interrupt ended early is repeated, so each step must tolerate that it was done before.
        if entry.owner.waits is entry:
            entry.owner.waits = None
        for place in entry.places:
            line = self._lines.get(place)
            if line is None:
                continue
            if line[0] is entry:
                if len(line) == 1:  # deleted in one step, so that an interrupt cannot leave an empty queue behind
                    del self._lines[place]
                    continue
                line.popleft()
            elif entry in line:
                line.remove(entry)
                continue
            if line[0].wake is not None and self.is_first(line[0]):
                line[0].wake()

    def find_successor(self, entry: QueueEntry) -> QueueEntry | None:
        """Return the entry after `entry`, if it requests exactly the same keys and the lock may be handed over."""
        line = self._lines[entry.places[0]]
        if len(line) < 2 or line[1].places != entry.places or entry.no_handoff or line[1].no_handoff:
            return None
        successor = line[1]
        if len(entry.places) > 1 and any(self._lines[place][1] is not successor for place in entry.places):
            return None
        return successor

    def is_held_by(self, owner: Contender, places: Sequence[Hashable]) -> bool:
        """Return whether a contender is first in the queue of one of the keys, holding or waiting."""
        # A hold whose handle was dropped does not count. It is about to be released, so waiting for it is safe.
        for place in places:
            line = self._lines.get(place)
            if line is not None and line[0].owner is owner and not line[0].dropped:
                return True
        return False

    def get_line(self, place: Hashable) -> Iterable[QueueEntry]:
        """Return the entries of one queue, first to last."""
        return self._lines.get(place, ())

    def count_waiting(self) -> int:
        """Return the number of entries that wait, in this process or at the server."""
        return len({id(entry) for line in self._lines.values() for entry in line if entry.hold is None})

    def __len__(self) -> int:
        return len(self._lines)


def is_deadlock(entry: QueueEntry) -> bool:
    """Return whether waiting would deadlock: a contender ahead waits, perhaps indirectly, for a key that the owner holds."""
    # Waits alone cannot form a cycle, because each entry joins all its queues at once.
    if not entry.owner.holds:
        return False
    passed: set[tuple[Hashable, int]] = set()
    todo = [entry]
    while todo:
        current = todo.pop()
        for place in current.places:
            if (place, id(current)) in passed:
                continue
            for other in current.queue.get_line(place):
                if other is current:
                    break
                if other.dropped:
                    continue
                if other.owner is entry.owner:
                    return True
                passed.add((place, id(other)))
                if other.owner.waits is not None:
                    todo.append(other.owner.waits)
    return False
