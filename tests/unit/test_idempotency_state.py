"""Values with internal state: models of one value, and fields that were never set."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

import pytest
from pydantic import BaseModel, Field, RootModel

from pgfence._values.codec import Codec
from pgfence.errors import IdempotencyMisuseError


@dataclass(frozen=True)
class Coords:
    """One with fields."""

    x: int = 1


class Receipt(RootModel[list[Coords]]):
    """A model of one value."""


class Amounts(RootModel[dict[str, Decimal]]):
    """Another one."""


@dataclass
class Answer:
    """What holds both."""

    receipt: Receipt
    amounts: Amounts | None = None


def test_a_model_of_one_value_is_stored_and_the_same_again() -> None:
    """C105: a RootModel, alone or in something else."""
    receipt = Receipt([Coords()])
    for value in (receipt, Answer(receipt, Amounts({"a": Decimal("1.10")})), Amounts({})):
        codec = Codec.of(type(value))
        back = codec.decode(codec.encode(value))
        assert back == value
        assert type(back) is type(value)


@dataclass
class Lazy:
    """With a field that is set later, or never."""

    amount: int
    cached: int = field(init=False, repr=False, compare=False)


def test_a_dataclass_field_that_was_never_set_stays_unset() -> None:
    """C105: a missing attribute is not an error after the work, and a replay does not invent it."""
    codec = Codec.of(Lazy)
    lazy = codec.decode(codec.encode(Lazy(7)))
    assert lazy == Lazy(7)
    assert not hasattr(lazy, "cached")


class Faulty(Coords):
    """One whose field fails when it is asked for."""

    @property
    def x(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Fail."""
        raise OSError("no such thing")


def test_any_error_of_a_value_is_translated() -> None:
    """`complete` has one class of error for what cannot be stored."""
    with pytest.raises(IdempotencyMisuseError, match="OSError: no such thing"):
        Codec.of(Faulty).encode(Faulty.__new__(Faulty))


class Fee(NamedTuple):
    """A named tuple that has got fields at its end."""

    amount: int
    currency: str = "EUR"
    note: str | None = None


class Bill(BaseModel):
    """A model that has got a field of another one."""

    amount: int
    double: int = Field(default_factory=lambda data: data["amount"] * 2)


def test_what_is_newer_than_the_record_has_its_default() -> None:
    """C110: of a named tuple, of a computed field; without a default the field is named."""
    codec = Codec.of(Fee | Bill)
    assert codec.decode('{"$c": "Fee", "v": [7]}') == Fee(7)
    assert codec.decode('{"$c": "Fee", "v": [7, "USD"]}') == Fee(7, "USD")
    assert codec.decode('{"$c": "Bill", "v": {"amount": 7}}') == Bill(amount=7, double=14)
    with pytest.raises(IdempotencyMisuseError, match="older than its field 'amount'"):
        codec.decode('{"$c": "Fee", "v": []}')
