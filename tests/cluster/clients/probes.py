"""Uses of each primitive in short intervals, to see when it works again after a failover."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cluster import tables
from cluster.records import Probe, describe_error
from pgfence import idempotent, run_transaction

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cluster.clients.halves import Half
    from cluster.records import Recorder

EVERY = 0.25
AFTER_FAILURE = 0.5
"""Seconds until the next probe after a failure. Connecting is expensive, and an event loop that only connects has no success."""
SLOW = 1.5
"""Seconds after which another probe begins beside one that has not ended, as another caller would."""
MOST = 3
"""Probes of one primitive at once."""
NAMES = 40
"""An interrupted probe leaves its lease until the TTL has passed, so the next probes use other names."""


@dataclass(slots=True)
class _State:
    """The probes of one primitive.

    Attributes:
        number: how many have begun.
        running: how many have not ended.
        begun: when the last one has begun.
    """

    number: int = 0
    running: int = 0
    begun: float = 0.0


class Probes:
    """The probes of one client."""

    def __init__(self, half: Half, recorder: Recorder, client: str) -> None:
        self._half = half
        self._recorder = recorder
        self._client = client
        self.primitives: dict[str, Callable[[str], Awaitable[None]]] = {
            "sql": self._run_sql,
            "key": self._send_key,
            "lease": self._take_lease,
            "lock": self._take_lock,
            "slot": self._take_slot,
            "permit": self._take_permit,
        }

    async def run(self, primitive: str) -> None:
        """Probe a primitive until the client ends."""
        state = _State()
        self._half.start(lambda: self._probe(primitive, state))
        while not self._half.is_stopping:
            await self._half.sleep(EVERY)
            if time.monotonic() - state.begun > SLOW and state.running < MOST:
                self._half.start(lambda: self._probe(primitive, state))

    async def _probe(self, primitive: str, state: _State) -> None:
        """Probe again and again, until a probe was slow: another one has begun beside it."""
        while not self._half.is_stopping:
            state.number += 1
            state.running += 1
            state.begun = started = time.monotonic()
            failure = None
            try:
                await self.primitives[primitive](f"probe-{self._client}-{state.number % NAMES}")
            except Exception as error:
                failure = describe_error(error)
            state.running -= 1
            self._recorder.write(Probe, primitive=primitive, started=started, failure=failure)
            if state.begun != started:
                return
            await self._half.sleep(EVERY if failure is None else AFTER_FAILURE)

    async def _run_sql(self, name: str) -> None:
        async with self._half.enter(self._half.engine.begin()) as connection:
            await self._half.call(connection.execute, tables.PROBE, {"name": name})

    async def _send_key(self, name: str) -> None:
        async def work(session: Any) -> None:
            async def insert() -> int:
                return 1

            call = idempotent(session, str(uuid.uuid4()), scope=name, result=int)
            await self._half.call(call.run, self._half.adapt(insert))

        await self._half.call(run_transaction, self._half.sessions, self._half.adapt(work))

    async def _take_lease(self, name: str) -> None:
        lease = self._half.pick("Lease")(self._half.engine, name, ttl=5)
        await self._release(await self._half.call(lease.acquire, timeout=0))

    async def _take_lock(self, name: str) -> None:
        lock = self._half.pick("AdvisoryLock")(self._half.engine, name)
        await self._release(await self._half.call(lock.acquire, timeout=2))

    async def _take_slot(self, name: str) -> None:
        once = self._half.pick("Once")(self._half.engine, name, at=datetime.now(UTC), ttl=5)
        await self._release(await self._half.call(once.acquire, timeout=0))

    async def _take_permit(self, name: str) -> None:
        semaphore = self._half.pick("Semaphore")(self._half.engine, f"{name}-permit", permits=1, ttl=5)
        await self._release(await self._half.call(semaphore.acquire, timeout=0))

    async def _release(self, held: Any) -> None:
        await self._half.call(held.release)
