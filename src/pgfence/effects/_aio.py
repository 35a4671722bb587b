"""AsyncIdempotentEffect, for tasks."""

from __future__ import annotations

from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from pgfence._api.contexts import attach
from pgfence._api.inputs import AsyncEngineSource, check_async_engine_source, reject_generator
from pgfence.effects._attempts import WHY, StoredResult, claim_async
from pgfence.effects._ends import kind_of
from pgfence.effects._handles import NOTHING, AsyncAttempt
from pgfence.effects._request import EffectOptions, T

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pgfence.effects._attempts import AsyncRunning


class AsyncIdempotentEffect(EffectOptions[AsyncEngineSource, T]):
    """Do something outside of the database once, however often it is asked for; see `IdempotentEffect`.

    Promises, arguments and errors are those of the sync twin, with an AsyncEngine and a coroutine function. The heartbeat is a
    thread of its own, so a blocked loop cannot lose the claim. A cancel is an end of which nobody knows what was done; one that
    arrives while the result is being stored does not keep it from being stored.
    """

    @staticmethod
    def _check_engine(engine: object, what: str) -> AsyncEngineSource:
        return check_async_engine_source(engine, what, WHY)

    async def run(self, fn: Callable[[AsyncAttempt], Awaitable[T]], /) -> T:
        """Run a coroutine function in an attempt of its own, or return what came of the one that was first; see the sync twin.

        Args:
            fn: gets the attempt.

        Raises:
            PgfenceError: as from the sync twin.
        """
        reject_generator(fn)
        self._expect(fn)
        found = await claim_async(self._engine, self._wanted, self._timeout)
        if isinstance(found, StoredResult):
            return self._replay(found)
        attempt = AsyncAttempt(found, self._codec, self._expect)
        try:
            given: Any = fn(attempt)
            value: T = await given if isawaitable(given) else given
            if attempt._completed is not NOTHING:
                return await self._confirmed(attempt, found)
            text = self._encoded(value, attempt)
        except BaseException as error:
            await self._failed(attempt, error)
            raise
        await found.finish("done", text)
        return value

    async def _confirmed(self, attempt: AsyncAttempt, running: AsyncRunning) -> T:
        if not await running.confirm():
            raise self._uncommitted(attempt)
        value: T = attempt._completed
        return value

    async def _failed(self, attempt: AsyncAttempt, error: BaseException) -> None:
        """End an attempt that did not come to a result. The error wins over what goes wrong here."""
        how, text = self._end_of(error, attempt)
        running, kind = attempt._running, kind_of(error)
        try:
            match how:
                case "record":
                    await running.finish("failed", text)
                    self._tell(error, attempt, how, running.recorded)
                case "free":
                    freed = await running.free()
                    self._tell(error, attempt, how, lambda what: running.freed(what, freed))
                case "lapse" if isinstance(error, Exception):
                    row = await running.lapse(kind)
                    self._tell(error, attempt, how, lambda what: running.lapsed(what, row))
                case "lapse":  # it must not be kept waiting
                    running.let_lapse(kind)
                    self._tell(error, attempt, how, running.lapsed)
                case "lost":
                    running.let_lapse()
        except Exception as failure:
            attach(error, failure, "while the attempt was ended")
