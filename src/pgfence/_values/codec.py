"""Results as tagged JSON: what comes back is equal to what went in, and of the same type.

JSON's own types stand for themselves. Everything else is an object with a tag: `{"$t": "decimal", "v": "1.10"}` for the types
of the standard library, `{"$c": "Receipt", "v": {...}}` for a class, which is found again among those that the annotation of the
result reaches. No name in the database is ever imported.

Not kept: the order of a dict's keys, since jsonb has one of its own; the name of a time zone that is no `ZoneInfo`.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import UUID
from zoneinfo import ZoneInfo

from pgfence._values.annotations import reach
from pgfence._values.rebuild import dataclass, model, named_tuple
from pgfence.errors import IdempotencyMisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LIMIT = 1024 * 1024
"""Bytes that a result may have."""

_ALIKE = (bool, int, type(None))


class Codec:
    """Writes results of one annotation, and reads them."""

    def __init__(self, classes: Mapping[str, type[Any]]) -> None:
        self.classes = classes
        self._names = {one: name for name, one in classes.items()}
        # A record may be of a time when there were two of a name.
        self._known = {f"{one.__module__}.{one.__qualname__}": one for one in classes.values()} | dict(classes)
        self._fields = {
            one: tuple(field.name for field in fields(one))
            for one in classes.values()
            if is_dataclass(one) and not issubclass(one, Enum)
        }

    @staticmethod
    def of(annotation: Any) -> Codec:
        """Return the codec for an annotation; None has only the types of the standard library.

        Raises:
            TypeError: the annotation reaches a class whose instances cannot be stored.
        """
        try:
            return _codec(annotation)
        except _Passing as error:
            return error.codec
        except TypeError:
            # Cannot be hashed, or is refused: then once more, in words.
            return Codec(reach(annotation).classes)

    def encode(self, value: Any) -> str:
        """Return a value as JSON.

        Raises:
            IdempotencyMisuseError: something in it cannot be stored, or it is too large.
        """
        try:
            text = json.dumps(self._written(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except IdempotencyMisuseError:
            raise
        except (RecursionError, ValueError) as error:
            raise IdempotencyMisuseError(f"the result cannot be stored: {error}") from None
        except Exception as error:  # of a property, or of what a class has made of its attributes
            raise IdempotencyMisuseError(f"the result cannot be stored: {type(error).__name__}: {error}") from error
        if len(text) > LIMIT or len(text.encode()) > LIMIT:
            raise IdempotencyMisuseError(
                f"the result has more than {LIMIT} bytes: store what it is about in a table of yours, and return its key"
            )
        return text

    def decode(self, text: str) -> Any:
        """Return what `encode` was given.

        Raises:
            IdempotencyMisuseError: it holds an instance of a class that the annotation does not reach any more, or that has
                changed too much since.
        """
        try:
            return json.loads(text, object_hook=self._read)
        except IdempotencyMisuseError:
            raise
        except Exception as error:
            raise IdempotencyMisuseError(
                f"the stored result cannot be read, for a class in it has changed since: {type(error).__name__}: {error}"
            ) from error

    def _written(self, value: Any) -> Any:
        kind = type(value)
        if kind is str:
            return value if _harmless(value) else {"$t": "str", "v": _base64(value.encode("utf-8", "surrogatepass"))}
        if kind in _ALIKE:
            return value
        if kind is dict:
            return self._dict(value)
        if kind is list:
            return [self._written(one) for one in value]
        if kind in (tuple, set, frozenset):
            return {"$t": kind.__name__, "v": [self._written(one) for one in value]}
        if kind is float:
            text = repr(value)
            # jsonb keeps digits, but no sign of zero, and prints 1e22 like an integer.
            return value if "." in text and "e" not in text and value != 0 else {"$t": "float", "v": text}
        if (write := _WRITERS.get(kind)) is not None:
            return {"$t": kind.__name__, "v": write(value)}
        if kind in (datetime, time):
            return {"$t": kind.__name__} | _zoned(value)
        return self._instance(value, kind)

    def _dict(self, value: dict[Any, Any]) -> Any:
        if all(type(key) is str and key[:1] != "$" and _harmless(key) for key in value):
            return {key: self._written(one) for key, one in value.items()}
        return {"$t": "dict", "v": [[self._written(key), self._written(one)] for key, one in value.items()]}

    def _instance(self, value: Any, kind: type[Any]) -> Any:
        name = self._names.get(kind)
        if name is None:
            if isinstance(value, UUID):  # asyncpg has a class of its own
                return {"$t": "UUID", "v": str(value)}
            raise IdempotencyMisuseError(
                f"the result holds a {kind.__qualname__}, and cannot be stored. If it is a dataclass, a model, a named tuple or an"
                " enumeration, say so by result=, or by the annotation of the function; else return something simpler"
            )
        if (names := self._fields.get(kind)) is not None:
            try:
                return {"$c": name, "v": {one: self._written(getattr(value, one)) for one in names}}
            except AttributeError:  # of `field(init=False)` that was never set
                return {"$c": name} | self._partly(value, names)
        if isinstance(value, Enum):
            kind = type(value)
            # A class may have made something else of `name`.
            if kind.__members__.get(value._name_) is value:
                return {"$c": name, "m": value._name_}
            return {"$c": name, "v": self._written(value.value)}
        if isinstance(value, tuple):
            return {"$c": name, "v": [self._written(one) for one in tuple.__iter__(value)]}
        return {"$c": name} | self._model(value)

    def _partly(self, value: Any, names: tuple[str, ...]) -> dict[str, Any]:
        held = [one for one in names if hasattr(value, one)]
        return {
            "v": {one: self._written(getattr(value, one)) for one in held},
            "unset": [one for one in names if one not in held],
        }

    def _model(self, value: Any) -> dict[str, Any]:
        held, known = vars(value), type(value).model_fields
        written: dict[str, Any] = {"v": {one: self._written(held[one]) for one in known if one in held}}
        if unset := [one for one in known if one not in held]:
            written["unset"] = unset
        if value.__pydantic_fields_set__ != known.keys():
            written["set"] = sorted(value.__pydantic_fields_set__)
        for part in ("extra", "private"):
            if found := getattr(value, f"__pydantic_{part}__"):
                written[part] = self._dict(found)
        return written

    def _read(self, found: dict[str, Any]) -> Any:
        if "$t" in found:
            return _READERS[found["$t"]](found)
        if "$c" not in found:
            return found
        kind = self._known.get(found["$c"])
        if kind is None:
            raise IdempotencyMisuseError(
                f"the stored result holds a {found['$c']}, which result= (or the annotation of the function) does not reach: a"
                " class that was renamed has to be known by its old name as long as results of it are kept"
            )
        if issubclass(kind, Enum):
            return kind[found["m"]] if "m" in found else kind(found["v"])
        if issubclass(kind, tuple):
            return named_tuple(kind, found["v"])
        return dataclass(kind, found) if is_dataclass(kind) else model(kind, found)


class _Passing(Exception):
    """A codec that is not kept: asked once more, the annotation may reach more."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self.codec = codec


@lru_cache(maxsize=256)
def _codec(annotation: Any) -> Codec:
    reached = reach(annotation)
    codec = Codec(reached.classes)
    if not reached.known:
        raise _Passing(codec)
    return codec


def _harmless(text: str) -> bool:
    """Say whether jsonb keeps a text: no NUL, no half of a surrogate pair."""
    if text.isascii():
        return "\0" not in text
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _base64(value: bytes | bytearray) -> str:
    return b64encode(value).decode("ascii")


def _zoned(value: datetime | time) -> dict[str, Any]:
    zone = value.tzinfo
    if isinstance(zone, ZoneInfo) and zone.key:
        return {"v": value.replace(tzinfo=None).isoformat(), "zone": zone.key, "fold": value.fold}
    return {"v": value.isoformat(), "fold": 1} if value.fold else {"v": value.isoformat()}


def _in_zone(kind: Any) -> Callable[[dict[str, Any]], Any]:
    def read(found: dict[str, Any]) -> Any:
        value = kind.fromisoformat(found["v"])
        if "zone" in found:
            return value.replace(tzinfo=ZoneInfo(found["zone"]), fold=found["fold"])
        return value.replace(fold=1) if "fold" in found else value

    return read


_WRITERS: dict[type[Any], Callable[[Any], Any]] = {
    Decimal: str,
    UUID: str,
    bytes: _base64,
    bytearray: _base64,
    date: date.isoformat,
    timedelta: lambda value: [value.days, value.seconds, value.microseconds],
}
_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "str": lambda found: b64decode(found["v"]).decode("utf-8", "surrogatepass"),
    "float": lambda found: float(found["v"]),
    "tuple": lambda found: tuple(found["v"]),
    "set": lambda found: set(found["v"]),
    "frozenset": lambda found: frozenset(found["v"]),
    "dict": lambda found: dict(found["v"]),
    "Decimal": lambda found: Decimal(found["v"]),
    "UUID": lambda found: UUID(found["v"]),
    "bytes": lambda found: b64decode(found["v"]),
    "bytearray": lambda found: bytearray(b64decode(found["v"])),
    "date": lambda found: date.fromisoformat(found["v"]),
    "datetime": _in_zone(datetime),
    "time": _in_zone(time),
    "timedelta": lambda found: timedelta(*found["v"]),
}
