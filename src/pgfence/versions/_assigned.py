"""Rejects versions that are passed to constructors and methods.

A validator of the mixin sees what is assigned to the attribute. Constructors and methods that work from their own list of
fields, such as SQLModel's, drop a version without assigning it, so that the version a client has sent would be lost silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from inspect import getattr_static, isfunction
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from pgfence.versions._mapping import ATTRIBUTE, VersionedBase, version_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import InstanceState, Mapper

_CONSTRUCTORS = ("model_validate", "model_construct")
_METHODS = ("sqlmodel_update", "model_copy", "copy")


def assigned(cls: type[Any]) -> AttributeError:
    """Return the error for a version that is assigned to an instance of a class."""
    return AttributeError(
        f"{cls.__name__}.{ATTRIBUTE} is counted by itself, and an assigned one would guard nothing: to check the version that a"
        " client has seen, use load_for_version(session, Model, pk, expected)"
    )


def _initialize(state: InstanceState[Any], _args: Any, given: dict[str, Any]) -> None:
    if given.get(ATTRIBUTE) is not None:
        raise assigned(state.class_)


def _watch_pydantic(_mapper: Mapper[Any], cls: type[Any]) -> None:
    """Check the arguments of pydantic's and SQLModel's methods, which ignore what is not one of the model's fields."""
    if not hasattr(cls, "__pydantic_validator__"):
        return
    for name in (*_CONSTRUCTORS, *_METHODS):
        found = getattr_static(cls, name, None)
        if isinstance(found, classmethod):
            setattr(cls, name, classmethod(_checked(found.__func__)))
        elif isfunction(found):
            setattr(cls, name, _checked(found))


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(target: Any, *args: Any, **options: Any) -> Any:
        new = isinstance(target, type)
        expected = None if new else version_in(target)
        for given in (*args[:1], options.get("obj"), options.get("update"), options):
            found = _version_of(given)
            if found is not _NONE and found != expected:
                raise assigned(target if new else type(target))
        return function(target, *args, **options)

    return checked


_NONE = object()


def _version_of(given: Any) -> Any:
    """Return the version in a client's data. An instance of a versioned class has its own, which no client has sent."""
    if isinstance(given, Mapping):
        return given.get(ATTRIBUTE, _NONE)
    return _NONE if isinstance(given, VersionedBase) else getattr(given, ATTRIBUTE, _NONE)


event.listen(VersionedBase, "init", _initialize, propagate=True, raw=True)
event.listen(VersionedBase, "after_mapper_constructed", _watch_pydantic, propagate=True)
