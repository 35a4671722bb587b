"""Which classes a result may consist of: those that its annotation reaches."""

from __future__ import annotations

import collections.abc
import types
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)
from uuid import UUID

ATOMS = frozenset(
    (types.NoneType, bool, int, float, str, bytes, bytearray, Decimal, datetime, date, time, timedelta, UUID)
)
CONTAINERS = frozenset((list, tuple, set, frozenset, dict))
_UNTOLD = (object, Any, None, ...)


def classes_in(annotation: Any) -> dict[str, type[Any]]:
    """Return the dataclasses, models, named tuples and enumerations that an annotation reaches, by the names they are stored under.

    Raises:
        TypeError: it reaches a class whose instances cannot be stored.
    """
    found: list[type[Any]] = []
    _reach(annotation, found)
    names = [one.__qualname__ for one in found]
    return {
        name if names.count(name) == 1 else f"{one.__module__}.{name}": one
        for name, one in zip(names, found, strict=True)
    }


def _reach(annotation: Any, found: list[type[Any]]) -> None:
    if annotation in _UNTOLD or isinstance(annotation, (str, ForwardRef, TypeVar)):
        return
    if alias := getattr(annotation, "__supertype__", None) or getattr(annotation, "__value__", None):
        _reach(alias, found)
        return
    origin = get_origin(annotation)
    if origin is Literal:
        for value in get_args(annotation):
            _reach(type(value), found)
    elif origin is not None:
        arguments = get_args(annotation)
        for one in arguments[:1] if origin is Annotated else arguments:
            _reach(one, found)
        if origin not in (Annotated, Union, types.UnionType):
            _reach(origin, found)
    else:
        _reach_class(annotation, found)


def _reach_class(one: Any, found: list[type[Any]]) -> None:
    if one in ATOMS or one in CONTAINERS or one in found or getattr(one, "__module__", "") == collections.abc.__name__:
        return
    inner = _inner(one)
    if inner is None:
        raise TypeError(_refusal(one))
    if not is_typeddict(one):
        found.append(one)
    for annotation in inner:
        _reach(annotation, found)


def _inner(one: Any) -> list[Any] | None:
    """Return the annotations of what an instance consists of; None if it cannot be stored."""
    if not isinstance(one, type) or hasattr(one, "__mapper__"):
        return None
    if issubclass(one, Enum):
        return []
    if _is_more(one):
        return None
    if isinstance(fields := getattr(one, "model_fields", None), dict) and hasattr(one, "__pydantic_validator__"):
        return [field.annotation for field in fields.values()]
    if is_dataclass(one) or is_typeddict(one) or (issubclass(one, tuple) and hasattr(one, "_make")):
        try:
            return list(get_type_hints(one).values())
        except NameError:
            # What is imported for type checkers alone is not known here; the values themselves will tell.
            return []
    return None


def _is_more(one: Any) -> bool:
    """Say whether a dataclass is something else, too, of which its fields say nothing: a model, an exception, a list."""
    bases: Any = getattr(one, "__mro__", ())[:-1]
    return is_dataclass(one) and (
        hasattr(one, "model_fields")
        or any(base in ATOMS or isinstance(vars(base).get("__new__"), types.BuiltinFunctionType) for base in bases)
    )


def _refusal(one: Any) -> str:
    name = getattr(one, "__qualname__", repr(one))
    if hasattr(one, "__mapper__"):
        return (
            f"a {name} cannot be stored as the result of an idempotency key, for it is a row of the database: return its key,"
            " or a dataclass or model with what the answer needs"
        )
    if _is_more(one):
        return (
            f"a {name} cannot be stored as the result of an idempotency key: of a dataclass the fields are stored, and this one"
            " inherits from a builtin class or a model, and consists of more than them"
        )
    return (
        f"a {name} cannot be stored as the result of an idempotency key: it may consist of numbers, texts, bytes, dates and"
        " times, UUIDs, enumerations, dataclasses, named tuples, pydantic models, lists, tuples, sets and dicts"
    )
