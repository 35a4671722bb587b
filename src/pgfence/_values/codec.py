"""Encode results as tagged JSON, which decodes to an equal value of the same type.

Values of JSON's own types that jsonb does not change are encoded unchanged. All others become an object with a tag: `{"$t":
"Decimal", "v": "1.10"}` for types of the standard library, `{"$c": "Receipt", "v": {...}}` for a class, which must be one that the
annotation of the result refers to. No name from the database is ever imported.

The order of a dict's keys is not preserved, because jsonb has its own order. The name of a time zone that is not a `ZoneInfo` is
not preserved either.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from dataclasses import MISSING, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from uuid import UUID
from zoneinfo import ZoneInfo

from pgfence._values.annotations import check_result, fields_of, find_classes, is_model, is_named_tuple
from pgfence.errors import IdempotencyMisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from pydantic import BaseModel

T = TypeVar("T")

LIMIT = 1024 * 1024
"""The maximum size of a result in bytes."""

_LOST_BY_JSONB = re.compile("[\0\ud800-\udfff]")
_ALIKE = (bool, int, type(None))


class Codec(Generic[T]):
    """Encodes and decodes results of one type."""

    def __init__(self, annotation: object) -> None:
        self._annotation = annotation
        self.classes, self._complete = find_classes(annotation)
        self._names = {one: name for name, one in self.classes.items()}
        # A value may have been stored while two classes had the same name.
        self._known = {f"{one.__module__}.{one.__qualname__}": one for one in self._names} | self.classes
        self._fields: dict[type[object], tuple[str, ...]] = {
            one: fields_of(one) for one in self._names if is_dataclass(one)
        }

    @staticmethod
    def of(annotation: type[T] | None) -> Codec[T]:
        """Return the codec for an annotation; an annotation of None allows only types of the standard library.

        Raises:
            TypeError: the annotation refers to a class whose instances cannot be stored, or to two classes with the same name.
        """
        try:
            codec: Codec[T] = _choose_codec(cast("Hashable", annotation))
        except TypeError:  # unhashable, or refers to classes that cannot be stored, which the next line rejects again
            return Codec(annotation)
        # Names that were undefined when the codec was cached may be defined now.
        return codec if codec._complete else Codec(annotation)

    def check(self, value: object, what: str) -> None:
        """Raise an error unless a result has its declared type; `what` is the key, for the message.

        Raises:
            IdempotencyMisuseError: the result has another type.
        """
        if type(value) is not self._annotation:
            check_result(value, self._annotation, what)

    def encode(self, value: object) -> str:
        """Return a value as JSON.

        Raises:
            IdempotencyMisuseError: the value or a part of it cannot be stored, or the JSON is too large.
        """
        try:
            text = json.dumps(self._write(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except IdempotencyMisuseError:
            raise
        except Exception as error:  # raised by json, by a property, or by code of the class
            raise IdempotencyMisuseError(f"the result cannot be stored: {type(error).__name__}: {error}") from error
        if len(text) > LIMIT or len(text.encode()) > LIMIT:
            raise IdempotencyMisuseError(
                f"the result has more than {LIMIT} bytes: store its content in your own table, and return its key"
            )
        return text

    def decode(self, text: str) -> T:
        """Return the value that `encode` was called with.

        Raises:
            IdempotencyMisuseError: the value contains an instance of a class that the annotation no longer refers to, or that has
                changed too much.
        """
        try:
            value: T = json.loads(text, object_hook=self._read)
        except IdempotencyMisuseError:
            raise
        except Exception as error:
            raise IdempotencyMisuseError(
                f"the stored result cannot be read, probably because a class in it has changed: {type(error).__name__}: {error}."
                " Keep the class able to read its old values as long as results of it are stored"
            ) from error
        return value

    def _write(self, value: Any) -> object:
        kind = type(value)
        if kind is str:
            return (
                value
                if _is_plain(value)
                else {"$t": "str", "v": _encode_base64(value.encode("utf-8", "surrogatepass"))}
            )
        if kind in _ALIKE:
            return value
        if kind is dict:
            return self._write_dict(value)
        if kind is list:
            return [self._write(one) for one in value]
        if kind in (tuple, set, frozenset):
            return {"$t": kind.__name__, "v": [self._write(one) for one in value]}
        if kind is float:
            text = repr(value)
            # jsonb keeps the digits but not the sign of zero, and prints 1e22 like an integer.
            return value if "." in text and "e" not in text and value != 0 else {"$t": "float", "v": text}
        if (write := _WRITERS.get(kind)) is not None:
            return {"$t": kind.__name__, "v": write(value)}
        if kind in (datetime, time):
            return {"$t": kind.__name__} | _write_time(value)
        return self._write_instance(value, kind)

    def _write_dict(self, value: dict[Any, object]) -> object:
        if all(type(key) is str and key[:1] != "$" and _is_plain(key) for key in value):
            return {key: self._write(one) for key, one in value.items()}
        return {"$t": "dict", "v": [[self._write(key), self._write(one)] for key, one in value.items()]}

    def _write_instance(self, value: Any, kind: type[object]) -> dict[str, object]:
        name = self._names.get(kind)
        if name is None:
            if isinstance(value, UUID):  # asyncpg returns its own subclass
                return {"$t": "UUID", "v": str(value)}
            raise IdempotencyMisuseError(
                f"the result contains an instance of {kind.__qualname__}, which cannot be stored. If the class is a"
                " dataclass, a model, a named tuple or an enumeration, name it in result= or in the annotation of the function;"
                " otherwise, return a simpler value"
            )
        if (names := self._fields.get(kind)) is not None:
            try:
                return {"$c": name, "v": {one: self._write(getattr(value, one)) for one in names}}
            except AttributeError:  # a `field(init=False)` that was never set
                held = {one: self._write(getattr(value, one)) for one in names if hasattr(value, one)}
                return {"$c": name, "v": held, "unset": [one for one in names if one not in held]}
        if isinstance(value, Enum):
            # `_name_` is used, because a class may define its own `name`. A combination of flags is not a member.
            if type(value).__members__.get(value._name_) is value:
                return {"$c": name, "m": value._name_}
            return {"$c": name, "v": self._write(value.value)}
        if isinstance(value, tuple):
            return {"$c": name, "v": [self._write(one) for one in tuple.__iter__(value)]}
        return {"$c": name} | self._write_model(value)

    def _write_model(self, value: BaseModel) -> dict[str, object]:
        held, names = vars(value), type(value).model_fields.keys()
        if missing := [one for one in names if one not in held]:
            raise IdempotencyMisuseError(
                f"the result contains an instance of {type(value).__qualname__} without a value for"
                f" {', '.join(map(repr, missing))}, so it cannot be stored. Do not omit fields in model_construct():"
                " validate the model, or give each field a value"
            )
        written: dict[str, object] = {"v": {one: self._write(held[one]) for one in names}}
        if value.__pydantic_fields_set__ != names:
            written["set"] = sorted(value.__pydantic_fields_set__)
        if extra := value.__pydantic_extra__:
            written["extra"] = self._write_dict(extra)
        return written

    def _read(self, found: dict[str, Any]) -> object:
        if "$t" in found:
            value = _READERS[found["$t"]](found["v"])
            if "fold" not in found:
                return value
            zone = ZoneInfo(found["zone"]) if "zone" in found else value.tzinfo
            return value.replace(tzinfo=zone, fold=found["fold"])
        if "$c" not in found:
            return found
        kind = self._known.get(found["$c"])
        if kind is None:
            raise IdempotencyMisuseError(
                f"the stored result contains an instance of {found['$c']}, which result= (or the annotation of the function)"
                " does not refer to. Keep a renamed class available under its old name as long as results of it are stored"
            )
        if issubclass(kind, Enum):
            return kind[found["m"]] if "m" in found else kind(found["v"])
        if is_named_tuple(kind):
            held = found["v"]
            return kind._make([*held, *(_default(kind, name, {}) for name in kind._fields[len(held) :])])
        return _rebuild(kind, self._fields.get(kind), found)


def _rebuild(kind: type[Any], names: tuple[str, ...] | None, found: dict[str, Any]) -> object:
    """Create a dataclass or model as the copy module does."""
    # Validation and `__post_init__` are skipped, because they ran when the result was created.
    stored, made = found["v"], object.__new__(kind)
    fields = names if names is not None else kind.model_fields
    try:
        values = {name: stored[name] for name in fields}
    except KeyError:
        values = {}
        for name in fields:
            if name in stored:
                values[name] = stored[name]
            elif name not in found.get("unset", ()):
                values[name] = _default(kind, name, values)
    if names is not None:
        for name, value in values.items():
            object.__setattr__(made, name, value)  # works for frozen classes too
        return made
    made.__setstate__(
        {
            "__dict__": values,
            "__pydantic_fields_set__": set(found.get("set", stored)),
            "__pydantic_extra__": found.get("extra", {} if kind.model_config.get("extra") == "allow" else None),
            "__pydantic_private__": None,
        }
    )
    return made


def _default(kind: type[object], name: str, values: dict[str, object]) -> object:
    """Return the default of a field that is newer than the stored value."""
    if is_model(kind):
        if not (model_field := kind.model_fields[name]).is_required():
            return model_field.get_default(call_default_factory=True, validated_data=values)
    elif is_named_tuple(kind):
        if name in kind._field_defaults:
            return kind._field_defaults[name]
    elif is_dataclass(kind):
        field = kind.__dataclass_fields__[name]
        if field.default_factory is not MISSING:
            return field.default_factory()
        if field.default is not MISSING:
            return field.default
    raise IdempotencyMisuseError(
        f"the stored {kind.__qualname__} is older than its field {name!r}, which has no default. Give the field a default"
    )


@lru_cache(maxsize=256)
def _choose_codec(annotation: Hashable) -> Codec[Any]:
    return Codec(annotation)


def _is_plain(text: str) -> bool:
    """Return whether jsonb can store a text, because it contains no NUL and no lone surrogate."""
    return "\0" not in text if text.isascii() else _LOST_BY_JSONB.search(text) is None


def _encode_base64(value: bytes | bytearray) -> str:
    return b64encode(value).decode("ascii")


def _write_time(value: datetime | time) -> dict[str, object]:
    zone = value.tzinfo
    if isinstance(zone, ZoneInfo) and zone.key:
        return {"v": value.replace(tzinfo=None).isoformat(), "zone": zone.key, "fold": value.fold}
    return {"v": value.isoformat(), "fold": 1} if value.fold else {"v": value.isoformat()}


_WRITERS: dict[type[object], Callable[[Any], object]] = {
    Decimal: str,
    UUID: str,
    bytes: _encode_base64,
    bytearray: _encode_base64,
    date: date.isoformat,
    timedelta: lambda value: [value.days, value.seconds, value.microseconds],
}
_READERS: dict[str, Callable[[Any], Any]] = {
    **{one.__name__: one for one in (float, tuple, set, frozenset, dict, Decimal, UUID)},
    **{one.__name__: one.fromisoformat for one in (date, datetime, time)},
    "str": lambda text: b64decode(text).decode("utf-8", "surrogatepass"),
    "bytes": b64decode,
    "bytearray": lambda text: bytearray(b64decode(text)),
    "timedelta": lambda parts: timedelta(*parts),
}
