"""`AsyncSemaphore`: at most N holders of one name at a time, for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._api.inputs import AsyncEngineSource
from pgfence._api.locks import AsyncLockBase
from pgfence.lease._engines import ASYNC_ENGINES
from pgfence.semaphore._handles import AsyncPermit
from pgfence.semaphore._request import SemaphoreOptions

if TYPE_CHECKING:
    from pgfence._process.clock import Seconds
    from pgfence.types import Holder


class AsyncSemaphore(SemaphoreOptions[AsyncEngineSource, AsyncPermit], AsyncLockBase[AsyncPermit]):
    """Admit at most `permits` holders of one name at a time, across all processes; see `Semaphore`.

    Guarantees, limitations, arguments and errors are the same as for `Semaphore`, except that the engine is an AsyncEngine. The
    heartbeat runs in a dedicated thread. A loss cancels the block of `hold()`.
    """

    _engines = ASYNC_ENGINES
    _handle = AsyncPermit

    async def try_acquire(self) -> AsyncPermit | None:
        """Try once to acquire as many permits as the weight, without waiting. This takes one round trip on an open connection.

        Returns None if too few permits are free.

        Raises:
            PgfenceError, ValueError: the same errors as `acquire`, except LockTimeoutError and SelfDeadlockError.
        """
        return await self._take(0.0)

    async def acquire(self, *, timeout: Seconds | None = None) -> AsyncPermit:
        """Acquire as many permits as the weight, waiting for them until the timeout; see `Semaphore.acquire`."""
        return await self._acquire(timeout)

    async def holders(self) -> list[Holder]:
        """Return the current holders of permits, one entry for each permit, oldest first.

        The name of an entry is that of the permit's row, `NAME#i`, which `monitoring.evict` accepts.

        Raises:
            UnreachableError, SchemaError, StandbyError, UnsupportedServerError: the same as for `acquire`.
        """
        return await self._find_holders()

    async def resize(self, permits: int) -> None:
        """Change the number of permits, for all processes; arguments and errors are the same as for the sync class."""
        await self._resize(permits)
