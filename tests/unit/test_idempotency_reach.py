"""Which classes an annotation reaches: errors where it is named, and names that are defined later."""

from __future__ import annotations

import functools
import operator
import sys
import typing
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field, make_dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from types import ModuleType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    LiteralString,
    NamedTuple,
    Never,
    NoReturn,
    Self,
    TypedDict,
    TypeVar,
)

import pytest
import typing_extensions
from pydantic import (
    AwareDatetime,
    BaseModel,
    EmailStr,
    FutureDate,
    IPvAnyAddress,
    JsonValue,
    NaiveDatetime,
    PastDate,
    PastDatetime,
    PrivateAttr,
    SecretStr,
)

from pgfence._values.codec import Codec
from pgfence.idempotency import idempotent_call
from support.rows import every_row

if TYPE_CHECKING:
    from fractions import Fraction

    from sqlalchemy.orm import Session

T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """What is reached."""

    n: int = 1


class Other:
    """What cannot be stored."""


class Kind(Enum):
    """A value without a form of its kind."""

    A = Other()

    @property
    def name(self) -> str:
        """Be nicer."""
        return "nice"


def same(annotation: Any, value: Any) -> None:
    """Store a value and read it."""
    codec = Codec.of(annotation)
    back = codec.decode(codec.encode(value))
    assert back == value
    assert type(back) is type(value)


def run(text: str, name: str) -> Any:
    """Return a module of a text."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(text, vars(module))
    return module


@dataclass
class Annotated_:  # noqa: N801
    """Annotations that are not fields."""

    amount: int
    seed: InitVar[Other | None] = None
    rate: Final[int] = 3
    open: Final = 4
    _: KW_ONLY
    kinds: ClassVar[dict[str, type[Other]]] = {}
    line: Line = field(default_factory=Line)
    parent: Self | None = None


class Ordered(NamedTuple):
    """A named tuple to inherit from."""

    line: Line


class Constant(Ordered):
    """With an annotation that is none of its fields."""

    other: ClassVar[Other]


@dataclass
class Wide:
    """A field that is narrowed."""

    one: Any
    other: Other


@dataclass
class Narrow(Wide):
    """It can be stored."""

    other: int  # type: ignore[assignment]


def test_annotations_that_are_no_fields_are_not_looked_at() -> None:
    """C105: ClassVar, InitVar, KW_ONLY, Final, and fields that a subclass has replaced."""
    same(Annotated_, Annotated_(1, line=Line(2)))
    same(Constant, Constant(Line()))
    same(Narrow, Narrow(None, 1))


class Dates(BaseModel):
    """Marks of pydantic, whose values are of the standard library's classes."""

    at: AwareDatetime
    naive: NaiveDatetime | None = None
    past: PastDatetime | None = None
    day: PastDate | None = None
    due: FutureDate | None = None
    raw: JsonValue = None


class Typed(typing_extensions.TypedDict):
    """The one that pydantic demands below Python 3.12."""

    line: typing_extensions.Required[Line]
    more: typing_extensions.NotRequired[list[Typed]]
    only: typing_extensions.NotRequired[typing_extensions.ReadOnly[int]]


class Tree(TypedDict):
    """One that holds itself."""

    line: Line
    kids: list[Tree]


def test_marks_and_typed_dicts_count_as_what_their_values_are() -> None:
    """C105: a model with AwareDatetime; a TypedDict of typing_extensions, and one that holds itself."""
    same(Dates, Dates(at=datetime(2026, 1, 2, tzinfo=UTC), day=date(2020, 1, 2), raw={"a": [1]}))
    same(Typed, {"line": Line(), "more": [{"line": Line(2)}]})
    same(Tree, {"line": Line(), "kids": [{"line": Line(2), "kids": []}]})
    for one in (SecretStr, IPvAnyAddress):
        with pytest.raises(TypeError, match="cannot be stored"):
            Codec.of(one)


@every_row("annotation", [Never, NoReturn, LiteralString, Self, EmailStr, TypeVar("T"), Mapping[str, Line] | str])
def test_what_says_nothing_is_no_rejection(annotation: Any) -> None:
    """If the annotation names no class, only the values decide."""
    same(annotation, "a")


@every_row(
    "annotation", [Callable[[int], Line], Callable, Iterator[int], Generator[int, None, None], type[Line], Line(), 7]
)
def test_annotations_without_storable_values_are_rejected_in_words(annotation: Any) -> None:
    """C105: nothing that can be stored is callable or an iterator."""
    with pytest.raises(TypeError, match="cannot be stored as the result"):
        Codec.of(annotation)


@dataclass
class Box(Generic[T]):
    """A generic one."""

    content: T


class Lines(Box[Line]):
    """Its field is of a class that only the base's argument names."""


class Repository(Generic[T]):
    """One without fields."""


@dataclass
class Held(Repository[Other]):
    """Generic over a class that cannot be stored, but without a field of it."""

    amount: int


class Guarded(BaseModel):
    """With a private attribute."""

    amount: int
    _seen: int = PrivateAttr(default=1)


def test_bases_are_reached_and_private_attributes_are_rejected() -> None:
    """C105: a class of which a part could not be stored is rejected before the work."""
    same(Lines, Lines(Line()))
    same(Held, Held(1))
    same(list[Kind], [Kind.A])
    with pytest.raises(TypeError, match="private attributes are not stored, and it has '_seen'"):
        Codec.of(Guarded)


class Fee(Line, Enum):
    """An enumeration whose members are dataclasses."""

    LOW = 1


@dataclass
class Declined(Exception):
    """An exception that is a dataclass."""

    code: int


@every_row(
    ("rejected", "why"),
    [
        (Guarded, "private attributes are not stored, and it has '_seen'. Return a model without them"),
        (Fee, "it is an enumeration and a dataclass. Return an instance of a class that is only one of these"),
        (Declined, "it is a dataclass and an exception. Return an instance of a class that is only one of these"),
    ],
)
def test_a_class_of_two_kinds_is_rejected_at_decoration(rejected: type[Any], why: str) -> None:
    """C105: the error names the class and says what to return instead."""

    def pay(session: Session) -> None: ...

    pay.__annotations__["return"] = list[rejected]
    with pytest.raises(TypeError, match=f"^{rejected.__name__} cannot be stored .*{why}"):
        idempotent_call(key="k", scope="s")(pay)


LATER = """
from __future__ import annotations
from dataclasses import dataclass
from pydantic import BaseModel
from sqlalchemy.orm import Session
from typing import NamedTuple

@dataclass
class Receipt:
    lines: list[Line]

class Pair(NamedTuple):
    line: Line

class Model(BaseModel):
    line: Line

def pay(session: Session) -> Invoice: ...
"""
DEFINED = """
@dataclass(frozen=True)
class Line:
    n: int = 1

@dataclass
class Invoice:
    line: Line
"""


@dataclass
class Mixed:
    """One name that only type checkers know, and one that is known."""

    fraction: Fraction | None
    line: Line
    amount: Decimal = Decimal(1)


@dataclass
class Puzzling:
    """With annotations that cannot be evaluated."""

    text: "not an expression"  # type: ignore[valid-type] # noqa: F722
    other: Decimal.missing | None  # type: ignore[name-defined]
    amount: int = 1


@pytest.fixture
def later() -> Any:
    """A module of which only the first half has run."""
    return run(LATER, "pgfence_defined_later")


def test_a_class_that_is_not_defined_yet_is_reached_when_it_is(later: Any) -> None:
    """C105: an early check does not reject results later; the other classes are known at once."""
    for name in ("Receipt", "Pair", "Model"):
        Codec.of(getattr(later, name))
    exec(DEFINED, vars(later))
    same(later.Receipt, later.Receipt([later.Line()]))
    same(later.Pair, later.Pair(later.Line()))
    same(later.Model, later.Model.model_validate({"line": later.Line()}))
    same(Mixed, Mixed(None, Line()))
    same(Puzzling, Puzzling("a", None))


def test_a_function_may_be_decorated_before_its_result_is_defined(later: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """C105: calls resolve the class that was defined after the decoration."""
    asked: list[Any] = []

    def ask(*_: Any, result: Any, **__: Any) -> Ready:
        asked.append(result)
        return Ready()

    monkeypatch.setattr("pgfence.idempotency._decorator.idempotent", ask)
    call = idempotent_call(key="k", scope="s")(later.pay)
    exec(DEFINED, vars(later))
    call(None)
    assert asked == [later.Invoice]


class Ready:
    """A key whose work is done."""

    def run(self, fn: Any) -> None:
        """Do nothing."""


def test_indistinguishable_classes_of_one_name_are_rejected() -> None:
    """C105: of one module, too; before the work, of which the result could not be read."""
    rows: list[Any] = [make_dataclass("Row", [("n", int)], namespace={"__module__": "m"}) for _ in range(2)]
    with pytest.raises(TypeError, match="two classes have the name"):
        Codec.of(functools.reduce(operator.or_, rows))
    same(list.__class_getitem__(rows[0]), [rows[0](1), rows[0](2)])


OLDER = """
from dataclasses import dataclass
from typing import TypeVar, Union
from typing_extensions import TypeAliasType

@dataclass
class Node:
    v: int

T = TypeVar("T")
Json = TypeAliasType("Json", Union[dict[str, "Json"], list["Json"], str, int, None])
Nodes = TypeAliasType("Nodes", Union[list["Nodes"], Node])
Twice = TypeAliasType("Twice", tuple[T, T], type_params=(T,))
"""
ALIASES = """
from __future__ import annotations
from dataclasses import dataclass
from pydantic import BaseModel

@dataclass
class Node:
    v: int

type Json = dict[str, Json] | list[Json] | str | int | None
type Twice[T] = tuple[T, T]
type Tree[T] = tuple[T, list[Tree[T]]]
type Nothing = None

@dataclass
class Body[T]:
    json: Json
    content: T

class Model(BaseModel):
    json_: Json
"""


def test_aliases_may_hold_themselves_and_have_arguments() -> None:
    """C105: an alias that refers to itself is not a RecursionError, and its arguments are reached."""
    module = run(OLDER, "pgfence_older_aliases")
    node = module.Node(1)
    same(module.Json, {"a": [1, {"b": None}]})
    same(module.Nodes, [[node]])
    same(module.Twice[module.Node], (node, node))


@pytest.mark.skipif(not hasattr(typing, "TypeAliasType"), reason="Python 3.12 has the statement")
def test_the_statement_makes_such_an_alias_too() -> None:
    """C105: also in a field of a dataclass or model, and beside a class with its own type variables."""
    module = run(ALIASES, "pgfence_aliases")
    node = module.Node(1)
    same(module.Json, {"a": [1, {"b": None}]})
    same(module.Twice[module.Node], (node, node))
    same(module.Tree[module.Node], (node, [(node, [])]))
    same(module.Nothing, None)
    same(module.Body[module.Node], module.Body({"a": [1]}, node))
    same(module.Model, module.Model(json_={"a": [1]}))
