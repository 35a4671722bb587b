"""Inject faults into the holders of an act, and measure how long it takes until another process has their lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import text

from pgfence._demo.bank import NAMESPACE
from pgfence._demo.workload import Fault, TakeOver
from pgfence._process.clock import clock
from pgfence.advisory import AdvisoryLock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Engine

    from pgfence._demo.context import Message
    from pgfence._demo.workers import Worker, WorkerPool

# The session is ended only while it holds a lock. After a release it would be replaced, and no loss would be raised.
_TERMINATE = text(
    "SELECT pg_terminate_backend(:pid) WHERE EXISTS"
    " (SELECT FROM pg_locks WHERE pid = :pid AND locktype = 'advisory' AND granted)"
)


class _Injected(NamedTuple):
    """A fault that was injected."""

    fault: Fault
    lock: str
    victim: Worker
    granted_at: float
    injected_at: float


class Faults:
    """The faults of one act, injected one after the other."""

    def __init__(
        self, faults: Sequence[Fault], pool: WorkerPool, engine: Engine, *, start: float, seconds: float
    ) -> None:
        self._pool = pool
        self._engine = engine
        self._due = [(start + seconds * number / (len(faults) + 1), fault) for number, fault in enumerate(faults, 1)]
        self._asking: dict[Worker, str] = {}
        self._injected: _Injected | None = None
        self._takeovers: list[TakeOver] = []

    @property
    def done(self) -> bool:
        """Whether each fault was injected and another process has acquired the victim's lock."""
        return not self._due and self._injected is None

    @property
    def takeovers(self) -> tuple[TakeOver, ...]:
        """The result of each fault, without seconds if the fault was not injected or no process took over."""
        open_ = [TakeOver(self._injected.fault, self._injected.lock, None)] if self._injected else []
        return (*self._takeovers, *open_, *(TakeOver(fault, "", None) for _, fault in self._due))

    def note(self, member: Worker, words: Message) -> None:
        """Record a message of a process, and inject a fault into that process if one is due."""
        if "asks" in words:
            self._asking[member] = words["asks"]
        elif "granted" in words:
            self._asking.pop(member, None)
            self._watch(member, words["granted"], words["at"])
            self._inject(member, words["granted"], words["at"])

    def _watch(self, member: Worker, lock: str, at: float) -> None:
        injected = self._injected
        if injected is None or lock != injected.lock or member is injected.victim:
            return
        if at > injected.injected_at:
            self._takeovers.append(TakeOver(injected.fault, lock, at - injected.injected_at))
            self._injected = None
        elif at > injected.granted_at:
            # The lock had been released and granted to another process before the fault, so no holder was hit. Repeat the fault.
            self._due.insert(0, (0.0, injected.fault))
            self._injected = None

    def _inject(self, member: Worker, lock: str, granted_at: float) -> None:
        # The fault is injected into a holder whose job has just begun, and whose lock another process waits for.
        if self._injected is not None or not self._due or lock not in self._asking.values():
            return
        due, fault = self._due[0]
        if clock() < due:
            return
        injected_at = self._kill(member) if fault is Fault.KILL else self._terminate(lock)
        if injected_at is not None:
            self._injected = _Injected(fault, lock, member, granted_at, injected_at)
            self._due.pop(0)

    def _kill(self, member: Worker) -> float:
        now = clock()
        self._pool.kill(member)
        return now

    def _terminate(self, lock: str) -> float | None:
        """End the session that holds a lock, as an administrator who knows only the lock's name does."""
        holders = AdvisoryLock(self._engine, lock, namespace=NAMESPACE).holders()
        if not holders:
            return None
        with self._engine.connect() as connection:
            now = clock()
            return now if connection.scalar(_TERMINATE, {"pid": holders[0].backend_pid}) else None
