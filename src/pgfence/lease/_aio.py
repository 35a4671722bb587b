"""`AsyncLease`: locks that expire and have a fencing token, for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._api.inputs import AsyncEngineSource
from pgfence._api.locks import AsyncLockBase
from pgfence.fence.handles import AsyncHeldLease
from pgfence.lease._engines import ASYNC_ENGINES
from pgfence.lease._request import LeaseOptions, adopt

if TYPE_CHECKING:
    from pgfence._process.clock import Seconds
    from pgfence.types import Holder, LeaseRef


class AsyncLease(LeaseOptions[AsyncEngineSource, AsyncHeldLease], AsyncLockBase[AsyncHeldLease]):
    """Hold a lock that expires and has a fencing token. The async counterpart of `Lease`.

    Guarantees, limitations, arguments and errors are the same as for `Lease`, except that the engine is an AsyncEngine. The
    heartbeat runs in a dedicated thread, so that a blocked event loop does not cause the loss of the lease. By default, a loss
    cancels the block of `hold()`.
    """

    _engines = ASYNC_ENGINES
    _handle = AsyncHeldLease

    async def try_acquire(self) -> AsyncHeldLease | None:
        """Try once to acquire the lease, without waiting. This takes one round trip on an open connection.

        Returns None if the lease is held, even by this task, or if a `min_hold` or a `lock_delay` has not passed. A try never
        waits for the lease, so it cannot deadlock.

        Raises:
            PgfenceError: the same errors as `acquire`, except LockTimeoutError and SelfDeadlockError.
        """
        return await self._take(0.0)

    async def acquire(self, *, timeout: Seconds | None = None) -> AsyncHeldLease:
        """Acquire the lease, waiting until it is free or the timeout has passed.

        Args:
            timeout: seconds to wait. None means the configured default (at most 60 s while this task holds another lease or a
                session lock), `math.inf` waits indefinitely, and 0 does not wait. A wait continues through a server outage
                until its timeout. With None, it does so only if the server had already responded that the lease is held.

        Raises:
            LockTimeoutError: the lease did not become free in time, and the message and `holders` name the holder, if there is
                one; or all connections for leases were in use.
            SelfDeadlockError: this task holds the lease, or waiting would deadlock within this process. Not raised with
                `timeout=0`.
            UnreachableError: the server cannot be reached, or the call does not wait and all connections for leases are in use.
                If the response to a grant was lost, that grant is released in the background.
            SchemaError: the tables are missing or too old, or this role may not use them.
            StandbyError, UnsupportedServerError: no lease can be written on this server.
        """
        return await self._acquire(timeout)

    @staticmethod
    async def adopt(engine: AsyncEngineSource, ref: LeaseRef) -> AsyncHeldLease:
        """Adopt a lease that another process handed over. This process renews the lease from now on.

        A reference can be used only once, and a second `adopt` raises LockLostError.

        Args:
            engine: an AsyncEngine, or a function that returns one.
            ref: the reference that `hand_over()` returned.

        Raises:
            LockLostError: the lease has expired, was evicted or already adopted, or its `max_hold` has passed.
            TypeError, ValueError: `ref` is not a valid reference.
            UnreachableError, SchemaError, StandbyError, UnsupportedServerError: the same as for `acquire`.
        """
        return await adopt(ASYNC_ENGINES, engine, ref, AsyncHeldLease, "AsyncLease.adopt")

    async def holders(self) -> list[Holder]:
        """Return the current holder, as the server reports it, or an empty list if there is none. This takes no lock.

        During a `min_hold` after a release, and during a `lock_delay`, there is no holder, although no process can acquire the
        lease.

        Raises:
            UnreachableError, SchemaError, StandbyError, UnsupportedServerError: the same as for `acquire`.
        """
        return await self._find_holders()
