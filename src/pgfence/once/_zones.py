"""Compare this host's time zone rules with the server's, or with those in the row if the server does not know the zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pgfence._holds.hold import format_names
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence.once._slots import Schedule

_ADVICE = "Or use UTC for this job on all hosts"


class SlotZoneError(PgfenceError):
    """This host and the server, or this host and the one that ran the last slot, disagree on a time zone. The call ran nothing.

    Attributes:
        names: the names of the job.
        zone: the name of the time zone.
        at: the time at which they disagree.
        here: how far local time is ahead of UTC at that time, by this host's rules.
        there: how far it is ahead by the server's rules, or by those of the host that ran the last slot if the server has no such
            zone.
    """

    def __init__(
        self,
        message: str,
        *,
        zone: str,
        at: datetime,
        here: timedelta,
        there: timedelta,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.names = tuple(names)
        self.zone = zone
        self.at = at
        self.here = here
        self.there = there


def get_zone_name(schedule: Schedule | datetime) -> str | None:
    """Return the name of the zone whose rules on the server apply, or None for UTC and for a slot that the caller passes."""
    return None if isinstance(schedule, datetime) else getattr(schedule.zone, "key", None)


def get_utc_offset(schedule: Schedule | datetime, at: datetime) -> int:
    """Return how many seconds local time is ahead of UTC at the given time, by this host's rules."""
    assert not isinstance(schedule, datetime)
    offset = at.astimezone(schedule.zone).utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


def convert_to_zone_rules(schedule: Schedule | datetime, done: datetime, offset: int) -> datetime:
    """Return when this host has the local time that another host, `offset` seconds ahead of UTC, had when it ran the slot."""
    assert not isinstance(schedule, datetime)
    local = (done.astimezone(UTC) + timedelta(seconds=offset)).replace(tzinfo=schedule.zone)
    return local.astimezone(UTC)


def find_other_host(
    names: tuple[str, ...], schedule: Schedule | datetime, done: datetime | None, offset: int | None
) -> SlotZoneError | None:
    """Return the error if another host ran the last slot with other rules for a zone, or None if both hosts agree."""
    if done is None or offset is None or offset == (here := get_utc_offset(schedule, done)):
        return None
    return _error(
        names,
        schedule,
        done,
        here,
        offset,
        "the host that ran the last slot",
        "A slot whose local time is recorded as done does not run again. The server does not know this"
        " zone; if it did, its rules would apply. On the host whose time zone data is older, update the tzdata package of the"
        " system (`pip install -U tzdata` if the system has none)",
    )


def build_disagreement_error(
    names: tuple[str, ...], schedule: Schedule | datetime, at: datetime, here: int, there: int
) -> SlotZoneError:
    """Return the error for a server that has other rules for a zone."""
    return _error(
        names,
        schedule,
        at,
        here,
        there,
        "the server",
        "Nothing was run, because this host would run different slots from the hosts that agree with the server. Update the older"
        " time zone data: this host's tzdata package (`pip install -U tzdata` if the system has none), or that of"
        " PostgreSQL or its system",
    )


def _error(
    names: tuple[str, ...],
    schedule: Schedule | datetime,
    at: datetime,
    here: int,
    there: int,
    other: str,
    advice: str,
) -> SlotZoneError:
    zone, at = get_zone_name(schedule) or "", at.astimezone(UTC)
    return SlotZoneError(
        f"this host and {other} disagree on the time zone {zone!r} for {format_names(names)}: at {at.isoformat()}, local time is"
        f" {_format_moment(here)} by this host's rules and {_format_moment(there)} by those of {other}. {advice}. {_ADVICE}",
        zone=zone,
        at=at,
        here=timedelta(seconds=here),
        there=timedelta(seconds=there),
        names=names,
    )


def _format_moment(seconds: int) -> str:
    sign = "-" if seconds < 0 else "+"
    return f"UTC{sign}{timedelta(seconds=abs(seconds))}"
