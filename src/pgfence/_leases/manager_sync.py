"""The sync shell of leases: each thread runs its own statements and parks on a gate."""

from __future__ import annotations

import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

from pgfence._connections.connection import RELEASE_BUDGET, STATEMENT_BUDGET
from pgfence._connections.connection_sync import SyncLockConnection
from pgfence._connections.pool_sync import SyncLockPool, ThreadEvent
from pgfence._holds.cancellation import Cancelled, cancel_here, cancelled, expect_uncancelled, wait
from pgfence._holds.queue import LocalQueue, QueueEntry
from pgfence._leases import terms
from pgfence._leases.manager import (
    RETRIES,
    LeaseManager,
    again,
    ask_again,
    row_locked,
    spoke,
)
from pgfence._leases.request import Busy, Granted, Refused, adoption
from pgfence._locks.manager_sync import contender, run_cleanup
from pgfence._process.clock import clock
from pgfence._process.lifecycle import MUTEX
from pgfence._process.monitor import MONITOR
from pgfence._process.registry import ManagerRegistry
from pgfence._sql.encoding import TextError
from pgfence._sql.errors import missing_tables_error
from pgfence._sql.lease import lease_sql
from pgfence._sql.sqlstate import NO_RIGHT, sqlstate_of
from pgfence._sql.storage import WHERE
from pgfence._sql.tables import judged
from pgfence.errors import (
    LockLostError,
    LockNotHeldError,
    PgfenceError,
    SchemaError,
    StandbyError,
    UnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Engine

    from pgfence._leases.grant import Grant
    from pgfence._leases.request import AcquireRequest, Outcome
    from pgfence._locks.manager import LockRequest
    from pgfence._sql.storage import TableNames
    from pgfence.config import Config

HandleT = TypeVar("HandleT")
LeasesT = TypeVar("LeasesT", bound="SyncLeaseManager")


class SyncLeaseManager(LeaseManager[SyncLockConnection]):
    """The leases that the threads of this process take through one engine."""

    def __init__(self, engine: Engine, config: Config) -> None:
        super().__init__(engine, config)
        self.keeper = SyncLockPool(engine, config, _no_hold, any_pooler=True, warm=self.warm)

    def acquire(
        self, claim: AcquireRequest, timeout: float, make: Callable[[Any, Grant], HandleT], *, patient: bool = False
    ) -> HandleT | None:
        """Return a handle, or None when somebody else has it and `timeout` is 0.

        Args:
            claim: what is asked for.
            timeout: in seconds.
            make: makes the handle. From then on its finaliser answers for the lease, until then we do.
            patient: whether the first question waits for a server that is away, too.

        Raises:
            LockTimeoutError: it was not free within the timeout.
            SelfDeadlockError: it would never be, inside this process.
            UnreachableError: there was no answer.
        """
        request = self.asked(claim, contender(), timeout, patient=patient)
        request.cancel = cancel_here() if request.waits else None
        entry = QueueEntry(claim.places, request.owner, self.lines, alone=True)
        try:
            expect_uncancelled(request.cancel)
            with MUTEX:
                if (front := self.enqueue(request, entry)) is None:
                    return None
            if not front:
                self._in_line(request, entry)
            grant = self._contend(request, entry, claim)
            if grant is not None:
                return make(self, grant)
            self.dequeue(entry)
        except BaseException as error:
            run_cleanup(lambda: self.abort_acquire(entry))
            if isinstance(error, Cancelled):
                raise cancelled(claim.names) from None
            raise
        return None

    def _in_line(self, request: LockRequest, entry: QueueEntry) -> None:
        """Wait to be the first in line of this process."""
        gate = ThreadEvent()
        with MUTEX:
            entry.wake = gate.open
            if self.lines.first(entry):
                gate.open()
            self.saw_line(request, entry)
        wait(gate.wait, request.left, request.cancel)
        with MUTEX:
            request.owner.waits = None
            first = self.lines.first(entry)
        if not first:
            raise self.late(request, entry, self.holders_here(request))

    def _contend(self, request: LockRequest, entry: QueueEntry, claim: AcquireRequest) -> Grant | None:
        """Ask until it is granted. None: not free, and no time to wait."""
        beat = self.beat  # before anything is granted: it refuses where no heartbeat could beat
        bell, polls = threading.Event(), 0
        began = clock()
        cease: Callable[[], None] | None = None
        try:
            while True:
                try:
                    grant, busy = self._attempt(request, entry, claim)
                except (UnreachableError, StandbyError) as error:
                    wait(bell.wait, self.outlast(request, entry, error), request.cancel)
                    bell.clear()
                    continue
                if grant is not None:
                    return grant
                self.found(request, entry, claim, busy)
                self.news(request, began, busy)
                left = request.left
                if left <= 0:
                    self.too_late(request, busy)
                    return None
                if cease is None and self.tells:
                    cease = beat.listen(claim.place, claim.stored, bell.set)
                wait(bell.wait, self.poll_delay(busy.remaining, left, polls=polls), request.cancel)
                bell.clear()
                polls += 1
        finally:
            if cease is not None:
                cease()

    def _attempt(self, request: LockRequest, entry: QueueEntry, claim: AcquireRequest) -> tuple[Grant | None, Busy]:
        """Ask once, and once more at once where transactions met."""
        self.verify(claim.place, request.budget)
        for _ in range(RETRIES):
            lease_id = uuid.uuid4()
            session = self._session(request)
            entry.session = session
            started = clock()
            told: Outcome | None = None
            grant: Grant | None = None
            refused = False
            try:
                told = self._drive(session, request, claim, str(lease_id))
                if isinstance(told, Granted):
                    grant = self.granted(claim, entry, lease_id, started, told)
            except (Refused, TextError):
                refused = True
                raise
            except BaseException as error:
                refused = spoke(session, error)
                if refused and (again(error) or row_locked(error)):
                    if row_locked(error):
                        return None, Busy(0.0)
                    continue
                if not refused and grant is None and not isinstance(error, LockLostError):
                    self.forget(claim, lease_id)
                if isinstance(error, Exception):
                    raise self.translate_failure(error, claim, server_spoke=refused) from error
                raise
            finally:
                entry.session = None
                (self.keeper.checkin if told is not None or refused else self.keeper.discard)(session)
            return grant, told if isinstance(told, Busy) else Busy(0.0)
        return None, Busy(0.0)

    def _drive(
        self, session: SyncLockConnection, request: LockRequest, claim: AcquireRequest, lease_id: str
    ) -> Outcome:
        steps = claim.attempt(self.style, lease_id)
        row: Any = None
        while True:
            try:
                text, args = steps.send(row)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            row = session.row(self.engine, text, args, limit=request.budget)

    def _session(self, request: LockRequest | None = None) -> SyncLockConnection:
        left = RELEASE_BUDGET if request is None else max(request.left, RELEASE_BUDGET)
        session = self.keeper.checkout(left, cancel=request.cancel if request else None)
        if session is None:
            raise self.no_session(request)
        return session

    def _ask(self, place: TableNames, text: str, args: Sequence[Any], *, limit: float = STATEMENT_BUDGET) -> Any:
        """Run one statement on a session that holds nothing, and return its row."""
        session = self._session()
        kept = False
        try:
            row = session.row(self.engine, text, args, limit=limit)
            kept = True
        except Exception as error:
            kept = spoke(session, error)
            if told := self.refusal(error, place, server_spoke=kept):
                raise told from error
            raise
        finally:
            (self.keeper.checkin if kept else self.keeper.discard)(session)
        return row

    def execute_with_retry(
        self,
        place: TableNames,
        text: str,
        args: Sequence[Any],
        seconds: float,
        again: Callable[[BaseException], bool] = ask_again,
    ) -> Any:
        """Run a statement that may be repeated until the server answers, for about so many seconds, and return its row.

        Args:
            place: of the tables.
            text: the statement.
            args: its parameters.
            seconds: after which no other try is made.
            again: says after which errors one is made.

        Raises:
            UnreachableError: it has not answered: nobody knows whether it was done.
            Exception: what the server said.
        """
        until, failures = clock() + seconds, 0
        while True:
            try:
                return self._ask(place, text, args, limit=RELEASE_BUDGET)
            except Exception as error:
                failures += 1
                if clock() > until or not again(error):
                    raise
            time.sleep(terms.retry_after(failures, 10.0))

    def verify(self, place: TableNames, limit: float = RELEASE_BUDGET) -> None:
        """Look once whether the tables are as they should be.

        Raises:
            SchemaError: they are not.
        """
        if place in self._checked:
            return
        try:
            row = self._ask(place, self.checking(place), (), limit=limit)
        except SchemaError as error:
            if error.sqlstate == NO_RIGHT:
                raise
            where = self._ask(place, WHERE, (), limit=limit)
            raise missing_tables_error(place, self.needed, error.sqlstate, where) from error.__cause__
        if refusal := judged(row, place, self.needed):
            raise refusal
        self._checked.add(place)

    # ------------------------------------------------------------ afterwards

    def release(self, grant: Grant, *, leaving: bool = False, failing: bool = False) -> None:
        """Give the lease back; if the server does not answer, it is repeated in the background.

        Args:
            grant: what is given back.
            leaving: a block ends.
            failing: it ends by an exception.

        Raises:
            LockNotHeldError: it was released before, or this is a forked child.
            LockLostError: it was lost before.
        """
        try:
            self.take_leave(grant)
            self._release(grant)
        except (LockNotHeldError, LockLostError):
            raise
        except BaseException:
            run_cleanup(lambda: self.finish_interrupted_release(grant))
            raise

    def _release(self, grant: Grant) -> None:
        try:
            if self.over(grant):
                raise grant.lost_error()
            text, args = self.ending(grant)
            try:
                answer = self._ask(grant.place, text, args, limit=RELEASE_BUDGET)[0]
            except Exception as error:
                if not isinstance(error, PgfenceError) and sqlstate_of(error) is None:
                    raise  # a signal handler's
                self.unanswered(grant, error)
                return
            self.answered(grant, answer)
        finally:
            self.dequeue(grant.entry)

    def renew(self, grant: Grant, ttl: float | None) -> None:
        """Renew now, in turn with the heartbeat.

        Raises:
            LockLostError: it is lost.
            LockNotHeldError: it was released.
            UnreachableError: there was no answer; it stands until its deadline.
        """
        grant.check()
        done = threading.Event()
        errors: list[Exception] = []

        def tell(error: Exception | None) -> None:
            if error is not None:
                errors.append(error)
            done.set()

        self.beat.renew(grant, ttl, tell)
        done.wait()
        if errors:
            raise errors[0]

    def hand_over(self, grant: Grant) -> dict[str, Any]:
        """Renew once, and let another process adopt it."""
        self.renew(grant, None)
        try:
            return self.reference(grant)
        except LockNotHeldError:
            raise
        except BaseException:  # nobody has the reference
            run_cleanup(lambda: self.finish_interrupted_release(grant))
            raise

    def adopt(
        self, claim: AcquireRequest, reference: dict[str, Any], make: Callable[[SyncLeaseManager, Grant], HandleT]
    ) -> HandleT:
        """Take over a lease by its reference.

        Raises:
            LockLostError: it cannot be had by this reference any more.
            UnreachableError: there was no answer.
        """
        beat = self.beat
        self.verify(claim.place)
        new, token = uuid.uuid4(), reference["token"]
        entry = QueueEntry(claim.places, contender(), LocalQueue(), alone=True)
        text, args = adoption(self.style, claim, reference, str(new))
        until = clock() + RELEASE_BUDGET
        while True:
            started = clock()
            try:
                row = self._ask(claim.place, text, args, limit=RELEASE_BUDGET)
                break
            except BaseException as error:
                if isinstance(error, TextError):
                    raise
                if clock() > until or not ask_again(error):
                    beat.forget_later(claim.place, claim.stored, new, RELEASE_BUDGET)
                    raise
            time.sleep(0.1)
        try:
            return make(self, self.adopted(claim, entry, new, started, token, row))
        except LockLostError:
            raise
        except BaseException:
            run_cleanup(lambda: self.abort_acquire(entry))
            raise

    def abandon(self, hold: Any) -> None:
        """Free a lease whose handle was dropped; called by a finaliser, so the work is done on the jobs thread."""
        MONITOR.post(lambda: self.give_back_later(hold))

    # ------------------------------------------------------------ looking

    def look(self, place: TableNames, stored: str) -> Any:
        """Return the row of whoever holds it, or None."""
        self.verify(place)
        return self._ask(place, lease_sql(place, self.style).look, (stored,))


def _no_hold(_: Any) -> None:
    """Sessions of leases hold nothing."""


def leases_of(engine: Engine, config: Config, kind: type[LeasesT]) -> LeasesT:
    """Return the lease manager of a kind that an engine has in this process."""
    return ManagerRegistry.for_process(engine, kind, kind, lambda: kind(engine, config))
