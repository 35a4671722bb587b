"""The rules in which effects differ from leases, whose runtime they use."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pgfence._leases.manager import LONGEST_SLEEP, LeaseManager
from pgfence._process.clock import between
from pgfence._process.monitor import MONITOR
from pgfence.effects._claim import EffectRequest
from pgfence.effects._ends import in_progress_error
from pgfence.errors import LockNotHeldError, UnreachableError

if TYPE_CHECKING:
    from pgfence._leases.acquisition import LeaseAcquisition
    from pgfence._leases.grant import Grant
    from pgfence._leases.request import Busy
    from pgfence._leases.terms import LeaseKind

FIRST_NAP = 0.02


class EffectManager(LeaseManager):
    """Manage the claims of effects, which are leases with different rules for waiting and for their end.

    The end of a claim sends no NOTIFY. Its commit must reach the disk, and commits that notify wait for each other in the whole
    database. A waiter polls instead, first after milliseconds and later once a second.
    """

    family: ClassVar[LeaseKind] = "effect"
    noun = "the claim of"
    needed = 2
    warm = 5
    tells = False

    def check_patience(self, call: LeaseAcquisition, busy: Busy) -> None:
        claim = call.wanted
        assert isinstance(claim, EffectRequest)
        call.refuse()
        raise in_progress_error(claim.wanted, busy, call.timeout if call.waits else 0)

    def build_no_connection_error(self, call: LeaseAcquisition | None) -> Exception:
        return UnreachableError(
            "all connections for idempotency keys are in use. Try again, or increase max_lock_connections"
        )

    def poll_delay(self, remaining: float, left: float, *, polls: int) -> float:
        longest = min(LONGEST_SLEEP, FIRST_NAP * 1.5 ** min(polls, 20)) * between(0.5, 1.0)
        # A claim that is not renewed expires.
        return min(left, longest, remaining + between(0.005, 0.05)) if remaining else min(left, longest)

    def abandon(self, grant: Grant) -> None:
        """Stop renewing the claim of an attempt that was dropped before its end; called by a finaliser."""

        def lapse() -> None:
            try:
                self.let_lapse(grant)
            except LockNotHeldError:
                return

        MONITOR.post(lapse)  # the event loop may be closed, as in LeaseStatements.abandon()
