"""Send the statements of leases, each on a short-lived checkout of a connection; renew, hand over and release grants."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pgfence._connections.connection import RELEASE_BUDGET, STATEMENT_BUDGET
from pgfence._connections.pool import LockPool
from pgfence._holds.hold import format_names
from pgfence._leases import terms
from pgfence._leases.answers import is_rejection, is_retryable, statement_error
from pgfence._leases.heartbeat.service import heartbeat_of
from pgfence._process import threads
from pgfence._process.callbacks import log
from pgfence._process.clock import clock
from pgfence._process.lifecycle import MUTEX, PROCESS
from pgfence._process.monitor import MONITOR
from pgfence._sql.errors import missing_tables_error
from pgfence._sql.lease import lease_sql
from pgfence._sql.params import style_of
from pgfence._sql.sqlstate import NO_RIGHT, sqlstate_of
from pgfence._sql.storage import LEASES, WHERE
from pgfence._sql.tables import build_check, judge
from pgfence.errors import LockLostError, LockNotHeldError, PgfenceError, SchemaError, UnreachableError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from sqlalchemy import Engine

    from pgfence._connections.connection import LockConnection
    from pgfence._holds.carriers import Carrier
    from pgfence._leases.acquisition import LeaseAcquisition
    from pgfence._leases.grant import Grant
    from pgfence._leases.heartbeat.service import HeartbeatService
    from pgfence._leases.terms import LeaseKind
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames
    from pgfence.config import Config
    from pgfence.errors import LossReason
    from pgfence.types import LeaseRef


class LeaseStatements:
    """The statements that one engine's threads, or the tasks of one event loop, send for leases.

    The heartbeat renews a grant in the background. Its holder can also renew it, hand it over or release it.
    """

    family: ClassVar[LeaseKind] = "lease"
    noun: ClassVar[str] = "the lease"
    needed: ClassVar[int] = LEASES
    """The version of the tables that these grants need."""
    warm: ClassVar[int] = 1
    """The number of idle connections that are kept open."""
    tells: ClassVar[bool] = True
    """Whether a release is announced with NOTIFY."""

    def __init__(self, engine: Engine, config: Config, carrier: Carrier) -> None:
        threads.require_native_threads()
        self.engine = engine
        self.config = config
        self.carrier = carrier
        self.style: ParamStyle = style_of(engine.dialect)
        self.pid = PROCESS.pid
        self.pool = LockPool(engine, config, carrier, _hold_nothing, any_pooler=True, warm=self.warm)
        self._checked: set[tuple[TableNames, int]] = set()
        """The tables that were checked and found usable, with the version that was needed."""
        self._heartbeat: HeartbeatService | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop whose tasks share this object, or None for threads."""
        return self.carrier.loop

    async def _checkout(self, call: LeaseAcquisition | None = None) -> LockConnection:
        left = RELEASE_BUDGET if call is None else max(call.left, RELEASE_BUDGET)
        session = await self.pool.checkout(left, cancel=call.cancel if call else None)
        if session is None:
            raise self.build_no_connection_error(call)
        return session

    def build_no_connection_error(self, call: LeaseAcquisition | None) -> Exception:
        """Return the error for a call that finds all connections in use."""
        if call is not None and call.waits:
            return call.build_no_connection_error()
        return UnreachableError("all connections for leases are in use. Try again, or increase max_lock_connections")

    async def _ask(
        self,
        place: TableNames,
        text: str,
        args: Sequence[object],
        *,
        limit: float = STATEMENT_BUDGET,
        needed: int | None = None,
    ) -> Any:
        """Check out a connection, run one statement and return its row."""
        session = await self._checkout()
        kept = False
        try:
            row = await session.fetch_row(self.engine, text, args, limit=limit)
            kept = True
        except Exception as error:
            kept = is_rejection(session, error)
            if told := statement_error(self, error, place, server_spoke=kept, needed=needed):
                raise told from error
            raise
        finally:
            (self.pool.checkin if kept else self.pool.discard)(session)
        return row

    async def fetch_row(self, place: TableNames, text: str, args: Sequence[object], *, needed: int) -> Any:
        """Run one statement that needs a version of the tables, and return its row.

        Raises:
            SchemaError: the tables are missing or older, or this role lacks a privilege.
            UnreachableError: the server did not respond; whether the statement took effect is unknown.
        """
        await self.verify(place, needed=needed)
        return await self._ask(place, text, args, needed=needed)

    async def execute_with_retry(
        self,
        place: TableNames,
        text: str,
        args: Sequence[object],
        seconds: float,
        again: Callable[[BaseException], bool] = is_retryable,
        *,
        needed: int | None = None,
    ) -> Any:
        """Run an idempotent statement, retrying for about `seconds` until the server responds, and return its row.

        `again` decides after each error whether to retry.

        Raises:
            UnreachableError: the server did not respond; it is unknown whether the statement was executed.
            Exception: the server raised an error.
        """
        until, failures = clock() + seconds, 0
        while True:
            try:
                return await self._ask(place, text, args, limit=RELEASE_BUDGET, needed=needed)
            except Exception as error:
                failures += 1
                if clock() > until or not again(error):
                    raise
            await self.carrier.sleep(terms.retry_after(failures, 10.0))

    async def verify(self, place: TableNames, limit: float = RELEASE_BUDGET, needed: int | None = None) -> None:
        """Check once that the tables exist and have the expected columns.

        Raises:
            SchemaError: a table or a column is missing or has another type, or this role lacks a privilege.
        """
        needed = needed or self.needed
        if (place, needed) in self._checked:
            return
        text = build_check(place, needed)
        if self.style != "numeric":
            text = text.replace("%", "%%")
        try:
            row = await self._ask(place, text, (), limit=limit, needed=needed)
        except SchemaError as error:
            if error.sqlstate == NO_RIGHT:
                raise
            where = await self._ask(place, WHERE, (), limit=limit)
            raise missing_tables_error(place, needed, error.sqlstate, where) from error.__cause__
        if refusal := judge(row, place, needed):
            raise refusal
        self._checked.add((place, needed))

    async def look(self, place: TableNames, stored: str) -> Any:
        """Return the row of the lease that has a stored name, or None if the lease is free."""
        await self.verify(place)
        return await self._ask(place, lease_sql(place, self.style).look, (stored,))

    # ------------------------------------------------------------ what was granted

    @property
    def heartbeat(self) -> HeartbeatService:
        """The heartbeat of the engine, created on first use. In a process where it cannot run, an error is raised."""
        if self._heartbeat is None:
            self._heartbeat = heartbeat_of(self.engine, self.config)
        return self._heartbeat

    async def renew(self, grant: Grant, ttl: float | None) -> None:
        """Renew the lease now, on the heartbeat's connection.

        Raises:
            LockLostError: the lease is lost.
            LockNotHeldError: the lease was released.
            UnreachableError: the server did not respond; the lease is held until its deadline.
        """
        grant.check()
        done = self.carrier.make_event()
        errors: list[Exception] = []

        def tell(error: Exception | None) -> None:
            if error is not None:
                errors.append(error)
            done.set()

        self.heartbeat.renew(grant, ttl, tell)
        await done.wait(math.inf)
        if errors:
            raise errors[0]

    async def hand_over(self, grant: Grant) -> LeaseRef:
        """Renew a lease once, stop renewing it, and return the reference with which another process can adopt it."""
        await self.renew(grant, None)
        try:
            self.let_lapse(grant)
            assert grant.token is not None
            return {"name": grant.stored, "lease_id": str(grant.lease_id), "token": grant.token}
        except LockNotHeldError:
            raise
        except BaseException as error:
            # The caller never got the reference, so no process can adopt the lease. Release it.
            interrupt = error
            self.carrier.run_cleanup(lambda: self._finish_interrupted_release(grant, interrupt))
            raise

    async def release(self, grant: Grant, *, leaving: bool = False, failing: bool = False) -> None:
        """Release the lease. If the server does not respond or the call is interrupted, the release is retried in the background.

        Raises:
            LockNotHeldError: the lease was released before, or this is a forked child.
            LockLostError: the lease was lost before.
        """
        try:
            self.detach(grant)
            await self._release(grant)
        except (LockNotHeldError, LockLostError):
            raise
        except BaseException as error:
            interrupt = error
            self.carrier.run_cleanup(lambda: self._finish_interrupted_release(grant, interrupt))
            raise

    async def _release(self, grant: Grant) -> None:
        try:
            if self._check_lost(grant):
                raise grant.lost_error()
            text, args = _release_statement(grant, self.style)
            try:
                answer = (await self._ask(grant.place, text, args, limit=RELEASE_BUDGET))[0]
            except Exception as error:
                if not isinstance(error, PgfenceError) and sqlstate_of(error) is None:
                    raise  # raised by a signal handler, not by the database: propagate unchanged
                self.note_unanswered(grant, error)
                return
            self._check_released(grant, answer)
        finally:
            grant.entry.leave()

    def detach(self, grant: Grant) -> None:
        """Claim the right to end a grant in this process, and stop its heartbeat.

        Raises:
            LockNotHeldError: the lease was ended before, or this is a forked child.
        """
        if not grant.ours:
            raise grant.not_held_error()
        # Releasing after the deadline is a loss, even if the heartbeat's thread has not run since.
        grant.expire()
        # The release is claimed under the mutex, so that only one of several concurrent releases ends the grant.
        with MUTEX:
            if not grant.begin_release():
                raise grant.not_held_error()
            if grant in grant.owner.holds:
                grant.owner.holds.remove(grant)
        self.heartbeat.drop(grant)

    def _finish_interrupted_release(self, grant: Grant, error: BaseException) -> None:
        """End a grant whose release was interrupted at any point. Calling it again does nothing."""
        with MUTEX:
            grant.begin_release()
            if grant in grant.owner.holds:
                grant.owner.holds.remove(grant)
        self.heartbeat.drop(grant)
        grant.entry.leave()
        self.note_unanswered(grant, error)

    def _check_lost(self, grant: Grant) -> bool:
        """Return whether a grant was lost before its release. If its row may still be ours, release it in the background."""
        if grant.loss_reason is None:
            return False
        grant.done = False  # `LockLostError` is raised, so the late release below must not mark the slot as done
        # One of several permits may have been evicted, and the others not.
        if grant.loss_reason in _MAY_BE_OURS or len(grant.rows) > 1:
            self.heartbeat.release_later(grant)
        return True

    def _check_released(self, grant: Grant, answer: LossReason | Literal["released"]) -> None:
        """Check the server's response to a release.

        Raises:
            LockLostError: the lease had already passed to another holder, or ended.
        """
        if answer == "released":
            grant.emit(self.config.events, "released")
            return
        grant.warn_of_clock(answer)
        grant.reason = answer
        fields = grant.build_log_fields("lost")
        log.warning("lease %s was lost before its release: %s", format_names(grant.names), answer, extra=fields)
        grant.emit(self.config.events, "lost", reason=answer)
        raise grant.lost_error()

    def note_unanswered(self, grant: Grant, error: BaseException) -> None:
        """Retry in the background a release that got no response. The lease ends no later than its TTL."""
        grant.repeated_release = self.heartbeat.release_later(grant)
        why, fields = str(error) or type(error).__name__, grant.build_log_fields("release_failed")
        names = format_names(grant.names)
        log.warning("no response to the release of %s %s, retrying: %s", grant.noun, names, why, extra=fields)
        if isinstance(error, Exception):  # not a cancellation
            grant.emit(self.config.events, "release_failed", reason=type(error).__name__)
        grant.emit(self.config.events, "released")

    def let_lapse(self, grant: Grant) -> None:
        """Stop renewing a lease without releasing it, so that it ends with its TTL. Nothing is sent."""
        self.detach(grant)
        grant.entry.leave()

    async def give_up(self, grant: Grant) -> None:
        """Release the lease of a leader, even after a loss if the row may still be its own.

        If the server does not respond, the release is repeated in the background.
        """
        try:
            self.let_lapse(grant)
        except LockNotHeldError:
            return
        if grant.loss_reason is not None and grant.loss_reason not in _MAY_BE_OURS:
            return
        text, args = _release_statement(grant, self.style)
        try:
            await self._ask(grant.place, text, args, limit=RELEASE_BUDGET)
        except Exception as error:
            self.note_unanswered(grant, error)
        else:
            grant.emit(self.config.events, "released")

    def give_back_later(self, grant: Grant) -> None:
        try:
            self.let_lapse(grant)
        except LockNotHeldError:
            return
        self.heartbeat.release_later(grant)

    def abandon(self, grant: Grant) -> None:
        """Release a lease whose handle was dropped. A finaliser calls this, so another thread does the work."""
        # The event loop may be closed, for example after asyncio.run(), and the heartbeat would renew the lease indefinitely.
        MONITOR.post(lambda: self.give_back_later(grant))


_MAY_BE_OURS = ("expired", "overdue", "cut off", "resigned")
"""After a loss for one of these reasons the row may still name this grant."""


def _hold_nothing(_: object) -> None:
    """Do nothing, because no lease depends on a connection. A dead connection is replaced at the next checkout."""


def _release_statement(grant: Grant, style: ParamStyle) -> tuple[str, tuple[object, ...]]:
    """Return the statement that releases a lease, and its arguments."""
    sql = lease_sql(grant.place, style)
    if grant.is_permit:
        names, tokens = [name for name, _ in grant.rows], [token for _, token in grant.rows]
        return sql.permits.release, (names, str(grant.lease_id), tokens)
    args = grant.stored, str(grant.lease_id), grant.token
    if grant.slot is None:
        return sql.release, args
    return sql.finish, (*args, grant.slot, grant.done)
