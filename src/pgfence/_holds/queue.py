"""Who is next inside this process. Pure: no I/O, no threads, no clock.

All contenders for the keys of one engine (and, async, one loop) stand in lines, one line per key, first come first served. An
entry joins all its lines at once and stays there until what it was granted is given back.

The caller serialises every call with `MUTEX`, one for the whole process, because a circle may lead through several engines;
`QueueEntry.leave` and `discard_partial` take it themselves.
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
    """What a contender holds. `hold.BaseHold` is what it really is."""

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
    """A thread or a task: what can hold, and wait for one thing at a time."""

    __slots__ = ("__weakref__", "holds", "kind", "pid", "waits")

    def __init__(self, kind: Literal["thread", "task"]) -> None:
        self.kind = kind
        self.pid = PROCESS.known_pid
        """In a forked child the contender is another one: these holds belong to the parent."""
        self.holds: list[Holding] = []
        self.waits: QueueEntry | None = None


class QueueEntry:
    """A place in the lines of some keys."""

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
        """The keys it is for, sorted."""
        self.no_handoff = no_handoff
        """Neither hands its lock on nor takes one over: each of its grants has something of its own, a token."""
        self.owner = owner
        self.queue = queue
        self.handed_over: Any = None
        """The session on which these very keys are held already: handed over by the one before."""
        self.session: Any = None
        """The session that it is at, from before the server is asked."""
        self.hold: Holding | None = None
        """What it was granted."""
        self.away: UnreachableError | StandbyError | None = None
        """Why the server could not be asked for it, while that is so."""
        self.found_held = False
        """Whether the server has responded that another process holds it."""
        self.last_holder: Holder | None = None
        """Whom it found when it last asked; for messages."""
        self.wake: Callable[[], object] | None = None

    def leave(self) -> None:
        """Leave the queue; a second time does nothing. Takes the mutex."""
        with MUTEX:
            self.queue.dequeue(self)

    def discard_partial(self) -> None:
        """Forget what a grant left behind that was interrupted before its handle was there. Takes the mutex."""
        with MUTEX:
            self.owner.holds[:] = [hold for hold in self.owner.holds if hold.entry is not self]
            self.queue.dequeue(self)

    @property
    def dropped(self) -> bool:
        """Whether its holder has dropped the handle, and it is being given back."""
        return self.hold is not None and self.hold.dropped


class LocalQueue:
    """The lines of one engine."""

    __slots__ = ("_lines", "home")

    def __init__(self, home: object = None) -> None:
        self.home = home
        """What all lines of one engine have in common: of its session locks, and of its leases."""
        self._lines: dict[Hashable, deque[QueueEntry]] = {}

    def enqueue(self, entry: QueueEntry) -> bool:
        """Put an entry at the end of its lines and say whether it stands first in all of them."""
        # All lines at once, so that every line has the order of arrival: entries for several keys cannot block each other
        # in a circle.
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
        """Say whether an entry stands first in all its lines."""
        # Only then does it go to the server: a thousand waiters for one key use one connection.
        for place in entry.places:
            line = self._lines.get(place)
            if line is None or line[0] is not entry:
                return False
        return True

    def dequeue(self, entry: QueueEntry) -> None:
        """Take an entry out, first or not, and wake those who stand first in all their lines now."""
        # Called again where an interrupt has cut a first call short: each step must be one that may have been done before.
        if entry.owner.waits is entry:
            entry.owner.waits = None
        for place in entry.places:
            line = self._lines.get(place)
            if line is None:
                continue
            if line[0] is entry:
                if len(line) == 1:  # in one step: an interrupt must not leave an empty line behind
                    del self._lines[place]
                    continue
                line.popleft()
            elif entry in line:
                line.remove(entry)
                continue
            if line[0].wake is not None and self.is_first(line[0]):
                line[0].wake()

    def find_successor(self, entry: QueueEntry) -> QueueEntry | None:
        """Return who comes first when this entry leaves, if it wants exactly the same keys and may take them over."""
        line = self._lines[entry.places[0]]
        if len(line) < 2 or line[1].places != entry.places or entry.no_handoff or line[1].no_handoff:
            return None
        successor = line[1]
        if len(entry.places) > 1 and any(self._lines[place][1] is not successor for place in entry.places):
            return None
        return successor

    def is_held_by(self, owner: Contender, places: Sequence[Hashable]) -> bool:
        """Say whether this contender is already first in line for one of the keys, by a hold or a wait."""
        # A hold whose handle was dropped does not count: it ends soon, and with it a wait for it.
        for place in places:
            line = self._lines.get(place)
            if line is not None and line[0].owner is owner and not line[0].dropped:
                return True
        return False

    def get_line(self, place: Hashable) -> Iterable[QueueEntry]:
        """Everybody in one line, first to last."""
        return self._lines.get(place, ())

    def __len__(self) -> int:
        return len(self._lines)


def is_deadlock(entry: QueueEntry) -> bool:
    """Say whether waiting with this entry would never end: its owner holds what another contender before it waits for."""
    # Waits alone form no cycle, because each entry joins all its lines at once.
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
