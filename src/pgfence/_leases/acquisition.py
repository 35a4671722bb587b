"""The state of one acquire call for a lease: its place in the queue and the holder that it waits for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

from pgfence._holds.hold import format_names
from pgfence._holds.wait_plan import WARN_AFTER
from pgfence._leases.grant import Grant
from pgfence._leases.request import AcquireRequest
from pgfence._locks.acquisition import Acquisition
from pgfence._process.clock import clock
from pgfence._process.lifecycle import MUTEX
from pgfence.errors import SelfDeadlockError, UnreachableError
from pgfence.types import Holder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence._holds.carriers import CancelEvent
    from pgfence._holds.queue import Contender, LocalQueue
    from pgfence._leases.request import Busy
    from pgfence._locks.outages import Away
    from pgfence.config import Config

MANY_NAMES = 1000


class HoldersSeen:
    """For each name, the latest time at which the last known holder's lease can expire, on this process's monotonic clock."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def note(self, claim: AcquireRequest, busy: Busy) -> None:
        now = clock()
        if len(self._until) > MANY_NAMES:
            self._until = {name: until for name, until in self._until.items() if until > now}
        # The holder may have renewed for a whole TTL since then. Its TTL is unknown and is assumed to equal this caller's TTL.
        self._until[claim.stored] = now + max(busy.remaining, claim.terms.ttl)

    def get_until(self, claim: AcquireRequest) -> float | None:
        return self._until.get(claim.stored)

    def forget(self, claim: AcquireRequest) -> None:
        self._until.pop(claim.stored, None)


class LeaseAcquisition(Acquisition[AcquireRequest]):
    """One acquire call for a lease, a slot or an attempt."""

    noun: ClassVar[str] = "lease"

    __slots__ = ("_logged", "_seen")

    def __init__(
        self,
        queue: LocalQueue,
        config: Config,
        seen: HoldersSeen,
        claim: AcquireRequest,
        owner: Contender,
        timeout: float,
        *,
        lasts: bool = False,
        cancel: CancelEvent | None = None,
    ) -> None:
        super().__init__(queue, config, claim.names, claim, owner, timeout, lasts=lasts, no_handoff=True, cancel=cancel)
        self._seen = seen
        self._logged = False

    def is_held_by_caller(self) -> bool:
        # A contender may hold several permits.
        return self.wanted.weight is None and super().is_held_by_caller()

    def _check_limit(self, limit: int) -> None:
        """Raise an error if this contender would hold more permits than the semaphore has."""
        weight, wanted = self.wanted.weight or 0, (self.wanted.place, self.wanted.stored)
        held = sum(
            len(hold.rows)
            for hold in tuple(self.owner.holds)
            if isinstance(hold, Grant)
            and hold.is_permit
            and (hold.place, hold.stored.rpartition("#")[0]) == wanted
            and hold.entry.queue is self.queue
            and not hold.dropped
            and hold.state in ("held", "unknown")
        )
        if held and held + weight > limit:
            raise SelfDeadlockError(
                f"waiting for {format_names(self.names)} would deadlock: this {self.owner.kind} holds {held} of {limit}"
                f" {'permit' if limit == 1 else 'permits'}"
                f" and requests {weight} more. Release permits first",
                names=self.names,
            )

    def note_busy(self, busy: Busy) -> None:
        """Record the holder and the latest time at which its lease expires. Log a warning if the wait is long.

        Raises:
            SelfDeadlockError: the name is a semaphore, and the contender would wait for permits that it holds itself.
        """
        if busy.limit is not None and self.waits:
            self._check_limit(busy.limit)
        holders = [busy.holder] if busy.holder else []
        self.entry.last_holder = busy.holder
        self.note_held(holders)
        if holders:
            self._seen.note(self.wanted, busy)
        age = clock() - self.began
        if age > WARN_AFTER:
            self.log_wait(logging.WARNING, age, holders)

    def log_wait(self, level: int, age: float, holders: Sequence[Holder]) -> None:
        """Log the holders that the call waits for, once per call."""
        if not self._logged:
            self._logged = True
            super().log_wait(level, age, holders)

    def build_no_connection_error(self) -> Exception:
        why = (
            ": all connections for leases are in use. Increase max_lock_connections"  # a held lease uses no connection
        )
        return self.build_timeout_error((), why=why)

    def build_outage_error(self, error: Away) -> Away:
        ended = super().build_outage_error(error)
        if isinstance(ended, UnreachableError):
            ended._held_until = self._seen.get_until(self.wanted)
        return ended

    def find_local_holders(self) -> list[Holder]:
        with MUTEX:
            first = next(iter(self.queue.get_line(self.wanted.places[0])), None)
            hold = None if first is None else first.hold
        if not isinstance(hold, Grant):
            return [first.last_holder] if first is not None and first.last_holder is not None else []
        return [
            Holder(
                name=self.names[0],
                key=None,
                kind="lease",
                owner=hold.label or hold.description,
                pid=hold.pid,
                token=hold.token,
                expires_at=hold.expires_at,
            )
        ]
