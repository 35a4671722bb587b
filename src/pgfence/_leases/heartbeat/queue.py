"""Decide what one heartbeat must do next and when, and record the results, without threads and I/O.

The caller holds the heartbeat's lock and passes the current time. A grant is in the schedule until it is dropped or lost. While
its renewal waits for the connection or for a response, `renewal_pending` is set and only its deadline is checked.
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
"""The share of its interval by which a renewal may be sent early, in a statement that is due. This saves statements."""


class RenewalSchedule:
    """The grants that are kept, ordered by when something is due for them."""

    def __init__(self) -> None:
        self._grants: set[Grant] = set()
        self.places: dict[TableNames, int] = {}
        """The number of leases in the schedule, by the tables that store them."""
        self._heap: list[tuple[float, int, int, Grant]] = []
        self._entries = 0

    def __len__(self) -> int:
        return len(self._grants)

    def __iter__(self) -> Iterator[Grant]:
        return iter(self._grants)

    def __contains__(self, grant: Grant) -> bool:
        return grant in self._grants

    def plan(self, grant: Grant) -> None:
        """Add a grant, or enter it again after its times have changed."""
        if grant not in self._grants:
            if grant.family == "lease":
                self.places[grant.place] = self.places.get(grant.place, 0) + 1
            self._grants.add(grant)
        # Earlier entries of this grant stay in the heap but are ignored, because removing an entry would cost a search.
        grant.schedule_entry += 1
        self._entries += 1  # a tie-breaker, because grants have no order
        # While a renewal waits for the connection or has been sent, only the deadline counts.
        at = grant.deadline if grant.renewal_pending else min(grant.deadline, grant.next_renewal)
        heapq.heappush(self._heap, (at, self._entries, grant.schedule_entry, grant))

    def remove(self, grant: Grant) -> bool:
        """Remove a grant, and return whether it was in the schedule."""
        # Its entries in the heap are dropped when they become due, or below when too many of them are stale.
        if grant not in self._grants:
            return False
        self._grants.discard(grant)
        if grant.family == "lease":
            self.places[grant.place] -= 1
            if not self.places[grant.place]:
                del self.places[grant.place]
        # Clear the counts too: a signal handler's exception may have interrupted an earlier call between its two steps.
        if not self._grants:
            self.places.clear()
        grant.schedule_entry += 1
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._grants):
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)
        return True

    def next(self) -> float:
        """Return the time at which the next grant is due."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def take(self, now: float) -> tuple[list[Grant], list[Grant]]:
        """Return the grants to renew, marked as `renewal_pending`, and those whose deadline has passed, which are removed."""
        due: list[Grant] = []
        over: list[Grant] = []
        while self.next() < math.inf:
            grant = self._heap[0][3]
            if grant.released:  # the thread that released the grant was interrupted before it dropped the grant
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
    """Return whether a grant that is due must be renewed. With heartbeat="progress", this requires reported progress."""
    if grant.heartbeat != "progress":
        return True
    # The flag is set before `progressed` is read, so that a later call of `progress()` finds it set and requests the renewal.
    grant.idle = True
    if not grant.progressed:
        return False
    grant.idle = False
    return True


LISTEN_AFTER = 1.0
"""Seconds that leases must be held before a connection is opened to listen for evictions. For the term of a leader, it is
opened immediately.
"""


class RenewalQueue:
    """The grants to renew, the releases to repeat and the channels to listen to."""

    def __init__(self, *, listens: bool = True) -> None:
        self.schedule = RenewalSchedule()
        self.listens = listens
        """Whether notifications can arrive at all."""
        self.listeners = NotifyListeners()
        self.releases: list[ReleaseTask] = []
        self.failures = 0
        """The number of tasks in a row that failed."""
        self.retry_at = 0.0
        self._due: dict[tuple[TableNames, LeaseKind], dict[Grant, None]] = {}
        """Renewals that wait for the connection, in order of arrival."""
        self._requests: dict[Grant, RenewRequest] = {}
        self._listen_at = 0.0
        """When to start listening for evictions and for requests to resign."""
        self._suspects: dict[Grant, None] = {}
        """Leases that may have been evicted."""

    @property
    def busy(self) -> bool:
        """Whether the connection is needed, now or later."""
        return bool(len(self.schedule) or self.releases or self.listeners)

    @property
    def waiting(self) -> bool:
        """Whether there is something to send."""
        return any(self._due.values()) or bool(self.releases or self.listeners)

    def has_unsent(self, running: HeartbeatTask | None) -> bool:
        """Return whether a release was never sent, or is being sent, and the server responds."""
        return not self.failures and (
            isinstance(running, ReleaseTask) or any(not one.failures for one in self.releases)
        )

    def keep(self, grant: Grant, now: float) -> None:
        """Start to keep a grant: schedule its renewals, and note when to listen for its eviction."""
        if not len(self.schedule):
            self._listen_at = now + LISTEN_AFTER
        if grant.kind == "term":
            self._listen_at = min(self._listen_at, now)
        self.schedule.plan(grant)

    def needs_listening(self, now: float) -> bool:
        """Return whether evictions of some leases would be missed, so that the heartbeat must start to listen."""
        return self.listens and now >= self._listen_at and self.listeners.is_missing(self.schedule.places)

    def check_later(self, channel: str, name: str | None = None) -> bool:
        """Queue a check for evictions of the leases of a stored name, or of all leases. Return whether there are any."""
        found = [
            grant
            for grant in self.schedule
            if grant.family == "lease"
            and grant.place.evictions == channel
            and (name is None or any(row == name for row, _ in grant.rows))
        ]
        # A renewal also reports an eviction, and takes no time from other leases. So renew the leases that the heartbeat renews
        # anyway, and check the others without renewing them.
        for grant in found:
            if grant.heartbeat == "auto" and not grant.renewal_pending:
                self._enqueue(grant)
            elif grant not in self._due.get(_get_batch(grant), {}):
                # The lease's renewal has been sent, possibly before the eviction, so check the lease separately.
                self._suspects[grant] = None
        return bool(found)

    def find(self, place: TableNames, name: str, token: int) -> list[Grant]:
        """Return the leases of a stored name whose token is at most `token`."""
        return [
            grant
            for grant in self.schedule
            if grant.family == "lease"
            and grant.place == place
            and any(row == name and issued <= token for row, issued in grant.rows)
        ]

    def drop(self, grant: Grant) -> RenewRequest | None:
        """Remove a grant, and return the request that a caller still waits for."""
        self.schedule.remove(grant)
        self._due.get(_get_batch(grant), {}).pop(grant, None)
        return self._requests.pop(grant, None)

    def request_renewal(self, grant: Grant, ttl: float | None, done: Done) -> bool:
        """Add a renewal that a caller of `renew()` requests. Return False if the grant is not kept any more."""
        if grant not in self.schedule:
            return False
        request = self._requests.setdefault(grant, RenewRequest())
        request.ttl = request.ttl if ttl is None else ttl
        request.done.append(done)
        if not grant.renewal_pending:
            self._enqueue(grant)
        return True

    def make_up(self, grant: Grant, now: float) -> bool:
        """Catch up on a renewal that was skipped for lack of progress, and return whether a renewal had been skipped."""
        if not grant.idle or grant.renewal_pending or grant not in self.schedule:
            return False
        grant.idle = False
        grant.next_renewal = now
        self.schedule.plan(grant)
        return True

    def take(self, now: float) -> tuple[bool, Over]:
        """Return whether renewals are due, and the grants past their deadline, each with its pending request of `renew()`."""
        due, over = self.schedule.take(now)
        for grant in due:
            self._due.setdefault(_get_batch(grant), {})[grant] = None
        return bool(due), [(grant, self.drop(grant)) for grant in over]

    def pick(self, now: float) -> HeartbeatTask | None:
        """Remove and return the next task. It is queued again, if necessary, when its result is recorded."""
        while self._due:
            batch, waiting = next(iter(self._due.items()))
            grants = list(islice(waiting, BATCH))
            for grant in grants:
                del waiting[grant]
            del self._due[batch]
            if waiting:  # the rest of the batch is moved to the end, so that the leases of other tables are renewed too
                self._due[batch] = waiting
            if grants:
                return RenewTask(*batch, {grant: self._requests.pop(grant, None) for grant in grants})
        # Checks come after the renewals, because a client that floods the channel with notifications must not delay renewals.
        if (check := self._check()) is not None:
            return check
        self.releases = [ending for ending in self.releases if now < ending.until]
        for ending in self.releases:
            if ending.at <= now:
                self.releases.remove(ending)
                return ending
        return self.listeners.choose_change(now, self.schedule.places if self.listens else ())

    def limit(self, task: HeartbeatTask, now: float) -> float:
        """Return the seconds that a task may take."""
        # If the task hangs, the renewals that follow it must still have time before the first deadline.
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
        """Record the result of a LISTEN or UNLISTEN, and return the callbacks to call."""
        # This connection did not receive notifications of evictions before the LISTEN, so check the leases.
        if task.on:
            self.check_later(task.channel)
        return self.listeners.note_change(task)

    def _check(self) -> CheckTask | None:
        # A check without a response is not repeated, because all leases are checked when the next connection listens.
        self._suspects = {grant: None for grant in self._suspects if grant in self.schedule}
        if not self._suspects:
            return None
        place = next(iter(self._suspects)).place
        grants = list(islice((grant for grant in self._suspects if grant.place == place), BATCH))
        for grant in grants:
            del self._suspects[grant]
        return CheckTask(place, grants)

    def note_answer(self, task: RenewTask, grant: Grant, answer: LeaseResult, now: float) -> RenewRequest | None:
        """Record the response for one grant, after a loss has been marked.

        Return the request that the response fulfils, if any.
        """
        request = task.requests[grant]
        stands = grant in self.schedule and grant.state not in ("lost", "released")
        if stands and answer.expires_at is not None:
            stands = grant.note_renewed(task.started, answer.remaining, answer.expires_at, task.get_ttl(grant))
        if not stands:  # a lost grant stays lost, even if a late response says "renewed"
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
        """Queue a release again if the server's response was inconclusive and there is time for another try."""
        if ending.needs_retry(now):
            self.releases.append(ending)

    def note_failure(self, task: HeartbeatTask, now: float) -> list[RenewRequest]:
        """Record a task that failed, and queue it again. Return the requests that end with the error."""
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
        # Without a response the state is unknown, not lost, so the renewal of each grant is retried until its own deadline.
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
        """Keep an unfulfilled request, merged with a request that was made since."""
        if request is None:
            return
        later = self._requests.get(grant)
        if later is not None:
            request.ttl = request.ttl if later.ttl is None else later.ttl
            request.done += later.done
        self._requests[grant] = request


def _get_batch(grant: Grant) -> tuple[TableNames, LeaseKind]:
    """Return the key that groups grants for one renewal statement."""
    return grant.place, grant.family
