"""Find the classes to which the annotation of a result refers, and check that a result has its declared type."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections import Counter
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ForwardRef, Literal, NamedTuple, get_args, get_origin, get_type_hints
from uuid import UUID

from pgfence.errors import IdempotencyMisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeGuard

    from pydantic import BaseModel

ATOMS = frozenset(
    (types.NoneType, bool, int, float, str, bytes, bytearray, Decimal, datetime, date, time, timedelta, UUID)
)
CONTAINERS = frozenset((list, tuple, set, frozenset, dict))
# Classes of pydantic that occur only in annotations. The values themselves are instances of standard-library classes.
_MARKS = frozenset(
    ("AwareDatetime", "NaiveDatetime", "PastDatetime", "FutureDatetime", "PastDate", "FutureDate", "EmailStr", "Json")
)


class ReachableTypes(NamedTuple):
    """The classes that an annotation refers to, directly or indirectly, by the names under which their instances are stored."""

    classes: dict[str, type[object]]
    complete: bool
    """Whether every name in the annotation was resolved. If a name was not, more classes may be found later."""


def find_classes(annotation: object) -> ReachableTypes:
    """Return the dataclasses, models, named tuples and enumerations that an annotation refers to.

    Raises:
        TypeError: the annotation refers to a class whose instances cannot be stored, or to two classes with the same name.
    """
    visitor = _TypeVisitor()
    visitor.visit(annotation)
    found = [one for one in visitor.seen if isinstance(one, type) and not _is_typed_dict(one)]
    count, classes = Counter(one.__qualname__ for one in found), {}
    for one in found:
        name = one.__qualname__ if count[one.__qualname__] == 1 else f"{one.__module__}.{one.__qualname__}"
        if name in classes:
            raise TypeError(
                f"two classes have the name {name}, and results are stored under the names of their classes. Rename one of them"
            )
        classes[name] = one
    return ReachableTypes(classes, visitor.complete)


class _TypeVisitor:
    """Visits an annotation and everything that it refers to."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.complete = True

    def visit(self, annotation: object) -> None:
        if isinstance(annotation, (str, ForwardRef)):
            name = annotation if isinstance(annotation, str) else annotation.__forward_arg__
            self.complete &= any(getattr(one, "__name__", None) == name for one in self.seen)
            return
        if annotation in (object, None, ..., types.UnionType) or _is_special_form(annotation):
            return
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Literal:
            arguments = tuple(map(type, arguments))
        elif origin is Annotated:
            arguments = arguments[:1]
        elif isinstance(origin, type) or is_alias(origin):
            self.visit(origin)
        elif origin is None:
            self._visit_name(annotation)
        for one in arguments:
            self.visit(one)

    def _visit_name(self, one: object) -> None:
        if isinstance(one, type):
            self._visit_class(one)
        elif isinstance(one, typing.NewType):
            self.visit(one.__supertype__)
        elif not is_alias(one):
            raise TypeError(_describe_rejection(one, _STORABLE))
        elif one not in self.seen:
            self.seen.append(one)
            try:
                self.visit(getattr(one, "__value__", None))
            except NameError:  # the annotation refers to a class that is not defined yet
                self.complete = False

    def _visit_class(self, one: type[object]) -> None:
        if one in ATOMS or one in CONTAINERS or one in self.seen or is_open(one):
            return
        _check_class(one)
        self.seen.append(one)
        if is_model(one):
            if not one.__pydantic_complete__:
                with suppress(Exception):  # pydantic raises the error again when the model is used
                    one.model_rebuild(raise_errors=False)
                self.complete &= one.__pydantic_complete__
            for field in one.model_fields.values():
                self.visit(field.annotation)
        elif not issubclass(one, Enum):
            self._visit_fields(one)

    def _visit_fields(self, one: type[object]) -> None:
        scope = {each.__name__: each for each in (one, *getattr(one, "__type_params__", ()))}
        hints: dict[str, object] | None = None
        while hints is None:
            try:
                hints = get_type_hints(one, localns=scope)
            except Exception as error:
                # One name that only type checkers import, or that is not defined yet, must not hide the other fields.
                self.complete, name = False, getattr(error, "name", None)
                hints = {} if name is None or name in scope else None
                scope[name] = _Unknown
        for name in hints if _is_typed_dict(one) else fields_of(one):
            self.visit(hints.get(name))
        for base in one.__mro__:
            for generic in vars(base).get("__orig_bases__", ()):
                for argument in get_args(generic):
                    with suppress(TypeError):  # the argument may not be the type of any field
                        self.visit(argument)


class _UnknownType(type):
    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return Any

    def __getitem__(cls, arguments: object) -> object:
        return Any


class _Unknown(metaclass=_UnknownType):
    """A placeholder for a name that does not exist at run time."""


def _is_special_form(one: object) -> bool:
    """Return whether an annotation is not a class, but Any, Union, Never, Final, a type variable or the like."""
    return isinstance(one, (typing.TypeVar, typing.TypeVarTuple)) or (
        get_origin(one) is None and getattr(one, "__module__", None) == "typing"
    )


def is_alias(one: object) -> bool:
    """Return whether an annotation is a `type A = ...` alias, or a TypeAliasType of typing_extensions."""
    return type(one).__name__ == "TypeAliasType"


def is_open(one: type[object]) -> bool:
    """Return whether an annotation is an abstract class or a pydantic marker.

    The storable values of such an annotation are instances of classes of the standard library.
    """
    if one.__module__ == collections.abc.__name__:
        return any(issubclass(kind, one) for kind in ATOMS | CONTAINERS)
    return one is _Unknown or (one.__module__ in ("pydantic.types", "pydantic.networks") and one.__name__ in _MARKS)


def is_model(one: type[object]) -> TypeGuard[type[BaseModel]]:
    """Return whether a class is a pydantic model, without importing pydantic."""
    return isinstance(getattr(one, "model_fields", None), dict) and hasattr(one, "__pydantic_validator__")


def is_named_tuple(one: type[object]) -> TypeGuard[type[NamedTuple]]:
    """Return whether a class is a named tuple."""
    return issubclass(one, tuple) and hasattr(one, "_make")


def fields_of(one: type[object]) -> tuple[str, ...]:
    """Return the names of the fields of a model, dataclass or named tuple."""
    if is_model(one):
        return tuple(one.model_fields)
    if is_dataclass(one):
        return tuple(field.name for field in fields(one))
    return one._fields if is_named_tuple(one) else ()


def _is_typed_dict(one: type[object]) -> bool:
    return issubclass(one, dict) and hasattr(one, "__total__")


_STORABLE = (
    "a result may consist of None, bool, int, float, Decimal, str, bytes, bytearray, datetime, date, time, timedelta, UUID,"
    " enumerations, dataclasses, named tuples, TypedDicts, pydantic models, lists, tuples, sets and dicts"
)
_FORMS: dict[str, Callable[[type[object]], bool]] = {
    "an enumeration": lambda one: issubclass(one, Enum),
    "a dataclass": is_dataclass,
    "a pydantic model": is_model,
    "a TypedDict": _is_typed_dict,
    "a named tuple": is_named_tuple,
    "an exception": lambda one: issubclass(one, BaseException),
}


def _check_class(one: type[object]) -> None:
    forms = [form for form, matches in _FORMS.items() if matches(one)]
    builtin = [
        base.__name__
        for base in one.__mro__[:-1]
        if base in ATOMS or isinstance(vars(base).get("__new__"), types.BuiltinFunctionType)
    ]
    if hasattr(one, "__mapper__"):
        why = "it is a mapped class. Return the key of the row, or a dataclass or model with the fields that the response needs"
    elif forms in ([], ["an exception"]):
        why = _STORABLE
    elif len(forms) > 1:
        why = f"it is {' and '.join(forms)}. Return an instance of a class that is only one of these"
    elif forms[0] in ("a dataclass", "a pydantic model") and builtin:
        why = (
            f"it is {forms[0]} and inherits from {builtin[0]}. Only fields are stored, so make the {builtin[0]} a field"
        )
    elif is_model(one) and one.__private_attributes__:
        names = ", ".join(map(repr, one.__private_attributes__))
        why = f"private attributes are not stored, and it has {names}. Return a model without them"
    else:
        return
    raise TypeError(_describe_rejection(one, why))


def _describe_rejection(one: object, why: str) -> str:
    return f"{getattr(one, '__qualname__', repr(one))} cannot be stored as the result of an idempotency key: {why}"


_ACCEPTED: dict[object, tuple[type[object], ...]] = {
    # Type checkers accept values of other types too where one of these types is declared.
    float: (float, int),
    bytes: (bytes, bytearray),
    None: (types.NoneType,),
    typing.LiteralString: (str,),
}


def check_result(value: object, annotation: object, what: str) -> None:
    """Raise an error unless a result has its declared type. Elements of collections are checked, but fields of classes are not.

    An annotation of None declares no type. `what` is the key, for the message.

    Raises:
        IdempotencyMisuseError: the result has another type.
    """
    if annotation is None:
        return
    try:
        found = _find_mismatch(value, annotation)
    except RecursionError:  # raised again, and more clearly, when the value is encoded
        return
    if found is not None:
        plain = isinstance(annotation, type) and get_origin(annotation) is None
        expected = (getattr(annotation, "__qualname__", "") if plain else str(annotation)).replace("typing.", "")
        raise IdempotencyMisuseError(
            f"the result for {what} was declared as {expected} (result=, or the annotation of the function) but contains"
            f" {found}. It is not stored: return {expected}, or declare the type that is returned"
        )


def _find_mismatch(value: object, annotation: object) -> str | None:
    """Return a description of the value if it does not have the declared type, or None if it matches or cannot be checked."""
    if annotation in _ACCEPTED:
        return None if isinstance(value, _ACCEPTED[annotation]) else _describe(value)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is None:
        return _find_class_mismatch(value, annotation)
    if origin is Annotated:
        return _find_mismatch(value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return None if any(_find_mismatch(value, one) is None for one in arguments) else _describe(value)
    if origin is Literal:
        return None if any(isinstance(value, type(one)) and value == one for one in arguments) else repr(value)
    if (wrong := _find_class_mismatch(value, origin)) is not None:
        return wrong
    inside = next((one for one in _find_inside(value, origin, arguments) if one is not None), None)
    return None if inside is None else f"{_describe(value)} with {inside}"


def _find_class_mismatch(value: object, annotation: object) -> str | None:
    if is_alias(annotation) or isinstance(annotation, typing.NewType):
        return _find_mismatch(value, getattr(annotation, "__value__", getattr(annotation, "__supertype__", None)))
    if not isinstance(annotation, type) or annotation is object or annotation.__module__.startswith("pydantic."):
        return None
    # isinstance() does not accept a TypedDict.
    kind = dict if _is_typed_dict(annotation) else annotation
    try:
        return None if isinstance(value, kind) else _describe(value)
    except TypeError:
        return None


def _find_inside(value: object, origin: object, arguments: tuple[object, ...]) -> Iterator[str | None]:
    """Yield, for each element of a builtin collection, its mismatch or None."""
    if isinstance(value, tuple) and origin is tuple and arguments[-1:] != (...,):
        if len(value) != len(arguments):
            yield f"{len(value)} {'element' if len(value) == 1 else 'elements'}"
        yield from map(_find_mismatch, value, arguments)
    elif isinstance(value, dict) and len(arguments) == 2:
        for key, one in value.items():
            yield _find_mismatch(key, arguments[0])
            yield _find_mismatch(one, arguments[1])
    elif isinstance(value, (list, tuple, set, frozenset)) and type(value) in CONTAINERS:
        for one in value:
            yield _find_mismatch(one, arguments[0])


def _describe(value: object) -> str:
    name = type(value).__qualname__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
