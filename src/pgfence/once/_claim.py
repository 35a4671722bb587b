"""The requests to the server for a slot. The first request finds out which slot is current, and the second acquires it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import UTC
from typing import TYPE_CHECKING

from pgfence._holds.hold import format_names
from pgfence._leases.grant import log
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
from pgfence._sql.lease import build_repair, slot_sql
from pgfence.errors import LockTimeoutError
from pgfence.once._slots import Ahead, Due, Over, due
from pgfence.once._zones import (
    build_disagreement_error,
    convert_to_zone_rules,
    find_other_host,
    get_utc_offset,
    get_zone_name,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from pgfence._leases.request import Steps
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames
    from pgfence.once._slots import CatchUp, Schedule

MOVES = 10
"""How many times the current slot may change before it is requested. Slots that are shorter than a round trip always change."""


_WHY = {"done": "is done", "missed": 'was missed, and catch_up="none" does not run it late'}


class SlotOverError(LockTimeoutError):
    """The slot is done or was missed. No process holds it, and waiting does not help.

    Attributes:
        slot: the beginning of the slot.
    """

    def __init__(self, message: str, *, slot: datetime, names: Sequence[str] = ()) -> None:
        super().__init__(message, names=names)
        self.slot = slot


class SlotClockError(SlotOverError):
    """A slot is done although, by the server's clock, it has not begun. The clock was ahead when it ran, or is behind now.

    No later slot runs before that slot has begun, so an operator must check the clock. The error is also logged at WARNING,
    because `try_acquire()` returns None and `wrap()` skips the call.

    Attributes:
        slot: the beginning of the slot that is done.
        now: the time by the server's clock.
        ahead: how far the beginning of the slot is ahead of that time.
        repair: the SQL statement that lets the job run again, if the clock is correct now.
    """

    retryable = False

    def __init__(
        self, message: str, *, slot: datetime, now: datetime, repair: str = "", names: Sequence[str] = ()
    ) -> None:
        super().__init__(message, slot=slot, names=names)
        self.now = now
        self.ahead = slot - now
        self.repair = repair


@dataclass(frozen=True, kw_only=True)
class SlotRequest(AcquireRequest):
    """A request for the slot that is due. If there is only one slot, the schedule is a datetime."""

    schedule: Schedule | datetime
    catch_up: CatchUp

    kind = "slot"

    def run_steps(self, style: ParamStyle, lease_id: str) -> Steps:
        sql, zone = slot_sql(self.place, style), get_zone_name(self.schedule)
        for _ in range(MOVES):
            differing = None
            if zone is None:
                now, done, tried = yield sql.read, (self.stored,)
                found = due(self.schedule, self.catch_up, now, done, tried)
            else:
                now, done, tried, there, before = yield sql.read_zone, (zone, self.stored)
                here = get_utc_offset(self.schedule, now)
                if there is not None and there != here:
                    raise Refused from build_disagreement_error(self.names, self.schedule, now, here, there)
                if there is None:
                    differing = find_other_host(self.names, self.schedule, done, before)
                finished = done if differing is None else max(done, convert_to_zone_rules(self.schedule, done, before))
                found = due(self.schedule, self.catch_up, now, finished, tried)
            if differing is not None:
                if not isinstance(found, Due):
                    raise Refused from differing
                log.warning("%s", differing)
            if isinstance(found, Ahead):
                (schema,) = yield sql.home, (self.place.name("slot"),)
                raise Refused from self._build_ahead_error(found, now, self.place._replace(schema=schema))
            if isinstance(found, Over):
                raise Refused from self._build_over_error(found, now)
            (
                before,
                outcome,
                token,
                expires_at,
                remaining,
                hold_remaining,
                checkpoint,
                *holder,
                set_back,
                attempt,
            ) = yield (
                sql.acquire,
                self._list_arguments(found, lease_id, done),
            )
            warn_of_clock(self, set_back)
            if outcome == "granted":
                data = decode_json(checkpoint)
                told = Granted(token, expires_at, remaining, hold_remaining, data, slot=found.slot, attempt=attempt)
                return replace(told, reclaimed=before == token - 1)
            if outcome == "busy":
                *who, since = holder
                return Busy(remaining, holder_of(self, (*who, token, since, expires_at)))
            if outcome == "zone":
                assert zone is not None
                (there,) = yield sql.offset, (found.slot, zone)
                raise Refused from build_disagreement_error(
                    self.names, self.schedule, found.slot, get_utc_offset(self.schedule, found.slot), there
                )
        return Busy(0.0)

    def _list_arguments(self, found: Due, lease_id: str, done: datetime | None) -> tuple[object, ...]:
        terms, identity = self.terms, self.identity
        who = owner_of(identity), get_host(), os.getpid(), identity.purpose, identity.metadata
        zone = get_zone_name(self.schedule)
        rules = (None, None) if zone is None else (zone, get_utc_offset(self.schedule, found.slot))
        return (
            self.stored,
            self.stored,
            found.slot,
            found.until,
            lease_id,
            terms.ttl,
            terms.max_hold,
            *who,
            *rules,
            done,
        )

    def _build_over_error(self, over: Over, now: datetime) -> SlotOverError:
        why = _WHY[over.why]
        next_one = "" if over.following is None else f"; the next begins at {over.following.isoformat()}"
        error = SlotOverError(
            f"the slot {over.slot.isoformat()} of {format_names(self.names)} {why}{next_one}",
            slot=over.slot,
            names=self.names,
        )
        error.retryable = over.following is not None
        error.retry_after = None if over.following is None else max(0.0, (over.following - now).total_seconds())
        return error

    def _build_ahead_error(self, found: Ahead, now: datetime, place: TableNames) -> SlotClockError:
        statement, now = build_repair(place, self.stored), now.astimezone(UTC)
        distance = str(found.slot - now).partition(".")[0]
        error = SlotClockError(
            f"the slot {found.slot.isoformat()} of {format_names(self.names)} is done, but by the server's clock"
            f" ({now.isoformat()}) it begins only in {distance}: the clock was ahead when the slot ran, or is behind now."
            " Nothing runs under this name until then. If the server's clock is correct now, this statement lets the slot run"
            f" again: {statement}",
            slot=found.slot,
            now=now,
            repair=statement,
            names=self.names,
        )
        error.retry_after = error.ahead.total_seconds()
        log.warning("%s", error)
        return error
