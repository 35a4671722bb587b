"""Decide when a wait retries during an outage of the server, and build the error at its timeout, without I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgfence._holds.hold import format_names
from pgfence._process.callbacks import log
from pgfence._process.clock import between, clock
from pgfence._sql.errors import LOCK_OUTCOME_UNKNOWN
from pgfence.errors import StandbyError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence._connections.connection import ConnectionGoneError
    from pgfence.types import Holder

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0

Away = UnreachableError | StandbyError
"""The errors of an outage. `StandbyError` is one, because a former primary may be a standby while a cluster switches over."""


@dataclass(slots=True)
class Patience:
    """The state of one call during an outage: whether the call waits through it, and the last response of the server."""

    lasts: bool
    """Whether the call waits through an outage, because it has a timeout or the server has responded that the lock is held."""
    failures: int = 0
    """The number of attempts in a row without a response."""
    heard_at: float | None = None
    """When the server last responded that the lock is held, on this process's clock."""
    holders: Sequence[Holder] = ()
    """The holders that the server returned at that time, if any."""

    def note_held(self, holders: Sequence[Holder] = ()) -> None:
        """Record the response that the lock is held. From now on the call waits until its timeout."""
        self.lasts = True
        self.failures = 0
        self.heard_at = clock()
        self.holders = holders or self.holders

    def pause(self, names: tuple[str, ...], error: Away, left: float) -> float | None:
        """Return the pause in seconds before the next attempt, or None if the call ends with the error."""
        if not self.lasts or left <= 0 or not error.retryable:
            return None
        self.failures += 1
        if self.failures == 1:
            log.warning(
                "cannot reach the primary while waiting for %s, retrying until the timeout: %s",
                format_names(names),
                error,
            )
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self.failures, 20))
        return min(left, longest * between(0.5, 1.0))

    def build_outage_error(self, names: tuple[str, ...], error: Away, timeout: float) -> Away:
        """Return the error that ends a wait for an unreachable server. It includes the server's last response."""
        if self.heard_at is None and not self.failures:
            return error
        standby = isinstance(error, StandbyError)
        reason = str(error).removesuffix(LOCK_OUTCOME_UNKNOWN).rstrip(" .")
        reason += " " if reason.endswith("?") else ". "  # libpq's last line may be a question
        message = f"{reason}Waited {timeout:g} s for {format_names(names)}: "
        if self.heard_at is None:
            what = "no primary was found" if standby else "the server could not be reached"
            message += f"{what}. {LOCK_OUTCOME_UNKNOWN}"
        else:
            by = f" by {' and by '.join(map(str, self.holders))}" if self.holders else ""
            what = "no primary has been found" if standby else "the server has been unreachable"
            message += f"{clock() - self.heard_at:.1f} s ago it was held{by}; since then, {what}"
        if standby:
            return StandbyError(message, sqlstate=error.sqlstate)
        return UnreachableError(message, sqlstate=error.sqlstate, retryable=error.retryable)


def build_gone_error(names: tuple[str, ...], gone: ConnectionGoneError) -> UnreachableError:
    """Return the error for a call whose connection was lost during the statement."""
    return UnreachableError(
        f"the connection was lost while acquiring {format_names(names)}: {gone.__cause__}. Nothing was acquired; try again"
    )
