"""The channels that the heartbeat's connection listens to, and the waiters for a release. No I/O; the caller holds a lock.

It listens to releases while a lease is waited for, and to evictions while leases are held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgfence._leases.heartbeat.tasks import HeartbeatTask
from pgfence._leases.terms import SHORTEST_PATIENCE
from pgfence._sql.storage import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pgfence._leases.heartbeat.connection import HeartbeatConnection
    from pgfence._leases.heartbeat.tasks import Texts
    from pgfence._sql.storage import TableNames

    Wake = Callable[[], object]

LINGER = 10.0
"""Seconds that a connection is kept, and a channel listened to, after the last one who needed it."""


class ListenTask(HeartbeatTask):
    """Begin to listen to a channel, or cease."""

    def __init__(self, place: TableNames, channel: str, *, on: bool) -> None:
        self.place = place
        self.channel = channel
        self.on = on

    def limit(self, now: float) -> float:
        return 10 * SHORTEST_PATIENCE

    def perform(self, link: HeartbeatConnection[Any], sql: Texts, limit: float) -> None:
        if link.hears:
            link.listen(f"{'LISTEN' if self.on else 'UNLISTEN'} {quoted(self.channel)}", self.channel, on=self.on)


class NotifyListeners:
    """The waiters of one heartbeat, and the channels that its connection listens to."""

    def __init__(self) -> None:
        self._waiters: dict[str, dict[str, list[Wake]]] = {}
        self._places: dict[str, TableNames] = {}
        self._on: dict[str, float] = {}
        """Since when a channel that is listened to has had no user; 0 while it has one."""
        self.deaf = False
        """The connection, which may go through a pooler, gets no notifications."""

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, place: TableNames, name: str, wake: Wake) -> bool:
        """Enter a waiter, and say whether its channel has yet to be listened to."""
        channel = place.channel
        self._waiters.setdefault(channel, {}).setdefault(name, []).append(wake)
        self._places[channel] = place
        if channel in self._on:
            self._on[channel] = 0.0
            return False
        return True

    def remove(self, place: TableNames, name: str, wake: Wake, now: float) -> None:
        """Forget a waiter; a second time does nothing."""
        names = self._waiters.get(place.channel, {})
        wakes = names.get(name, [])
        if wake not in wakes:
            return
        wakes.remove(wake)
        if not wakes:
            del names[name]
        if not names:
            del self._waiters[place.channel]
            if place.channel in self._on:
                self._on[place.channel] = now

    def told(self, channel: str, name: str) -> list[Wake]:
        """Return whom news of a name wakes."""
        return list(self._waiters.get(channel, {}).get(name, ()))

    def missing(self, held: Iterable[TableNames]) -> bool:
        """Return whether evictions of leases in these places would go unheard, and listening can change that."""
        return not self.deaf and any(place.evictions not in self._on for place in held)

    def chore(self, now: float, held: Iterable[TableNames] = ()) -> ListenTask | None:
        """Return what is to be changed about the channels, if anything is.

        Args:
            now: the time.
            held: the places of the leases that are held.
        """
        wanted = {place.evictions: place for place in held}
        wanted |= {channel: self._places[channel] for channel in self._waiters}
        for channel, place in wanted.items():
            if channel not in self._on:
                self._places[channel] = place
                return ListenTask(place, channel, on=True)
        for channel, since in self._on.items():
            if channel in wanted:
                self._on[channel] = 0.0
            elif not since:
                self._on[channel] = now
            elif now - since > LINGER:
                return ListenTask(self._places[channel], channel, on=False)
        return None

    def changed(self, listening: ListenTask) -> list[Wake]:
        """Note that a channel is listened to or not, and return whom to wake: what was told before then went unheard."""
        if not listening.on:
            self._on.pop(listening.channel, None)
            return []
        self._on[listening.channel] = 0.0
        return [wake for wakes in self._waiters.get(listening.channel, {}).values() for wake in wakes]

    def deafened(self) -> None:
        """Note that the connection is another one."""
        self._on.clear()
        self.deaf = False
