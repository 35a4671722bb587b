"""`AsyncOnce`: work that is done once in each slot of time, for asyncio."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal, ParamSpec, overload

from pgfence._api.inputs import AsyncEngineSource
from pgfence._api.locks import AsyncLockBase
from pgfence.lease._engines import ASYNC_ENGINES
from pgfence.once._handles import AsyncSlot
from pgfence.once._request import OnceOptions, R, list_rounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence._api.decorators import AsyncWrap, AsyncWrapSkip, Busy, Unreachable
    from pgfence._process.clock import Seconds
    from pgfence._process.coroutines import Coro
    from pgfence.errors import LockTimeoutError
    from pgfence.types import Holder

P = ParamSpec("P")


class AsyncOnce(OnceOptions[AsyncEngineSource, AsyncSlot], AsyncLockBase[AsyncSlot]):
    """Run work once in each slot of time, in the process that requests the slot first. The async counterpart of `Once`.

    ::

        @AsyncOnce(engine, "digest", cron="0 7 * * *", tz="Europe/Vienna").wrap()
        async def send_digest() -> int: ...

    Guarantees, limitations, arguments and errors are the same as for `Once`, except that the engine is an AsyncEngine. A run
    whose slot is lost is cancelled.
    """

    _engines = ASYNC_ENGINES
    _handle = AsyncSlot

    async def try_acquire(self) -> AsyncSlot | None:
        """Request the current slot, without waiting. This takes two round trips on an open connection, or one if the slot is done.

        Returns None if the slot is done or was missed, or if it is being run, even by this task.

        Raises:
            PgfenceError: the same errors as `acquire`, except SlotOverError, LockTimeoutError and SelfDeadlockError.
        """
        return await self._try()

    async def acquire(self, *, timeout: Seconds | None = None) -> AsyncSlot:
        """Request the current slot, and wait while another process runs it, because that attempt may fail.

        Args:
            timeout: seconds to wait. None means the configured default (at most 60 s while this task holds a lease or a session
                lock), `math.inf` waits indefinitely, and 0 does not wait. A wait continues through a server outage until its
                timeout. With None, it does so only if the server had already responded that the slot is held.

        Raises:
            SlotOverError: the slot is done or was missed. This error is raised immediately. `retry_after` is the number of
                seconds until the next slot.
            SlotClockError: the slot is done although, by the server's clock, it has not begun. This is a subclass of
                `SlotOverError`.
            SlotZoneError: the server, or the host that ran the last slot, has different rules for `tz` than this host.
            SelfDeadlockError: this task is running a slot of this name, or waiting would deadlock within this process. Not raised
                with `timeout=0`.
            LockTimeoutError: another holder had the slot until the timeout. The message and `holders` name the holder.
            UnreachableError: the server cannot be reached, or the call does not wait and all connections for leases are in use.
                If the response to a grant was lost, that grant is released in the background.
            SchemaError: the tables are missing or too old, or this role may not use them.
            StandbyError, UnsupportedServerError: no slot can be written on this server.
        """
        return await self._acquire(timeout)

    @overload  # type: ignore[override]  # here skipping is the default
    def wrap(
        self, *, timeout: Seconds | None = None, busy: Literal["skip"] = "skip", unreachable: Unreachable = "raise"
    ) -> AsyncWrapSkip: ...
    @overload
    def wrap(
        self,
        *,
        timeout: Seconds | None = None,
        busy: Literal["raise"],
        unreachable: Literal["raise", "run"] = "raise",
    ) -> AsyncWrap: ...
    @overload
    def wrap(
        self,
        *,
        timeout: Seconds | None = None,
        busy: Callable[[LockTimeoutError], BaseException],
        unreachable: Literal["raise", "run"] = "raise",
    ) -> AsyncWrap: ...
    def wrap(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *, timeout: Seconds | None = None, busy: Busy = "skip", unreachable: Unreachable = "raise"
    ) -> object:
        """Return a decorator that runs a function once in each slot. Further calls in the same slot return None.

        With `catch_up="all"`, the function runs once for each slot that is due, and the last result is returned.
        `pgfence.current(AsyncSlot).slot` is the slot that is being run. Otherwise, this method works like `wrap` of a lock,
        except that `busy="skip"` is the default.
        """
        once = super().wrap(timeout=timeout, busy=busy, unreachable=unreachable)  # type: ignore[arg-type]
        if self._catch_up != "all":
            return once
        lenient: Unreachable = "raise" if unreachable == "raise" else "skip"
        further = super().wrap(busy="skip", unreachable=lenient)

        def decorate(fn: Callable[P, Coro[R]]) -> Callable[P, Coro[R | None]]:
            once(fn)  # This raises an error now if the function cannot be wrapped.

            @functools.wraps(fn)
            async def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
                results: list[R] = []

                @functools.wraps(fn)
                async def note(*args: P.args, **kwargs: P.kwargs) -> None:
                    results.append(await fn(*args, **kwargs))

                for guard in list_rounds(results, once, further):
                    await guard(note)(*args, **kwargs)
                return results[-1] if results else None

            return call

        return decorate

    async def holders(self) -> list[Holder]:
        """Return the holders that are running slots of this name, as the server reports them, without taking a lock.

        Raises:
            UnreachableError, SchemaError, StandbyError, UnsupportedServerError: the same as for `acquire`.
        """
        return await self._find_holders()
