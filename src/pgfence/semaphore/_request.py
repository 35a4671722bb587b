"""The requests to the server for permits, and the arguments of a semaphore, for the sync and async classes, without I/O."""

from __future__ import annotations

import json
import os
import re
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, TypeAlias

from pgfence._api.inputs import check_choice
from pgfence._holds.hold import format_names
from pgfence._leases.json_text import decode_json
from pgfence._leases.request import (
    AcquireRequest,
    Busy,
    Granted,
    Refused,
    get_host,
    holder_of,
    owner_of,
    warn_of_clock,
)
from pgfence._locks.acquisition import timeout_of
from pgfence._process.clock import clock
from pgfence._sql.activity import build_lease_holder
from pgfence._sql.semaphore import permit_sql
from pgfence._sql.storage import LIMITS
from pgfence.keys import LONGEST_STORED, qualify_name, unqualify_name
from pgfence.lease._engines import EngineSourceT
from pgfence.lease._request import HandleT, LeaseOptions

if TYPE_CHECKING:
    from collections.abc import Hashable

    from pgfence._leases.request import Steps
    from pgfence._leases.terms import Heartbeat
    from pgfence._process.clock import Seconds
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames
    from pgfence.types import Holder

MOST_PERMITS = 1000
_LOOKS_LIKE_A_ROW = re.compile(r"[#/]\d+\Z")
_LONGEST_NAME = LONGEST_STORED - len(f"#{MOST_PERMITS}")

OnMismatch: TypeAlias = Literal["raise", "stored"]


@dataclass(frozen=True, kw_only=True)
class PermitRequest(AcquireRequest):
    """A request for one or more permits of a semaphore.

    Attributes:
        follows: whether the stored number of permits applies if it differs from `permits`.
        since: when a fair waiter began to wait, on the clock of this process.
        turn: contenders of this process with the same turn wait for each other; None means that the turn is `asked`.
    """

    permits: int
    asked: int = 1
    follows: bool = False
    since: float = 0.0
    turn: str | None = None

    kind = "permit"
    needed = LIMITS

    @property
    def weight(self) -> int:
        return self.asked

    @property
    def row(self) -> None:
        return None

    @property
    def places(self) -> tuple[Hashable, ...]:
        return ((self.place, self.stored, "permits", self.turn or self.asked),)

    def run_steps(self, style: ParamStyle, lease_id: str) -> Steps:
        terms, identity = self.terms, self.identity
        outcome, size, names, tokens, expires_at, remaining, hold_remaining, checkpoint, set_back, *holder = yield (
            permit_sql(self.place, style).acquire,
            (
                self.stored,
                self.permits,
                self.asked,
                self.follows,
                lease_id,
                terms.ttl,
                terms.max_hold,
                owner_of(identity),
                get_host(),
                os.getpid(),
                identity.purpose,
                self.waiter,
                clock() - self.since if self.waiter else 0.0,
            ),
        )
        warn_of_clock(self, set_back)
        if outcome == "granted":
            rows = tuple(zip(names, tokens, strict=True))
            told = decode_json(checkpoint)
            return Granted(tokens[0], expires_at, remaining, hold_remaining, told, rows=rows)
        if outcome == "mismatch":
            raise Refused from self._build_mismatch_error(size)
        if outcome == "heavy":
            raise Refused from ValueError(
                f"the semaphore {format_names(self.names)} has {size} {'permit' if size == 1 else 'permits'}, so a request with"
                f" weight={self.asked} could never be granted: pass a smaller weight"
            )
        return Busy(remaining, holder_of(self, holder) if holder[0] else None, limit=size)

    def _build_mismatch_error(self, size: int) -> ValueError:
        return ValueError(
            f"the semaphore {format_names(self.names)} has {size} {'permit' if size == 1 else 'permits'}, not {self.permits}, because"
            f" another process has created or resized it. Use permits={size}, change the number with resize(), or accept the stored"
            ' number with on_mismatch="stored"'
        )


class SemaphoreOptions(LeaseOptions[EngineSourceT, HandleT]):
    """The arguments of a semaphore and their use, for the sync and async classes."""

    def __init__(
        self,
        engine: EngineSourceT,
        name: str,
        *,
        permits: int,
        ttl: Seconds,
        weight: int = 1,
        on_mismatch: OnMismatch = "raise",
        fair: bool = False,
        max_hold: Seconds | None = None,
        heartbeat: Heartbeat = "auto",
        owner: str | None = None,
        purpose: str = "",
        namespace: str | None = None,
    ) -> None:
        super().__init__(
            engine,
            name,
            ttl=ttl,
            max_hold=max_hold,
            heartbeat=heartbeat,
            owner=owner,
            purpose=purpose,
            namespace=namespace,
        )
        _qualify_name(name, namespace or "")
        self._permits = _check_permits(permits)
        self._weight = _check_count(weight, "weight")
        if self._weight > self._permits:
            raise ValueError(
                f"weight={weight} is more than permits={permits}, so the request could never be granted: pass a smaller weight"
            )
        check_choice("on_mismatch", on_mismatch, ("raise", "stored"))
        self._follows = on_mismatch == "stored"
        self._fair = fair

    async def _take(self, timeout: Seconds | None, *, lasts: bool = False) -> HandleT | None:
        manager, request = self._prepare()
        # With a unique turn, a request waits for no other contender of this process. A try does not wait at all, and a fair
        # waiter has its own place in the server's queue.
        if not timeout_of(manager.config, timeout, manager.carrier.get_contender()):
            request = replace(request, turn=str(uuid.uuid4()))  # type: ignore[call-arg]
        elif self._fair:
            waiter = str(uuid.uuid4())
            request = replace(request, turn=waiter, waiter=waiter, since=clock())  # type: ignore[call-arg]
        try:
            return await manager.acquire(request, timeout, self._handle, lasts=lasts)
        except Refused as refusal:
            raise (refusal.__cause__ or refusal) from None

    def _create_request(self, place: TableNames, namespace: str) -> PermitRequest:
        return PermitRequest(
            stored=_qualify_name(self._name, namespace),
            place=place,
            terms=self._terms,
            identity=self._identity,
            heartbeat=self._heartbeat,
            permits=self._permits,
            asked=self._weight,
            follows=self._follows,
        )

    async def _find_holders(self) -> list[Holder]:
        manager, request = self._prepare()
        sql = permit_sql(request.place, manager.style)
        (found,) = await manager.fetch_row(request.place, sql.look, (request.stored,), needed=LIMITS)
        return [_decode_holder(item) for item in json.loads(found)]

    async def _resize(self, permits: int) -> None:
        size = _check_permits(permits)
        manager, request = self._prepare()
        await manager.verify(request.place, needed=LIMITS)
        args = request.stored, size
        text = permit_sql(request.place, manager.style).resize
        await manager.execute_with_retry(request.place, text, args, 5.0, needed=LIMITS)
        self._permits = size
        self._request = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}, permits={self._permits}, ttl={self._terms.ttl:g}>"


def _decode_holder(item: list[object]) -> Holder:
    kind, owner, host, pid, backend_pid, purpose, token, since, expires_at, row = item
    times = [None if each is None else datetime.fromtimestamp(float(str(each)), UTC) for each in (since, expires_at)]
    # The name of the permit's row, which is the name that `evict` takes.
    return build_lease_holder(
        unqualify_name(str(row)), (kind, owner, host, pid, backend_pid, None, purpose, token, *times)
    )


def _qualify_name(name: str, namespace: str) -> str:
    """Return the stored name of a semaphore, after checking that the names of its permits can be stored too."""
    if _LOOKS_LIKE_A_ROW.search(name):
        raise ValueError(
            f'{name!r} cannot be the name of a semaphore, because it ends in "#" or "/" followed by digits, like the stored'
            " name of a permit or of a partition. Choose a name with a different ending"
        )
    return qualify_name(name, namespace, "the name of a semaphore", _LONGEST_NAME)


def _check_count(value: object, what: str) -> int:
    if type(value) is not int:
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{what} must be 1 or more, not {value}")
    return value


def _check_permits(value: object) -> int:
    permits = _check_count(value, "permits")
    if permits > MOST_PERMITS:
        raise ValueError(
            f"permits must be {MOST_PERMITS} or less, not {permits}: each permit is a row that every acquire() reads. Limit a"
            " larger number with RateLimit, or with several semaphores"
        )
    return permits
