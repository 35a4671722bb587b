"""Jobs that acquire locks of every kind, hold them, and write with their tokens."""

from __future__ import annotations

import random
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cluster import tables
from cluster.records import Refusal, Write, describe_error
from pgfence import LockLostError, LockTimeoutError, fenced

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.clients.beliefs import Beliefs, Watched
    from cluster.clients.halves import Half
    from cluster.records import Recorder

PERMITS = 2
PARTITIONS = 4
TICK = 0.05
AFTER_FAILURE = 0.7
"""Seconds until the next attempt."""
FOREVER = 1e9


class Holders:
    """The jobs of one client that hold something."""

    def __init__(self, half: Half, recorder: Recorder, beliefs: Beliefs, client: str) -> None:
        self._half = half
        self._recorder = recorder
        self._beliefs = beliefs
        self._client = client

    async def hold_lease(self, name: str, ttl: float, longest: float) -> None:
        """Hold a lease, again and again."""
        lease = self._half.pick("Lease")
        await self._repeat("lease", name, lambda: lease(self._half.engine, name, ttl=ttl), longest)

    async def hold_lock(self, name: str, longest: float, *, token: bool) -> None:
        """Hold an advisory lock, again and again."""
        lock = self._half.pick("AdvisoryLock")
        kind = "token lock" if token else "lock"
        await self._repeat(kind, name, lambda: lock(self._half.engine, name, token=token), longest)

    async def hold_permit(self, name: str, ttl: float, longest: float) -> None:
        """Hold a permit, again and again."""
        semaphore = self._half.pick("Semaphore")

        def build() -> Any:
            return semaphore(self._half.engine, name, permits=PERMITS, ttl=ttl)

        await self._repeat("permit", name, build, longest, limit=PERMITS)

    async def _repeat(self, kind: str, name: str, build: Callable[[], Any], longest: float, limit: int = 1) -> None:
        while not self._half.is_stopping:
            asked = time.monotonic()
            try:
                held = await self._half.call(build().acquire, timeout=4)
            except LockTimeoutError:
                continue
            except Exception as error:
                await self._note_refusal(kind, name, asked, error)
                continue
            watched = self._watch(held, kind, name, asked, limit)
            await self._serve(watched, longest)
            self._beliefs.drop(watched)
            try:
                await self._half.call(held.release)
            except Exception as error:
                watched.write("lost" if isinstance(error, LockLostError) else "error", error)
            else:
                watched.write("released")
            await self._half.sleep(random.uniform(0.05, 0.4))

    async def run_slots(self, name: str, seconds: float) -> None:
        """Run each slot of a schedule once."""
        once = self._half.pick("Once")
        while not self._half.is_stopping:
            asked = time.monotonic()
            try:
                slot = await self._half.call(
                    once(self._half.engine, name, every=timedelta(seconds=seconds), ttl=6).try_acquire
                )
            except Exception as error:
                await self._note_refusal("slot", name, asked, error)
                continue
            if slot is None:
                await self._half.sleep(0.3)
                continue
            watched = self._watch(slot, "slot", name, asked, 1)
            try:
                async with self._half.enter(slot):
                    async with self._half.enter(slot.begin(self._half.engine)) as connection:
                        values = {"slot": slot.slot, "id": str(uuid.uuid4())}
                        await self._half.call(connection.execute, tables.SLOT, values)
                    await self._half.sleep(random.uniform(0, 0.8))
                    self._beliefs.drop(watched)
            except Exception as error:
                self._beliefs.drop(watched)
                watched.write("lost" if isinstance(error, LockLostError) else "error", error)
            else:
                watched.write("released")

    async def lead(self, name: str, ttl: float, longest: float) -> None:
        """Stand in an election, and write in each term."""
        asked = time.monotonic()

        async def serve(term: Any) -> None:
            watched = self._watch(term, "term", name, asked, 1)
            await self._serve(watched, longest)
            self._drop(watched)

        member = self._half.pick("Election")(self._half.engine, name, ttl=ttl).stand()
        self._half.start(lambda: self._end_with_client(member.resign))
        while not self._half.is_stopping:
            try:
                await self._half.call(member.run, self._half.adapt(serve))
            except Exception as error:
                await self._note_refusal("term", name, asked, error)

    async def serve_partitions(self, name: str, ttl: float) -> None:
        """Own a share of the partitions, and write in each of them."""

        async def serve(number: int, lease: Any) -> None:
            watched = self._watch(lease, "partition", f"{name}/{number}", time.monotonic(), 1)
            await self._serve(watched, FOREVER)
            self._drop(watched)

        partitions = self._half.pick("Partitions")(self._half.engine, name, PARTITIONS, ttl=ttl)
        worker = partitions.join(self._half.adapt(serve))
        await self._end_with_client(worker.leave)

    async def _end_with_client(self, end: Callable[[], Any]) -> None:
        while not self._half.is_stopping:
            await self._half.sleep(0.2)
        await self._half.call(end)

    def _watch(self, held: Any, kind: str, name: str, asked: float, limit: int) -> Watched:
        return self._beliefs.watch(held, kind, name, f"{self._client}/{kind}/{name}", asked=asked, limit=limit)

    def _drop(self, watched: Watched) -> None:
        self._beliefs.drop(watched)
        watched.write("lost" if watched.told is not None else "released")

    async def _serve(self, watched: Watched, longest: float) -> None:
        """Write with the token, if there is one, until the time is over or the lock is lost."""
        held = watched.handle
        until = time.monotonic() + (longest if longest == FOREVER else random.uniform(0.2, 1) * longest)
        while time.monotonic() < until and not self._half.is_stopping and not held.lost:
            if hasattr(held, "token"):
                await self._write(watched)
                await self._half.sleep(random.uniform(0.1, 0.5))
            else:
                await self._half.sleep(TICK)
        if held.lost and hasattr(held, "token"):
            await self._write_after_loss(watched)

    async def _write(self, watched: Watched) -> None:
        async def run(values: dict[str, Any]) -> None:
            async with self._half.enter(watched.handle.begin(self._half.engine)) as connection:
                await self._insert(connection, values)

        await self._record(watched, run, after_loss=False)

    async def _write_after_loss(self, watched: Watched) -> None:
        """Write like a holder that does not know that its lock is lost."""

        async def run(values: dict[str, Any]) -> None:
            async with self._half.enter(self._half.engine.begin()) as connection:
                async with self._half.enter(fenced(connection, values["name"], values["token"])):
                    await self._insert(connection, values)

        await self._record(watched, run, after_loss=True)

    async def _insert(self, connection: Any, values: dict[str, Any]) -> None:
        number = (await self._half.call(connection.execute, tables.NUMBER, {"name": values["name"]})).scalar_one()
        await self._half.call(connection.execute, tables.WRITE, values | {"number": number})

    async def _record(self, watched: Watched, run: Callable[[dict[str, Any]], Any], *, after_loss: bool) -> None:
        ((resource, token),) = watched.handle._own_tokens.items()
        started, failure = time.monotonic(), None
        values = {"id": str(uuid.uuid4()), "name": resource, "token": token, "who": watched.who}
        try:
            await run(values)
        except Exception as error:
            failure = describe_error(error)
        self._recorder.write(Write, table="fenced", **values, started=started, failure=failure, after_loss=after_loss)
        if failure is not None:
            await self._half.sleep(AFTER_FAILURE)

    async def _note_refusal(self, kind: str, name: str, asked: float, error: Exception) -> None:
        self._recorder.write(Refusal, kind=kind, name=name, asked=asked, failure=describe_error(error))
        await self._half.sleep(AFTER_FAILURE)
