"""`AsyncIdempotentEffect`: effects outside the database, for asyncio."""

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
    """Do something outside the database once, however often it is requested. The async counterpart of `IdempotentEffect`.

    Guarantees, arguments and errors are the same as for `IdempotentEffect`, except that the engine is an AsyncEngine and the work
    is a coroutine function. The heartbeat runs in a dedicated thread, so that a blocked event loop does not cause the loss of the
    claim. After a cancellation, the outcome is unknown, except that a result is stored even if the cancellation arrives while it
    is being stored.
    """

    _engines = ASYNC_ENGINES

    async def run(self, fn: Callable[[AsyncAttempt], Awaitable[T]], /) -> T:
        """Run a coroutine function in a new attempt, or return the stored result; see `IdempotentEffect.run`.

        Args:
            fn: called with the attempt.

        Raises:
            TypeError: `fn` is a generator function.
            Exception: the other errors of `IdempotentEffect.run`.
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
