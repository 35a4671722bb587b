"""Acquire leases, slots and attempts, for the threads of this process or for the tasks of one event loop.

enqueue ── first in line ── attempt ─────────── granted: the heartbeat keeps it ── release
                               └─ busy: sleep until it may be free, or a release is announced ─┘
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pgfence._connections.connection import RELEASE_BUDGET
from pgfence._holds.carriers import Cancelled, build_cancelled_error, expect_uncancelled
from pgfence._holds.queue import LocalQueue, QueueEntry
from pgfence._holds.registry import ManagerRegistry
from pgfence._leases.acquisition import HoldersSeen, LeaseAcquisition
from pgfence._leases.answers import (
    build_adoption_error,
    is_conflict,
    is_rejection,
    is_retryable,
    is_row_locked,
    translate_failure,
)
from pgfence._leases.grant import Grant
from pgfence._leases.heartbeat.tasks import leave_queue, revoke_permits
from pgfence._leases.request import Busy, Granted, Refused, build_adoption, read_adoption
from pgfence._leases.statements import LeaseStatements
from pgfence._locks.acquisition import timeout_of
from pgfence._process.clock import between, clock
from pgfence._process.lifecycle import MUTEX
from pgfence._sql.encoding import TextError
from pgfence.config import config_of
from pgfence.errors import (
    LockLostError,
    StandbyError,
    UnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from sqlalchemy import Engine

    from pgfence._connections.connection import LockConnection
    from pgfence._holds.carriers import Carrier, WakeEvent
    from pgfence._leases.request import AcquireRequest, Outcome
    from pgfence._process.clock import Seconds
    from pgfence.config import Config
    from pgfence.types import LeaseRef

RETRIES = 10
LONGEST_SLEEP = 1.0

HandleT = TypeVar("HandleT")
ManagerT = TypeVar("ManagerT", bound="LeaseManager")


class LeaseManager(LeaseStatements):
    """Acquires leases through one engine, for the threads of this process or the tasks of one event loop."""

    def __init__(self, engine: Engine, config: Config, carrier: Carrier) -> None:
        super().__init__(engine, config, carrier)
        self.queue = LocalQueue(engine.dialect)
        self._seen = HoldersSeen()

    def begin_call(self, claim: AcquireRequest, timeout: Seconds | None, *, lasts: bool = False) -> LeaseAcquisition:
        """Return the state of a new acquire call, which has not entered a queue yet."""
        owner = self.carrier.get_contender()
        limit = timeout_of(self.config, timeout, owner)
        cancel = self.carrier.cancel_event() if limit else None
        return LeaseAcquisition(self.queue, self.config, self._seen, claim, owner, limit, lasts=lasts, cancel=cancel)

    # ------------------------------------------------------------ acquire

    async def acquire(
        self,
        claim: AcquireRequest,
        timeout: Seconds | None,
        make: Callable[[Self, Grant], HandleT],
        *,
        lasts: bool = False,
    ) -> HandleT | None:
        """Acquire a lease and return its handle, or None if another holder has it and `timeout` is 0.

        `make` creates the handle, whose finaliser is responsible for the lease from then on. With `lasts`, the call waits for an
        unreachable server from the first statement on.

        Raises:
            LockTimeoutError: the lease was not granted within the timeout.
            SelfDeadlockError: waiting would deadlock inside this process.
            UnreachableError: the server did not respond.
        """
        call = self.begin_call(claim, timeout, lasts=lasts)
        try:
            expect_uncancelled(call.cancel)
            with MUTEX:
                front = call.enqueue()
            if front is False and not await call.wait_for_turn(self.carrier):
                raise call.build_late_error(call.find_local_holders())
            if front is not None and (grant := await self._contend(call)) is not None:
                return make(self, grant)
            call.entry.leave()
        except BaseException as error:
            self.carrier.run_cleanup(lambda: self._abort_acquire(call.entry))
            if claim.waiter is not None:
                self.heartbeat.end_later(leave_queue(claim.place, claim.stored, claim.waiter, RELEASE_BUDGET))
            if isinstance(error, Cancelled):
                raise build_cancelled_error(claim.names) from None
            raise
        call.refuse()
        return None

    async def _contend(self, call: LeaseAcquisition) -> Grant | None:
        """Try until the lease is granted. Return None if it is held and the call does not wait."""
        # The heartbeat is needed before any grant, because creating it raises an error in a process that cannot run it.
        heartbeat = self.heartbeat
        claim, polls = call.wanted, 0
        event: WakeEvent | None = None

        def wake() -> None:
            if event is not None:
                event.set()

        stop_listening: Callable[[], None] | None = None
        try:
            while True:
                try:
                    grant, busy = await self._try_acquire(call)
                except (UnreachableError, StandbyError) as error:
                    pause = call.plan_retry(error)
                else:
                    if grant is not None:
                        return grant
                    call.note_busy(busy)
                    left = call.left
                    if left <= 0:
                        self.check_patience(call, busy)
                        return None
                    pause = self.poll_delay(busy.remaining, left, polls=polls)
                    polls += 1
                    if stop_listening is None and self.tells:
                        event = self.carrier.make_event()
                        stop_listening = heartbeat.listen(claim.place, claim.stored, wake)
                        if heartbeat.is_listening(claim.place):
                            # The connection already listened, so a release since the attempt did not wake this waiter: try again.
                            continue
                await (event or self.carrier.make_event()).wait(pause, call.cancel)
                # The event is reset before the attempt, so that a release during the attempt ends the next sleep.
                if event is not None:
                    event = self.carrier.make_event()
        finally:
            if stop_listening is not None:
                stop_listening()

    async def _try_acquire(self, call: LeaseAcquisition) -> tuple[Grant | None, Busy]:
        """Try once, and again immediately after a serialization failure."""
        claim = call.wanted
        await self.verify(claim.place, call.budget, claim.needed)
        for _ in range(RETRIES):
            lease_id = uuid.uuid4()
            # The connection is used for this round trip only. A waiter for a lease occupies no connection while it sleeps.
            session = await self._checkout(call)
            call.entry.session = session
            started = clock()
            told: Outcome | None = None
            grant: Grant | None = None
            refused = False
            try:
                told = await self._drive(session, call, str(lease_id))
                if isinstance(told, Granted):
                    grant = self._grant(claim, call.entry, lease_id, started, told)
                    if grant is not None:
                        self._report_grant(grant, told, call)
            except (Refused, TextError):
                refused = True
                raise
            except BaseException as error:
                refused = is_rejection(session, error)
                if refused and is_row_locked(error):
                    return None, Busy(0.0)
                if refused and is_conflict(error):
                    continue
                # A missing response is neither a grant nor a rejection. If the lease was granted, the id chosen here ends it.
                if not refused and grant is None and not isinstance(error, LockLostError):
                    self._forget(claim, lease_id)
                if isinstance(error, Exception):
                    raise translate_failure(self, error, claim, server_spoke=refused) from error
                raise
            finally:
                call.entry.session = None
                (self.pool.checkin if told is not None or refused else self.pool.discard)(session)
            return grant, told if isinstance(told, Busy) else Busy(0.0)
        return None, Busy(0.0)

    async def _drive(self, session: LockConnection, call: LeaseAcquisition, lease_id: str) -> Outcome:
        steps = call.wanted.run_steps(self.style, lease_id)
        row: Any = None
        while True:
            try:
                text, args = steps.send(row)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            row = await session.fetch_row(self.engine, text, args, limit=call.budget)

    def check_patience(self, call: LeaseAcquisition, busy: Busy) -> None:
        """Raise the error for a lease that was not granted in time. Return if the caller did not want to wait.

        Raises:
            LockTimeoutError: another holder has the lease.
        """
        if call.waits:
            raise call.build_timeout_error([busy.holder] if busy.holder else [])

    def poll_delay(self, remaining: float, left: float, *, polls: int) -> float:
        """Return how long a waiter sleeps: until the lease may be free, but at most a second and at most the time left."""
        # One random first sleep is enough to spread the waiters out; after that, each polls once a second.
        longest = LONGEST_SLEEP if polls else LONGEST_SLEEP * between(0.5, 1.0)
        return min(left, longest, max(0.0, remaining) + between(0.005, 0.05))

    def _grant(
        self, claim: AcquireRequest, entry: QueueEntry, lease_id: UUID, started: float, told: Granted
    ) -> Grant | None:
        """Record a grant and start its heartbeat. Return None if the response arrived after the deadline of the grant."""
        grant = Grant(claim, told, entry, lease_id=lease_id, started=started, config=self.config, family=self.family)
        if grant.state == "lost":
            self._forget(claim, lease_id)
            return None
        self._seen.forget(claim)
        # The hold is recorded and the wait ended under one mutex, so that the deadlock check never finds a contender that waits
        # for a name that it holds.
        with MUTEX:
            entry.owner.waits = entry.away = None
            entry.owner.holds.append(grant)
            entry.hold = grant
        grant.subscribe(entry.leave)
        self.heartbeat.keep(grant)
        if claim.weight is not None:  # the next contender of this process may get another permit
            entry.leave()
        return grant

    def _report_grant(self, grant: Grant, told: Granted, call: LeaseAcquisition | None = None) -> None:
        """Emit the events of a grant; `call` is None for a lease that was adopted."""
        if (events := self.config.events).active:
            waited = None if call is None else clock() - call.began
            grant.emit(events, "acquired", waited=waited, contended=call is not None and call.contended)
            if told.reclaimed:
                grant.emit(events, "reclaimed")

    def _forget(self, claim: AcquireRequest, lease_id: UUID) -> None:
        """End a grant whose response was lost or came too late, in the background."""
        if claim.weight is None:
            self.heartbeat.forget_later(claim.place, claim.stored, lease_id, claim.terms.ttl, self.family)
        else:
            self.heartbeat.end_later(revoke_permits(claim.place, claim.stored, lease_id, claim.terms.ttl))

    def _abort_acquire(self, entry: QueueEntry) -> None:
        """Clean up after an acquire that ends with an exception, wherever it was raised."""
        if isinstance(entry.hold, Grant):
            self.give_back_later(entry.hold)
        entry.discard_partial()

    async def adopt(
        self, claim: AcquireRequest, reference: LeaseRef, make: Callable[[Self, Grant], HandleT]
    ) -> HandleT:
        """Adopt a lease that was handed over, by its reference.

        Raises:
            LockLostError: the reference is no longer valid.
            UnreachableError: the server did not respond.
        """
        heartbeat = self.heartbeat
        await self.verify(claim.place)
        new, token = uuid.uuid4(), reference["token"]
        entry = QueueEntry(claim.places, self.carrier.get_contender(), LocalQueue(), no_handoff=True)
        text, args = build_adoption(self.style, claim, reference, str(new))
        until = clock() + RELEASE_BUDGET
        while True:
            started = clock()
            try:
                row = await self._ask(claim.place, text, args, limit=RELEASE_BUDGET)
                break
            except BaseException as error:
                if isinstance(error, TextError):
                    raise
                if clock() > until or not is_retryable(error):
                    # The adoption may have been committed, and no handle exists for it, so end it by its new id.
                    heartbeat.forget_later(claim.place, claim.stored, new, RELEASE_BUDGET)
                    raise
            await self.carrier.sleep(0.1)
        try:
            told = read_adoption(claim, token, row)
            if isinstance(told, str):
                raise build_adoption_error(claim, token, told)
            grant = self._grant(told[0], entry, new, started, told[1])
            if grant is None:
                raise build_adoption_error(claim, token, "expired")
            self._report_grant(grant, told[1])
            return make(self, grant)
        except LockLostError:
            raise
        except BaseException:
            self.carrier.run_cleanup(lambda: self._abort_acquire(entry))
            raise


def get_manager(engine: Engine, kind: type[ManagerT]) -> ManagerT:
    """Return an engine's lease manager of a kind in this process. For an async engine, it belongs to the running event loop."""
    return ManagerRegistry.for_carrier(engine, kind, lambda carrier: kind(engine, config_of(engine, pin=True), carrier))
