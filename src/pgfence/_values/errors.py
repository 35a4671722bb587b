"""Errors that are stored in the place of a result: their class by its name, what they were made with, and their attributes."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pgfence.errors import IdempotencyMisuseError, PgfenceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgfence._values.codec import Codec


def among(error: BaseException, kinds: tuple[type[Exception], ...]) -> bool:
    """Say whether an error is of these classes; one of ours only where a class of ours is named, not by `Exception`."""
    if isinstance(error, PgfenceError):
        kinds = tuple(kind for kind in kinds if issubclass(kind, PgfenceError))
    return isinstance(error, kinds)


def encode(error: Exception, codec: Codec) -> str:
    """Return an error as JSON.

    Raises:
        IdempotencyMisuseError: its arguments or attributes cannot be stored, or it could not be made of them again.
    """
    _made(type(error), error.args)
    state = {name: value for name, value in vars(error).items() if name != "__notes__"}
    return json.dumps(
        {
            "class": type(error).__qualname__,
            "module": type(error).__module__,
            "args": json.loads(codec.encode(error.args)),
            "state": json.loads(codec.encode(state)),
        }
    )


def decode(text: str, record: tuple[type[Exception], ...], codec: Codec, what: str) -> Exception:
    """Return a stored error, as it was raised; of a class that is not recorded any more, an IdempotencyMisuseError."""
    found = json.loads(text)
    named = [kind for kind in _with_subclasses(record) if kind.__qualname__ == found["class"]]
    if not named:
        return IdempotencyMisuseError(
            f"{what} ended in a {found['class']}, which is none of record= here: name the class, or one that it inherits from"
        )
    # One that has moved to another module since is still the only one of its name.
    kind = next((kind for kind in named if kind.__module__ == found.get("module")), named[0])
    args = codec.decode(json.dumps(found["args"]))
    error = _made(kind, args)
    vars(error).update(codec.decode(json.dumps(found["state"])))
    error.add_note(f"replayed: this is how {what} ended the first time")
    return error


def _made(kind: type[Exception], args: tuple[Any, ...]) -> Exception:
    """Make an error as copying does, without its `__init__`.

    Raises:
        IdempotencyMisuseError: its class wants something else.
    """
    for new in (kind.__new__, Exception.__new__):
        with suppress(Exception):  # a class may take other arguments than it passes on
            error = new(kind, *args)
            if type(error) is kind:
                error.args = args
                return error
    raise IdempotencyMisuseError(
        f"a {kind.__qualname__} cannot be made of its arguments again, so it cannot be recorded: give args what __new__ takes,"
        " or leave the class out of record="
    )


def _with_subclasses(kinds: tuple[type[Exception], ...]) -> Iterator[type[Exception]]:
    for kind in kinds:
        yield kind
        yield from _with_subclasses(tuple(kind.__subclasses__()))
