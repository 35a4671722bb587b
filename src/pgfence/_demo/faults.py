"""What befalls holders in an act, and how long it takes until somebody else has their lock.

A blow falls when a process tells that it was granted a lock and another one has asked for the same: its job has just begun.
Whether the blow met the holder is known afterwards: if somebody else was granted the lock before it fell, it had been given
back already, and the blow is dealt again.
"""

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

# Only while it holds one: the session of somebody who has just given it back is made anew, and nobody is told.
_TERMINATE = text(
    "SELECT pg_terminate_backend(:pid) WHERE EXISTS"
    " (SELECT FROM pg_locks WHERE pid = :pid AND locktype = 'advisory' AND granted)"
)


class _Struck(NamedTuple):
    """A blow that has fallen."""

    blow: Fault
    lock: str
    victim: Worker
    granted_at: float
    struck_at: float


class Faults:
    """The blows of one act, one after the other."""

    def __init__(
        self, blows: Sequence[Fault], crew: WorkerPool, engine: Engine, *, start: float, seconds: float
    ) -> None:
        self._crew = crew
        self._engine = engine
        self._due = [(start + seconds * number / (len(blows) + 1), blow) for number, blow in enumerate(blows, 1)]
        self._asking: dict[Worker, str] = {}
        self._struck: _Struck | None = None
        self._takeovers: list[TakeOver] = []

    @property
    def done(self) -> bool:
        """Whether each blow has fallen and somebody else has the lock."""
        return not self._due and self._struck is None

    @property
    def takeovers(self) -> tuple[TakeOver, ...]:
        """What came of each blow; without seconds if it did not fall or nobody took over."""
        open_ = [TakeOver(self._struck.blow, self._struck.lock, None)] if self._struck else []
        return (*self._takeovers, *open_, *(TakeOver(blow, "", None) for _, blow in self._due))

    def hear(self, member: Worker, words: Message) -> None:
        """Take note of what a process tells, and strike it if that is due."""
        if "asks" in words:
            self._asking[member] = words["asks"]
        elif "granted" in words:
            self._asking.pop(member, None)
            self._watch(member, words["granted"], words["at"])
            self._inject(member, words["granted"], words["at"])

    def _watch(self, member: Worker, lock: str, at: float) -> None:
        struck = self._struck
        if struck is None or lock != struck.lock or member is struck.victim:
            return
        if at > struck.struck_at:
            self._takeovers.append(TakeOver(struck.blow, lock, at - struck.struck_at))
            self._struck = None
        elif at > struck.granted_at:
            self._due.insert(0, (0.0, struck.blow))
            self._struck = None

    def _inject(self, member: Worker, lock: str, granted_at: float) -> None:
        if self._struck is not None or not self._due or lock not in self._asking.values():
            return
        due, blow = self._due[0]
        if clock() < due:
            return
        struck_at = self._kill(member) if blow is Fault.KILL else self._terminate(lock)
        if struck_at is not None:
            self._struck = _Struck(blow, lock, member, granted_at, struck_at)
            self._due.pop(0)

    def _kill(self, member: Worker) -> float:
        now = clock()
        self._crew.kill(member)
        return now

    def _terminate(self, lock: str) -> float | None:
        """End the session that holds a lock, as an administrator does who knows its name alone."""
        holders = AdvisoryLock(self._engine, lock, namespace=NAMESPACE).holders()
        if not holders:
            return None
        with self._engine.connect() as connection:
            now = clock()
            return now if connection.scalar(_TERMINATE, {"pid": holders[0].backend_pid}) else None
