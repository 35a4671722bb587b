"""Run coroutines in a thread. Running a coroutine that never suspends is like an ordinary function call."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

Coro: TypeAlias = Coroutine[Any, Any, R]
"""The coroutine that an `async def` function returns, with a result of type R."""


def run_sync(function: Callable[P, Coro[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a coroutine function to completion in this thread. Everything that it awaits must block instead of suspending.

    Raises:
        RuntimeError: the coroutine suspended, which only coroutines on an event loop may do.
    """
    # The function is called here and not by the caller, because an interrupt between two calls would leave a coroutine that was
    # never awaited.
    steps = function(*args, **kwargs)
    try:
        steps.send(None)
    except StopIteration as end:
        result: R = end.value
        return result
    steps.close()
    raise RuntimeError("internal error: a coroutine that runs on a thread must not suspend")
