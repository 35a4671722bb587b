"""AsyncIdempotentEffect, for tasks."""

from __future__ import annotations

from inspect import isawaitable
from typing import TYPE_CHECKING

from pgfence._api.inputs import AsyncEngineSource, reject_generator
from pgfence.effects._claim import StoredResult
from pgfence.effects._handles import AsyncAttempt
from pgfence.effects._request import EffectOptions, T
from pgfence.lease._engines import ASYNC_ENGINES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class AsyncIdempotentEffect(EffectOptions[AsyncEngineSource, T]):
    """Do something outside of the database once, however often it is asked for; see `IdempotentEffect`.

    Promises, arguments and errors are those of the sync twin, with an AsyncEngine and a coroutine function. The heartbeat is a
    thread of its own, so a blocked loop cannot lose the claim. A cancel is an end of which nobody knows what was done; one that
    arrives while the result is being stored does not keep it from being stored.
    """

    _engines = ASYNC_ENGINES

    async def run(self, fn: Callable[[AsyncAttempt], Awaitable[T]], /) -> T:
        """Run a coroutine function in an attempt of its own, or return what came of the one that was first; see the sync twin.

        Args:
            fn: gets the attempt.

        Raises:
            PgfenceError: as from the sync twin.
        """
        reject_generator(fn)
        self._check_function(fn)
        running = await self._claim()
        if isinstance(running, StoredResult):
            return self._replay(running)
        attempt = AsyncAttempt(running, self._codec, self._check_function)
        try:
            returned: Awaitable[T] | T = fn(attempt)
            value = await returned if isawaitable(returned) else returned
        except BaseException as error:
            await self._fail(attempt, error)
            raise
        return await self._succeed(attempt, value)
