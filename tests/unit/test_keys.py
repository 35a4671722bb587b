"""Keys: the frozen format, what is accepted, and how keys behave as values."""

from __future__ import annotations

import copy
import enum
import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sqlalchemy.dialects import postgresql

from pgfence.keys import LockKey, resolve
from support.rows import every_row

DATA = json.loads((Path(__file__).parents[1] / "data" / "key_vectors.json").read_text(encoding="ascii"))
VECTORS = DATA["vectors"]

int64 = st.integers(-(2**63), 2**63 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00\x1f"))
names = texts.filter(bool)
keys = st.one_of(
    st.builds(LockKey.raw, int64),
    st.builds(LockKey.pair, int32, int32),
    st.builds(lambda name, namespace: LockKey.of(name, namespace=namespace), names, texts),
)


class Colour(str, enum.Enum):  # noqa: UP042 - the kind whose format() changed
    """A text with its own formatting."""

    RED = "red"


class Number(int, enum.Enum):
    """A number with its own formatting."""

    SEVEN = 7


@every_row("vector", VECTORS)
def test_a_name_gives_its_frozen_key(vector: dict) -> None:
    """C023: every vector of the data file is met, value and both halves as pg_locks shows them."""
    key = LockKey.of(vector["name"], namespace=vector["namespace"])
    assert key.value == int(vector["value"])
    assert (key.value >> 32 & 0xFFFFFFFF, key.value & 0xFFFFFFFF) == (vector["classid"], vector["objid"])
    assert key.space == "bigint"


@every_row("vector", DATA["turnstiles"])
def test_a_key_gives_its_frozen_turnstile(vector: dict) -> None:
    """Every vector of the data file is met, for names and for ready keys, and a named key differs from its number's."""
    if "raw" in vector:
        key = LockKey.raw(vector["raw"])
    elif "pair" in vector:
        key = LockKey.pair(*vector["pair"])
    else:
        key = LockKey.of(vector["name"], namespace=vector["namespace"])
        assert LockKey.raw(key.value)._turnstile != key._turnstile
    assert key._turnstile == LockKey.raw(int(vector["turnstile"]))


def test_the_vectors_cover_both_signs_and_differ() -> None:
    """The data file has keys of both signs in both halves, and no two vectors share a key."""
    assert len({v["value"] for v in VECTORS}) == len(VECTORS)
    for half in ("classid", "objid"):
        assert {v[half] >= 2**31 for v in VECTORS} == {True, False}


@every_row("seed", ["0", "1", "random", None])
def test_every_interpreter_gives_the_same_keys(seed: str | None) -> None:
    """C023: an interpreter with any PYTHONHASHSEED prints the golden values, of a 10 kB name too."""
    program = (
        "import json, sys; from pgfence.keys import LockKey\n"
        "print(json.dumps([str(LockKey.of(n, namespace=s).value) for s, n in json.load(sys.stdin)]))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    asked = json.dumps([[v["namespace"], v["name"]] for v in VECTORS])
    done = subprocess.run(
        [sys.executable, "-c", program], input=asked, capture_output=True, text=True, env=environment, check=True
    )
    assert json.loads(done.stdout) == [v["value"] for v in VECTORS]


def test_300_000_uuid_names_share_no_key_and_use_every_bit() -> None:
    """C024: no two of 300,000 UUID names collide, and each of the 64 bits is seen set and unset."""
    source = random.Random(24)
    values = [LockKey.of(str(UUID(int=source.getrandbits(128), version=4))).value for _ in range(300_000)]
    assert len(set(values)) == len(values)
    seen_set = seen_unset = 0
    for value in values:
        seen_set |= value & 2**64 - 1
        seen_unset |= ~value & 2**64 - 1
    assert seen_set == seen_unset == 2**64 - 1


@given(names, texts)
def test_any_valid_name_gives_a_signed_64_bit_key(name: str, namespace: str) -> None:
    """C025: every valid name has a key that fits a bigint, computed as documented."""
    key = LockKey.of(name, namespace=namespace)
    digest = hashlib.sha256(namespace.encode() + b"\x1f" + name.encode()).digest()
    assert key.value == int.from_bytes(digest[:8], "big", signed=True)
    assert -(2**63) <= key.value < 2**63
    assert (key.space, key.name, key.label) == ("bigint", name, name)


@given(names, texts, names, texts)
def test_two_spellings_never_meet(name: str, namespace: str, other: str, elsewhere: str) -> None:
    """C026: pairs of namespace and name that differ anywhere have different keys."""
    assume((name, namespace) != (other, elsewhere))
    assert LockKey.of(name, namespace=namespace) != LockKey.of(other, namespace=elsewhere)


@given(texts.filter(lambda text: len(text) >= 2), st.data())
def test_moving_the_split_between_namespace_and_name_changes_the_key(text: str, data: st.DataObject) -> None:
    """C026: ("a", "bc") and ("ab", "c") differ, for any text and any two splits; without a namespace it differs again."""
    one, two = data.draw(st.lists(st.integers(0, len(text) - 1), min_size=2, max_size=2, unique=True))
    assert LockKey.of(text[one:], namespace=text[:one]) != LockKey.of(text[two:], namespace=text[:two])


@given(st.lists(names, min_size=1, max_size=5), texts)
def test_many_names_give_the_keys_that_each_gives_alone(some: list[str], namespace: str) -> None:
    """C025: hashed together or one by one, a name has the same key, and the keys come sorted, each once."""
    many = [*some, *(f"{some[0]}:{n}" for n in range(101)), *some]
    found = resolve(many, namespace)
    assert found == tuple(sorted({LockKey.of(name, namespace=namespace) for name in many}))
    assert [key.name for key in found] == [key.label for key in found]
    assert {str(key.sql.compile(dialect=postgresql.dialect()).params) for key in found[:3]} == {
        str(LockKey.of(key.label, namespace=namespace).sql.compile(dialect=postgresql.dialect()).params)
        for key in found[:3]
    }


@every_row("bad", ["", "a\x00b", "a\x1fb", "\ud800", 7, None, b"a"])
def test_an_unusable_name_among_many_is_rejected_like_one_alone(bad: object) -> None:
    """The error is the same as for that name alone."""
    with pytest.raises((TypeError, ValueError)) as alone:
        LockKey.of(bad)  # type: ignore[arg-type]
    with pytest.raises(alone.type) as caught:
        resolve([*(f"n{n}" for n in range(200)), bad], "")  # type: ignore[list-item]
    assert str(caught.value) == str(alone.value)


def test_ready_keys_and_other_texts_among_many_are_resolved_too() -> None:
    """A lock of many names accepts the same arguments as a lock of a few names."""
    plain = [f"n{n}" for n in range(200)]
    found = resolve([*plain, Colour.RED, LockKey.pair(1, 2), LockKey.raw(LockKey.of("n7").value)], "space")
    assert len(found) == 203
    assert found[-1] == LockKey.pair(1, 2)
    assert LockKey.of("red", namespace="space") in found


def test_an_empty_namespace_is_none() -> None:
    """C026: a name without a namespace has the key of the empty namespace."""
    assert LockKey.of("alembic") == LockKey.of("alembic", namespace="")


@given(int64)
def test_a_raw_key_is_its_number(value: int) -> None:
    """A raw key keeps its number, in the bigint space, without a name."""
    key = LockKey.raw(value)
    assert (key.value, key.space, key.name, key.label) == (value, "bigint", None, f"key {value}")


@given(int32, int32)
def test_a_pair_is_both_halves_in_a_separate_key_space(classid: int, objid: int) -> None:
    """C028: the value of a pair is classid << 32 | objid, and it never equals the bigint of the same bits."""
    key = LockKey.pair(classid, objid)
    assert key.value >> 32 == classid
    assert key.value & 0xFFFFFFFF == objid & 0xFFFFFFFF
    assert (key.space, key.name, key.label) == ("pair", None, f"key ({classid}, {objid})")
    assert key != LockKey.raw(key.value)
    assert len({key, LockKey.raw(key.value), LockKey.pair(classid, objid)}) == 2


@given(st.lists(keys))
def test_bigint_keys_sort_first_then_by_value(several: list[LockKey]) -> None:
    """The order of keys is the bigint space before the pairs, each by its number."""
    assert sorted(several) == sorted(several, key=lambda key: (key.space == "pair", key.value))


@given(keys, keys)
def test_comparisons_agree(one: LockKey, two: LockKey) -> None:
    """Exactly one of less, equal, greater holds, and equal keys hash alike."""
    assert (one < two) + (one == two) + (one > two) == 1
    assert (one <= two) == (one < two or one == two)
    assert (one >= two) == (one > two or one == two)
    if one == two:
        assert hash(one) == hash(two)


@given(names)
def test_equality_is_by_key_and_not_by_name(name: str) -> None:
    """A named key equals the raw key of its number: PostgreSQL takes them for one lock."""
    named = LockKey.of(name)
    assert named == LockKey.raw(named.value)
    assert hash(named) == hash(LockKey.raw(named.value))


def test_a_key_is_compared_with_keys_only() -> None:
    """A key equals no number or name, and ordering against one is a TypeError."""
    key = LockKey.raw(7)
    assert key != 7
    assert LockKey.of("a") != "a"
    with pytest.raises(TypeError):
        assert key < 7  # type: ignore[operator]


@given(keys)
def test_a_key_survives_pickle_and_copy_whole(key: LockKey) -> None:
    """Pickling with every protocol, copy and deepcopy keep space, value, name and SQL."""
    again = [pickle.loads(pickle.dumps(key, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for twin in (*again, copy.copy(key), copy.deepcopy(key)):
        assert (twin, twin.space, twin.value, twin.name) == (key, key.space, key.value, key.name)
        assert repr(twin) == repr(key)
        assert str(twin.sql.compile(dialect=postgresql.dialect())) == str(key.sql.compile(dialect=postgresql.dialect()))


def test_a_key_cannot_be_changed() -> None:
    """No attribute of a key can be set, added or deleted."""
    key = LockKey.of("a")
    for attribute in ("value", "_value", "extra"):
        with pytest.raises(AttributeError):
            setattr(key, attribute, 1)
    with pytest.raises(AttributeError):
        del key._value
    assert key == LockKey.of("a")


def test_a_key_is_created_only_by_its_four_constructors() -> None:
    """Calling the class raises and names the ways to make a key."""
    with pytest.raises(TypeError, match=r"LockKey\.of"):
        LockKey()


@given(names, texts, st.one_of(names, st.integers()))
def test_a_family_gives_the_key_of_name_colon_id(name: str, namespace: str, ident: str | int) -> None:
    """`family(name)(id)` is `of(f"{name}:{id}")`, for str and int ids."""
    assert LockKey.family(name, namespace=namespace)(ident) == LockKey.of(f"{name}:{ident}", namespace=namespace)


def test_the_int_and_the_str_of_one_id_are_one_key_in_a_family() -> None:
    """C031: 7 and "7" cannot be two keys of one family."""
    assert LockKey.family("order")(7) == LockKey.family("order")("7") == LockKey.of("order:7")


def test_an_enum_counts_as_its_plain_text_or_number() -> None:
    """C023: a str or int enum gives the key of its value, however the Python at hand formats enums."""
    assert LockKey.of(Colour.RED, namespace=Colour.RED) == LockKey.of("red", namespace="red")
    assert LockKey.family(Colour.RED)(Colour.RED) == LockKey.of("red:red")
    assert LockKey.family("n")(Number.SEVEN) == LockKey.of("n:7")
    assert type(LockKey.of(Colour.RED).name) is str
    assert type(LockKey.raw(Number.SEVEN).value) is int


@every_row(
    ("one", "two"),
    [
        ("caf\u00e9", "cafe\u0301"),
        ("a", "a "),
        ("Order:7", "order:7"),
        ("stra\u00dfe", "strasse"),
        ("\ufb01le", "file"),
        ("a\u200b", "a"),
        ("7", "07"),
    ],
)
def test_nothing_is_normalised(one: str, two: str) -> None:
    """C031: names that differ in one code point are two locks, composed and decomposed Unicode included."""
    assert LockKey.of(one) != LockKey.of(two)


@every_row("name", [7, None, b"a", True, 1.0, UUID(int=1), ["a"], LockKey.raw(1)])
def test_a_name_that_is_not_a_str_is_rejected(name: object) -> None:
    """C031: 7, None, bytes and UUID are rejected, so that the caller spells each of them in one way."""
    with pytest.raises(TypeError, match="must be a str"):
        LockKey.of(name)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a str"):
        LockKey.of("a", namespace=name)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a str"):
        LockKey.family(name)  # type: ignore[arg-type]


@every_row("text", ["\x00", "a\x00b", "\x1f", "a\x1fb", "\ud800", "a\udfff"])
def test_a_name_that_cannot_be_stored_is_rejected(text: str) -> None:
    """C031: NUL, the separator and lone surrogates are a ValueError here and never reach a driver."""
    for make in (
        lambda: LockKey.of(text),
        lambda: LockKey.of("a", namespace=text),
        lambda: LockKey.family(text),
        lambda: LockKey.family("a", namespace=text),
        lambda: LockKey.family("a")(text),
        lambda: resolve([text], ""),
        lambda: resolve(["a"], text),
    ):
        with pytest.raises(ValueError, match=r"must not contain|valid Unicode"):
            make()


def test_an_empty_name_or_id_is_rejected() -> None:
    """An empty name, family or id is a ValueError; an empty namespace is the default."""
    for make in (lambda: LockKey.of(""), lambda: LockKey.family(""), lambda: LockKey.family("a")("")):
        with pytest.raises(ValueError, match="empty"):
            make()


@every_row("ident", [None, True, 1.0, b"a", UUID(int=1), (1, 2)])
def test_an_id_that_is_neither_str_nor_int_is_rejected(ident: object) -> None:
    """C031: the id of a family is a str or an int, nothing that only looks like one."""
    with pytest.raises(TypeError, match="str or an int"):
        LockKey.family("a")(ident)  # type: ignore[arg-type]


@every_row("value", [0, 1, -1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63)])
def test_the_edges_of_a_raw_key_are_accepted(value: int) -> None:
    """C025: every number that a bigint holds is a key."""
    assert LockKey.raw(value).value == value


@every_row("value", [2**63, -(2**63) - 1, 2**64 - 1, 10**40])
def test_a_raw_key_out_of_range_is_rejected(value: int) -> None:
    """C025: an unsigned or larger number is a ValueError before any SQL."""
    with pytest.raises(ValueError, match="64-bit"):
        LockKey.raw(value)


@every_row("half", [2**31, -(2**31) - 1, 3048471620, 2**32 - 1])
def test_a_half_out_of_range_is_rejected(half: int) -> None:
    """C025: an unsigned 32-bit number is rejected as a half of a pair."""
    for pair in ((half, 0), (0, half)):
        with pytest.raises(ValueError, match="32-bit"):
            LockKey.pair(*pair)


@every_row("value", [True, False, 1.0, "1", None, b"\x01"])
def test_a_number_that_is_not_an_int_is_rejected(value: object) -> None:
    """C025: True, 1.0 and text are a TypeError: a key is never rounded or guessed."""
    for make in (LockKey.raw, lambda v: LockKey.pair(v, 0), lambda v: LockKey.pair(0, v)):
        with pytest.raises(TypeError, match="must be an int"):
            make(value)


@given(st.lists(st.one_of(keys, names), min_size=1), texts)
def test_resolving_sorts_and_removes_doubles(several: list[str | LockKey], namespace: str) -> None:
    """Several names become keys in one global order, each once, for any order of the names."""
    resolved = resolve(several, namespace)
    assert list(resolved) == sorted(set(resolved))
    assert resolve(reversed(several), namespace) == resolved
    wanted = {n if isinstance(n, LockKey) else LockKey.of(n, namespace=namespace) for n in several}
    assert set(resolved) == wanted


def test_a_ready_key_is_not_moved_by_the_namespace() -> None:
    """The namespace applies to names; a LockKey is unchanged."""
    ready = LockKey.of("a", namespace="other")
    assert set(resolve(["a", ready], "mine")) == {LockKey.of("a", namespace="mine"), ready}


def test_one_key_under_two_names_is_asked_for_once() -> None:
    """A name and the raw key of its number are one lock; the first spelling given stays."""
    named = LockKey.of("a")
    assert resolve([named, LockKey.raw(named.value)], "") == (named,)
    assert resolve([named, LockKey.raw(named.value)], "")[0].name == "a"


def test_an_empty_list_of_names_is_rejected() -> None:
    """A lock without a name is a ValueError."""
    with pytest.raises(ValueError, match="at least one name"):
        resolve([], "")


@every_row("name", [None, 7, b"a"])
def test_resolving_rejects_what_is_neither_name_nor_key(name: object) -> None:
    """C031: a number among the names is a TypeError and not silently its text."""
    with pytest.raises(TypeError, match="must be a str"):
        resolve(["a", name], "")  # type: ignore[list-item]


def test_the_sql_expression_binds_the_name_and_qualifies_its_functions() -> None:
    """The SQL text never contains the name, and the search_path does not decide which function runs."""
    text = str(LockKey.of("a'); DROP TABLE x; --").sql.compile(dialect=postgresql.dialect()))
    assert "DROP" not in text
    assert text.count("pg_catalog.") == 4
