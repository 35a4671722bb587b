"""Find the current leader and each change of it, for `observe()` of both classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._leases.request import holder_of
from pgfence._process.clock import between, clock
from pgfence.election._candidacy import LONGEST_PAUSE

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pgfence._holds.carriers import WakeEvent
    from pgfence._leases.manager import LeaseManager
    from pgfence._leases.request import Busy
    from pgfence.election._request import TermOptions, TermRequest
    from pgfence.types import Holder


class Observer:
    """One iteration over the leaders of an election."""

    def __init__(self, candidate: TermOptions[Any, Any], timeout: float) -> None:
        self._candidate = candidate
        self._timeout = timeout
        self._seen: tuple[str | None, int | None] | None = None
        self._started = False
        self._event: WakeEvent | None = None
        self._stop: Callable[[], None] | None = None

    async def find_change(self) -> tuple[bool, Holder | None]:
        """Return whether the leader has changed within the timeout, and the leader. The first call returns immediately."""
        ends_at = clock() + self._timeout
        while True:
            manager, request = self._candidate.build(_skip)
            self._event = manager.carrier.make_event()  # a release during the query must end the next sleep
            row = await manager.look(request.place, request.stored)
            holder = None if row is None else holder_of(request, row)
            leader = None if holder is None else (holder.owner, holder.token)
            if leader != self._seen or not self._started:
                self._seen, self._started = leader, True
                return True, holder
            left = ends_at - clock()
            if left <= 0:
                return False, None
            if self._stop is None:
                self._stop = manager.heartbeat.listen(request.place, request.stored, self._wake)
                if manager.heartbeat.is_listening(request.place):
                    continue  # the connection was already listening, so a release since the query did not wake the observer
            await self._event.wait(min(left, self._choose_pause(manager, request, holder)))

    def _choose_pause(self, manager: LeaseManager, request: TermRequest, holder: Holder | None) -> float:
        if holder is None or not manager.heartbeat.is_listening(request.place):
            return LONGEST_PAUSE  # the beginning of a term sends no notification
        return max(LONGEST_PAUSE, request.terms.ttl / 3 * between(0.9, 1.0))

    def _wake(self) -> None:
        if self._event is not None:
            self._event.set()

    def close(self) -> None:
        if self._stop is not None:
            self._stop()
            self._stop = None


def _skip(_: Busy) -> None:
    """Do nothing, because an observer does not contend."""
