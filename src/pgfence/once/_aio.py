"""Once, for tasks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, overload

from pgfence._api.inputs import AsyncEngineSource, check_async_engine_source
from pgfence._api.locks import AsyncLockBase
from pgfence._leases.manager import LeaseManager
from pgfence._leases.request import Refused, holder_of
from pgfence.lease._aio import manager_for
from pgfence.once._claim import SlotOverError, answer
from pgfence.once._handles import AsyncSlot
from pgfence.once._request import OnceOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence._api.decorators import AsyncWrap, AsyncWrapSkip, Busy, Unreachable
    from pgfence._process.clock import Seconds
    from pgfence.errors import LockTimeoutError
    from pgfence.once._claim import SlotRequest
    from pgfence.types import Holder


class AsyncOnce(OnceOptions[AsyncEngineSource], AsyncLockBase[AsyncSlot]):
    """Work that is done once in each slot of time, by whichever process comes first; see `Once`.

    ::

        @AsyncOnce(engine, "digest", cron="0 7 * * *", tz="Europe/Vienna").wrap()
        async def send_digest() -> int: ...

    Arguments and errors are those of the sync twin, with an AsyncEngine. A run whose slot is lost is cancelled.
    """

    _check_engine = staticmethod(check_async_engine_source)

    async def try_acquire(self) -> AsyncSlot | None:
        """Ask for the slot that counts, without waiting. Two round trips.

        Returns None if the slot is done, or if it is running, also in this very task.

        Raises:
            PgfenceError: as `acquire`.
        """
        manager, claim = self._place()
        try:
            return await manager.acquire(claim, 0.0, AsyncSlot)
        except Refused as refused:
            if isinstance(error := answer(refused), SlotOverError):
                return None
            raise error from None

    async def acquire(self, *, timeout: Seconds | None = None) -> AsyncSlot:
        """Ask for the slot that counts, and wait while somebody runs it: that attempt may fail.

        Args:
            timeout: seconds; None is the configured default, `math.inf` waits without a limit, 0 does not wait. A wait lasts
                through an outage of the server, up to its timeout; with None only once the server has responded that the slot
                is held.

        Raises:
            SlotOverError: the slot is done or was missed; raised at once. `retry_after` is the seconds to the next slot.
            SlotClockError: a `SlotOverError`; the slot that is done has not begun by the server's clock.
            SlotZoneError: the server, or the host that ran this slot, has other rules for `tz` than this host.
            LockTimeoutError: another process held it until the timeout; names the holder.
            UnreachableError: the server cannot be reached; a grant whose response was lost is given back in the background.
            SchemaError: the tables are missing, too old, or not open to this role.
            StandbyError, UnsupportedServerError: nothing can be written on this server.
        """
        manager, claim = self._place()
        try:
            slot = await manager.acquire(claim, timeout, AsyncSlot, lasts=timeout is not None)
        except Refused as refused:
            raise answer(refused) from None
        if slot is None:
            raise manager.begin_call(claim, 0.0).timed_out(await self._seen())
        return slot

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
    ) -> Any:
        """Return a decorator: the function runs once in each slot, and calls beyond that return None.

        With `catch_up="all"` it runs once for each slot that is due, and the last result is returned;
        `pgfence.current(AsyncSlot).slot` says which it is at. Otherwise as the `wrap` of a lock, but that `busy="skip"` is the
        default.
        """
        once: Any = super().wrap(timeout=timeout, busy=busy, unreachable=unreachable)  # type: ignore[arg-type]
        if self._catch_up != "all":
            return once
        lenient: Unreachable = "raise" if unreachable == "raise" else "skip"
        further: Any = super().wrap(busy="skip", unreachable=lenient)

        def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
            once(fn)  # what is wrong with it is told now

            @functools.wraps(fn)
            async def each(*args: Any, **kwargs: Any) -> Any:
                ran: list[Any] = []

                @functools.wraps(fn)
                async def note(*args: Any, **kwargs: Any) -> None:
                    ran.append(await fn(*args, **kwargs))

                await once(note)(*args, **kwargs)
                before = 0
                while len(ran) > before:
                    before = len(ran)
                    await further(note)(*args, **kwargs)
                return ran[-1] if ran else None

            return each

        return decorate

    async def holders(self) -> list[Holder]:
        """Return who runs a slot of this name at this moment, as the server sees it. Looking never takes a lock.

        Raises:
            UnreachableError: there is no server.
            SchemaError: the tables are missing.
        """
        manager, claim = self._place()
        row = await manager.look(claim.place, claim.stored)
        return [] if row is None else [holder_of(claim, row)]

    def _place(self) -> tuple[LeaseManager, SlotRequest]:
        manager, place = manager_for(self._engine, type(self).__name__, LeaseManager)
        return manager, self._claim(place, manager.config.namespace)
