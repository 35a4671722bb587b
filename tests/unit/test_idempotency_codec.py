"""Results as tagged JSON, through a real jsonb: what comes back is equal, and of the same types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NewType, TypedDict
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence._values.codec import LIMIT, Codec
from pgfence.errors import IdempotencyMisuseError
from support.rows import every_row

if TYPE_CHECKING:
    import psycopg


class Colour(Enum):
    """A plain one."""

    RED = "red"
    BLUE = (1, 2)


class Level(IntEnum):
    """One that is a number, too."""

    LOW = 1


class Kind(StrEnum):
    """One that is a text, too."""

    A = "a"


class Right(Flag):
    """Members that can be joined."""

    READ = 1
    WRITE = 2


class Point(NamedTuple):
    """A tuple with names."""

    x: int
    y: Decimal


class Line(TypedDict):
    """A dict at run time."""

    start: Point


@dataclass(frozen=True, slots=True)
class Money:
    """Frozen, with slots, and validated in the constructor."""

    amount: Decimal
    currency: str = "EUR"

    def __post_init__(self) -> None:
        if self.currency == "checked once":
            raise AssertionError("made again")


@dataclass
class Order:
    """One that holds others."""

    ident: UUID
    items: list[Money]
    colour: Colour = Colour.RED
    seen: dict[str, datetime] = field(default_factory=dict)


class Answer(BaseModel):
    """A pydantic model with everything that a copy keeps."""

    model_config = ConfigDict(extra="allow")
    ident: int = Field(alias="id")
    money: Money | None = None
    raw: bytes = b"\xff"
    when: datetime | None = None


class Plain(BaseModel):
    """A pydantic model without anything special."""

    amount: Decimal


Ident = NewType("Ident", int)
RESULT = (
    Order
    | Answer
    | Plain
    | list[Money]
    | Line
    | Annotated[Level, "doc"]
    | Kind
    | Right
    | Sequence[Point]
    | Literal["x"]
    | Any
    | Ident
)

# In whole seconds: CPython reads an offset of less than a second as UTC.
fixed = st.integers(-23 * 3600, 23 * 3600).map(lambda offset: timezone(timedelta(seconds=offset)))
zones = st.one_of(st.none(), st.just(UTC), fixed, st.sampled_from(("Europe/Berlin", "America/New_York")).map(ZoneInfo))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(allow_nan=False),
    st.decimals(allow_nan=False),
    st.text(max_size=20),
    st.text(st.characters(categories=("Cs", "Cc", "Lu")), max_size=5),
    st.binary(max_size=20),
    st.binary(max_size=5).map(bytearray),
    st.datetimes(timezones=zones),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    st.sampled_from((Colour.RED, Colour.BLUE, Level.LOW, Kind.A, Right.READ, Right.READ | Right.WRITE)),
    st.builds(Point, st.integers(), st.decimals(allow_nan=False)),
    st.builds(Money, st.decimals(allow_nan=False), st.text(max_size=3)),
)
hashable = st.one_of(st.integers(), st.text(max_size=5), st.binary(max_size=5), st.dates(), st.uuids())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=6), inner, max_size=4),
        st.dictionaries(st.sampled_from(("$t", "$c", "$", "v", "")), inner, max_size=3),
        st.dictionaries(hashable, inner, max_size=3),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
        st.builds(Order, st.uuids(), st.lists(st.builds(Money, st.decimals(allow_nan=False)), max_size=2)),
        st.builds(lambda given: Plain.model_construct(amount=given), inner),
    ),
    max_leaves=10,
)


def stored(admin: psycopg.Connection[Any], text: str) -> str:
    """Return a JSON text as jsonb gives it back."""
    row = admin.execute("SELECT (%s::text)::jsonb::text", [text]).fetchone()
    assert row
    return str(row[0])


def same(left: Any, right: Any) -> bool:
    """Compare values and types, deeply; a zone by its name or offset, and a zero with its sign."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    if isinstance(left, Decimal):
        return left.as_tuple() == right.as_tuple()
    if isinstance(left, datetime):
        return left.replace(tzinfo=None) == right.replace(tzinfo=None) and left.utcoffset() == right.utcoffset()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Plain):
        return same(left.amount, right.amount)
    return bool(left == right)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(value=values)
def test_what_comes_back_is_equal_and_of_the_same_types(admin: psycopg.Connection[Any], value: Any) -> None:
    """C105: every value of the listed types, nested in any way, survives jsonb: NUL, half surrogates, -0.0, 1e22, 1.10."""
    codec = Codec.of(RESULT)
    assert same(codec.decode(stored(admin, codec.encode(value))), value)


def test_what_is_special_survives(admin: psycopg.Connection[Any]) -> None:
    """Values that JSON, jsonb or Python's json are known to lose, and models with their aliases and extras."""
    answer = Answer(id=7, money=Money(Decimal("1.10"), "USD"), note="extra", when=datetime(2026, 1, 1, tzinfo=UTC))
    for value in (
        "a\0b",
        "\ud800",
        Decimal("1.10"),
        Decimal("-0"),
        Decimal("Infinity"),
        float("inf"),
        -0.0,
        1e22,
        0.1,
        1.0,
        10**100,
        {"$t": "Decimal", "v": "1"},
        {1: "a", "1": "b"},
        datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        datetime(2026, 10, 25, 2, 30, fold=1),  # noqa: DTZ001
        datetime(2026, 10, 25, 2, 30, tzinfo=UTC, fold=1),
        time(1, 2, 3, 4),
        time(1, fold=1),
        timedelta(microseconds=-1),
        answer,
        [answer],
        Money(Decimal(1)),
        {"a": (1, [Point(1, Decimal("2.0"))])},
    ):
        codec = Codec.of(RESULT)
        back = codec.decode(stored(admin, codec.encode(value)))
        assert type(back) is type(value)
        assert repr(back) == repr(value)
    nan = Codec.of(None).decode(stored(admin, Codec.of(None).encode([math.nan, Decimal("NaN")])))
    assert str(nan) == "[nan, Decimal('NaN')]"


def test_a_model_comes_back_with_its_extra_fields_and_what_was_set() -> None:
    """What pydantic keeps beside the fields is kept, and nothing is validated again."""
    answer = Answer(id=7, note="extra")
    codec = Codec.of(Answer)
    back = codec.decode(codec.encode(answer))
    assert back == answer
    assert (back.model_fields_set, back.model_extra) == ({"ident", "note"}, {"note": "extra"})
    plain = Codec.of(Plain)
    assert plain.decode(plain.encode(Plain(amount=Decimal(1)))).model_dump() == {"amount": Decimal(1)}


def test_decoding_does_not_run_a_dataclasss_constructor() -> None:
    """`__post_init__` ran when the result was created."""
    money = Money(Decimal(1))
    object.__setattr__(money, "currency", "checked once")
    codec = Codec.of(Money)
    assert codec.decode(codec.encode(money)) == money


def test_a_record_that_is_older_than_a_field_takes_its_default() -> None:
    """A field with a default may be added while results are kept; one without is named."""
    codec = Codec.of(Money | Answer)
    assert codec.decode('{"$c": "Money", "v": {"amount": {"$t": "Decimal", "v": "1"}}}') == Money(Decimal(1))
    assert codec.decode('{"$c": "Answer", "v": {"ident": 1}}').raw == b"\xff"
    for text, name in (('{"$c": "Money", "v": {}}', "amount"), ('{"$c": "Answer", "v": {}}', "ident")):
        with pytest.raises(IdempotencyMisuseError, match=name):
            codec.decode(text)
    with pytest.raises(IdempotencyMisuseError, match="does not refer to"):
        Codec.of(int).decode('{"$c": "Money", "v": {}}')


class Row(DeclarativeBase):
    """A mapped base."""


class Payment(Row):
    """A row."""

    __tablename__ = "payment_of_codec"
    ident: Mapped[int] = mapped_column(primary_key=True)


class Other:
    """Anything."""


@dataclass
class Nested:
    """What cannot be stored is deep inside."""

    deep: list[dict[str, Other | None]]


@every_row("annotation", [Other, Nested, list[Other], Payment, complex, Nested | None, tuple[int, Payment]])
def test_an_unstorable_annotation_is_rejected_before_anything_runs(annotation: Any) -> None:
    """C105: the class is named, also deep inside; for a database row the error says what to return instead."""
    with pytest.raises(
        TypeError, match="Return the key of the row" if "Payment" in str(annotation) else "cannot be stored"
    ):
        Codec.of(annotation)


def test_a_value_that_cannot_be_stored_is_rejected() -> None:
    """A class that the annotation does not refer to, nothing that ends, and what is too large."""
    endless: list[Any] = []
    endless.append(endless)
    for value in (
        Other(),
        Money(Decimal(1)),
        endless,
        "x" * (LIMIT + 1),
        ["ä" * (LIMIT // 2 + 1)],
        10**5000,
        1j,
        {Other(): 1},
    ):
        with pytest.raises(IdempotencyMisuseError):
            Codec.of(None).encode(value)
    assert Codec.of(None).encode("x" * (LIMIT - 2))


def test_a_model_without_a_field_is_rejected_by_name() -> None:
    """`model_construct()` checks nothing; what cannot come back as it was is not stored."""
    with pytest.raises(IdempotencyMisuseError, match="Answer without a value for 'ident', so"):
        Codec.of(Answer).encode(Answer.model_construct(raw=b""))


def test_two_classes_of_one_name_are_distinguished() -> None:
    """Instances of such classes are stored with the names of their modules."""
    other = Enum("Money", {"ONE": 1}, module="elsewhere")  # type: ignore[misc]
    codec = Codec.of(Money | other)  # type: ignore[operator]
    for value in (Money(Decimal(1)), other.ONE):  # type: ignore[attr-defined]
        assert codec.decode(codec.encode(value)) == value
    assert Codec.of(Money).decode(codec.encode(Money(Decimal(1)))) == Money(Decimal(1))


def test_a_uuid_of_a_driver_becomes_a_plain_one() -> None:
    """The driver asyncpg has its own class; the replayed one is the standard library's, and equal."""

    class Fast(UUID):
        """Like asyncpg's."""

    ident = uuid4()
    back = Codec.of(UUID).decode(Codec.of(UUID).encode(Fast(str(ident))))
    assert back == ident
    assert type(back) is UUID


def test_a_day_is_no_moment() -> None:
    """A `date` and a `datetime` are stored as different types."""
    codec = Codec.of(None)
    for value in (date(2026, 1, 2), datetime(2026, 1, 2)):  # noqa: DTZ001
        assert type(codec.decode(codec.encode(value))) is type(value)


EARLIER = [
    (
        '{"$c": "Money", "v": {"amount": {"$t": "Decimal", "v": "1.10"}, "currency": "USD"}}',
        Money(Decimal("1.10"), "USD"),
    ),
    (
        '{"$c": "Plain", "v": {"amount": {"$t": "Decimal", "v": "1"}}, "private": {"_seen": 1}}',
        Plain(amount=Decimal(1)),
    ),
    (
        '{"$c": "Answer", "v": {"ident": 7}, "set": ["ident"], "extra": {"a": 1}}',
        Answer.model_validate({"id": 7, "a": 1}),
    ),
    ('{"$c": "Colour", "m": "BLUE"}', Colour.BLUE),
    ('{"$c": "Right", "v": 3}', Right.READ | Right.WRITE),
    ('{"$c": "Point", "v": [1, {"$t": "Decimal", "v": "2.0"}]}', Point(1, Decimal("2.0"))),
    (f'{{"$c": "{__name__}.Kind", "m": "A"}}', Kind.A),
    (
        '{"$t": "datetime", "v": "2026-10-25T02:30:00", "zone": "Europe/Berlin", "fold": 1}',
        datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    ),
    ('{"$t": "time", "v": "01:00:00", "fold": 1}', time(1, fold=1)),
    ('{"$t": "timedelta", "v": [-1, 86399, 999999]}', timedelta(microseconds=-1)),
    ('{"$t": "dict", "v": [[1, {"$t": "tuple", "v": [{"$t": "float", "v": "-0.0"}]}]]}', {1: (-0.0,)}),
    ('[{"$t": "bytes", "v": "/w=="}, {"$t": "bytearray", "v": "/w=="}]', [b"\xff", bytearray(b"\xff")]),
    ('{"$t": "str", "v": "YQBi"}', "a\0b"),
]


def test_what_earlier_versions_stored_is_read() -> None:
    """These texts are in databases: a retry gets the result that was stored before the upgrade."""
    codec = Codec.of(RESULT)
    assert [text for text, value in EARLIER if not same(codec.decode(text), value)] == []


def test_a_stored_class_that_has_changed_raises_a_clear_error() -> None:
    """C110: a member that an enumeration has lost, a named tuple that has become shorter: no KeyError or TypeError."""
    before: list[tuple[Any, Any]] = [
        (Enum("Shape", "A B"), "B"),
        (NamedTuple("Pair", [("a", int), ("b", int)]), (1, 2)),
    ]
    after: list[Any] = [Enum("Shape", "A"), NamedTuple("Pair", [("a", int)])]
    for (old, value), new in zip(before, after, strict=True):
        text = Codec.of(old).encode(old[value] if issubclass(old, Enum) else old(*value))
        with pytest.raises(IdempotencyMisuseError, match="has changed"):
            Codec.of(new).decode(text)
