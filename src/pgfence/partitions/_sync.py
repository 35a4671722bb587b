"""`Partitions`: keys divided into partitions, each with one owner, for threads."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Literal, Self

from pgfence._api.inputs import EngineSource, reject_coroutine
from pgfence._holds.carriers import THREADS
from pgfence._process import threads
from pgfence._process.coroutines import run_sync
from pgfence.lease._engines import SYNC_ENGINES
from pgfence.partitions._handles import PartitionLease
from pgfence.partitions._request import PartitionOptions
from pgfence.partitions._worker import Balancer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from pgfence._process.clock import Seconds
    from pgfence._process.coroutines import Coro
    from pgfence.fence.handles import HeldLease
    from pgfence.types import Holder


class _Options(PartitionOptions[EngineSource, PartitionLease]):
    _public_name = "Partitions"
    _engines = SYNC_ENGINES
    _handle = PartitionLease


class Partitions:
    """Divide keys into partitions, each of which one worker owns at a time, so that each key has a single writer.

    ::

        def serve(partition: int, lease: HeldLease) -> None:
            while not lease.lost:
                with lease.begin(SessionLocal) as session:
                    apply_commands(session, partition)
                lease.wait_lost(0.5)


        with Partitions(engine, "orders", 64).join(serve, address="10.0.0.7:8000"):
            stop.wait()

    Keys are hashed to a fixed number of partitions. Partition `i` of `NAME` is the lease `NAME/i`, with a separate token series.
    Workers may join, leave and crash at any time. The partitions are divided evenly among the workers that are alive, and no more
    partitions move than necessary. A worker releases a partition when its function has returned, and another worker can then take
    it.

    Guarantees: at most one owner of a partition has its newest token. A transaction of `lease.begin()` that begins after another
    worker took the partition is rejected, and the new owner waits at the gate for a transaction that was already open, so the
    writes of a key are in order. The partitions of a worker that crashes are owned by other workers after at most two TTLs,
    provided that other workers are alive and own fewer than their even share.

    Limitations: a function that does not return is not stopped. After a TTL, another worker takes its partition, and only writes
    inside `lease.begin()` are rejected. Calls to services that do not check the token may overlap. The numbers of partitions that
    two workers own may differ by more than one while partitions move. A worker that crashes and joins again immediately counts as
    a new one, so some partitions move twice. A `Lease` with the name `NAME/i` blocks that partition.

    Args:
        engine: an Engine, or a function that returns one. The tables must exist in version 5 or later; run `pgfence install`.
        name: text, at most 250 characters with its namespace; it must not end in `#` or `/` followed by digits.
        count: how many partitions there are, from 1 to 1,000. Choose several times the number of workers. The first worker
            stores the number; see `resize`.
        hash: how a key is assigned to a partition; see `partition_for`. The first worker stores it.
        ttl: seconds after which a dead owner loses a partition, from 0.3 s to a day. The TTL is also the time that a function may
            take to stop.
        namespace: replaces the configured namespace.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; the message gives the range.
    """

    def __init__(
        self,
        engine: EngineSource,
        name: str,
        count: int,
        *,
        hash: Literal["sha256", "murmur2"] = "sha256",  # noqa: A002  # the public name
        ttl: Seconds = 15,
        namespace: str | None = None,
    ) -> None:
        self._options = _Options(engine, name, count, hash=hash, ttl=ttl, namespace=namespace)

    def partition_for(self, key: str) -> int:
        """Return the partition of a key, from 0 to `count - 1`, without a request to the server; see `pgfence.partition_for`.

        Raises:
            TypeError: the key is not a str.
            ValueError: the key contains NUL or a lone surrogate.
        """
        return self._options.choose_partition(key)

    def owner_of(self, partition: int) -> Holder | None:
        """Return the worker that owns a partition, with the `address` that it passed to `join`, or None if no worker owns it.

        This takes one round trip. The owner may have changed before you use it, so the worker itself must write inside
        `lease.begin()`.

        Raises:
            ValueError: there is no such partition; or another number of partitions or another hash is stored.
            TypeError: the partition is not an int.
            UnreachableError: the server cannot be reached.
            SchemaError, StandbyError, UnsupportedServerError: the same as for `Lease.acquire`.
        """
        return run_sync(self._options.find_owner, partition)

    def resize(self, count: int) -> None:
        """Change the number of partitions, for all processes. Stop all workers first.

        Workers that still use the old number raise ValueError. Most keys move to another partition, so the tokens of all
        partitions are increased, and no former owner can commit after the resize.

        Args:
            count: how many partitions there are from now on, from 1 to 1,000.

        Raises:
            LockTimeoutError: a partition is owned, and the message names its owner; or a transaction of a former owner is
                still open. Nothing was done.
            ValueError, TypeError: `count` is not a valid number.
            ValueError: another hash is stored. Nothing was done.
            UnreachableError: the server did not respond; resizing again is safe.
            SchemaError, StandbyError, UnsupportedServerError: the same as for `Lease.acquire`.
        """
        run_sync(self._options.change_count, count)

    def join(
        self, serve: Callable[[int, HeldLease], object], /, *, owner: str | None = None, address: str | None = None
    ) -> Worker:
        """Join as a worker, which owns a share of the partitions until it leaves.

        `serve(partition, lease)` is called for each partition that this worker owns, on a separate thread. `lease.lost` becomes
        True when the partition is to move to another worker, when this worker leaves, and when the lease is lost. `serve` must
        return soon after that. `lease.wait_lost(seconds)` is a pause that ends early in these cases. After a loss,
        `lease.begin()` raises LockLostError or StaleFencingTokenError, which `serve` may let propagate.

        Other exceptions of `serve` are logged to `pgfence.partitions`. The partition is then released, and this worker takes it
        again after 2 seconds at the earliest; the pause doubles with each further error, up to a minute. After an eviction,
        and if the function returns although its partition was not lost, the pause is one second.

        If the server is unreachable or the tables are missing, the call raises no error. The problem is logged, and the worker
        tries again. A worker whose function has not returned one TTL after a loss gives up all its partitions until the function
        returns.

        Args:
            serve: the function that does the work of one partition.
            owner: the name that operators see for the worker; None means the host name and the process id.
            address: where other processes can reach this worker; `owner_of` returns it.

        Raises:
            TypeError: `serve` is a coroutine function, or `owner` or `address` is not a str.
        """
        reject_coroutine(serve, "a Worker runs it in a thread. Use AsyncPartitions")
        return Worker(self._options.with_owner(owner, address), serve)

    def __repr__(self) -> str:
        return f"<Partitions {self._options.describe()}>"


class Worker:
    """A worker that owns a share of the partitions. Call `leave`, or use the worker as a context manager."""

    def __init__(self, options: _Options, serve: Callable[[int, HeldLease], object]) -> None:
        self._serve = serve
        self._serving: set[threading.Thread] = set()
        self._balancer = Balancer(options, THREADS, self._call, self._start_work)
        self._thread = threads.start("pgfence-worker", run_sync, self._balancer.run_worker)

    async def _call(self, partition: int, lease: PartitionLease) -> None:
        self._serve(partition, lease)

    def _start_work(self, work: Callable[[], Coro[None]], done: Callable[[], None]) -> None:
        def run() -> None:
            self._serving.add(threading.current_thread())
            try:
                run_sync(work)
            finally:
                self._serving.discard(threading.current_thread())
                done()

        threads.start("pgfence-partition", run)

    @property
    def owned(self) -> Mapping[int, HeldLease]:
        """The partitions that this worker owns now, with their leases, as far as this process knows."""
        return self._balancer.list_owned()

    def leave(self) -> None:
        """Give up all partitions and stop being a worker.

        The method returns when all calls of `serve` have returned; a second call does nothing.

        If `serve` itself calls this method, it returns immediately, and the worker leaves afterwards.

        Raises:
            ValueError: the worker had already ended, because another number of partitions or another hash is stored.
        """
        self._balancer.end()
        # A listener of events may be called on the worker's own thread.
        if threading.current_thread() not in (self._thread, *self._serving):
            self._thread.wait_ended()
            if self._balancer.error is not None:
                raise self._balancer.error

    def __enter__(self) -> Self:
        """Wait until the worker has taken its share of the free partitions, or has found that it cannot reach the server.

        Raises:
            ValueError: another number of partitions or another hash is stored.
        """
        try:
            run_sync(self._balancer.started.wait, math.inf)
            if self._balancer.error is not None:
                raise self._balancer.error
        except BaseException:  # the block is not entered, so nothing would end the worker
            self._balancer.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        try:
            self.leave()
        except ValueError:
            if exc is None:
                raise
