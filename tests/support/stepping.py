"""Coroutines cancelled at a chosen suspension, once or twice in a row."""

from __future__ import annotations

import asyncio
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Stepper:
    """Runs a coroutine and cancels its task at the n-th suspension, and again at the next ones."""

    def __init__(self, at: int, times: int) -> None:
        self.at, self.times, self.count = at, times, 0

    @types.coroutine
    def drive(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Pass everything on, and cancel at the chosen moments."""
        steps = coroutine.__await__()
        outcome: tuple[Callable[[Any], Any], Any] = (steps.send, None)
        while True:
            try:
                future = outcome[0](outcome[1])
            except StopIteration as stop:
                return stop.value
            if self.at <= self.count < self.at + self.times:
                asyncio.current_task().cancel()
            self.count += 1
            try:
                outcome = (steps.send, (yield future))
            except BaseException as error:
                outcome = (steps.throw, error)


async def stepped(work: Callable[[], Coroutine[Any, Any, Any]], at: int, times: int) -> tuple[bool, int]:
    """Run work cancelled at a suspension. Returns whether it ended as cancelled, and how many suspensions there were."""
    stepper = Stepper(at, times)

    async def main() -> None:
        await stepper.drive(work())

    task = asyncio.create_task(main())
    await asyncio.wait([task])
    if task.cancelled():
        return True, stepper.count
    error = task.exception()
    if error is not None:
        raise error
    return False, stepper.count


async def at_every_step(
    work: Callable[[], Coroutine[Any, Any, Any]], check: Callable[[], Coroutine[Any, Any, Any]], most: int = 60
) -> int:
    """Cancel work at each of its suspensions in turn, once and twice, checking after each. Returns how many there are."""
    for times in (1, 2):
        for at in range(most):
            cancelled, count = await stepped(work, at, times)
            await check()
            if not cancelled and at >= count:
                break
        else:
            raise AssertionError(f"more than {most} suspensions")
        assert at > 0, "nothing was cancelled, because the work was never suspended"
    return at


async def quitting_in_line(
    acquire: Callable[[], Coroutine[Any, Any, Any]], check: Callable[[], Coroutine[Any, Any, Any]], patience: float
) -> None:
    """Cancel a contender behind a neighbour, also in the moment of the hand-over: the one after it has to be served.

    Args:
        acquire: of the same engine each time; returns a handle.
        check: awaited each time when all is given back.
        patience: seconds that the one after it may take.
    """
    for pause in (None, 0, 0, 0, 0.001):
        for times in (1, 2):
            held = await acquire()
            quitter = asyncio.create_task(acquire())
            patient = asyncio.create_task(acquire())
            await asyncio.sleep(0.001)
            if pause is None:
                quitter.cancel()
                await asyncio.sleep(0)
            await held.release()
            if pause is not None:
                for _ in range(times):
                    quitter.cancel()
                    await asyncio.sleep(pause)
            await asyncio.wait([quitter])
            if not quitter.cancelled():
                await quitter.result().release()
            served = await asyncio.wait_for(patient, patience)
            assert served.state == "held"
            await served.release()
            await check()
