"""Reject versions that are passed to constructors and methods.

A validator of the mixin rejects assignments to the attribute. Constructors and methods with their own list of fields, such
as SQLModel's, ignore a version without assigning it, so that the version a client sent would be lost silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from inspect import getattr_static, isfunction
from typing import TYPE_CHECKING
from weakref import WeakSet

from sqlalchemy import event

from pgfence.versions._mapping import ATTRIBUTE, VersionedBase, get_version_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import Mapper

    from pgfence._orm import State

_CONSTRUCTORS = ("model_validate", "model_construct")
_CHECKED: WeakSet[Callable[..., object]] = WeakSet()
_METHODS = ("sqlmodel_update", "model_copy", "copy")


def assigned_error(cls: type[object]) -> AttributeError:
    """Return the error for a version that is assigned to an instance of a class."""
    return AttributeError(
        f"{cls.__name__}.{ATTRIBUTE} cannot be assigned, because it changes automatically and an assignment would check nothing:"
        f" to check the version that a client has seen, use load_for_version(session, {cls.__name__}, pk, expected)"
    )


def _initialize(state: State, _args: object, given: dict[str, object]) -> None:
    if given.get(ATTRIBUTE) is not None:
        raise assigned_error(state.class_)


def _watch_pydantic(_mapper: Mapper[object], cls: type[object]) -> None:
    """Check the arguments of pydantic's and SQLModel's methods, which ignore keys that are not fields of the model."""
    if not hasattr(cls, "__pydantic_validator__"):
        return
    for name in (*_CONSTRUCTORS, *_METHODS):
        found = getattr_static(cls, name, None)
        function = found.__func__ if isinstance(found, classmethod) else found
        # A subclass inherits the functions of its base, which are checked already.
        if isfunction(function) and function not in _CHECKED:
            checked = _wrap(function)
            _CHECKED.add(checked)
            setattr(cls, name, classmethod(checked) if isinstance(found, classmethod) else checked)


def _wrap(function: Callable[..., object]) -> Callable[..., object]:
    @wraps(function)
    def checked(target: object, *args: object, **options: object) -> object:
        cls = target if isinstance(target, type) else type(target)
        expected = None if target is cls else get_version_in(target)
        for given in (*args[:1], options.get("obj"), options.get("update"), options):
            found = _version_of(given)
            if found is not _NONE and found != expected:
                raise assigned_error(cls)
        return function(target, *args, **options)

    return checked


_NONE = object()


def _version_of(given: object) -> object:
    """Return the version in a client's data. That of a versioned instance is ignored, because no client has sent it."""
    if isinstance(given, Mapping):
        return given.get(ATTRIBUTE, _NONE)
    return _NONE if isinstance(given, VersionedBase) else getattr(given, ATTRIBUTE, _NONE)


event.listen(VersionedBase, "init", _initialize, propagate=True, raw=True)
event.listen(VersionedBase, "after_mapper_constructed", _watch_pydantic, propagate=True)
