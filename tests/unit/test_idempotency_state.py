"""Values with a state of their own: models of one value, and what was never set."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

import pytest
from pydantic import BaseModel, Field, PrivateAttr, RootModel

from pgfence._values.codec import Codec
from pgfence.errors import IdempotencyMisuseError


@dataclass(frozen=True)
class Coords:
    """One with fields."""

    x: int = 1


class Receipt(RootModel[list[Coords]]):
    """A model of one value."""

    _seen: int = PrivateAttr(default=1)


class Amounts(RootModel[dict[str, Decimal]]):
    """One without anything private."""


@dataclass
class Answer:
    """What holds both."""

    receipt: Receipt
    amounts: Amounts | None = None


def test_a_model_of_one_value_is_stored_and_the_same_again() -> None:
    """C105: a RootModel, alone or in something else, and what is private in it."""
    receipt = Receipt([Coords()])
    receipt._seen = 5
    for value in (receipt, Answer(receipt, Amounts({"a": Decimal("1.10")})), Amounts({})):
        codec = Codec.of(type(value))
        back = codec.decode(codec.encode(value))
        assert back == value
        assert type(back) is type(value)
    kept = Codec.of(Receipt)
    assert kept.decode(kept.encode(receipt))._seen == 5


@dataclass
class Lazy:
    """With a field that is set later, or never."""

    amount: int
    cached: int = field(init=False, repr=False, compare=False)


class Amount(BaseModel):
    """A model that can be made without its field."""

    amount: int
    note: str = "n"


def test_what_was_never_set_is_not_set_in_what_comes_back() -> None:
    """C105: an attribute that is missing is no error after the work, and not invented by a replay."""
    codec = Codec.of(Lazy | Amount)
    lazy = codec.decode(codec.encode(Lazy(7)))
    assert lazy == Lazy(7)
    assert not hasattr(lazy, "cached")
    bare = Amount.model_construct(note="x")
    back = codec.decode(codec.encode(bare))
    assert back == bare
    assert vars(back) == {"note": "x"}


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
    """A model that has got a field of another one, and private attributes."""

    amount: int
    double: int = Field(default_factory=lambda data: data["amount"] * 2)
    _seen: list[int] = PrivateAttr(default_factory=lambda: [1])
    _own: int = PrivateAttr()


class Root(RootModel[int]):
    """A model of one value that has got a private attribute."""

    _seen: int = PrivateAttr(default=1)


def test_what_is_newer_than_the_record_has_its_default() -> None:
    """C110: of a named tuple, of a field that is made of others, of what is private; without one it is named."""
    codec = Codec.of(Fee | Bill | Root)
    assert codec.decode('{"$c": "Fee", "v": [7]}') == Fee(7)
    assert codec.decode('{"$c": "Fee", "v": [7, "USD"]}') == Fee(7, "USD")
    bill = codec.decode('{"$c": "Bill", "v": {"amount": 7}, "private": {"_own": 2}}')
    assert (bill.double, bill._seen, bill._own) == (14, [1], 2)
    bare = codec.decode('{"$c": "Bill", "v": {"amount": 7, "double": 1}}')
    assert bare == Bill(amount=7, double=1)
    assert not hasattr(bare, "_own")
    assert codec.decode('{"$c": "Root", "v": {"root": 7}}')._seen == 1
    with pytest.raises(IdempotencyMisuseError, match="older than its field 'amount'"):
        codec.decode('{"$c": "Fee", "v": []}')
