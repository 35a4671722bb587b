"""What an effect asks of the server for a key, and what the answers mean. No I/O, as for every grant."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pgfence._leases.request import AcquireRequest, Busy, Granted, Refused, decode_json, get_host, owner_of
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

FREEING = "look for its effect, then free the key with `pgfence keys free` or monitoring.free_key()"
_LONGEST_NOTE = 200


class EffectKey(NamedTuple):
    """What a key is claimed with.

    Attributes:
        scope: whose key it is and for what.
        key: what the client repeats.
        fingerprint: of the request; None compares nothing.
        ttl: seconds that a claim outlives a dead attempt.
        keep: seconds from the end of the work on for which its result is kept, and from the end of a claim what is known of it.
        takeover: whether an attempt that was lost is followed by another one.
    """

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
    """What is stored under a key that is done.

    Attributes:
        status: "done" or "failed".
        text: a result or an error, as its codec wrote it; None where a reply is stored.
        reply: a recorded HTTP response.
    """

    status: str
    text: str | None
    reply: Reply | None


class AlreadyFinished(Refused):
    """The key needs no attempt any more."""

    def __init__(self, result: StoredResult) -> None:
        self.result = result


@dataclass(frozen=True, slots=True)
class Taken(Busy):
    """A key that another attempt has.

    Attributes:
        ttl: seconds for which its claim is renewed each time; None if unknown.
        ended: the error that it ended with; None while it runs, or if its process has died.
    """

    ttl: float | None = None
    ended: str | None = None


@dataclass(frozen=True, kw_only=True)
class EffectRequest(AcquireRequest):
    """A key that is asked for.

    Attributes:
        wanted: with what.
        scope: as it stands in the table.
    """

    wanted: EffectKey
    scope: str

    kind = "effect"

    @property
    def places(self) -> tuple[Hashable, ...]:
        # No queue in this process: the server decides, so that another payload is rejected before a wait.
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
            f"{wanted} belongs to a request with another payload: a new request needs a key of its own",
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
    """Return what to ask the server for."""
    scope = qualify_name(wanted.scope, namespace, "the scope")
    return EffectRequest(
        stored=scope + SEPARATOR + wanted.key, place=place, terms=LeaseTerms(wanted.ttl), wanted=wanted, scope=scope
    )


def encode_note(ended: str) -> str:
    """Return as JSON what the next caller reads; in ASCII, which every encoding of a database has."""
    return json.dumps({"ended": ended.encode("ascii", "replace").decode()[:_LONGEST_NOTE]})


def decode_note(text: str | None) -> str | None:
    """Return the error that an attempt ended with, from what `encode_note` has stored."""
    found = None if text is None else json.loads(text).get("ended")
    return found if isinstance(found, str) else None


def _decode_headers(text: str | None) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in json.loads(text or "[]"))


def _lost_error(wanted: EffectKey, attempt: int, ended: str | None) -> AttemptLostError:
    how = "was lost" if ended is None else f"ended with {ended}"
    return AttemptLostError(
        f"attempt {attempt} at {wanted} {how}, and it is not known what it did. With takeover=False no other attempt follows:"
        f" {FREEING}",
        scope=wanted.scope,
        key=wanted.key,
        attempt=attempt,
        newest=attempt,
    )
