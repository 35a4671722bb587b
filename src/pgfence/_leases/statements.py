"""The statements of leases, each on a connection that is kept for nothing else; renewal, hand-over and release of what was granted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pgfence._connections.connection import RELEASE_BUDGET, STATEMENT_BUDGET
from pgfence._connections.pool import LockPool
from pgfence._holds.hold import emit_event, format_names
from pgfence._leases import terms
from pgfence._leases.answers import is_rejection, is_retryable, statement_error
from pgfence._leases.heartbeat.service import heartbeat_of
from pgfence._process import threads
from pgfence._process.callbacks import log
from pgfence._process.clock import clock
from pgfence._process.lifecycle import MUTEX, PROCESS
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
    """What is asked of one engine's server, for the threads of this process or for the tasks of one loop.

    The heartbeat renews a grant; its holder renews it, hands it over or gives it back.
    """

    family: ClassVar[LeaseKind] = "lease"
    noun: ClassVar[str] = "the lease"
    needed: ClassVar[int] = LEASES
    """The version of the tables that these grants need."""
    warm: ClassVar[int] = 1
    """How many idle connections are kept."""
    tells: ClassVar[bool] = True
    """Whether a release is told of (NOTIFY)."""

    def __init__(self, engine: Engine, config: Config, carrier: Carrier) -> None:
        threads.require_native_threads()
        self.engine = engine
        self.config = config
        self.carrier = carrier
        self.style: ParamStyle = style_of(engine.dialect)
        self.pid = PROCESS.pid
        self.pool = LockPool(engine, config, carrier, _hold_nothing, any_pooler=True, warm=self.warm)
        self._checked: set[TableNames] = set()
        """Where the tables were found to be as they should."""
        self._heartbeat: HeartbeatService | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop whose tasks share it."""
        return self.carrier.loop

    async def _checkout(self, call: LeaseAcquisition | None = None) -> LockConnection:
        left = RELEASE_BUDGET if call is None else max(call.left, RELEASE_BUDGET)
        session = await self.pool.checkout(left, cancel=call.cancel if call else None)
        if session is None:
            raise self.build_no_connection_error(call)
        return session

    def build_no_connection_error(self, call: LeaseAcquisition | None) -> Exception:
        """Return that all connections are in use."""
        if call is not None and call.waits:
            return call.build_no_connection_error()
        return UnreachableError("all connections for leases are in use (max_lock_connections)")

    async def _ask(
        self, place: TableNames, text: str, args: Sequence[object], *, limit: float = STATEMENT_BUDGET
    ) -> Any:
        """Run one statement on a session that holds nothing, and return its row."""
        session = await self._checkout()
        kept = False
        try:
            row = await session.fetch_row(self.engine, text, args, limit=limit)
            kept = True
        except Exception as error:
            kept = is_rejection(session, error)
            if told := statement_error(self, error, place, server_spoke=kept):
                raise told from error
            raise
        finally:
            (self.pool.checkin if kept else self.pool.discard)(session)
        return row

    async def execute_with_retry(
        self,
        place: TableNames,
        text: str,
        args: Sequence[object],
        seconds: float,
        again: Callable[[BaseException], bool] = is_retryable,
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
                return await self._ask(place, text, args, limit=RELEASE_BUDGET)
            except Exception as error:
                failures += 1
                if clock() > until or not again(error):
                    raise
            await self.carrier.sleep(terms.retry_after(failures, 10.0))

    async def verify(self, place: TableNames, limit: float = RELEASE_BUDGET) -> None:
        """Look once whether the tables are as they should be.

        Raises:
            SchemaError: they are not.
        """
        if place in self._checked:
            return
        text = build_check(place, self.needed)
        if self.style != "numeric":
            text = text.replace("%", "%%")
        try:
            row = await self._ask(place, text, (), limit=limit)
        except SchemaError as error:
            if error.sqlstate == NO_RIGHT:
                raise
            where = await self._ask(place, WHERE, (), limit=limit)
            raise missing_tables_error(place, self.needed, error.sqlstate, where) from error.__cause__
        if refusal := judge(row, place, self.needed):
            raise refusal
        self._checked.add(place)

    async def look(self, place: TableNames, stored: str) -> Any:
        """Return the row of `look`, or None when nobody has it."""
        await self.verify(place)
        return await self._ask(place, lease_sql(place, self.style).look, (stored,))

    # ------------------------------------------------------------ what was granted

    @property
    def heartbeat(self) -> HeartbeatService:
        """The heartbeat of the engine. Made with the first use, which refuses a process where none could run."""
        if self._heartbeat is None:
            self._heartbeat = heartbeat_of(self.engine, self.config)
        return self._heartbeat

    async def renew(self, grant: Grant, ttl: float | None) -> None:
        """Renew now, in turn with the heartbeat.

        Raises:
            LockLostError: it is lost.
            LockNotHeldError: it was released.
            UnreachableError: there was no answer; it stands until its deadline.
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
        """Renew once, stop renewing, and return what another process needs to adopt it."""
        await self.renew(grant, None)
        try:
            self.let_lapse(grant)
            assert grant.token is not None
            return {"name": grant.stored, "lease_id": str(grant.lease_id), "token": grant.token}
        except LockNotHeldError:
            raise
        except BaseException as error:  # nobody has the reference
            interrupt = error
            self.carrier.run_cleanup(lambda: self._finish_interrupted_release(grant, interrupt))
            raise

    async def release(self, grant: Grant, *, leaving: bool = False, failing: bool = False) -> None:
        """Give the lease back; if the server does not answer, or the call is interrupted, it is repeated in the background.

        Args:
            grant: what is given back.
            leaving: a block ends.
            failing: it ends by an exception.

        Raises:
            LockNotHeldError: it was released before, or this is a forked child.
            LockLostError: it was lost before.
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
                    raise  # a signal handler's
                self.note_unanswered(grant, error)
                return
            self._check_released(grant, answer)
        finally:
            grant.entry.leave()

    def detach(self, grant: Grant) -> None:
        """Take the right to end a grant in this process, and stop its heartbeat.

        Raises:
            LockNotHeldError: it was ended before, or this is a forked child.
        """
        if not grant.ours:
            raise grant.not_held_error()
        grant.expire()  # a release after the deadline is a loss, also if no thread has noticed yet
        with MUTEX:
            if not grant.begin_release():
                raise grant.not_held_error()
            if grant in grant.owner.holds:
                grant.owner.holds.remove(grant)
        self.heartbeat.drop(grant)

    def _finish_interrupted_release(self, grant: Grant, error: BaseException) -> None:
        """End a grant whose release was interrupted, wherever that was; a second time does nothing more."""
        with MUTEX:
            grant.begin_release()
            if grant in grant.owner.holds:
                grant.owner.holds.remove(grant)
        self.heartbeat.drop(grant)
        grant.entry.leave()
        self.note_unanswered(grant, error)

    def _check_lost(self, grant: Grant) -> bool:
        """Say whether a grant was lost before its release; then the row is given back in the background, if it is ours still."""
        if grant.loss_reason is None:
            return False
        grant.done = False  # its holder is told that it was lost, so the slot must not pass for done
        if grant.loss_reason in ("expired", "overdue", "cut off"):
            self.heartbeat.release_later(grant)
        return True

    def _check_released(self, grant: Grant, answer: LossReason | Literal["released"]) -> None:
        """Judge the server's answer to a release.

        Raises:
            LockLostError: it was not ours any more.
        """
        if answer == "released":
            self._emit("released", grant)
            return
        grant.warn_of_clock(answer)
        grant.reason = answer
        log.warning("the lease %s was lost before its release: %s", format_names(grant.names), answer)
        self._emit("lost", grant)
        raise grant.lost_error()

    def note_unanswered(self, grant: Grant, error: BaseException) -> None:
        """A release had no answer: it is repeated in the background, and at the latest the TTL ends it."""
        self.heartbeat.release_later(grant)
        why = str(error) or type(error).__name__
        log.warning("the end of the %s %s had no answer, trying again: %s", grant.noun, format_names(grant.names), why)
        self._emit("released", grant)

    def let_lapse(self, grant: Grant) -> None:
        """Stop renewing and give nothing back. No I/O."""
        self.detach(grant)
        grant.entry.leave()

    def give_back_later(self, grant: Grant) -> None:
        """Free a lease whose handle was dropped."""
        try:
            self.let_lapse(grant)
        except LockNotHeldError:
            return
        self.heartbeat.release_later(grant)

    def abandon(self, grant: Grant) -> None:
        """Free a lease whose handle was dropped; called by a finaliser, so the work is done elsewhere."""
        self.carrier.run_later(lambda: self.give_back_later(grant))

    def _emit(self, kind: Literal["acquired", "released", "lost"], grant: Grant) -> None:
        emit_event(self.config, kind, grant.names, grant.token, owner=grant.label, lease_id=grant.lease_id)


def _hold_nothing(_: object) -> None:
    """Sessions of leases hold nothing: one that dies is found dead when it is next wanted."""


def _release_statement(grant: Grant, style: ParamStyle) -> tuple[str, tuple[object, ...]]:
    """Return the statement that gives a lease back, and its arguments."""
    sql = lease_sql(grant.place, style)
    args = grant.stored, str(grant.lease_id), grant.token
    if grant.slot is None:
        return sql.release, args
    return sql.finish, (*args, grant.slot, grant.done)
