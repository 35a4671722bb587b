"""One text for threads and tasks: a coroutine that never suspends is a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


def run_sync(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on this thread, where everything that it awaits blocks instead of suspending.

    Raises:
        RuntimeError: it suspended; only a carrier of tasks may do that.
    """
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    steps.close()
    raise RuntimeError("a coroutine that runs on a thread must not suspend")
