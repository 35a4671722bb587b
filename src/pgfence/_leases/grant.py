"""The record of one held lease. A lease has no connection, but relies on a row on the server and on this process's clock."""

from __future__ import annotations

import logging
import math
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from pgfence._holds.hold import BaseHold, format_names
from pgfence._leases import terms
from pgfence._process.clock import clock
from pgfence._process.events import build_log_fields
from pgfence.types import ProcessPause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from pgfence._holds.hold import HoldDetails
    from pgfence._holds.queue import QueueEntry
    from pgfence._leases.request import AcquireRequest, Granted
    from pgfence._leases.terms import Heartbeat, LeaseKind
    from pgfence._process.events import EventHub
    from pgfence._sql.storage import TableNames
    from pgfence.config import Config
    from pgfence.errors import LossReason, PgfenceError


log = logging.getLogger("pgfence.lease")

CLOSE = 0.001
"""The seconds by which two times from the server may differ and still count as equal."""

_BY_CLOCK = {
    "expired": "it has expired",
    "overdue": "its max_hold is over",
    "superseded": "it was granted to another holder",
}


class RepeatedRelease(Protocol):
    """A release that the heartbeat repeats until the server has responded."""

    until: float
    """When the heartbeat gives up, on this process's clock."""
    answer: Any
    """The response of the server, or None."""


class Grant(BaseHold):
    """One held lease: its row, its id and token, and how long this process trusts it.

    Create it from the server's response and pass it to `HeartbeatService.keep`. If `state` is "lost" immediately, the response
    arrived too late and nothing is held.
    """

    __slots__ = (
        "attempt",
        "capped",
        "checkpoint",
        "config",
        "deadline",
        "done",
        "expires_at",
        "failures",
        "family",
        "heartbeat",
        "idle",
        "is_permit",
        "kind",
        "label",
        "lease_id",
        "next_renewal",
        "noun",
        "progressed",
        "renewal_pending",
        "repeated_release",
        "request_renewal",
        "rows",
        "schedule_entry",
        "server_time",
        "slot",
        "ttl",
    )

    def __init__(
        self,
        claim: AcquireRequest,
        told: Granted,
        entry: QueueEntry,
        *,
        lease_id: UUID,
        started: float,
        config: Config,
        family: LeaseKind = "lease",
    ) -> None:
        """Record a grant. This client chose `lease_id`, and read `started` from `clock()` just before it sent the statement."""
        super().__init__(claim.names, entry)
        self.rows = told.rows or ((claim.stored, told.token),)
        """The rows of the table that the grant holds, with their tokens: one row, or as many rows as it has permits."""
        self.stored = self.rows[0][0]
        self.is_permit = claim.kind == "permit"
        self.kind = claim.kind
        self.place = claim.place
        self.family: LeaseKind = family
        self.noun = "lease" if family == "lease" else "attempt at"
        self.heartbeat: Heartbeat = claim.heartbeat
        self.label = claim.identity.owner
        """The owner, if the caller passed one."""
        self.lease_id = lease_id
        self.token = told.token
        self.checkpoint = told.checkpoint
        """The checkpoint that the previous holder committed last."""
        self.slot = told.slot
        """The slot, if the grant is for a slot. The release reports whether it is done."""
        self.attempt = told.attempt
        """The number of the attempt at the slot or effect, starting at 1."""
        self.done = False
        self.config = config
        self.failures = 0
        """The number of renewals in a row without a response."""
        self.renewal_pending = False
        """Whether a renewal has been sent, or is waiting for the connection."""
        self.repeated_release: RepeatedRelease | None = None
        """The release that the heartbeat repeats, because the first one got no response."""
        self.progressed = False
        """Whether `progress()` was called since the last renewal was sent."""
        self.idle = False
        """Whether a renewal was due and skipped for lack of progress."""
        self.request_renewal: Callable[[Grant], object] | None = None
        """The function that notifies the heartbeat that this grant needs a renewal now."""
        self.schedule_entry = 0
        """The number of this grant's current entry in the schedule; entries with an older number are stale."""
        self.next_renewal = math.inf
        """When to renew, on this process's clock; ignored while `renewal_pending`."""
        self.ttl = claim.terms.ttl
        self.deadline = math.inf
        self.server_time = datetime.min.replace(tzinfo=UTC)
        """The server's clock, as of the last response."""
        self._apply_renewal(started, told.remaining, told.expires_at)
        if told.hold_remaining is not None and told.hold_remaining <= told.remaining + CLOSE:
            self._note_cap()

    @property
    def row(self) -> tuple[TableNames, str] | None:
        return (self.place, self.stored) if self.family == "lease" else None

    def get_details(self) -> HoldDetails:
        attempt = self.token if self.kind == "effect" else self.attempt if self.kind == "slot" else None
        return self.kind, self.label, self.lease_id, self.ttl, attempt

    @property
    def loss_reason(self) -> LossReason | None:
        # The clock is read on every access: after a pause of the whole process, the first access already reports the loss,
        # before any thread has run. The heartbeat marks the grant as lost later and calls the listeners.
        if self.reason is not None or self.released or clock() < self.deadline:
            return self.reason
        if self.capped:
            return "overdue"
        return "cut off" if self.failures or self.renewal_pending else "expired"

    def get_remaining(self) -> float:
        """Return the seconds until this process's own deadline, without I/O; 0.0 after the deadline, or if nothing is held."""
        return max(0.0, self.deadline - clock()) if self.state in ("held", "unknown") else 0.0

    @property
    def row_deadline(self) -> float:
        """The approximate time at which the server lets the lease expire, on this process's clock."""
        return self.deadline + terms.compute_margin(self.ttl)

    def progress(self) -> None:
        """Report that the work makes progress.

        With `heartbeat="progress"` a lease is renewed only after progress. The method does no I/O, and any thread may call it.
        """
        self.progressed = True
        if self.idle and self.ours and self.request_renewal is not None:
            self.request_renewal(self)

    def lose(self, reason: LossReason) -> bool:
        """Mark the grant as lost, log the loss, emit the event and call the listeners, once.

        Any thread may call this, but not under the mutex.
        """
        if not super().lose(reason):
            return False
        fields = self.build_log_fields("lost")
        log.warning("%s %s was lost: %s", self.noun, format_names(self.names), reason, extra=fields)
        self.emit(self.config.events, "lost", reason=reason)
        return True

    def resign(self) -> bool:
        """Mark the grant as lost because its holder gives it up, and call the listeners, once. The row is released afterwards."""
        if not super().lose("resigned"):
            return False
        log.info("the holder of %s resigns", format_names(self.names))
        return True

    def lose_rejected(self, reason: LossReason) -> None:
        """Mark the grant as lost because the server rejected a renewal. The caller must not hold the mutex."""
        # If the renewal was sent during a release, its rejection says nothing about clocks.
        if self.reason is None and not self.released:
            self.warn_of_clock(reason)
        self.lose(reason)

    def warn_of_clock(self, reason: str) -> None:
        """Log a warning if the server ended the grant although it had time left by this host's clock."""
        left = self.deadline - clock()
        # An attempt is also superseded when an operator frees its key, which says nothing about clocks.
        if left > 0 and reason in _BY_CLOCK and (reason != "superseded" or self.family == "lease"):
            log.warning(
                "the server ended the %s %s because %s, but by this host's clock %.1f s were left: the server's clock was set"
                " forward, or this server is a copy that lacks the last commits (a failover, a restore)",
                self.noun,
                format_names(self.names),
                _BY_CLOCK[reason],
                left,
            )

    def expire(self) -> bool:
        """Mark the grant as lost if its deadline has passed, and return whether it is lost. The caller must not hold the mutex."""
        if self.reason is None and (reason := self.loss_reason) is not None:
            self.lose(reason)
        return self.state == "lost"

    def note_renewed(self, started: float, remaining: float, expires_at: datetime, ttl: float) -> bool:
        """Record a renewal that was sent at `started`. The requested `ttl` applies from now on.

        Return False if the response arrived after the deadline. The lease is then lost; see `expire`.
        """
        # A lost grant stays lost, even if a late response renews it, because `on_lost` may have been called already.
        if self.loss_reason is not None:
            return False
        self.ttl = ttl
        self.failures = 0
        self.in_doubt = False
        self._apply_renewal(started, remaining, expires_at)
        return self.loss_reason is None

    def note_unanswered(self) -> None:
        """Record that a renewal got no response. The lease is trusted until its deadline, but its state is unknown."""
        self.failures += 1
        self.in_doubt = True

    def _apply_renewal(self, started: float, remaining: float, expires_at: datetime) -> None:
        before, self.server_time = self.server_time, expires_at - timedelta(seconds=remaining)
        if (step := (before - self.server_time).total_seconds()) >= terms.NOTABLE_STEP:
            log.warning(
                "the database server's clock was set back by %.0f s or more while the %s %s was held. The hold continues, and"
                " renewals count from the new time on. Check the time service of that server",
                step,
                self.noun,
                format_names(self.names),
            )
        self.deadline = terms.compute_deadline(started, remaining, min(self.ttl, remaining))
        self.expires_at = expires_at
        self.next_renewal = math.inf if self.heartbeat == "manual" else started + terms.compute_interval(self.ttl)
        self.capped = False
        if remaining < self.ttl - CLOSE:
            self._note_cap()

    def _note_cap(self) -> None:
        """Record that max_hold now limits the grant, so that no renewal can extend its deadline."""
        self.capped = True
        self.next_renewal = math.inf


def ended_error(grant: Grant) -> PgfenceError:
    return grant.lost_error() if grant.state == "lost" else grant.not_held_error()


STOOD_STILL = 0.25
"""The share of the safety margin that a pause may use up before it is logged."""


class Pauses:
    """Report pauses of this process, and log each one that is more than twice as long as the longest one logged before."""

    def __init__(self) -> None:
        self._longest = 0.0
        self._late = 0.0
        """The seconds by which the thread woke up late last time."""
        self._ttl: float | None = None
        """The shortest TTL of the leases that this delay put at risk."""

    def note(self, late: float, held: Iterable[Grant]) -> None:
        """Note how many seconds late a sleeping thread woke up, and whether that puts the lease with the shortest TTL at risk."""
        self._late = late
        if late > 0.05:
            ttl = min((grant.ttl for grant in held), default=None)
            if ttl is not None and late > STOOD_STILL * terms.compute_margin(ttl):
                self._ttl = ttl

    def report(self, events: EventHub) -> None:
        """Report the pauses that were noted. The caller must hold no internal lock, because listeners are called."""
        late, self._late = self._late, 0.0
        if late > 0.0:
            events.record("pause", late)
        ttl, self._ttl = self._ttl, None
        if ttl is None:
            return
        margin = terms.compute_margin(ttl)
        if events.active:
            events.emit(ProcessPause("paused", None, None, None, None, datetime.now(UTC), late, ttl, margin))
        if late > 2 * self._longest:
            self._longest = late
            log.warning(
                "this process was stopped for %.2f s, and a lease with ttl=%g s has a safety margin of only %.2f s for"
                " pauses. Raise the ttl, or find what stops the process (CPU limit, suspend, a call that keeps the GIL)",
                late,
                ttl,
                margin,
                extra=build_log_fields("paused", ttl=ttl),
            )
