"""Encode and decode errors that are stored instead of a result, as the name of the class, the arguments and the attributes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pgfence.errors import IdempotencyMisuseError, PgfenceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgfence._values.codec import Codec


def is_among(error: BaseException, kinds: tuple[type[Exception], ...]) -> bool:
    """Return whether an error is an instance of one of the classes. Only PgfenceError and its subclasses include pgfence errors."""
    if isinstance(error, PgfenceError):
        kinds = tuple(kind for kind in kinds if issubclass(kind, PgfenceError))
    return isinstance(error, kinds)


def encode(error: Exception, codec: Codec[Any]) -> str:
    """Return an error as JSON.

    Raises:
        IdempotencyMisuseError: the error's arguments or attributes cannot be stored, or the error could not be recreated from
            them.
    """
    _rebuild(type(error), error.args)
    state = {name: value for name, value in vars(error).items() if name != "__notes__"}
    kind = type(error)
    return codec.encode({"class": kind.__qualname__, "module": kind.__module__, "args": error.args, "state": state})


def decode(text: str, record: tuple[type[Exception], ...], codec: Codec[Any], what: str) -> Exception:
    """Return a stored error as it was raised, or an IdempotencyMisuseError if its class is no longer recorded."""
    found = codec.decode(text)
    named = [kind for kind in _with_subclasses(record) if kind.__qualname__ == found["class"]]
    if not named:
        return IdempotencyMisuseError(
            f"{what} ended with the exception {found['class']}, which record= does not include. Add"
            " the class or one of its base classes"
        )
    # The class in the same module is preferred. A class that has moved to another module is still found by its name.
    kind = next((kind for kind in named if kind.__module__ == found.get("module")), named[0])
    error = _rebuild(kind, found["args"])
    vars(error).update(found["state"])
    error.add_note(f"replayed: this is how {what} ended the first time")
    return error


def _rebuild(kind: type[Exception], args: tuple[object, ...]) -> Exception:
    """Create an error as the copy module does, without calling `__init__`.

    Raises:
        IdempotencyMisuseError: the class needs other arguments.
    """
    for new in (kind.__new__, Exception.__new__):
        with suppress(Exception):  # `__new__` of the class may take other arguments than `args`
            error = new(kind, *args)
            if type(error) is kind:
                error.args = args
                return error
    raise IdempotencyMisuseError(
        f"{kind.__qualname__} cannot be recreated from its args, so it cannot be recorded: set args to the arguments of"
        " __new__, or remove the class from record="
    )


def _with_subclasses(kinds: tuple[type[Exception], ...]) -> Iterator[type[Exception]]:
    for kind in kinds:
        yield kind
        yield from _with_subclasses(tuple(kind.__subclasses__()))
