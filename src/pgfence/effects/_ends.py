"""How an attempt ends by an error, in words: for the traceback, for the log, and for whoever asks for the key next.

All of it comes from the row of the key, as far as the server answers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pgfence._leases.request import Busy
from pgfence.errors import AttemptLostError, IdempotencyInProgressError

if TYPE_CHECKING:
    from datetime import datetime

    from pgfence.effects._wanted import EffectKey

_SHOWN = 200
_FREEING = "look for its effect, then free the key with `pgfence keys free` or monitoring.free_key()"


@dataclass(frozen=True, slots=True)
class Taken(Busy):
    """A key that another attempt has.

    Attributes:
        ttl: seconds for which its claim is renewed each time; None if unknown.
        ended: the error that it ended with; None while it runs, or if its process has died.
    """

    ttl: float | None = None
    ended: str | None = None


class Lapse(NamedTuple):
    """The row of a key after an attempt that ended with an error; see `EffectSql.end`."""

    noted: bool
    mine: bool | None
    status: str | None
    attempt: int | None
    remaining: float | None
    until: datetime | None


def kind_of(error: BaseException) -> str:
    """Return what an error is called in messages."""
    return type(error).__qualname__


def note_of(ended: str) -> str:
    """Return as JSON what the next caller reads; in ASCII, which every encoding of a database has."""
    return json.dumps({"ended": ended.encode("ascii", "replace").decode()[:_SHOWN]})


def ended_in(text: str | None) -> str | None:
    """Return what an attempt ended with, from what `note_of` has stored."""
    found = None if text is None else json.loads(text).get("ended")
    return found if isinstance(found, str) else None


def in_progress(wanted: EffectKey, busy: Busy, timeout: float) -> IdempotencyInProgressError:
    """Return the error for a key that another attempt, or a transaction, has.

    Args:
        wanted: what was asked for.
        busy: what the server said.
        timeout: seconds that the caller has waited; 0 for none.
    """
    waited = f", and did not end within {timeout:g} s" if timeout else ""
    if busy.holder is None:
        told = f"another transaction is using {wanted}{waited}"
        return IdempotencyInProgressError(told, scope=wanted.scope, key=wanted.key)
    who = f"attempt {busy.holder.token} at {wanted} ({busy.holder})"
    ttl = busy.ttl if isinstance(busy, Taken) and busy.ttl else wanted.ttl
    ended = busy.ended if isinstance(busy, Taken) else None
    # A claim is renewed each third of its time: with less than half of it left, its process is gone or hangs.
    if not busy.remaining or (ended is None and busy.remaining >= ttl / 2):
        return IdempotencyInProgressError(f"{who} is running{waited}", scope=wanted.scope, key=wanted.key)
    if ended is None:
        told = f"has not renewed its claim for {ttl - busy.remaining:.1f} s: its process hangs or has died"
    else:
        told = f"ended with {ended}, and it is not known what it did"
    then = _then(wanted, busy.holder.token or 0, busy.remaining, busy.holder.expires_at)
    return IdempotencyInProgressError(
        f"{who} {told}. {then}",
        scope=wanted.scope,
        key=wanted.key,
        retry_after=max(0.1, busy.remaining),
        ended_with=ended,
    )


def lost_before(wanted: EffectKey, attempt: int, ended: str | None) -> AttemptLostError:
    """Return the error for a key whose attempt was lost, where no other one may follow."""
    how = "was lost" if ended is None else f"ended with {ended}"
    return AttemptLostError(
        f"attempt {attempt} at {wanted} {how}, and it is not known what it did. With takeover=False no other attempt follows:"
        f" {_FREEING}",
        scope=wanted.scope,
        key=wanted.key,
        attempt=attempt,
        newest=attempt,
    )


def lapsed(wanted: EffectKey, number: int, what: str, row: Lapse | None, left: float) -> str:
    """Say what became of the key of an attempt that ended with an error of which it is not known what it means.

    Args:
        wanted: with what the key was claimed.
        number: of the attempt.
        what: the error.
        row: of the key; None if the server was not asked, or gave no answer.
        left: seconds until the claim ends, as far as this process knows.
    """
    who = f"attempt {number} at {wanted} ended with {what}"
    if row is None:
        return f"{who}, and it is not known what it did. {_then(wanted, number, left, None)}"
    if row.mine and row.status in ("done", "failed"):
        return f"{who} after its result was committed: the next call returns that result"
    if row.mine and row.status == "in_progress" and row.remaining is not None:
        return f"{who}, and it is not known what it did. {_then(wanted, number, row.remaining, row.until)}"
    if row.attempt is not None and row.attempt > number:
        return f"{who} after attempt {row.attempt} had taken over"
    return f"{who} after its key had been freed, or had expired: the next call runs"


def _then(wanted: EffectKey, attempt: int, remaining: float, until: datetime | None) -> str:
    when = (
        f"in {remaining:.1f} s" if until is None else f"in {remaining:.1f} s, at {until.isoformat(timespec='seconds')}"
    )
    if wanted.takeover:
        return f"The key is free {when}: the next call then runs attempt {attempt + 1}"
    return (
        f"Its claim ends {when}, and no other attempt follows (takeover=False): from then on calls raise AttemptLostError."
        f" To run it again, {_FREEING}"
    )
