"""`AsyncRateLimit`: rate limits for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._api.inputs import AsyncEngineSource
from pgfence.lease._engines import ASYNC_ENGINES
from pgfence.rate_limit._request import RateLimitOptions

if TYPE_CHECKING:
    from pgfence._process.clock import Seconds


class AsyncRateLimit(RateLimitOptions[AsyncEngineSource]):
    """Allow at most `limit` units in any window of `per` seconds, across all processes; see `RateLimit`.

    Guarantees, limitations, arguments and errors are the same as for `RateLimit`, except that the engine is an AsyncEngine.
    """

    _engines = ASYNC_ENGINES

    async def try_take(self, n: int = 1) -> bool:
        """Take `n` units if they are allowed now, and return whether they were; errors are the same as for the sync class."""
        return await self._try(n)

    async def wait(self, n: int = 1, *, timeout: Seconds | None = None) -> None:
        """Take `n` units, waiting until they are allowed; arguments and errors are the same as for the sync class."""
        await self._wait(n, timeout)

    async def change(self, *, limit: int | None = None, per: Seconds | None = None) -> None:
        """Change the limit or the period, for all processes; arguments and errors are the same as for the sync class."""
        await self._change(limit, per)
