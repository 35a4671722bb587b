"""Who waits for news of a release, by channel and name. No I/O; the caller holds a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgfence._runtime.chores import Chore
from pgfence._runtime.trust import SHORTEST_PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence._runtime.chores import Texts
    from pgfence._runtime.links import Link
    from pgfence._sql.storage import Place

    Wake = Callable[[], object]

LINGER = 10.0
"""Seconds that a connection is kept, and a channel listened to, after the last one who needed it."""


class Listening(Chore):
    """Begin to listen to a channel, or cease."""

    def __init__(self, place: Place, *, on: bool) -> None:
        self.place = place
        self.on = on

    def limit(self, now: float) -> float:
        return 10 * SHORTEST_PATIENCE

    def perform(self, link: Link[Any], sql: Texts, limit: float) -> None:
        if link.hears:
            link.listen(sql.listen if self.on else sql.unlisten, self.place.channel, on=self.on)


class Ears:
    """The waiters of one heartbeat, and the channels that its connection listens to."""

    def __init__(self) -> None:
        self._waiters: dict[str, dict[str, list[Wake]]] = {}
        self._places: dict[str, Place] = {}
        self._on: dict[str, float] = {}
        """Since when nobody has waited on a channel that is listened to; 0 while somebody does."""

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, place: Place, name: str, wake: Wake) -> bool:
        """Enter a waiter, and say whether its channel has yet to be listened to."""
        channel = place.channel
        self._waiters.setdefault(channel, {}).setdefault(name, []).append(wake)
        self._places[channel] = place
        if channel in self._on:
            self._on[channel] = 0.0
            return False
        return True

    def remove(self, place: Place, name: str, wake: Wake, now: float) -> None:
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

    def chore(self, now: float) -> Listening | None:
        """Return what is to be changed about the channels, if anything is."""
        for channel in self._waiters:
            if channel not in self._on:
                return Listening(self._places[channel], on=True)
        for channel, since in self._on.items():
            if since and now - since > LINGER:
                return Listening(self._places[channel], on=False)
        return None

    def changed(self, listening: Listening) -> list[Wake]:
        """Note that a channel is listened to or not, and return whom to wake: what was told before then went unheard."""
        channel = listening.place.channel
        if not listening.on:
            self._on.pop(channel, None)
            return []
        self._on[channel] = 0.0
        return [wake for wakes in self._waiters.get(channel, {}).values() for wake in wakes]

    def deafened(self) -> None:
        """Note that the connection is another one."""
        self._on.clear()
