"""What is asked of the server for a slot: which one counts, and then for that one. No I/O, as for every lease."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgfence._runtime.claims import Busy, Claim, Granted, Refused, decoded, holder_of, host, owner_of
from pgfence._runtime.state import named
from pgfence._sql.slot import slot_sql
from pgfence.errors import LockTimeoutError
from pgfence.once._slots import Over, due

if TYPE_CHECKING:
    from datetime import datetime

    from pgfence._runtime.claims import Steps
    from pgfence._sql.advisory import Style
    from pgfence.once._slots import CatchUp, Due, Schedule

MOVES = 10
"""How often another slot may count by the time that one is asked for; slots shorter than a round trip never stand still."""


_WHY = {
    "done": "is done",
    "missed": 'was missed, and catch_up="none" lets nobody begin it late',
    "ahead": "is done and has not begun: the server's clock was ahead when it ran, or the schedule was another one."
    " To begin again before it, delete the row of this name from pgfence's table of slots",
}


class SlotOverError(LockTimeoutError):
    """The slot is done or was missed: no process holds it, and waiting does not help."""


def answer(refused: Refused) -> BaseException:
    """Return what is to be raised for a refusal."""
    return refused.__cause__ or refused


@dataclass(frozen=True, kw_only=True)
class SlotClaim(Claim):
    """The slot that is due.

    Attributes:
        schedule: the slots, or the only one.
        catch_up: what becomes of slots that nobody ran.
    """

    schedule: Schedule | datetime
    catch_up: CatchUp

    kind = "slot"

    def attempt(self, style: Style, lease_id: str) -> Steps:
        sql = slot_sql(self.place, style)
        for _ in range(MOVES):
            now, done, tried = yield sql.read, (self.stored,)
            found = due(self.schedule, self.catch_up, now, done, tried)
            if isinstance(found, Over):
                raise Refused from self._over(found, now)
            outcome, token, expires_at, remaining, hold_remaining, checkpoint, *holder, attempt = yield (
                sql.acquire,
                self._arguments(found, lease_id),
            )
            if outcome == "granted":
                told = decoded(checkpoint)
                return Granted(token, expires_at, remaining, hold_remaining, told, slot=found.slot, attempt=attempt)
            if outcome == "busy":
                owner, where, pid, backend_pid, purpose, since = holder
                row = owner, where, pid, backend_pid, purpose, token, since, expires_at
                return Busy(remaining, holder_of(self, row))
        return Busy(0.0)

    def _arguments(self, found: Due, lease_id: str) -> tuple[object, ...]:
        terms, identity = self.terms, self.identity
        who = owner_of(identity), host(), os.getpid(), identity.purpose, identity.metadata
        return self.stored, found.slot, found.until, lease_id, terms.ttl, terms.max_hold, *who

    def _over(self, over: Over, now: datetime) -> SlotOverError:
        why = _WHY[over.why]
        next_one = "" if over.following is None else f"; the next begins at {over.following.isoformat()}"
        error = SlotOverError(
            f"the slot {over.slot.isoformat()} of {named(self.names)} {why}{next_one}", names=self.names
        )
        error.retryable = over.following is not None
        error.retry_after = None if over.following is None else max(0.0, (over.following - now).total_seconds())
        return error
