"""Keys of other libraries, so that old and new code exclude each other during a migration.

Each function returns the key that the other library would lock for the same name, as a `LockKey`. Use it alone or together with a
name, as in `AdvisoryLock(engine, pals_key("myapp", "billing"), "billing")`. Use these keys only during the migration, and plain
names in new code, because, depending on the library, these keys have fewer bits, have no namespace or depend on the machine's
byte order.

pals and sqlalchemy-dlock use the byte order of the host. This module computes the keys of little-endian machines, such as x86 and
ARM. On a big-endian machine, such as s390x, the old code locks other keys.

A name is used exactly as the other library uses it. If that library does not check a name, neither does this module, because
empty names and names with NUL may be in use.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, overload

from sqlalchemy import Connection, Text, cast, func, literal, select

from pgfence._sql.encoding import translate_text_errors
from pgfence.keys import LockKey

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

__all__ = ["dlock_key", "hashtext_key", "pals_key", "pglock_key", "sha256_hex15_key", "with_advisory_lock_key"]


def pals_key(app_name: str, name: str) -> LockKey:
    """Return the key of `pals.Locker(app_name, ...).lock(name)`.

    Raises:
        TypeError: one of the names is not a str.
        ValueError: one of the names contains a lone surrogate.
    """
    text = _encode_utf8(app_name, "app_name") + b"." + _encode_utf8(name)
    return _read_little_endian(hashlib.sha1(text, usedforsecurity=False).digest())


def dlock_key(name: str | bytes | int) -> LockKey:
    """Return the key of `sqlalchemy_dlock.create_sadlock(connection, name)`. An int is the key itself.

    Raises:
        TypeError: `name` is not a str, bytes or an int, or is a bool.
        ValueError: `name` is an int that does not fit into a signed 64-bit integer, or a str with a lone surrogate.
    """
    if isinstance(name, int):
        return LockKey.raw(name)
    text = name if isinstance(name, bytes) else _encode_utf8(name, "name", "a str, bytes or an int")
    return _read_little_endian(hashlib.blake2b(text, digest_size=8).digest())


def pglock_key(name: str) -> LockKey:
    """Return the key of `pglock.advisory(name)`. For an integer id, use `LockKey.raw(id)`.

    In that library, a function that is decorated without a name has the name `module.function`.

    Raises:
        TypeError: `name` is not a str.
        ValueError: `name` is empty, which django-pglock rejects too, or contains a lone surrogate.
    """
    text = _encode_utf8(name)
    if not text:
        raise ValueError("name must not be empty")
    return _read_little_endian(hashlib.sha256(text).digest())


def with_advisory_lock_key(name: str) -> LockKey:
    """Return the key of `Model.with_advisory_lock(name)` in Rails, which is the pair (31 bits of CRC-32, 0).

    This key applies if `WITH_ADVISORY_LOCK_PREFIX` is not set. Otherwise, the leading digits of that setting are the second half
    of the pair, so use `LockKey.pair(with_advisory_lock_key(name).value >> 32, digits)`. Of about 55,000 names or more, two are
    likely to share a key, because it has only 31 bits.

    Raises:
        TypeError: `name` is not a str. `with_advisory_lock` uses a number unchanged, so the key of a number is
            `LockKey.pair(number, 0)`.
        ValueError: `name` contains a lone surrogate.
    """
    return LockKey.pair(zlib.crc32(_encode_utf8(name)) & 0x7FFFFFFF, 0)


def sha256_hex15_key(name: str) -> LockKey:
    """Return the key of the common expression `int(hashlib.sha256(name.encode()).hexdigest()[:15], 16)`.

    Raises:
        TypeError: `name` is not a str.
        ValueError: `name` contains a lone surrogate.
    """
    return LockKey.raw(int(hashlib.sha256(_encode_utf8(name)).hexdigest()[:15], 16))


@overload
async def hashtext_key(connection: AsyncConnection, name: str) -> LockKey: ...
@overload
def hashtext_key(connection: Connection, name: str) -> LockKey: ...
def hashtext_key(connection: Connection | AsyncConnection, name: str) -> object:
    """Return the key of `pg_advisory_lock(hashtext(name))`, which the server computes in one query.

    Only the server can compute this key, because PostgreSQL does not guarantee that `hashtext` is the same in every release. Use
    the server on which the lock is held, and do not store the result. The call leaves no transaction open that was not open
    before. The key is that of `pg_advisory_lock` with a single argument. For `pg_advisory_lock(hashtext(a), hashtext(b))`,
    query the server for both hash values and pass them to `LockKey.pair`.

    Raises:
        TypeError: `connection` is neither a Connection nor an AsyncConnection, or `name` is not a str.
        ValueError: `name` contains NUL, which PostgreSQL cannot store in text, or a lone surrogate.
    """
    if b"\0" in _encode_utf8(name):
        raise ValueError(f"name must not contain NUL: {name!r}")
    if isinstance(connection, Connection):
        return _ask_hashtext(connection, name)
    if hasattr(connection, "sync_connection"):
        return connection.run_sync(_ask_hashtext, name)
    raise TypeError(f"expected a Connection or AsyncConnection, not {type(connection).__name__}")


def _ask_hashtext(connection: Connection, name: str) -> LockKey:
    ours = not connection.in_transaction()
    try:
        with translate_text_errors(connection, name):
            asked = select(func.pg_catalog.hashtext(cast(literal(name), Text)))
            return LockKey.raw(connection.execute(asked).scalar_one())
    finally:
        if ours:
            connection.rollback()


def _encode_utf8(value: object, what: str = "name", wanted: str = "a str") -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be {wanted}, not {type(value).__name__}")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} must be valid Unicode, but contains a lone surrogate: {value!r}") from None


def _read_little_endian(digest: bytes) -> LockKey:
    return LockKey.raw(int.from_bytes(digest[:8], "little", signed=True))
