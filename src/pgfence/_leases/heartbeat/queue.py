"""What one heartbeat has to do and when, and what the answers mean. No threads, no I/O; the caller holds a lock and brings the time.

A grant is in the schedule from `keep` until it is dropped, lost or over. While a renewal of it waits for the connection or is
on its way it is `renewal_pending`, and only its deadline is looked at.
"""

from __future__ import annotations

import heapq
import math
from itertools import islice
from typing import TYPE_CHECKING

from pgfence._leases import terms
from pgfence._leases.heartbeat.tasks import CheckTask, ListenTask, NotifyListeners, ReleaseTask, RenewRequest, RenewTask
from pgfence._sql.lease import BATCH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgfence._leases.grant import Grant
    from pgfence._leases.heartbeat.tasks import Done, HeartbeatTask, Wake
    from pgfence._leases.terms import LeaseKind
    from pgfence._sql.lease import LeaseResult
    from pgfence._sql.storage import TableNames

    Over = list[tuple[Grant, RenewRequest | None]]


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
        # Earlier entries of this grant stay in the heap and stop counting, because removing one would cost a search.
        grant.schedule_entry += 1
        self._entries += 1  # breaks ties, because grants have no order
        # While a renewal waits for the connection or is on its way, only the deadline counts.
        at = grant.deadline if grant.renewal_pending else min(grant.deadline, grant.next_renewal)
        heapq.heappush(self._heap, (at, self._entries, grant.schedule_entry, grant))

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
        grant.schedule_entry += 1
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._grants):
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)
        return True

    def next(self) -> float:
        """Return when the next grant is to be looked at."""
        while self._heap and not self._is_current(self._heap[0]):
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
            elif not grant.renewal_pending and grant.next_renewal <= now + (
                EARLY * terms.compute_interval(grant.ttl) if due else 0.0
            ):
                heapq.heappop(self._heap)
                if needs_renewal(grant):
                    grant.renewal_pending = True
                    due.append(grant)
                else:
                    grant.next_renewal = math.inf
                self.plan(grant)
            else:
                break
        return due, over

    def _is_current(self, entry: tuple[float, int, int, Grant]) -> bool:
        return entry[2] == entry[3].schedule_entry and entry[3] in self._grants


def needs_renewal(grant: Grant) -> bool:
    """Say whether a grant whose time has come is to be renewed; with "progress", only if there was some."""
    if grant.heartbeat != "progress":
        return True
    grant.idle = True  # before the look: a progress() that comes after it nudges
    if not grant.progressed:
        return False
    grant.idle = False
    return True


LISTEN_AFTER = 1.0
"""Seconds for which leases are held until a connection is opened that listens to evictions."""


class RenewalQueue:
    """Grants to renew, endings to repeat, channels to listen to."""

    def __init__(self, *, listens: bool = True) -> None:
        self.schedule = RenewalSchedule()
        self.listens = listens
        """Whether notifications may come through at all."""
        self.listeners = NotifyListeners()
        self.releases: list[ReleaseTask] = []
        self.failures = 0
        """Chores in a row that failed."""
        self.retry_at = 0.0
        self._due: dict[tuple[TableNames, LeaseKind], dict[Grant, None]] = {}
        """What waits for the connection, first come first served."""
        self._requests: dict[Grant, RenewRequest] = {}
        self._held_since = 0.0
        """Since when there has always been something to keep."""
        self._suspects: dict[Grant, None] = {}
        """Leases whose holder may have been evicted."""

    @property
    def busy(self) -> bool:
        """Whether anybody needs the connection, now or later."""
        return bool(len(self.schedule) or self.releases or self.listeners)

    @property
    def waiting(self) -> bool:
        """Whether something is to be sent."""
        return any(self._due.values()) or bool(self.releases or self.listeners)

    def keep(self, grant: Grant, now: float) -> None:
        """Enter a grant."""
        if not len(self.schedule):
            self._held_since = now
        self.schedule.plan(grant)

    def needs_listening(self, now: float) -> bool:
        """Return whether it is time to listen to evictions: there are leases whose eviction would go unheard."""
        return (
            self.listens and now - self._held_since >= LISTEN_AFTER and self.listeners.is_missing(self.schedule.places)
        )

    def check_later(self, channel: str, name: str | None = None) -> bool:
        """Note that the leases of a name, or all of them, may be evicted, and return whether there are any.

        The heartbeat renews those that it renews anyway: a renewal says so too, and costs no time that others lack. For the
        rest it asks without renewing.

        Args:
            channel: of evictions.
            name: as it is stored; None: all names.
        """
        found = [
            grant
            for grant in self.schedule
            if grant.family == "lease" and grant.place.evictions == channel and name in (None, grant.stored)
        ]
        for grant in found:
            if grant.heartbeat == "auto" and not grant.renewal_pending:
                self._enqueue(grant)
            elif grant not in self._due.get(
                _get_batch(grant), {}
            ):  # else it is to be renewed; one on its way may be too early
                self._suspects[grant] = None
        return bool(found)

    def find(self, place: TableNames, name: str, token: int) -> list[Grant]:
        """Return the leases of a name, as it is stored, up to a token."""
        return [
            grant
            for grant in self.schedule
            if grant.family == "lease" and (grant.place, grant.stored) == (place, name) and (grant.token or 0) <= token
        ]

    def drop(self, grant: Grant) -> RenewRequest | None:
        """Forget a grant, and return what somebody still waits for."""
        self.schedule.remove(grant)
        self._due.get(_get_batch(grant), {}).pop(grant, None)
        return self._requests.pop(grant, None)

    def request_renewal(self, grant: Grant, ttl: float | None, done: Done) -> bool:
        """Enter a renewal that somebody asked for; False: the grant is not known (any more)."""
        if grant not in self.schedule:
            return False
        request = self._requests.setdefault(grant, RenewRequest())
        request.ttl = request.ttl if ttl is None else ttl
        request.done.append(done)
        if not grant.renewal_pending:
            self._enqueue(grant)
        return True

    def make_up(self, grant: Grant, now: float) -> bool:
        """Make up for a beat that was left out for want of progress, and say whether there was one."""
        if not grant.idle or grant.renewal_pending or grant not in self.schedule:
            return False
        grant.idle = False
        grant.next_renewal = now
        self.schedule.plan(grant)
        return True

    def take(self, now: float) -> tuple[bool, Over]:
        """Return (whether something has fallen due, the grants whose time is over and what somebody waits for with each)."""
        due, over = self.schedule.take(now)
        for grant in due:
            self._due.setdefault(_get_batch(grant), {})[grant] = None
        return bool(due), [(grant, self.drop(grant)) for grant in over]

    def pick(self, now: float) -> HeartbeatTask | None:
        """Return the next thing to send, which is off the agenda until its answer is noted."""
        while self._due:
            batch, waiting = next(iter(self._due.items()))
            grants = list(islice(waiting, BATCH))
            for grant in grants:
                del waiting[grant]
            del self._due[batch]
            if waiting:  # behind the other places
                self._due[batch] = waiting
            if grants:
                return RenewTask(*batch, {grant: self._requests.pop(grant, None) for grant in grants})
        # After the renewals: whoever sends notifications without end must not keep them waiting.
        if (check := self._check()) is not None:
            return check
        self.releases = [ending for ending in self.releases if now < ending.until]
        for ending in self.releases:
            if ending.at <= now:
                self.releases.remove(ending)
                return ending
        return self.listeners.choose_change(now, self.schedule.places if self.listens else ())

    def limit(self, task: HeartbeatTask, now: float) -> float:
        """Return the seconds that a task may take: if it hangs, the renewals after it must still have time."""
        limit = task.limit(now)
        if isinstance(task, RenewTask):
            return limit
        return min(
            limit,
            terms.compute_statement_budget(
                max(0.0, min((each.deadline for each in self.schedule), default=math.inf) - now)
            ),
        )

    def note_listening(self, task: ListenTask) -> list[Wake]:
        """Note that a channel is listened to or not, and return whom to wake. Leases evicted before then are looked for."""
        if task.on:
            self.check_later(task.channel)
        return self.listeners.note_change(task)

    def _check(self) -> CheckTask | None:
        # A check without a response is not repeated: with the next connection all leases are checked.
        self._suspects = {grant: None for grant in self._suspects if grant in self.schedule}
        if not self._suspects:
            return None
        place = next(iter(self._suspects)).place
        grants = list(islice((grant for grant in self._suspects if grant.place == place), BATCH))
        for grant in grants:
            del self._suspects[grant]
        return CheckTask(place, grants)

    def note_answer(self, task: RenewTask, grant: Grant, answer: LeaseResult, now: float) -> RenewRequest | None:
        """Note one answer, a loss being marked already, and return the request that is answered with it."""
        request = task.requests[grant]
        stands = grant in self.schedule and grant.state not in ("lost", "released")
        if stands and answer.expires_at is not None:
            stands = grant.note_renewed(task.started, answer.remaining, answer.expires_at, task.get_ttl(grant))
        if not stands:  # nothing brings a grant back, not even a late "renewed"
            self.schedule.remove(grant)
            return request
        grant.renewal_pending = False
        if answer.verdict == "busy":
            grant.progressed = True
            grant.next_renewal = now + terms.retry_after(0, grant.ttl)
            self._put_back(grant, request)
            self.schedule.plan(grant)
            return None
        if grant in self._requests:
            self._enqueue(grant)
        else:
            self.schedule.plan(grant)
        return request

    def note_released(self, ending: ReleaseTask, now: float) -> None:
        """Note that the server has answered to an ending."""
        if ending.needs_retry(now):
            self.releases.append(ending)

    def note_failure(self, task: HeartbeatTask, now: float) -> list[RenewRequest]:
        """Note a task without an answer, which is tried again, and return the requests that are answered with it."""
        self.failures += 1
        requests: list[RenewRequest | None] = []
        if isinstance(task, RenewTask):
            requests += task.requests.values()
            for grant in task.requests:
                if grant in self.schedule:
                    grant.progressed = True
                    self._due.setdefault(_get_batch(grant), {})[grant] = None
        elif isinstance(task, ReleaseTask) and task.plan_retry(now):
            self.releases.append(task)
        # No answer means unknown, not lost: each grant is tried again until its own deadline, and only that ends it.
        due = [grant for waiting in self._due.values() for grant in waiting]
        for grant in due:
            grant.note_unanswered()
        requests += [self._requests.pop(grant, None) for grant in due]
        self.retry_at = now + terms.retry_after(self.failures, min((grant.ttl for grant in due), default=10.0))
        return [request for request in requests if request is not None]

    def _enqueue(self, grant: Grant) -> None:
        grant.renewal_pending = True
        self.schedule.plan(grant)
        self._due.setdefault(_get_batch(grant), {})[grant] = None

    def _put_back(self, grant: Grant, request: RenewRequest | None) -> None:
        """Keep a request that was not fulfilled, before what was asked for since."""
        if request is None:
            return
        later = self._requests.get(grant)
        if later is not None:
            request.ttl = request.ttl if later.ttl is None else later.ttl
            request.done += later.done
        self._requests[grant] = request


def _get_batch(grant: Grant) -> tuple[TableNames, LeaseKind]:
    """Return what grants that are renewed by one statement have in common."""
    return grant.place, grant.family
