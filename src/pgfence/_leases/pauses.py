"""How long this process stood still, as its heartbeat sees it, and the warning about that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._leases import terms
from pgfence._leases.grant import log

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pgfence._leases.grant import Grant

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
        if ttl is None or late <= STOOD_STILL * terms.margin(ttl):
            return
        self._longest = late
        log.warning(
            "this process stood still for %.2f s: of a lease with ttl=%g s only %.2f s are kept as a margin for that."
            " Raise the ttl, or find what stops the process (CPU limit, suspend, a call that keeps the GIL)",
            late,
            ttl,
            terms.margin(ttl),
        )
