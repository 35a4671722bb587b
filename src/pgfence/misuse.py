"""What a lock tells those who use it as another library's: as a context manager, as a decorator, or with positional arguments.

Type checkers see nothing of it: for them these uses stay errors of their own.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

F = TypeVar("F", bound="Callable[..., Any]")

_FORMS = {
    "acquire": "acquire(timeout=5) waits up to 5 seconds, and try_acquire() does not wait",
    "try_acquire": "try_acquire() never waits, and acquire(timeout=5) waits up to 5 seconds",
    "hold": "hold(timeout=5) waits up to 5 seconds, and hold(timeout=0) does not wait",
    "connect": "connect(timeout=5) waits up to 5 seconds, and connect(timeout=0) does not wait",
    "wrap": "decorate with @lock.wrap(), with parentheses; @lock.wrap(timeout=5) waits up to 5 seconds",
}


class Guided:
    """A noun whose wrong uses raise with the right form in the message."""

    _block: ClassVar[str]
    """The right form of a block."""
    _decorator: ClassVar[str]
    """The right form of a decorator."""
    _absent: ClassVar[Mapping[str, str]] = {}
    """What is looked for here, and where it is."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for verb in _FORMS.keys() & vars(cls).keys():
            setattr(cls, verb, _by_name(vars(cls)[verb]))

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise TypeError(f"{type(self).__name__} is not a context manager: use {self._block}")

        def __exit__(self, *_: object) -> NoReturn:
            raise AssertionError("never entered")

        async def __aenter__(self) -> NoReturn:
            raise TypeError(f"{type(self).__name__} is not an async context manager: use {self._block}")

        async def __aexit__(self, *_: object) -> NoReturn:
            raise AssertionError("never entered")

        def __call__(self, *_: object, **__: object) -> NoReturn:
            """Refuse to be a decorator."""
            raise TypeError(f"{type(self).__name__} is not a function or decorator: use {self._decorator}")

        def __getattr__(self, name: str) -> NoReturn:
            hint = self._absent.get(name)
            told = f"{type(self).__name__!r} object has no attribute {name!r}{f': {hint}' if hint else ''}"
            raise AttributeError(told, name=name, obj=self)


def _by_name(method: F) -> F:
    """Return a method whose arguments go by name, so that the error of others contains the right form."""
    code, verb = method.__code__, method.__name__
    known = frozenset(code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount])

    def misplaced(self: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TypeError:
        got = repr(args[0]) if args else next(f"{name}={kwargs[name]!r}" for name in kwargs if name not in known)
        return TypeError(f"{type(self).__name__}.{verb}() does not take {got}: {_FORMS[verb]}")

    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def checked_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args or (kwargs and not kwargs.keys() <= known):
                raise misplaced(self, args, kwargs)
            return await method(self, **kwargs)

        return checked_async  # type: ignore[return-value]

    @wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args or (kwargs and not kwargs.keys() <= known):
            raise misplaced(self, args, kwargs)
        return method(self, **kwargs)

    return checked  # type: ignore[return-value]
