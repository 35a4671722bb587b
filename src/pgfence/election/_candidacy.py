"""A member of an election, which is a candidate, leads, steps down and is a candidate again. Threads and tasks run the same code.

follow ── the name is free: acquire ── lead: on_gained ── lost, or resigned: on_lost ── the work has ended ── release
└─ busy: sleep until it may be free, or a release is notified ─┘
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from pgfence._holds.carriers import is_callers_failure
from pgfence._holds.hold import format_names, is_about_loss
from pgfence._leases.request import holder_of, owner_of
from pgfence._process.clock import between
from pgfence.types import Holder

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pgfence._holds.carriers import Carrier, WakeEvent
    from pgfence._leases.grant import Grant
    from pgfence._leases.manager import LeaseManager
    from pgfence._leases.request import Busy
    from pgfence._process.coroutines import Coro
    from pgfence.election._request import TermOptions, TermRequest
    from pgfence.fence.handles import AsyncHeldLease, HeldLease

    Callback = Callable[..., object]

log = logging.getLogger("pgfence.election")

TermT = TypeVar("TermT", bound="HeldLease | AsyncHeldLease")

LONGEST_PAUSE = 1.0
"""Seconds between two queries if no notification can be expected."""
SHORTEST_PAUSE = 0.1
STEP_ASIDE = 1.0
"""Seconds before a leader that was asked to resign is a candidate again, so that another candidate is elected."""
LONGEST_RETRY = 5.0


class Candidacy(Generic[TermT]):
    """The work of one member from `stand()` to `resign()`.

    Only the member's thread or task calls `run_member`, and only the caller of `run` calls `lead_with`. The other methods may be
    called from anywhere.
    """

    def __init__(
        self,
        candidate: TermOptions[Any, TermT],
        carrier: Carrier,
        *,
        on_gained: Callback | None,
        on_lost: Callback | None,
        on_changed: Callback | None,
    ) -> None:
        self._candidate = candidate
        self._carrier = carrier
        self._on_gained = on_gained
        self._on_lost = on_lost
        self._on_changed = on_changed
        # This lock guards the state that the member's thread, the thread of `run` and the caller of `resign` share. An event must
        # be set only once.
        self._lock = threading.Lock()
        self._ending = False
        self._sleep: WakeEvent | None = None
        """The event for which the member waits. It is set when the name may be free or the term of the member has ended."""
        self._runner: WakeEvent | None = None
        """The event for which `run` waits. It is set when a term has begun or the member has resigned."""
        self._work: WakeEvent | None = None
        """The event for which the member waits while work runs in its term. It is set when the work has ended."""
        self._term: TermT | None = None
        self._has_runner = False
        self._leader: tuple[str | None, int | None] | None = None
        self._failures = 0
        self._stop_listening: Callable[[], None] | None = None

    @property
    def term(self) -> TermT | None:
        """The current term, or None, without I/O."""
        term = self._term
        return None if term is None or term.lost or term.state == "released" else term

    def end(self) -> None:
        """Make the member step down and stop being a candidate, and return immediately."""
        with self._lock:
            self._ending = True
            term = self._term
        if term is not None:
            _grant_of(term).resign()
        self._wake()

    # ------------------------------------------------------------ the member's own thread or task

    async def run_member(self) -> None:
        """Stand for election, and lead whenever the term is acquired, until `end` is called."""
        try:
            while not self._ending:
                try:
                    await self._stand()
                    self._failures = 0
                except Exception as error:
                    await self._pause(self._note_failure(error))
        finally:
            self._ending = True
            self._stop()
            self._wake_runner()

    async def _stand(self) -> None:
        """Try to acquire the term once. Lead if that succeeds, otherwise sleep until the next try."""
        found: list[Busy] = []
        with self._lock:  # a release during the query must end the sleep after it
            event = self._sleep = self._carrier.make_event()
        manager, request = self._candidate.build(found.append)
        term = await manager.acquire(request, 0.0, self._candidate._handle)
        if term is not None:
            await self._lead(manager, term)
            return
        if found:
            await self._note_leader(found[-1].holder)
        else:  # another member of this process leads, or queries the server at this moment
            row = await manager.look(request.place, request.stored)
            await self._note_leader(None if row is None else holder_of(request, row))
        await self._follow(manager, request, found[-1].remaining if found else math.inf, event)

    async def _follow(self, manager: LeaseManager, request: TermRequest, remaining: float, event: WakeEvent) -> None:
        """Sleep until the name may be free."""
        if self._stop_listening is None:
            self._stop_listening = manager.heartbeat.listen(request.place, request.stored, self._wake)
            if manager.heartbeat.is_listening(request.place):
                return  # the connection was already listening, so a release since the query did not wake this member
        ttl = request.terms.ttl
        longest = max(LONGEST_PAUSE, ttl / 3) if manager.heartbeat.is_listening(request.place) else LONGEST_PAUSE
        # The jitter separates candidates that wait for the same expiry.
        await self._pause(max(SHORTEST_PAUSE, min(longest, remaining + between(0.005, 0.05))), event)

    async def _lead(self, manager: LeaseManager, term: TermT) -> None:
        grant = _grant_of(term)
        try:
            self._stop()
            with self._lock:
                ended = self._sleep = self._carrier.make_event()
                self._term, over = term, self._ending
            grant.add_end_callback(self._wake)
            if over:  # `end` came between the grant and here
                grant.resign()
            else:
                await self._work_term(grant, ended)
        finally:
            self._term = None
            asked = grant.loss_reason == "resigned" and not self._ending
            await manager.give_up(grant)
        if asked:
            await self._pause(STEP_ASIDE)

    async def _work_term(self, grant: Grant, ended: WakeEvent) -> None:
        """Notify the application of the term, and return when both the term and its work have ended."""
        try:
            await self._note_leader(self._describe_own(grant))
            await self._call(self._on_gained)
            self._wake_runner()
            await ended.wait(math.inf)
        except BaseException:  # the member's task is cancelled, because its event loop ends
            grant.resign()
            raise
        finally:
            await self._step_down()

    async def _step_down(self) -> None:
        with self._lock:  # from here on `run` begins no work in this term
            self._term, work = None, self._work
        await self._call(self._on_lost)
        if work is not None:
            await work.wait(math.inf)

    # ------------------------------------------------------------ the work of a leader

    async def lead_with(self, work: Callable[[TermT], Coro[object]]) -> None:
        """Await `work(term)` in each term, until `end` is called.

        Errors of the work are raised, except those about the loss of its term.
        """
        with self._lock:
            if self._has_runner:
                raise RuntimeError(
                    "run() is already running for this member: use one function for the work of all its terms"
                )
            self._has_runner = True
        try:
            await self._run_terms(work)
        finally:
            self._has_runner = False

    async def _run_terms(self, work: Callable[[TermT], Coro[object]]) -> None:
        while True:
            with self._lock:
                if self._ending:
                    return
                term = self.term
                if term is None or self._work is not None:
                    waiting = self._runner = self._carrier.make_event()
                else:
                    waiting, self._work = None, self._carrier.make_event()
            if waiting is not None:
                await waiting.wait(math.inf)
                continue
            assert term is not None
            try:
                await work(term)
            except Exception as error:
                if not (term.lost and is_about_loss(error)):
                    raise
                # The error only reports that the term has ended. The work goes on in the next term.
            finally:
                # The term ends with the work, so that the lease is released only after it.
                _grant_of(term).resign()
                with self._lock:
                    done, self._work = self._work, None
                if done is not None:
                    done.set()

    # ------------------------------------------------------------ waiting and notifying

    def _wake(self) -> None:
        with self._lock:
            event, self._sleep = self._sleep, None
        if event is not None:
            event.set()

    def _wake_runner(self) -> None:
        with self._lock:
            event, self._runner = self._runner, None
        if event is not None:
            event.set()

    async def _pause(self, seconds: float, event: WakeEvent | None = None) -> None:
        with self._lock:
            if self._ending:
                return
            if event is None:
                event = self._sleep = self._carrier.make_event()
        await event.wait(seconds)

    def _stop(self) -> None:
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None

    def _note_failure(self, error: Exception) -> float:
        """Log that the member cannot be a candidate now, as a warning only for the first failure in a row, and return the pause."""
        self._failures += 1
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        names = format_names((self._candidate._name,))
        log.log(level, "the member of the election %s cannot be a candidate now, and will try again: %s", names, error)
        return min(LONGEST_RETRY, 0.25 * 2.0 ** min(self._failures, 10)) * between(0.5, 1.0)

    async def _note_leader(self, holder: Holder | None) -> None:
        leader = None if holder is None else (holder.owner, holder.token)
        if leader != self._leader:
            self._leader = leader
            await self._call(self._on_changed, holder)

    def _describe_own(self, grant: Grant) -> Holder:
        return Holder(
            name=grant.names[0],
            key=None,
            kind="term",
            owner=owner_of(self._candidate._identity),
            pid=grant.pid,
            token=grant.token,
            expires_at=grant.expires_at,
        )

    async def _call(self, callback: Callback | None, *args: object) -> None:
        if callback is None:
            return
        try:
            result = callback(*args)
            if inspect.isawaitable(result):
                await result
        except BaseException as error:
            if not is_callers_failure(error):
                raise
            log.exception("a callback of the election %s failed", format_names((self._candidate._name,)))


def _grant_of(term: HeldLease | AsyncHeldLease) -> Grant:
    return term._grant
