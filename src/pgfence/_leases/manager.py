"""What the leases of one process share for one engine (async: one engine and loop), sync and async. No I/O.

    line up ── first in line ── attempt ─────────────────── granted: the heartbeat keeps it ── release
                                  └─ busy: sleep until it may be free, or somebody tells ─┘

No session is held: each attempt takes a warm one for a round trip. Whoever waits costs a query a second at most (more often only for
a lease that would expire sooner), and is woken by a release where notifications come through. An answer that does not arrive is neither a grant nor a refusal: the error says
so, and the grant, which has an id of this client's making, is ended in the background.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

from pgfence._connections.pool import S
from pgfence._holds.events import emit_event, format_names
from pgfence._holds.wait_plan import WARN_AFTER
from pgfence._leases.grant import Grant
from pgfence._leases.heartbeat.service import heartbeat_of
from pgfence._leases.request import adopted
from pgfence._locks.manager import NO_CONNECTION, LockManager
from pgfence._process.callbacks import log
from pgfence._process.clock import between, clock
from pgfence._process.lifecycle import MUTEX
from pgfence._sql.addresses import describe_server
from pgfence._sql.encoding import TextError
from pgfence._sql.errors import (
    ErrorContext,
    is_connection_lost,
    is_driver_error,
    translate_connect_error,
    translate_error,
)
from pgfence._sql.lease import lease_sql
from pgfence._sql.sqlstate import LOCK_NOT_AVAILABLE, SERIALIZATION_FAILURE, sqlstate_of
from pgfence._sql.storage import LEASES
from pgfence._sql.tables import checking
from pgfence.errors import LockLostError, LockNotHeldError, PgfenceError, UnreachableError
from pgfence.types import Holder

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Engine

    from pgfence._holds.queue import Contender, QueueEntry
    from pgfence._leases.heartbeat.service import HeartbeatService
    from pgfence._leases.request import AcquireRequest, Busy, Granted
    from pgfence._leases.terms import LeaseKind
    from pgfence._locks.manager import LockRequest
    from pgfence._locks.outages import Away
    from pgfence._sql.storage import TableNames
    from pgfence.config import Config

RETRIES = 10
MANY_NAMES = 1000
LONGEST_SLEEP = 1.0


class LeaseManager(LockManager[S]):
    """The leases of one engine in this process."""

    once_only = "a lease is not re-entrant. Pass the handle on"
    family: ClassVar[LeaseKind] = "lease"
    noun: ClassVar[str] = "the lease"
    needed: ClassVar[int] = LEASES
    """The version of the tables that these grants need."""
    warm: ClassVar[int] = 1
    """How many idle connections are kept."""
    tells: ClassVar[bool] = True
    """Whether a release is told of (NOTIFY)."""

    def __init__(self, engine: Engine, config: Config) -> None:
        super().__init__(engine, config)
        self._checked: set[TableNames] = set()
        """Where the tables were found to be as they should."""
        self._beat: HeartbeatService | None = None
        self._held_until: dict[str, float] = {}
        """Until when the holder of a name that the server named last may hold it without a renewal, on our own clock."""

    def checking(self, place: TableNames) -> str:
        """Return the statement that asks for the tables, as the driver takes it."""
        text = checking(place, self.needed)
        return text if self.style == "numeric" else text.replace("%", "%%")

    @property
    def beat(self) -> HeartbeatService:
        """The heartbeat of the engine. Made with the first use, which refuses a process where none could beat."""
        if self._beat is None:
            self._beat = heartbeat_of(self.engine, self.config)
        return self._beat

    def close_dead(self) -> None:
        """Sessions of leases hold nothing: one that dies is found dead when it is next wanted."""

    def asked(self, claim: AcquireRequest, owner: Contender, timeout: float, *, patient: bool = False) -> LockRequest:
        return self.request(claim.names, claim, owner, timeout, patient=patient)  # type: ignore[arg-type]

    def found(self, request: LockRequest, entry: QueueEntry, claim: AcquireRequest, busy: Busy) -> None:
        """Note who holds it, and how long that may last without a server."""
        entry.seen = busy.holder
        self.saw_held(request, entry, [busy.holder] if busy.holder else ())
        if busy.holder is None:
            return
        now = clock()
        if len(self._held_until) > MANY_NAMES:
            self._held_until = {name: until for name, until in self._held_until.items() if until > now}
        # It may have been renewed since then, unseen, for a whole TTL; which is ours wherever one name has one TTL.
        self._held_until[claim.stored] = now + max(busy.remaining, claim.terms.ttl)

    def ended(self, request: LockRequest, error: Away) -> Away:
        ended = super().ended(request, error)
        if isinstance(ended, UnreachableError):
            claim: Any = request.sql
            ended._held_until = self._held_until.get(claim.stored)
        return ended

    # ------------------------------------------------------------ grants

    def granted(
        self, claim: AcquireRequest, entry: QueueEntry, lease_id: UUID, started: float, told: Granted
    ) -> Grant | None:
        """Record a grant and have it renewed; None: the answer came when its time was over already."""
        grant = Grant(claim, told, entry, lease_id=lease_id, started=started, config=self.config, family=self.family)
        if grant.state == "lost":
            self.forget(claim, lease_id)
            return None
        self._held_until.pop(claim.stored, None)
        self.record(grant)
        return grant

    def forget(self, claim: AcquireRequest, lease_id: UUID) -> None:
        """Have a grant whose answer was lost, or came too late, ended in the background."""
        self.beat.forget_later(claim.place, claim.stored, lease_id, claim.terms.ttl, self.family)

    def record(self, grant: Grant) -> None:
        entry = grant.entry
        with MUTEX:
            entry.owner.waits = entry.away = None
            entry.owner.holds.append(grant)
            entry.hold = grant
        grant.subscribe(lambda: self.dequeue(entry))
        self.beat.keep(grant)
        emit_event(self.config, "acquired", grant.names, grant.token, owner=grant.label, lease_id=grant.lease_id)

    def take_leave(self, grant: Grant) -> None:
        """Take the right to end a grant in this process, and stop its heartbeat.

        Raises:
            LockNotHeldError: it was ended before, or this is a forked child.
        """
        if not grant.ours:
            raise grant.not_held_error()
        grant.expire()
        with MUTEX:
            if not grant.begin_release():
                raise grant.not_held_error()
            if grant in grant.owner.holds:
                grant.owner.holds.remove(grant)
        self.beat.drop(grant)

    def finish_interrupted_release(self, grant: Grant) -> None:
        """End a grant whose release was interrupted, wherever that was; a second time does nothing more."""
        with MUTEX:
            grant.begin_release()
            if grant in grant.owner.holds:
                grant.owner.holds.remove(grant)
        self.beat.drop(grant)
        self.dequeue(grant.entry)
        self.beat.release_later(grant)

    def ending(self, grant: Grant) -> tuple[str, tuple[Any, ...]]:
        """Return the statement that gives a lease back, and its arguments."""
        sql = lease_sql(grant.place, self.style)
        args = grant.stored, str(grant.lease_id), grant.token
        if grant.slot is None:
            return sql.release, args
        return sql.finish, (*args, grant.slot, grant.done)

    def over(self, grant: Grant) -> bool:
        """Say whether a grant was lost before its release; then the row is given back in the background, if it is ours still."""
        if grant.loss_reason is None:
            return False
        self.dequeue(grant.entry)
        grant.done = False  # its holder is told that it was lost, so the slot must not pass for done
        if grant.loss_reason in ("expired", "overdue", "cut off"):
            self.beat.release_later(grant)
        return True

    def answered(self, grant: Grant, answer: str) -> None:
        """Judge the server's answer to a release.

        Raises:
            LockLostError: it was not ours any more.
        """
        if answer != "released":
            grant.warn_of_clock(answer)
            grant.reason = answer  # type: ignore[assignment]
            log.warning("the lease %s was lost before its release: %s", format_names(grant.names), answer)
            emit_event(self.config, "lost", grant.names, grant.token, owner=grant.label, lease_id=grant.lease_id)
            raise grant.lost_error()
        emit_event(self.config, "released", grant.names, grant.token, owner=grant.label, lease_id=grant.lease_id)

    def unanswered(self, grant: Grant, error: BaseException) -> None:
        """A release had no answer: it is repeated in the background, and at the latest the TTL ends it."""
        self.beat.release_later(grant)
        log.warning(
            "the end of the %s %s had no answer, trying again: %s", grant.noun, format_names(grant.names), error
        )
        emit_event(self.config, "released", grant.names, grant.token, owner=grant.label, lease_id=grant.lease_id)

    def let_lapse(self, grant: Grant) -> None:
        """Stop renewing and give nothing back. No I/O."""
        self.take_leave(grant)
        self.dequeue(grant.entry)

    def abort_acquire(self, entry: QueueEntry) -> None:
        """Leave nothing behind of an acquire that ends here, whatever happened."""
        grant: Grant | None = entry.hold
        if grant is not None:
            self.give_back_later(grant)
        self.torn(entry)

    def adopted(
        self, claim: AcquireRequest, entry: QueueEntry, lease_id: UUID, started: float, token: int, row: Any
    ) -> Grant:
        """Record what was adopted.

        Raises:
            LockLostError: it cannot be adopted, or the answer came when its time was over already.
        """
        told = adopted(claim, token, row)
        if isinstance(told, str):
            raise not_adopted(claim, token, told)
        grant = self.granted(told[0], entry, lease_id, started, told[1])
        if grant is None:
            raise not_adopted(claim, token, "expired")
        return grant

    def give_back_later(self, grant: Grant) -> None:
        """Free a lease whose handle was dropped."""
        try:
            self.take_leave(grant)
        except LockNotHeldError:
            return
        self.dequeue(grant.entry)
        self.beat.release_later(grant)

    def reference(self, grant: Grant) -> dict[str, Any]:
        """Stop renewing, and return what another process needs to adopt the lease."""
        self.take_leave(grant)
        self.dequeue(grant.entry)
        return {"name": grant.stored, "lease_id": str(grant.lease_id), "token": grant.token}

    # ------------------------------------------------------------ judgement

    def translate_failure(self, error: Exception, claim: AcquireRequest, *, server_spoke: bool) -> Exception:
        """Return what an error of an attempt means to the caller."""
        if told := self._translate(error, claim.place):
            return told
        if server_spoke and not isinstance(error, UnreachableError):
            return error
        told_unreachable = translate_connect_error(self.engine, error, "")
        if told_unreachable is None and not isinstance(error, PgfenceError) and not is_driver_error(error):
            return error  # a signal handler's
        reason = str(told_unreachable or error).strip()
        return UnreachableError(
            f"the server gave no answer for {self.noun} {format_names(claim.names)} ({reason or describe_server(self.engine)}): whether it was"
            " granted is unknown. A grant is given back as soon as the server answers, at the latest its TTL ends it"
        )

    def _translate(self, error: Exception, place: TableNames) -> PgfenceError | None:
        # Behind a pooler a session of ours outlives the switchover that made a standby of its server.
        context = ErrorContext(self.needed, on_primary="pgfence writes its rows on the primary")
        return translate_error(error, place, context, self.engine)

    def refusal(self, error: Exception, place: TableNames, *, server_spoke: bool) -> Exception | None:
        """Return what an error of a statement means that could have granted nothing; None: what it says itself."""
        if told := self._translate(error, place):
            return told
        return None if server_spoke else translate_connect_error(self.engine, error, "Nothing is known")

    def too_late(self, request: LockRequest, busy: Busy) -> None:
        """Raise that it was not free in time; return where the caller did not want to wait.

        Raises:
            LockTimeoutError: somebody has it still.
        """
        if request.waits:
            raise self.timed_out(request, [busy.holder] if busy.holder else [])

    def no_session(self, request: LockRequest | None) -> PgfenceError:
        """Return that all connections are in use."""
        if request is not None and request.waits:
            return self.timed_out(request, (), why=NO_CONNECTION)
        return UnreachableError("all connections for leases are in use (max_lock_connections)")

    def poll_delay(self, remaining: float, left: float, *, polls: int) -> float:
        """Return how long a waiter sleeps: until the lease may be free and a little, never above a second or what is left.

        Only the first sleep is of random length: it is enough to keep waiters apart, and from then on each asks once a second.
        """
        longest = LONGEST_SLEEP if polls else LONGEST_SLEEP * between(0.5, 1.0)
        return min(left, longest, max(0.0, remaining) + between(0.005, 0.05))

    def news(self, request: LockRequest, began: float, busy: Busy) -> None:
        """Say once in the log who is waited for, when that has taken long."""
        age = clock() - began
        if age > WARN_AFTER and not request.told:
            request.told = True
            self.log_wait(request, (logging.WARNING, age), [busy.holder] if busy.holder else [])

    def holders_here(self, request: LockRequest) -> list[Holder]:
        with MUTEX:
            first = next(iter(self.lines.line(request.sql.places[0])), None)
            hold = None if first is None else first.hold
        if not isinstance(hold, Grant):
            return [first.seen] if first is not None and first.seen is not None else []
        return [
            Holder(
                name=request.names[0],
                key=None,
                kind="lease",
                owner=hold.label or hold.in_words,
                pid=hold.pid,
                token=hold.token,
                expires_at=hold.expires_at,
            )
        ]


def spoke(session: Any, error: BaseException) -> bool:
    """Say whether the server itself refused: then nothing was granted, and the session is as it was."""
    if isinstance(error, TextError):
        return True  # the driver itself rejects some texts, before anything is sent
    return (
        sqlstate_of(error) is not None
        and isinstance(error, Exception)
        and not (session.dead or is_connection_lost(error))
    )


def again(error: BaseException) -> bool:
    """Say whether to ask again at once: the transaction met another one."""
    return sqlstate_of(error) == SERIALIZATION_FAILURE


def row_locked(error: BaseException) -> bool:
    """Say whether somebody keeps the row locked: neither free nor held, so ask again."""
    return sqlstate_of(error) == LOCK_NOT_AVAILABLE


def ask_again(error: BaseException) -> bool:
    """Say whether to ask for an adoption again: if its answer was lost, the same new id is granted once more."""
    return isinstance(error, UnreachableError) or again(error) or row_locked(error)


def not_adopted(claim: AcquireRequest, token: int, outcome: str) -> LockLostError:
    """Return why a reference cannot be adopted."""
    why = {
        "superseded": "it was adopted already, or somebody else has it by now",
        "evicted": "it was evicted",
        "overdue": "its max_hold is over",
    }.get(outcome, "it has expired: nobody adopted it within its TTL")
    return LockLostError(
        f"the lease {format_names(claim.names)} cannot be adopted: {why}",
        names=claim.names,
        reason=outcome,  # type: ignore[arg-type]
        token=token,
    )
