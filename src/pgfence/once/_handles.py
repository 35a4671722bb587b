"""What the one who runs a slot has in hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgfence.fenced_handles import AsyncHeldLease, HeldLease

if TYPE_CHECKING:
    from datetime import datetime

    from pgfence._runtime.grant import Grant


def _slot(grant: Any) -> datetime:
    slot: datetime = grant.slot
    return slot


class Slot(HeldLease):
    """A slot that is being run, by this process alone.

    Left without an exception, or released, it is done and never runs again. Left by an exception it is free for another
    attempt at once; abandoned or lost, when its TTL is over. Not promised: that a run which died left nothing behind.
    """

    __slots__ = ()

    @property
    def slot(self) -> datetime:
        """Which slot: its beginning, the same for every attempt and on every host. No I/O."""
        return _slot(self._hold)

    @property
    def resumed(self) -> bool:
        """Whether an earlier attempt at this slot was not finished. No I/O."""
        return _resumed(self._hold)

    def release(self) -> None:
        """Say that the slot is done.

        Raises:
            LockLostError: it had been lost: the slot is not done, another one may try.
            LockNotHeldError: it was released before, or this is a forked child.
        """
        self._hold.done = True
        super().release()

    def _leave(self, exc: BaseException | None, *, flag: bool) -> None:
        self._hold.done = exc is None
        super()._leave(exc, flag=flag)


class AsyncSlot(AsyncHeldLease):
    """A slot that is being run, by this process alone; see `Slot`."""

    __slots__ = ()

    @property
    def slot(self) -> datetime:
        """Which slot: its beginning, the same for every attempt and on every host. No I/O."""
        return _slot(self._hold)

    @property
    def resumed(self) -> bool:
        """Whether an earlier attempt at this slot was not finished. No I/O."""
        return _resumed(self._hold)

    async def release(self) -> None:
        """Say that the slot is done.

        Raises:
            LockLostError: it had been lost: the slot is not done, another one may try.
            LockNotHeldError: it was released before, or this is a forked child.
        """
        self._hold.done = True
        await super().release()

    async def _leave(self, exc: BaseException | None, *, flag: bool) -> None:
        self._hold.done = exc is None
        await super()._leave(exc, flag=flag)


def _resumed(grant: Grant) -> bool:
    return grant.attempt > 1
