"""Times as numbers: how a session writes times and how a driver reads them is for the application to set."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
_END = (datetime.max.replace(tzinfo=UTC) - _BEGINNING) // timedelta(microseconds=1)


def number(time: str) -> str:
    """Return the expression for a time as microseconds since 1970; infinity stays infinity."""
    return f"CAST(EXTRACT(EPOCH FROM {time}) * 1000000 AS double precision)"


def moment(number: float) -> datetime:
    """Return the time that such a number means, in UTC; the last one that there is for what is later."""
    return _BEGINNING + timedelta(microseconds=int(min(number, _END)))
