"""Which values are of the type that `result=` announces, and what the error says of those that are not."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar

import pytest
from pydantic import AwareDatetime, BaseModel
from typing_extensions import TypeAliasType

from pgfence._values.annotations import check_result
from pgfence.errors import IdempotencyMisuseError
from support.rows import every_row

T = TypeVar("T")
UserId = NewType("UserId", int)
Ids = TypeAliasType("Ids", list[int])


@dataclass
class Receipt:
    """A dataclass."""

    amount: int = 1


@dataclass
class Page(Generic[T]):
    """A generic one."""

    items: list[T]


class Refund(Receipt):
    """A subclass."""


class Point(NamedTuple):
    """A named tuple."""

    x: int


class Colour(enum.Enum):
    """An enumeration."""

    RED = 1


class Row(TypedDict):
    """A dict with a type."""

    x: int


class Model(BaseModel):
    """A model."""

    x: int = 1


FITS: list[tuple[Any, Any]] = [
    (None, Receipt()),
    (Any, 1),
    (object, 1),
    (Receipt, Refund()),
    (Receipt | None, None),
    (float, 1),
    (int, True),
    (bytes, bytearray()),
    (date, datetime(2026, 1, 1, tzinfo=UTC)),
    (list[float], [1, 1.5]),
    (list, ["a", 1]),
    (dict[str, Receipt], {"a": Receipt()}),
    (dict[str, Any], {"a": object()}),
    (tuple[int, ...], (1, 2)),
    (tuple[int, str], (1, "a")),
    (Sequence[str], "abc"),
    (Sequence[int], [1]),
    (Mapping[str, int], {"a": 1}),
    (Literal["a", 1], "a"),
    (Annotated[int, "positive"], 1),
    (UserId, 7),
    (Ids, [1]),
    (Page[int], Page([1])),
    (Point, Point(1)),
    (Colour, Colour.RED),
    (Row, {"x": 1}),
    (Model, Model()),
    (AwareDatetime, datetime(2026, 1, 1, tzinfo=UTC)),
    (T, 1),
    ("NotDefinedYet", 1),
    (list["NotDefinedYet"], [1]),  # type: ignore[name-defined]  # noqa: F821
    (type(None), None),
]

MISFITS: list[tuple[Any, Any, str, str]] = [
    (Receipt, {"amount": 1}, "Receipt", "a dict"),
    (Receipt, None, "Receipt", "a NoneType"),
    (int, "1", "int", "a str"),
    (str, 1, "str", "an int"),
    (bool, 1, "bool", "an int"),
    (int, 1.0, "int", "a float"),
    (type(None), 1, "NoneType", "an int"),
    (Receipt | None, "x", "Receipt | None", "a str"),
    (list[Receipt], [Receipt(), {}], "list[", "a list with a dict"),
    (list[int], (1,), "list[int]", "a tuple"),
    (dict[str, int], {"a": "b"}, "dict[str, int]", "a dict with a str"),
    (dict[str, int], {1: 1}, "dict[str, int]", "a dict with an int"),
    (tuple[int, str], (1,), "tuple[int, str]", "a tuple with 1 element"),
    (Sequence[int], {1}, "collections.abc.Sequence[int]", "a set"),
    (Literal["a", "b"], "c", "Literal['a', 'b']", "'c'"),
    (Annotated[int, "positive"], "1", "Annotated[int", "a str"),
    (UserId, "7", "UserId", "a str"),
    (Ids, ["1"], "Ids", "a list with a str"),
    (Page[int], [1], "Page[int]", "a list"),
    (Point, (1,), "Point", "a tuple"),
    (Colour, 1, "Colour", "an int"),
    (Row, [1], "Row", "a list"),
    (Model, {"x": 1}, "Model", "a dict"),
]


@every_row(("announced", "value"), FITS)
def test_a_value_that_a_type_checker_would_accept_is_accepted(announced: Any, value: Any) -> None:
    """Also if it is not known: an annotation with an undefined name does not reject a value."""
    check_result(value, announced, "k")


@every_row(("announced", "value", "expected", "found"), MISFITS)
def test_the_error_names_what_was_expected_and_what_was_found(
    announced: Any, value: Any, expected: str, found: str
) -> None:
    """The type as it is written, and the type of the value, or of the element that does not fit."""
    with pytest.raises(IdempotencyMisuseError) as caught:
        check_result(value, announced, "the key")
    assert f"declared as {expected}" in str(caught.value).replace(f"{__name__}.", "")
    assert f"but contains {found}. It is not stored" in str(caught.value)
