"""Which classes a result may consist of: those that its annotation reaches."""

from __future__ import annotations

import collections.abc
import inspect
import sys
import types
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import (
    Annotated,
    Any,
    Final,
    ForwardRef,
    Literal,
    LiteralString,
    NamedTuple,
    Never,
    NoReturn,
    Self,
    TypeVar,
    TypeVarTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from uuid import UUID

ATOMS = frozenset(
    (types.NoneType, bool, int, float, str, bytes, bytearray, Decimal, datetime, date, time, timedelta, UUID)
)
CONTAINERS = frozenset((list, tuple, set, frozenset, dict))
_UNTOLD = (object, Any, None, ..., Final, LiteralString, Never, NoReturn, Self)
_MARKS = frozenset(
    ("AwareDatetime", "NaiveDatetime", "PastDatetime", "FutureDatetime", "PastDate", "FutureDate", "EmailStr", "Json")
)
"""Classes of pydantic that are only written down; the values are of the standard library's classes."""


class Reached(NamedTuple):
    """What an annotation reaches."""

    classes: dict[str, type[Any]]
    """By the names that they are stored under."""
    known: bool
    """Whether each name in it could be found; otherwise it may reach more when it is asked once more."""


def reach(annotation: Any) -> Reached:
    """Return the dataclasses, models, named tuples and enumerations that an annotation reaches.

    Raises:
        TypeError: it reaches a class whose instances cannot be stored, or two that cannot be told apart.
    """
    walk = _Walk()
    walk.to(annotation)
    found = [one for one in walk.found if isinstance(one, type) and not _is_typeddict(one)]
    short = [one.__qualname__ for one in found]
    names = [
        name if short.count(name) == 1 else f"{one.__module__}.{name}" for name, one in zip(short, found, strict=True)
    ]
    if twice := [name for name in names if names.count(name) > 1]:
        raise TypeError(
            f"two classes have the name {twice[0]}, by which a result of one of them is found again: give them different names"
        )
    return Reached(dict(zip(names, found, strict=True)), walk.known)


class _Walk:
    """A way through an annotation."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.known = True

    def to(self, annotation: Any) -> None:
        if isinstance(annotation, (str, ForwardRef)):
            name = getattr(annotation, "__forward_arg__", annotation)
            self.known &= any(one.__name__ == name for one in self.found)
            return
        if annotation in _UNTOLD or isinstance(annotation, (TypeVar, TypeVarTuple)):
            return
        origin = get_origin(annotation)
        if origin is Literal:
            for value in get_args(annotation):
                self.to(type(value))
        elif origin is not None:
            self._to_generic(annotation, origin)
        elif isinstance(annotation, type):
            self._to_class(annotation)
        elif hasattr(annotation, "__supertype__"):
            self.to(annotation.__supertype__)
        else:
            self._to_alias(annotation)

    def _to_generic(self, annotation: Any, origin: Any) -> None:
        arguments = get_args(annotation)
        if origin is Annotated:
            arguments = arguments[:1]
        elif origin not in (Union, types.UnionType) and (isinstance(origin, type) or is_alias(origin)):
            self.to(origin)
        for one in arguments:
            self.to(one)

    def _to_alias(self, one: Any) -> None:
        if not is_alias(one):
            raise TypeError(_refusal(one))
        if one in self.found:
            return
        self.found.append(one)
        try:
            value = one.__value__
        except Exception:  # it names what is not there yet
            self.known = False
        else:
            self.to(value)

    def _to_class(self, one: Any) -> None:
        if one in ATOMS or one in CONTAINERS or one in self.found or is_untold(one):
            return
        form = _form(one)
        if form is None:
            raise TypeError(_refusal(one))
        self.found.append(one)
        match form:
            case "model":
                self._to_model(one)
            case "dataclass":
                self._to_fields(one, [field.name for field in fields(one)])
            case "typed dict":
                self._to_fields(one, one.__annotations__)
            case "named tuple":
                self._to_fields(one, one._fields)

    def _to_model(self, one: Any) -> None:
        if not getattr(one, "__pydantic_complete__", True):
            with suppress(Exception):  # pydantic says it when the model is used
                one.model_rebuild(raise_errors=False)
            self.known &= one.__pydantic_complete__
        for field in one.model_fields.values():
            self.to(field.annotation)
        self._to_fields(one, one.__private_attributes__)

    def _to_fields(self, one: Any, names: collections.abc.Iterable[str]) -> None:
        left = set(names)
        for base in one.__mro__:
            own = inspect.get_annotations(base)
            if here := left & own.keys():
                left -= here
                module = vars(sys.modules.get(base.__module__, types))
                scope = module | {each.__name__: each for each in (one, *getattr(base, "__type_params__", ()))}
                for name in here:
                    self.to(self._hint(base, name, own[name], scope))
            for generic in vars(base).get("__orig_bases__", ()):
                for argument in get_args(generic):
                    self._perhaps_to(argument)

    def _perhaps_to(self, argument: Any) -> None:
        """Go to what a base was made generic with; a field may be of it, or none."""
        before = len(self.found)
        try:
            self.to(argument)
        except TypeError:
            del self.found[before:]

    def _hint(self, base: Any, name: str, annotation: Any, scope: dict[str, Any]) -> Any:
        """Evaluate one annotation: that another one names what only type checkers know is no reason to know none."""
        alone = type(base.__name__, (), {"__annotations__": {name: annotation}})
        try:
            return get_type_hints(alone, dict(vars(base)), scope)[name]
        except Exception:  # whatever it raises, it tells nothing, and the values will
            self.known = False
            return None


def is_alias(one: Any) -> bool:
    """Say whether this is `type A = ...`, or what typing_extensions has for that; its value may name what is not there yet."""
    return type(one).__name__ == "TypeAliasType"


def _is_typeddict(one: Any) -> bool:
    """Say whether a class is a TypedDict, also one of typing_extensions."""
    return issubclass(one, dict) and hasattr(one, "__total__")


def is_untold(one: Any) -> bool:
    """Say whether values that can be stored are instances of an abstract class, or what a mark of pydantic stands for."""
    if one.__module__ == collections.abc.__name__:
        return any(issubclass(kind, one) for kind in ATOMS | CONTAINERS)
    return one.__module__ in ("pydantic.types", "pydantic.networks") and one.__name__ in _MARKS


def _form(one: Any) -> Literal["enumeration", "model", "dataclass", "typed dict", "named tuple"] | None:
    """Return as what the instances of a class are stored; None if they cannot be."""
    if hasattr(one, "__mapper__"):
        return None
    if issubclass(one, Enum):
        return "enumeration"
    if is_dataclass(one):
        return None if _is_more(one) else "dataclass"
    if isinstance(getattr(one, "model_fields", None), dict) and hasattr(one, "__pydantic_validator__"):
        return "model"
    if _is_typeddict(one):
        return "typed dict"
    return "named tuple" if issubclass(one, tuple) and hasattr(one, "_make") else None


def _is_more(one: Any) -> bool:
    """Say whether a dataclass is something else, too, of which its fields say nothing: a model, an exception, a list."""
    return hasattr(one, "model_fields") or any(
        base in ATOMS or isinstance(vars(base).get("__new__"), types.BuiltinFunctionType) for base in one.__mro__[:-1]
    )


def _refusal(one: Any) -> str:
    name = getattr(one, "__qualname__", repr(one))
    if hasattr(one, "__mapper__"):
        return (
            f"a {name} cannot be stored as the result of an idempotency key, for it is a row of the database: return its key,"
            " or a dataclass or model with what the answer needs"
        )
    if is_dataclass(one):
        return (
            f"a {name} cannot be stored as the result of an idempotency key: of a dataclass the fields are stored, and this one"
            " inherits from a builtin class or a model, and consists of more than them"
        )
    return (
        f"a {name} cannot be stored as the result of an idempotency key: it may consist of numbers, texts, bytes, dates and"
        " times, UUIDs, enumerations, dataclasses, named tuples, pydantic models, lists, tuples, sets and dicts"
    )
