"""The tasks of the heartbeat's connection: renewals, checks for evictions, releases to repeat, and channels to listen to."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias

from pgfence._leases import terms
from pgfence._leases.grant import log
from pgfence._leases.terms import SHORTEST_PATIENCE
from pgfence._process.clock import clock
from pgfence._process.events import build_log_fields
from pgfence._sql.addresses import describe_server
from pgfence._sql.effects import EffectSql, effect_sql
from pgfence._sql.errors import translate_error
from pgfence._sql.lease import LeaseSql, combine_results, decode_losses, decode_renewals, lease_sql
from pgfence._sql.storage import quote
from pgfence.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from uuid import UUID

    from sqlalchemy import Engine

    from pgfence._connections.background import BackgroundConnection
    from pgfence._process.events import EventHub
    from pgfence._sql.storage import TableNames

    Wake = Callable[[], object]
    from collections.abc import Callable

    from pgfence._leases.grant import Grant
    from pgfence._leases.terms import LeaseKind
    from pgfence._sql.lease import LeaseResult
    from pgfence._sql.params import ParamStyle
    from pgfence.errors import LossReason

    Done = Callable[[Exception | None], object]


Texts: TypeAlias = LeaseSql | EffectSql


def choose_sql(family: LeaseKind, place: TableNames, style: ParamStyle) -> Texts:
    """Return the statements that renew and end a family of grants."""
    return lease_sql(place, style) if family == "lease" else effect_sql(place, style)


class RenewRequest:
    """A renewal that a caller of `renew()` waits for."""

    __slots__ = ("done", "ttl")

    def __init__(self) -> None:
        self.ttl: float | None = None
        self.done: list[Done] = []

    def finish(self, error: Exception | None) -> None:
        for done in self.done:
            done(error)


class HeartbeatTask(ABC):
    """One statement for the heartbeat to send."""

    place: TableNames
    family: LeaseKind = "lease"

    @abstractmethod
    def limit(self, now: float) -> float:
        """Return the seconds that the task may take, including the time to open a connection."""

    @abstractmethod
    def run(self, link: BackgroundConnection, sql: Texts, limit: float) -> None:
        """Send the statement. Errors of the driver propagate."""


def _list_rows(grants: Sequence[Grant]) -> tuple[list[str], list[str], list[int | None]]:
    """Return names, lease ids and tokens of the rows of grants, in order."""
    rows = [(name, str(grant.lease_id), token) for grant in grants for name, token in grant.rows]
    return [name for name, _, _ in rows], [lease_id for _, lease_id, _ in rows], [token for _, _, token in rows]


class RenewTask(HeartbeatTask):
    """Renew several grants of one family and one set of tables with one statement."""

    def __init__(self, place: TableNames, family: LeaseKind, requests: dict[Grant, RenewRequest | None]) -> None:
        self.place = place
        self.family = family
        self.requests = requests
        self.started = 0.0
        self.results: list[tuple[Grant, LeaseResult]] = []

    def limit(self, now: float) -> float:
        return terms.compute_statement_budget(
            max(0.0, min((grant.deadline for grant in self.requests), default=math.inf) - now)
        )

    def run(self, link: BackgroundConnection, sql: Texts, limit: float) -> None:
        grants = list(self.requests)
        # This is reset before the statement is sent, so that progress during the statement counts for the next renewal.
        for grant in grants:
            grant.progressed = False
        lists = (*_list_rows(grants), [self.get_ttl(grant) for grant in grants for _ in grant.rows])
        # Deadlines count from here, which is before the server can have computed the new expiry.
        self.started = clock()
        found = iter(decode_renewals(link.ask(sql.renew, lists, limit)))
        self.results = [(grant, combine_results([next(found) for _ in grant.rows])) for grant in grants]

    def get_ttl(self, grant: Grant) -> float:
        request = self.requests[grant]
        return grant.ttl if request is None or request.ttl is None else request.ttl


class CheckTask(HeartbeatTask):
    """Check whether leases are still held, without renewing them, because their holder may have been evicted."""

    def __init__(self, place: TableNames, grants: list[Grant]) -> None:
        self.place = place
        self.grants = grants
        self.lost: list[tuple[Grant, LossReason]] = []

    def limit(self, now: float) -> float:
        return 10 * terms.SHORTEST_PATIENCE

    def run(self, link: BackgroundConnection, sql: Texts, limit: float) -> None:
        assert isinstance(sql, LeaseSql)
        found = iter(decode_losses(link.ask(sql.check, _list_rows(self.grants), limit)))
        self.lost = []
        for grant in self.grants:
            reasons: list[LossReason | None] = [next(found) for _ in grant.rows]
            for reason in reasons:
                if reason is not None:
                    self.lost.append((grant, reason))
                    break


class ReleaseTask(HeartbeatTask):
    """A release that got no response. It is repeated until the server responds or the TTL is over."""

    def __init__(
        self,
        place: TableNames,
        text: Callable[[Any], str],
        args: tuple[object, ...],
        until: float,
        family: LeaseKind = "lease",
    ) -> None:
        self.place = place
        self.family = family
        self.text = text
        self.args = args
        self.until = until
        self.at = 0.0
        """The time of the next try."""
        self.failures = 0
        self.answer: Any = None

    def limit(self, now: float) -> float:
        return terms.compute_statement_budget(max(terms.SHORTEST_PATIENCE, self.until - now))

    def run(self, link: BackgroundConnection, sql: Texts, limit: float) -> None:
        self.answer = link.ask(self.text(sql), self.args, limit)

    def plan_retry(self, now: float) -> bool:
        """Plan a retry, and return whether there is time for it."""
        self.failures += 1
        self.at = now + terms.retry_after(self.failures, 10.0)
        return self.at < self.until

    def needs_retry(self, now: float) -> bool:
        """Return whether to try again, because another session had the row locked and there is time, and plan that try."""
        return self.answer is None and self.plan_retry(now)


def release_of(grant: Grant) -> ReleaseTask:
    """Return the task that releases a grant. For a slot, it also stores whether the slot is done."""
    if grant.is_permit:
        names = [name for name, _ in grant.rows]
        tokens = [token for _, token in grant.rows]
        permit_args = names, len(names), names, str(grant.lease_id), tokens
        return ReleaseTask(grant.place, lambda sql: sql.permits.release_late, permit_args, grant.row_deadline)
    args: tuple[object, ...] = grant.stored, grant.stored, str(grant.lease_id), grant.token
    if grant.slot is None:
        return ReleaseTask(grant.place, lambda sql: sql.release_late, args, grant.row_deadline, grant.family)
    return ReleaseTask(grant.place, lambda sql: sql.finish_late, (*args, grant.slot, grant.done), grant.row_deadline)


class RevokeTask(ReleaseTask):
    """End a grant whose response was lost. The statement that acquires it may still be on its way to the server."""

    SETTLE_SECONDS = 5.0
    """The seconds after which the acquiring statement has finished. On the server, it waits at most two seconds for its row."""

    _answered: float | None = None
    """When the server first responded."""

    def needs_retry(self, now: float) -> bool:
        if self.answer is None:
            return self.plan_retry(now)
        if self.answer:
            return False
        self._answered = now if self._answered is None else self._answered
        return now - self._answered < self.SETTLE_SECONDS and self.plan_retry(now)


def revoke_permits(place: TableNames, name: str, lease_id: UUID, seconds: float) -> RevokeTask:
    """Return the task that ends a grant of permits whose response was lost. It is tried for at most `seconds`, the TTL."""
    args = name, name, name, str(lease_id)
    return RevokeTask(place, lambda sql: sql.permits.forget_late, args, clock() + seconds)


def leave_queue(place: TableNames, name: str, waiter: str, seconds: float) -> ReleaseTask:
    """Return the task that removes a waiter from the queue of a fair semaphore. It is tried for at most `seconds`.

    The queue ignores a waiter that has not asked for 3 s.
    """
    return ReleaseTask(place, lambda sql: sql.permits.leave_late, (name, name, name, waiter), clock() + seconds)


def report_failure(engine: Engine, events: EventHub, task: HeartbeatTask, error: Exception, *, first: bool) -> None:
    """Log the first of several failed tasks in a row, and emit an event for each lease that was not renewed.

    The caller must hold no internal lock.
    """
    if first:
        where, fields = describe_server(engine), build_log_fields("renewal_failed")
        reason = " ".join(str(error).split())
        log.warning("no response from %s, retrying until the deadlines of the leases: %s", where, reason, extra=fields)
    if events.active and isinstance(task, RenewTask):
        for grant in task.requests:
            grant.emit(events, "renewal_failed", reason=type(error).__name__)


def translate_renewal_error(error: Exception, place: TableNames) -> Exception:
    """Return the exception for the caller of `renew()` when a renewal failed."""
    if told := translate_error(error, place):
        return told
    # libpq's message has several lines.
    reason = " ".join(str(getattr(error, "orig", None) or error).split()).rstrip(".") or type(error).__name__
    answer = UnreachableError(
        f"no response to the renewal: {reason}. The lease is held until its deadline; remaining() returns the seconds left"
    )
    answer.__cause__ = error
    return answer


LINGER = 10.0
"""Seconds that a connection stays open, or a channel is listened to, after it was last needed."""


class ListenTask(HeartbeatTask):
    """Start or stop listening to a channel."""

    def __init__(self, place: TableNames, channel: str, *, on: bool) -> None:
        self.place = place
        self.channel = channel
        self.on = on

    def limit(self, now: float) -> float:
        return 10 * SHORTEST_PATIENCE

    def run(self, link: BackgroundConnection, sql: Texts, limit: float) -> None:
        if link.can_listen:
            link.listen(f"{'LISTEN' if self.on else 'UNLISTEN'} {quote(self.channel)}", self.channel, on=self.on)


class NotifyListeners:
    """The waiters of one heartbeat, and the channels that its connection listens to."""

    def __init__(self) -> None:
        self._waiters: dict[str, dict[str, list[Wake]]] = {}
        self._places: dict[str, TableNames] = {}
        self._on: dict[str, float] = {}
        """When the last user of each channel left; 0 while it has a user."""
        self.deaf = False
        """Whether the connection, which may go through a pooler, receives no notifications."""

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, place: TableNames, name: str, wake: Wake) -> bool:
        """Add a waiter, and return whether its channel must be listened to first."""
        channel = place.channel
        self._waiters.setdefault(channel, {}).setdefault(name, []).append(wake)
        self._places[channel] = place
        if channel in self._on:
            self._on[channel] = 0.0
            return False
        return True

    def remove(self, place: TableNames, name: str, wake: Wake, now: float) -> None:
        """Remove a waiter. Calling it again does nothing."""
        names = self._waiters.get(place.channel, {})
        wakes = names.get(name, [])
        if wake not in wakes:
            return
        wakes.remove(wake)
        if not wakes:
            del names[name]
        if not names:
            del self._waiters[place.channel]
            if place.channel in self._on:
                self._on[place.channel] = now

    def waiters_of(self, channel: str, name: str) -> list[Wake]:
        """Return the callbacks to call on a notification for a name.

        A permit `NAME#i` also wakes the waiters of the semaphore `NAME`, and a partition `NAME/i` those of `NAME/`.
        """
        names = self._waiters.get(channel, {})
        semaphore, separator, _ = name.rpartition("#")
        group, slash, _ = name.rpartition("/")
        return [
            *names.get(name, ()),
            *(names.get(semaphore, ()) if separator else ()),
            *(names.get(group + slash, ()) if slash else ()),
        ]

    def is_on(self, place: TableNames) -> bool:
        """Return whether the connection listens to releases of these tables."""
        return not self.deaf and place.channel in self._on

    def is_missing(self, held: Iterable[TableNames]) -> bool:
        """Return whether evictions of leases in these tables would be missed although the connection could listen for them."""
        return not self.deaf and any(place.evictions not in self._on for place in held)

    def choose_change(self, now: float, held: Iterable[TableNames] = ()) -> ListenTask | None:
        """Return the next LISTEN or UNLISTEN to send, or None. `held` are the tables of the leases that are held."""
        wanted = {place.evictions: place for place in held}
        wanted |= {channel: self._places[channel] for channel in self._waiters}
        for channel, place in wanted.items():
            if channel not in self._on:
                self._places[channel] = place
                return ListenTask(place, channel, on=True)
        for channel, since in self._on.items():
            if channel in wanted:
                self._on[channel] = 0.0
            elif not since:
                self._on[channel] = now
            elif now - since > LINGER:
                return ListenTask(self._places[channel], channel, on=False)
        return None

    def note_change(self, listening: ListenTask) -> list[Wake]:
        """Record the result of a LISTEN or UNLISTEN, and return the callbacks to call."""
        # A notification that was sent before LISTEN was not delivered, so every waiter of the channel must query the server
        # again.
        if not listening.on:
            self._on.pop(listening.channel, None)
            return []
        self._on[listening.channel] = 0.0
        return [wake for wakes in self._waiters.get(listening.channel, {}).values() for wake in wakes]

    def reset(self) -> None:
        """Record that no channel is listened to, because the connection is not open."""
        self._on.clear()
        self.deaf = False
