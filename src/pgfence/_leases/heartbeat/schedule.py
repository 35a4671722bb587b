"""When each grant is to be looked at next. Pure: no threads, no I/O; the caller holds a lock and brings the time."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from pgfence._leases import terms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgfence._leases.grant import Grant
    from pgfence._sql.storage import TableNames

EARLY = 0.25
"""Which share of its interval a renewal may come early to go along with one that is due: so thousands become few statements."""


class RenewalSchedule:
    """The grants that are kept, by the moment at which something is to be done for them."""

    def __init__(self) -> None:
        self._grants: set[Grant] = set()
        self.places: dict[TableNames, int] = {}
        """How many leases are kept, by their tables."""
        self._heap: list[tuple[float, int, int, Grant]] = []
        self._entries = 0

    def __len__(self) -> int:
        return len(self._grants)

    def __iter__(self) -> Iterator[Grant]:
        return iter(self._grants)

    def __contains__(self, grant: Grant) -> bool:
        return grant in self._grants

    def plan(self, grant: Grant) -> None:
        """Enter a grant, or enter it anew after its times have changed."""
        if grant not in self._grants:
            if grant.family == "lease":
                self.places[grant.place] = self.places.get(grant.place, 0) + 1
            self._grants.add(grant)
        grant.turn += 1
        self._entries += 1
        at = grant.deadline if grant.asked else min(grant.deadline, grant.next_beat)
        heapq.heappush(self._heap, (at, self._entries, grant.turn, grant))

    def remove(self, grant: Grant) -> bool:
        """Forget a grant and say whether it was known. Its entry goes when its time comes, or when too many are stale."""
        if grant not in self._grants:
            return False
        self._grants.discard(grant)
        if grant.family == "lease":
            self.places[grant.place] -= 1
            if not self.places[grant.place]:
                del self.places[grant.place]
        if not self._grants:  # a signal handler's exception may have come between the two of an earlier call
            self.places.clear()
        grant.turn += 1
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._grants):
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)
        return True

    def next(self) -> float:
        """Return when the next grant is to be looked at."""
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def take(self, now: float) -> tuple[list[Grant], list[Grant]]:
        """Return (those to renew, those whose time is over). The first are `asked` from now on, the others forgotten."""
        due: list[Grant] = []
        over: list[Grant] = []
        while self.next() < math.inf:
            grant = self._heap[0][3]
            if grant.released:  # whoever released it was interrupted before the drop
                self.remove(grant)
            elif now >= grant.deadline:
                over.append(grant)
                self.remove(grant)
            elif not grant.asked and grant.next_beat <= now + (EARLY * terms.interval(grant.ttl) if due else 0.0):
                heapq.heappop(self._heap)
                if wants(grant):
                    grant.asked = True
                    due.append(grant)
                else:
                    grant.next_beat = math.inf
                self.plan(grant)
            else:
                break
        return due, over

    def _counts(self, entry: tuple[float, int, int, Grant]) -> bool:
        return entry[2] == entry[3].turn and entry[3] in self._grants


def wants(grant: Grant) -> bool:
    """Say whether a grant whose time has come is to be renewed; with "progress", only if there was some."""
    if grant.heartbeat != "progress":
        return True
    grant.idle = True  # before the look: a progress() that comes after it nudges
    if not grant.progressed:
        return False
    grant.idle = False
    return True
