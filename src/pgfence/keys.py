"""Lock names and their 64-bit keys, which are the same in every process, on every platform and in every release.

The key is the first 8 bytes, big-endian and signed, of SHA-256 over UTF-8(namespace + U+001F + name), without a salt, whatever
the byte order of the host. The text is used unchanged. It is not normalized, stripped or case-folded, so a composed and a
decomposed "é" are two different names.

PostgreSQL has two separate spaces of advisory lock keys: single bigint numbers, and pairs of int4 numbers. Names use the first
space. `LockKey.raw` and `LockKey.pair` return the keys of other programs.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from functools import lru_cache, total_ordering
from itertools import repeat
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from sqlalchemy import BigInteger, cast, func, literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy.sql.elements import ColumnElement

SEPARATOR = "\x1f"


def _check_text(value: object, what: str, for_several: str = "pass one of its items") -> str:
    if not isinstance(value, str):
        way = "use str() if you mean its text"
        if isinstance(value, (tuple, list, set, frozenset)):
            way = for_several
        elif isinstance(value, LockKey):
            way = "pass the name itself"
        elif isinstance(value, (bytes, bytearray)):
            way = "use decode(), because str() would return another text"
        elif value is None:
            way = "str() would return the text 'None'"
        raise TypeError(f"{what} must be a str, not {type(value).__name__}: {way}")
    for bad, called in (("\x00", "NUL"), (SEPARATOR, "U+001F")):
        if bad in value:
            raise ValueError(f"{what} must not contain {called}: {value!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{what} must be valid Unicode, but contains a lone surrogate: {value!r}") from None
    # A subclass such as a str enum may format itself differently in each Python version, so only its plain text is used.
    return str.__str__(value)


def _check_name(value: object) -> str:
    name = _check_text(value, "a lock name", "pass several names one by one, as in *names")
    if not name:
        raise ValueError("a lock name must not be empty")
    return name


def _check_integer(value: object, bits: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ValueError(f"{what} must fit into a signed {bits}-bit integer, but is {value}")
    return int.__int__(value)


class KeyFamily(Protocol):
    """A function that maps the ids of one family to keys; see `LockKey.family`."""

    def __call__(self, ident: str | int, /) -> LockKey:
        """Return the key of one id."""
        ...


@total_ordering
class LockKey:
    """A key of PostgreSQL's advisory locks. It is frozen and hashable, and ordered by space and value.

    Two keys are equal if PostgreSQL considers them the same lock, whatever their names.
    Create one with `of`, `raw`, `pair` or a `family`.
    """

    __slots__ = ("_hashed", "_name", "_space", "_value")

    _value: int
    _space: Literal["bigint", "pair"]
    _name: str | None
    _hashed: str | None

    def __init__(self) -> None:
        raise TypeError(
            "LockKey() cannot be called: use LockKey.of(name), LockKey.raw(number), LockKey.pair(a, b) or LockKey.family(name)"
        )

    @classmethod
    def _make(cls, value: int, space: Literal["bigint", "pair"], name: str | None, hashed: str | None) -> LockKey:
        key = object.__new__(cls)
        _SET_VALUE(key, value)
        _SET_SPACE(key, space)
        _SET_NAME(key, name)
        _SET_HASHED(key, hashed)
        return key

    @classmethod
    def of(cls, name: str, *, namespace: str = "") -> LockKey:
        """Return the key of a name.

        The configured namespace is not added, because a LockKey is always used unchanged.

        Raises:
            TypeError: the name or the namespace is not a str.
            ValueError: the name is empty, or one of them contains NUL, U+001F or a lone surrogate.
        """
        return _key_of(_check_name(name), _check_text(namespace, "a namespace"))

    @classmethod
    def raw(cls, value: int) -> LockKey:
        """Return the key that other programs pass to PostgreSQL's advisory lock functions as one bigint.

        Raises:
            TypeError: the number is not an int, or is a bool.
            ValueError: the number does not fit into a signed 64-bit integer.
        """
        return cls._make(_check_integer(value, 64, "a raw key"), "bigint", None, None)

    @classmethod
    def pair(cls, classid: int, objid: int) -> LockKey:
        """Return the key that other programs pass to PostgreSQL's advisory lock functions as two int4 values.

        Raises:
            TypeError: one of the numbers is not an int, or is a bool.
            ValueError: one of the numbers does not fit into a signed 32-bit integer.
        """
        high, low = _check_integer(classid, 32, "classid"), _check_integer(objid, 32, "objid")
        return cls._make(high << 32 | low & 0xFFFFFFFF, "pair", None, None)

    @classmethod
    def family(cls, name: str, *, namespace: str = "") -> KeyFamily:
        """Return a function that maps an id to the key `LockKey.of(f"{name}:{id}", namespace=namespace)`.

        The ids 42 and "42" have the same key. A colon in an id has no special meaning: the id "b:c" of the family "a" and the id
        "c" of the family "a:b" have the same key, so choose family names for which this cannot happen.

        Raises:
            TypeError, ValueError: the name is not usable; see `of`. The returned function raises the same errors for an id.
        """
        cls.of(name, namespace=namespace)
        stem = _check_text(name, "a lock name") + ":"

        def key_of(ident: str | int, /) -> LockKey:
            if isinstance(ident, bool) or not isinstance(ident, (str, int)):
                raise TypeError(f"the id of a key must be a str or an int, not {type(ident).__name__}")
            part = _check_text(ident, "the id of a key") if isinstance(ident, str) else int.__repr__(ident)
            if not part:
                raise ValueError("the id of a key must not be empty")
            return cls.of(stem + part, namespace=namespace)

        return key_of

    @property
    def value(self) -> int:
        """The signed 64-bit number. For a pair, `classid` is its upper half and `objid` its lower half."""
        return self._value

    @property
    def space(self) -> Literal["bigint", "pair"]:
        """The PostgreSQL key space to which the key belongs."""
        return self._space

    @property
    def name(self) -> str | None:
        """The name from which the key was computed, or None if the key was created from numbers."""
        return self._name

    @property
    def sql(self) -> ColumnElement[int]:
        """The key as a SQL expression. The server computes it from the name; for a key without a name, it is the 64-bit value."""
        if self._hashed is None:
            return cast(literal(self._value, BigInteger), BigInteger)
        # Imported here because it loads every driver's dialect, which would take more than half of the time of `import pgfence`.
        from sqlalchemy.dialects.postgresql import BIT

        pg = func.pg_catalog
        digest = pg.encode(pg.sha256(pg.convert_to(self._hashed, "UTF8")), "hex")
        return cast(cast(literal("x").concat(pg.left(digest, 16)), BIT(64)), BigInteger)

    @property
    def label(self) -> str:
        """The name as shown in messages, or `key 42` or `key (4, 2)` for a key without a name."""
        if self._name is not None:
            return self._name
        return f"key {self._value}" if self._space == "bigint" else f"key {self.halves}"

    @property
    def halves(self) -> tuple[int, int]:
        """The value as two signed int4 numbers. For a pair, these are the arguments of `pair`."""
        low = self._value & 0xFFFFFFFF
        return self._value >> 32, low - (1 << 32) if low >> 31 else low

    @property
    def _turnstile(self) -> LockKey:
        """The second key of a reader/writer lock. A name cannot contain U+001F, so no name has this key."""
        numbers = f"raw:{self._value}" if self._space == "bigint" else "pair:{}:{}".format(*self.halves)
        text = self._hashed if self._hashed is not None else SEPARATOR + numbers
        return _hash_text(text + SEPARATOR + "turnstile")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a LockKey is immutable")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a LockKey is immutable")

    def __reduce__(self) -> tuple[object, ...]:
        return LockKey._make, (self._value, self._space, self._name, self._hashed)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LockKey):
            return NotImplemented
        return self._value == other._value and self._space == other._space

    def __lt__(self, other: LockKey) -> bool:
        if not isinstance(other, LockKey):
            return NotImplemented
        return (self._space, self._value) < (other._space, other._value)

    def __hash__(self) -> int:
        return hash((self._space, self._value))

    def __repr__(self) -> str:
        return f"<LockKey {self.label!r}, {self._space} {self._value}>"


# A lock of a thousand names creates a thousand keys, and object.__setattr__ would look up each slot by its name.
_SET_VALUE, _SET_SPACE, _SET_NAME, _SET_HASHED = (
    vars(LockKey)[slot].__set__ for slot in ("_value", "_space", "_name", "_hashed")
)
_FIRST_8_OF_32 = struct.Struct(">q24x")


def _hash_names(names: Sequence[str], namespace: str) -> list[LockKey]:
    """Return the keys of names that were already checked."""
    sha256 = hashlib.sha256
    hashed = [namespace + SEPARATOR + name for name in names]
    digests = b"".join([sha256(text.encode()).digest() for text in hashed])
    values = [value for (value,) in _FIRST_8_OF_32.iter_unpack(digests)]
    keys = list(map(object.__new__, repeat(LockKey, len(names))))
    # Slot by slot, because a call of `LockKey._make` for each name would take longer than hashing it.
    for set_slot, column in (
        (_SET_VALUE, values),
        (_SET_SPACE, repeat("bigint")),
        (_SET_NAME, names),
        (_SET_HASHED, hashed),
    ):
        deque(map(set_slot, keys, column), maxlen=0)
    return keys


@lru_cache(maxsize=1024)
def _hash_text(text: str) -> LockKey:
    (value,) = struct.unpack(">q", hashlib.sha256(text.encode()).digest()[:8])
    return LockKey._make(value, "bigint", None, text)


@lru_cache(maxsize=1024)
def _key_of(name: str, namespace: str) -> LockKey:
    return _hash_names((name,), namespace)[0]


Name: TypeAlias = str | LockKey

_FEW = 100
"""Locks with more names bypass the cache, which they would fill, and have all of their names checked at once."""


def check_names(names: Sequence[Name], namespace: str = "") -> None:
    """Raise the errors that `resolve` would raise, without hashing the names. The namespace may not be known yet.

    Raises:
        ValueError: no name was given, or a name is not usable.
        TypeError: a name is neither a str nor a LockKey.
    """
    _check_text(namespace, "a namespace")
    if not names:
        raise ValueError("a lock needs at least one name")
    if len(names) <= _FEW or not _find_plain(names):
        for name in names:
            if not isinstance(name, LockKey):
                _check_name(name)


def list_labels(names: Iterable[Name]) -> tuple[str, ...]:
    """Return the labels of names for messages, without duplicates."""
    return tuple(dict.fromkeys([name if isinstance(name, str) else name.label for name in names]))


def resolve(names: Iterable[Name], namespace: str) -> tuple[LockKey, ...]:
    """Return the keys of names, sorted and without duplicates. Every lock with several names acquires its keys in this order.

    Raises:
        ValueError: no name was given, or a name is not usable.
        TypeError: a name is neither a str nor a LockKey.
    """
    names = tuple(names)
    if not names:
        raise ValueError("a lock needs at least one name")
    if texts := _find_plain(names) if len(names) > _FEW else []:
        keys = _hash_names(texts, _check_text(namespace, "a namespace"))
        by_value = dict(zip([key._value for key in reversed(keys)], reversed(keys), strict=True))
        return tuple([by_value[value] for value in sorted(by_value)])
    keys = [name if isinstance(name, LockKey) else LockKey.of(name, namespace=namespace) for name in names]
    if len(keys) == 1:
        return (keys[0],)
    # The keys are sorted as numbers, because comparing two keys takes longer than hashing a name.
    bigints = {key._value: key for key in reversed(keys) if key._space == "bigint"}
    pairs = {key._value: key for key in reversed(keys) if key._space == "pair"}
    return tuple([one[value] for one in (bigints, pairs) for value in sorted(one)])


def _find_plain(names: Sequence[Name]) -> list[str]:
    """Return the names if all are str that `LockKey.of` accepts, and an empty list otherwise.

    All names are checked at once, as one concatenated text.
    """
    texts = [name for name in names if type(name) is str]
    whole = SEPARATOR.join(texts)
    if len(texts) < len(names) or not all(texts) or whole.count(SEPARATOR) >= len(texts) or "\x00" in whole:
        return []
    try:
        whole.encode()
    except UnicodeEncodeError:
        return []
    return texts


LONGEST_STORED = 255


def qualify_name(name: object, namespace: str, what: str = "a name", longest: int = LONGEST_STORED) -> str:
    """Return the text under which a name is stored in a table, which is the name itself, or namespace + U+001F + name.

    Raises:
        TypeError: the name is not a str. A LockKey is rejected too, because it has no text.
        ValueError: the name is empty, longer than `longest` characters with its namespace, or contains NUL, U+001F or a lone
            surrogate.
    """
    text = _check_text(name, what)
    if not text:
        raise ValueError(f"{what} must not be empty")
    namespace = _check_text(namespace, "a namespace")
    whole = namespace + SEPARATOR + text if namespace else text
    if len(whole) > longest:
        raise ValueError(
            f"{what} must not be longer than {longest} characters with its namespace, but has {len(whole)}"
        )
    return whole


def unqualify_name(text: str) -> str:
    """Return a stored name as messages show it, with a colon after the namespace."""
    return text.replace(SEPARATOR, ":")
