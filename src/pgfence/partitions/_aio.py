"""`AsyncPartitions`: keys divided into partitions, each with one owner, for asyncio."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Literal, Self

from pgfence._api.cancel_on_loss import await_work
from pgfence._api.inputs import AsyncEngineSource
from pgfence._holds.carriers import TaskCarrier, keep_task
from pgfence.lease._engines import ASYNC_ENGINES
from pgfence.partitions._handles import AsyncPartitionLease
from pgfence.partitions._request import PartitionOptions
from pgfence.partitions._worker import Balancer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from types import TracebackType

    from pgfence._process.clock import Seconds
    from pgfence._process.coroutines import Coro
    from pgfence.fence.handles import AsyncHeldLease
    from pgfence.types import Holder


class _AsyncOptions(PartitionOptions[AsyncEngineSource, AsyncPartitionLease]):
    _public_name = "AsyncPartitions"
    _engines = ASYNC_ENGINES
    _handle = AsyncPartitionLease


class AsyncPartitions:
    """Divide keys into partitions, each of which one worker owns at a time; see `Partitions`.

    Guarantees, limitations, arguments and errors are the same as for `Partitions`, except that the engine is an AsyncEngine. The
    work of each partition runs as a task, which is cancelled when the partition is lost or given up.
    """

    def __init__(
        self,
        engine: AsyncEngineSource,
        name: str,
        count: int,
        *,
        hash: Literal["sha256", "murmur2"] = "sha256",  # noqa: A002  # the public name
        ttl: Seconds = 15,
        namespace: str | None = None,
    ) -> None:
        self._options = _AsyncOptions(engine, name, count, hash=hash, ttl=ttl, namespace=namespace)

    def partition_for(self, key: str) -> int:
        """Return the partition of a key; arguments and errors are the same as for the sync class."""
        return self._options.choose_partition(key)

    async def owner_of(self, partition: int) -> Holder | None:
        """Return the worker that owns a partition; arguments and errors are the same as for the sync class."""
        return await self._options.find_owner(partition)

    async def resize(self, count: int) -> None:
        """Change the number of partitions; arguments and errors are the same as for the sync class."""
        await self._options.change_count(count)

    def join(
        self,
        serve: Callable[[int, AsyncHeldLease], Awaitable[object]],
        /,
        *,
        owner: str | None = None,
        address: str | None = None,
    ) -> AsyncWorker:
        """Join as a worker, which runs in tasks of the running loop and owns a share of the partitions until it leaves.

        The call works as in the sync class, but `serve(partition, lease)` runs in a separate task, which is cancelled when the
        partition is lost or given up.

        Raises:
            RuntimeError: no event loop is running.
            TypeError: `owner` or `address` is not a str.
        """
        return AsyncWorker(self._options.with_owner(owner, address), serve)

    def __repr__(self) -> str:
        return f"<AsyncPartitions {self._options.describe()}>"


class AsyncWorker:
    """A worker that owns a share of the partitions. Call `leave`, or use the worker as an async context manager; see `Worker`."""

    def __init__(self, options: _AsyncOptions, serve: Callable[[int, AsyncHeldLease], Awaitable[object]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._serve = serve
        self._serving: set[asyncio.Task[object]] = set()
        self._balancer = Balancer(options, TaskCarrier(self._loop), self._call, self._start_work)
        self._task = self._loop.create_task(self._balancer.run_worker(), name="pgfence-worker")
        keep_task(self._task)

    async def _call(self, partition: int, lease: AsyncPartitionLease) -> None:
        task: asyncio.Task[object] = self._loop.create_task(self._run(partition, lease))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        await await_work(task, lease)

    async def _run(self, partition: int, lease: AsyncPartitionLease) -> object:
        return await self._serve(partition, lease)

    def _start_work(self, work: Callable[[], Coro[None]], done: Callable[[], None]) -> None:
        task = self._loop.create_task(work(), name="pgfence-partition")
        task.add_done_callback(lambda _: done())
        keep_task(task)

    @property
    def owned(self) -> Mapping[int, AsyncHeldLease]:
        """The partitions that this worker owns now, with their leases, as far as this process knows."""
        return self._balancer.list_owned()

    async def leave(self) -> None:
        """Give up all partitions and stop being a worker; see `Worker.leave`.

        Raises:
            ValueError: the worker had already ended, because another number of partitions or another hash is stored.
        """
        self._balancer.end()
        if asyncio.current_task() not in self._serving:
            await asyncio.wait((self._task,))
            if self._balancer.error is not None:
                raise self._balancer.error

    async def __aenter__(self) -> Self:
        """Wait until the worker has taken its share of the free partitions, or has found that it cannot reach the server.

        Raises:
            ValueError: another number of partitions or another hash is stored.
        """
        try:
            await self._balancer.started.wait(math.inf)
            if self._balancer.error is not None:
                raise self._balancer.error
        except BaseException:  # the block is not entered, so nothing would end the worker
            self._balancer.end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        try:
            await self.leave()
        except ValueError:
            if exc is None:
                raise
