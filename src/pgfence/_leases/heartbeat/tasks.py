"""What the heartbeat's connection has to do: renewals in batches, and ends of leases that were not confirmed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias

from pgfence._leases import terms
from pgfence._process.clock import clock
from pgfence._sql.effects import EffectSql, effect_sql
from pgfence._sql.errors import translate_error
from pgfence._sql.lease import LeaseSql, answers, lease_sql, losses
from pgfence.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence._leases.grant import Grant
    from pgfence._leases.heartbeat.connection import HeartbeatConnection
    from pgfence._leases.terms import LeaseKind
    from pgfence._sql.lease import LeaseResult
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames
    from pgfence.errors import LossReason

    Done = Callable[[Exception | None], object]


Texts: TypeAlias = LeaseSql | EffectSql


def texts(family: LeaseKind, place: TableNames, style: ParamStyle) -> Texts:
    """Return the statements of a family of grants."""
    return lease_sql(place, style) if family == "lease" else effect_sql(place, style)


class RenewRequest:
    """What `renew()` asked for, beyond what the heartbeat does by itself."""

    __slots__ = ("done", "ttl")

    def __init__(self) -> None:
        self.ttl: float | None = None
        self.done: list[Done] = []

    def granted(self, error: Exception | None) -> None:
        for done in self.done:
            done(error)


class HeartbeatTask(ABC):
    """One statement to be sent."""

    place: TableNames
    family: LeaseKind = "lease"

    @abstractmethod
    def limit(self, now: float) -> float:
        """Return the seconds it may take, a new connection included."""

    @abstractmethod
    def perform(self, link: HeartbeatConnection[Any], sql: Texts, limit: float) -> None:
        """Send it. Raises whatever went wrong."""


class RenewTask(HeartbeatTask):
    """Some grants of one place and family, to be renewed by one statement."""

    def __init__(self, place: TableNames, family: LeaseKind, wishes: dict[Grant, RenewRequest | None]) -> None:
        self.place = place
        self.family = family
        self.wishes = wishes
        self.started = 0.0
        self.told: list[tuple[Grant, LeaseResult]] = []

    def limit(self, now: float) -> float:
        return terms.patience(max(0.0, min((grant.deadline for grant in self.wishes), default=math.inf) - now))

    def perform(self, link: HeartbeatConnection[Any], sql: Texts, limit: float) -> None:
        grants = list(self.wishes)
        for grant in grants:
            grant.progressed = False
        lists = (
            [grant.stored for grant in grants],
            [str(grant.lease_id) for grant in grants],
            [grant.token for grant in grants],
            [self.ttl(grant) for grant in grants],
        )
        self.started = clock()
        text = link.ask(sql.renew, lists, limit)
        self.told = list(zip(grants, answers(text), strict=True))

    def ttl(self, grant: Grant) -> float:
        wish = self.wishes[grant]
        return grant.ttl if wish is None or wish.ttl is None else wish.ttl


class CheckTask(HeartbeatTask):
    """Ask whether some leases of one place are still held, without renewing them: their holder may have been evicted."""

    def __init__(self, place: TableNames, grants: list[Grant]) -> None:
        self.place = place
        self.grants = grants
        self.lost: list[tuple[Grant, LossReason]] = []

    def limit(self, now: float) -> float:
        return 10 * terms.SHORTEST_PATIENCE

    def perform(self, link: HeartbeatConnection[Any], sql: Texts, limit: float) -> None:
        assert isinstance(sql, LeaseSql)
        lists = (
            [grant.stored for grant in self.grants],
            [str(grant.lease_id) for grant in self.grants],
            [grant.token for grant in self.grants],
        )
        found = losses(link.ask(sql.check, lists, limit))
        self.lost = [(grant, reason) for grant, reason in zip(self.grants, found, strict=True) if reason is not None]


class ReleaseTask(HeartbeatTask):
    """A release, or the end of a grant nobody heard of, to be repeated until the server has answered or the TTL is over."""

    def __init__(
        self,
        place: TableNames,
        text: Callable[[Any], str],
        args: tuple[Any, ...],
        until: float,
        family: LeaseKind = "lease",
    ) -> None:
        self.place = place
        self.family = family
        self.text = text
        self.args = args
        self.until = until
        self.at = 0.0
        """When to try (again)."""
        self.failures = 0
        self.answer: Any = None

    def limit(self, now: float) -> float:
        return terms.patience(max(terms.SHORTEST_PATIENCE, self.until - now))

    def perform(self, link: HeartbeatConnection[Any], sql: Texts, limit: float) -> None:
        self.answer = link.ask(self.text(sql), self.args, limit)

    def again(self, now: float) -> bool:
        """Plan another try and say whether there is time for one."""
        self.failures += 1
        self.at = now + terms.retry_after(self.failures, 10.0)
        return self.at < self.until

    def unsettled(self, now: float) -> bool:
        """Say whether the answer is not the last word, and plan another try then: somebody had the row locked."""
        return self.answer is None and self.again(now)


def release_of(grant: Grant) -> ReleaseTask:
    """Return the release of a grant; of a slot it says whether it is done."""
    args: tuple[Any, ...] = grant.stored, grant.stored, str(grant.lease_id), grant.token
    if grant.slot is None:
        return ReleaseTask(grant.place, lambda sql: sql.release_late, args, row_until(grant), grant.family)
    return ReleaseTask(grant.place, lambda sql: sql.finish_late, (*args, grant.slot, grant.done), row_until(grant))


def row_until(grant: Grant) -> float:
    """Return until when the server believes in a grant, as far as this process knows."""
    return grant.deadline + terms.margin(grant.ttl)


class RevokeTask(ReleaseTask):
    """The end of a grant whose answer was lost. The statement that asks for it may still be on its way to the server."""

    SETTLED = 5.0
    """Seconds after which it has come to its end: in the server it waits for its row two seconds at most."""

    def __init__(
        self,
        place: TableNames,
        text: Callable[[Any], str],
        args: tuple[Any, ...],
        until: float,
        family: LeaseKind = "lease",
    ) -> None:
        super().__init__(place, text, args, until, family)
        self._heard: float | None = None
        """When the server answered first."""

    def unsettled(self, now: float) -> bool:
        if self.answer is None:
            return self.again(now)
        if self.answer:
            return False
        self._heard = now if self._heard is None else self._heard
        return now - self._heard < self.SETTLED and self.again(now)


def translate_renewal_error(error: Exception, place: TableNames) -> Exception:
    """Return what a renewal that failed means to whoever asked for it."""
    if told := translate_error(error, place):
        return told
    reason = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    answer = UnreachableError(
        f"the renewal had no answer: {reason}. The lease stands until its deadline, see remaining()"
    )
    answer.__cause__ = error
    return answer
