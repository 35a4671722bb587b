"""What is asked of the server for an attempt, and what its answers mean. No I/O, as for every grant."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pgfence._leases.request import AcquireRequest, Busy, Granted, Refused, decoded, host, owner_of
from pgfence._leases.terms import LeaseTerms
from pgfence._sql.effects import effect_sql
from pgfence.effects._ends import Taken, ended_in, lost_before
from pgfence.effects._wanted import EffectKey, Reply, StoredResult
from pgfence.errors import IdempotencyKeyReusedError
from pgfence.keys import SEPARATOR, qualified_name
from pgfence.types import Holder

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from datetime import datetime

    from pgfence._leases.request import Steps
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames


class AlreadyFinished(Refused):
    """The key needs no attempt any more."""

    def __init__(self, result: StoredResult) -> None:
        self.result = result


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
        """No line in this process: the server decides, so that another payload is told of before a wait."""
        return ()

    def attempt(self, style: ParamStyle, lease_id: str) -> Steps:
        wanted = self.wanted
        row = yield (
            effect_sql(self.place, style).claim,
            (
                self.scope,
                wanted.key,
                wanted.fingerprint,
                lease_id,
                wanted.ttl,
                wanted.keep,
                wanted.takeover,
                owner_of(self.identity),
                host(),
                os.getpid(),
                self.scope,
                wanted.key,
            ),
        )
        outcome, attempt, until, remaining, steps, *rest, ttl = row
        match outcome:
            case "granted":
                return Granted(attempt, until, remaining, None, decoded(steps) or {})
            case "busy":
                if attempt is None:
                    return Busy(remaining)
                return Taken(remaining, self._holder(attempt, until, rest[4:]), ttl, ended_in(rest[0]))
        raise self._refusal(outcome, attempt, rest[:4])

    def _holder(self, attempt: int, until: datetime, row: Sequence[Any]) -> Holder:
        owner, where, pid, since = row
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

    def _refusal(self, outcome: str, attempt: int, row: Sequence[Any]) -> Refused:
        wanted = self.wanted
        if outcome in ("done", "failed"):
            text, status, headers, body = row
            reply = None
            if status is not None:
                reply = Reply(
                    status, tuple((name, value) for name, value in json.loads(headers or "[]")), bytes(body or b"")
                )
            return AlreadyFinished(StoredResult(outcome, text, reply))
        refused = Refused()
        if outcome == "lost":
            refused.__cause__ = lost_before(wanted, attempt, ended_in(row[0]))
        else:
            refused.__cause__ = IdempotencyKeyReusedError(
                f"{wanted} belongs to a request with another payload: a new request needs a key of its own",
                scope=wanted.scope,
                key=wanted.key,
            )
        return refused


def claim_of(wanted: EffectKey, place: TableNames, namespace: str) -> EffectRequest:
    """Return what to ask the server for."""
    scope = qualified_name(wanted.scope, namespace, "the scope")
    return EffectRequest(
        stored=scope + SEPARATOR + wanted.key, place=place, terms=LeaseTerms(wanted.ttl), wanted=wanted, scope=scope
    )
