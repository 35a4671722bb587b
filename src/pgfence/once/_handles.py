"""What the one who runs a slot has in hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pgfence.fence.handles import AsyncHeldLease, HeldLease, _Leased

if TYPE_CHECKING:
    from datetime import datetime

_NOT_HANDED_ON = (
    "a slot is finished by the process that runs it and cannot be handed over: do the work here, or take a Lease for it and"
    " hand that over"
)


class _Slotted(_Leased):
    """What both twins of a slot share."""

    __slots__ = ()

    @property
    def slot(self) -> datetime:
        """The beginning of the slot, the same for each attempt and on each host, without I/O."""
        slot = self._grant.slot
        assert slot is not None
        return slot

    @property
    def resumed(self) -> bool:
        """Whether an earlier attempt at this slot was not finished. No I/O."""
        return self._grant.attempt > 1

    async def _release(self) -> None:
        self._grant.done = True
        await super()._release()

    async def _end_block(self, exc: BaseException | None, *, flag: bool) -> None:
        self._grant.done = exc is None
        await super()._end_block(exc, flag=flag)


class Slot(_Slotted, HeldLease):
    """A slot that is being run, by this process alone.

    Left without an exception, or released, it is done and never runs again. Left by an exception it is free for another
    attempt at once; abandoned or lost, when its TTL is over. Limitations: a run that died may have left something behind.
    """

    __slots__ = ()

    def release(self) -> None:
        """Say that the slot is done.

        Raises:
            LockLostError: it had been lost: the slot is not done, another one may try.
            LockNotHeldError: it was released before, or this is a forked child.
        """
        super().release()

    def hand_over(self) -> NoReturn:
        """Raise: a process that adopted the lease could not mark the slot as done, and it would run again.

        Raises:
            TypeError: always.
        """
        raise TypeError(_NOT_HANDED_ON)


class AsyncSlot(_Slotted, AsyncHeldLease):
    """A slot that is being run, by this process alone; see `Slot`."""

    __slots__ = ()

    async def release(self) -> None:
        """Say that the slot is done; errors are those of the sync twin."""
        await super().release()

    async def hand_over(self) -> NoReturn:
        """Raise: a process that adopted the lease could not mark the slot as done, and it would run again.

        Raises:
            TypeError: always.
        """
        raise TypeError(_NOT_HANDED_ON)
