"""The request of an effect for a key, and the meaning of the server's responses, without I/O."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pgfence._leases.json_text import decode_json
from pgfence._leases.request import AcquireRequest, Busy, Granted, Refused, get_host, owner_of
from pgfence._leases.terms import LeaseTerms
from pgfence._sql.effects import effect_sql
from pgfence.errors import AttemptLostError, IdempotencyKeyReusedError
from pgfence.keys import SEPARATOR, qualify_name
from pgfence.types import Holder

if TYPE_CHECKING:
    from collections.abc import Hashable
    from datetime import datetime

    from pgfence._leases.request import Steps
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames

FREEING = (
    "check for its effects, then free the key with `pgfence keys free SCOPE KEY --reason TEXT` or monitoring.free_key()"
)
_LONGEST_NOTE = 200


class EffectKey(NamedTuple):
    """The values with which a key is claimed. See `IdempotentEffect` for their meaning; times are in seconds."""

    scope: str
    key: str
    fingerprint: bytes | None
    ttl: float
    keep: float
    takeover: bool = True

    def __str__(self) -> str:
        return f"the idempotency key {self.key!r} of scope {self.scope!r}"


class Reply(NamedTuple):
    """A recorded HTTP response, byte for byte."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class StoredResult(NamedTuple):
    """The outcome that is stored under a finished key: a text or a recorded HTTP response.

    The text is a result or an error, as encoded by its codec. The status is "done" or "failed".
    """

    status: str
    text: str | None
    reply: Reply | None


class AlreadyFinished(Refused):
    """The key is finished and needs no further attempt."""

    def __init__(self, result: StoredResult) -> None:
        self.result = result


@dataclass(frozen=True, slots=True)
class Taken(Busy):
    """A key that another attempt has claimed.

    Attributes:
        ttl: seconds by which its claim is extended each time, or None if unknown.
        ended: the error with which the attempt ended; None while it runs, or if its process has died.
    """

    ttl: float | None = None
    ended: str | None = None


@dataclass(frozen=True, kw_only=True)
class EffectRequest(AcquireRequest):
    """A request to claim a key. `scope` is the scope as it is stored in the table."""

    wanted: EffectKey
    scope: str

    kind = "effect"

    @property
    def places(self) -> tuple[Hashable, ...]:
        # The request is not queued in this process. The server decides, so that a request with another payload is rejected before
        # it waits.
        return ()

    def run_steps(self, style: ParamStyle, lease_id: str) -> Steps:
        wanted, where = self.wanted, (self.scope, self.wanted.key)
        terms = wanted.fingerprint, lease_id, wanted.ttl, wanted.keep, wanted.takeover
        args = *where, *terms, owner_of(self.identity), get_host(), os.getpid(), *where
        row = yield effect_sql(self.place, style).claim, args
        outcome, attempt, until, remaining, steps, text, status, headers, body, *holder, ttl = row
        match outcome:
            case "granted":
                return Granted(attempt, until, remaining, None, decode_json(steps) or {})
            case "busy" if attempt is None:
                return Busy(remaining)
            case "busy":
                return Taken(remaining, self._describe_holder(attempt, until, *holder), ttl, decode_note(text))
            case "done" | "failed":
                reply = None if status is None else Reply(status, _decode_headers(headers), bytes(body or b""))
                raise AlreadyFinished(StoredResult(outcome, text, reply))
            case "lost":
                raise Refused from _lost_error(wanted, attempt, decode_note(text))
        raise Refused from IdempotencyKeyReusedError(
            f"{wanted} belongs to a request with another payload: use a new key for a new request",
            scope=wanted.scope,
            key=wanted.key,
        )

    def _describe_holder(
        self, attempt: int, until: datetime, owner: str, where: str, pid: int, since: datetime
    ) -> Holder:
        return Holder(
            name=self.names[0],
            key=None,
            kind=self.kind,
            owner=owner,
            host=where,
            pid=pid,
            token=attempt,
            since=since,
            expires_at=until,
        )


def build_request(wanted: EffectKey, place: TableNames, namespace: str) -> EffectRequest:
    scope = qualify_name(wanted.scope, namespace, "the scope")
    return EffectRequest(
        stored=scope + SEPARATOR + wanted.key, place=place, terms=LeaseTerms(wanted.ttl), wanted=wanted, scope=scope
    )


def encode_note(ended: str) -> str:
    """Return the note for the next caller as JSON, in ASCII, which every database encoding can represent."""
    return json.dumps({"ended": ended.encode("ascii", "replace").decode()[:_LONGEST_NOTE]})


def decode_note(text: str | None) -> str | None:
    """Return the error that an attempt ended with, from what `encode_note` stored."""
    found = None if text is None else json.loads(text).get("ended")
    return found if isinstance(found, str) else None


def _decode_headers(text: str | None) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in json.loads(text or "[]"))


def _lost_error(wanted: EffectKey, attempt: int, ended: str | None) -> AttemptLostError:
    how = "was lost" if ended is None else f"ended with {ended}"
    return AttemptLostError(
        f"attempt {attempt} at {wanted} {how}, and its outcome is unknown. With takeover=False, no other attempt follows:"
        f" {FREEING}",
        scope=wanted.scope,
        key=wanted.key,
        attempt=attempt,
        newest=attempt,
    )
