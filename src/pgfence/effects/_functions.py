"""What the functions of an effect must be, as far as that can be told before they run."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Never, NoReturn, TypeVar, get_type_hints

from pgfence._api.decorators import describe_function
from pgfence._values.annotations import reach

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def expect_plain(fn: Callable[..., Any]) -> None:
    """Refuse a function of which nothing runs when it is called.

    Raises:
        TypeError: it is a coroutine function or a generator function.
    """
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__):
        raise TypeError(f"{describe_function(fn)} is a coroutine function: it needs an AsyncIdempotentEffect")
    expect_no_generator(fn)


def expect_no_generator(fn: Callable[..., Any]) -> None:
    """Refuse a generator function.

    Raises:
        TypeError: it is one.
    """
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(f"{describe_function(fn)} is a generator function: nothing of it runs when it is called")


def expect_value(value: T, fn: Callable[..., Any]) -> T:
    """Refuse a coroutine in the place of a value.

    Raises:
        TypeError: it is one; nothing of it has run.
    """
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError(
            f"{describe_function(fn)} returned a coroutine, of which nothing has run: it needs an AsyncIdempotentEffect"
        )
    return value


def unreached(fn: Callable[..., Any], reached: frozenset[type[Any]] | None) -> str | None:
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
        found = reach(returns).classes.values()
    except TypeError as error:
        return str(error) if reached is None else None
    for one in found:
        # A class that a reached one inherits from may well be annotated.
        if not any(issubclass(other, one) for other in reached or ()):
            return f"it returns a {one.__qualname__}, and what came of it could not be stored. Say so by result={one.__qualname__}"
    return None
