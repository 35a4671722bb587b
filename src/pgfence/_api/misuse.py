"""Raise helpful errors if a lock is used like those of other libraries, for example as a context manager or a decorator.

The methods that only raise an error are hidden from type checkers, which report such uses themselves.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, ClassVar, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

F = TypeVar("F", bound="Callable[..., object]")

_FORMS = {
    "acquire": "acquire(timeout=5) waits up to 5 seconds, and try_acquire() does not wait",
    "try_acquire": "try_acquire() never waits, and acquire(timeout=5) waits up to 5 seconds",
    "hold": "hold(timeout=5) waits up to 5 seconds, and hold(timeout=0) does not wait",
    "connect": "connect(timeout=5) waits up to 5 seconds, and connect(timeout=0) does not wait",
    "wrap": "decorate with @lock.wrap(), with parentheses; @lock.wrap(timeout=5) waits up to 5 seconds",
}


HANDLE_NAMES = (
    "abandon",
    "begin",
    "check",
    "checkpoint",
    "expires_at",
    "fence",
    "hand_over",
    "keys",
    "last_checkpoint",
    "lease_id",
    "loss_reason",
    "lost",
    "names",
    "on_lost",
    "progress",
    "release",
    "remaining",
    "renew",
    "state",
    "token",
    "wait_lost",
)
"""The public names of `HeldLease`, some of which other libraries have on the lock itself."""


class Guided:
    """Base of the lock classes. Incorrect use raises an error that shows the correct form."""

    _public_name: ClassVar[str] = ""
    """The name of a private class in messages, which is that of its public counterpart."""
    _block: ClassVar[str]
    """The correct form of a block."""
    _decorator: ClassVar[str]
    """The correct form of a decorator."""
    _absent: ClassVar[Mapping[str, str]] = {}
    """Attributes that locks of other libraries have, each with what to use instead."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for verb in _FORMS.keys() & vars(cls).keys():
            setattr(cls, verb, _refuse_by_name(vars(cls)[verb]))
        for name, hint in vars(cls).get("_absent", {}).items():
            setattr(cls, name, Absent(name, hint))

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not isinstance(inspect.getattr_static(self, name, None), Absent)]

    @classmethod
    def _get_public_name(cls) -> str:
        return cls._public_name or cls.__name__

    def _note_misuse(self) -> None:
        """Record incorrect use before the error is raised."""

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            self._note_misuse()
            raise TypeError(f"{self._get_public_name()} is not a context manager: use {self._block}")

        def __exit__(self, *_: object) -> NoReturn:
            raise AssertionError("never entered")

        async def __aenter__(self) -> NoReturn:
            self._note_misuse()
            raise TypeError(f"{self._get_public_name()} is not an async context manager: use {self._block}")

        async def __aexit__(self, *_: object) -> NoReturn:
            raise AssertionError("never entered")

        def __call__(self, *_: object, **__: object) -> NoReturn:
            """Raise an error, because a lock is not a decorator."""
            self._note_misuse()
            raise TypeError(f"{self._get_public_name()} is not a function or decorator: use {self._decorator}")


class Absent:
    """An attribute that locks of other libraries have. hasattr() returns False, and the AttributeError says what to use instead.

    It is not implemented with `__getattr__`, which would slow down every attribute access on the object.
    """

    def __init__(self, name: str, hint: str) -> None:
        self._name = name
        self._hint = hint

    def __get__(self, instance: object, owner: type) -> NoReturn:
        where = f"type object {owner.__name__!r}" if instance is None else f"{owner.__name__!r} object"
        message = f"{where} has no attribute {self._name!r}: {self._hint}"
        raise AttributeError(message, name=self._name, obj=owner if instance is None else instance)


def _refuse_by_name(method: F) -> F:
    """Wrap a method so that calling it with wrong arguments raises an error that shows the correct form."""
    verb, names = method.__name__, method.__kwdefaults__ or {}

    def refuse_misuse(self: Guided, args: tuple[object, ...], kwargs: Mapping[str, object]) -> TypeError | None:
        unknown = [f"{name}={value!r}" for name, value in kwargs.items() if name not in names]
        got = repr(args[0]) if args else next(iter(unknown), None)
        if got is None:
            return None
        return TypeError(f"{self._get_public_name()}.{verb}() does not take {got}: {_FORMS[verb]}")

    def expect_known(self: Guided, error: TypeError, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            return  # raised inside the method, not by the call itself
        if misuse := refuse_misuse(self, args, kwargs):
            raise misuse from None

    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def check_async_call(self: Guided, *args: object, **kwargs: object) -> object:
            try:
                return await method(self, *args, **kwargs)
            except TypeError as error:
                expect_known(self, error, args, kwargs)
                raise

        return check_async_call  # type: ignore[return-value]

    if list(names) == ["timeout"]:

        @wraps(method)
        def check_call_quickly(self: Guided, *args: object, timeout: object = None, **kwargs: object) -> object:
            # `acquire` is called most often, and checking args and kwargs is cheaper than passing them on.
            if (args or kwargs) and (misuse := refuse_misuse(self, args, kwargs)):
                raise misuse
            return method(self, timeout=timeout)

        return check_call_quickly  # type: ignore[return-value]

    @wraps(method)
    def check_call(self: Guided, *args: object, **kwargs: object) -> object:
        try:
            return method(self, *args, **kwargs)
        except TypeError as error:
            expect_known(self, error, args, kwargs)
            raise

    return check_call  # type: ignore[return-value]
