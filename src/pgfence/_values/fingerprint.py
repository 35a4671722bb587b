"""The fingerprint of a payload: equal requests have the same one, however they were written down.

The canonical form, of which it is the SHA-256:

- numbers count by their value: 1, 1.0 and Decimal("1.00") are equal, and so are 1.1 and Decimal("1.10"); True is no number;
- a dict counts without the order of its keys, a set without order; a list and a tuple are equal, and keep theirs;
- a dataclass or a pydantic model counts as the dict of its fields, an Enum member as its value;
- datetimes with a zone count by their instant, those without as they are written; date, time, timedelta, UUID and bytes by
  their value, and differ from the text that looks like them;
- texts count character by character: "é" in one character differs from "é" in two.

None is a value like any other, except at the top, where it means that there is no payload.
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
    """Return the fingerprint of a payload; None for None.

    Raises:
        TypeError: something in it has no canonical form, or was never set.
        ValueError: a number in it is no number, or it is nested too deeply.
    """
    if payload is None:
        return None
    try:
        form = json.dumps(_canonicalize(payload), sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise ValueError("the payload is nested too deeply, or contains itself") from None
    except AttributeError as error:
        raise TypeError(f"something in the payload was never set: {error}") from None
    except OverflowError:
        raise ValueError("a datetime in the payload has no instant: in UTC it is out of range") from None
    return sha256(form.encode("ascii")).digest()


def _canonicalize(value: object) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return _canonicalize(value.value)
    if isinstance(value, str):
        return str.__str__(value)
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
        f"a payload cannot hold a {type(value).__name__}: pass what makes two requests the same one, e.g. a dict of its fields"
    )


def _canonicalize_number(value: float | Decimal) -> str:
    number = (
        Decimal(value) if isinstance(value, int) else Decimal(repr(float(value)) if isinstance(value, float) else value)
    )
    if not number.is_finite():
        raise ValueError(f"a payload cannot hold {value}: it is not even equal to itself")
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
