"""Lease, for tasks."""

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
    """A lock that expires: it lives in a row of the database, not in a connection, and brings a fencing token; see `Lease`.

    Guarantees, arguments and errors are those of `Lease`, with an AsyncEngine. The heartbeat runs on a dedicated thread, so
    that a blocked loop does not lose the lease; a loss cancels the block of `hold()`.
    """

    _engines = ASYNC_ENGINES
    _handle = AsyncHeldLease

    async def try_acquire(self) -> AsyncHeldLease | None:
        """Try once, without waiting. One round trip on a warm connection.

        Returns None if it is held, also by this same task: a try cannot deadlock.

        Raises:
            PgfenceError: as `acquire`.
        """
        return await self._take(0.0)

    async def acquire(self, *, timeout: Seconds | None = None) -> AsyncHeldLease:
        """Wait until it is held.

        Args:
            timeout: seconds; None is the configured default, `math.inf` waits without a limit, 0 does not wait. A wait lasts
                through an outage of the server, up to its timeout; with None only once the server has responded that the lease
                is held.

        Raises:
            LockTimeoutError: it was not free in time; names the holder.
            SelfDeadlockError: this task holds it, or waiting would close a cycle inside this process. Not with `timeout=0`.
            UnreachableError: the server cannot be reached; a grant whose response was lost is given back in the background.
            SchemaError: the tables are missing, too old, or not open to this role.
            StandbyError, UnsupportedServerError: no lease can be written on this server.
        """
        return await self._acquire(timeout)

    @staticmethod
    async def adopt(engine: AsyncEngineSource, ref: LeaseRef) -> AsyncHeldLease:
        """Take over a lease that another process handed over; from now on it is renewed here.

        A reference works once: a second `adopt` raises LockLostError.

        Args:
            engine: an AsyncEngine, or a function that returns one.
            ref: what `hand_over()` returned.

        Raises:
            LockLostError: it has expired, was adopted already, or was evicted.
            TypeError, ValueError: it is not a reference.
            PgfenceError: as `acquire`.
        """
        return await adopt(ASYNC_ENGINES, engine, ref, AsyncHeldLease, "AsyncLease.adopt")

    async def holders(self) -> list[Holder]:
        """Return who holds it at this moment, as the server sees it. Looking never takes a lock.

        Raises:
            UnreachableError: there is no server.
            SchemaError: the tables are missing.
        """
        return await self._find_holders()
