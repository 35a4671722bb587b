"""Determine which slot is due, by rules that depend only on the server's clock and have the same result on every host.

A slot is an instant. The current slot is the newest one that has begun. It lasts until the next slot begins. For each name, one
instant is recorded, which is the newest slot that was finished. This slot and all earlier ones are over.
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
"""The time after the beginning of a slot within which it may be begun with `catch_up="none"`: the resolution of a crontab."""

SHORTEST = timedelta(milliseconds=1)
_DAY = timedelta(days=1)
_MOMENT = timedelta(microseconds=1)
_FAR = datetime.max.replace(tzinfo=UTC)
_ORIGIN = date(2001, 1, 1)  # This day is a Monday, so that weeks begin on Monday.


class Schedule(Protocol):
    """A series of slots."""

    @property
    def zone(self) -> tzinfo:
        """The time zone in which the slots begin."""
        ...

    def current(self, now: datetime) -> datetime:
        """Return the newest slot that has begun."""
        ...

    def after(self, slot: datetime) -> datetime:
        """Return the first slot that begins after the given slot."""
        ...


@dataclass(frozen=True, slots=True)
class Every:
    """Slots at a fixed interval.

    Whole days are calendar days in the zone, from midnight to midnight, even if they have 23 or 25 hours. All other intervals
    have the same length in real time, counted from one fixed midnight in the zone.
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
        while True:  # The loop runs once, and again only if a calendar has skipped a whole day.
            days += self.step.days
            if (later := self._find_midnight(days)) > slot:
                return later

    def _find_midnight(self, days: int) -> datetime:
        return datetime.combine(_ORIGIN + timedelta(days), time(), self.zone).astimezone(UTC)


@dataclass(frozen=True, slots=True)
class Cron:
    """Slots at the times at which cron would start the command of a crontab line, with cron's rules for daylight saving time.

    A slot at a time that the clocks skip begins right after the change. A slot at a time that the clocks show twice begins only
    at the first of the two. Lines with a star for minute or hour follow real time instead.
    """

    line: str
    zone: tzinfo

    def current(self, now: datetime) -> datetime:
        from cronsim import CronSim

        now = now.astimezone(UTC)
        # Backwards, cronsim misses times that the clocks show twice, so the search goes forward again from there. It starts a
        # microsecond later, because backwards cronsim excludes the given instant, and forward it may skip that instant.
        start = next(CronSim(self.line, (now + _MOMENT).astimezone(self.zone), reverse=True))
        current = start.astimezone(UTC)
        for slot in self._from(start):
            if slot > now:
                break
            current = slot
        return current

    def after(self, slot: datetime) -> datetime:
        later = next(later for later in self._from(slot.astimezone(self.zone)) if later > slot)
        # When it goes forward in time, cronsim may skip a slot if the clocks change by half an hour.
        while (between := self.current(later - _MOMENT)) > slot:
            later = between
        return later

    def _from(self, start: datetime) -> Iterator[datetime]:
        from cronsim import CronSim

        # cronsim yields a midnight that the clocks skip, also for a line whose hours do not match the time that replaces it.
        slots = ((slot, slot.astimezone(UTC)) for slot in CronSim(self.line, start))
        return (instant for slot, instant in slots if instant.astimezone(slot.tzinfo) == slot)


@dataclass(frozen=True, slots=True)
class Due:
    """A slot that may be run.

    It may be begun from its beginning until `until`, or at any time if `until` is None.
    """

    slot: datetime
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Over:
    """Nothing may be run now. The next slot begins at `following`, or there is none if that is None."""

    slot: datetime
    why: Literal["done", "missed"]
    following: datetime | None


@dataclass(frozen=True, slots=True)
class Ahead:
    """A slot that is recorded as finished, but has not begun by the server's clock. An operator must decide."""

    slot: datetime


def due(
    schedule: Schedule | datetime, catch_up: CatchUp, now: datetime, done: datetime | None, tried: datetime | None
) -> Due | Over | Ahead:
    """Return the slot that may be run at `now`, the time by the server's clock, or the reason why none may be.

    If the schedule is a datetime, that is the only slot, whatever the time is. `done` is the newest slot that was finished, and
    `tried` the newest that was begun. Of the slots that were not run, "last" runs the newest, however late; "all" runs each in
    order, from the first that was ever tried; "none" runs none, so a slot must be begun within its first minute.
    """
    if isinstance(schedule, datetime):
        return Due(schedule, None) if done is None or done < schedule else Over(schedule, "done", None)
    # Two datetimes of the same zone are compared by local time, which occurs twice when the clocks are set back.
    now, done, tried = now.astimezone(UTC), done and done.astimezone(UTC), tried and tried.astimezone(UTC)
    if done is not None and done > now:
        return Ahead(done)
    current = schedule.current(now)
    following = schedule.after(current)
    if done is not None and done >= current:
        return Over(done, "done", schedule.after(done))
    if catch_up == "all":
        first = tried if done is None else schedule.after(done)
        # A slot that was tried while the clock was ahead is later than the current slot.
        return Due(current if first is None else min(first, current), _FAR)
    if catch_up == "last":
        return Due(current, following)
    until = min(following, current + PUNCTUAL)
    return Due(current, until) if now < until else Over(current, "missed", following)
