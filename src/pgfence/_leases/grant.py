"""The record of one lease held. It has no session: it stands on a row of the server and on the clock of this process."""

from __future__ import annotations

import logging
import math
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pgfence._holds.hold import BaseHold, emit_event, format_names
from pgfence._leases import terms
from pgfence._process.clock import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from pgfence._holds.queue import QueueEntry
    from pgfence._leases.request import AcquireRequest, Granted
    from pgfence._leases.terms import Heartbeat, LeaseKind
    from pgfence._sql.storage import TableNames
    from pgfence.config import Config
    from pgfence.errors import LossReason, PgfenceError


log = logging.getLogger("pgfence.lease")

CLOSE = 0.001
"""Seconds by which two of the server's numbers may differ and mean the same moment."""

_BY_CLOCK = {
    "expired": "has let expire",
    "overdue": "has ended, because its max_hold is over,",
    "superseded": "has granted to another holder",
}


class Grant(BaseHold):
    """One lease: which row, which grant of it, and until when it is believed in.

    Make it from the answer of the server; if `state` is "lost" at once, the answer came too late and nothing is held.
    Then give it to `Beat.keep`.
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
        "label",
        "lease_id",
        "next_renewal",
        "noun",
        "progressed",
        "renewal_pending",
        "request_renewal",
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
        """Record a grant.

        Args:
            claim: what was asked for.
            told: what the server answered.
            entry: of the thread or task that took it; the heartbeat never touches it.
            lease_id: made by this client for this grant.
            started: `timing.clock()` from just before the statement was sent.
            config: of the engine; `on_event` hears of a loss.
            family: which statements renew and end it.
        """
        super().__init__(claim.names, entry)
        self.stored = claim.stored
        self.place = claim.place
        self.family: LeaseKind = family
        self.noun = "lease" if family == "lease" else "attempt at"
        self.heartbeat: Heartbeat = claim.heartbeat
        self.label = claim.identity.owner
        """The owner that the caller named."""
        self.lease_id = lease_id
        self.token = told.token
        self.checkpoint = told.checkpoint
        """What the holder before committed last."""
        self.slot = told.slot
        """Of a slot: which one. Its release says whether it is done."""
        self.attempt = told.attempt
        """Of a slot: the how manyth at it."""
        self.done = False
        self.config = config
        self.failures = 0
        """Renewals in a row that had no answer."""
        self.renewal_pending = False
        """A renewal is on its way, or waits for its turn."""
        self.progressed = False
        """`progress()` was called since the last renewal was sent."""
        self.idle = False
        """A renewal was due and left out, for there was no progress."""
        self.request_renewal: Callable[[Grant], object] | None = None
        """Tells the heartbeat to look at this grant now."""
        self.schedule_entry = 0
        """Which entry in the heartbeat's schedule counts."""
        self.next_renewal = math.inf
        """When to renew, on the clock of this process; never while `asked`."""
        self.ttl = claim.terms.ttl
        self.deadline = math.inf
        self.server_time = datetime.min.replace(tzinfo=UTC)
        """The server's clock as it was last read."""
        self._apply_renewal(started, told.remaining, told.expires_at)
        if told.hold_remaining is not None and told.hold_remaining <= told.remaining + CLOSE:
            self._note_cap()

    @property
    def row(self) -> tuple[TableNames, str] | None:
        return (self.place, self.stored) if self.family == "lease" else None

    @property
    def loss_reason(self) -> LossReason | None:
        # The clock is read at each question: a process that wakes after a pause is told "lost" by its first one, before any
        # thread of ours has run. The heartbeat only marks it later and tells the listeners.
        if self.reason is not None or self.released or clock() < self.deadline:
            return self.reason
        if self.capped:
            return "overdue"
        return "cut off" if self.failures or self.renewal_pending else "expired"

    def get_remaining(self) -> float:
        """Return the seconds to this process's own deadline, 0.0 when it is over or nothing is held. No I/O."""
        return max(0.0, self.deadline - clock()) if self.state in ("held", "unknown") else 0.0

    @property
    def row_deadline(self) -> float:
        """Until when the server believes in it, as far as this process knows."""
        return self.deadline + terms.compute_margin(self.ttl)

    def progress(self) -> None:
        """Note that the work moves on: `heartbeat="progress"` renews only then. No I/O; may be called by any thread."""
        self.progressed = True
        if self.idle and self.ours and self.request_renewal is not None:
            self.request_renewal(self)

    def lose(self, reason: LossReason) -> bool:
        """Mark it lost, once; log it, tell `on_event` and the listeners. Callable from any thread, not under the mutex."""
        if not super().lose(reason):
            return False
        log.warning("the %s %s was lost: %s", self.noun, format_names(self.names), reason)
        emit_event(self.config, "lost", self.names, self.token, owner=self.label, lease_id=self.lease_id)
        return True

    def lose_rejected(self, reason: LossReason) -> None:
        """Lose it because the server rejected a renewal. Not under the mutex."""
        if self.reason is None:
            self.warn_of_clock(reason)
        self.lose(reason)

    def warn_of_clock(self, reason: str) -> None:
        """Log that the server ended it before its time was over by the clock of this host, if that is so."""
        left = self.deadline - clock()
        # An attempt is also superseded when an operator frees its key.
        if left > 0 and reason in _BY_CLOCK and (reason != "superseded" or self.family == "lease"):
            log.warning(
                "the server %s the %s %s with %.1f s of its time left by the clock of this host: the server's clock was set"
                " forward, or this is a copy of the server without the last commits (a failover, a restore)",
                _BY_CLOCK[reason],
                self.noun,
                format_names(self.names),
                left,
            )

    def expire(self) -> bool:
        """Mark it lost if its time is over, and say whether it is lost. Not under the mutex."""
        if self.reason is None and (reason := self.loss_reason) is not None:
            self.lose(reason)
        return self.state == "lost"

    def note_renewed(self, started: float, remaining: float, expires_at: datetime, ttl: float) -> bool:
        """Note the server's answer to a renewal. False: it came after the deadline, and the lease is lost; see `expire`.

        Args:
            started: when it was sent.
            remaining: seconds the server gave.
            expires_at: by the server's clock.
            ttl: what was asked for, from now on its TTL.
        """
        if self.loss_reason is not None:  # nothing brings a grant back, whatever a late answer says
            return False
        self.ttl = ttl
        self.failures = 0
        self.in_doubt = False
        self._apply_renewal(started, remaining, expires_at)
        return self.loss_reason is None

    def note_unanswered(self) -> None:
        """Note that a renewal had no answer: it is believed in until the deadline, but nobody knows."""
        self.failures += 1
        self.in_doubt = True

    def _apply_renewal(self, started: float, remaining: float, expires_at: datetime) -> None:
        before, self.server_time = self.server_time, expires_at - timedelta(seconds=remaining)
        if (step := (before - self.server_time).total_seconds()) >= terms.NOTABLE_STEP:
            log.warning(
                "the clock of the database server was set back by %.0f s or more while the %s %s was held: it is renewed from"
                " the new time on, and stays held. Check the time service of that server",
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
        """Note that max_hold ends it: no renewal can move its deadline any more."""
        self.capped = True
        self.next_renewal = math.inf


def ended_error(grant: Grant) -> PgfenceError:
    return grant.lost_error() if grant.state == "lost" else grant.not_held_error()


STOOD_STILL = 0.25
"""The share of the margin that a pause may take before it is logged."""


class Pauses:
    """The pauses that were noticed; a warning for each that is twice as long as all before."""

    def __init__(self) -> None:
        self._longest = 0.0

    def note(self, late: float, held: Iterable[Grant]) -> None:
        """Warn if a thread that slept woke up so much later than planned that the shortest lease is at risk."""
        if late <= 2 * self._longest or late <= 0.05:
            return
        ttl = min((grant.ttl for grant in held), default=None)
        if ttl is None or late <= STOOD_STILL * terms.compute_margin(ttl):
            return
        self._longest = late
        log.warning(
            "this process stood still for %.2f s: of a lease with ttl=%g s only %.2f s are kept as a margin for that."
            " Raise the ttl, or find what stops the process (CPU limit, suspend, a call that keeps the GIL)",
            late,
            ttl,
            terms.compute_margin(ttl),
        )
