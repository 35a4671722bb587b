"""Wait for a condition, never for a length of time."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_PAUSE = 0.01
# Seconds. The machine may be busy with other things, so no call is judged by how fast it is: a test that compares a duration with this
# tells a call that ends by itself from one that hangs, or that waits for one of the defaults of 30 s.
FAR = 20


def eventually(condition: Callable[[], Any], deadline: float = FAR, *, pause: float = _PAUSE) -> Any:
    """Ask until the answer is true, and return it. In a coroutine this has to be awaited.

    Args:
        condition: a function; in a coroutine it may be a coroutine function.
        deadline: seconds.
        pause: seconds between two questions; longer where a long wait would cost the machine too many.

    Raises:
        AssertionError: it was not true in time.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return blocking(condition, deadline, pause)
    return _async(condition, deadline, pause)


def blocking(condition: Callable[[], Any], deadline: float = FAR, pause: float = _PAUSE) -> Any:
    """As `eventually`, for helpers that coroutines call too: it never has to be awaited and lets nothing else run."""
    end = time.monotonic() + deadline
    while not (result := condition()):
        _check(condition, end, deadline)
        time.sleep(pause)
    return result


async def _async(condition: Callable[[], Any], deadline: float, pause: float) -> Any:
    end = time.monotonic() + deadline
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        _check(condition, end, deadline)
        await asyncio.sleep(pause)


def _check(condition: Callable[[], Any], end: float, deadline: float) -> None:
    if time.monotonic() > end:
        raise AssertionError(f"not true within {deadline} s: {condition!r}")
