"""A worker is a member that takes partitions up to its quota, serves them, and gives them up.

Threads and tasks run the same code.

join ── below the quota: acquire free partitions, serve each ── lost, asked to stop, or returned ── release ─┐
  └─ above it: ask the newest to stop  ── sleep until a member joins or leaves, or a third of the TTL ──────┘
"""

from __future__ import annotations

import logging
import math
import threading
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from pgfence._holds.carriers import is_callers_failure
from pgfence._holds.hold import format_names, is_about_loss
from pgfence._leases.request import Refused
from pgfence._leases.terms import compute_interval
from pgfence._process.clock import between, clock
from pgfence.partitions._assignment import choose_surplus, compute_quota, rotate_free

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from pgfence._holds.carriers import Carrier, WakeEvent
    from pgfence._leases.grant import Grant
    from pgfence._leases.manager import LeaseManager
    from pgfence._process.coroutines import Coro
    from pgfence.partitions._handles import AsyncPartitionLease, PartitionLease
    from pgfence.partitions._request import Membership, PartitionOptions, PartitionRequest

log = logging.getLogger("pgfence.partitions")

OwnershipT = TypeVar("OwnershipT", bound="PartitionLease | AsyncPartitionLease")

LONGEST_PAUSE = 1.0
"""Seconds between two queries while this worker owns fewer partitions than its quota."""
LONGEST_RETRY = 5.0
SHORTEST_REST = 1.0
"""The pause in seconds after the function of a partition returned early. Each consecutive error doubles the pause."""
LONGEST_REST = 60.0


@dataclass(slots=True, eq=False)
class _Run(Generic[OwnershipT]):
    """A call of the application's function for one partition.

    `lost_at` is when the worker noticed that the lease is lost, on this process's clock.
    """

    number: int
    lease: OwnershipT
    lost_at: float | None = None

    @property
    def grant(self) -> Grant:
        return self.lease._grant


class Balancer(Generic[OwnershipT]):
    """The work of one worker from `join()` to `leave()`.

    Only the worker's thread or task calls `run_worker`, and each partition is served on a separate thread or task. `end` and
    `list_owned` may be called from anywhere. `serve` calls the application's function for a partition, and returns when it has
    ended. `spawn` runs its first argument on a new thread or task, and calls its second argument when the first has ended.
    """

    def __init__(
        self,
        options: PartitionOptions[Any, OwnershipT],
        carrier: Carrier,
        serve: Callable[[int, OwnershipT], Coro[None]],
        spawn: Callable[[Callable[[], Coro[None]], Callable[[], None]], object],
    ) -> None:
        self._options = options
        self._carrier = carrier
        self._serve = serve
        self._spawn = spawn
        self._member = str(uuid.uuid4())
        self.error: Exception | None = None
        """The reason why the worker has ended, unless `leave()` ended it."""
        self.started = carrier.make_event()
        """The event that is set when the worker has taken its share of the free partitions, or has failed."""
        # This lock guards what the worker's thread, the threads that serve and the caller of `leave` share. An event must be set
        # only once.
        self._lock = threading.Lock()
        self._ending = False
        self._runs: dict[int, _Run[OwnershipT]] = {}
        self._sleep: WakeEvent | None = None
        self._is_short = False
        """Whether this worker owns fewer partitions than its quota, so that a release by another worker matters."""
        self._is_aside = False
        """Whether this worker has given up everything, because a function does not return."""
        self._rests: dict[int, float] = {}
        """The time before which a partition is not taken again, after its function returned early or failed, or an eviction."""
        self._errors: dict[int, int] = {}
        """The number of consecutive failures of the function, by partition."""
        self._failures = 0
        self._stop_listening: list[Callable[[], None]] = []

    def list_owned(self) -> Mapping[int, OwnershipT]:
        """Return the numbers of the partitions that are owned now, with their leases."""
        with self._lock:
            runs = sorted(self._runs.items())
        return {number: run.lease for number, run in runs if run.lease.state in ("held", "unknown")}

    def end(self) -> None:
        """Make the worker give up its partitions and leave, and return immediately."""
        with self._lock:
            self._ending = True
        self._wake()

    # ------------------------------------------------------------ the worker's own thread or task

    async def run_worker(self) -> None:
        """Take and give up partitions until `end` is called."""
        try:
            while not self._ending:
                pause = await self._try_balance()
                self.started.set()
                await self._pause(pause)
        finally:
            self._ending = True
            for stop in self._stop_listening:
                stop()
            await self._leave()
            self.started.set()

    async def _try_balance(self) -> float:
        """Take and give up partitions once, and return the number of seconds until the next attempt."""
        try:
            # The event is created before the query, so that a notification during the query ends the sleep after it.
            with self._lock:
                self._sleep = self._carrier.make_event()
            pause = await self._balance()
        except Refused as refusal:
            self.error = refusal.__cause__ if isinstance(refusal.__cause__, Exception) else refusal
            log.log(logging.ERROR, "the worker of %s ends: %s", format_names((self._options._name,)), self.error)
            self._ending = True
            return 0.0
        except Exception as error:
            return self._note_failure(error)
        self._failures = 0
        return pause

    async def _balance(self) -> float:
        options = self._options
        manager, request = options.prepare()
        interval = compute_interval(request.terms.ttl)
        runs = self._list_runs()
        if any(clock() - run.lost_at > request.terms.ttl for run in runs if run.lost_at is not None):
            await self._stand_aside(runs)
            return interval
        self._is_aside = False
        if not self._stop_listening:  # before the query, so that no later change is missed
            for name, wake in ((request.group, self._wake), (f"{request.group}/", self._wake_if_short)):
                self._stop_listening.append(manager.heartbeat.listen(request.place, name, wake))
        # This stays set until the response, so that a release during the query ends the pause after it.
        self._is_short = True
        found = await options.join(self._member)
        quota = compute_quota(request.count, found.members, found.rank)
        kept = [run for run in runs if not run.lease.lost]
        for run in choose_surplus(kept, quota):
            run.grant.resign()
        self._is_short = len(kept) < quota
        if not self._is_short:
            return interval * between(0.8, 1.0)
        return await self._take(manager, request, found, quota - len(kept))

    async def _take(self, manager: LeaseManager, request: PartitionRequest, found: Membership, missing: int) -> float:
        """Take as many free partitions as are missing, and return the number of seconds until the next attempt."""
        interval = compute_interval(request.terms.ttl)
        taken_by = clock() + interval  # The membership must be renewed by this time.
        for number in rotate_free(found.free, found.members, found.rank):
            if not missing or self._ending or clock() > taken_by:
                break
            if number in self._runs or clock() < self._rests.get(number, 0.0):
                continue
            lease = await manager.acquire(request.choose(number), 0.0, self._options._handle)
            if lease is not None:
                missing -= 1
                await self._start(manager, number, lease)
        self._is_short = missing > 0
        if clock() > taken_by:
            return 0.0
        return (min(LONGEST_PAUSE, interval) if missing else interval) * between(0.8, 1.0)

    def _list_runs(self) -> list[_Run[OwnershipT]]:
        """Return the partitions that are served now, in the order in which they were taken, and note which were lost."""
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            if run.lost_at is None and run.lease.lost:
                run.lost_at = clock()
        return runs

    async def _stand_aside(self, runs: list[_Run[OwnershipT]]) -> None:
        """Give up everything while the function still serves a partition that was lost a TTL ago, because this worker may hang."""
        if not self._is_aside:
            self._is_aside = True
            stuck = tuple(f"{self._options._name}/{run.number}" for run in runs if run.lost_at is not None)
            log.error(
                "the worker of %s lost %s, but the function that serves it has not returned within a TTL. The worker gives up all its"
                " partitions until the function returns",
                format_names((self._options._name,)),
                format_names(stuck),
            )
        for run in runs:
            run.grant.resign()
        await self._options.leave(self._member)

    async def _leave(self) -> None:
        """Give up all partitions, and return when they are released."""
        for run in self._list_runs():
            run.grant.resign()
        try:
            await self._options.leave(self._member)
        except Exception as error:  # The other members notice this after one TTL.
            log.debug("the worker could not leave the group of workers", exc_info=error)
        while True:
            with self._lock:
                if not self._runs:
                    return
                event = self._sleep = self._carrier.make_event()
            await event.wait(math.inf)

    # ------------------------------------------------------------ one partition

    async def _start(self, manager: LeaseManager, number: int, lease: OwnershipT) -> None:
        run = _Run(number, lease)
        with self._lock:
            self._runs[number] = run
        try:
            self._spawn(lambda: self._serve_partition(manager, run), lambda: self._forget(run))
        except BaseException:  # The process cannot start another thread.
            self._forget(run)
            await manager.give_up(run.grant)
            raise

    def _forget(self, run: _Run[OwnershipT]) -> None:
        with self._lock:
            self._runs.pop(run.number, None)
        self._wake()

    async def _serve_partition(self, manager: LeaseManager, run: _Run[OwnershipT]) -> None:
        """Call the application's function, and release the partition when it has ended."""
        errors = 0
        try:
            await self._serve(run.number, run.lease)
        except BaseException as error:
            if not is_callers_failure(error):
                raise
            if not (run.lease.lost and is_about_loss(error)):
                errors = self._note_error(run, error)
        finally:
            self._errors[run.number] = errors
            if errors or run.lease.loss_reason in (None, "evicted"):
                self._rests[run.number] = clock() + min(SHORTEST_REST * 2.0 ** min(errors, 10), LONGEST_REST)
            run.grant.resign()
            await manager.give_up(run.grant)

    def _note_error(self, run: _Run[OwnershipT], error: BaseException) -> int:
        log.error("the function that serves %s failed", format_names(run.grant.names), exc_info=error)
        return self._errors.get(run.number, 0) + 1

    # ------------------------------------------------------------ waiting and notifying

    def _wake_if_short(self) -> None:
        if self._is_short:
            self._wake()

    def _wake(self) -> None:
        with self._lock:
            event, self._sleep = self._sleep, None
        if event is not None:
            event.set()

    async def _pause(self, seconds: float) -> None:
        with self._lock:
            event = None if self._ending else self._sleep
        if event is not None:
            await event.wait(seconds)

    def _note_failure(self, error: Exception) -> float:
        """Log that the server could not be queried, as a warning only for the first failure in a row, and return the pause."""
        self._failures += 1
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        names = format_names((self._options._name,))
        log.log(level, "the worker of %s cannot query the server now, and will try again: %s", names, error)
        return min(LONGEST_RETRY, 0.25 * 2.0 ** min(self._failures, 10)) * between(0.5, 1.0)
