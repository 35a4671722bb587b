"""Fingerprints of payloads, and what may be a key."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from pgfence._api.inputs import check_key
from pgfence._values.fingerprint import fingerprint
from support.rows import every_row


@dataclass
class Body:
    """A payload."""

    amount: Decimal
    note: str | None = None


class Model(BaseModel):
    """The same, of pydantic."""

    amount: Decimal
    note: str | None = None


class Colour(Enum):
    """With a text as its value."""

    RED = "red"


class Name(str, Enum):  # noqa: UP042  # what a program has that began before StrEnum
    """A text of which str() is another one."""

    RED = "red"


IDENT = UUID(int=7)
NOON = datetime(2026, 4, 1, 12, tzinfo=UTC)


class Hidden(str):
    """A text that does not show itself."""

    __slots__ = ()

    def __str__(self) -> str:
        """Hide it."""
        return "***"


EQUAL = [
    ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
    ([1, 2], (1, 2)),
    (1, 1.0),
    (1, Decimal("1.00")),
    (1.1, Decimal("1.10")),
    (0.0, -0.0),
    (10**30, 1e30),
    (100, Decimal("1E+2")),
    (NOON, datetime(2026, 4, 1, 14, tzinfo=timezone(timedelta(hours=2)))),
    ({1, 2, 3}, frozenset((3, 2, 1))),
    (Body(Decimal("1.10")), {"amount": 1.1, "note": None}),
    (Body(Decimal(1), "x"), Model(amount=Decimal(1), note="x")),
    (Colour.RED, "red"),
    ({Name.RED: 1}, {"red": 1}),
    (b"ab", bytearray(b"ab")),
    ("\u00e9", "\N{LATIN SMALL LETTER E WITH ACUTE}"),
]
DIFFERENT: list[tuple[Any, Any]] = [
    (1, True),
    (0, False),
    ("1", 1),
    ({}, {"a": None}),
    ([], {}),
    ([1, 2], [2, 1]),
    ({1}, [1]),
    (["number", "1e0"], 1),
    (IDENT, str(IDENT)),
    (b"ab", "ab"),
    (date(2026, 4, 1), "2026-04-01"),
    (NOON, NOON.replace(tzinfo=None)),
    (time(1), "01:00:00"),
    (timedelta(days=1), 86400),
    ("\u00e9", "e\u0301"),
    ("a", "a "),
    ({1: "a"}, {"1": "a"}),
    (10, 1),
    (1, -1),
    (Decimal("0.1"), 1),
    (2**53 + 1, 2.0**53),
    ("\ud800", "\ud801"),
    (Hidden("a"), Hidden("b")),
]


@every_row(("one", "other"), EQUAL)
def test_equal_requests_have_one_fingerprint(one: Any, other: Any) -> None:
    """C103: key order, kinds of numbers, lists and tuples, zones, models: how it was written down does not matter."""
    assert fingerprint(one) == fingerprint(other)
    assert fingerprint({"x": [one]}) == fingerprint({"x": (other,)})


@every_row(("one", "other"), DIFFERENT)
def test_different_requests_have_different_fingerprints(one: Any, other: Any) -> None:
    """C103: a bool or a text is not a number, missing is not null, and no two kinds look alike."""
    assert fingerprint(one) != fingerprint(other)


@given(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.none()), min_size=2), st.randoms())
def test_the_order_of_a_dict_does_not_count(payload: dict[str, Any], order: random.Random) -> None:
    """Any dict has the same fingerprint after its keys are shuffled."""
    items = list(payload.items())
    order.shuffle(items)
    assert fingerprint(dict(items)) == fingerprint(payload)


def test_it_stays_the_same_from_release_to_release() -> None:
    """A stored fingerprint is compared with one that a later release computes."""
    payload = {
        "n": [1, 1.5, Decimal("2.50")],
        "t": NOON,
        "d": date(2026, 4, 1),
        "u": IDENT,
        "b": b"\xff",
        "s": {"ä"},
        "o": None,
    }
    assert (found := fingerprint(payload))
    assert found.hex() == "abe80e954ae590e2adb1b77774da3638f49e60255f9e3733a2e59c63cd9c6c94"


def test_payloads_without_a_canonical_form_are_rejected() -> None:
    """C103: NaN, objects and payloads that contain themselves are rejected at the first call, not at the retry."""
    assert fingerprint(None) is None
    endless: list[Any] = []
    endless.append(endless)
    beyond = datetime.min.replace(tzinfo=timezone(timedelta(hours=1)))
    for payload in (float("nan"), Decimal("Infinity"), endless, beyond):
        with pytest.raises(ValueError):
            fingerprint({"a": payload})
    for payload in (object(), Body, 1j):
        with pytest.raises(TypeError, match="payload cannot contain"):
            fingerprint({"a": payload})
    with pytest.raises(TypeError, match="was never set"):
        fingerprint([Model.model_construct(note="x")])


@every_row(
    "key",
    [
        "k",
        "x" * 255,
        "\U0001f600" * 255,
        " k ",
        "a b",
        "R7gOd5WD9JbBc38nLidwOtFgqNcRszVizz8aLKG0HuIdFI2HGQeq_xKhgHeV3-M3g5MOG8KTpWWgJCeZ_Rr78g",
        "'\"\\%s$1",
    ],
)
def test_these_are_keys(key: str) -> None:
    """C108: up to 255 characters of any kind that can be shown."""
    assert check_key(key, "the key") == key


@every_row(
    "key",
    ["", " ", "\t \n", "x" * 256, "".join(random.choices(string.printable, k=10_000)), "a\0", "a\nb", "\x7f", "\ud800"],
)
def test_these_are_not(key: str) -> None:
    """C108: empty, blank, too long, or with control characters: a ValueError that says so, and never a driver's error."""
    with pytest.raises(ValueError, match="the key"):
        check_key(key, "the key")


def test_a_key_is_a_text() -> None:
    """A number or None is not a key."""
    for key in (None, 7, b"k"):
        with pytest.raises(TypeError, match="must be a str"):
            check_key(key, "the key")
