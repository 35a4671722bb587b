"""What the functions of an effect must be, as far as that can be told before they run."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Never, NoReturn, TypeVar, get_type_hints

from pgfence._api.inputs import describe_function, reject_coroutine, reject_generator
from pgfence._values.annotations import find_classes

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


_SYNC_ONLY = "it needs an AsyncIdempotentEffect"


def check_plain_function(fn: Callable[..., Any]) -> None:
    """Raise TypeError for a coroutine function or a generator function: nothing of it runs when it is called."""
    reject_coroutine(fn, _SYNC_ONLY)
    reject_generator(fn)


def check_value(value: T, fn: Callable[..., Any]) -> T:
    """Refuse a coroutine in the place of a value.

    Raises:
        TypeError: it is one; nothing of it has run.
    """
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError(f"{describe_function(fn)} returned a coroutine, of which nothing has run: {_SYNC_ONLY}")
    return value


def find_unreached(fn: Callable[..., Any], reached: frozenset[type[Any]] | None) -> str | None:
    """Say why what a function is annotated to return could not be stored; None if nothing tells that.

    Args:
        fn: the function.
        reached: the classes that `result` reaches; None if it was not given.
    """
    try:
        alone: Any = SimpleNamespace(__annotations__={"return": getattr(fn, "__annotations__", {}).get("return")})
        returns = get_type_hints(alone, getattr(fn, "__globals__", {}))["return"]
    except Exception:  # an annotation that cannot be evaluated, whatever that raises, tells nothing
        return None
    if returns in (Never, NoReturn):
        return None
    try:
        found = find_classes(returns).classes.values()
    except TypeError as error:
        return str(error) if reached is None else None
    for one in found:
        # A class that a reached one inherits from may well be annotated.
        if not any(issubclass(other, one) for other in reached or ()):
            return f"it returns a {one.__qualname__}, and what came of it could not be stored. Say so by result={one.__qualname__}"
    return None
