"""Compute the fingerprint of a payload. Equal requests have the same fingerprint, however they are written.

The fingerprint is the SHA-256 of this canonical form:

- Numbers are compared by value, so 1, 1.0 and Decimal("1.00") are equal, as are 1.1 and Decimal("1.10"). True is not a number.
- The order of a dict's keys and of a set's elements is ignored. A list and a tuple with equal elements are equal.
- A dataclass or a pydantic model is the dict of its fields, and an Enum member is its value.
- Datetimes with a zone are compared by their instant, and datetimes without a zone as written. A date, time, timedelta, UUID or
  bytes object is compared by value and differs from a text that looks like it.
- Texts are compared character by character, so "é" as one character differs from "é" as two.

None is an ordinary value, except at the top level, where it means that there was no payload.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from hashlib import sha256
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Mapping


def fingerprint(payload: object) -> bytes | None:
    """Return the fingerprint of a payload, or None if the payload is None.

    Raises:
        TypeError: a value in the payload has no canonical form, or was never set.
        ValueError: the payload contains NaN or infinity, or is nested too deeply.
    """
    if payload is None:
        return None
    try:
        form = json.dumps(_canonicalize(payload), sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise ValueError("the payload is nested too deeply, or contains itself") from None
    except AttributeError as error:
        raise TypeError(f"an attribute in the payload was never set: {error}") from None
    except OverflowError:
        raise ValueError("a datetime in the payload is out of range in UTC") from None
    return sha256(form.encode("ascii")).digest()


def _canonicalize(value: object) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return _canonicalize(value.value)
    if isinstance(value, str):
        return str.__str__(value)  # str() is not used, because a subclass may format itself differently
    # All other kinds are tagged lists, so that they differ from texts and lists that look like them.
    if isinstance(value, (int, float, Decimal)):
        return ["number", _canonicalize_number(value)]
    if isinstance(value, dict):
        return _canonicalize_mapping(value)
    if isinstance(value, (list, tuple)):
        return ["list", *map(_canonicalize, value)]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted(map(_canonicalize, value), key=json.dumps)]
    if is_dataclass(value) and not isinstance(value, type):
        return _canonicalize_mapping({field.name: getattr(value, field.name) for field in fields(value)})
    model = getattr(type(value), "model_fields", None)
    if isinstance(model, dict):
        extra = getattr(value, "__pydantic_extra__", None) or {}
        return _canonicalize_mapping({name: getattr(value, name) for name in model} | extra)
    return _canonicalize_atom(value)


def _canonicalize_atom(value: object) -> object:
    if isinstance(value, datetime):
        moment = value if value.utcoffset() is None else value.astimezone(UTC)
        return ["datetime", moment.isoformat()]
    if isinstance(value, (date, time, UUID)):
        kind = "uuid" if isinstance(value, UUID) else type(value).__name__
        return [kind, str(value)]
    if isinstance(value, timedelta):
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes", bytes(value).hex()]
    raise TypeError(
        f"a payload cannot contain an instance of {type(value).__name__}: pass a value that identifies the request,"
        " e.g. a dict of its fields"
    )


def _canonicalize_number(value: float | Decimal) -> str:
    number = (
        Decimal(value) if isinstance(value, int) else Decimal(repr(float(value)) if isinstance(value, float) else value)
    )
    if not number.is_finite():
        raise ValueError(f"a payload cannot contain {value}: its numbers must be finite")
    sign, digits, exponent = number.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    stripped = text.rstrip("0")
    if not stripped:
        return "0"
    assert isinstance(exponent, int)
    return f"{'-' if sign else ''}{stripped}e{exponent + len(text) - len(stripped)}"


def _canonicalize_mapping(value: Mapping[object, object]) -> object:
    names = [_canonicalize(key) if isinstance(key, str) else None for key in value]
    if all(isinstance(name, str) for name in names):
        return dict(zip(names, map(_canonicalize, value.values()), strict=True))
    pairs = [[_canonicalize(key), _canonicalize(one)] for key, one in value.items()]
    return ["dict", *sorted(pairs, key=json.dumps)]
