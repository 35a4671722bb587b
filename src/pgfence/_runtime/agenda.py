"""What one heartbeat has to do, and what the answers mean. No threads, no I/O; the caller holds a lock and brings the time.

A grant is in the schedule from `keep` until it is dropped, lost or over. While a renewal of it waits for the connection or is
on its way it is `asked`, and only its deadline is looked at.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from pgfence._runtime import trust
from pgfence._runtime.chores import Ending, Renewal, Wish
from pgfence._runtime.ears import Ears
from pgfence._runtime.schedule import Schedule
from pgfence._sql.lease import BATCH

if TYPE_CHECKING:
    from pgfence._runtime.chores import Chore, Done, Family
    from pgfence._runtime.grant import Grant
    from pgfence._sql.lease import Answer
    from pgfence._sql.storage import Place

    Over = list[tuple[Grant, Wish | None]]


class Agenda:
    """Grants to renew, endings to repeat, channels to listen to."""

    def __init__(self) -> None:
        self.schedule = Schedule()
        self.ears = Ears()
        self.endings: list[Ending] = []
        self.failures = 0
        """Chores in a row that failed."""
        self.retry_at = 0.0
        self._due: dict[tuple[Place, Family], dict[Grant, None]] = {}
        """What waits for the connection, first come first served."""
        self._wishes: dict[Grant, Wish] = {}

    @property
    def busy(self) -> bool:
        """Whether anybody needs the connection, now or later."""
        return bool(len(self.schedule) or self.endings or self.ears)

    @property
    def waiting(self) -> bool:
        """Whether something is to be sent."""
        return any(self._due.values()) or bool(self.endings or self.ears)

    def drop(self, grant: Grant) -> Wish | None:
        """Forget a grant, and return what somebody still waits for."""
        self.schedule.remove(grant)
        self._due.get(_batch(grant), {}).pop(grant, None)
        return self._wishes.pop(grant, None)

    def wish(self, grant: Grant, ttl: float | None, done: Done) -> bool:
        """Enter a renewal that somebody asked for; False: the grant is not known (any more)."""
        if grant not in self.schedule:
            return False
        wish = self._wishes.setdefault(grant, Wish())
        wish.ttl = wish.ttl if ttl is None else ttl
        wish.done.append(done)
        if not grant.asked:
            self._fall_due(grant)
        return True

    def nudge(self, grant: Grant, now: float) -> bool:
        """Make up for a beat that was left out for want of progress, and say whether there was one."""
        if not grant.idle or grant.asked or grant not in self.schedule:
            return False
        grant.idle = False
        grant.next_beat = now
        self.schedule.plan(grant)
        return True

    def take(self, now: float) -> tuple[bool, Over]:
        """Return (whether something has fallen due, the grants whose time is over and what somebody waits for with each)."""
        due, over = self.schedule.take(now)
        for grant in due:
            self._due.setdefault(_batch(grant), {})[grant] = None
        return bool(due), [(grant, self.drop(grant)) for grant in over]

    def pick(self, now: float) -> Chore | None:
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
                return Renewal(*batch, {grant: self._wishes.pop(grant, None) for grant in grants})
        self.endings = [ending for ending in self.endings if now < ending.until]
        for ending in self.endings:
            if ending.at <= now:
                self.endings.remove(ending)
                return ending
        return self.ears.chore(now)

    def answered(self, chore: Renewal, grant: Grant, answer: Answer, now: float) -> Wish | None:
        """Note one answer, a loss being marked already, and return the wish that is answered with it."""
        wish = chore.wishes[grant]
        stands = grant in self.schedule and grant.state not in ("lost", "released")
        if stands and answer.expires_at is not None:
            stands = grant.renewed(chore.started, answer.remaining, answer.expires_at, chore.ttl(grant))
        if not stands:
            self.schedule.remove(grant)
            return wish
        grant.asked = False
        if answer.verdict == "busy":
            grant.progressed = True
            grant.next_beat = now + trust.retry_after(0, grant.ttl)
            self._put_back(grant, wish)
            self.schedule.plan(grant)
            return None
        if grant in self._wishes:
            self._fall_due(grant)
        else:
            self.schedule.plan(grant)
        return wish

    def ended(self, ending: Ending, now: float) -> None:
        """Note that the server has answered to an ending."""
        if ending.unsettled(now):
            self.endings.append(ending)

    def failed(self, chore: Chore, now: float) -> list[Wish]:
        """Note a chore without an answer, which is tried again, and return the wishes that are answered with it."""
        self.failures += 1
        wishes: list[Any] = []
        if isinstance(chore, Renewal):
            wishes += chore.wishes.values()
            for grant in chore.wishes:
                if grant in self.schedule:
                    grant.progressed = True
                    self._due.setdefault(_batch(grant), {})[grant] = None
        elif isinstance(chore, Ending) and chore.again(now):
            self.endings.append(chore)
        due = [grant for waiting in self._due.values() for grant in waiting]
        for grant in due:
            grant.unanswered()
        wishes += [self._wishes.pop(grant, None) for grant in due]
        self.retry_at = now + trust.retry_after(self.failures, min((grant.ttl for grant in due), default=10.0))
        return [wish for wish in wishes if wish is not None]

    def _fall_due(self, grant: Grant) -> None:
        grant.asked = True
        self.schedule.plan(grant)
        self._due.setdefault(_batch(grant), {})[grant] = None

    def _put_back(self, grant: Grant, wish: Wish | None) -> None:
        """Keep a wish that was not fulfilled, before what was asked for since."""
        if wish is None:
            return
        later = self._wishes.get(grant)
        if later is not None:
            wish.ttl = wish.ttl if later.ttl is None else later.ttl
            wish.done += later.done
        self._wishes[grant] = wish


def _batch(grant: Grant) -> tuple[Place, Family]:
    """Return what grants that are renewed by one statement have in common."""
    return grant.place, grant.family
