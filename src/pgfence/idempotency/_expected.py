"""Whether a result is of the type that was announced for it, as far as that can be told without knowing more than Python does."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, LiteralString, Union, get_args, get_origin

from pgfence._values.annotations import is_alias, is_open
from pgfence.errors import IdempotencyMisuseError

_SIMPLE = (list, tuple, set, frozenset)
_PROMOTED: dict[Any, tuple[type[Any], ...]] = {
    # What type checkers accept in the place of these.
    float: (float, int),
    bytes: (bytes, bytearray),
    None: (types.NoneType,),
    LiteralString: (str,),
}


def expect_result(value: object, annotation: Any, what: str) -> None:
    """Raise unless a result is of its announced type.

    Args:
        value: the result.
        annotation: from `result=` or of the function; None announces nothing.
        what: the key, for the message.

    Raises:
        IdempotencyMisuseError: it is not.
    """
    if annotation is None or (type(annotation) is type and type(value) is annotation):
        return
    try:
        found = _mismatch(value, annotation)
    except RecursionError:  # a list of itself cannot be stored, and that error says so
        return
    if found is not None:
        expected = shown(annotation)
        raise IdempotencyMisuseError(
            f"the result for {what} was announced as {expected} (result=, or the annotation of the function), and holds {found}."
            f" It is not stored: return {expected}, or announce the type that is returned"
        )


def shown(annotation: Any) -> str:
    """Return what messages call a type."""
    plain = isinstance(annotation, type) and get_origin(annotation) is None
    name: str = annotation.__qualname__ if plain else str(annotation)
    return name.replace("typing.", "")


def _mismatch(value: object, annotation: Any) -> str | None:
    """Return what was found instead of what was announced; None if it fits, or if that cannot be told."""
    if annotation in _PROMOTED:
        return None if isinstance(value, _PROMOTED[annotation]) else _found(value)
    origin = get_origin(annotation)
    if origin is None:
        return _of_class(value, annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return _mismatch(value, arguments[0])
    if origin in (Union, types.UnionType):
        return None if any(_mismatch(value, one) is None for one in arguments) else _found(value)
    if origin is Literal:
        return None if any(isinstance(value, type(one)) and value == one for one in arguments) else repr(value)
    if (wrong := _of_class(value, origin)) is not None:
        return wrong
    inside = next((one for one in _inside(value, origin, arguments) if one is not None), None)
    return None if inside is None else f"{_found(value)} with {inside}"


def _of_class(value: object, annotation: Any) -> str | None:
    if is_alias(annotation):
        return _mismatch(value, annotation.__value__)
    if hasattr(annotation, "__supertype__"):
        return _mismatch(value, annotation.__supertype__)
    if not isinstance(annotation, type) or annotation is object:
        return None
    if is_open(annotation) and not isinstance(value, annotation) and annotation.__module__ != "collections.abc":
        return None
    try:
        return None if isinstance(value, annotation) else _found(value)
    except TypeError:  # of a TypedDict, for one
        return None if not issubclass(annotation, dict) or isinstance(value, dict) else _found(value)


def _inside(value: object, origin: Any, arguments: tuple[Any, ...]) -> Any:
    """Yield what is found of each element of a builtin collection."""
    if isinstance(value, tuple) and origin is tuple and arguments[-1:] != (...,):
        if len(value) != len(arguments):
            yield f"{len(value)} elements"
        yield from map(_mismatch, value, arguments)
    elif isinstance(value, dict) and issubclass(origin, Mapping) and len(arguments) == 2:
        for key, one in value.items():
            yield _mismatch(key, arguments[0])
            yield _mismatch(one, arguments[1])
    elif type(value) in _SIMPLE and issubclass(origin, Collection) and isinstance(value, Collection):
        for one in value:
            yield _mismatch(one, arguments[0])


def _found(value: object) -> str:
    name = type(value).__qualname__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
