"""Keys of other libraries: equal to what the packages themselves compute."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import NullPool, create_engine
from sqlalchemy.orm import Session

from pgfence import compat
from pgfence.compat import dlock_key, hashtext_key, pals_key, pglock_key, sha256_hex15_key, with_advisory_lock_key
from pgfence.keys import LockKey, resolve
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[1] / "data"
VECTORS = json.loads((DATA / "compat_vectors.json").read_text(encoding="ascii"))
ONE_NAME: list[Callable[[Any], LockKey]] = [
    dlock_key,
    pglock_key,
    with_advisory_lock_key,
    sha256_hex15_key,
    lambda name: pals_key("app", name),
    lambda name: pals_key(name, "name"),
]

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


def vectors(library: str) -> Any:
    """Run a test on the recorded keys of one library."""
    cases = VECTORS[library]["vectors"]
    return every_row("vector", cases)


@vectors("pals")
def test_a_pals_key_is_the_one_that_pals_locks(vector: dict[str, str]) -> None:
    """The key of an application name and a lock name is what pals computes."""
    assert pals_key(vector["app_name"], vector["name"]) == LockKey.raw(int(vector["value"]))


@vectors("dlock")
def test_a_dlock_key_is_the_one_that_sqlalchemy_dlock_locks(vector: dict[str, str]) -> None:
    """Text, bytes and integers give what sqlalchemy-dlock computes; an int is the key itself."""
    name: str | bytes | int
    if "bytes_hex" in vector:
        name = bytes.fromhex(vector["bytes_hex"])
    else:
        name = int(vector["integer"]) if "integer" in vector else vector["name"]
    assert dlock_key(name) == LockKey.raw(int(vector["value"]))


@vectors("pglock")
def test_a_pglock_key_is_the_one_that_django_pglock_locks(vector: dict[str, str]) -> None:
    """The key of a name is what django-pglock computes."""
    assert pglock_key(vector["name"]) == LockKey.raw(int(vector["value"]))


@vectors("with_advisory_lock")
def test_a_with_advisory_lock_key_is_the_one_that_rails_locks(vector: dict[str, Any]) -> None:
    """The key of a name is the pair that the gem computes."""
    assert with_advisory_lock_key(vector["name"]) == LockKey.pair(vector["classid"], vector["objid"])


@vectors("sha256_hex15")
def test_a_sha256_hex15_key_is_the_hand_written_one(vector: dict[str, str]) -> None:
    """The key of a name is 15 hexadecimal digits of SHA-256 as one number."""
    assert sha256_hex15_key(vector["name"]) == LockKey.raw(int(vector["value"]))


@pytest.mark.skipif(sys.byteorder != "little", reason="the packages take the byte order of the host")
@pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in ("pals", "pglock", "sqlalchemy_dlock")),
    reason="needs pals, sqlalchemy-dlock and django-pglock (the dependency group bench)",
)
def test_the_recorded_keys_are_what_the_installed_packages_compute() -> None:
    """If the packages are installed, they compute the keys again, which must equal those of the data file."""
    script = [sys.executable, str(DATA / "make_compat_vectors.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@given(texts, texts)
def test_any_name_that_the_others_take_has_a_key(name: str, app_name: str) -> None:
    """Any text gives a key of 64 bits, NUL and U+001F included: they may be in use elsewhere."""
    bigints = [pals_key(app_name, name), dlock_key(name), pglock_key(name), sha256_hex15_key(name)]
    for key in bigints:
        assert key.space == "bigint"
        assert key.name is None
    assert 0 <= sha256_hex15_key(name).value < 2**60
    pair = with_advisory_lock_key(name)
    assert pair.space == "pair"
    assert 0 <= pair.value < 2**63
    assert pair.value & 0xFFFFFFFF == 0


@given(texts)
def test_old_and_new_key_are_two_locks_in_one_order(name: str) -> None:
    """Beside a name the old key is a second key; bigints come first, so that Rails' pair is last, everywhere."""
    name = name.replace("\x00", "-").replace("\x1f", "-")
    for old in (pals_key("app", name), with_advisory_lock_key(name)):
        assert len(resolve([old, name], "")) == 2
        assert resolve([old, name], "") == resolve([name, old], "")
    assert resolve([with_advisory_lock_key(name), name], "")[-1].space == "pair"


@every_row("make", ONE_NAME)
@every_row("name", [None, 1.0, True, UUID(int=1), ["a"], bytearray(b"a")])
def test_a_name_of_the_wrong_type_is_rejected(make: Callable[[Any], LockKey], name: object) -> None:
    """A value that is not a name is a TypeError, also a bool: it is never locked as 1."""
    with pytest.raises(TypeError, match="must be"):
        make(name)


@every_row("make", ONE_NAME[1:])
@every_row("name", [7, b"a"])
def test_numbers_and_bytes_are_names_for_dlock_alone(make: Callable[[Any], LockKey], name: object) -> None:
    """An int or bytes name raises TypeError if the other library does not accept it."""
    with pytest.raises(TypeError, match="must be a str"):
        make(name)


@every_row("make", ONE_NAME)
def test_a_lone_surrogate_is_rejected(make: Callable[[Any], LockKey]) -> None:
    """Text that has no UTF-8 is a ValueError that says so."""
    with pytest.raises(ValueError, match="lone surrogate"):
        make("a\ud800")


@every_row("number", [2**63, -(2**63) - 1])
def test_an_integer_beyond_64_bits_is_rejected(number: int) -> None:
    """C025: sqlalchemy-dlock raises for it too, so no old lock can have that key."""
    with pytest.raises(ValueError, match="64-bit"):
        dlock_key(number)


def test_an_empty_name_is_rejected_as_in_django_pglock() -> None:
    """django-pglock locks nothing without a name."""
    with pytest.raises(ValueError, match="empty"):
        pglock_key("")


def test_the_second_half_of_a_rails_prefix_is_added_as_documented() -> None:
    """With WITH_ADVISORY_LOCK_PREFIX=12 the gem locks (1814187178, 12) for "billing"."""
    assert LockKey.pair(with_advisory_lock_key("billing").value >> 32, 12) == LockKey.pair(1814187178, 12)


@every_row("thing", [None, "postgresql://app:secret@db/app", create_engine("sqlite://"), Session()])
def test_hashtext_asks_a_connection_and_nothing_else(thing: Any) -> None:
    """An engine, a Session or a URL raises TypeError, and the message does not contain its text."""
    with pytest.raises(TypeError, match="Connection") as caught:
        hashtext_key(thing, "billing")
    assert "secret" not in str(caught.value)


@every_row(("name", "error"), [(7, TypeError), (b"a", TypeError), ("a\x00", ValueError), ("\ud800", ValueError)])
def test_hashtext_rejects_a_name_that_the_server_cannot_have(name: Any, error: type[Exception]) -> None:
    """Another type, NUL or a lone surrogate never reaches the driver."""
    with create_engine("sqlite://", poolclass=NullPool).connect() as connection, pytest.raises(error):
        hashtext_key(connection, name)


def test_compat_exports_its_functions() -> None:
    """The public names of the module are the six functions."""
    assert compat.__all__ == sorted(compat.__all__)
    assert all(callable(getattr(compat, name)) for name in compat.__all__)
    assert len(compat.__all__) == 6
