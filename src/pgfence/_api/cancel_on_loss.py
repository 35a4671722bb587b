"""Cancel the block of a task when its lock is lost, and distinguish this cancellation from a cancellation by other code."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pgfence._holds.carriers import run_on_loop

if TYPE_CHECKING:
    from types import TracebackType

    from pgfence._api.handles import AsyncHeld


class CancelOnLoss:
    """An async block that is cancelled when its lock is lost, and then raises LockLostError."""

    _handle: AsyncHeld
    _requests: int

    def __init__(self, *, flag: bool = False) -> None:
        self._flag = flag
        self._cancelled = False
        self._task: asyncio.Task[object] | None = None

    def start(self, handle: AsyncHeld) -> None:
        """Cancel the running task's block when the lock of this handle is lost."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an async hold() must be entered in an asyncio task")
        self._handle = handle
        self._task = task
        self._cancelled = False
        self._requests = task.cancelling()
        if not self._flag:
            handle._hold.subscribe(lambda: run_on_loop(task.get_loop(), lambda: self._cancel(handle, task)))

    async def __aenter__(self) -> AsyncHeld:
        return self._handle

    def _cancel(self, handle: AsyncHeld, task: asyncio.Task[object]) -> None:
        if self._handle is handle and not handle._hold.released:
            self._cancelled = True
            task.cancel("the lock was lost")

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        # The event loop runs nothing else before the release below, which ends the subscription.
        if not self._cancelled:
            await self._handle._end_block(exc, flag=self._flag)
            return
        cancel = exc if isinstance(exc, asyncio.CancelledError) else await _count_pending_cancels()
        if self._task is not None and self._task.uncancel() <= self._requests:
            try:
                await self._handle._end_block(None if cancel is exc else exc, flag=False)
            except Exception as error:
                raise error from exc
            return
        # Other code cancelled the task too, and that cancellation must propagate.
        await self._handle._end_block(cancel or exc, flag=self._flag)
        if cancel is not None and cancel is not exc:
            raise cancel


async def await_work(task: asyncio.Task[object], handle: AsyncHeld) -> None:
    """Await the work of a holder, and cancel it if the lock is lost.

    The cancellation that a loss causes does not propagate. A cancellation of the calling task does.
    """
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        if not task.cancelling():  # cancelling again would interrupt its clean-up
            task.cancel()

    handle._hold.subscribe(lambda: run_on_loop(loop, cancel))
    try:
        await task
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        # The loss cancels only the work. If the caller was cancelled too, that cancellation must propagate.
        if caller is None or caller.cancelling() or not handle.lost:
            raise


async def _count_pending_cancels() -> asyncio.CancelledError | None:
    """Return the cancellation that is pending at the end of the block, or None.

    If it were not collected here, the task would raise it at its next await, outside the block.
    """
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError as cancel:
        return cancel
    return None
