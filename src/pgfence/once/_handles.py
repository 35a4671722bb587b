"""Handles of slots that are being run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, final

from pgfence.fence.handles import AsyncHeldLease, HeldLease, _Leased

if TYPE_CHECKING:
    from datetime import datetime

_NOT_HANDED_ON = (
    "a slot is finished by the process that runs it and cannot be handed over: do the work here, or use a Lease for the"
    " work and hand the lease over"
)


class _Slotted(_Leased):
    """The common part of the sync and async slots."""

    __slots__ = ()

    @property
    def slot(self) -> datetime:
        """The beginning of the slot in UTC, the same for each attempt and on each host. Reading it does no I/O."""
        slot = self._grant.slot
        assert slot is not None
        return slot

    @property
    def resumed(self) -> bool:
        """Whether an earlier attempt at this slot did not finish. Reading it does no I/O."""
        return self._grant.attempt > 1

    async def _release(self) -> None:
        self._grant.done = True
        await super()._release()

    async def _end_block(self, exc: BaseException | None, *, flag: bool) -> None:
        self._grant.done = exc is None
        await super()._end_block(exc, flag=flag)


@final
class Slot(_Slotted, HeldLease):
    """A slot that this process alone is running.

    If its block ends without an exception, or it is released, the slot is done and never runs again. If the block raises, another
    attempt may begin immediately. After a crash or a loss, another attempt may begin when the TTL has passed. A block that ends
    in `sys.exit()` counts as one that raised, even with exit code 0, because a signal handler may have called it partway through
    the work.

    Limitations: a run that died may have left partial work behind. If the server does not respond to the release, no error is
    raised, and the release is repeated in the background until the TTL has passed. If all of these attempts fail, the slot is not
    done and runs again.
    """

    __slots__ = ()

    def release(self) -> None:
        """Mark the slot as done, and release it.

        Raises:
            LockLostError: the slot had already been lost, so it is not done, and another attempt may run.
            LockNotHeldError: the handle was already released, or this is a forked child.
        """
        super().release()

    def hand_over(self) -> NoReturn:
        """Raise TypeError, because a process that adopted the slot could not mark it as done, so the slot would run again."""
        raise TypeError(_NOT_HANDED_ON)


@final
class AsyncSlot(_Slotted, AsyncHeldLease):
    """A slot that this process alone is running; see `Slot`."""

    __slots__ = ()

    async def release(self) -> None:
        """Mark the slot as done, and release it; errors are the same as for `Slot.release`."""
        await super().release()

    async def hand_over(self) -> NoReturn:
        """Raise TypeError, because a process that adopted the slot could not mark it as done, so the slot would run again."""
        raise TypeError(_NOT_HANDED_ON)
