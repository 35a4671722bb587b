"""Which slot is due: pure rules over the server's clock, that every host must come to the same answer by.

A slot is an instant. The slot that counts at a moment is the newest one that has begun; it lasts until the next begins.
What was done is known by one instant for each name, the newest slot that was finished: that one and all before it are over.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import tzinfo

CatchUp: TypeAlias = Literal["none", "last", "all"]

PUNCTUAL = timedelta(seconds=60)
"""How long after its beginning a slot may still be begun where nothing is caught up: what a crontab can tell apart."""

SHORTEST = timedelta(milliseconds=1)
_DAY = timedelta(days=1)
_MOMENT = timedelta(microseconds=1)
_FAR = datetime.max.replace(tzinfo=UTC)
_ORIGIN = date(2001, 1, 1)  # a Monday, so that weeks begin where people expect it


class Schedule(Protocol):
    """Slots in their order."""

    @property
    def zone(self) -> tzinfo:
        """The zone by whose clocks they begin."""
        ...

    def current(self, now: datetime) -> datetime:
        """Return the newest slot that has begun."""
        ...

    def after(self, slot: datetime) -> datetime:
        """Return the first slot that is later."""
        ...


@dataclass(frozen=True, slots=True)
class Every:
    """A slot every so often.

    Whole days are days of the calendar there, from midnight to midnight, be they of 23 or 25 hours. Everything else has the
    same length of real time always, counted from one fixed midnight there.
    """

    step: timedelta
    zone: tzinfo

    def current(self, now: datetime) -> datetime:
        if not self.step % _DAY:
            days = (now.astimezone(self.zone).date() - _ORIGIN).days
            return self._find_midnight(days - days % self.step.days)
        now = now.astimezone(UTC)
        return now - (now - self._find_midnight(0)) % self.step

    def after(self, slot: datetime) -> datetime:
        current = self.current(slot)
        if self.step % _DAY:
            return current + self.step
        days = (current.astimezone(self.zone).date() - _ORIGIN).days
        while True:  # once; again where a calendar has left out a whole day
            days += self.step.days
            if (later := self._find_midnight(days)) > slot:
                return later

    def _find_midnight(self, days: int) -> datetime:
        return datetime.combine(_ORIGIN + timedelta(days), time(), self.zone).astimezone(UTC)


@dataclass(frozen=True, slots=True)
class Cron:
    """A slot whenever a crontab's line would start its command, with that daemon's rules for summer time.

    A time that the clocks leave out begins when they have jumped; one that they show twice begins once, at the first. Lines
    with a star for minute or hour go by real time instead.
    """

    line: str
    zone: tzinfo

    def current(self, now: datetime) -> datetime:
        from cronsim import CronSim

        now = now.astimezone(UTC)
        # Backwards it is blind to what the clocks show twice: from there it goes forward again. A moment later, because
        # backwards it begins before the instant that it is given, and forward it may step over that one.
        start = next(CronSim(self.line, (now + _MOMENT).astimezone(self.zone), reverse=True))
        current = start.astimezone(UTC)
        for slot in self._from(start):
            if slot > now:
                break
            current = slot
        return current

    def after(self, slot: datetime) -> datetime:
        later = next(later for later in self._from(slot.astimezone(self.zone)) if later > slot)
        # Forward it may step over a slot where the clocks are set by half an hour.
        while (between := self.current(later - _MOMENT)) > slot:
            later = between
        return later

    def _from(self, start: datetime) -> Iterator[datetime]:
        from cronsim import CronSim

        # It names a midnight that the clocks leave out, also for a line whose hours do not have what comes instead.
        slots = ((slot, slot.astimezone(UTC)) for slot in CronSim(self.line, start))
        return (instant for slot, instant in slots if instant.astimezone(slot.tzinfo) == slot)


@dataclass(frozen=True, slots=True)
class Due:
    """A slot that may be run.

    Attributes:
        slot: its beginning.
        until: from when on another one counts instead; before its beginning it does not count either. None: the clock plays no
            part.
    """

    slot: datetime
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Over:
    """Nothing to run now.

    Attributes:
        slot: the one that counts.
        why: that it does not run.
        following: when there will be something again; None: never.
    """

    slot: datetime
    why: Literal["done", "missed"]
    following: datetime | None


@dataclass(frozen=True, slots=True)
class Ahead:
    """A slot was finished that has not begun at this moment: the clock was set back since, and a person has to decide.

    Attributes:
        slot: its beginning.
    """

    slot: datetime


def due(
    schedule: Schedule | datetime, catch_up: CatchUp, now: datetime, done: datetime | None, tried: datetime | None
) -> Due | Over | Ahead:
    """Return what may be run at `now`.

    Args:
        schedule: the slots; an instant is the only slot there is, whatever the clock says.
        catch_up: what becomes of slots that nobody ran: "last" runs the newest, however late; "all" every one in its order,
            from the first that was ever tried; "none" none, so that a slot must be begun within its first minute.
        now: by the server's clock.
        done: the newest slot that was finished.
        tried: the newest slot that was begun. If the clock was ahead then, it prevents nothing.
    """
    if isinstance(schedule, datetime):
        return Due(schedule, None) if done is None or done < schedule else Over(schedule, "done", None)
    # Two times of one zone are compared by what its clocks show, and those show an hour twice.
    now, done, tried = now.astimezone(UTC), done and done.astimezone(UTC), tried and tried.astimezone(UTC)
    if done is not None and done > now:
        return Ahead(done)
    current = schedule.current(now)
    following = schedule.after(current)
    if done is not None and done >= current:
        return Over(done, "done", schedule.after(done))
    if catch_up == "all":
        first = tried if done is None else schedule.after(done)
        return Due(current if first is None else min(first, current), _FAR)
    if catch_up == "last":
        return Due(current, following)
    until = min(following, current + PUNCTUAL)
    return Due(current, until) if now < until else Over(current, "missed", following)
