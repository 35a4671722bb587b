"""The zone rules of a host, compared with the server's: the authority where a schedule has a time zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pgfence._runtime.state import named
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence.once._slots import Schedule

_ADVICE = "Or use UTC for this job on all hosts"


class SlotZoneError(PgfenceError):
    """This host and the server do not agree on a time zone, so this host would run other slots than the others. Nothing runs here.

    Attributes:
        names: of the job.
        zone: the name of the time zone.
        at: when they differ.
        here: how far local time is ahead of UTC then, as this host computes it.
        there: the same by the server; None: it has no such zone.
    """

    def __init__(
        self,
        message: str,
        *,
        zone: str,
        at: datetime,
        here: timedelta,
        there: timedelta | None,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.names = tuple(names)
        self.zone = zone
        self.at = at
        self.here = here
        self.there = there


def zone_name(schedule: Schedule | datetime) -> str | None:
    """Return the name of the zone of which the server's rules count; None in UTC, and for a slot that the caller names."""
    return None if isinstance(schedule, datetime) else getattr(schedule.zone, "key", None)


def utc_offset(schedule: Schedule | datetime, at: datetime) -> int:
    """Return how many seconds local time is ahead of UTC then, as this host computes it."""
    assert not isinstance(schedule, datetime)
    offset = at.astimezone(schedule.zone).utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


def disagreement(names: tuple[str, ...], zone: str, at: datetime, here: int, there: int | None) -> SlotZoneError:
    """Return what to raise where the server says something else of a zone, or does not know it."""
    at = at.astimezone(UTC)
    if there is None:
        message = (
            f"the server does not know the time zone {zone!r}, so it cannot confirm which slot of {named(names)} this is."
            " Nothing was run. Use a zone that this host and the server know, or update the server's time zone data: that of"
            f" PostgreSQL, or its system's tzdata package. {_ADVICE}"
        )
    else:
        message = (
            f"this host and the server differ on the time zone {zone!r}: at {at.isoformat()} local time is {_shown(here)} by"
            f" this host's rules and {_shown(there)} by the server's, so this host would run other slots of {named(names)}"
            " than hosts that agree with the server. Nothing was run. Update the older time zone data: this host's tzdata"
            " package (`pip install -U tzdata` where the system has none), or that of PostgreSQL or its system."
            f" {_ADVICE}"
        )
    return SlotZoneError(
        message,
        zone=zone,
        at=at,
        here=timedelta(seconds=here),
        there=None if there is None else timedelta(seconds=there),
        names=names,
    )


def _shown(seconds: int) -> str:
    sign = "-" if seconds < 0 else "+"
    return f"UTC{sign}{timedelta(seconds=abs(seconds))}"
