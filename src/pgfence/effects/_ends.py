"""Messages about an attempt that ended with an error, for the traceback, the log, and the next caller with the key.

The messages are built from the row of the key, if the server responds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pgfence._process.events import emit_event
from pgfence.effects._claim import FREEING, AlreadyFinished, Taken
from pgfence.errors import AttemptLostError, IdempotencyInProgressError, IdempotencyKeyReusedError

if TYPE_CHECKING:
    from datetime import datetime

    from pgfence._leases.request import AcquireRequest, Busy, Refused
    from pgfence._process.events import EventHub
    from pgfence.effects._claim import EffectKey


class Lapse(NamedTuple):
    """The row of a key after an attempt that ended with an error; see `EffectSql.end`."""

    noted: bool
    mine: bool | None
    status: str | None
    attempt: int | None
    remaining: float | None
    until: datetime | None


def describe_error(error: BaseException) -> str:
    return type(error).__qualname__


def emit_refusal(events: EventHub, request: AcquireRequest, refused: Refused) -> None:
    """Emit the event of a key that is finished, or that belongs to a request with another payload."""
    if isinstance(refused, AlreadyFinished):
        emit_event(events, "replayed", request.names[0], request.kind)
    elif isinstance(refused.__cause__, IdempotencyKeyReusedError):
        emit_event(events, "reused", request.names[0], request.kind)


def in_progress_error(wanted: EffectKey, busy: Busy, timeout: float) -> IdempotencyInProgressError:
    """Return the error for a key that is claimed by another attempt, or by a transaction.

    `timeout` is the number of seconds that the caller has waited, or 0 if it has not.
    """
    waited = f", and did not end within {timeout:g} s" if timeout else ""
    if busy.holder is None:
        waited = f", which did not end within {timeout:g} s" if timeout else ""
        message = f"{wanted} is in use by another transaction{waited}"
        return IdempotencyInProgressError(message, scope=wanted.scope, key=wanted.key)
    who = f"attempt {busy.holder.token} at {wanted} ({busy.holder})"
    ttl = busy.ttl if isinstance(busy, Taken) and busy.ttl else wanted.ttl
    ended = busy.ended if isinstance(busy, Taken) else None
    # A claim is renewed every third of its TTL. If less than half of the TTL is left, renewing has failed.
    if not busy.remaining or (ended is None and busy.remaining >= ttl / 2):
        return IdempotencyInProgressError(f"{who} is running{waited}", scope=wanted.scope, key=wanted.key)
    if ended is None:
        how = f"has not renewed its claim for {ttl - busy.remaining:.1f} s: its process hangs, has died or cannot reach the server"
    else:
        how = f"ended with {ended}, and its outcome is unknown"
    then = _describe_next(wanted, busy.holder.token or 0, busy.remaining, busy.holder.expires_at)
    return IdempotencyInProgressError(
        f"{who} {how}. {then}",
        scope=wanted.scope,
        key=wanted.key,
        retry_after=max(0.1, busy.remaining),
        ended_with=ended,
    )


def lost_error(wanted: EffectKey, number: int, newest: int, sqlstate: str | None) -> AttemptLostError:
    """Return the error for an attempt whose claim has ended.

    `newest` is the number of the newest attempt, which is above `number` if another one has taken over.
    """
    taken = f"attempt {newest} has taken over"
    why = taken if newest > number else "its claim was not renewed in time, or was ended"
    return AttemptLostError(
        f"attempt {number} at {wanted} was lost: {why}. Its result is not stored; what it did outside the database remains",
        scope=wanted.scope,
        key=wanted.key,
        attempt=number,
        newest=newest,
        retry_after=1.0,
        sqlstate=sqlstate,
    )


def describe_lapse(wanted: EffectKey, number: int, what: str, row: Lapse | None, left: float) -> str:
    """Describe the state of the key after its attempt ended with an error that leaves the outcome unknown.

    `row` is the row of the key, or None if the server was not queried or did not respond. `left` is the number of seconds until
    the claim ends, as far as this process knows.
    """
    who = f"attempt {number} at {wanted} ended with {what}"
    if row is None:
        return f"{who}, and its outcome is unknown. {_describe_next(wanted, number, left, None)}"
    if row.mine and row.status in ("done", "failed"):
        return f"{who} after its result was committed: the next call returns that result"
    if row.mine and row.status == "in_progress" and row.remaining is not None:
        then = _describe_next(wanted, number, row.remaining, row.until)
        return f"{who}, and its outcome is unknown. {then}"
    if row.attempt is not None and row.attempt > number:
        return f"{who} after attempt {row.attempt} had taken over"
    return f"{who} after its key had been freed, or had expired: the next call runs the work again"


def _describe_next(wanted: EffectKey, attempt: int, remaining: float, until: datetime | None) -> str:
    when = (
        f"in {remaining:.1f} s" if until is None else f"in {remaining:.1f} s, at {until.isoformat(timespec='seconds')}"
    )
    if wanted.takeover:
        return f"The key becomes free {when}: the next call then runs attempt {attempt + 1}"
    return (
        f"Its claim ends {when}, and no other attempt follows (takeover=False). From then on, calls raise AttemptLostError."
        f" To run the work again, {FREEING}"
    )
