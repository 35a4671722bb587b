"""Parse the schedule that the caller passes, and reject what cannot be used."""

from __future__ import annotations

import functools
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pgfence._api.inputs import check_choice
from pgfence.once._slots import SHORTEST, Cron, Every

if TYPE_CHECKING:
    from datetime import tzinfo

    from pgfence.once._slots import CatchUp, Schedule

LONGEST = timedelta(days=366 * 100)

_NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_FIELDS = "The five fields are minute, hour, day of the month, month, day of the week, as in '0 7 * * 1-5'"


def schedule_of(
    every: timedelta | None, cron: str | None, at: datetime | str | None, tz: str, catch_up: CatchUp
) -> Schedule | datetime:
    """Return the slots, or the one slot that the caller passes."""
    options = {"every": every, "cron": cron, "at": at}
    given = [f"{name}=" for name, value in options.items() if value is not None]
    if len(given) != 1:
        raise TypeError(
            "Once needs exactly one of every= (how often), cron= (when) and at= (which slot), not"
            f" {' and '.join(given) if given else 'none of them'}"
        )
    check_choice("catch_up", catch_up, ("none", "last", "all"))
    if at is not None:
        return _parse_instant(at)
    zone = zone_of(tz)
    return _parse_cron(cron, zone) if cron is not None else _parse_every(every, zone)


def _parse_every(every: object, zone: tzinfo) -> Every:
    if not isinstance(every, timedelta):
        raise TypeError(f"every must be a timedelta, such as timedelta(days=1), not {type(every).__name__}")
    if not SHORTEST <= every <= LONGEST:
        raise ValueError(f"every must be between a millisecond and a hundred years, not {every}")
    return Every(every, zone)


def _parse_cron(cron: object, zone: tzinfo) -> Cron:
    if not isinstance(cron, str):
        raise TypeError(f"cron must be a str, such as '0 7 * * *', not {type(cron).__name__}")
    return _check_schedule(cron, zone)


@functools.lru_cache(maxsize=128)
def _check_schedule(line: str, zone: tzinfo) -> Cron:
    # cronsim is imported here, so that importing pgfence does not load a library that few programs need.
    from cronsim import CronSim, CronSimError

    fields = _parse_fields(line)
    try:
        next(CronSim(fields, datetime(2024, 1, 1, tzinfo=zone)))
    except CronSimError as error:
        raise ValueError(
            f"cron={line!r} is not a valid crontab line: {str(error)[:1].lower()}{str(error)[1:]}. {_FIELDS}"
        ) from None
    except StopIteration:
        raise ValueError(f"cron={line!r} matches no day within the next 50 years") from None
    return Cron(fields, zone)


def _parse_fields(line: str) -> str:
    """Return the five fields of a crontab line, which may be a nickname such as `@daily`."""
    words = line.split()
    word = words[0].lower() if words else ""
    if word.startswith("@"):
        if word == "@reboot":
            raise ValueError(
                f"cron={line!r} is not a time: a reboot concerns one host, and a slot concerns all hosts. Use another schedule"
            )
        if len(words) > 1 or word not in _NICKNAMES:
            raise ValueError(f"cron={line!r} is not a known nickname; the known ones are {', '.join(_NICKNAMES)}")
        return _NICKNAMES[word]
    # cronsim also accepts six fields, with the seconds first. A crontab would read the minute of such a line as its hour.
    if len(words) != 5:
        raise ValueError(
            f"cron={line!r} is not a valid crontab line: it has {len(words)} {'field' if len(words) == 1 else 'fields'}, not five."
            f" {_FIELDS}"
        )
    return " ".join(words)


def zone_of(tz: object) -> tzinfo:
    """Return a time zone by its name in the zone database."""
    if not isinstance(tz, str):
        raise TypeError(f"tz must be the name of a time zone, such as 'Europe/Vienna', not {type(tz).__name__}")
    if tz == "UTC":
        return UTC
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(tz)
    except (KeyError, ValueError, OSError):
        raise ValueError(
            f"tz={tz!r} is not a time zone that this host knows: use a name such as 'Europe/Vienna'. If the host has no zone"
            " database, run: pip install tzdata"
        ) from None


def _parse_instant(at: object) -> datetime:
    if isinstance(at, str):
        try:
            found = datetime.fromisoformat(at)
        except ValueError:
            raise ValueError(
                f"at={at!r} is not an ISO 8601 date or time: pass a value such as '2026-04-30' or '2026-04-30T07:00+02:00'"
            ) from None
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    if not isinstance(at, datetime):
        raise TypeError(f"at must be a datetime with a time zone, or a str in ISO 8601, not {type(at).__name__}")
    if at.tzinfo is None:
        raise ValueError(
            f"at={at} has no time zone, so each host could read it differently: use datetime(..., tzinfo=UTC)"
        )
    return at.astimezone(UTC)
