"""Renewal and release of what was granted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pgfence._connections.connection import RELEASE_BUDGET
from pgfence._holds.hold import emit_event, format_names
from pgfence._leases.heartbeat.service import heartbeat_of
from pgfence._leases.statements import LeaseStatements
from pgfence._process.callbacks import log
from pgfence._process.lifecycle import MUTEX
from pgfence._sql.lease import lease_sql
from pgfence._sql.sqlstate import sqlstate_of
from pgfence.errors import LockLostError, LockNotHeldError, PgfenceError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from pgfence._holds.carriers import Carrier
    from pgfence._leases.grant import Grant
    from pgfence._leases.heartbeat.service import HeartbeatService
    from pgfence._sql.params import ParamStyle
    from pgfence.config import Config
    from pgfence.errors import LossReason
    from pgfence.types import LeaseRef


class LeaseReleases(LeaseStatements):
    """What happens to a grant: the heartbeat renews it, its holder renews it, hands it over or gives it back."""

    def __init__(self, engine: Engine, config: Config, carrier: Carrier) -> None:
        super().__init__(engine, config, carrier)
        self._heartbeat: HeartbeatService | None = None

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


def _release_statement(grant: Grant, style: ParamStyle) -> tuple[str, tuple[object, ...]]:
    """Return the statement that gives a lease back, and its arguments."""
    sql = lease_sql(grant.place, style)
    args = grant.stored, str(grant.lease_id), grant.token
    if grant.slot is None:
        return sql.release, args
    return sql.finish, (*args, grant.slot, grant.done)
