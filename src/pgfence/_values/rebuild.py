"""Instances made again of what was stored: as copying makes them, with the defaults of fields that are newer than the record."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from pgfence.errors import IdempotencyMisuseError


def dataclass(kind: type[Any], found: dict[str, Any]) -> Any:
    """Make an instance as copying does: `__init__` and `__post_init__` have run once, when the result came to be."""
    made, values = object.__new__(kind), found["v"]
    for field in fields(kind):
        if field.name in values:
            object.__setattr__(made, field.name, values[field.name])
        elif field.name in found.get("unset", ()):
            continue
        elif field.default_factory is not MISSING:  # newer than the record
            object.__setattr__(made, field.name, field.default_factory())
        elif field.default is not MISSING:
            object.__setattr__(made, field.name, field.default)
        else:
            raise _older(kind, field.name)
    return made


def named_tuple(kind: Any, values: list[Any]) -> Any:
    """Make a named tuple; what it has more of now than the record is the newer fields, at its end."""
    newer, defaults = kind._fields[len(values) :], kind._field_defaults
    for name in newer:
        if name not in defaults:
            raise _older(kind, name)
    return kind._make([*values, *(defaults[name] for name in newer)])


def _older(kind: type[Any], name: str) -> IdempotencyMisuseError:
    return IdempotencyMisuseError(
        f"the stored {kind.__qualname__} is older than its field {name!r}, which has no default: give it one"
    )


def _default(one: Any, values: dict[str, Any]) -> Any:
    """Return the default of a pydantic field or private attribute, which may be made of the fields before it."""
    if (make := one.default_factory) is None:
        return one.get_default()
    return make(values) if getattr(one, "default_factory_takes_validated_data", False) else make()


def model(kind: Any, found: dict[str, Any]) -> Any:
    """Make a pydantic model as copying does, without validation: what was stored had been valid."""
    values = {}
    for name, field in kind.model_fields.items():
        if name in found["v"]:
            values[name] = found["v"][name]
        elif name in found.get("unset", ()):
            continue
        elif field.is_required():
            raise _older(kind, name)
        else:
            values[name] = _default(field, values)
    private: Any = found.get("private", {} if kind.__private_attributes__ else None)
    for name in kind.__private_attributes__.keys() - (private or {}).keys():
        default = _default(kind.__private_attributes__[name], values)
        if type(default).__name__ != "PydanticUndefinedType":
            private[name] = default
    made = object.__new__(kind)
    made.__setstate__(
        {
            "__dict__": values,
            "__pydantic_fields_set__": set(found.get("set", found["v"])),
            "__pydantic_extra__": found.get("extra", {} if kind.model_config.get("extra") == "allow" else None),
            "__pydantic_private__": private,
        }
    )
    if private is not None:  # a RootModel forgets it
        object.__setattr__(made, "__pydantic_private__", private)
    return made
