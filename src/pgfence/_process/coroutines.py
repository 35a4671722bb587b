"""One text for threads and tasks: a coroutine that never suspends is a function."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

Coro: TypeAlias = Coroutine[Any, Any, R]
"""What calling an `async def` function returns: a coroutine whose result is an R."""


def run_sync(function: Callable[P, Coro[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a coroutine function to its end on this thread, where everything that it awaits blocks instead of suspending.

    Raises:
        RuntimeError: it suspended; only a carrier of tasks may do that.
    """
    # Called here and not by the caller: an interrupt in between would leave a coroutine that was never awaited.
    steps = function(*args, **kwargs)
    try:
        steps.send(None)
    except StopIteration as end:
        result: R = end.value
        return result
    steps.close()
    raise RuntimeError("a coroutine that runs on a thread must not suspend")
