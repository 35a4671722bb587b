"""Combinations of base classes: stored and restored unchanged, or a TypeError where the class is named."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, Flag
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar
from uuid import UUID

import pytest
from pydantic import BaseModel, RootModel

from pgfence._values.codec import Codec
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


@dataclass(frozen=True)
class Coords:
    """A mixin with fields."""

    x: int = 1
    y: int = 2


class Point(NamedTuple):
    """A mixin that is a tuple."""

    x: int = 1
    y: int = 2


class Plain:
    """A mixin with methods alone."""

    def twice(self) -> int:
        """Do something."""
        return 2


class Slotted:
    """Another one."""

    __slots__ = ()


class Box(Generic[T]):
    """A generic class."""


class Sized(Protocol):
    """A protocol."""

    def twice(self) -> int:
        """Do something."""
        return 2


class Owned(BaseModel):
    """A model to inherit from."""

    owner: str = "me"


BUILTIN: dict[type[Any], Any] = {
    str: "a",
    int: 7,
    float: 1.5,
    bytes: b"a",
    tuple: (1, 2),
    list: [1],
    dict: {"a": 1},
    set: {1},
    frozenset: {1},
    Exception: "declined",
    OSError: (2, "gone"),
    KeyError: "a",
    datetime: datetime(2026, 1, 2, tzinfo=UTC),
    date: (2026, 1, 2),
    Decimal: "1.10",
    UUID: "12345678-1234-5678-1234-567812345678",
    complex: 1j,
}
"""What a member of an enumeration is made with that has the class as its mixin."""

MIXINS: tuple[Any, ...] = (Plain, Slotted, ABC, Box, Sized, Coords, Point, Owned, *BUILTIN)
OF_FIELDS = (Plain, Slotted, ABC, Box, Sized, Coords)
OF_TWO_KINDS = (Coords, Point, Owned, Exception, OSError, KeyError)


def enumeration(base: Any) -> Any:
    """Return a member of an enumeration."""
    make: Any = Enum
    return make("Mixed", {"A": BUILTIN.get(base, (3, 4))}, type=base).A


def enumeration_by_hand(base: Any) -> Any:
    """Return a member that does not correspond to a tuple of arguments."""

    class Mixed(base, Enum):  # type: ignore[misc]
        A = 1

    return Mixed.A


def flag(base: Any) -> Any:
    """Return two members at once."""

    class Mixed(base, Flag):  # type: ignore[misc]
        A = 1
        B = 2

    return Mixed.A | Mixed.B


def fields(base: Any) -> Any:
    """Return an instance of a dataclass."""

    @dataclass
    class Mixed(base):  # type: ignore[misc]
        amount: Decimal = Decimal("1.10")

    return Mixed()


def slots(base: Any) -> Any:
    """Return an instance of a frozen dataclass with slots."""

    @dataclass(frozen=True, slots=True)
    class Mixed(base):  # type: ignore[misc]
        amount: Decimal = Decimal("1.10")

    return Mixed()


def undecorated(base: Any) -> Any:
    """Return an instance of a class that inherits its fields."""

    class Mixed(Coords, base):  # type: ignore[misc]
        pass

    return Mixed()


def named(base: Any) -> Any:
    """Return an instance of a class that inherits from a named tuple."""

    class Mixed(Point, base):  # type: ignore[misc]
        pass

    return Mixed()


def model(base: Any) -> Any:
    """Return an instance of a model."""

    class Mixed(BaseModel, base):  # type: ignore[misc]
        amount: Decimal = Decimal("1.10")

    return Mixed()


def root(base: Any) -> Any:
    """Return an instance of a model of one value."""

    class Mixed(RootModel[list[Decimal]], base):  # type: ignore[misc]
        pass

    return Mixed([Decimal("1.10")])


KINDS: tuple[Callable[[Any], Any], ...] = (
    enumeration,
    enumeration_by_hand,
    flag,
    fields,
    slots,
    undecorated,
    named,
    model,
    root,
)


def pairs() -> Iterator[Any]:
    """Return an instance of each pair that Python can make."""
    for kind in KINDS:
        for base in MIXINS:
            try:
                value = kind(base)
            except Exception:  # whatever Python or pydantic says of it
                continue
            yield kind, base, value


@every_row(("kind", "base", "value"), tuple(pairs()))
def test_each_pair_of_mixins_round_trips_or_is_rejected(kind: Callable[[Any], Any], base: Any, value: Any) -> None:
    """C105: an instance is stored with all that it is, or its class is a TypeError before anything runs."""
    of_fields = kind in (fields, slots, undecorated)
    if (of_fields and base not in OF_FIELDS) or (not of_fields and base in OF_TWO_KINDS):
        with pytest.raises(TypeError, match="cannot be stored"):
            Codec.of(type(value))
        return
    codec = Codec.of(type(value))
    back = codec.decode(codec.encode(value))
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value)
    assert getattr(back, "__dict__", None) == getattr(value, "__dict__", None)
